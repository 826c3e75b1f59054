"""How far ahead of its slots a worker claims."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_AHEAD = 2_000
"""Twice what one batch can settle. More would only make batches longer, and longer batches ask for more."""
WINDOW = 0.001
"""Seconds of work that a rate is measured over, at least."""
MEMORY = 1.0
"""Seconds without work after which what was measured before means nothing any more."""


class Pace:
    """How many jobs start within two commits: that many may be claimed ahead of the slots.

    The rate is that of a worker with enough to do. While slots are free and no claim is at hand (`starved`), time does not
    count: else a worker that waits for its claims would think itself slow, and ask for few."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self._clock = clock
        self._rate = 0.0
        self._each = 0.0
        """Seconds that a job takes."""
        self._commit = 0.0
        self._count = 0
        self._busy = 0.0
        """Seconds of work since the last measurement, up to `_since`."""
        self._since: float | None = None
        """When it got enough to do; None while it is starved."""
        self._starved_at = clock()

    def fed(self, took: float = 0.0) -> None:
        """There are claims for it, by a commit that took so many seconds."""
        # A worker that has just begun has no other to go by.
        self._commit = self._commit or min(took, 1.0)
        if self._since is None:
            now = self._clock()
            if now - self._starved_at > MEMORY:
                self._rate = self._busy = 0.0
                self._count = 0
            self._since = now

    def starved(self) -> None:
        """Slots are free, and there is nothing to start."""
        if self._since is not None:
            self._starved_at = self._clock()
            self._busy += self._starved_at - self._since
            self._since = None

    def ended(self, count: int, seconds: float) -> None:
        """So many jobs, which took so long together."""
        self._count += count
        self._each = 0.5 * self._each + 0.5 * seconds / count if self._each else seconds / count
        now = self._clock()
        spent = self._spent(now)
        if spent >= WINDOW or not self._rate:
            rate = self._count / max(spent, WINDOW)
            # Quick to grow, and a long time counts as what it was.
            self._rate = rate if spent > MEMORY or not self._rate else 0.5 * self._rate + 0.5 * rate
            self._count, self._busy = 0, 0.0
            if self._since is not None:
                self._since = now

    def committed(self, seconds: float) -> None:
        seconds = min(seconds, 1.0)
        self._commit = 0.8 * self._commit + 0.2 * seconds if self._commit else seconds

    def ahead(self) -> int:
        spent = self._spent(self._clock())
        # Where jobs have become slower, that they have not ended yet is the first to tell.
        rate = min(self._rate, (self._count + 1) / spent) if spent >= 10 * WINDOW else self._rate
        if self._each:
            # Jobs that began together end together, which looks fast: but no slot ends more than it has time for.
            rate = min(rate, self.slots / self._each)
        return min(MAX_AHEAD, math.ceil(2 * rate * self._commit))

    def _spent(self, now: float) -> float:
        return self._busy if self._since is None else self._busy + now - self._since
