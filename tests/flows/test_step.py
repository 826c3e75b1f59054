"""The state machine of one delivery of a step, as tables."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from towpath.core.admission import new_job
from towpath.core.job import Job, Reason, Spec, State
from towpath.flows.actions import Answer
from towpath.flows.plan import StepRetry
from towpath.flows.step import (
    Again,
    Effect,
    Facts,
    Finished,
    GaveUp,
    Move,
    Verdict,
    Waits,
    after_check,
    after_run,
    begin,
    effect_of,
    facts_of,
    max_attempts,
    told_by,
    verdict_text,
)

RETRY = StepRetry(attempts=3, check_attempts=2)
APPLIED, NOT_APPLIED, RUNNING, UNKNOWN = Answer


def facts(
    check: bool = True, undo: bool = False, deliveries: int = 1, failures: int = 0, unknowns: int = 0
) -> Facts:
    return Facts(RETRY, check, undo, deliveries, failures, unknowns)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(), Move.RUN),
        (facts(deliveries=2), Move.CHECK),
        (facts(check=False, deliveries=2), Move.RUN),
        (facts(undo=True), Move.CHECK),
        (facts(check=False, undo=True), Move.RUN),
        (facts(check=False, deliveries=4, failures=3), GaveUp(None, 0)),
    ],
)
def test_the_check_comes_first_after_the_first_delivery_and_before_an_undo(
    given: Facts, expected: Move | Verdict
) -> None:
    assert begin(given) == expected


@pytest.mark.parametrize(
    ("given", "answer", "failed", "expected"),
    [
        (facts(deliveries=2), APPLIED, False, Finished(found=True)),
        (facts(deliveries=2), NOT_APPLIED, False, Move.RUN),
        (facts(deliveries=2), RUNNING, False, Waits()),
        (facts(deliveries=2), UNKNOWN, False, Again(UNKNOWN, 1, 1)),
        (facts(deliveries=3, failures=1, unknowns=1), UNKNOWN, False, GaveUp(UNKNOWN, 2)),
        (facts(), APPLIED, True, Finished(found=True)),
        (facts(), NOT_APPLIED, True, Again(NOT_APPLIED, 1, 0)),
        (facts(failures=2), NOT_APPLIED, True, GaveUp(NOT_APPLIED, 0)),
        (facts(failures=3, unknowns=1), NOT_APPLIED, True, GaveUp(NOT_APPLIED, 1)),
        (facts(failures=2, unknowns=1), NOT_APPLIED, True, Again(NOT_APPLIED, 2, 1)),
        (facts(deliveries=4, failures=3), NOT_APPLIED, False, GaveUp(NOT_APPLIED, 0)),
        (facts(), RUNNING, True, Waits()),
        (facts(undo=True), NOT_APPLIED, False, Finished(found=True)),
        (facts(undo=True), APPLIED, False, Move.RUN),
        (facts(undo=True), RUNNING, False, Waits()),
        (facts(undo=True), APPLIED, True, Again(APPLIED, 1, 0)),
        (facts(undo=True), NOT_APPLIED, True, Finished(found=True)),
    ],
)
def test_the_answer_of_the_check_decides(
    given: Facts, answer: Answer, failed: bool, expected: Move | Verdict
) -> None:
    assert after_check(given, answer, failed) == expected


@pytest.mark.parametrize(
    ("given", "ok", "final", "expected"),
    [
        (facts(), True, False, Finished()),
        (facts(), False, False, Move.CHECK),
        (facts(check=False), False, False, Again(None, 1, 0)),
        (facts(check=False, failures=2), False, False, GaveUp(None, 0)),
        (facts(check=False), False, True, GaveUp(None, 0)),
    ],
)
def test_a_failed_action_is_checked_or_retried(
    given: Facts, ok: bool, final: bool, expected: Move | Verdict
) -> None:
    assert after_run(given, ok, final) == expected


def test_a_final_failure_is_not_retried_after_the_check() -> None:
    assert after_check(facts(), NOT_APPLIED, True, final=True) == GaveUp(NOT_APPLIED, 0)


def test_the_machine_gives_up_before_the_budget_of_the_job_is_spent() -> None:
    """Whatever the answers: at most attempts runs and check_attempts unknown answers fail."""
    for unknowns in range(RETRY.check_attempts):
        for runs in range(RETRY.attempts):
            assert unknowns + runs + 1 < max_attempts(RETRY)


# The stored verdict


def job(
    state: State, error: str | None, *, attempts: int = 1, fence: int = 1, reason: Reason = Reason.NONE
) -> Job:
    made = new_job(Spec(id="a", queue="q"), 1, 0)
    return replace(made, state=state, reason=reason, attempts=attempts, fence=fence, error=error)


def told(answer: Answer | None, fence: int = 1) -> str:
    return verdict_text(GaveUp(answer, 0), fence, "ValueError: no")


@pytest.mark.parametrize(
    ("given", "effect"),
    [
        (job(State.DONE, None), Effect.APPLIED),
        (job(State.DONE, None, reason=Reason.MARKED), Effect.APPLIED),
        (job(State.DONE, None, reason=Reason.SKIPPED), Effect.NONE),
        (job(State.CANCELED, None, attempts=0, fence=0), Effect.NONE),
        (job(State.FAILED, told(NOT_APPLIED)), Effect.NONE),
        (job(State.CANCELED, told(NOT_APPLIED)), Effect.NONE),
        (job(State.FAILED, told(UNKNOWN)), Effect.UNKNOWN),
        (job(State.FAILED, told(None)), Effect.PERHAPS),
        (job(State.FAILED, "towpath.errors.TimedOut: it ran longer than 5 s"), Effect.PERHAPS),
        # A later delivery died without a verdict.
        (job(State.FAILED, told(NOT_APPLIED, 1), attempts=2, fence=2), Effect.PERHAPS),
        (job(State.CANCELED, None, attempts=1), Effect.PERHAPS),
    ],
)
def test_the_effect_of_a_step_that_has_ended(given: Job, effect: Effect) -> None:
    assert effect_of(given) is effect


def test_the_error_of_a_delivery_is_read_by_the_next_one() -> None:
    text = f"towpath.Retry: {verdict_text(Again(UNKNOWN, 2, 2), 7, 'no route to host')}"
    assert told_by(text) == (UNKNOWN, 7, 2)
    waiting = replace(job(State.RUNNING, text, attempts=4, fence=8), failures=3)
    assert facts_of(waiting, RETRY, True) == Facts(RETRY, True, False, 4, 3, 2)


@pytest.mark.parametrize("error", [None, "", "ValueError: unknown (delivery", "applied"])
def test_an_error_without_a_verdict(error: str | None) -> None:
    assert told_by(error) is None


def test_a_revived_step_has_a_new_budget() -> None:
    revived = replace(job(State.RUNNING, told(UNKNOWN)), failures=0)
    assert facts_of(revived, RETRY, True).unknowns == 0
