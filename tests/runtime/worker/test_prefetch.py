"""The number of jobs that a worker prefetches."""

from __future__ import annotations

import pytest

from towpath.runtime.worker.prefetch import (
    LONG_JOB,
    MAX_AHEAD,
    MEMORY,
    MIN_WAIT,
    PrefetchLimit,
    max_unsettled,
)

SLOTS = 32


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def working(seconds: float, jobs: int, commit: float) -> tuple[PrefetchLimit, Time]:
    """A worker that has run so many jobs in so many seconds, with commits of this duration."""
    time = Time()
    pace = PrefetchLimit(SLOTS, time)
    pace.supplied()
    time.now += seconds
    pace.committed(commit)
    pace.ended(jobs, SLOTS * seconds)
    return pace, time


def test_a_new_worker_claims_for_its_slots_only() -> None:
    assert PrefetchLimit(SLOTS, Time()).ahead() == 0


def test_its_first_claims_tell_how_long_a_commit_takes() -> None:
    """Its first jobs set the rate, though they were too quick to measure."""
    pace = PrefetchLimit(SLOTS, Time())
    pace.supplied(0.004)
    pace.ended(SLOTS, 0.0001)
    assert pace.ahead() == 2 * 4 * SLOTS


def test_as_much_as_starts_within_two_commits() -> None:
    pace, _ = working(0.01, 100, commit=0.004)
    assert pace.ahead() == 80


def test_a_slow_start() -> None:
    pace = PrefetchLimit(SLOTS, Time(), slow_start=True)
    pace.supplied(0.004)
    pace.ended(1, 0.0001)
    assert pace.ahead() == 0
    pace.ended(9, 0.0001)
    assert pace.ahead() == 5
    pace.forget()
    pace.ended(2, 0.0001)
    assert pace.ahead() == 1


def test_slow_jobs_are_not_claimed_ahead() -> None:
    pace, _ = working(10.0, 32, commit=0.004)
    assert pace.ahead() == 0


def test_jobs_that_end_together_are_not_fast() -> None:
    """All slots ran for a second and ended at once, a moment after claims arrived."""
    time = Time()
    pace = PrefetchLimit(SLOTS, time)
    pace.supplied()
    time.now += 0.002
    pace.committed(0.004)
    pace.ended(SLOTS, SLOTS * 1.0)
    assert pace.ahead() == 1


def test_waiting_for_claims_is_not_slowness() -> None:
    pace, time = working(0.01, 100, commit=0.004)
    for _ in range(5):
        pace.starved()
        time.now += 0.5 * MEMORY
        pace.supplied()
        time.now += 0.01
        pace.ended(100, SLOTS * 0.01)
    assert pace.ahead() == 80


def test_jobs_that_do_not_end_slow_it_down_before_they_end() -> None:
    pace, time = working(0.01, 100, commit=0.004)
    time.now += 1.0
    assert pace.ahead() == pace.startable() == 0


def test_what_was_long_ago_means_nothing() -> None:
    pace, time = working(0.01, 100, commit=0.004)
    pace.starved()
    time.now += MEMORY + 0.1
    pace.supplied()
    assert pace.ahead() == 0


def test_there_is_an_end_to_it() -> None:
    pace, _ = working(0.01, 100_000, commit=1.0)
    pace.ended(100_000, 1.0)
    pace.ended(100_000, 1.0)
    pace.ended(100_000, 1.0)
    assert pace.ahead() == MAX_AHEAD


def test_less_is_claimed_ahead_where_handlers_take_long() -> None:
    pace, _ = working(0.02, 10_000, commit=1.0)
    pace.ended(1, 2 * LONG_JOB)
    assert pace.ahead() == 4 * SLOTS


def test_less_is_claimed_ahead_where_handlers_use_commit() -> None:
    pace, time = working(0.001, 1000, commit=1.0)
    assert pace.ahead() == MAX_AHEAD
    pace.ended(1, 0.0, within=True)
    assert pace.ahead() == 4 * SLOTS
    time.now += 0.001
    pace.ended(1000, 0.0)
    assert pace.ahead() == 4 * SLOTS, "a moment ago one did"
    time.now += MEMORY
    pace.ended(1_000_000, 0.0)
    assert pace.ahead() == MAX_AHEAD


def test_a_claim_may_wait_four_times_as_long_as_was_predicted() -> None:
    pace, _ = working(0.01, 100, commit=0.004)
    assert pace.max_wait == MIN_WAIT
    assert pace.startable() in (499, 500)
    slow, _ = working(0.01, 100, commit=0.1)
    assert slow.max_wait == 4 * 2 * 0.1


@pytest.mark.parametrize(("slots", "most"), [(1, 256), (64, 256), (100, 400)])
def test_handlers_that_may_have_ended_without_a_settle(slots: int, most: int) -> None:
    assert max_unsettled(slots) == most


def test_a_slow_commit_counts_little_by_little() -> None:
    pace, _ = working(0.01, 100, commit=0.004)
    pace.committed(1.0)
    assert 80 < pace.ahead() < 0.25 * 2 * 10_000
