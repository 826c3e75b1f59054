"""Faults for tests: kill the process or raise an error at a named point of a batch.

    SqliteLedger(path, SqliteOptions(fault=die_at("written", nth=3)))

kills the process the third time a batch is written and not committed. `points()` returns the names of the
points."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

from towpath.errors import InvalidInput

Fault = Callable[[str], None]


def points() -> tuple[str, ...]:
    """The fault points of the SQLite ledger, in the order in which a batch passes them."""
    from towpath.ledger.sqlite.ledger import FAULT_POINTS

    return FAULT_POINTS


def die_at(point: str, nth: int = 1) -> Fault:
    """A fault that kills this process (SIGKILL: nothing is cleaned up) when `point` is passed for the nth
    time."""
    return _at(point, nth, _die)


def raise_at(point: str, error: BaseException, nth: int = 1) -> Fault:
    """A fault that raises `error` when `point` is passed for the nth time, and only then."""

    def fail() -> None:
        raise error

    return _at(point, nth, fail)


def _at(point: str, nth: int, act: Callable[[], None]) -> Fault:
    if point not in points():
        raise InvalidInput(field="point", value=point, expected=f"one of {', '.join(points())}")
    if nth < 1:
        raise InvalidInput(field="nth", value=nth, expected="1 or more")
    passed = itertools.count(1)

    def fault(here: str) -> None:
        if here == point and next(passed) == nth:
            act()

    return fault


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
