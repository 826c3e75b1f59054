"""Settle, Renew and Progress: the writes about a running job, each guarded by its fence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from towpath.core.checks import DAY, SECOND
from towpath.core.commands import Note, Progress, Progressed, Renew, Renewed, Settle, Settled
from towpath.core.job import (
    Done,
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
from towpath.testing.suite.harness import LEASE, Harness, Suite, ids, spec


class SettleSuite(Suite):
    """The end of an attempt."""

    def test_done(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.jump(SECOND)
        assert harness.settle(claim, Done(b"result")) == Settled("a", State.DONE)
        job = harness.job("a")
        assert (job.state, job.reason, job.result, job.error) == (State.DONE, "", b"result", None)
        assert (job.finished_at, job.purge_at) == (harness.now, harness.now + 7 * DAY)
        assert (job.settled_fence, job.settled_as, job.fence) == (1, State.DONE, 1)
        assert (job.owner, job.lease_until, job.lease_len) == (None, None, LEASE)
        assert (job.attempts, job.failures, job.losses) == (1, 0, 0)
        assert harness.counts() == Counts(done=1)

    def test_retention_of_the_job_then_of_the_queue(self, harness: Harness) -> None:
        harness.set_queue(retention=5)
        harness.done(harness.started("a"))
        harness.done(harness.started("b", retention=9))
        harness.fail(harness.started("c", retention=9))
        assert [harness.job(id).purge_at for id in "abc"] == [harness.now + 5, harness.now + 9, None]

    def test_retry_at_once(self, harness: Harness) -> None:
        claim = harness.started("a")
        assert harness.settle(claim, RetryOutcome(error="boom")) == Settled("a", State.READY)
        job = harness.job("a")
        assert (job.state, job.reason, job.error, job.attempts, job.failures) == (
            State.READY,
            "retry",
            "boom",
            1,
            1,
        )
        assert (job.settled_fence, job.settled_as, job.owner, job.lease_until) == (1, State.READY, None, None)

    def test_retry_later(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), RetryOutcome(5 * SECOND, "boom"))
        job = harness.job("a")
        assert (job.state, job.reason, job.ready_at) == (State.SCHEDULED, "retry", harness.now + 5 * SECOND)
        assert harness.claim() == []
        harness.jump(5 * SECOND)
        assert harness.take().job.attempts == 2

    def test_the_last_attempt_fails_for_good(self, harness: Harness) -> None:
        harness.add("a", max_attempts=3)
        for _ in range(2):
            harness.settle(harness.take(), RetryOutcome())
        assert harness.settle(harness.take(), RetryOutcome(error="last")) == Settled("a", State.FAILED)
        job = harness.job("a")
        assert (job.reason, job.error, job.failures, job.purge_at) == ("exhausted", "last", 3, None)

    def test_snooze_is_no_failure(self, harness: Harness) -> None:
        harness.add("a", max_attempts=2)
        for _ in range(5):
            harness.settle(harness.take(), SnoozeOutcome())
        assert harness.at("a") == "ready/snoozed"
        harness.settle(harness.take(), SnoozeOutcome(SECOND))
        assert harness.at("a") == "scheduled/snoozed"
        assert (harness.job("a").failures, harness.job("a").attempts) == (0, 6)

    def test_release_counts_nothing(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), Release())
        assert harness.at("a") == "ready/released"
        assert (harness.job("a").attempts, harness.job("a").failures, harness.job("a").fence) == (0, 0, 1)
        harness.settle(harness.take(), Release(SECOND))
        assert harness.at("a") == "scheduled/released"

    def test_refuse_waits_a_second_at_least(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), Refuse(error="unknown kind"))
        job = harness.job("a")
        assert (job.state, job.reason, job.error) == (State.SCHEDULED, "refused", "unknown kind")
        assert (job.ready_at, job.attempts, job.failures) == (harness.now + SECOND, 0, 0)
        harness.settle(harness.started("b"), Refuse(3 * SECOND))
        assert harness.job("b").ready_at == harness.now + 3 * SECOND

    def test_fail_is_a_dead_letter(self, harness: Harness) -> None:
        assert harness.settle(harness.started("a"), FailOutcome("bad")) == Settled("a", State.FAILED)
        job = harness.job("a")
        assert (job.reason, job.error, job.failures, job.purge_at, job.finished_at) == (
            "fatal",
            "bad",
            1,
            None,
            harness.now,
        )

    def test_stop_without_a_request(self, harness: Harness) -> None:
        assert harness.settle(harness.started("a"), Stop("enough")) == Settled("a", State.CANCELED)
        assert (harness.at("a"), harness.job("a").error) == ("canceled/handler", "enough")

    @pytest.mark.parametrize(
        "outcome", [RetryOutcome(), RetryOutcome(SECOND), SnoozeOutcome(SECOND), Release(), Refuse(), Stop()]
    )
    def test_what_was_asked_to_stop_never_goes_back(self, harness: Harness, outcome: Outcome) -> None:
        claim = harness.started("a")
        harness.cancel("a")
        assert harness.settle(claim, outcome).state is State.CANCELED
        assert harness.at("a") == "canceled/requested"
        assert harness.job("a").cancel_requested is Reason.REQUESTED

    def test_what_was_asked_to_stop_may_still_be_done_or_fail(self, harness: Harness) -> None:
        for outcome in (Done(), FailOutcome()):
            claim = harness.started(type(outcome).__name__)
            harness.cancel(claim.id)
            harness.settle(claim, outcome)
        assert harness.at("Done", "FailOutcome") == "done failed/fatal"

    def test_an_error_stays_where_the_outcome_has_none(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), RetryOutcome(error="first"))
        harness.settle(harness.take(), RetryOutcome())
        assert harness.job("a").error == "first"
        harness.settle(harness.take(), Stop())
        assert harness.job("a").error == "first"

    def test_a_done_job_has_no_error_of_an_earlier_attempt(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", "plain"), spec("b", "grouped", group="g"), spec("c", after=["b"]))
        harness.seal("g")
        for queue, id in (("plain", "a"), ("grouped", "b")):
            harness.settle(harness.take(queue), RetryOutcome(error="first"))
            again = harness.take(queue)
            assert again.job.error == "first"
            harness.settle(again, Done(b"1"))
            job = harness.job(id)
            assert (job.state, job.error, job.result) == (State.DONE, None, b"1")

    def test_the_fence_decides_not_the_time(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.jump(100 * LEASE)
        assert harness.done(claim).state is State.DONE

    def test_an_old_fence_changes_nothing(self, harness: Harness) -> None:
        old = harness.started("a")
        harness.settle(old, Release())
        new = harness.take()
        error = harness.refusal(LostClaim, Settle("a", 7, Done()))
        assert error.details == {"id": "a", "fence": 7}
        assert harness.settle(old, Done()) == Settled("a", State.READY)
        assert harness.at("a") == "running"
        harness.done(new)
        harness.refusal(LostClaim, Settle("a", old.fence, Done()))

    def test_a_job_that_was_reaped_is_lost(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.lose()
        harness.refusal(LostClaim, Settle("a", claim.fence, Done()))

    def test_unknown_jobs_are_lost(self, harness: Harness) -> None:
        harness.refusal(LostClaim, Settle("nowhere", 1, Done()))

    def test_children_are_appended(self, harness: Harness) -> None:
        claim = harness.started("a", correlation_id="c")
        harness.done(claim, spawn=[spec("b"), spec("c", after=["b"], parent="other", correlation_id="own")])
        b, c = harness.job("b"), harness.job("c")
        assert (b.parent, b.correlation_id, b.state) == ("a", "c", State.READY)
        assert (c.parent, c.correlation_id, c.state) == ("other", "own", State.BLOCKED)

    def test_children_may_wait_for_their_parent(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.done(claim, spawn=[spec("b", after=["a"])])
        assert harness.at("a", "b") == "done ready"

    def test_children_that_need_a_failing_parent_fail_with_it(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.settle(claim, FailOutcome(), spawn=[spec("b", after=["a"]), spec("c")])
        assert harness.at("a", "b", "c") == "failed/fatal failed/dependency ready"

    def test_children_of_an_attempt_that_is_tried_again_are_kept(self, harness: Harness) -> None:
        harness.settle(harness.started("a"), SnoozeOutcome(SECOND), spawn=[spec("b")])
        harness.jump(SECOND)
        harness.settle(harness.take(), SnoozeOutcome(), spawn=[spec("b")])
        assert harness.found() == ["a", "b"]

    def test_a_refused_child_refuses_the_whole_settle(self, harness: Harness) -> None:
        harness.started("a")
        notes = (Note(key="k", value=b"v"),)
        harness.refusal(UnknownDependency, Settle("a", 1, Done(), (spec("b", after=["nowhere"]),), notes))
        assert harness.at("a") == "running"

    def test_a_child_may_join_the_group_of_its_parent_after_the_seal(self, harness: Harness) -> None:
        harness.open("g")
        harness.open("h")
        harness.seal("h")
        harness.add("a", group="g")
        harness.seal("g")
        claim = harness.take()
        harness.refusal(GroupClosed, Settle("a", 1, Done(), (spec("x", group="h"),)))
        harness.done(claim, spawn=[spec("b", group="g")])
        assert harness.at("b") == "ready"
        assert harness.group("g").unfinished == 1

    def test_notes_are_written_in_order(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.done(claim, notes=[Note(key="k", value=b"1"), Note(key="k", value=b"2", expect=1)])
        note = harness.ledger.note("k", harness.now)
        assert note is not None
        assert (note.value, note.version) == (b"2", 2)

    def test_a_refused_note_refuses_the_whole_settle(self, harness: Harness) -> None:
        harness.started("a")
        notes = (Note(key="k", value=b"1"), Note(key="l", value=b"1", expect=5))
        error = harness.refusal(NoteConflict, Settle("a", 1, Done(), (spec("b"),), notes))
        assert error.details == {"key": "l", "version": 0, "expect": 5}

    def test_a_repeated_settle_spawns_and_notes_nothing(self, harness: Harness) -> None:
        claim = harness.started("a")
        command = Settle("a", claim.fence, Done(), (spec("b"),), (Note(key="k", value=b"1"),))
        harness.ask(command)
        with harness.unchanged():
            assert harness.ask(command) == [Settled("a", State.DONE)]

    def test_within_is_called_where_the_ledger_can(self, harness: Harness, ledger: Ledger) -> None:
        harness.started("a")
        calls: list[object] = []
        (answer,) = harness.ask(Settle("a", 1, Done(), within=calls.append))
        if ledger.capabilities.transactional:
            assert answer == Settled("a", State.DONE)
            assert len(calls) == 1
        else:
            assert type(answer) is Unsupported
            assert (calls, harness.at("a")) == ([], "running")

    def test_a_function_that_raises_undoes_the_settle(self, harness: Harness, ledger: Ledger) -> None:
        harness.started("a")

        def boom(connection: object) -> None:
            raise ValueError("no such table")

        kind = UserFunctionFailed if ledger.capabilities.transactional else Unsupported
        within: Callable[[object], object] = boom
        error = harness.refusal(
            kind, Settle("a", 1, Done(), (spec("b"),), (Note(key="k", value=b"1"),), within)
        )
        if ledger.capabilities.transactional:
            assert error.details["id"] == "a"
            assert "no such table" in str(error)


class RenewSuite(Suite):
    """Heartbeats and progress."""

    def test_renew_moves_the_lease(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.jump(SECOND)
        assert harness.do(Renewed, Renew((("a", claim.fence),), 2 * LEASE)) == Renewed(
            harness.now + 2 * LEASE
        )
        assert harness.job("a").lease_until == harness.now + 2 * LEASE

    def test_renew_twice_is_the_same(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.jump(SECOND)
        command = Renew((("a", claim.fence),), LEASE)
        first = harness.ask(command)
        with harness.unchanged():
            assert harness.ask(command) == first

    def test_a_renewed_job_is_not_reaped(self, harness: Harness) -> None:
        claim = harness.started("a")
        for _ in range(8):
            harness.advance(LEASE // 4)
            harness.do(Renewed, Renew((("a", claim.fence),), LEASE))
            assert harness.upkeep().reaped == 0
        assert harness.lose().reaped == 1

    def test_what_was_lost_is_named_in_the_order_given(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        a, b, c = harness.claim(n=3)
        harness.done(b)
        held = (("zzz", 1), ("c", c.fence), ("b", b.fence), ("a", a.fence + 1))
        harness.jump(SECOND)
        answer = harness.do(Renewed, Renew(held, LEASE))
        assert answer == Renewed(harness.now + LEASE, lost=("zzz", "b", "a"))
        assert harness.job("c").lease_until == harness.now + LEASE
        assert harness.job("a").lease_until == harness.now - SECOND + LEASE

    def test_renew_tells_who_is_asked_to_stop(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        held = tuple((claim.id, claim.fence) for claim in harness.claim(n=2))
        harness.cancel("b")
        assert harness.do(Renewed, Renew(held, LEASE)).cancel == (("b", Reason.REQUESTED),)

    def test_renew_of_nothing_writes_nothing(self, harness: Harness) -> None:
        with harness.unchanged():
            assert harness.do(Renewed, Renew((), LEASE)) == Renewed(harness.now + LEASE)

    def test_renew_is_valid_until_it_is_reaped(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.advance(2 * LEASE)
        assert harness.do(Renewed, Renew((("a", claim.fence),), LEASE)).lost == ()

    def test_progress_keeps_what_is_given(self, harness: Harness) -> None:
        harness.started("a")
        assert harness.do(Progressed, Progress("a", 1, done=3, total=10, cursor=b"c")) == Progressed()
        assert harness.do(Progressed, Progress("a", 1, done=4)) == Progressed()
        job = harness.job("a")
        assert (job.progress_done, job.progress_total, job.cursor) == (4, 10, b"c")

    def test_progress_twice_is_the_same(self, harness: Harness) -> None:
        harness.started("a")
        harness.ask(Progress("a", 1, done=3, cursor=b"c"))
        with harness.unchanged():
            harness.ask(Progress("a", 1, done=3, cursor=b"c"))

    def test_progress_outlives_the_attempt(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.ask(Progress("a", 1, done=3, total=4, cursor=b"c"))
        harness.settle(claim, RetryOutcome())
        job = harness.take().job
        assert (job.progress_done, job.progress_total, job.cursor) == (3, 4, b"c")

    def test_progress_tells_of_a_request_to_stop(self, harness: Harness) -> None:
        harness.started("a")
        harness.cancel("a")
        assert harness.do(Progressed, Progress("a", 1, done=1)) == Progressed(Reason.REQUESTED)

    def test_progress_with_an_old_fence_is_lost(self, harness: Harness) -> None:
        claim = harness.started("a")
        assert harness.refusal(LostClaim, Progress("a", 9, done=1)).details == {"id": "a", "fence": 9}
        harness.refusal(LostClaim, Progress("nowhere", 1, done=1))
        harness.done(claim)
        harness.refusal(LostClaim, Progress("a", claim.fence, done=1))

    def test_notes_of_a_progress_are_written_with_it(self, harness: Harness) -> None:
        harness.started("a")
        notes = (Note(key="k", value=b"1"), Note(key="k", value=b"2", expect=1), Note(key="l", value=b"3"))
        assert harness.do(Progressed, Progress("a", 1, done=4, notes=notes)) == Progressed()
        found = [harness.ledger.note(key, harness.now) for key in ("k", "l")]
        assert [note and (note.value, note.version) for note in found] == [(b"2", 2), (b"3", 3)]
        assert harness.job("a").progress_done == 4
        harness.do(Progressed, Progress("a", 1, notes=(Note(key="k", value=None),)))
        assert harness.ledger.note("k", harness.now) is None

    def test_a_lost_claim_writes_no_notes(self, harness: Harness) -> None:
        claim = harness.started("a")
        notes = (Note(key="k", value=b"1"),)
        harness.refusal(LostClaim, Progress("a", claim.fence + 1, done=4, notes=notes))
        harness.settle(claim, RetryOutcome())
        harness.refusal(LostClaim, Progress("a", claim.fence, done=4, notes=notes))
        assert harness.ledger.note("k", harness.now) is None
        assert harness.job("a").progress_done is None

    def test_a_refused_note_refuses_the_whole_progress(self, harness: Harness) -> None:
        harness.started("a")
        notes = (Note(key="k", value=b"1"), Note(key="l", value=b"1", expect=5))
        with harness.unchanged():
            error = harness.refusal(NoteConflict, Progress("a", 1, 4, cursor=b"c", notes=notes))
        assert error.details == {"key": "l", "version": 0, "expect": 5}
        assert harness.ledger.note("k", harness.now) is None

    def test_notes_of_a_progress_between_settles(self, harness: Harness) -> None:
        """In one batch with the settles and the claim of a worker."""
        harness.append(spec("a"), spec("b"), spec("c"))
        one, two = harness.claim(n=2)
        noted = Progress(two.id, two.fence, notes=(Note(key="k", value=b"1"),))
        late = Progress(one.id, one.fence, notes=(Note(key="l", value=b"1"),))
        answers = harness.ask(
            Settle(one.id, one.fence, Done()), noted, late, Settle(two.id, two.fence, Done())
        )
        assert [type(answer) for answer in answers] == [Settled, Progressed, LostClaim, Settled]
        assert harness.ledger.note("k", harness.now) is not None
        assert harness.ledger.note("l", harness.now) is None

    def test_claims_of_others_are_untouched(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        claims = harness.claim(n=2)
        harness.done(claims[0])
        assert (ids(claims[1:]), harness.at("b")) == (["b"], "running")
