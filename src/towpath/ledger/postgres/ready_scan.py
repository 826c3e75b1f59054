"""Where to begin to look for ready jobs.

What was claimed stays in the index until it is swept, and while somebody reads in a long transaction nothing
is swept: each claim would walk over all that was claimed since. So a process remembers, of each queue and
priority, up to which number it has seen all there is, and begins behind it.

A job may still come before a mark. It was numbered by a transaction that is not over; or somebody who is
claiming it does not commit. Both have a transaction number below the next one that was free when we had
looked. So a mark is believed when all below that are over and what is before it has been looked at once more.
Jobs that become ready later than by their append are not behind positions at all (`ripe` 2). Against what is
left, such as a claim that is undone just then, everything is looked at once in a while."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

FULL_SCAN = 5.0
"""Seconds after which everything is looked at again; more where that took long."""
SHARE, LONGEST = 50, 30.0
"""How many times as long as that took one goes without it, and how many seconds at most."""
MOST_PRIORITIES, MOST_QUEUES = 32, 10_000
_LEAST, _MOST = -(2**31), 2**31 - 1

Span = tuple[int, int, int]
"""From behind this priority and number on, up to this priority."""


class _QueuePositions(msgspec.Struct):
    seen: dict[int, int] = {}
    """The positions: a number by priority."""
    ahead: dict[int, int] = {}
    """What they will be once everybody that was there is gone, who is below `until`; None: since the next
    batch."""
    until: int | None = None
    looked_at: float = 0.0
    took: float = 0.0
    """When everything was last looked at, and for how long."""


class ScanPositions:
    def __init__(self) -> None:
        self._queues: dict[str, _QueuePositions] = {}
        self._new: list[_QueuePositions] = []
        self._oldest = 0

    def begin(self, oldest: int, following: int) -> None:
        """A batch begins, when no transaction before `oldest` was there and the next one would be
        `following`."""
        self._oldest = oldest
        for each in self._new:
            each.until = following
        self._new.clear()

    def spans(self, queue: str) -> list[Span]:
        positions = self._queues.get(queue)
        if positions is None or time.monotonic() > positions.looked_at + min(
            max(FULL_SCAN, SHARE * positions.took), LONGEST
        ):
            return [(_LEAST, 0, _MOST)]
        places = [(_LEAST, 0), *sorted(positions.seen.items())]
        return [(*low, high) for low, (high, _) in zip(places, [*places[1:], (_MOST, 0)], strict=True)]

    def claimed(
        self,
        queue: str,
        found: Iterable[tuple[int, int]],
        last: tuple[int, int] | None,
        spans: list[Span],
        took: float,
    ) -> None:
        """Of the queue, from `spans` on, these (priority, number) were found that are ready since they were appended: all up to
        `last`, or all there are."""
        if len(self._queues) >= MOST_QUEUES:
            self._queues.clear()
        positions = self._queues.setdefault(queue, _QueuePositions({}, {}))
        if len(spans) == 1:
            positions.seen, positions.looked_at, positions.took = {}, time.monotonic(), took
        if positions.until is not None and self._oldest >= positions.until:
            for priority, seq in positions.ahead.items():
                if last is None or (priority, seq) <= last:
                    positions.seen[priority] = seq
                elif priority == last[0]:
                    positions.seen[priority] = max(last[1], positions.seen.get(priority, 0))
            positions.ahead, positions.until = {}, None
        if not positions.ahead and (ahead := dict(sorted(found))):
            positions.ahead = ahead
            self._new.append(positions)
        if len(positions.seen) > MOST_PRIORITIES:
            positions.seen = {}

    def forget(self) -> None:
        """What was claimed was not."""
        self._queues.clear()
        self._new.clear()
