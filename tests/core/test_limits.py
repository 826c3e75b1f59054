"""Rates and the fair share, as properties."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from towpath.core.checks import SECOND
from towpath.core.limits import TURN, PartTurn, Rate, interval_of, permits, reason_after, share, spend

rates = st.builds(
    Rate, st.integers(1, 100), st.integers(100, 10 * SECOND).map(lambda n: n / SECOND), st.integers(1, 20)
)
arrivals = st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 30)), max_size=40)


def test_a_rate_without_burst() -> None:
    rate = Rate(2)
    assert interval_of(rate) == SECOND // 2
    assert permits(0, rate, SECOND, 9) == 1
    assert spend(0, rate, SECOND, 1) == SECOND + SECOND // 2
    assert permits(SECOND + 1, rate, SECOND, 9) == 0


def test_no_rate_is_no_limit() -> None:
    assert permits(0, None, 5, 9) == 9
    assert permits(6, None, 5, 9) == 0
    assert spend(3, None, 5, 9) == 3


@given(rates, arrivals)
def test_never_more_than_the_burst_and_what_time_allows(rate: Rate, arrivals: list[tuple[int, int]]) -> None:
    now, next_at = 1000 * SECOND, 0
    starts: list[tuple[int, int]] = []
    for gap, asked in arrivals:
        now += gap
        granted = permits(next_at, rate, now, asked)
        assert 0 <= granted <= asked
        next_at = spend(next_at, rate, now, granted)
        starts.append((now, granted))
    for n, (since, _) in enumerate(starts):
        for until in range(n, len(starts)):
            total = sum(count for _, count in starts[n : until + 1])
            assert total <= rate.burst + (starts[until][0] - since) // interval_of(rate)


@given(rates, st.integers(1, 50))
def test_after_a_long_rest_the_whole_burst_is_there(rate: Rate, asked: int) -> None:
    now = 1000 * SECOND
    used = spend(0, rate, now, permits(0, rate, now, 10**6))
    later = used + interval_of(rate) * rate.burst
    assert permits(used, rate, later, asked) == min(asked, rate.burst)


@given(rates, st.integers(0, 5 * SECOND))
def test_a_permit_given_back_can_be_used_again(rate: Rate, before: int) -> None:
    now = 1000 * SECOND
    next_at = now - before
    if permits(next_at, rate, now, 1):
        spent = spend(next_at, rate, now, 1)
        assert permits(spend(spent, rate, now, -1), rate, now, 1) == 1


@given(st.integers(0, 10**9), rates, st.integers(-20, 0))
def test_giving_back_never_goes_below_zero(next_at: int, rate: Rate, count: int) -> None:
    assert spend(next_at, rate, 10**9, count) >= 0


turns = st.lists(
    st.builds(
        PartTurn,
        st.sampled_from([*"abcdef", None]),
        st.integers(0, 5 * TURN),
        st.integers(1, 10),
        st.integers(0, 12),
    ),
    unique_by=lambda turn: turn.part,
    max_size=7,
)


@given(turns, st.integers(0, 6 * TURN), st.integers(0, 60))
def test_a_share_is_complete_and_within_the_rooms(turns: list[PartTurn], clock: int, n: int) -> None:
    picks = share(turns, clock, n)
    taken = Counter(pick.part for pick in picks)
    assert len(picks) == min(n, sum(turn.room for turn in turns))
    assert all(taken[turn.part] <= turn.room for turn in turns)
    assert [pick.clock for pick in picks] == sorted(pick.clock for pick in picks)
    assert all(pick.clock >= clock and pick.served > pick.clock for pick in picks)


@given(st.lists(st.integers(1, 10), min_size=2, max_size=5), st.integers(1, 20))
def test_parts_that_always_want_get_their_weight(weights: list[int], rounds: int) -> None:
    parts = [PartTurn(f"p{n}", 0, weight, 10**6) for n, weight in enumerate(weights)]
    taken = Counter(pick.part for pick in share(parts, 0, rounds * sum(weights)))
    for n, weight in enumerate(weights):
        assert abs(taken[f"p{n}"] - rounds * weight) <= len(weights)


@given(st.integers(2, 6), st.integers(0, 40))
def test_one_by_one_is_as_fair_as_all_at_once(parts: int, n: int) -> None:
    served, clock, one_by_one = dict.fromkeys(map(str, range(parts)), 0), 0, []
    for _ in range(n):
        (pick,) = share([PartTurn(name, at, 1, 1) for name, at in served.items()], clock, 1)
        assert pick.part is not None
        served[pick.part], clock = pick.served, pick.clock
        one_by_one.append(pick.part)
    at_once = share([PartTurn(name, 0, 1, n) for name in served], 0, n)
    assert one_by_one == [pick.part for pick in at_once]


def test_a_part_that_was_away_starts_at_the_present() -> None:
    picks = share([PartTurn("old", 10 * TURN, 1, 9), PartTurn("new", 0, 1, 9)], 9 * TURN, 6)
    assert [pick.part for pick in picks] == ["new", "new", "old", "new", "old", "new"]


def test_the_reason_of_a_limit_outlives_a_pause() -> None:
    why = reason_after(None, False, UNSET, "3 connections")
    paused = reason_after(why, False, True, "unpaid")
    assert paused == "unpaid; limits: 3 connections"
    assert reason_after(paused, True, True, None) == "no reason given; limits: 3 connections"
    assert reason_after(paused, True, UNSET, "4 connections") == "unpaid; limits: 4 connections"
    assert reason_after(paused, True, UNSET, UNSET) == paused
    assert reason_after(paused, True, UNSET, None) == "unpaid"
    assert reason_after(paused, True, False, None) == "3 connections"
    assert reason_after("3 connections", False, False, None) == "3 connections"
    assert reason_after("unpaid", True, UNSET, None) is None
    assert reason_after(None, True, UNSET, "unpaid") == "unpaid"
    assert reason_after("unpaid", True, False, None) is None
    assert reason_after("unpaid", True, False, "for now") == "for now"
