"""The state machine: the table, the diagram, every outcome."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core import lifecycle
from towpath.core.admission import admit
from towpath.core.checks import DAY, SECOND
from towpath.core.facts import AppendFacts
from towpath.core.job import (
    FINISHED,
    SUSPECT,
    WAITING,
    Done,
    FailOutcome,
    Job,
    Outcome,
    Reason,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    Spec,
    State,
    Stop,
)
from towpath.core.lifecycle import (
    REASONS,
    TRANSITIONS,
    Change,
    awaken,
    lose,
    purge_time,
    settle,
    suspect_delay,
)

NOW = 1000 * SECOND


def running(**changes: Any) -> Job:
    from msgspec.structs import replace

    (job,) = admit([Spec(id="a", queue="q")], AppendFacts(), NOW, 1).jobs
    return replace(job, state=State.RUNNING, attempts=1, fence=1, **changes)


def test_the_drawing_is_the_table() -> None:
    drawn = set()
    for source, target in re.findall(r"^    (\S+) --> (\S+)$", lifecycle.__doc__ or "", re.MULTILINE):
        drawn.add((None if source == "[*]" else State(source), State(target)))
    assert drawn == TRANSITIONS


def test_every_state_has_its_reasons() -> None:
    assert set(REASONS) == set(State)
    assert all(REASONS.values())
    assert set().union(*REASONS.values()) == set(Reason)


def test_the_states_are_waiting_running_or_finished() -> None:
    assert WAITING | FINISHED | {State.RUNNING} == set(State)
    assert not WAITING & FINISHED


def test_done_is_for_ever_and_only_ready_jobs_run() -> None:
    assert not [to for source, to in TRANSITIONS if source is State.DONE]
    assert [source for source, to in TRANSITIONS if to is State.RUNNING] == [State.READY]


@pytest.mark.parametrize(
    ("outcome", "state", "reason", "attempts", "failures", "ready_at"),
    [
        (Done(), State.DONE, Reason.NONE, 1, 0, None),
        (FailOutcome(), State.FAILED, Reason.FATAL, 1, 1, None),
        (Stop(), State.CANCELED, Reason.HANDLER, 1, 0, None),
        (RetryOutcome(), State.READY, Reason.RETRY, 1, 1, None),
        (RetryOutcome(5), State.SCHEDULED, Reason.RETRY, 1, 1, NOW + 5),
        (SnoozeOutcome(), State.READY, Reason.SNOOZED, 1, 0, None),
        (SnoozeOutcome(5), State.SCHEDULED, Reason.SNOOZED, 1, 0, NOW + 5),
        (Release(), State.READY, Reason.RELEASED, 0, 0, None),
        (Release(5), State.SCHEDULED, Reason.RELEASED, 0, 0, NOW + 5),
        (Refuse(), State.SCHEDULED, Reason.REFUSED, 0, 0, NOW + SECOND),
        (Refuse(5), State.SCHEDULED, Reason.REFUSED, 0, 0, NOW + SECOND),
        (Refuse(2 * SECOND), State.SCHEDULED, Reason.REFUSED, 0, 0, NOW + 2 * SECOND),
    ],
)
def test_every_outcome(
    outcome: Outcome, state: State, reason: Reason, attempts: int, failures: int, ready_at: int | None
) -> None:
    assert settle(running(), outcome, NOW) == Change(state, reason, attempts, failures, 0, ready_at)


def test_the_last_failure_is_for_good() -> None:
    assert settle(running(failures=1, max_attempts=2), RetryOutcome(), NOW) == Change(
        State.FAILED, Reason.EXHAUSTED, 1, 2, 0
    )
    assert settle(running(failures=0, max_attempts=2), RetryOutcome(), NOW).state is State.READY
    assert settle(running(max_attempts=1), SnoozeOutcome(), NOW).state is State.READY


outcomes = st.sampled_from(
    [
        Done(),
        FailOutcome(),
        Stop(),
        RetryOutcome(),
        RetryOutcome(7),
        SnoozeOutcome(),
        SnoozeOutcome(7),
        Release(),
        Refuse(),
    ]
)


@given(
    outcomes,
    st.sampled_from([None, Reason.REQUESTED, Reason.SUPERSEDED, Reason.ABORTED]),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_an_outcome_never_leaves_the_table(
    outcome: Outcome, asked: Reason | None, failures: int, most: int
) -> None:
    change = settle(running(cancel_requested=asked, failures=failures, max_attempts=most), outcome, NOW)
    assert (State.RUNNING, change.state) in TRANSITIONS
    assert change.reason in REASONS[change.state]
    assert (change.ready_at is not None) == (change.state is State.SCHEDULED)
    if asked is not None:
        assert change.state in FINISHED
        assert change.state is not State.CANCELED or change.reason is asked


@given(st.sampled_from([None, Reason.REQUESTED]), st.integers(0, 5), st.integers(1, 5), st.integers(1, 3))
def test_a_loss_never_leaves_the_table(asked: Reason | None, losses: int, most: int, attempts: int) -> None:
    change = lose(running(cancel_requested=asked, losses=losses, max_losses=most, max_attempts=attempts), NOW)
    assert (State.RUNNING, change.state) in TRANSITIONS
    assert change.reason in REASONS[change.state]
    assert (change.losses, change.failures, change.attempts) == (losses + 1, 0, 1)
    assert (change.ready_at is not None) == (change.state is State.SCHEDULED)
    if asked is None:
        assert (change.state is State.FAILED) == (losses + 1 >= most or attempts == 1)
        assert (change.state is State.READY) <= (losses + 1 < SUSPECT)


def test_the_delay_of_a_suspect_doubles_and_is_spread_over_its_whole_span() -> None:
    for losses, span in (
        (2, SECOND),
        (3, 2 * SECOND),
        (4, 4 * SECOND),
        (50, 300 * SECOND),
        (10**6, 300 * SECOND),
    ):
        delays = [suspect_delay(f"job-{n}", losses) for n in range(400)]
        assert all(0 < delay <= span for delay in delays)
        quarters = [
            sum(span * part < 4 * delay <= span * (part + 1) for delay in delays) for part in range(4)
        ]
        assert min(quarters) > 60


def test_awaken() -> None:
    assert awaken(NOW, 0, NOW) is State.READY
    assert awaken(NOW + 1, 0, NOW) is State.SCHEDULED
    assert awaken(NOW - 1, 2, NOW) is State.BLOCKED
    assert awaken(NOW + 1, 1, NOW) is State.BLOCKED


def test_purge_time() -> None:
    assert purge_time(State.FAILED, NOW, 5, 5) is None
    assert purge_time(State.DONE, NOW, None, None) == NOW + 7 * DAY
    assert purge_time(State.CANCELED, NOW, None, 9) == NOW + 9
    assert purge_time(State.DONE, NOW, 0, 9) == NOW
