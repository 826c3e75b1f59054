"""Bandwidth as pure arithmetic: token buckets, the order of streams, and limits by time of day.

Times are seconds of a monotonic clock; times of day are minutes since midnight."""

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
"""Unused seconds of a rate that a late stream may still use. Over 10 s this is 1 % of the rate."""
TURNS = 50
"""Turns per second of a slow bucket: one turn moves the bytes of 1/50 s."""
PIECE = 64 * 1024
"""Greatest number of bytes of a turn, unless there would be more than 1000 turns per second."""
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
    """Bytes per second, from a whole number or a text such as `10MB/s`; None is no limit."""
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
    """Bytes per second in each direction and in total; None is no limit."""

    up: int | None = None
    down: int | None = None
    total: int | None = None


class Window(msgspec.Struct, frozen=True, gc=False):
    """From the minute `start` until before the minute `end` (of the next day if `end` is earlier), `limits`
    replace the limits of the plan."""

    start: int
    end: int
    limits: Mapping[str, int | None]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return ((self.start, self.end),) if self.start < self.end else ((self.start, DAY), (0, self.end))


class LimitPlan(msgspec.Struct, frozen=True, gc=False):
    """Limits, and the windows of the day in which others apply."""

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


def plan(up: object, down: object, total: object, schedule: object, tz: str) -> LimitPlan:
    """The plan of these settings. Raises InvalidInput with the field."""
    zone_of(tz)
    return LimitPlan(
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
    """The limits of a window: a single speed is the total, a mapping has a speed for each field."""
    if not isinstance(value, Mapping):
        return {"total": speed(field, value)}
    if not value or (set(value) - set(FIELDS)):
        raise InvalidInput(
            field=field, value=value, expected="a speed, or a mapping of some of up, down and total to speeds"
        )
    return {name: speed(f"{field}.{name}", value[name]) for name in value}


class Bucket:
    """A token bucket. If it is open, a stream takes any number of bytes; the bucket is open again when
    the rate has covered them."""

    __slots__ = ("open_at", "rate")

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.open_at = NEVER

    def take(self, count: int, now: float) -> None:
        if self.rate is not None:
            # A new bucket has no unused burst: the first stream would take all of it.
            start = now if self.open_at == NEVER else max(self.open_at, now - BURST)
            self.open_at = start + count / self.rate

    def change(self, rate: int | None, now: float) -> None:
        """Set the rate. Bytes that were taken ahead are covered at the new rate."""
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
        """Bytes that were granted, in the virtual time of its direction."""
        self.wants = 0


class Meter:
    """Grants bytes to streams. All streams of a direction get the same number of bytes, whatever the size of
    their requests: the stream with the fewest granted bytes is next. If only the total is limited, each
    direction gets a share by the number of its waiting streams."""

    def __init__(self, limits: BandwidthLimits) -> None:
        self.limits = limits
        self.moved: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self._total = Bucket(limits.total)
        self._sides = {"up": _DirectionState(limits.up), "down": _DirectionState(limits.down)}
        self._requests = 0

    def change(self, limits: BandwidthLimits, now: float) -> None:
        self.limits = limits
        self._total.change(limits.total, now)
        self._sides["up"].bucket.change(limits.up, now)
        self._sides["down"].bucket.change(limits.down, now)

    def ask(self, stream: Stream, count: int) -> int:
        """Add a request for at most `count` bytes. Returns the bytes of its turn."""
        side = self._sides[stream.direction]
        stream.wants = self.turn(stream.direction, count)
        # A stream that made no requests does not catch up on the turns that it missed.
        stream.served = max(stream.served, side.clock)
        self._requests += 1
        heapq.heappush(side.waiting, (stream.served, self._requests, stream))
        return stream.wants

    def turn(self, direction: Direction, count: int) -> int:
        """The number of bytes, at most `count`, that one turn moves."""
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
        """Grant the requests that are due. Returns their streams."""
        granted = []
        while (due := self.due(now)) is not None and due[1] <= now:
            stream = due[0]
            side = self._sides[stream.direction]
            streams = len(side.waiting)
            heapq.heappop(side.waiting)
            side.clock = stream.served
            side.served += stream.wants / streams
            for bucket in (side.bucket, self._total):
                bucket.take(stream.wants, now)
            self.moved[stream.direction] += stream.wants
            stream.served += stream.wants
            stream.wants = 0
            granted.append(stream)
        return granted

    def due(self, now: float) -> tuple[Stream, float] | None:
        """The stream with the next turn, and the time of its turn, at the earliest `now`."""
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


class _DirectionState:
    __slots__ = ("bucket", "clock", "served", "waiting")

    def __init__(self, rate: int | None) -> None:
        self.bucket = Bucket(rate)
        self.clock = 0.0
        """Granted bytes of the stream that was served last: the virtual time of this direction."""
        self.served = 0.0
        """Granted bytes per waiting stream; orders the two directions."""
        self.waiting: list[tuple[float, int, Any]] = []
