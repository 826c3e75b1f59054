"""The prefetch of a worker with a resource, and the claims that it releases: its buffer on a memory ledger,
without a worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from towpath.core.commands import Append, Claimed, Command, Hasten
from towpath.core.job import ClaimedJob, Release, Spec
from towpath.core.lanes import Lane
from towpath.core.limits import Bounds
from towpath.errors import TowpathError
from towpath.events import Bus
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.runtime.worker.lanes import Ageing, LaneBuffer
from towpath.runtime.worker.options import WorkerOptions
from towpath.runtime.worker.prefetch import PrefetchLimit
from towpath.tasks.new_jobs import new_id

SLOTS = 8
LIMIT = 2
HOUR = 3_600_000_000


TWO_LANES: dict[str, Any] = {
    "lanes": {"short": Lane(queues=("api",), reserved=2), "long": Lane(queues=("other",), reserved=2)},
    "resources": {},
    "needs": {},
    "sources": {},
}


class FixedPrefetch(PrefetchLimit):
    """Always predicts the same number."""

    def __init__(self, ahead: int) -> None:
        super().__init__(SLOTS)
        self._steady = ahead

    def ahead(self) -> int:
        return self._steady

    def forget(self) -> None:
        self._steady = 0


class IntakeHarness:
    """Jobs of kind `call` use the resource `api`, which takes two at once; their queue is `api`. Jobs of kind
    `other` use no resource."""

    def __init__(self, **options: Any) -> None:
        self.ledger = MemoryLedger()
        self.kicked = asyncio.Event()
        committer = SimpleNamespace(
            add_demand=lambda demand: None, drop_demand=lambda demand: None, kick=self.kicked.set
        )
        self._engine: Any = SimpleNamespace(committer=committer, bus=Bus(), owner="me#1")
        self.buffer = self.new_intake(**options)
        self.buffer.open()
        self.running: list[ClaimedJob] = []

    def new_intake(self, **options: Any) -> LaneBuffer:
        usual: dict[str, Any] = {"queues": ("api", "other"), "concurrency": SLOTS}
        uses: dict[str, Any] = {
            "resources": {"api": Bounds(LIMIT, LIMIT)},
            "needs": {"call": "api"},
            "sources": {"api": "api"},
        }
        chosen = WorkerOptions(**usual | uses | options)
        return LaneBuffer(self._engine, chosen, 30_000_000, self._deliver, self._failed, None)

    def _deliver(self, claims: list[ClaimedJob]) -> None:
        self.buffer.add(claims)

    def _failed(self, error: TowpathError) -> None:
        raise error

    def put(self, queue: str, count: int, **options: Any) -> None:
        kind = "call" if queue == "api" else "other"
        self.ledger.apply(
            [Append(tuple([Spec(id=new_id(), queue=queue, kind=kind, **options) for _ in range(count)]))]
        )

    def claim(self) -> Counter[str]:
        """The claims of one commit, by queue."""
        command = self.buffer.wanted()
        if command is None:
            return Counter()
        (reply,) = self.ledger.apply([command])
        assert isinstance(reply, Claimed)
        self.buffer.taken(reply)
        return Counter(claim.job.queue for claim in reply.claims)

    def start(self) -> Counter[str]:
        """Start the claims that may start."""
        began: list[ClaimedJob] = []
        while len(self.running) + len(began) < SLOTS and (claim := self.buffer.next()) is not None:
            began.append(claim)
        self.running += began
        return Counter(claim.job.queue for claim in began)

    def end(self, throttled: int | None = None) -> None:
        attempt: Any = SimpleNamespace(throttled=throttled)
        for claim in self.running:
            self.buffer.ended(claim, throttled is None, attempt)
        self.running = []

    def quick(self, ahead: int) -> None:
        """Jobs of `api` take so long; the others are not measured."""
        for number, line in enumerate(self.buffer._sets):
            self.buffer.prefetch.limits[number] = FixedPrefetch(ahead if line.queues == "api" else 0)
        self.buffer.ask(SLOTS, kick=False)


def scenario(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


@scenario
async def test_quick_jobs_of_a_resource_are_claimed_ahead_and_slow_ones_are_not() -> None:
    harness = IntakeHarness()
    harness.put("api", 1000)
    assert harness.claim() == {"api": LIMIT}
    assert harness.claim() == {}
    harness.start()
    harness.end()
    harness.quick(ahead=100)
    claimed = harness.claim() + harness.claim() + harness.claim()
    assert LIMIT + 90 <= claimed["api"] <= LIMIT + 100
    assert harness.start() == {"api": LIMIT}, "claimed is not started"
    assert harness.buffer.surplus() == [], "they will start soon"


@scenario
async def test_what_waits_for_a_resource_takes_no_slot_of_the_others() -> None:
    harness = IntakeHarness()
    harness.put("api", 1000)
    harness.quick(ahead=100)
    harness.claim()
    harness.start()
    harness.put("other", 1000)
    assert harness.claim()["other"] >= SLOTS - LIMIT
    assert harness.start() == {"other": SLOTS - LIMIT}


@pytest.mark.parametrize("after", [0, HOUR])
def test_a_service_that_is_asked_too_much_gets_nothing_that_was_claimed_ahead(after: int) -> None:
    @scenario
    async def run() -> None:
        harness = IntakeHarness()
        harness.put("api", 1000)
        harness.quick(ahead=100)
        harness.claim()
        harness.start()
        harness.end(throttled=after)
        harness.buffer.ask(SLOTS, kick=False)
        given = harness.buffer.surplus()
        left = len(harness.buffer)
        assert len(given) > 40
        assert {type(outcome) for _, outcome in given} == {Release}, "nothing is spent"
        assert left == (0 if after else LIMIT)
        assert harness.start().total() == left
        assert harness.claim() == {}
        harness.buffer.close()

    run()


@scenario
async def test_jobs_with_one_attempt_are_not_claimed_ahead_of_their_resource() -> None:
    harness = IntakeHarness()
    harness.put("api", 100)
    harness.quick(ahead=100)
    while harness.claim() or harness.buffer:
        harness.start()
        harness.end()
    harness.put("api", 100, max_attempts=1)
    harness.buffer.ask(SLOTS, kick=False)
    assert harness.claim() + harness.claim() == {"api": LIMIT}


@scenario
async def test_what_runs_when_the_options_change_is_counted_on() -> None:
    harness = IntakeHarness(queues=("api", "other", "old"))
    harness.put("api", LIMIT)
    harness.put("other", 2)
    harness.put("old", 1)
    harness.claim()
    assert harness.start().total() == 5
    before = harness.buffer
    before.close()
    harness.buffer = harness.new_intake(queues=("api", "other"))
    harness.buffer.adopt(harness.running, before)
    harness.buffer.open()
    harness.put("api", 50)
    harness.put("other", 50)
    assert harness.claim() == {"other": SLOTS - 5}, "the resource is used up, and so are five slots"
    harness.end()
    for claim in harness.buffer.clear():
        assert claim.job.queue == "other"
    harness.buffer.ask(SLOTS, kick=False)
    assert harness.claim() == {"api": LIMIT, "other": SLOTS - LIMIT}


@scenario
async def test_a_resource_that_waits_is_asked_again_after_a_pause() -> None:
    harness = IntakeHarness(lanes={"one": Lane(queues=("api",)), "two": Lane(queues=("other",))})
    harness.put("api", 10)
    harness.claim()
    harness.start()
    harness.end(throttled=20_000)
    harness.buffer.ask(SLOTS, kick=False)
    harness.buffer.close()
    harness.buffer.open()
    harness.kicked.clear()
    assert harness.claim() == {}
    await asyncio.wait_for(harness.kicked.wait(), 20)
    assert harness.claim() == {"api": LIMIT}


@scenario
async def test_ageing_goes_on_after_a_pause() -> None:
    posted: list[Command] = []
    engine: Any = SimpleNamespace(
        committer=SimpleNamespace(post=lambda commands, received: posted.extend(commands))
    )
    ageing = Ageing(engine, [Lane(queues=("bulk",), ageing=60)])
    for rounds in (1, 2):
        ageing.start()
        ageing.stop()
        assert posted == [Hasten("bulk", 60_000_000)] * rounds


@scenario
async def test_long_jobs_in_one_lane_do_not_slow_down_the_prediction_for_another() -> None:
    harness = IntakeHarness(**TWO_LANES)
    now = [100.0]
    short, long = harness.buffer.prefetch.limits = [PrefetchLimit(SLOTS, lambda: now[0]) for _ in range(2)]
    for pace in (short, long):
        pace.supplied(0.005)
    for _ in range(20):
        now[0] += 0.010
        harness.buffer.prefetch.measure([ended("api", 0.010)] * 6)
    now[0] += 0.8
    harness.buffer.prefetch.measure([ended("other", 1.0)] * 2)
    short.supplied()
    for _ in range(20):
        now[0] += 0.010
        harness.buffer.prefetch.measure([ended("api", 0.010)] * 6)
    assert harness.buffer.prefetch.ahead() == [6, 0]


def ended(queue: str, seconds: float) -> Any:
    return SimpleNamespace(within=None), SimpleNamespace(queue=queue), seconds, object()


@scenario
async def test_the_preferred_lane_gets_every_shared_slot_while_it_has_jobs() -> None:
    """Also if the prefetch is larger than the claims of one batch."""
    harness = IntakeHarness(**TWO_LANES)
    harness.buffer.prefetch.limits = [FixedPrefetch(10), FixedPrefetch(0)]
    harness.put("api", 1000)
    harness.put("other", 1000)
    assert harness.claim() == {"api": SLOTS - 2 + 5, "other": 2}
    assert harness.start() == {"api": SLOTS - 2, "other": 2}
    for _ in range(10):
        short = [claim for claim in harness.running if claim.job.queue == "api"]
        harness.running = [claim for claim in harness.running if claim not in short]
        for claim in short:
            harness.buffer.ended(claim, True, None)
        assert set(harness.claim()) <= {"api"}
        assert harness.start() == {"api": SLOTS - 2}


@scenario
async def test_claims_that_cannot_start_in_time_go_back() -> None:
    harness = IntakeHarness(**TWO_LANES)
    harness.buffer.prefetch.limits = [FixedPrefetch(100), FixedPrefetch(100)]
    harness.put("api", 200)
    harness.put("other", 200)
    harness.claim()
    harness.buffer.prefetch.watch()
    harness.start()
    at_hand = len(harness.buffer)
    started = harness.buffer.prefetch.starts
    assert (len(harness.buffer.late()), len(harness.buffer)) == (at_hand - 2 * sum(started), 2 * sum(started))
    harness.buffer.prefetch.watch()
    assert len(harness.buffer.late()) == 2 * sum(started), "none has started since"
    assert len(harness.buffer) == 0
