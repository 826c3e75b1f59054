"""Towpath: durable work for Python.

This is the whole public surface. An `App` is the front door: tasks, messages, schedules, workers. Below it,
`open_ledger` opens a ledger; `towpath.commands` is the language of ledgers: commands, results, queries and
records. `towpath.errors` are the errors, `towpath.events` the events of `app.bus`. A span is seconds or a
timedelta, a time is a datetime with a time zone; only ledgers and their language count whole microseconds.
Two modules with optional dependencies are public too and are imported by name: `towpath.observe.metrics` and
`towpath.testing`. All other names may change without notice.

A name is imported when it is first used, so that a program (and above all the command line) loads only the
modules that it needs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from towpath import commands, errors, events
    from towpath.app import App
    from towpath.commands import ClaimedJob as ClaimedJob
    from towpath.commands import GroupView as GroupView
    from towpath.commands import Job as Job
    from towpath.commands import Key as Key
    from towpath.commands import KeyPolicy as KeyPolicy
    from towpath.commands import NoteView as NoteView
    from towpath.commands import PartView as PartView
    from towpath.commands import Query as Query
    from towpath.commands import QueueView as QueueView
    from towpath.commands import Schedule as Schedule
    from towpath.commands import Selector as Selector
    from towpath.commands import Spec as Spec
    from towpath.commands import micros as micros
    from towpath.commands import next_fire as next_fire
    from towpath.core.breaker import Breaker
    from towpath.core.explain import Explanation
    from towpath.core.job import After, Reason, State
    from towpath.core.lanes import Lane
    from towpath.core.limits import Rate
    from towpath.core.retry import Exponential, Policy
    from towpath.core.views import GroupStatus, JobStatus
    from towpath.flows.actions import Http, Shell, Sql
    from towpath.flows.plan import Plan, Step, StepKind, StepRetry
    from towpath.flows.status import PlanStatus
    from towpath.ledger import Ledger, open_ledger
    from towpath.ledger.sqlite import SqliteLedger, SqliteOptions
    from towpath.operations.bandwidth import Bandwidth
    from towpath.operations.breakers import breaker
    from towpath.operations.progress import Snapshot
    from towpath.queues.message import Message, Queue
    from towpath.queues.queue import PartStatus, QueueStatus
    from towpath.tasks.context import Running, current
    from towpath.tasks.handles import GroupHandle, JobHandle
    from towpath.tasks.hooks import Hooks, JobFailure, provided
    from towpath.tasks.log_fields import JobLogFilter
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
    "Explanation",
    "Exponential",
    "Fail",
    "GroupHandle",
    "GroupStatus",
    "Hooks",
    "Http",
    "JobFailure",
    "JobHandle",
    "JobLogFilter",
    "JobStatus",
    "Lane",
    "Ledger",
    "Message",
    "PartStatus",
    "Plan",
    "PlanStatus",
    "Policy",
    "Queue",
    "QueueStatus",
    "Rate",
    "Reason",
    "Retry",
    "Running",
    "Shell",
    "Snapshot",
    "Snooze",
    "Sql",
    "SqliteLedger",
    "SqliteOptions",
    "State",
    "Step",
    "StepKind",
    "StepRetry",
    "StopRequested",
    "Task",
    "Throttled",
    "breaker",
    "commands",
    "current",
    "errors",
    "events",
    "new_id",
    "open_ledger",
    "provided",
]

_HOMES = {
    "towpath.app": "App",
    "towpath.operations.bandwidth": "Bandwidth",
    "towpath.operations.breakers": "breaker",
    "towpath.tasks.context": "Running current",
    "towpath.tasks.outcomes": "BreakerOpen Cancel Fail Retry Snooze StopRequested Throttled",
    "towpath.core.breaker": "Breaker",
    "towpath.core.explain": "Explanation",
    "towpath.core.job": "After Reason State",
    "towpath.core.lanes": "Lane",
    "towpath.core.limits": "Rate",
    "towpath.core.retry": "Exponential Policy",
    "towpath.tasks.handles": "GroupHandle JobHandle",
    "towpath.tasks.hooks": "Hooks JobFailure provided",
    "towpath.tasks.log_fields": "JobLogFilter",
    "towpath.flows.actions": "Http Shell Sql",
    "towpath.flows.plan": "Plan Step StepKind StepRetry",
    "towpath.flows.status": "PlanStatus",
    "towpath.ledger": "Ledger open_ledger",
    "towpath.ledger.sqlite": "SqliteLedger SqliteOptions",
    "towpath.operations.progress": "Snapshot",
    "towpath.queues.message": "Message Queue",
    "towpath.queues.queue": "PartStatus QueueStatus",
    "towpath.tasks.new_jobs": "new_id",
    "towpath.core.views": "GroupStatus JobStatus",
    "towpath.tasks.task": "Call Task",
}
"""The imports above again, for run time: module -> names."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split(" ")}

_LANGUAGE = (
    "ClaimedJob GroupView Job Key KeyPolicy NoteView PartView Query QueueView Schedule Selector Spec "
    "micros next_fire"
)
_HOME |= dict.fromkeys(_LANGUAGE.split(), "towpath.commands")
"""Names of the language of ledgers that can be imported from here too. They are not listed in `__all__`:
their home is `towpath.commands`."""

# Hidden from type checkers, which would take it as a promise that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__ and name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOME.get(name)
        found = import_module(f"{__name__}.{name}") if home is None else getattr(import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
