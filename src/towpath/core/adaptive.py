"""How many jobs may use a service at once, learned from how it answers. Pure: times are arguments, in microseconds.

Additive increase, multiplicative decrease: a service that says "too much" halves the limit, success at the limit raises it. The
last number that worked is remembered: the limit comes back to it quickly, rests there, and then feels its way up again.
"""

from __future__ import annotations

import msgspec

from towpath.core import checks
from towpath.errors import InvalidInput

START = 4
"""Where a limit begins, if its bounds allow."""
REST = 10
"""Rounds (as many successes as the limit) at the last number that worked before more is tried."""
RISING = 1.5
"""A round that takes so many times as long as the best one holds the limit where it is."""
MEMORY = 300 * checks.SECOND
"""The best round counts for one to two of these: a service may become slower for good."""


class Bounds(msgspec.Struct, frozen=True):
    """Between what the limit of a resource may move."""

    least: int = 1
    most: int = 64

    def __post_init__(self) -> None:
        checks.whole("min", self.least, 1, 10_000)
        checks.whole("max", self.most, 1, 10_000)
        if self.least > self.most:
            raise InvalidInput(field="min", value=self.least, expected=f"at most max ({self.most})")


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """A start: when, as how many-th of those that run, and between which two cuts of the limit."""

    began: int
    load: int
    epoch: int


class Limiter:
    """Ask `room` before a start; tell every start and end."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.limit = max(bounds.least, min(bounds.most, START))
        self.running = 0
        self.until = 0
        """Nothing starts before: the service has said when to come again."""
        self._works: int | None = None
        """The most that worked when it was last too much."""
        self._epoch = 0
        self._step = 1
        self._credit = 0
        self._full = False
        """Has the limit been used up since it was last raised? What is not used teaches nothing."""
        self._pulse = _Pulse()

    def room(self, now: int) -> int:
        """How many more may start."""
        return 0 if now < self.until else max(0, self.limit - self.running)

    def start(self, now: int) -> Ticket:
        self.running += 1
        self._full = self._full or self.running >= self.limit
        return Ticket(now, self.running, self._epoch)

    def ended(self, ticket: Ticket, now: int, ok: bool = True) -> None:
        """It ended; well, or with a failure that says nothing about the load."""
        self.running -= 1
        if ok:
            self._pulse.beat(now, now - ticket.began, self.limit)
            if self._full and not self._pulse.rising:
                self._more()

    def throttled(self, ticket: Ticket, now: int, after: int = 0) -> None:
        """The service said: too much, come again after `after` microseconds (0: it did not say when)."""
        self.running -= 1
        self.until = max(self.until, now + after)
        if ticket.epoch != self._epoch:
            # Started before the last cut, which was for all that ran then.
            return
        self._epoch += 1
        self._works = max(self.bounds.least, min(self.limit, ticket.load - 1))
        self.limit = max(self.bounds.least, self.limit // 2)
        self._step, self._credit, self._full = 1, 0, False

    def _more(self) -> None:
        if self._works is None or self.limit < self._works:
            step = 1
        else:
            self._credit += 1
            if self._credit < self.limit * (REST if self.limit == self._works else 1):
                return
            step, self._step = self._step, 2 * self._step
        self._credit, self._full = 0, False
        self.limit = min(self.bounds.most, self.limit + step)


class _Pulse:
    """Is it getting slower? Rounds are compared, because jobs differ."""

    def __init__(self) -> None:
        self.rising = False
        self._sum = self._count = 0
        self._size = START
        self._since = 0
        self._best: float | None = None
        self._before: float | None = None
        """The best of this time and of the one before."""

    def beat(self, now: int, spent: int, size: int) -> None:
        self._sum += spent
        self._count += 1
        if self._count < self._size:
            return
        mean = self._sum / self._count
        self._sum, self._count, self._size = 0, 0, max(size, START)
        if now - self._since >= MEMORY:
            self._since, self._before, self._best = now, self._best, None
        self._best = mean if self._best is None else min(mean, self._best)
        best = self._best if self._before is None else min(self._best, self._before)
        self.rising = mean > RISING * best
