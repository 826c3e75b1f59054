"""The rows of queues, parts and groups, which change in place, and the indexes over jobs: ready jobs by
priority, and times at which rows are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from towpath.core.commands import GroupState, OnFailure
from towpath.core.job import READY, SERIAL, SUSPECT, Job, Spec, State
from towpath.core.lifecycle import counter_of
from towpath.core.limits import Rate
from towpath.core.views import Counts, GroupView, PartView, QueueView

RotationEntry = tuple[int, str]


class PartRecord:
    """`entry` is the only valid entry of the part in the rotation of its queue; all other entries are
    stale."""

    def __init__(self, queue: str, name: str, jobs: dict[int, Job]) -> None:
        self.queue, self.name = queue, name
        self.queued = ReadyJobs(jobs)
        self.running = 0
        self.paused = False
        self.why: str | None = None
        self.cap: int | None = 1 if name.startswith(SERIAL) else None
        self.rate: Rate | None = None
        self.next_at = 0
        self.weight = 1
        self.served = 0
        self.configured = False
        self.capacity: int | None = None
        self.append_rate: Rate | None = None
        self.append_at = 0
        self.entry: RotationEntry | None = None

    def eligible(self) -> bool:
        """Jobs of the part can be claimed once its `next_at` is reached."""
        return self.queued.ready > 0 and not self.paused and (self.cap is None or self.running < self.cap)

    def view(self) -> PartView:
        return PartView(
            queue=self.queue,
            name=self.name,
            ready=self.queued.ready,
            running=self.running,
            paused=self.paused,
            why=self.why,
            cap=self.cap,
            rate=self.rate,
            next_at=self.next_at,
            weight=self.weight,
            served=self.served,
            capacity=self.capacity,
            append_rate=self.append_rate,
            append_at=self.append_at,
        )


class Rotation:
    """The eligible parts of a queue by (served, name). Parts that wait for their `next_at` have a heap of
    their own, by that time."""

    def __init__(self, parts: dict[str, PartRecord]) -> None:
        self._parts = parts
        self._due: list[RotationEntry] = []
        self._held: list[RotationEntry] = []

    def offer(self, part: PartRecord) -> None:
        if part.entry is None and part.eligible():
            part.entry = (part.served, part.name)
            self._due = self._push(self._due, part.entry)

    def reinsert(self, part: PartRecord) -> None:
        """Insert the part again after its `next_at` was moved to an earlier time."""
        part.entry = None
        self.offer(part)

    def take(self, room: int, now: int) -> list[PartRecord]:
        """Remove the first `room` parts that can be claimed from, and return them. The caller adds them again
        with `offer`."""
        while self._held and self._held[0][0] <= now:
            if (part := self._pop(self._held)) is not None:
                self.offer(part)
        found: list[PartRecord] = []
        while self._due and len(found) < room:
            if (part := self._pop(self._due)) is None or not part.eligible():
                continue
            if part.next_at > now:
                part.entry = (part.next_at, part.name)
                self._held = self._push(self._held, part.entry)
            else:
                found.append(part)
        return found

    def _pop(self, heap: list[RotationEntry]) -> PartRecord | None:
        entry = heappop(heap)
        part = self._parts.get(entry[1])
        if part is None or part.entry is not entry:
            return None
        part.entry = None
        return part

    def _push(self, heap: list[RotationEntry], entry: RotationEntry) -> list[RotationEntry]:
        heappush(heap, entry)
        if len(heap) > 2 * len(self._parts) + SLACK:
            heap = [
                entry
                for entry in heap
                if (part := self._parts.get(entry[1])) is not None and part.entry is entry
            ]
            heapify(heap)
        return heap


class QueueRecord:
    def __init__(self, name: str, parts: dict[str, PartRecord], jobs: dict[int, Job]) -> None:
        self.name = name
        self.parts = parts
        self.counts = dict.fromkeys(State, 0)
        self.loose = ReadyJobs(jobs)
        self.waiting: Counter[str] = Counter()
        """Blocked, scheduled and ready jobs by part."""
        self.suspects: Counter[str | None] = Counter()
        """Ready suspects by part."""
        self.rotation = Rotation(parts)
        self.scheduled: Timeline[int] = Timeline(
            lambda at, seq: (
                (job := jobs.get(seq)) is not None and job.state is State.SCHEDULED and job.ready_at == at
            )
        )
        self.purges: Timeline[int] = Timeline(
            lambda at, seq: (job := jobs.get(seq)) is not None and job.purge_at == at
        )
        self.paused = False
        self.why: str | None = None
        self.capacity: int | None = None
        self.cap: int | None = None
        self.rate: Rate | None = None
        self.next_at = 0
        self.retention: int | None = None
        self.keep: int | None = None
        self.served = 0
        self.clock = 0

    @property
    def depth(self) -> int:
        return self.counts[State.BLOCKED] + self.counts[State.SCHEDULED] + self.counts[State.READY]

    def view(self, oldest_ready: int | None = None) -> QueueView:
        return QueueView(
            name=self.name,
            counts=Counts(*[self.counts[State(field)] for field in Counts.__struct_fields__]),
            oldest_ready=oldest_ready,
            paused=self.paused,
            why=self.why,
            capacity=self.capacity,
            cap=self.cap,
            rate=self.rate,
            next_at=self.next_at,
            retention=self.retention,
            keep=self.keep,
        )


class GroupRecord:
    def __init__(
        self, id: str, on_failure: OnFailure, then: Mapping[str, tuple[Spec, ...]], now: int
    ) -> None:
        self.id, self.on_failure, self.created_at = id, OnFailure(on_failure), now
        self.then = {ending: tuple(specs) for ending, specs in then.items() if specs}
        self.state = GroupState.OPEN
        self.outcome: State | None = None
        self.closed_at: int | None = None
        self.paused = False
        self.why: str | None = None
        self.members: dict[int, None] = {}
        self.proxies: dict[str, None] = {}
        self.total = self.unfinished = self.done = self.failed = self.canceled = self.superseded = 0

    def tally(self, job: Job, by: int) -> None:
        self.count(counter_of(job.state, job.reason), by)

    def count(self, counter: str, by: int) -> None:
        setattr(self, counter, getattr(self, counter) + by)

    def view(self) -> GroupView:
        return GroupView(
            id=self.id,
            state=self.state,
            outcome=self.outcome,
            on_failure=self.on_failure,
            total=self.total,
            unfinished=self.unfinished,
            done=self.done,
            failed=self.failed,
            canceled=self.canceled,
            superseded=self.superseded,
            created_at=self.created_at,
            closed_at=self.closed_at,
            paused=self.paused,
            why=self.why,
        )


K = TypeVar("K", int, str, tuple[str, str])
HeapEntry = tuple[int, int]
"""Priority and number."""

SLACK = 1024


class Timeline(Generic[K]):
    """Entries (time, key) in the order of time. `alive` returns whether an entry is still valid. The same
    entry may be pushed twice.

    It has a heap of times, and a list of keys for each time, because most entries of a batch have the same
    time. Only the keys of the first time are kept as a heap."""

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
        """The first valid entry."""
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
        """The time of the first valid entry."""
        entry = self.peek()
        return None if entry is None else entry[0]

    def pop(self, now: int | None = None) -> tuple[int, K] | None:
        """Remove the first entry if it is due at `now` (None: at any time) and return it."""
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
        """Remove at most `limit` due keys and return them in order."""
        found: list[K] = []
        while len(found) < limit and (entry := self.pop(now)) is not None:
            found.append(entry[1])
        return found

    def __len__(self) -> int:
        """All entries, including stale ones."""
        return self._size

    def __iter__(self) -> Iterator[tuple[int, K]]:
        """All valid entries, unordered; an entry may occur twice."""
        return ((at, key) for at, keys in self._keys.items() for key in keys if self._alive(at, key))


class ReadyJobs:
    """The ready jobs of a part, or the jobs of a queue without a part, by (priority, seq). Suspects have a
    heap of their own, so that a claim that takes none does not scan them."""

    __slots__ = ("_heap", "_jobs", "_suspects", "ready")

    def __init__(self, jobs: dict[int, Job]) -> None:
        self._jobs = jobs
        self._heap: list[HeapEntry] = []
        self._suspects: list[HeapEntry] = []
        self.ready = 0

    def add(self, job: Job) -> None:
        self.ready += 1
        self.put_back(job)
        if len(self) > 2 * self.ready + SLACK:
            for heap, suspect in ((self._heap, False), (self._suspects, True)):
                heap[:] = {entry for entry in heap if self._is_valid(entry, suspect)}
                heapify(heap)

    def put_back(self, job: Job) -> None:
        heappush(self._heap if job.losses < SUSPECT else self._suspects, (job.priority, job.seq))

    def pop(self, now: int, expired: list[Job], suspects: bool = True) -> Job | None:
        """Remove the first job that may run, and return it. Expired jobs before it are added to `expired`."""
        return next(self.take(now, expired, int(suspects)), None)

    def take(self, now: int, expired: list[Job], suspects: int | None = None) -> Iterator[Job]:
        """As `pop`, one job after another, with at most `suspects` suspects (None: no limit)."""
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
        """The first suspect comes before the first other job."""
        suspect, other = (
            self._first(self._suspects, True, now, expired),
            self._first(self._heap, False, now, expired),
        )
        return suspect is not None and (other is None or suspect < other)

    def _first(self, heap: list[HeapEntry], suspect: bool, now: int, expired: list[Job]) -> HeapEntry | None:
        """The first valid, unexpired entry of a heap. Duplicates of it are removed."""
        while heap:
            entry = heap[0]
            job = self._jobs.get(entry[1])
            if job is not None and self._is_valid(entry, suspect):
                if job.expires_at is None or job.expires_at > now:
                    _drop_duplicates(heap)
                    return entry
                _drop_duplicates(heap)
                expired.append(job)
            heappop(heap)
        return None

    def _is_valid(self, entry: HeapEntry, suspect: bool) -> bool:
        job = self._jobs.get(entry[1])
        ready = job is not None and job.state is READY and job.priority == entry[0]
        return ready and job is not None and (job.losses >= SUSPECT) is suspect

    def __len__(self) -> int:
        """All entries, including stale ones."""
        return len(self._heap) + len(self._suspects)

    def __iter__(self) -> Iterator[HeapEntry]:
        """(priority, seq) of the ready jobs, unordered; an entry may occur twice."""
        yield from (entry for entry in self._heap if self._is_valid(entry, suspect=False))
        yield from (entry for entry in self._suspects if self._is_valid(entry, suspect=True))


def _drop_duplicates(heap: list[HeapEntry]) -> None:
    """Remove all but one of the equal entries at the top of a heap."""
    entry = heap[0]
    while len(heap) > 1 and min(heap[1:3]) == entry:
        heappop(heap)
