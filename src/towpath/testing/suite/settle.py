"""Settle, Renew and Progress: what may be said about a running job, and by whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from towpath.core.checks import DAY, SECOND
from towpath.core.commands import Note, Progress, Progressed, Renew, Renewed, Settle, Settled
from towpath.core.job import Done, Fail, Outcome, Reason, Refuse, Release, Retry, Snooze, State, Stop
from towpath.core.views import Counts
from towpath.errors import (
    GroupClosed,
    LostClaim,
    NoteConflict,
    UnknownDependency,
    Unsupported,
    UserFunctionFailed,
)
from towpath.ledger import Ledger
from towpath.testing.suite.desk import LEASE, Desk, Suite, ids, spec


class SettleSuite(Suite):
    """The end of an attempt."""

    def test_done(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.jump(SECOND)
        assert desk.settle(claim, Done(b"result")) == Settled("a", State.DONE)
        job = desk.job("a")
        assert (job.state, job.reason, job.result, job.error) == (State.DONE, "", b"result", None)
        assert (job.finished_at, job.purge_at) == (desk.now, desk.now + 7 * DAY)
        assert (job.settled_fence, job.settled_as, job.fence) == (1, State.DONE, 1)
        assert (job.owner, job.lease_until, job.lease_len) == (None, None, LEASE)
        assert (job.attempts, job.failures, job.losses) == (1, 0, 0)
        assert desk.counts() == Counts(done=1)

    def test_retention_of_the_job_then_of_the_queue(self, desk: Desk) -> None:
        desk.set_queue(retention=5)
        desk.done(desk.started("a"))
        desk.done(desk.started("b", retention=9))
        desk.fail(desk.started("c", retention=9))
        assert [desk.job(id).purge_at for id in "abc"] == [desk.now + 5, desk.now + 9, None]

    def test_retry_at_once(self, desk: Desk) -> None:
        claim = desk.started("a")
        assert desk.settle(claim, Retry(error="boom")) == Settled("a", State.READY)
        job = desk.job("a")
        assert (job.state, job.reason, job.error, job.attempts, job.failures) == (
            State.READY,
            "retry",
            "boom",
            1,
            1,
        )
        assert (job.settled_fence, job.settled_as, job.owner, job.lease_until) == (1, State.READY, None, None)

    def test_retry_later(self, desk: Desk) -> None:
        desk.settle(desk.started("a"), Retry(5 * SECOND, "boom"))
        job = desk.job("a")
        assert (job.state, job.reason, job.ready_at) == (State.SCHEDULED, "retry", desk.now + 5 * SECOND)
        assert desk.claim() == []
        desk.jump(5 * SECOND)
        assert desk.take().job.attempts == 2

    def test_the_last_attempt_fails_for_good(self, desk: Desk) -> None:
        desk.add("a", max_attempts=3)
        for _ in range(2):
            desk.settle(desk.take(), Retry())
        assert desk.settle(desk.take(), Retry(error="last")) == Settled("a", State.FAILED)
        job = desk.job("a")
        assert (job.reason, job.error, job.failures, job.purge_at) == ("exhausted", "last", 3, None)

    def test_snooze_is_no_failure(self, desk: Desk) -> None:
        desk.add("a", max_attempts=2)
        for _ in range(5):
            desk.settle(desk.take(), Snooze())
        assert desk.at("a") == "ready/snoozed"
        desk.settle(desk.take(), Snooze(SECOND))
        assert desk.at("a") == "scheduled/snoozed"
        assert (desk.job("a").failures, desk.job("a").attempts) == (0, 6)

    def test_release_counts_nothing(self, desk: Desk) -> None:
        desk.settle(desk.started("a"), Release())
        assert desk.at("a") == "ready/released"
        assert (desk.job("a").attempts, desk.job("a").failures, desk.job("a").fence) == (0, 0, 1)
        desk.settle(desk.take(), Release(SECOND))
        assert desk.at("a") == "scheduled/released"

    def test_refuse_waits_a_second_at_least(self, desk: Desk) -> None:
        desk.settle(desk.started("a"), Refuse(error="unknown kind"))
        job = desk.job("a")
        assert (job.state, job.reason, job.error) == (State.SCHEDULED, "refused", "unknown kind")
        assert (job.ready_at, job.attempts, job.failures) == (desk.now + SECOND, 0, 0)
        desk.settle(desk.started("b"), Refuse(3 * SECOND))
        assert desk.job("b").ready_at == desk.now + 3 * SECOND

    def test_fail_is_a_dead_letter(self, desk: Desk) -> None:
        assert desk.settle(desk.started("a"), Fail("bad")) == Settled("a", State.FAILED)
        job = desk.job("a")
        assert (job.reason, job.error, job.failures, job.purge_at, job.finished_at) == (
            "fatal",
            "bad",
            1,
            None,
            desk.now,
        )

    def test_stop_without_a_request(self, desk: Desk) -> None:
        assert desk.settle(desk.started("a"), Stop("enough")) == Settled("a", State.CANCELED)
        assert (desk.at("a"), desk.job("a").error) == ("canceled/handler", "enough")

    @pytest.mark.parametrize("outcome", [Retry(), Retry(SECOND), Snooze(SECOND), Release(), Refuse(), Stop()])
    def test_what_was_asked_to_stop_never_goes_back(self, desk: Desk, outcome: Outcome) -> None:
        claim = desk.started("a")
        desk.cancel("a")
        assert desk.settle(claim, outcome).state is State.CANCELED
        assert desk.at("a") == "canceled/requested"
        assert desk.job("a").cancel_requested is Reason.REQUESTED

    def test_what_was_asked_to_stop_may_still_be_done_or_fail(self, desk: Desk) -> None:
        for outcome in (Done(), Fail()):
            claim = desk.started(type(outcome).__name__)
            desk.cancel(claim.id)
            desk.settle(claim, outcome)
        assert desk.at("Done", "Fail") == "done failed/fatal"

    def test_an_error_stays_where_the_outcome_has_none(self, desk: Desk) -> None:
        desk.settle(desk.started("a"), Retry(error="first"))
        desk.settle(desk.take(), Retry())
        assert desk.job("a").error == "first"
        desk.settle(desk.take(), Done())
        assert desk.job("a").error == "first"

    def test_the_fence_decides_not_the_time(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.jump(100 * LEASE)
        assert desk.done(claim).state is State.DONE

    def test_an_old_fence_changes_nothing(self, desk: Desk) -> None:
        old = desk.started("a")
        desk.settle(old, Release())
        new = desk.take()
        error = desk.refusal(LostClaim, Settle("a", 7, Done()))
        assert error.details == {"id": "a", "fence": 7}
        assert desk.settle(old, Done()) == Settled("a", State.READY)
        assert desk.at("a") == "running"
        desk.done(new)
        desk.refusal(LostClaim, Settle("a", old.fence, Done()))

    def test_a_job_that_was_reaped_is_lost(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.lose()
        desk.refusal(LostClaim, Settle("a", claim.fence, Done()))

    def test_unknown_jobs_are_lost(self, desk: Desk) -> None:
        desk.refusal(LostClaim, Settle("nowhere", 1, Done()))

    def test_children_are_appended(self, desk: Desk) -> None:
        claim = desk.started("a", correlation_id="c")
        desk.done(claim, spawn=[spec("b"), spec("c", after=["b"], parent="other", correlation_id="own")])
        b, c = desk.job("b"), desk.job("c")
        assert (b.parent, b.correlation_id, b.state) == ("a", "c", State.READY)
        assert (c.parent, c.correlation_id, c.state) == ("other", "own", State.BLOCKED)

    def test_children_may_wait_for_their_parent(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.done(claim, spawn=[spec("b", after=["a"])])
        assert desk.at("a", "b") == "done ready"

    def test_children_that_need_a_failing_parent_fail_with_it(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.settle(claim, Fail(), spawn=[spec("b", after=["a"]), spec("c")])
        assert desk.at("a", "b", "c") == "failed/fatal failed/dependency ready"

    def test_children_of_an_attempt_that_is_tried_again_are_kept(self, desk: Desk) -> None:
        desk.settle(desk.started("a"), Snooze(SECOND), spawn=[spec("b")])
        desk.jump(SECOND)
        desk.settle(desk.take(), Snooze(), spawn=[spec("b")])
        assert desk.found() == ["a", "b"]

    def test_a_refused_child_refuses_the_whole_settle(self, desk: Desk) -> None:
        desk.started("a")
        notes = (Note(key="k", value=b"v"),)
        desk.refusal(UnknownDependency, Settle("a", 1, Done(), (spec("b", after=["nowhere"]),), notes))
        assert desk.at("a") == "running"

    def test_a_child_may_join_the_group_of_its_parent_after_the_seal(self, desk: Desk) -> None:
        desk.open("g")
        desk.open("h")
        desk.seal("h")
        desk.add("a", group="g")
        desk.seal("g")
        claim = desk.take()
        desk.refusal(GroupClosed, Settle("a", 1, Done(), (spec("x", group="h"),)))
        desk.done(claim, spawn=[spec("b", group="g")])
        assert desk.at("b") == "ready"
        assert desk.group("g").unfinished == 1

    def test_notes_are_written_in_order(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.done(claim, notes=[Note(key="k", value=b"1"), Note(key="k", value=b"2", expect=1)])
        note = desk.ledger.note("k", desk.now)
        assert note is not None
        assert (note.value, note.version) == (b"2", 2)

    def test_a_refused_note_refuses_the_whole_settle(self, desk: Desk) -> None:
        desk.started("a")
        notes = (Note(key="k", value=b"1"), Note(key="l", value=b"1", expect=5))
        error = desk.refusal(NoteConflict, Settle("a", 1, Done(), (spec("b"),), notes))
        assert error.details == {"key": "l", "version": 0, "expect": 5}

    def test_a_repeated_settle_spawns_and_notes_nothing(self, desk: Desk) -> None:
        claim = desk.started("a")
        command = Settle("a", claim.fence, Done(), (spec("b"),), (Note(key="k", value=b"1"),))
        desk.ask(command)
        with desk.unchanged():
            assert desk.ask(command) == [Settled("a", State.DONE)]

    def test_within_is_called_where_the_ledger_can(self, desk: Desk, ledger: Ledger) -> None:
        desk.started("a")
        calls: list[object] = []
        (answer,) = desk.ask(Settle("a", 1, Done(), within=calls.append))
        if ledger.capabilities.transactional:
            assert answer == Settled("a", State.DONE)
            assert len(calls) == 1
        else:
            assert type(answer) is Unsupported
            assert (calls, desk.at("a")) == ([], "running")

    def test_a_function_that_raises_undoes_the_settle(self, desk: Desk, ledger: Ledger) -> None:
        desk.started("a")

        def boom(connection: object) -> None:
            raise ValueError("no such table")

        kind = UserFunctionFailed if ledger.capabilities.transactional else Unsupported
        within: Callable[[object], object] = boom
        error = desk.refusal(kind, Settle("a", 1, Done(), (spec("b"),), (Note(key="k", value=b"1"),), within))
        if ledger.capabilities.transactional:
            assert error.details["id"] == "a"
            assert "no such table" in str(error)


class RenewSuite(Suite):
    """Heartbeats and progress."""

    def test_renew_moves_the_lease(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.jump(SECOND)
        assert desk.do(Renewed, Renew((("a", claim.fence),), 2 * LEASE)) == Renewed(desk.now + 2 * LEASE)
        assert desk.job("a").lease_until == desk.now + 2 * LEASE

    def test_renew_twice_is_the_same(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.jump(SECOND)
        command = Renew((("a", claim.fence),), LEASE)
        first = desk.ask(command)
        with desk.unchanged():
            assert desk.ask(command) == first

    def test_a_renewed_job_is_not_reaped(self, desk: Desk) -> None:
        claim = desk.started("a")
        for _ in range(8):
            desk.advance(LEASE // 4)
            desk.do(Renewed, Renew((("a", claim.fence),), LEASE))
            assert desk.upkeep().reaped == 0
        assert desk.lose().reaped == 1

    def test_what_was_lost_is_named_in_the_order_given(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        a, b, c = desk.claim(n=3)
        desk.done(b)
        held = (("zzz", 1), ("c", c.fence), ("b", b.fence), ("a", a.fence + 1))
        desk.jump(SECOND)
        answer = desk.do(Renewed, Renew(held, LEASE))
        assert answer == Renewed(desk.now + LEASE, lost=("zzz", "b", "a"))
        assert desk.job("c").lease_until == desk.now + LEASE
        assert desk.job("a").lease_until == desk.now - SECOND + LEASE

    def test_renew_tells_who_is_asked_to_stop(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        held = tuple((claim.id, claim.fence) for claim in desk.claim(n=2))
        desk.cancel("b")
        assert desk.do(Renewed, Renew(held, LEASE)).cancel == (("b", Reason.REQUESTED),)

    def test_renew_of_nothing_writes_nothing(self, desk: Desk) -> None:
        with desk.unchanged():
            assert desk.do(Renewed, Renew((), LEASE)) == Renewed(desk.now + LEASE)

    def test_renew_is_valid_until_it_is_reaped(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.advance(2 * LEASE)
        assert desk.do(Renewed, Renew((("a", claim.fence),), LEASE)).lost == ()

    def test_progress_keeps_what_is_given(self, desk: Desk) -> None:
        desk.started("a")
        assert desk.do(Progressed, Progress("a", 1, done=3, total=10, cursor=b"c")) == Progressed()
        assert desk.do(Progressed, Progress("a", 1, done=4)) == Progressed()
        job = desk.job("a")
        assert (job.progress_done, job.progress_total, job.cursor) == (4, 10, b"c")

    def test_progress_twice_is_the_same(self, desk: Desk) -> None:
        desk.started("a")
        desk.ask(Progress("a", 1, done=3, cursor=b"c"))
        with desk.unchanged():
            desk.ask(Progress("a", 1, done=3, cursor=b"c"))

    def test_progress_outlives_the_attempt(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.ask(Progress("a", 1, done=3, total=4, cursor=b"c"))
        desk.settle(claim, Retry())
        job = desk.take().job
        assert (job.progress_done, job.progress_total, job.cursor) == (3, 4, b"c")

    def test_progress_tells_of_a_request_to_stop(self, desk: Desk) -> None:
        desk.started("a")
        desk.cancel("a")
        assert desk.do(Progressed, Progress("a", 1, done=1)) == Progressed(Reason.REQUESTED)

    def test_progress_with_an_old_fence_is_lost(self, desk: Desk) -> None:
        claim = desk.started("a")
        assert desk.refusal(LostClaim, Progress("a", 9, done=1)).details == {"id": "a", "fence": 9}
        desk.refusal(LostClaim, Progress("nowhere", 1, done=1))
        desk.done(claim)
        desk.refusal(LostClaim, Progress("a", claim.fence, done=1))

    def test_claims_of_others_are_untouched(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        claims = desk.claim(n=2)
        desk.done(claims[0])
        assert (ids(claims[1:]), desk.at("b")) == (["b"], "running")
