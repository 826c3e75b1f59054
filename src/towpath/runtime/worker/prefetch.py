"""How far ahead of its slots a worker claims, and the count of what it holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from towpath.runtime.worker.options import EndedClaim

MAX_AHEAD = 2_000
"""Claims ahead of the slots. More would only make batches longer, and longer batches ask for more."""
AHEAD_PER_SLOT = 4
"""The same for each slot, where handlers take longer than `LONG` or use `commit`."""
LONG_JOB = 0.010
"""Seconds."""
MAX_UNSETTLED, UNSETTLED_PER_SLOT = 256, 4
"""Handlers that ended and are not settled: at most the first number, or the second for each slot if that is
more. A killed process has these run again."""
MIN_WAIT = 0.05
"""Seconds that a claim may wait for a slot in any case, before it is given back."""
WINDOW = 0.001
"""Seconds of work that a rate is measured over, at least."""
MEMORY = 1.0
"""Seconds without work after which earlier measurements are dropped."""


def max_unsettled(slots: int) -> int:
    """How many handlers may have ended without a settle, in a worker with so many slots."""
    return max(MAX_UNSETTLED, UNSETTLED_PER_SLOT * slots)


class ClaimCounts:
    """The claims of one worker: claimed and not started, running, ended and not settled. Both counters are
    written under the commit lock only. `leaving` counts the settles of the batch that is being applied."""

    def __init__(self) -> None:
        self.taken = 0
        self.settled = 0
        self.leaving: Callable[[], int] = int

    @property
    def held(self) -> int:
        """Claims that the ledger will have for this worker when the batch that is being applied is committed,
        without new ones."""
        return self.taken - self.settled - self.leaving()


class PrefetchLimit:
    """How many jobs start within two commits: that many may be claimed ahead of the slots.

    The rate is that of a worker with enough to do. While slots are free and no claim is at hand (`starved`),
    time does not count: else a worker that waits for its claims would think itself slow, and ask for few. The
    methods that measure belong to the worker's loop; `committed` and those that read may be called from any
    thread. With `slow_start` no more is claimed ahead than half of what ended."""

    def __init__(
        self, slots: int, clock: Callable[[], float] = time.monotonic, slow_start: bool = False
    ) -> None:
        self.slots = slots
        self._slow_start = slow_start
        self._ended = 0
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
        self._within_at = -math.inf
        """When a handler last used `commit`."""

    def fed(self, took: float = 0.0) -> None:
        """There are claims for it, by a commit that took so many seconds."""
        # A worker that has just begun has no other to go by.
        self._commit = self._commit or min(took, 1.0)
        if self._since is None:
            now = self._clock()
            if now - self._starved_at > MEMORY:
                self._rate = self._busy = 0.0
                self._count = self._ended = 0
            self._since = now

    def starved(self) -> None:
        """Slots are free, and there is nothing to start."""
        if self._since is not None:
            self._starved_at = self._clock()
            self._busy += self._starved_at - self._since
            self._since = None

    def forget(self) -> None:
        """Claim nothing ahead until more jobs have ended."""
        self._rate = 0.0
        self._ended = 0

    def ended(self, count: int, seconds: float, within: bool = False) -> None:
        """So many handlers, which took so long together; some of them used `commit`, or none did."""
        self._count += count
        self._ended += count
        self._each = 0.5 * self._each + 0.5 * seconds / count if self._each else seconds / count
        now = self._clock()
        if within:
            self._within_at = now
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

    @property
    def patience(self) -> float:
        """Seconds within which a claim must start; one that cannot is given back. A claim is made ahead if it
        should start within two commits."""
        return max(MIN_WAIT, 4 * 2 * self._commit)

    def startable(self) -> int:
        """How many jobs can start within `patience`."""
        return int(self._current(self._clock()) * self.patience)

    def ahead(self) -> int:
        now = self._clock()
        rate = self._current(now)
        limited = self._each > LONG_JOB or now - self._within_at < MEMORY
        most = min(MAX_AHEAD, AHEAD_PER_SLOT * self.slots) if limited else MAX_AHEAD
        if self._slow_start:
            most = min(most, self._ended // 2)
        return min(most, math.ceil(2 * rate * self._commit), int(rate * self.patience))

    def _current(self, now: float) -> float:
        """Jobs per second."""
        spent = self._spent(now)
        # Where jobs have become slower, that they have not ended yet is the first sign.
        rate = min(self._rate, (self._count + 1) / spent) if spent >= 10 * WINDOW else self._rate
        # Jobs that began together end together, which looks fast: but no slot ends more than it has time for.
        return min(rate, self.slots / self._each) if self._each else rate

    def _spent(self, now: float) -> float:
        since = self._since
        return self._busy if since is None else self._busy + now - since


class PrefetchLimits:
    """The pace of each line of claims on its own: the long jobs of one lane say nothing about those of
    another. `line_of` finds the line of a queue, None if there is no such line any more."""

    def __init__(
        self, slots: int, lines: int = 1, line_of: Callable[[str], int | None] | None = None
    ) -> None:
        self.each = [PrefetchLimit(slots, slow_start=line_of is not None) for _ in range(lines)]
        self._line_of = line_of or (lambda queue: 0)
        self.starts = [0] * lines
        """Since `watch`."""

    def ahead(self) -> list[int]:
        """How many to claim ahead on each line, and not too many together."""
        ahead = [pace.ahead() for pace in self.each]
        return (
            ahead if (total := sum(ahead)) <= MAX_AHEAD else [count * MAX_AHEAD // total for count in ahead]
        )

    def measure(self, ended: Sequence[EndedClaim]) -> None:
        """These claims ended; where no handler was called, that says nothing."""
        by_line: dict[int | None, list[EndedClaim]] = {}
        for one in ended:
            if one[3] is not None:
                by_line.setdefault(self._line_of(one[1].queue), []).append(one)
        for line, mine in by_line.items():
            if line is not None:
                within = any(settle.within is not None for settle, _, _, _ in mine)
                self.each[line].ended(len(mine), sum([spent for _, _, spent, _ in mine]), within)

    def committed(self, seconds: float) -> None:
        """From any thread: settles were answered so many seconds after they were handed over."""
        for pace in self.each:
            pace.committed(seconds)

    @property
    def patience(self) -> float:
        """Seconds within which a claim must start."""
        return max([pace.patience for pace in self.each])

    def watch(self) -> None:
        """Count starts from now on, for `keep`."""
        self.starts = [0] * len(self.starts)

    def keep(self, line: int) -> int:
        """How many claims of a line can start within `patience`, which has passed since `watch`. The larger
        of two estimates: neither a burst nor a moment without ends should send claims back."""
        return max(2 * self.starts[line], self.each[line].startable())
