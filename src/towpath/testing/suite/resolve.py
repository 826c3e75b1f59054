"""Resolve: a person makes a job done."""

from __future__ import annotations

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import (
    GroupState,
    OnFailure,
    Placed,
    Resolution,
    Resolve,
    Resolved,
    Settle,
    Settled,
)
from towpath.core.history import AttemptOutcome, AttemptRecord
from towpath.core.job import Done, FailOutcome, RetryOutcome, State
from towpath.core.views import Counts
from towpath.errors import LostClaim, NotResolvable, UnknownJob
from towpath.testing.suite.groups import group_of
from towpath.testing.suite.harness import Harness, Suite, replace, spec, unique, whole_group

MARKED, SKIPPED = Resolution


def mark(harness: Harness, id: str, result: bytes | None = None) -> None:
    command = Resolve(id, MARKED, "done by hand", "ada", result)
    assert harness.do(Resolved, command) == Resolved(id, State.DONE)


class ResolveSuite(Suite):
    @pytest.mark.parametrize("outcome", Resolution)
    def test_a_waiting_job_is_done_by_a_decision(self, harness: Harness, outcome: Resolution) -> None:
        harness.add("a")
        harness.add("b", delay=SECOND, part="p")
        harness.add("c", after=["a"])
        harness.jump(SECOND // 2)
        for id in "cba":
            command = Resolve(id, outcome, "not needed", "ada", b"7")
            assert harness.do(Resolved, command) == Resolved(id, State.DONE)
            job = harness.job(id)
            assert harness.at(id) == f"done/{outcome}"
            assert (job.result, job.finished_at, job.waits, job.attempts_used) == (b"7", harness.now, 0, 0)
            record = AttemptRecord(
                1, False, harness.now, harness.now, "ada", AttemptOutcome(outcome), "not needed"
            )
            assert harness.ledger.attempts(id) == [record]
        assert harness.counts() == Counts(done=3)
        assert harness.claim(n=9) == []

    def test_a_decision_releases_the_dependents(self, harness: Harness) -> None:
        harness.add("a", delay=SECOND)
        harness.add("b", after=["a"])
        mark(harness, "a")
        assert harness.at("a", "b") == "done/marked ready"

    def test_a_resolve_may_be_repeated(self, harness: Harness) -> None:
        harness.add("a")
        mark(harness, "a", b"1")
        with harness.unchanged():
            mark(harness, "a", b"2")
        refusal = harness.refusal(NotResolvable, Resolve("a", SKIPPED, "why", "ada"))
        assert refusal.details["why"] == "it is done (marked)"

    def test_jobs_that_cannot_be_resolved(self, harness: Harness) -> None:
        claim = harness.started("a")
        refusal = harness.refusal(NotResolvable, Resolve("a", MARKED, "why", "ada"))
        assert (refusal.details["id"], refusal.details["why"]) == ("a", "it is running")
        harness.done(claim)
        assert (
            harness.refusal(NotResolvable, Resolve("a", MARKED, "why", "ada")).details["why"] == "it is done"
        )
        assert harness.refusal(UnknownJob, Resolve("b", MARKED, "why", "ada")).details["id"] == "b"
        harness.add("old", key=replace("k"))
        harness.add("new", key=replace("k"))
        assert (
            harness.refusal(NotResolvable, Resolve("old", MARKED, "why", "ada")).details["why"]
            == "superseded"
        )

    def test_a_failed_job_is_done_and_its_dependents_start(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.append(spec("b", after=["a"]), spec("c", after=["b"]), spec("d", after=["c"]))
        harness.fail(claim)
        assert harness.at("a", "b", "c") == "failed/fatal failed/dependency failed/dependency"
        mark(harness, "a", b"1")
        assert harness.at("a", "b", "c", "d") == "done/marked ready blocked/revived blocked/revived"
        job = harness.job("a")
        assert (job.result, job.error, job.attempts) == (b"1", None, 1)
        assert [each.outcome for each in harness.ledger.attempts("a")] == ["failed", "marked"]
        assert harness.counts() == Counts(ready=1, blocked=2, done=1)

    def test_a_canceled_job_is_done_and_its_dependents_start(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]))
        harness.cancel("a")
        assert harness.at("a", "b") == "canceled/requested canceled/dependency"
        mark(harness, "a")
        assert harness.at("a", "b") == "done/marked ready"

    def test_a_job_with_a_failed_dependency_is_skipped(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.append(spec("b", after=["a"]), spec("c", after=["b"]), spec("d", after=["a", "b"]))
        harness.fail(claim)
        harness.do(Resolved, Resolve("b", SKIPPED, "not needed", "ada"))
        assert harness.at("a", "b", "c", "d") == "failed/fatal done/skipped ready failed/dependency"

    def test_the_old_attempt_keeps_its_answer(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.settle(claim, FailOutcome("broken"))
        mark(harness, "a")
        again = Settle("a", claim.fence, Done(b"late"))
        assert harness.do(Settled, again) == Settled("a", State.FAILED)
        other = harness.started("b")
        harness.settle(other, RetryOutcome())
        mark(harness, "b")
        assert harness.refusal(LostClaim, Settle("b", other.fence + 1, Done())).details["id"] == "b"

    def test_a_group_closes_with_the_last_decision(self, harness: Harness) -> None:
        group_of(harness, 2, then={"done": (spec("x", "t"),)})
        mark(harness, "m0")
        harness.seal("g")
        mark(harness, "m1")
        assert (harness.group("g").outcome, harness.group("g").done) == (State.DONE, 2)
        assert harness.counts("t") == Counts(ready=1)

    def test_a_closed_group_gets_another_outcome(self, harness: Harness) -> None:
        group_of(harness, 2, then={"done": (spec("x", "t"),), "failed": (spec("y", "u"),)})
        harness.add("w", after=[whole_group("g")])
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.fail(a)
        harness.done(b)
        assert (harness.group("g").outcome, harness.at("w")) == (State.FAILED, "failed/dependency")
        assert harness.counts("u") == Counts(ready=1)
        mark(harness, "m0")
        group = harness.group("g")
        assert (group.state, group.outcome, group.done, group.failed) == (
            GroupState.CLOSED,
            State.DONE,
            2,
            0,
        )
        assert harness.at("w") == "ready"
        assert (harness.counts("t"), harness.counts("u")) == (Counts(ready=1), Counts(canceled=1))

    def test_a_closed_group_reopens_for_the_dependents(self, harness: Harness) -> None:
        group_of(harness, 1, on_failure=OnFailure.STOP)
        harness.add("next", group="g", after=["m0"])
        harness.add("w", after=[whole_group("g")])
        harness.seal("g")
        harness.fail(harness.take())
        assert harness.group("g").outcome is State.FAILED
        mark(harness, "m0")
        assert harness.at("m0", "next", "w") == "done/marked ready blocked/revived"
        assert harness.group("g").state is GroupState.SEALED
        harness.done(harness.take())
        assert (harness.group("g").outcome, harness.at("w")) == (State.DONE, "ready")

    def test_a_member_of_an_aborting_group_is_not_resolved(self, harness: Harness) -> None:
        group_of(harness, 2, on_failure=OnFailure.STOP)
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.fail(a)
        refusal = harness.refusal(NotResolvable, Resolve("m0", MARKED, "why", "ada"))
        assert refusal.details["why"] == "group g is aborting"
        harness.done(b)
        mark(harness, "m0")
        assert harness.group("g").outcome is State.DONE

    def test_a_decision_frees_the_key(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        mark(harness, "a")
        assert harness.add("b", key=unique("k")).id == "b"

    def test_a_decision_leaves_the_key_to_its_holder(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k")))
        harness.add("b", key=unique("k"))
        mark(harness, "a")
        (placed,) = harness.append(spec("c", key=unique("k")))
        assert placed.id == "b"

    def test_a_decision_keeps_the_window_of_the_key(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k", 60 * SECOND)))
        mark(harness, "a")
        (placed,) = harness.append(spec("c", key=unique("k")))
        assert placed == Placed("a", 1)

    def test_a_resolved_job_is_deleted_with_its_history(self, harness: Harness) -> None:
        harness.add("a")
        mark(harness, "a")
        assert harness.purge("a").purged == 1
        assert harness.ledger.attempts("a") == []
        assert harness.ledger.dump()["attempts"] == []

    def test_the_history_keeps_its_length(self, harness: Harness) -> None:
        harness.add("a", max_attempts=100)
        for _ in range(25):
            harness.settle(harness.take(), RetryOutcome())
        mark(harness, "a")
        found = harness.ledger.attempts("a")
        assert [each.number for each in found] == list(range(7, 27))
        assert [each.outcome for each in found[-2:]] == ["retried", "marked"]
