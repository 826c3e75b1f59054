"""Heaps that forget lazily: what is no longer true is skipped when it comes up, and swept out when it gets too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from towpath.core.job import READY, SUSPECT, Job

K = TypeVar("K", int, str, tuple[str, str])
Spot = tuple[int, int]
"""Priority and number."""

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
    """The ready jobs of one part, or those of a queue that have none, by (priority, seq). Suspects have a heap of their own, so
    that a claim that takes none does not walk over them."""

    __slots__ = ("_heap", "_jobs", "_suspects", "ready")

    def __init__(self, jobs: dict[int, Job]) -> None:
        self._jobs = jobs
        self._heap: list[Spot] = []
        self._suspects: list[Spot] = []
        self.ready = 0

    def add(self, job: Job) -> None:
        self.ready += 1
        self.put_back(job)
        if len(self) > 2 * self.ready + SLACK:
            for heap, suspect in ((self._heap, False), (self._suspects, True)):
                heap[:] = {entry for entry in heap if self._holds(entry, suspect)}
                heapify(heap)

    def put_back(self, job: Job) -> None:
        heappush(self._heap if job.losses < SUSPECT else self._suspects, (job.priority, job.seq))

    def pop(self, now: int, expired: list[Job], suspects: bool = True) -> Job | None:
        """Take out the first job that may run; those passed over for their age go to `expired`."""
        return next(self.take(now, expired, int(suspects)), None)

    def take(self, now: int, expired: list[Job], suspects: int | None = None) -> Iterator[Job]:
        """The same, one after another, at most so many suspects among them (None: all)."""
        heap, jobs = self._heap, self._jobs
        left = -1 if suspects is None else suspects
        while heap or (left and self._suspects):
            if left and self._suspects and self._suspect_first(now, expired):
                left -= 1
                yield jobs[heappop(self._suspects)[1]]
                continue
            if not heap:
                return
            entry = heappop(heap)
            while heap and heap[0] == entry:
                heappop(heap)
            job = jobs.get(entry[1])
            if job is None or job.state is not READY or job.priority != entry[0] or job.losses >= SUSPECT:
                continue
            if job.expires_at is None or job.expires_at > now:
                yield job
            else:
                expired.append(job)

    def _suspect_first(self, now: int, expired: list[Job]) -> bool:
        """Does a suspect come before the first of the other jobs?"""
        suspect, other = self._first(self._suspects, True, now, expired), self._first(self._heap, False, now, expired)
        return suspect is not None and (other is None or suspect < other)

    def _first(self, heap: list[Spot], suspect: bool, now: int, expired: list[Job]) -> Spot | None:
        """The first entry of a heap that may run; it is the only entry of its job."""
        while heap:
            entry = heap[0]
            job = self._jobs.get(entry[1])
            if job is not None and self._holds(entry, suspect):
                if job.expires_at is None or job.expires_at > now:
                    _drop_twins(heap)
                    return entry
                _drop_twins(heap)
                expired.append(job)
            heappop(heap)
        return None

    def _holds(self, entry: Spot, suspect: bool) -> bool:
        job = self._jobs.get(entry[1])
        ready = job is not None and job.state is READY and job.priority == entry[0]
        return ready and job is not None and (job.losses >= SUSPECT) is suspect

    def __len__(self) -> int:
        """Entries, also those that no longer hold."""
        return len(self._heap) + len(self._suspects)

    def __iter__(self) -> Iterator[Spot]:
        """(priority, seq) of the ready jobs, in no order; one may come twice."""
        yield from (entry for entry in self._heap if self._holds(entry, suspect=False))
        yield from (entry for entry in self._suspects if self._holds(entry, suspect=True))


def _drop_twins(heap: list[Spot]) -> None:
    """Keep one of the equal entries at the top of a heap."""
    entry = heap[0]
    while len(heap) > 1 and min(heap[1:3]) == entry:
        heappop(heap)
