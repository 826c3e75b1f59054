"""Forks of a process that has ledgers open. Its child has none: the connections are the parent's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol
from weakref import WeakSet

PATIENCE: Final = 2.0
"""Seconds that a fork waits for threads that are inside SQLite."""


class Forkable(Protocol):
    def _inside_locks(self) -> Sequence[threading.Lock]:
        """The locks that the threads hold which are inside SQLite, without those of this thread."""
        ...

    def _left_to_parent(self) -> None:
        """This is the child: never touch the connections again."""
        ...


open_here: WeakSet[Forkable] = WeakSet()
_held = threading.local()


def _before() -> None:
    """Nobody is inside SQLite while we fork. A mutex of the library that another thread holds then (each allocation takes one) would
    stay locked in the child for ever, and the child could not open a ledger of its own."""
    deadline = time.monotonic() + PATIENCE
    _held.locks = []
    for ledger in list(open_here):
        for lock in ledger._inside_locks():
            if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                _held.locks.append(lock)


def _let_go() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _in_child() -> None:
    for ledger in list(open_here):
        ledger._left_to_parent()
    _let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_let_go, after_in_child=_in_child)
