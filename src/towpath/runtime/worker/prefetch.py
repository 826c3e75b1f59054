"""Prefetch: how many jobs a worker claims ahead of its free slots, and the counts of the claims that it
holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from towpath.runtime.worker.options import EndedClaim

MAX_AHEAD = 2_000
"""Claims ahead of the slots. More would make batches longer, and longer batches would raise the limit
again."""
AHEAD_PER_SLOT = 4
"""Claims ahead per slot, if handlers take longer than `LONG_JOB` or use `commit`."""
LONG_JOB = 0.010
"""Seconds."""
MAX_UNSETTLED, UNSETTLED_PER_SLOT = 256, 4
"""Handlers that ended and are not settled: at most the first number, or the second per slot if that is more.
If the process is killed, these jobs run again."""
MIN_WAIT = 0.05
"""Seconds that a claim may always wait for a slot before it is released."""
WINDOW = 0.001
"""The rate is measured over at least so many seconds of work."""
MEMORY = 1.0
"""Seconds without work after which earlier measurements are dropped."""


def max_unsettled(slots: int) -> int:
    """How many handlers may have ended without a settle in a worker with so many slots."""
    return max(MAX_UNSETTLED, UNSETTLED_PER_SLOT * slots)


class ClaimCounts:
    """The claims of one worker: buffered, running, ended and not settled. Both counters are written only
    under the commit lock. `leaving` counts the settles in the batch that is being applied. `without` returns
    the kinds that the worker leaves to others (see `Want`); it is called before every claim."""

    def __init__(self) -> None:
        self.taken = 0
        self.settled = 0
        self.leaving: Callable[[], int] = int
        self.without: Callable[[], tuple[str, ...]] = tuple

    @property
    def held(self) -> int:
        """Claims that the ledger will hold for this worker after the batch that is being applied, without the
        new ones of this batch."""
        return self.taken - self.settled - self.leaving()


class PrefetchLimit:
    """The number of jobs that start within two commits: so many may be claimed ahead of the slots.

    The rate is that of a busy worker. Time in which slots are free and no claim is buffered (`starved`) does
    not count: otherwise a worker that waits for its claims would measure a low rate and claim few. The
    measuring methods are called on the worker's loop; `committed` and the reading methods from any thread.
    With `slow_start` the limit is at most half of the jobs that ended."""

    def __init__(
        self, slots: int, clock: Callable[[], float] = time.monotonic, slow_start: bool = False
    ) -> None:
        self.slots = slots
        self._slow_start = slow_start
        self._ended = 0
        self._clock = clock
        self._rate = 0.0
        self._each = 0.0
        """Mean seconds per job."""
        self._commit = 0.0
        self._count = 0
        self._busy = 0.0
        """Seconds of work between the last measurement and `_since`."""
        self._since: float | None = None
        """Start of the current busy time; None while starved."""
        self._starved_at = clock()
        self._within_at = -math.inf
        """When a handler last used `commit`."""

    def supplied(self, took: float = 0.0) -> None:
        """Claims have arrived, by a commit that took so many seconds."""
        # The first estimate of a worker that has settled nothing yet.
        self._commit = self._commit or min(took, 1.0)
        if self._since is None:
            now = self._clock()
            if now - self._starved_at > MEMORY:
                self._rate = self._busy = 0.0
                self._count = self._ended = 0
            self._since = now

    def starved(self) -> None:
        """Slots are free, and no claim is buffered."""
        if self._since is not None:
            self._starved_at = self._clock()
            self._busy += self._starved_at - self._since
            self._since = None

    def forget(self) -> None:
        """Reset the limit to 0 until more jobs have ended."""
        self._rate = 0.0
        self._ended = 0

    def ended(self, count: int, seconds: float, within: bool = False) -> None:
        """`count` handlers ended, which took `seconds` in total; `within`: one of them used `commit`."""
        self._count += count
        self._ended += count
        self._each = 0.5 * self._each + 0.5 * seconds / count if self._each else seconds / count
        now = self._clock()
        if within:
            self._within_at = now
        spent = self._spent(now)
        if spent >= WINDOW or not self._rate:
            rate = self._count / max(spent, WINDOW)
            # The mean smooths short measurements; a long one replaces the old rate.
            self._rate = rate if spent > MEMORY or not self._rate else 0.5 * self._rate + 0.5 * rate
            self._count, self._busy = 0, 0.0
            if self._since is not None:
                self._since = now

    def committed(self, seconds: float) -> None:
        seconds = min(seconds, 1.0)
        self._commit = 0.8 * self._commit + 0.2 * seconds if self._commit else seconds

    @property
    def max_wait(self) -> float:
        """Seconds within which a claim must start, or it is released: four times the two commits within which
        a prefetched claim should start."""
        return max(MIN_WAIT, 4 * 2 * self._commit)

    def startable(self) -> int:
        """How many jobs can start within `max_wait`."""
        return int(self._current(self._clock()) * self.max_wait)

    def ahead(self) -> int:
        now = self._clock()
        rate = self._current(now)
        limited = self._each > LONG_JOB or now - self._within_at < MEMORY
        most = min(MAX_AHEAD, AHEAD_PER_SLOT * self.slots) if limited else MAX_AHEAD
        if self._slow_start:
            most = min(most, self._ended // 2)
        return min(most, math.ceil(2 * rate * self._commit), int(rate * self.max_wait))

    def _current(self, now: float) -> float:
        """Jobs per second."""
        spent = self._spent(now)
        # If jobs have become slower, the time since the last end shows it first.
        rate = min(self._rate, (self._count + 1) / spent) if spent >= 10 * WINDOW else self._rate
        # Jobs that started together end together, which looks like a high rate; the slots bound the true
        # rate.
        return min(rate, self.slots / self._each) if self._each else rate

    def _spent(self, now: float) -> float:
        since = self._since
        return self._busy if since is None else self._busy + now - since


class PrefetchLimits:
    """One limit per queue set, because jobs of different lanes have different durations. `set_of` returns the
    index of a queue's set, None if the queue is in no set."""

    def __init__(self, slots: int, sets: int = 1, set_of: Callable[[str], int | None] | None = None) -> None:
        self.limits = [PrefetchLimit(slots, slow_start=set_of is not None) for _ in range(sets)]
        self._set_of = set_of or (lambda queue: 0)
        self.starts = [0] * sets
        """Jobs started since `watch`, per set."""

    def ahead(self) -> list[int]:
        """How many claims to prefetch per set; `MAX_AHEAD` bounds the sum."""
        ahead = [limit.ahead() for limit in self.limits]
        return (
            ahead if (total := sum(ahead)) <= MAX_AHEAD else [count * MAX_AHEAD // total for count in ahead]
        )

    def measure(self, ended: Sequence[EndedClaim]) -> None:
        """Measure ended claims. Claims without a call of the handler are skipped."""
        by_set: dict[int | None, list[EndedClaim]] = {}
        for one in ended:
            if one[3] is not None:
                by_set.setdefault(self._set_of(one[1].queue), []).append(one)
        for number, own in by_set.items():
            if number is not None:
                within = any(settle.within is not None for settle, _, _, _ in own)
                self.limits[number].ended(len(own), sum([spent for _, _, spent, _ in own]), within)

    def committed(self, seconds: float) -> None:
        """From any thread: settles were committed so many seconds after they were posted."""
        for limit in self.limits:
            limit.committed(seconds)

    @property
    def max_wait(self) -> float:
        """Seconds within which a claim must start."""
        return max([limit.max_wait for limit in self.limits])

    def watch(self) -> None:
        """Start to count the jobs that start, for `keep`."""
        self.starts = [0] * len(self.starts)

    def keep(self, number: int) -> int:
        """How many buffered claims of a set can start within `max_wait`, which is the time since `watch`. The
        larger of two estimates, so that neither a burst nor a moment without ends releases claims."""
        return max(2 * self.starts[number], self.limits[number].startable())
