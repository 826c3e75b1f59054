"""Towpath: durable work for Python.

This is the whole public surface. An `App` is the front door: tasks, messages, schedules, workers. Below it,
`open_ledger` opens a ledger; `towpath.commands` are the commands that a ledger applies and the results that
it returns; `towpath.errors` are the errors, `towpath.events` the events of `app.bus`. Two modules with
optional dependencies are public too and are imported by name: `towpath.observe.metrics` and
`towpath.testing`. All other names may change without notice.

A name is imported when it is first used, so that a program (and above all the command line) loads only the
modules that it needs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from towpath import commands, errors, events
    from towpath.app import App
    from towpath.core.breaker import Breaker
    from towpath.core.checks import micros
    from towpath.core.commands import Selector
    from towpath.core.explain import Explanation
    from towpath.core.job import After, ClaimedJob, Job, Key, KeyPolicy, Reason, Spec, State
    from towpath.core.lanes import Lane
    from towpath.core.limits import Rate
    from towpath.core.retry import Exponential, Policy
    from towpath.core.schedule import Schedule, next_fire
    from towpath.core.views import GroupView, NoteView, PartView, Query, QueueView
    from towpath.ledger import Ledger, open_ledger
    from towpath.ledger.sqlite import SqliteLedger, SqliteOptions
    from towpath.operations.bandwidth import Bandwidth
    from towpath.operations.breakers import breaker
    from towpath.operations.progress import Snapshot
    from towpath.queues.message import Message, Queue
    from towpath.tasks.context import Running, current
    from towpath.tasks.handles import GroupHandle, JobHandle
    from towpath.tasks.new_jobs import new_id
    from towpath.tasks.outcomes import BreakerOpen, Cancel, Fail, Retry, Snooze, StopRequested, Throttled
    from towpath.tasks.task import Call, Task

__all__ = [
    "After",
    "App",
    "Bandwidth",
    "Breaker",
    "BreakerOpen",
    "Call",
    "Cancel",
    "ClaimedJob",
    "Explanation",
    "Exponential",
    "Fail",
    "GroupHandle",
    "GroupView",
    "Job",
    "JobHandle",
    "Key",
    "KeyPolicy",
    "Lane",
    "Ledger",
    "Message",
    "NoteView",
    "PartView",
    "Policy",
    "Query",
    "Queue",
    "QueueView",
    "Rate",
    "Reason",
    "Retry",
    "Running",
    "Schedule",
    "Selector",
    "Snapshot",
    "Snooze",
    "Spec",
    "SqliteLedger",
    "SqliteOptions",
    "State",
    "StopRequested",
    "Task",
    "Throttled",
    "breaker",
    "commands",
    "current",
    "errors",
    "events",
    "micros",
    "new_id",
    "next_fire",
    "open_ledger",
]

_HOMES = {
    "towpath.app": "App",
    "towpath.operations.bandwidth": "Bandwidth",
    "towpath.operations.breakers": "breaker",
    "towpath.tasks.context": "Running current",
    "towpath.tasks.outcomes": "BreakerOpen Cancel Fail Retry Snooze StopRequested Throttled",
    "towpath.core.breaker": "Breaker",
    "towpath.core.checks": "micros",
    "towpath.core.commands": "Selector",
    "towpath.core.explain": "Explanation",
    "towpath.core.job": "After ClaimedJob Job Key KeyPolicy Reason Spec State",
    "towpath.core.lanes": "Lane",
    "towpath.core.limits": "Rate",
    "towpath.core.retry": "Exponential Policy",
    "towpath.core.schedule": "Schedule next_fire",
    "towpath.core.views": "GroupView NoteView PartView Query QueueView",
    "towpath.tasks.handles": "GroupHandle JobHandle",
    "towpath.ledger": "Ledger open_ledger",
    "towpath.ledger.sqlite": "SqliteLedger SqliteOptions",
    "towpath.operations.progress": "Snapshot",
    "towpath.queues.message": "Message Queue",
    "towpath.tasks.new_jobs": "new_id",
    "towpath.tasks.task": "Call Task",
}
"""The imports above again, for run time: module -> names."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split(" ")}

# Hidden from type checkers, which would take it as a promise that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOME.get(name)
        found = import_module(f"{__name__}.{name}") if home is None else getattr(import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
