"""Towpath: durable work for Python.

This is the whole public surface. An `App` is the front door: tasks, messages, schedules, workers. Below it, `open_ledger` opens a
ledger and `towpath.commands` is what a ledger is told and what it answers; `towpath.errors` is what may go wrong. Whatever is not
in `__all__` may change without notice.
"""

from __future__ import annotations

from towpath import commands, errors
from towpath.app import App, new_id
from towpath.context import Running, current
from towpath.control import Cancel, Fail, Retry, Snooze
from towpath.core.checks import micros
from towpath.core.commands import Selector
from towpath.core.explain import Explanation
from towpath.core.job import After, Claim, Job, Key, KeyPolicy, Reason, Spec, State
from towpath.core.limits import Rate
from towpath.core.retry import Exponential, Policy
from towpath.core.views import Counts, GroupView, NoteView, Page, PartView, Query, QueueView
from towpath.handles import GroupHandle, JobHandle
from towpath.ledger import Ledger, open_ledger
from towpath.tasks import Call, Task

__all__ = [
    "After",
    "App",
    "Call",
    "Cancel",
    "Claim",
    "Counts",
    "Explanation",
    "Exponential",
    "Fail",
    "GroupHandle",
    "GroupView",
    "Job",
    "JobHandle",
    "Key",
    "KeyPolicy",
    "Ledger",
    "NoteView",
    "Page",
    "PartView",
    "Policy",
    "Query",
    "QueueView",
    "Rate",
    "Reason",
    "Retry",
    "Running",
    "Selector",
    "Snooze",
    "Spec",
    "State",
    "Task",
    "commands",
    "current",
    "errors",
    "micros",
    "new_id",
    "open_ledger",
]
