"""Groups that stop: nothing new starts, and running members end as their handlers do."""

from __future__ import annotations

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import (
    Abort,
    Canceled,
    GroupSet,
    GroupState,
    OnFailure,
    Progress,
    Progressed,
    Renew,
    Renewed,
)
from towpath.core.job import ClaimedJob as Held
from towpath.core.job import (
    FailOutcome,
    Outcome,
    Reason,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    State,
    Stop,
)
from towpath.testing.suite.groups import group_of
from towpath.testing.suite.harness import LEASE, Harness, Suite, replace, spec, unique


def stopping(harness: Harness) -> None:
    """Group g with the failed member m0, the running member m1 and the waiting member m2."""
    group_of(harness, 3, on_failure=OnFailure.STOP)
    harness.seal("g")
    a, _ = harness.claim(n=2)
    harness.fail(a)


class StopSuite(Suite):
    def test_a_failure_stops_the_group_where_it_should(self, harness: Harness) -> None:
        group_of(harness, 4, on_failure=OnFailure.STOP)
        harness.add("d", after=["m3"])
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.fail(a)
        assert harness.at("m1", "m2", "m3") == "running canceled/stopped canceled/stopped"
        assert harness.at("d") == "canceled/dependency"
        assert (harness.job("m1").cancel_requested, harness.group("g").state) == (
            Reason.STOPPED,
            GroupState.ABORTING,
        )
        harness.done(b)
        group = harness.group("g")
        assert harness.at("m1") == "done"
        assert (group.state, group.outcome, group.done, group.canceled) == (
            GroupState.CLOSED,
            State.FAILED,
            1,
            2,
        )

    def test_a_failure_stops_an_open_group_too(self, harness: Harness) -> None:
        harness.fail(harness.started("x"))
        group_of(harness, 2, on_failure=OnFailure.STOP)
        harness.add("bad", group="g", after=["x"])
        assert harness.at("bad", "m0", "m1") == "failed/dependency canceled/stopped canceled/stopped"
        assert harness.group("g").outcome is State.FAILED

    @pytest.mark.parametrize(
        ("outcome", "attempts"),
        [
            (RetryOutcome(SECOND, "late"), 1),
            (SnoozeOutcome(SECOND), 1),
            (Release(), 0),
            (Refuse(error="no handler"), 0),
            (Stop(), 1),
        ],
    )
    def test_a_member_of_a_stopping_group_does_not_run_again(
        self, harness: Harness, outcome: Outcome, attempts: int
    ) -> None:
        stopping(harness)
        harness.settle(_held(harness, "m1"), outcome)
        assert harness.at("m1") == "canceled/stopped"
        assert harness.job("m1").attempts == attempts
        assert harness.group("g").outcome is State.FAILED

    def test_the_last_attempt_in_a_stopping_group_fails(self, harness: Harness) -> None:
        group_of(harness, 1, on_failure=OnFailure.STOP)
        harness.add("last", group="g", max_attempts=1)
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.fail(a)
        harness.settle(b, RetryOutcome(error="late"))
        assert harness.at("last") == "failed/exhausted"
        harness.abort("g")
        assert harness.group("g").failed == 2

    def test_a_fatal_failure_in_a_stopping_group_fails(self, harness: Harness) -> None:
        stopping(harness)
        harness.settle(_held(harness, "m1"), FailOutcome("broken"))
        assert harness.at("m1") == "failed/fatal"

    def test_a_lost_member_of_a_stopping_group_is_canceled(self, harness: Harness) -> None:
        stopping(harness)
        assert harness.lose().reaped == 1
        assert harness.at("m1") == "canceled/stopped"
        assert (harness.job("m1").attempts, harness.job("m1").losses) == (1, 1)
        assert harness.group("g").outcome is State.FAILED

    def test_stop_by_hand(self, harness: Harness) -> None:
        group_of(harness, 3)
        harness.seal("g")
        claim = harness.take()
        assert harness.ask(Abort("g", stop=True)) == [GroupSet("g")]
        assert harness.at("m0", "m1", "m2") == "running canceled/stopped canceled/stopped"
        assert harness.do(Progressed, Progress("m0", 1)).cancel is Reason.STOPPED
        held = harness.do(Renewed, Renew((("m0", 1),), LEASE))
        assert held.cancel == (("m0", Reason.STOPPED),)
        harness.done(claim)
        assert (harness.at("m0"), harness.group("g").outcome) == ("done", State.CANCELED)

    def test_an_abort_interrupts_a_stopping_group(self, harness: Harness) -> None:
        stopping(harness)
        with harness.unchanged():
            harness.ask(Abort("g", stop=True))
        harness.abort("g")
        assert harness.job("m1").cancel_requested is Reason.ABORTED
        with harness.unchanged():
            harness.ask(Abort("g", stop=True))
            harness.abort("g")

    def test_a_cancel_interrupts_a_member_of_a_stopping_group(self, harness: Harness) -> None:
        stopping(harness)
        assert harness.cancel(group="g") == Canceled(0, 1)
        assert harness.job("m1").cancel_requested is Reason.REQUESTED
        with harness.unchanged():
            assert harness.cancel(group="g") == Canceled(0, 0)
            harness.abort("g")

    def test_a_newer_job_supersedes_a_member_of_a_stopping_group(self, harness: Harness) -> None:
        group_of(harness, 1, on_failure=OnFailure.STOP)
        harness.add("old", group="g", key=replace("k"))
        harness.seal("g")
        a, _ = harness.claim(n=2)
        harness.fail(a)
        harness.add("new", key=replace("k"))
        assert harness.job("old").cancel_requested is Reason.SUPERSEDED

    def test_a_represented_member_does_not_keep_a_stopping_group_open(self, harness: Harness) -> None:
        harness.add("winner", key=unique("k"))
        group_of(harness, 1, on_failure=OnFailure.STOP)
        harness.append(spec("refused", group="g", key=unique("k")))
        harness.seal("g")
        harness.fail(harness.claim(n=2)[1])
        assert harness.at("winner") == "running"
        assert (harness.group("g").state, harness.group("g").canceled) == (GroupState.CLOSED, 1)

    def test_a_closed_group_that_stopped_is_revived(self, harness: Harness) -> None:
        stopping(harness)
        assert harness.revive("m2").refused == (("m2", "group g is aborting"),)
        harness.settle(_held(harness, "m1"), SnoozeOutcome())
        assert harness.revive(group="g").revived == 3
        assert harness.at("m0", "m1", "m2") == "ready/revived ready/revived ready/revived"
        assert harness.job("m1").cancel_requested is None
        for claim in harness.claim(n=3):
            harness.done(claim)
        assert harness.group("g").outcome is State.DONE


def _held(harness: Harness, id: str) -> Held:
    return Held(harness.job(id))
