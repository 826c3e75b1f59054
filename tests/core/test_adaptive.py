"""The limiter against a simulated service of unknown capacity, on a manual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core.checks import SECOND
from towpath.core.limits import HOLD_ROUNDS, Bounds, Limiter, LimiterStart
from towpath.errors import InvalidInput

MS = SECOND // 1000


class Service:
    """Calls beyond `capacity` at once are throttled quickly; the others take about 100 ms. There is always a
    next call."""

    def __init__(self, limiter: Limiter, seed: int, capacity: int, after: int = 0) -> None:
        self.limiter, self.capacity, self.after = limiter, capacity, after
        self.now = self.inside = self.turned_away = self.served = 0
        self.slower = 1.0
        """The factor of the duration of a call."""
        self._chance = random.Random(seed)
        self._calls: list[tuple[int, int, bool, LimiterStart]] = []
        self._count = 0

    def run(self, seconds: float) -> float:
        """Run calls; return the average number of concurrent calls."""
        began, end, area = self.now, self.now + round(seconds * SECOND), 0
        while self.now < end:
            while self.limiter.room(self.now):
                self._call()
            due = self._calls[0][0] if self._calls else max(self.limiter.until, self.now + 1)
            area += self.inside * (min(due, end) - self.now)
            self.now = min(due, end)
            while self._calls and self._calls[0][0] <= self.now:
                self._answer(*heapq.heappop(self._calls)[2:])
        return area / (end - began)

    def _call(self) -> None:
        ok = self.inside < self.capacity
        self.inside += ok
        spent = self._chance.uniform(80, 120) * self.slower if ok else self._chance.uniform(2, 10)
        self._count += 1
        heapq.heappush(
            self._calls, (self.now + round(spent * MS), self._count, ok, self.limiter.start(self.now))
        )

    def _answer(self, ok: bool, ticket: LimiterStart) -> None:
        if ok:
            self.inside -= 1
            self.served += 1
            self.limiter.ended(ticket, self.now)
        else:
            self.turned_away += 1
            self.limiter.throttled(ticket, self.now, self.after)


@pytest.mark.parametrize("capacity", [1, 2, 7, 20, 50, 200])
@pytest.mark.parametrize("seed", range(5))
def test_it_settles_within_15_percent_of_a_hidden_capacity(capacity: int, seed: int) -> None:
    service = Service(Limiter(Bounds(1, 1000)), seed, capacity)
    service.run(20)
    before = service.served, service.turned_away
    assert service.run(60) >= 0.85 * capacity
    served, away = service.served - before[0], service.turned_away - before[1]
    assert away <= 0.15 * served
    assert service.limiter.limit <= 1.15 * capacity + 2


@pytest.mark.parametrize(("first", "then"), [(10, 80), (80, 10), (64, 1), (1, 64), (20, 24)])
@pytest.mark.parametrize("seed", range(5))
def test_it_follows_a_capacity_that_changes(first: int, then: int, seed: int) -> None:
    service = Service(Limiter(Bounds(1, 1000)), seed, first)
    service.run(30)
    service.capacity = then
    service.run(30)
    assert 0.85 * then <= service.run(60) <= then


def test_throttling_halves_once_for_all_that_ran() -> None:
    limiter = Limiter(Bounds(1, 64))
    limiter.limit = 16
    tickets = [limiter.start(0) for _ in range(16)]
    for ticket in tickets[:9]:
        limiter.throttled(ticket, 10)
    assert (limiter.limit, limiter.running) == (8, 7)
    late = limiter.start(11)
    limiter.throttled(late, 12)
    assert limiter.limit == 4


def test_the_least_and_the_most_are_kept() -> None:
    limiter = Limiter(Bounds(3, 5))
    for now in range(100):
        limiter.ended(LimiterStart(now, limiter.start(now).load, 0), now + 1)
        filled = [limiter.start(now) for _ in range(limiter.room(now))]
        for ticket in filled:
            limiter.ended(ticket, now + 1)
    assert limiter.limit == 5
    for now in range(100, 110):
        limiter.throttled(limiter.start(now), now)
    assert limiter.limit == 3


def test_retry_after_stops_the_whole_resource_until_then() -> None:
    service = Service(Limiter(Bounds(1, 64)), 0, 8, after=2 * SECOND)
    while not service.turned_away:
        service.run(0.01)
    throttled = service.now
    served = service.served
    service.run(1.5)
    assert service.inside == 0
    assert service.served - served <= 8
    assert service.limiter.until >= throttled
    assert service.limiter.room(service.limiter.until - 1) == 0
    assert service.limiter.room(service.limiter.until) > 0


def test_an_earlier_retry_after_does_not_shorten_a_later_one() -> None:
    limiter = Limiter(Bounds())
    first, second = limiter.start(0), limiter.start(0)
    limiter.throttled(first, 1, 10 * SECOND)
    limiter.throttled(second, 2, 1 * SECOND)
    assert limiter.until == 1 + 10 * SECOND


def test_success_without_load_teaches_nothing() -> None:
    limiter = Limiter(Bounds(1, 64))
    before = limiter.limit
    for now in range(1000):
        limiter.ended(limiter.start(now), now)
    assert limiter.limit == before


def test_failures_neither_raise_nor_lower() -> None:
    limiter = Limiter(Bounds(1, 64))
    before = limiter.limit
    for now in range(100):
        for ticket in [limiter.start(now) for _ in range(limiter.room(now))]:
            limiter.ended(ticket, now, ok=False)
    assert (limiter.limit, limiter.running) == (before, 0)


def test_rising_latency_holds_the_limit() -> None:
    service = Service(Limiter(Bounds(1, 1000)), 1, capacity=10_000)
    service.run(0.4)
    service.slower = 3.0
    service.run(1)
    held = service.limiter.limit
    service.run(60)
    assert service.limiter.limit == held < 1000
    # The service stays slow: after ten minutes the slower rounds are the new best rounds.
    service.run(600)
    assert service.limiter.limit == 1000


def test_it_rests_at_what_worked_before_it_tries_more() -> None:
    service = Service(Limiter(Bounds(1, 1000)), 3, 40)
    service.run(30)
    before = service.turned_away
    service.run(60)
    # A round takes about 100 ms, and each probe of a higher limit costs throttled calls and some rounds to
    # recover.
    assert service.turned_away - before <= 40 * 60 / (0.1 * HOLD_ROUNDS) * 0.15


@given(
    st.integers(1, 50),
    st.integers(0, 50),
    st.lists(st.sampled_from(["start", "ok", "failed", "throttled"]), max_size=200),
)
def test_whatever_happens_the_bounds_and_the_count_hold(least: int, more: int, steps: list[str]) -> None:
    limiter = Limiter(Bounds(least, least + more))
    out: list[LimiterStart] = []
    ends: dict[str, Callable[[LimiterStart, int], None]] = {
        "ok": limiter.ended,
        "failed": lambda ticket, now: limiter.ended(ticket, now, ok=False),
        "throttled": limiter.throttled,
    }
    for now, step in enumerate(steps):
        if step == "start":
            if limiter.room(now):
                out.append(limiter.start(now))
        elif out:
            ends[step](out.pop(), now)
        assert least <= limiter.limit <= least + more
        assert limiter.running == len(out)


@pytest.mark.parametrize(
    ("bounds", "field"), [((0, 5), "min"), ((6, 5), "min"), ((1, 0), "max"), ((1, 99_999), "max")]
)
def test_bounds_are_checked(bounds: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Bounds(*bounds)
    assert refused.value.details["field"] == field
