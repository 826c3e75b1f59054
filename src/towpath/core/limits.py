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
            raise InvalidInput(field="rate", value=text, expected="such as 10/s, 100/m, 5/10s, or 10/s:20 with a burst of 20")
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
    """How many ready suspects of each part a claim that takes at most so many of them (None: all) leaves where they are."""
    return {} if most is None else {part: count - most for part, count in suspects.items() if count > most}


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One part's standing in the rotation. `room` is what its cap, rate and ready jobs allow. The part None is the jobs
    of the queue that have no part: together they take turns like one part of weight 1."""

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


def share(turns: Sequence[Turn], clock: int, n: int) -> list[Pick]:
    """Whose turn it is, n times: the least recently served first, heavier parts oftener. A part that was away starts at
    the queue's present virtual time, so it cannot claim the turns it did not want."""
    heap = [(max(turn.served, clock), turn.served, turn.part or "", turn.room, turn) for turn in turns if turn.room > 0]
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


def reason_after(why: str | None, paused: bool, pause: bool | UnsetType, given: str | UnsetType | None) -> str | None:
    """The reason of a queue or part after it was set. The reason of its limits outlives a pause: the reason of the pause stands in front
    of it, and a resume takes that away."""
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
