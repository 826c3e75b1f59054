"""Limits as pure arithmetic: the rate of a queue or part (GCRA) and the fair share between parts."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.errors import InvalidInput

_RATE: Final = re.compile(r"([0-9]{1,9})/(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)?\s*(ms|s|m|h|d))(?::([0-9]{1,9}))?")
_UNITS: Final[Mapping[str, float]] = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NAMED: Final[Mapping[int, str]] = {round(seconds * checks.SECOND): unit for unit, seconds in _UNITS.items()}
_LONGEST: Final = 366 * checks.DAY

BESIDE: Final = "; limits: "
"""Separates the reason of a pause from the reason of the limits of the same queue or part."""
TURN = 1_000_000
"""The virtual time that one claimed job costs a part of weight 1."""


class Rate(msgspec.Struct, frozen=True, gc=False):
    """`count` starts per `period` (seconds or a timedelta); up to `burst` of them may happen at once."""

    count: int
    period: float | timedelta = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        checks.whole("rate.count", self.count, 1, 1_000_000)
        period = checks.micros(self.period, "rate.period")
        if not 1 <= period <= _LONGEST:
            expected = f"seconds, more than 0 and at most {_LONGEST // checks.SECOND}"
            raise InvalidInput(field="rate.period", value=self.period, expected=expected)
        checks.whole("rate.burst", self.burst, 1, 1_000_000)
        # The interval between two starts is at least a microsecond, the unit of ledger time.
        checks.whole("rate.count", self.count, 1, period)
        force_setattr(self, "period", period / checks.SECOND)

    @classmethod
    def of(cls, text: str) -> Rate:
        """`10/s`, `100/m`, `5/10s`; `:20` after it is the burst."""
        found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise InvalidInput(
                field="rate",
                value=text,
                expected="a rate such as 10/s, 100/m, 5/10s, or 10/s:20 with a burst of 20",
            )
        return cls(int(found[1]), float(found[2] or 1) * _UNITS[found[3]], int(found[4] or 1))

    def __str__(self) -> str:
        """The text that `of` parses."""
        period = _NAMED.get(period_of(self)) or f"{period_of(self) / checks.SECOND:g}s"
        return f"{self.count}/{period}" + (f":{self.burst}" if self.burst > 1 else "")


def period_of(rate: Rate) -> int:
    """The period in the ledger's microseconds."""
    return checks.micros(rate.period)


def interval_of(rate: Rate) -> int:
    """The microseconds between two starts, rounded up, so that the rate is never exceeded."""
    return -(-period_of(rate) // rate.count)


def stored_rate(count: int | None, period: int | None, burst: int | None) -> Rate | None:
    """A rate from the columns of a ledger; None if there is none."""
    if count is None or period is None or burst is None:
        return None
    return Rate(count, period / checks.SECOND, burst)


def permits(next_at: int, rate: Rate | None, now: int, most: int) -> int:
    """The number of jobs that may start now, at most `most`. The next start is allowed at `next_at`."""
    if next_at > now:
        return 0
    if rate is None:
        return most
    interval = interval_of(rate)
    earliest = max(next_at, now - interval * (rate.burst - 1))
    return min(most, (now - earliest) // interval + 1)


def spend(next_at: int, rate: Rate | None, now: int, count: int) -> int:
    """The new `next_at` after `count` starts. A negative count returns permits."""
    if rate is None or count == 0:
        return next_at
    interval = interval_of(rate)
    if count < 0:
        # No start sets `next_at` this far ahead: it was set by `not_before`, and stays.
        return next_at if next_at > now + interval else max(0, next_at + count * interval)
    return max(next_at, now - interval * (rate.burst - 1)) + count * interval


def passed_over(suspects: Mapping[str | None, int], most: int | None) -> dict[str | None, int]:
    """By part, the number of ready suspects that a claim leaves in the queue because it takes at most `most`
    of them (None: all)."""
    return {} if most is None else {part: count - most for part, count in suspects.items() if count > most}


class PartTurn(msgspec.Struct, frozen=True, gc=False):
    """The position of a part in the rotation. `served` is its virtual time. `room` is the number of jobs that
    its cap, its rate and its ready jobs allow. The part None stands for the jobs of the queue without a part:
    together they take turns like one part of weight 1."""

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
    """The parts of the next n claimed jobs: the least recently served part first, heavier parts more often. A
    part that had no ready jobs starts at the queue's present virtual time, so it does not catch up on the
    turns that it missed."""
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
    """The reason of the limits of a queue or part, without the reason of its pause."""
    return why if why is None or not paused else why.partition(BESIDE)[2] or None


def reason_after(
    why: str | None, paused: bool, pause: bool | UnsetType, given: str | UnsetType | None
) -> str | None:
    """The reason of a queue or part after a change of its settings. The reason of its limits is kept during a
    pause: a pause puts its own reason in front, and a resume removes it. A given reason that contains the
    separator is stored with a comma instead of the semicolon."""
    if isinstance(given, str):
        given = given.replace(BESIDE, BESIDE.replace(";", ",", 1))
    limits = limits_reason(why, paused)
    if pause is False:
        return limits if given is UNSET else given or limits
    held = why.partition(BESIDE)[0] if paused and why is not None else None
    if pause is True:
        held = held if given is UNSET else given
    elif given is not UNSET:
        # If the pause has no reason, or None is to remove the only reason, `given` is the reason of the
        # pause.
        held, limits = (given, None) if why is None or given is limits is None else (held, given)
    if not (paused or pause is True) or limits is None:
        return held or limits
    return f"{held or 'no reason given'}{BESIDE}{limits}"


START = 4
"""The first value of a limit, if its bounds allow it."""
HOLD_ROUNDS = 10
"""Rounds for which a limit stays at the last value that worked, before it grows beyond. A round is as many
successes as the limit."""
SLOWER = 1.5
"""The limit does not grow while a round takes this many times as long as the best round."""
MEMORY = 300 * checks.SECOND
"""The best round is forgotten after one to two of these spans: a service may become slower permanently."""


class Bounds(msgspec.Struct, frozen=True):
    """The least and the greatest value of an adaptive limit."""

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
        """The highest load without throttling, measured at the last throttling."""
        self._epoch = 0
        self._step = 1
        self._credit = 0
        self._full = False
        """The limit has been reached since it was last raised. A limit that is not reached does not grow."""
        self._durations = _RoundDurations()

    def room(self, now: int) -> int:
        """The number of jobs that may start now."""
        return 0 if now < self.until else max(0, self.limit - self.running)

    def start(self, now: int) -> LimiterStart:
        self.running += 1
        self._full = self._full or self.running >= self.limit
        return LimiterStart(now, self.running, self._epoch)

    def ended(self, start: LimiterStart, now: int, ok: bool = True) -> None:
        """Report an end: a success, or a failure that is unrelated to the load."""
        self.running -= 1
        if ok:
            self._durations.add(now, now - start.began, self.limit)
            if self._full and not self._durations.rising:
                self._raise_limit()

    def throttled(self, start: LimiterStart, now: int, after: int = 0) -> None:
        """Report that the service throttled the job and asked for a delay of `after` microseconds (0:
        none)."""
        self.running -= 1
        self.until = max(self.until, now + after)
        if start.epoch != self._epoch:
            # It started before the last cut, which accounts for all jobs that ran then.
            return
        self._epoch += 1
        self._works = max(self.bounds.least, min(self.limit, start.load - 1))
        self.limit = max(self.bounds.least, self.limit // 2)
        self._step, self._credit, self._full = 1, 0, False

    def _raise_limit(self) -> None:
        if self._works is None or self.limit < self._works:
            step = 1
        else:
            self._credit += 1
            if self._credit < self.limit * (HOLD_ROUNDS if self.limit == self._works else 1):
                return
            step, self._step = self._step, 2 * self._step
        self._credit, self._full = 0, False
        self.limit = min(self.bounds.most, self.limit + step)


class _RoundDurations:
    """Compares the mean duration of the jobs of each round with the best round, because single jobs differ.
    `rising`: the last round was slower."""

    def __init__(self) -> None:
        self.rising = False
        self._sum = self._count = 0
        self._size = START
        self._since = 0
        self._best: float | None = None
        self._before: float | None = None
        """The best rounds of the present and of the previous `MEMORY` span."""

    def add(self, now: int, spent: int, size: int) -> None:
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
        self.rising = mean > SLOWER * best
