"""Towpath: durable work for Python.

This is the whole public surface. `open_ledger` opens a ledger, `towpath.commands` is what a ledger is told and what it
answers, `towpath.errors` is what may go wrong. Whatever is not in `__all__` may change without notice.
"""

from __future__ import annotations

from towpath import commands, errors
from towpath.app import new_id
from towpath.core.checks import micros
from towpath.core.commands import Selector
from towpath.core.explain import Explanation
from towpath.core.job import (
    After,
    Claim,
    Done,
    Fail,
    Job,
    Key,
    KeyPolicy,
    Reason,
    Refuse,
    Release,
    Retry,
    Snooze,
    Spec,
    State,
    Stop,
)
from towpath.core.limits import Rate
from towpath.core.views import Counts, GroupView, NoteView, Page, PartView, Query, QueueView
from towpath.ledger import Ledger, open_ledger

__all__ = [
    "After",
    "Claim",
    "Counts",
    "Done",
    "Explanation",
    "Fail",
    "GroupView",
    "Job",
    "Key",
    "KeyPolicy",
    "Ledger",
    "NoteView",
    "Page",
    "PartView",
    "Query",
    "QueueView",
    "Rate",
    "Reason",
    "Refuse",
    "Release",
    "Retry",
    "Selector",
    "Snooze",
    "Spec",
    "State",
    "Stop",
    "commands",
    "errors",
    "micros",
    "new_id",
    "open_ledger",
]
