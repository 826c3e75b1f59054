"""Heaps that forget lazily: what is no longer true is skipped when it comes up, and swept out when it gets too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from towpath.core.job import READY, Job

K = TypeVar("K", int, str, tuple[str, str])

SLACK = 1024


class Timeline(Generic[K]):
    """What comes due when, as (time, key). `alive` tells whether an entry still holds. The same entry may be pushed twice.

    A heap of times, and the keys of each time: most of what a batch pushes is due at one moment. Only the keys of the
    first time are kept as a heap."""

    __slots__ = ("_alive", "_bound", "_front", "_keys", "_size", "_times")

    def __init__(self, alive: Callable[[int, K], bool]) -> None:
        self._alive: Callable[[int, K], bool] = alive
        self._times: list[int] = []
        self._keys: dict[int, list[K]] = {}
        self._front: int | None = None
        self._size = 0
        self._bound = SLACK

    def push(self, at: int, key: K) -> None:
        keys = self._keys.get(at)
        if keys is None:
            self._keys[at] = [key]
            heappush(self._times, at)
        elif at == self._front:
            heappush(keys, key)
        else:
            keys.append(key)
        self._size += 1
        if self._size > self._bound:
            self._sweep()

    def _sweep(self) -> None:
        alive = self._alive
        swept = {at: [key for key in set(keys) if alive(at, key)] for at, keys in self._keys.items()}
        self._keys = {at: keys for at, keys in swept.items() if keys}
        self._times, self._front = sorted(self._keys), None
        self._size = sum(map(len, self._keys.values()))
        self._bound = 4 * self._size + SLACK

    def peek(self) -> tuple[int, K] | None:
        """The first entry that holds."""
        while self._times:
            at = self._times[0]
            keys = self._keys[at]
            if at != self._front:
                heapify(keys)
                self._front = at
            while keys and not self._alive(at, keys[0]):
                heappop(keys)
                self._size -= 1
            if keys:
                return at, keys[0]
            self._drop_front()
        return None

    def _drop_front(self) -> None:
        del self._keys[heappop(self._times)]
        self._front = None

    def first(self) -> int | None:
        """The earliest time at which something is due."""
        entry = self.peek()
        return None if entry is None else entry[0]

    def pop(self, now: int | None = None) -> tuple[int, K] | None:
        """Take out the first entry, if it is due at `now` (None: whenever)."""
        entry = self.peek()
        if entry is None or (now is not None and entry[0] > now):
            return None
        at, key = entry
        keys = self._keys[at]
        while keys and keys[0] == key:
            heappop(keys)
            self._size -= 1
        if not keys:
            self._drop_front()
        return entry

    def take(self, now: int, limit: int) -> list[K]:
        """Take out at most `limit` keys that are due, in order."""
        found: list[K] = []
        while len(found) < limit and (entry := self.pop(now)) is not None:
            found.append(entry[1])
        return found

    def __len__(self) -> int:
        """Entries, also those that no longer hold."""
        return self._size

    def __iter__(self) -> Iterator[tuple[int, K]]:
        """All entries that hold, in no order; an entry may come twice."""
        return ((at, key) for at, keys in self._keys.items() for key in keys if self._alive(at, key))


class Line:
    """The ready jobs of one part, or those of a queue that have none, by (priority, seq)."""

    __slots__ = ("_heap", "_jobs", "ready")

    def __init__(self, jobs: dict[int, Job]) -> None:
        self._jobs = jobs
        self._heap: list[tuple[int, int]] = []
        self.ready = 0

    def add(self, job: Job) -> None:
        self.ready += 1
        heappush(self._heap, (job.priority, job.seq))
        if len(self._heap) > 2 * self.ready + SLACK:
            self._heap = list(set(self))
            heapify(self._heap)

    def put_back(self, job: Job) -> None:
        heappush(self._heap, (job.priority, job.seq))

    def pop(self, now: int, expired: list[Job]) -> Job | None:
        """Take out the first job that may run; those passed over for their age go to `expired`."""
        return next(self.take(now, expired), None)

    def take(self, now: int, expired: list[Job]) -> Iterator[Job]:
        """The same, one after another."""
        heap, jobs = self._heap, self._jobs
        while heap:
            entry = heappop(heap)
            while heap and heap[0] == entry:
                heappop(heap)
            job = jobs.get(entry[1])
            if job is None or job.state is not READY or job.priority != entry[0]:
                continue
            if job.expires_at is None or job.expires_at > now:
                yield job
            else:
                expired.append(job)

    def __len__(self) -> int:
        """Entries, also those that no longer hold."""
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(priority, seq) of the ready jobs, in no order; one may come twice."""
        jobs = self._jobs
        return (
            entry
            for entry in self._heap
            if (job := jobs.get(entry[1])) is not None and job.state is READY and job.priority == entry[0]
        )
