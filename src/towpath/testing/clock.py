"""A clock that moves only by its methods."""

from __future__ import annotations

from towpath.core import checks

START = 1_700_000_000 * checks.SECOND
"""The time at which every test begins (2023-11-14T22:13:20Z)."""


class ManualClock:
    """A `Clock` that stands still until `advance` or `set`."""

    def __init__(self, now: int = START) -> None:
        self._now = now

    def now(self) -> int:
        return self._now

    def advance(self, seconds: float = 0, *, micros: int = 0) -> int:
        """Move the clock forward; return the new time."""
        self._now += checks.micros(seconds, "seconds") + micros
        return self._now

    def set(self, now: int) -> None:
        """Set any time, also an earlier one."""
        self._now = now
