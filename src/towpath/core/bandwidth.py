"""Bandwidth as pure arithmetic: token buckets, whose turn it is between streams, and which limits hold at
what time of day.

Times are seconds of any clock that only goes forward; times of day are minutes since midnight.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from towpath.core.checks import SECOND
from towpath.core.schedule import zone_of
from towpath.errors import InvalidInput

Direction = Literal["up", "down"]
DIRECTIONS: Final[tuple[Direction, Direction]] = ("up", "down")
FIELDS: Final = ("up", "down", "total")

BURST = 0.1
"""Seconds of a rate that a late stream may catch up. Over 10 s this is 1 % of the rate."""
TURNS = 50
"""Turns a second of a slow bucket. One turn moves so many bytes that this many fill the rate."""
PIECE = 64 * 1024
"""Bytes that a turn moves at most, unless there would be more than a thousand turns a second."""
MOST = 10**15
NEVER = float("-inf")
DAY = 24 * 60

_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?/s")
_UNITS: Final[Mapping[str | None, int]] = {
    None: 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_WINDOW: Final = re.compile(r"\s*([0-9]{1,2}):([0-9]{2})\s*-\s*([0-9]{1,2}):([0-9]{2})\s*")


def speed(field: str, value: object) -> int | None:
    """Bytes a second, from a whole number or such as `10MB/s`; None is without limit."""
    if value is None:
        return None
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        value = round(float(found[1]) * _UNITS[found[2]])
    if type(value) is not int or not 1 <= value <= MOST:
        expected = (
            "bytes a second such as 500kB/s, 10MB/s, 1.5MiB/s or a whole number from 1, or None for no limit"
        )
        raise InvalidInput(field=field, value=value, expected=expected)
    return value


class BandwidthLimits(msgspec.Struct, frozen=True, gc=False):
    """Bytes a second in each direction and of both together; None is without limit."""

    up: int | None = None
    down: int | None = None
    total: int | None = None


class Window(msgspec.Struct, frozen=True, gc=False):
    """From the minute `start` to before `end` (over midnight if that is earlier), `limits` replace what holds
    otherwise."""

    start: int
    end: int
    limits: Mapping[str, int | None]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return ((self.start, self.end),) if self.start < self.end else ((self.start, DAY), (0, self.end))


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Which limits hold when."""

    limits: BandwidthLimits = BandwidthLimits()
    windows: tuple[Window, ...] = ()
    tz: str = "UTC"

    def at(self, now: int) -> BandwidthLimits:
        """The limits at `now`, in the ledger's microseconds."""
        if not self.windows:
            return self.limits
        moment = datetime.fromtimestamp(now / SECOND, zone_of(self.tz))
        minute = moment.hour * 60 + moment.minute
        for window in self.windows:
            if any(start <= minute < end for start, end in window.spans):
                return msgspec.structs.replace(self.limits, **window.limits)
        return self.limits


def plan(up: object, down: object, total: object, schedule: object, tz: str) -> Plan:
    """The plan that users wrote down. Raises InvalidInput with the field."""
    zone_of(tz)
    return Plan(
        BandwidthLimits(speed("up", up), speed("down", down), speed("total", total)), _windows(schedule), tz
    )


def _windows(schedule: object) -> tuple[Window, ...]:
    expected = 'a list of pairs such as ("08:00-18:00", "2MB/s")'
    if isinstance(schedule, str | bytes | Mapping) or not isinstance(schedule, Sequence):
        raise InvalidInput(field="schedule", value=schedule, expected=expected)
    windows: list[Window] = []
    for number, entry in enumerate(schedule):
        field = f"schedule[{number}]"
        if isinstance(entry, str) or not isinstance(entry, Sequence) or len(entry) != 2:
            raise InvalidInput(field=field, value=entry, expected='a pair such as ("08:00-18:00", "2MB/s")')
        start, end = _span(field, entry[0])
        window = Window(start, end, _changes(field, entry[1]))
        for earlier, other in enumerate(windows):
            if any(a < d and c < b for a, b in window.spans for c, d in other.spans):
                raise InvalidInput(
                    field=field, value=entry[0], expected=f"a time that does not overlap schedule[{earlier}]"
                )
        windows.append(window)
    return tuple(windows)


def _span(field: str, text: object) -> tuple[int, int]:
    found = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        start, end = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
        if int(found[2]) < 60 and int(found[4]) < 60 and start < DAY and end <= DAY and start != end:
            return start, end
    raise InvalidInput(
        field=field, value=text, expected="two times from 00:00 to 24:00 such as 08:00-18:00 or 22:00-06:00"
    )


def _changes(field: str, value: object) -> dict[str, int | None]:
    """One speed is the total; a mapping may name each."""
    if not isinstance(value, Mapping):
        return {"total": speed(field, value)}
    if not value or (set(value) - set(FIELDS)):
        raise InvalidInput(
            field=field, value=value, expected="a speed, or a mapping of some of up, down and total to speeds"
        )
    return {name: speed(f"{field}.{name}", value[name]) for name in value}


class Bucket:
    """A token bucket. Whoever finds it open takes what they need; it is open again when that is paid for."""

    __slots__ = ("open_at", "rate")

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.open_at = NEVER

    def take(self, count: int, now: float) -> None:
        if self.rate is not None:
            # A new bucket is empty. Otherwise the first stream would take the whole burst.
            start = now if self.open_at == NEVER else max(self.open_at, now - BURST)
            self.open_at = start + count / self.rate

    def change(self, rate: int | None, now: float) -> None:
        """What was taken ahead is paid for at the new rate."""
        if self.rate is not None and self.open_at > now:
            owed = (self.open_at - now) * self.rate
            self.open_at = now if rate is None else now + owed / rate
        self.rate = rate


class Stream:
    """A transfer of bytes in one direction, with at most one pending request."""

    __slots__ = ("direction", "served", "wants")

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.served = 0.0
        """Bytes it has had, in the virtual time of its direction."""
        self.wants = 0


class Meter:
    """Who may move how much, and when. Streams of a direction get the same number of bytes, however large
    their pieces are: who has had least is next. Where only the total binds, directions share it by how many
    streams wait in each."""

    def __init__(self, limits: BandwidthLimits) -> None:
        self.limits = limits
        self.moved: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self._total = Bucket(limits.total)
        self._sides = {"up": _Side(limits.up), "down": _Side(limits.down)}
        self._asked = 0

    def change(self, limits: BandwidthLimits, now: float) -> None:
        self.limits = limits
        self._total.change(limits.total, now)
        self._sides["up"].bucket.change(limits.up, now)
        self._sides["down"].bucket.change(limits.down, now)

    def ask(self, stream: Stream, count: int) -> int:
        """Queue up for at most `count` bytes; how many the turn will be for."""
        side = self._sides[stream.direction]
        stream.wants = self.turn(stream.direction, count)
        # Who was away has no claim to the turns it did not want.
        stream.served = max(stream.served, side.clock)
        self._asked += 1
        heapq.heappush(side.waiting, (stream.served, self._asked, stream))
        return stream.wants

    def turn(self, direction: Direction, count: int) -> int:
        """How many of `count` bytes one turn moves."""
        rates = [rate for rate in (self._sides[direction].bucket.rate, self._total.rate) if rate is not None]
        return (
            min(count, max(1, min(min(rates) // TURNS, max(PIECE, min(rates) // 1000)))) if rates else count
        )

    def withdraw(self, stream: Stream) -> None:
        side = self._sides[stream.direction]
        side.waiting = [entry for entry in side.waiting if entry[2] is not stream]
        heapq.heapify(side.waiting)
        stream.wants = 0

    def grant(self, now: float) -> list[Stream]:
        """Those whose turn has come; each has what it wanted."""
        granted = []
        while (due := self.due(now)) is not None and due[1] <= now:
            stream = due[0]
            side = self._sides[stream.direction]
            crowd = len(side.waiting)
            heapq.heappop(side.waiting)
            side.clock = stream.served
            side.served += stream.wants / crowd
            for bucket in (side.bucket, self._total):
                bucket.take(stream.wants, now)
            self.moved[stream.direction] += stream.wants
            stream.served += stream.wants
            stream.wants = 0
            granted.append(stream)
        return granted

    def due(self, now: float) -> tuple[Stream, float] | None:
        """Whose turn is next, and when: not before `now`."""
        best: tuple[float, float, Stream] | None = None
        clock = min((side.served for side in self._sides.values() if side.waiting), default=0.0)
        for side in self._sides.values():
            if side.waiting:
                at = max(now, side.bucket.open_at, self._total.open_at)
                entry = (at, side.served - clock, side.waiting[0][2])
                if best is None or entry[:2] < best[:2]:
                    best = entry
            else:
                side.served = max(side.served, clock)
        return None if best is None else (best[2], best[0])


class _Side:
    __slots__ = ("bucket", "clock", "served", "waiting")

    def __init__(self, rate: int | None) -> None:
        self.bucket = Bucket(rate)
        self.clock = 0.0
        """How much the stream had had that was served last."""
        self.served = 0.0
        """What this direction had for each of its streams, beside the other direction."""
        self.waiting: list[tuple[float, int, Any]] = []
