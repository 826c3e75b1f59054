"""The rows that change in place: queues, parts, groups; and the small ones that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

import msgspec

from towpath.core.commands import GroupState, OnFailure
from towpath.core.job import SERIAL, Job, Spec, State
from towpath.core.lifecycle import counter_of
from towpath.core.limits import Rate
from towpath.core.views import Counts, GroupView, PartView, QueueView
from towpath.ledger.memory.timeline import SLACK, Line, Timeline

Spot = tuple[int, str]


class Part:
    """`spot` is the part's one valid entry in its queue's rotation; older entries are recognised by not being it."""

    def __init__(self, queue: str, name: str, jobs: dict[int, Job]) -> None:
        self.queue, self.name = queue, name
        self.line = Line(jobs)
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
        self.spot: Spot | None = None

    def willing(self) -> bool:
        """May it take part in a claim as soon as its `next_at` is reached?"""
        return self.line.ready > 0 and not self.paused and (self.cap is None or self.running < self.cap)

    def view(self) -> PartView:
        return PartView(
            queue=self.queue,
            name=self.name,
            ready=self.line.ready,
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
    """The willing parts of a queue by (served, name), and apart those that wait for their `next_at`, by that."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts
        self._line: list[Spot] = []
        self._held: list[Spot] = []

    def offer(self, part: Part) -> None:
        if part.spot is None and part.willing():
            part.spot = (part.served, part.name)
            self._line = self._push(self._line, part.spot)

    def recall(self, part: Part) -> None:
        """Its `next_at` may be earlier than it was."""
        part.spot = None
        self.offer(part)

    def take(self, room: int, now: int) -> list[Part]:
        """The first `room` parts that may run something. They are out of the rotation until they are offered again."""
        while self._held and self._held[0][0] <= now:
            if (part := self._pop(self._held)) is not None:
                self.offer(part)
        found: list[Part] = []
        while self._line and len(found) < room:
            if (part := self._pop(self._line)) is None or not part.willing():
                continue
            if part.next_at > now:
                part.spot = (part.next_at, part.name)
                self._held = self._push(self._held, part.spot)
            else:
                found.append(part)
        return found

    def _pop(self, heap: list[Spot]) -> Part | None:
        spot = heappop(heap)
        part = self._parts.get(spot[1])
        if part is None or part.spot is not spot:
            return None
        part.spot = None
        return part

    def _push(self, heap: list[Spot], spot: Spot) -> list[Spot]:
        heappush(heap, spot)
        if len(heap) > 2 * len(self._parts) + SLACK:
            heap = [spot for spot in heap if (part := self._parts.get(spot[1])) is not None and part.spot is spot]
            heapify(heap)
        return heap


class Queue:
    def __init__(self, name: str, parts: dict[str, Part], jobs: dict[int, Job]) -> None:
        self.name = name
        self.parts = parts
        self.counts = dict.fromkeys(State, 0)
        self.loose = Line(jobs)
        self.waiting: Counter[str] = Counter()
        """Blocked, scheduled and ready jobs by part."""
        self.suspects: Counter[str | None] = Counter()
        """Ready suspects by part."""
        self.rotation = Rotation(parts)
        self.scheduled: Timeline[int] = Timeline(
            lambda at, seq: (job := jobs.get(seq)) is not None and job.state is State.SCHEDULED and job.ready_at == at
        )
        self.purges: Timeline[int] = Timeline(lambda at, seq: (job := jobs.get(seq)) is not None and job.purge_at == at)
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


class Group:
    def __init__(self, id: str, on_failure: OnFailure, then: Mapping[str, tuple[Spec, ...]], now: int) -> None:
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


class Gate(msgspec.Struct, frozen=True):
    """A job waits for a group: for its success, for any end, or (a callback) for one outcome."""

    run_anyway: bool
    outcome: State | None = None

    def met(self, outcome: State | None) -> bool:
        return self.run_anyway or outcome is (self.outcome or State.DONE)


class Tombstone(msgspec.Struct, frozen=True):
    """What is left of a deleted job, or of an id that was refused in favour of the job `alias`."""

    id: str
    seq: int
    state: State
    settled_fence: int
    alias: str | None
    until: int
