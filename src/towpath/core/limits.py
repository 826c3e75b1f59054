"""Limits as pure arithmetic: the rate of a queue or part (GCRA) and the fair share between parts."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from towpath.core import checks
from towpath.errors import InvalidInput

_RATE: Final = re.compile(r"([0-9]{1,9})/(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)?\s*(ms|s|m|h|d))(?::([0-9]{1,9}))?")
_UNITS: Final[Mapping[str, float]] = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NAMED: Final[Mapping[int, str]] = {round(seconds * checks.SECOND): unit for unit, seconds in _UNITS.items()}

BESIDE: Final = "; limits: "
"""Between the reason of a pause and that of the limits of the same queue or part."""
TURN = 1_000_000
"""How far one turn moves a part of weight 1 in virtual time."""


class Rate(msgspec.Struct, frozen=True, gc=False):
    """`count` starts per `period` microseconds, of which `burst` may come at once."""

    count: int
    period: int = checks.SECOND
    burst: int = 1

    def __post_init__(self) -> None:
        checks.whole("rate.count", self.count, 1, 1_000_000)
        checks.whole("rate.period", self.period, 1, 366 * checks.DAY)
        checks.whole("rate.burst", self.burst, 1, 1_000_000)
        # A start may not cost less than a microsecond: that is what time is counted in.
        checks.whole("rate.count", self.count, 1, self.period)

    @classmethod
    def of(cls, text: str) -> Rate:
        """`10/s`, `100/m`, `5/10s`; `:20` after it is the burst."""
        found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise InvalidInput(
                field="rate", value=text, expected="such as 10/s, 100/m, 5/10s, or 10/s:20 with a burst of 20"
            )
        period = checks.micros(float(found[2] or 1) * _UNITS[found[3]], "rate")
        return cls(int(found[1]), period, int(found[4] or 1))

    def __str__(self) -> str:
        """As `of` takes it."""
        period = _NAMED.get(self.period) or f"{self.period / checks.SECOND:g}s"
        return f"{self.count}/{period}" + (f":{self.burst}" if self.burst > 1 else "")

    @property
    def interval(self) -> int:
        # Rounded up: a rate is a promise of at most.
        return -(-self.period // self.count)


def permits(next_at: int, rate: Rate | None, now: int, most: int) -> int:
    """How many may start now, where the next one is allowed at `next_at`."""
    if next_at > now:
        return 0
    if rate is None:
        return most
    earliest = max(next_at, now - rate.interval * (rate.burst - 1))
    return min(most, (now - earliest) // rate.interval + 1)


def spend(next_at: int, rate: Rate | None, now: int, count: int) -> int:
    """The new `next_at` after `count` starts (negative: given back)."""
    if rate is None or count == 0:
        return next_at
    if count < 0:
        # Further ahead than any start can put it, it was set by hand, and stays.
        return next_at if next_at > now + rate.interval else max(0, next_at + count * rate.interval)
    return max(next_at, now - rate.interval * (rate.burst - 1)) + count * rate.interval


def passed_over(suspects: Mapping[str | None, int], most: int | None) -> dict[str | None, int]:
    """How many ready suspects of each part a claim that takes at most so many of them (None: all) leaves
    where they are."""
    return {} if most is None else {part: count - most for part, count in suspects.items() if count > most}


class PartTurn(msgspec.Struct, frozen=True, gc=False):
    """One part's standing in the rotation. `room` is what its cap, rate and ready jobs allow. The part None
    is the jobs of the queue that have no part: together they take turns like one part of weight 1."""

    part: str | None
    served: int
    weight: int
    room: int


class Pick(msgspec.Struct, frozen=True, gc=False):
    part: str | None
    served: int
    """The part's virtual time after this pick."""
    clock: int
    """The queue's virtual time after this pick."""


def share(turns: Sequence[PartTurn], clock: int, n: int) -> list[Pick]:
    """Whose turn it is, n times: the least recently served first, heavier parts oftener. A part that was away
    starts at the queue's present virtual time, so it cannot claim the turns it did not want."""
    heap = [
        (max(turn.served, clock), turn.served, turn.part or "", turn.room, turn)
        for turn in turns
        if turn.room > 0
    ]
    heapq.heapify(heap)
    picks: list[Pick] = []
    while heap and len(picks) < n:
        start, _, name, room, turn = heap[0]
        served = start + TURN // turn.weight
        picks.append(Pick(turn.part, served, start))
        if room > 1:
            heapq.heapreplace(heap, (served, served, name, room - 1, turn))
        else:
            heapq.heappop(heap)
    return picks


def limits_reason(why: str | None, paused: bool) -> str | None:
    """The reason of the limits of a queue or part, without that of its pause."""
    return why if why is None or not paused else why.partition(BESIDE)[2] or None


def reason_after(
    why: str | None, paused: bool, pause: bool | UnsetType, given: str | UnsetType | None
) -> str | None:
    """The reason of a queue or part after it was set. The reason of its limits outlives a pause: the reason
    of the pause stands in front of it, and a resume takes that away."""
    limits = limits_reason(why, paused)
    if pause is False:
        return limits if given is UNSET else given or limits
    held = why.partition(BESIDE)[0] if paused and why is not None else None
    if pause is True:
        held = held if given is UNSET else given
    elif given is not UNSET:
        # Where a pause has no reason, or is to lose the only one, it is the reason of the pause.
        held, limits = (given, None) if why is None or given is limits is None else (held, given)
    if not (paused or pause is True) or limits is None:
        return held or limits
    return f"{held or 'no reason given'}{BESIDE}{limits}"


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


class LimiterStart(msgspec.Struct, frozen=True, gc=False):
    """A start: its time, the number of running jobs with it, and the number of cuts of the limit before
    it."""

    began: int
    load: int
    epoch: int


class Limiter:
    """An adaptive limit of running jobs. Check `room` before each start, and report each start and end."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.limit = max(bounds.least, min(bounds.most, START))
        self.running = 0
        self.until = 0
        """No job starts before this time, which the service asked for."""
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

    def start(self, now: int) -> LimiterStart:
        self.running += 1
        self._full = self._full or self.running >= self.limit
        return LimiterStart(now, self.running, self._epoch)

    def ended(self, ticket: LimiterStart, now: int, ok: bool = True) -> None:
        """Report an end: a success, or a failure that is unrelated to the load."""
        self.running -= 1
        if ok:
            self._pulse.beat(now, now - ticket.began, self.limit)
            if self._full and not self._pulse.rising:
                self._more()

    def throttled(self, ticket: LimiterStart, now: int, after: int = 0) -> None:
        """Report that the service throttled the job and asked for a delay of `after` microseconds (0:
        none)."""
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
