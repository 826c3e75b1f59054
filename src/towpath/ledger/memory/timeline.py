"""Heaps that forget lazily: what is no longer true is skipped when it comes up, and swept out when it gets too much."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from towpath.core.job import Job, State

K = TypeVar("K", bound=Hashable)

SLACK = 1024
READY = State.READY


class Timeline(Generic[K]):
    """What comes due when, as (time, key). `alive` tells whether an entry still holds. The same entry may be pushed twice."""

    __slots__ = ("_alive", "_bound", "_heap")

    def __init__(self, alive: Callable[[int, K], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[int, K]] = []
        self._bound = SLACK

    def push(self, at: int, key: K) -> None:
        heappush(self._heap, (at, key))
        if len(self._heap) > self._bound:
            self._heap = list(set(self))
            heapify(self._heap)
            self._bound = 2 * len(self._heap) + SLACK

    def first(self) -> int | None:
        """The earliest time at which something is due."""
        heap = self._heap
        while heap and not self._alive(*heap[0]):
            heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now: int | None = None) -> tuple[int, K] | None:
        """Take out the first entry, if it is due at `now` (None: whenever)."""
        at = self.first()
        if at is None or (now is not None and at > now):
            return None
        heap = self._heap
        entry = heappop(heap)
        while heap and heap[0] == entry:
            heappop(heap)
        return entry

    def take(self, now: int, limit: int) -> list[K]:
        """Take out at most `limit` keys that are due, in order."""
        found: list[K] = []
        while len(found) < limit and (entry := self.pop(now)) is not None:
            found.append(entry[1])
        return found

    def __iter__(self) -> Iterator[tuple[int, K]]:
        """All entries that hold, in no order; an entry may come twice."""
        return (entry for entry in self._heap if self._alive(*entry))


class Line:
    """The ready jobs of one part, or those of a queue that have none, by (priority, seq)."""

    __slots__ = ("_heap", "_jobs", "ready")

    def __init__(self, jobs: dict[int, Job]) -> None:
        self._jobs = jobs
        self._heap: list[tuple[int, int]] = []
        self.ready = 0

    def add(self, job: Job) -> None:
        self.ready += 1
        self.put_back(job)
        if len(self._heap) > 2 * self.ready + SLACK:
            self._heap = list(set(self))
            heapify(self._heap)

    def put_back(self, job: Job) -> None:
        heappush(self._heap, (job.priority, job.seq))

    def pop(self, now: int, expired: list[Job]) -> Job | None:
        """Take out the first job that may run; those passed over for their age go to `expired`."""
        heap, jobs = self._heap, self._jobs
        while heap:
            entry = heappop(heap)
            while heap and heap[0] == entry:
                heappop(heap)
            job = jobs.get(entry[1])
            if job is None or job.state is not READY:
                continue
            if job.expires_at is None or job.expires_at > now:
                return job
            expired.append(job)
        return None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(priority, seq) of the ready jobs, in no order; one may come twice."""
        jobs = self._jobs
        return (entry for entry in self._heap if (job := jobs.get(entry[1])) is not None and job.state is READY)
