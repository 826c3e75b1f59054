"""Which lane gets the slots: a simulated worker that counts ticks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core.lanes import Lane, Shares, check
from towpath.errors import InvalidInput


class SimulatedWorker:
    """`backlog[lane]` jobs wait in the ledger; jobs at hand are claimed. A tick is a claim and starts, as in
    a worker."""

    def __init__(self, total: int, *lanes: Lane) -> None:
        self.shares = Shares(total, {f"lane{n}": lane for n, lane in enumerate(lanes)})
        self.backlog = [0] * len(lanes)
        self.at_hand = [0] * len(lanes)
        self.running = [0] * len(lanes)

    def claim(self, ahead: int = 0) -> None:
        taken = 0
        for call in self.shares.calls(self.running, self.at_hand, [ahead] * len(self.running)):
            n = max(0, min(call.n, call.upto - taken, self.backlog[call.lane]))
            self.backlog[call.lane] -= n
            self.at_hand[call.lane] += n
            taken += n

    def start(self) -> list[int]:
        started = []
        while (lane := self.shares.next(self.running, self.at_hand)) is not None:
            self.at_hand[lane] -= 1
            self.running[lane] += 1
            started.append(lane)
        return started

    def step(self, ahead: int = 0) -> list[int]:
        self.claim(ahead)
        return self.start()

    def end(self, lane: int, count: int = 1) -> None:
        assert self.running[lane] >= count
        self.running[lane] -= count


def lane(reserved: int | None = None, lends: bool = True, queue: str = "q") -> Lane:
    return Lane(queues=(queue,), reserved=reserved, lends=lends)


def test_an_empty_lane_lends_everything() -> None:
    world = SimulatedWorker(16, lane(4), lane(4))
    world.backlog = [0, 100]
    world.step()
    assert world.running == [0, 16]
    other = SimulatedWorker(16, lane(4), lane(4))
    other.backlog = [100, 0]
    other.step()
    assert other.running == [16, 0]


def test_reserved_slots_come_back_as_jobs_end() -> None:
    world = SimulatedWorker(8, lane(3), lane(2))
    world.backlog = [0, 100]
    world.step()
    world.backlog[0] = 100
    assert world.step() == []
    for expected in (0, 0, 0, 0, 0, 0):
        world.end(1)
        assert world.step() == [expected]
    assert world.running == [6, 2]
    world.end(1)
    assert world.step() == [1], "now it is the second lane that is short of its own"


def test_the_first_lane_is_preferred_for_what_is_shared() -> None:
    world = SimulatedWorker(10, lane(2), lane(2))
    world.backlog = [100, 100]
    world.step()
    assert world.running == [8, 2]


@pytest.mark.parametrize("flooded", [0, 1])
@pytest.mark.parametrize("ahead", [0, 5])
def test_a_flood_in_one_lane_never_stops_the_other(flooded: int, ahead: int) -> None:
    chance = random.Random(flooded)
    world = SimulatedWorker(6, lane(2), lane(2))
    world.backlog[flooded] = 1_000_000
    other = 1 - flooded
    started, longest, waited = 0, 0, 0
    for tick in range(2000):
        if tick % 3 == 0:
            world.backlog[other] += 1
        due = world.backlog[other] + world.at_hand[other] > 0
        now = world.step(ahead)
        started += now.count(other)
        waited = waited + 1 if due and other not in now else 0
        longest = max(longest, waited)
        busy = [each for each, count in enumerate(world.running) if count]
        world.end(chance.choice(busy))
    # A slot becomes free at every tick. If one reserved slot is taken, the next one is for the lane with too
    # few.
    assert longest <= 6 + ahead
    assert started >= 600


def test_a_lane_that_does_not_lend_never_waits_for_another() -> None:
    world = SimulatedWorker(8, lane(3, lends=False), lane(2))
    world.backlog = [0, 100]
    world.step(ahead=4)
    assert world.running == [0, 5]
    world.backlog[0] = 2
    assert world.step() == [0, 0]
    world.backlog[0] = 100
    assert world.step() == [0]


def test_lanes_do_not_lend_by_default() -> None:
    world = SimulatedWorker(8, Lane(queues=("a",), reserved=3), Lane(queues=("b",), reserved=2))
    world.backlog = [0, 100]
    world.step(ahead=4)
    assert world.running == [0, 5]
    world.backlog[0] = 3
    assert world.step() == [0, 0, 0]


def test_what_ended_and_is_not_settled_counts_as_claimed_ahead() -> None:
    shares = Shares(8, {"a": lane(2), "b": lane(2)})
    most = [
        max(call.upto for call in shares.calls([4, 4], [0, 0], [30, 10], unsettled)) for unsettled in (0, 20)
    ]
    assert most == [40, 20]
    assert shares.calls([4, 4], [0, 0], [30, 10], 40) == []
    assert max(call.upto for call in shares.calls([2, 2], [0, 0], [30, 10], 42)) == 2, (
        "beyond that it takes slots"
    )


def test_a_lane_claims_nothing_for_slots_that_are_taken() -> None:
    """Jobs that started before the lane was declared use its slots: jobs of the lane wait for their end."""
    shares = Shares(4, {"a": lane(2, lends=False), "b": lane(2, lends=False)})
    assert shares.calls([0, 4], [0, 0], [0, 0]) == []
    assert [(call.lane, call.n) for call in shares.calls([0, 3], [0, 0], [0, 0])] == [(0, 1)]


def test_a_lane_that_does_not_lend_may_borrow() -> None:
    world = SimulatedWorker(8, lane(2), lane(3, lends=False))
    world.backlog = [0, 100]
    world.step()
    world.step()
    assert world.running == [0, 8]


@pytest.mark.parametrize("lends", [True, False])
def test_a_paused_lane_starts_nothing_and_lends_everything(lends: bool) -> None:
    world = SimulatedWorker(8, lane(3, lends=lends), lane(2))
    world.backlog = [100, 100]
    world.shares.pause(["lane0", "unknown"])
    assert set(world.step(ahead=2)) == {1}
    assert (world.running, world.at_hand[0]) == ([0, 8], 0)
    world.shares.pause([])
    world.end(1)
    assert world.step() == [0], "it gets its own back, as jobs end"


def test_what_a_paused_lane_has_at_hand_does_not_start() -> None:
    world = SimulatedWorker(4, lane(2), lane(2))
    world.at_hand = [2, 1]
    world.shares.pause(["lane0"])
    assert world.start() == [1]
    world.shares.pause(["lane1"])
    assert world.start() == [0, 0]


lanes = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=4)
steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["add", "end", "end", "step"]), st.integers(0, 3)),
    max_size=80,
)


@given(lanes, st.integers(0, 6), steps)
def test_slots_are_never_exceeded_and_reservations_are_met_first(
    given_lanes: list[tuple[int, bool]], spare: int, given_steps: list[tuple[int, str, int]]
) -> None:
    total = max(1, sum(reserved for reserved, _ in given_lanes) + spare)
    world = SimulatedWorker(total, *[lane(reserved, lends) for reserved, lends in given_lanes])
    kept = {n: reserved for n, (reserved, lends) in enumerate(given_lanes) if not lends}
    for place, what, ahead in given_steps:
        at = place % len(given_lanes)
        if what == "add":
            world.backlog[at] += 3
        elif what == "end" and world.running[at]:
            world.end(at)
        else:
            free = total - sum(world.running)
            started = world.step(ahead)
            assert sum(world.running) <= total
            assert sum(world.at_hand) <= 3 * len(given_lanes) + total
            for keeper, reserved in kept.items():
                others = sum(world.running) - world.running[keeper]
                assert others <= total - reserved
            if any(world.backlog) and not kept:
                # No job at hand waits while there is a free slot.
                assert sum(world.running) == total or not any(world.at_hand)
                assert len(started) == free


@pytest.mark.parametrize(
    ("total", "reserved", "found"),
    [
        (32, (None, None), (4, 4)),
        (16, (None, None), (2, 2)),
        (100, (None, 10), (12, 10)),
        (3, (None, None), (1, 1)),
        (2, (None, None), (1, 1)),
        (8, (7, None), (7, 1)),
        (8, (0, 8), (0, 8)),
        (1, (None,), (1,)),
    ],
)
def test_the_usual_reservation(total: int, reserved: tuple[int | None, ...], found: tuple[int, ...]) -> None:
    assert Shares(total, {str(n): lane(each) for n, each in enumerate(reserved)}).reserved == found


@pytest.mark.parametrize(
    ("lanes", "field"),
    [
        ({}, "len(lanes)"),
        ({"a b": lane()}, "lanes"),
        ({"a": ("q",)}, "lanes.a"),
        ({"a": Lane(queues=())}, "lanes.a.queues"),
        ({"a": Lane(queues="mail")}, "lanes.a.queues"),  # type: ignore[arg-type]
        ({"a": Lane(queues=("no queue",))}, "lanes.a.queues"),
        ({"a": lane(-1)}, "lanes.a.reserved"),
        ({"a": lane(5), "b": lane(4, queue="r")}, "lanes.a.reserved"),
        ({"a": lane(8), "b": lane(queue="r")}, "concurrency"),
        ({"a": lane(queue="mail"), "b": lane(queue="mail")}, "lanes.b.queues"),
        ({"a": lane(queue="mail/x"), "b": lane(queue="mail/*")}, "lanes.b.queues"),
        ({"a": lane(lends=1)}, "lanes.a.lends"),  # type: ignore[arg-type]
        ({"a": Lane(queues=("q",), adaptive=(5, 4))}, "lanes.a.adaptive"),
        ({"a": Lane(queues=("q",), adaptive=(0, 4))}, "lanes.a.adaptive"),
        ({"a": Lane(queues=("q",), adaptive=True)}, "lanes.a.adaptive"),  # type: ignore[arg-type]
        ({"a": Lane(queues=("q",), adaptive=(1, 2, 3))}, "lanes.a.adaptive"),  # type: ignore[arg-type]
    ],
)
def test_bad_lanes_are_refused_with_the_field(lanes: dict[str, Lane], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(lanes, 8)
    assert refused.value.details["field"] == field
