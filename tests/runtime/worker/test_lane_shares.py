"""The buffer of a worker with lanes, without a worker: the test delivers its demand, and ends the started
jobs."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from towpath.core import admission
from towpath.core.commands import Claimed
from towpath.core.facts import AppendFacts
from towpath.core.job import ClaimedJob, Release, Spec
from towpath.core.lanes import Lane
from towpath.core.limits import Bounds
from towpath.runtime.worker.buffer import PlainBuffer
from towpath.runtime.worker.lanes import LaneBuffer
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.testing import ManualClock

LANES = {
    "front": Lane(queues=("f",), reserved=2, lends=True),
    "back": Lane(queues=("b",), reserved=2, lends=True),
}


class Throttled:
    """An attempt with an overloaded service."""

    throttled = 60_000_000


class Silent:
    """A bus without listeners and a committer that commits nothing."""

    def wants(self, kind: object) -> bool:
        return False


class StubEngine:
    owner, clock, dispatcher = "me", ManualClock(), None
    bus = committer = Silent()


class OpenBuffer(LaneBuffer):
    """Delivers its own demand."""

    def __init__(self, lanes: dict[str, Lane], concurrency: int = 4, **options: Any) -> None:
        queues = tuple(queue for lane in lanes.values() for queue in lane.queues)
        wanted = WorkerOptions(queues=queues, lanes=lanes, concurrency=concurrency, **options)
        super().__init__(cast("Any", StubEngine()), wanted, 1, self.add, _fail, None)
        self._is_open = True

    def deliver(self, *claims: ClaimedJob) -> None:
        self.taken(Claimed(claims))

    def demand_by_queue(self) -> dict[str, int]:
        """The demand for each queue alone."""
        command = self.wanted()
        found: dict[str, int] = {}
        for want in () if command is None else command.wants:
            before = found.get(want.queue, 0)
            most = want.n if want.upto is None else min(want.n, want.upto - before)
            found[want.queue] = before + max(0, most)
        return found

    def start_all(self) -> list[str]:
        started = []
        while (claim := self.next()) is not None:
            started.append(claim.job.queue)
        return started


def _fail(error: object) -> None:
    raise AssertionError(error)


def claim(queue: str, n: int = 0, kind: str = "k") -> ClaimedJob:
    (job,) = admission.admit([Spec(id=f"{queue}{n}", queue=queue, kind=kind)], AppendFacts(), 0, n + 1).jobs
    return ClaimedJob(replace(job, fence=1))


def claims(queue: str, count: int) -> list[ClaimedJob]:
    return [claim(queue, n) for n in range(count)]


def test_a_paused_lane_gives_back_what_was_claimed_ahead() -> None:
    buffer = OpenBuffer(LANES)
    back = claims("b", 3)
    buffer.deliver(*back, claim("f"))
    buffer.pause(["back", "of another worker"])
    assert sorted(each.id for each, outcome in buffer.surplus() if outcome == Release()) == ["b0", "b1", "b2"]
    assert buffer.start_all() == ["f"]
    assert buffer.demand_by_queue() == {"f": 3}, "all the slots that are left"
    buffer.deliver(claim("b", 7))
    assert [each.id for each, _ in buffer.surplus()] == ["b7"], "it was on its way when the pause came"
    buffer.pause([])
    assert buffer.demand_by_queue()["b"] == 3
    assert buffer.surplus() == []


def test_a_worker_without_lanes_of_its_own_has_none_to_pause() -> None:
    options = WorkerOptions(
        queues=("q",), resources={"api": Bounds(1, 4)}, needs={"k": "api"}, sources={"q": "api"}
    )
    buffer = LaneBuffer(cast("Any", StubEngine()), options, 1, lambda claims: None, _fail, None)
    buffer.pause(["all"])
    buffer._is_open = True
    assert buffer.wanted() is not None
    assert (buffer.lanes, buffer.lane_of("q")) == ((), None)


# Limits of a lane


def test_an_adaptive_lane_has_a_limit_of_its_own() -> None:
    lanes = {
        "front": LANES["front"],
        "back": Lane(queues=("b", "c"), reserved=2, lends=True, adaptive=(1, 8)),
    }
    buffer = OpenBuffer(
        lanes, concurrency=32, resources={"api": Bounds(1, 8)}, needs={"x": "api"}, sources={"c": "api"}
    )
    assert buffer.demand_by_queue() == {"f": 32, "b": 4, "c": 4}
    buffer.deliver(*claims("b", 2), claim("c", kind="x"))
    assert sorted(buffer.start_all()) == ["b", "b", "c"]
    assert buffer.demand_by_queue() == {"f": 29, "b": 1, "c": 1}
    assert [(each.name, each.running, each.limit) for each in buffer.limits] == [
        ("resource api", 1, 4),
        ("lane back", 3, 4),
    ]
    assert [each.queues for each in buffer.limits] == [("c",), ("b", "c")]
    buffer.ended(claim("b"), True, None)
    assert [each.running for each in buffer.limits] == [1, 2]


def test_too_much_in_an_adaptive_lane_holds_the_lane_back() -> None:
    buffer = OpenBuffer(
        {"front": LANES["front"], "back": Lane(queues=("b",), adaptive=(1, 8))}, concurrency=32
    )
    buffer.deliver(*claims("b", 4))
    buffer.start_all()
    buffer.deliver(claim("b", 9))
    buffer.ended(claim("b"), False, cast("RunnableAttempt", Throttled()))
    (limit,) = buffer.limits
    assert (limit.limit, limit.running) == (2, 3)
    assert limit.until is not None
    assert [each.id for each, _ in buffer.surplus()] == ["b9"]
    assert buffer.next() is None


# New settings


def test_what_runs_counts_in_the_new_lanes() -> None:
    before = OpenBuffer({"all": Lane(queues=("f", "b"))})
    running = [*claims("b", 3), claim("f"), claim("gone")]
    before.deliver(*running[:4])
    assert len(before.start_all()) == 4
    buffer = OpenBuffer(LANES, concurrency=6)
    buffer.adopt(running, before)
    assert [lane.running for lane in buffer.lanes] == [1, 3]
    assert max(buffer.demand_by_queue().values()) == 1, "five of six slots are taken"
    buffer.deliver(claim("b", 5))
    buffer.deliver(claim("f", 5))
    assert buffer.start_all() == ["f"], "the lane that is short of its own"
    buffer.ended(claim("gone"), True, None)
    assert buffer.start_all() == ["b"]
    for each in [*claims("b", 3), claim("f"), claim("f", 5), claim("b", 5)]:
        buffer.ended(each, True, None)
    assert [lane.running for lane in buffer.lanes] == [0, 0]
    assert buffer.demand_by_queue() == {"f": 6, "b": 6}


def test_fewer_slots_than_run_already() -> None:
    buffer = OpenBuffer({"front": Lane(queues=("f",)), "back": Lane(queues=("b",))}, concurrency=2)
    buffer.adopt(
        claims("b", 4),
        PlainBuffer(cast("Any", StubEngine()), WorkerOptions(), 1, lambda claims: None, _fail, None),
    )
    assert buffer.demand_by_queue() == {}
    buffer.deliver(claim("f"))
    assert buffer.next() is None
    for each in claims("b", 3):
        buffer.ended(each, True, None)
    assert buffer.start_all() == ["f"]


@pytest.mark.parametrize(("most", "limit", "ran"), [(8, 2, 3), (9, 4, 3)])
def test_a_limit_with_the_same_bounds_keeps_what_it_has_learned(most: int, limit: int, ran: int) -> None:
    options: dict[str, Any] = {"needs": {"k": "api"}, "sources": {"b": "api"}}
    before = OpenBuffer(LANES, concurrency=9, resources={"api": Bounds(1, 8)}, **options)
    before.deliver(*claims("b", 4))
    before.start_all()
    throttled = Throttled()
    throttled.throttled = 0
    before.ended(claim("b"), False, cast("RunnableAttempt", throttled))
    buffer = OpenBuffer(LANES, concurrency=9, resources={"api": Bounds(1, most)}, **options)
    buffer.adopt(claims("b", 4)[1:], before)
    assert [(each.limit, each.running) for each in buffer.limits] == [(limit, ran)]
    for each in claims("b", 4)[1:]:
        buffer.ended(each, False, None)
    assert [each.running for each in buffer.limits] == [0]
