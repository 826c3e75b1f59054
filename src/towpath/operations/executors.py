"""Executors: how an action of a step runs on its node, one executor for each type of action.

The handlers of plans (`operations.flows`) choose the executor by the type of the action. Calls of tasks are
not here: they run in the worker itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from towpath.flows.actions import Action, Answer, Http, Shell, Sql
from towpath.settings import Settings


class ActionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The delivery for which an action runs. `job` is the id of the job, `attempt` the number of the delivery
    and `fence` its fence, for systems that refuse an older delivery. `undo`: the action is the undo of the
    step. `timeout`: that of the step, in seconds."""

    settings: Settings
    plan: str
    step: str
    job: str
    attempt: int
    fence: int
    undo: bool = False
    timeout: float | None = None


class Executor(Protocol):
    """Runs the actions of one type. Both methods are cancelled at the timeout of the step and when the worker
    stops; they must end what they have begun (kill the program, cancel the statement) before they return."""

    async def run(self, action: Any, node: str, context: ActionContext) -> Any:
        """Run the action on the node and return a result that JSON can store. An exception is a failed
        attempt, and is retried by the policy of the step; `ActionRefused` and `towpath.Fail` are final, and
        `towpath.Retry` has its own delay."""
        ...

    async def answer(self, action: Any, node: str, context: ActionContext) -> Answer:
        """Run the action as a check. An exception counts as `Answer.UNKNOWN`."""
        ...


def _sql() -> Executor:
    from towpath.operations.actions.sql import SqlExecutor

    return SqlExecutor()


def _shell() -> Executor:
    from towpath.operations.actions.shell import ShellExecutor

    return ShellExecutor()


def _http() -> Executor:
    from towpath.operations.actions.http import HttpExecutor

    return HttpExecutor()


EXECUTORS: Mapping[type[Action], Callable[[], Executor]] = {Sql: _sql, Shell: _shell, Http: _http}
"""For each type of action: the function that makes its executor. It is called once per process, on first
use, so that it may import an optional package."""
