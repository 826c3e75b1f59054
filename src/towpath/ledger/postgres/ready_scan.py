"""Scan positions: where the scan for ready jobs of a queue starts.

Claimed jobs stay in the index until it is vacuumed, and beside a long transaction nothing is vacuumed: each
claim would scan all jobs claimed since. So a process stores, per queue and priority, the number up to which
it has seen every job, and starts behind it.

A job may still appear before a position: the transaction that numbered it has not ended, or a transaction
that claims it rolls back. Both have a transaction id below the next free one at the time of the scan. So a
position is used only when all transactions below that id have ended and the jobs before the position were
scanned once more. Jobs that become ready later than by their append are not subject to positions (`ripe` 2).
For remaining cases, such as a claim that is undone at that moment, the whole queue is scanned now and
then."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

FULL_SCAN = 5.0
"""Seconds between two full scans of a queue; more if a scan takes long."""
SHARE, LONGEST = 50, 30.0
"""The pause is `SHARE` times the duration of the scan, at most `LONGEST` seconds."""
MOST_PRIORITIES, MOST_QUEUES = 32, 10_000
_LEAST, _MOST = -(2**31), 2**31 - 1

Span = tuple[int, int, int]
"""Priority and number behind which a scan starts, and the priority before which it ends."""


class _QueuePositions(msgspec.Struct):
    seen: dict[int, int] = {}
    """The positions in use: a number by priority."""
    ahead: dict[int, int] = {}
    """The next positions, used once all transactions below `until` have ended. `until` is set by the next
    batch."""
    until: int | None = None
    scanned_at: float = 0.0
    took: float = 0.0
    """Start of the last full scan, and its seconds."""


class ScanPositions:
    def __init__(self) -> None:
        self._queues: dict[str, _QueuePositions] = {}
        self._new: list[_QueuePositions] = []
        self._oldest = 0

    def begin(self, oldest: int, following: int) -> None:
        """A batch begins. `oldest` is the oldest running transaction, `following` the next free id."""
        self._oldest = oldest
        for each in self._new:
            each.until = following
        self._new.clear()

    def spans(self, queue: str) -> list[Span]:
        positions = self._queues.get(queue)
        if positions is None or time.monotonic() > positions.scanned_at + min(
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
        """A scan of `spans` found these (priority, number): all jobs up to `last`, or all of the queue."""
        if len(self._queues) >= MOST_QUEUES:
            self._queues.clear()
        positions = self._queues.setdefault(queue, _QueuePositions({}, {}))
        if len(spans) == 1:
            positions.seen, positions.scanned_at, positions.took = {}, time.monotonic(), took
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
        """Drop all positions: a claim was rolled back."""
        self._queues.clear()
        self._new.clear()
