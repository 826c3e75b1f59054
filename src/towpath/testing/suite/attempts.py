"""The history of attempts: the ends that are kept, for how long, and by which command they are written."""

from __future__ import annotations

import pytest

from towpath.core import lifecycle
from towpath.core.checks import SECOND
from towpath.core.commands import Settle
from towpath.core.history import HISTORY, AttemptOutcome, AttemptRecord, attempt_record
from towpath.core.job import (
    ClaimedJob,
    Done,
    FailOutcome,
    Outcome,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    Stop,
)
from towpath.testing.suite.harness import LEASE, Harness, Suite, replace, spec

ENDS: tuple[tuple[Outcome, str, bool], ...] = (
    (RetryOutcome(SECOND, "busy\n\ntraceback: ü€𝄞"), "retried", True),
    (RetryOutcome(), "retried", True),
    (SnoozeOutcome(SECOND), "snoozed", True),
    (Release(), "released", False),
    (Refuse(error="unknown kind"), "refused", False),
    (FailOutcome("broken"), "failed", True),
    (Stop("enough"), "canceled", True),
)


def history_of(harness: Harness, id: str = "a") -> list[str]:
    """The history of a job as `number outcome`, with ~ for a claim that was not counted."""
    return [f"{end.number}{'' if end.counted else '~'} {end.outcome}" for end in harness.ledger.attempts(id)]


class AttemptsSuite(Suite):
    """Every attempt that did not end done leaves a record."""

    @pytest.mark.parametrize("grouped", [False, True], ids=("plain", "grouped"))
    @pytest.mark.parametrize(("outcome", "word", "counted"), ENDS, ids=repr)
    def test_an_end_is_kept(
        self, harness: Harness, outcome: Outcome, word: str, counted: bool, grouped: bool
    ) -> None:
        if grouped:
            # A member of a group with a dependent is settled alone.
            harness.open("g")
            harness.append(spec("a", group="g"), spec("b", "other", after=["a"]))
            harness.seal("g")
        else:
            harness.add("a")
        claim = harness.take(owner="me:1")
        started = harness.now
        harness.jump(7)
        change = lifecycle.settle(claim.job, outcome, harness.now)
        harness.settle(claim, outcome)
        error = getattr(outcome, "error", None)
        expected = AttemptRecord(1, counted, started, harness.now, "me:1", AttemptOutcome(word), error)
        assert harness.ledger.attempts("a") == [expected]
        assert attempt_record(claim.job, change, error, harness.now) == expected

    def test_a_done_attempt_leaves_no_record(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.append(spec("b"), spec("c", "other", after=["b"]))
        harness.done(harness.take(), spawn=[spec("d", "other")])
        assert history_of(harness) == history_of(harness, "b") == []
        assert harness.ledger.attempts("unknown") == []

    def test_the_history_of_a_job_that_succeeds_in_the_end(self, harness: Harness) -> None:
        harness.add("a")
        for outcome in (Refuse(), SnoozeOutcome(), RetryOutcome(error="one"), Release()):
            harness.jump(SECOND)
            harness.settle(harness.take(), outcome)
        harness.take()
        harness.lose()
        harness.done(harness.take())
        assert history_of(harness) == ["1~ refused", "1 snoozed", "2 retried", "3~ released", "3 lost"]
        assert harness.job("a").error is None

    @pytest.mark.parametrize("losses", [1, 5])
    def test_a_lost_lease_is_kept(self, harness: Harness, losses: int) -> None:
        running = harness.started("a", max_losses=losses).job
        started = harness.now
        harness.lose()
        end = AttemptRecord(1, True, started, harness.now, "worker", AttemptOutcome.LOST, None)
        assert harness.ledger.attempts("a") == [end]
        assert attempt_record(running, lifecycle.lose(running, harness.now), None, harness.now) == end

    def test_a_dead_owner_loses_its_attempts(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c", max_attempts=1))
        harness.claim(n=3, owner="dead:1")
        harness.cancel("b")
        harness.upkeep(dead=["dead:1"])
        assert harness.at("a", "b", "c") == "ready/lost canceled/requested failed/lost"
        assert [history_of(harness, id) for id in "abc"] == [["1 lost"]] * 3
        assert harness.ledger.attempts("a")[0].owner == "dead:1"

    @pytest.mark.parametrize("outcome", [RetryOutcome(), Release(), Stop()], ids=repr)
    def test_a_canceled_run_is_kept(self, harness: Harness, outcome: Outcome) -> None:
        claim = harness.started("a")
        harness.cancel("a")
        harness.settle(claim, outcome)
        assert history_of(harness) == ["1~ canceled" if isinstance(outcome, Release) else "1 canceled"]

    def test_a_superseded_run_is_kept(self, harness: Harness) -> None:
        claim = harness.started("old", key=replace("k"))
        harness.add("new", key=replace("k"))
        harness.settle(claim, Stop())
        assert (harness.at("old"), history_of(harness, "old")) == ("canceled/superseded", ["1 superseded"])

    def test_a_canceled_waiting_job_has_no_attempt(self, harness: Harness) -> None:
        harness.add("a")
        harness.cancel("a")
        assert history_of(harness) == []

    def test_the_last_ends_are_kept(self, harness: Harness) -> None:
        harness.add("a", max_attempts=1000)
        for n in range(HISTORY + 5):
            harness.settle(harness.take(), Release())
            harness.settle(harness.take(), RetryOutcome(error=f"error {n + 1}"))
        numbers = range(6, HISTORY + 6)
        found = harness.ledger.attempts("a")
        assert [end.error for end in found if end.counted] == [f"error {n}" for n in numbers]
        assert [end.number for end in found if not end.counted] == list(numbers)

    def test_claims_given_back_do_not_displace_failures(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), RetryOutcome(error="boom"))
        for _ in range(2 * HISTORY):
            harness.settle(harness.take(), Release())
        assert history_of(harness) == ["1 retried", "2~ released"]

    def test_many_ends_in_one_batch(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(40)])
        claims = harness.claim(n=40)
        outcomes = (RetryOutcome(), SnoozeOutcome(), FailOutcome("no"), Release(), Done())
        batch = [Settle(claim.id, claim.fence, outcomes[n % 5]) for n, claim in enumerate(claims)]
        harness.ask(*batch, *batch)
        words = ["1 retried", "1 snoozed", "1 failed", "1~ released"]
        expected = [[words[n % 5]] if n % 5 < 4 else [] for n in range(40)]
        assert [history_of(harness, f"j{n}") for n in range(40)] == expected

    def test_a_lost_claim_writes_nothing(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.lose()
        before = harness.ledger.attempts("a")
        harness.ask(Settle(claim.id, claim.fence, RetryOutcome(error="late")))
        assert harness.ledger.attempts("a") == before

    def test_a_revived_job_keeps_its_history(self, harness: Harness) -> None:
        harness.fail(harness.started("a"))
        harness.revive("a")
        harness.settle(harness.take(), RetryOutcome())
        assert history_of(harness) == ["1 failed", "2 retried"]

    def test_a_run_canceled_before_it_began_and_revived(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.cancel("a")
        harness.settle(claim, Release())
        harness.revive("a")
        harness.fail(harness.take())
        assert history_of(harness) == ["1~ canceled", "1 failed"]

    def test_the_history_is_deleted_with_the_job(self, harness: Harness) -> None:
        harness.fail(harness.started("a"))
        harness.settle(harness.started("b", retention=LEASE), RetryOutcome())
        harness.done(harness.take())
        harness.settle(harness.started("c"), RetryOutcome())
        harness.purge("a")
        harness.jump(LEASE)
        harness.upkeep()
        assert [harness.ledger.get(id) is None for id in "abc"] == [True, True, False]
        assert [end[0] for end in harness.ledger.dump()["attempts"]] == [harness.job("c").seq]

    def test_an_error_of_the_largest_size(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.settle(ClaimedJob(claim.job), RetryOutcome(error="é" * 65_536))
        assert harness.ledger.attempts("a")[0].error == harness.job("a").error == "é" * 65_536
