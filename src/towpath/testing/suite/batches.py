"""Batches, time, sequence numbers, tokens, and waiting for a change."""

from __future__ import annotations

import threading

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import (
    Append,
    Appended,
    Cancel,
    Canceled,
    Claim,
    Claimed,
    Note,
    Placed,
    Purged,
    Revived,
    Seal,
    Selector,
    Settle,
    Settled,
    Upkeep,
    Want,
)
from towpath.core.job import Done, Fail, State
from towpath.errors import LostClaim, NoteConflict, UnknownDependency, UnknownGroup
from towpath.ledger import Ledger
from towpath.testing.clock import START, ManualClock
from towpath.testing.suite.desk import LEASE, Desk, Suite, ids, replace, spec


class BatchSuite(Suite):
    """One transaction, one answer per command, one time."""

    def test_answers_come_in_the_order_of_the_commands(self, desk: Desk) -> None:
        first, second, third = desk.ask(
            Append((spec("a"),)),
            Claim(owner="w", wants=(Want("q"),), lease=LEASE),
            Settle("a", 1, Done()),
        )
        assert first == Appended((Placed("a", 1),))
        assert isinstance(second, Claimed)
        assert ids(second.claims) == ["a"]
        assert third == Settled("a", State.DONE)

    def test_an_empty_batch_has_no_answers(self, desk: Desk) -> None:
        with desk.unchanged():
            assert desk.ask() == []

    def test_a_refused_command_does_not_disturb_its_neighbours(self, desk: Desk) -> None:
        answers = desk.ask(
            Append((spec("a"),)),
            Append((spec("b"), spec("c", after=["nowhere"]))),
            Seal("nothing"),
            Append((spec("d"),)),
        )
        assert answers == [
            Appended((Placed("a", 1),)),
            UnknownDependency(ids=("nowhere",)),
            UnknownGroup(group="nothing"),
            Appended((Placed("d", 2),)),
        ]
        assert desk.found() == ["a", "d"]

    def test_a_dependent_can_be_claimed_in_the_batch_that_frees_it(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.add("b", after=["a"])
        _, answer = desk.ask(
            Settle("a", claim.fence, Done()),
            Claim(owner="w", wants=(Want("q"),), lease=LEASE),
        )
        assert isinstance(answer, Claimed)
        assert ids(answer.claims) == ["b"]

    def test_time_never_runs_backwards(self, desk: Desk) -> None:
        desk.add("a")
        desk.jump(-10 * SECOND)
        assert desk.add("b").created_at == START
        assert desk.take().job.lease_until == START + LEASE

    def test_a_batch_that_wrote_nothing_does_not_move_time(self, desk: Desk) -> None:
        desk.add("a", "other")
        desk.jump(50 * SECOND)
        assert desk.claim() == []
        desk.ask(Append((spec("x", after=["nowhere"]),)), Seal("nothing"), Settle("a", 7, Done()))
        desk.upkeep()
        desk.jump(-40 * SECOND)
        assert desk.add("b").created_at == START + 10 * SECOND

    def test_without_now_the_ledgers_clock_counts(self, ledger: Ledger, clock: ManualClock) -> None:
        clock.advance(5)
        ledger.apply([Append((spec("a", delay=SECOND),))])
        job = ledger.get("a")
        assert job is not None
        assert (job.created_at, job.ready_at) == (START + 5 * SECOND, START + 6 * SECOND)

    def test_seq_counts_from_one_in_list_order(self, desk: Desk) -> None:
        assert desk.append(spec("b"), spec("a"), spec("c")) == (
            Placed("b", 1),
            Placed("a", 2),
            Placed("c", 3),
        )
        assert [desk.job(id).seq for id in "bac"] == [1, 2, 3]

    def test_seq_is_not_used_by_refused_or_repeated_specs(self, desk: Desk) -> None:
        desk.add("a")
        desk.ask(Append((spec("b"), spec("c", after=["nowhere"]))))
        desk.append(spec("a"))
        assert desk.add("d").seq == 2

    def test_seq_is_never_used_twice(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.add("b")
        desk.cancel("b")
        desk.purge("a", "b")
        assert desk.add("c").seq == 3

    def test_version_is_different_after_every_commit(self, desk: Desk, ledger: Ledger) -> None:
        seen = {ledger.version()}
        for id in "abc":
            desk.add(id)
            assert ledger.version() not in seen
            seen.add(ledger.version())

    def test_wait_returns_at_once_if_something_has_changed(self, desk: Desk, ledger: Ledger) -> None:
        seen = ledger.version()
        desk.add("a")
        assert ledger.wait(seen, 60) == ledger.version()

    def test_wait_returns_when_time_is_up(self, desk: Desk, ledger: Ledger) -> None:
        desk.add("a")
        seen = ledger.version()
        assert ledger.wait(seen, 0.001) == seen

    def test_wait_is_woken_by_a_commit(self, desk: Desk, ledger: Ledger) -> None:
        seen = ledger.version()
        woken: list[int] = []
        waiter = threading.Thread(target=lambda: woken.append(ledger.wait(seen, 60)))
        waiter.start()
        desk.add("a")
        waiter.join(30)
        assert not waiter.is_alive()
        assert len(woken) == 1
        assert woken != [seen]
        if not ledger.capabilities.remote:  # a ledger on a server may be told of more than its own commits
            assert woken == [ledger.version()]


class RepeatSuite(Suite):
    """Every command may be applied twice."""

    def test_a_repeated_append_answers_by_the_known_ids(self, desk: Desk) -> None:
        first = desk.append(spec("a"), spec("b", after=["a"]))
        with desk.unchanged():
            assert desk.append(spec("a"), spec("b", after=["a"])) == first

    def test_a_repeated_claim_with_a_token_gets_the_same_jobs(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        first = desk.claim(n=2, token="t")
        with desk.unchanged():
            again = desk.claim(n=2, token="t")
        assert [(claim.id, claim.fence) for claim in again] == [(claim.id, claim.fence) for claim in first]

    def test_a_repeated_claim_answers_only_what_still_runs_under_its_fence(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        a, b, _ = desk.claim(n=3, token="t")
        desk.done(a)
        desk.fail(b)
        assert ids(desk.claim(n=3, token="t")) == ["c"]
        desk.lose()
        assert ids(desk.claim()) == ["c"]
        assert desk.claim(n=3, token="t") == []

    def test_a_claim_without_a_token_takes_more(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        assert ids(desk.claim()) == ["a"]
        assert ids(desk.claim()) == ["b"]

    def test_a_claim_that_found_nothing_is_not_kept(self, desk: Desk) -> None:
        assert desk.claim(token="t") == []
        desk.add("a")
        assert ids(desk.claim(token="t")) == ["a"]

    def test_a_repeated_cancel_with_a_token_does_nothing(self, desk: Desk) -> None:
        desk.add("a")
        assert desk.cancel(queue="q", token="t") == Canceled(1, 0)
        desk.add("b")
        with desk.unchanged():
            assert desk.cancel(queue="q", token="t") == Canceled(1, 0)
        assert desk.at("b") == "ready"

    def test_a_repeated_revive_with_a_token_does_nothing(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        desk.cancel("a")
        assert desk.revive(queue="q", token="t") == Revived(1)
        desk.cancel("b")
        with desk.unchanged():
            assert desk.revive(queue="q", token="t") == Revived(1)

    def test_a_repeated_purge_with_a_token_does_nothing(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        desk.cancel("a")
        assert desk.purge(queue="q", token="t") == Purged(1)
        desk.cancel("b")
        with desk.unchanged():
            assert desk.purge(queue="q", token="t") == Purged(1)

    def test_a_bulk_command_that_changed_nothing_is_not_kept(self, desk: Desk) -> None:
        assert desk.cancel(queue="q", token="c") == Canceled(0, 0)
        assert desk.purge(queue="q", token="p") == Purged(0)
        assert desk.revive(queue="q", token="r") == Revived(0)
        desk.append(spec("a"), spec("b"))
        assert desk.cancel("a", token="c") == Canceled(1, 0)
        assert desk.revive("a", token="r") == Revived(1)
        desk.cancel("a")
        assert desk.purge("a", token="p") == Purged(1)

    def test_a_repeated_note_with_a_token_gets_the_first_answer(self, desk: Desk) -> None:
        first = desk.write("k", b"1", expect=0, token="t")
        desk.write("k", b"2")
        with desk.unchanged():
            assert desk.write("k", b"1", expect=0, token="t") == first

    def test_a_refusal_is_not_kept(self, desk: Desk) -> None:
        desk.write("k", b"1")
        (answer,) = desk.ask(Note(key="k", value=b"2", expect=0, token="t"))
        assert answer == NoteConflict(key="k", version=1, expect=0)
        desk.write("k", None)
        assert desk.write("k", b"2", expect=0, token="t").version == 2

    def test_an_answer_is_kept_for_an_hour(self, desk: Desk) -> None:
        desk.add("a")
        desk.cancel(queue="q", token="t")
        desk.add("b")
        desk.jump(HOUR - 1)
        desk.upkeep()
        assert desk.cancel(queue="q", token="t") == Canceled(1, 0)
        assert desk.at("b") == "ready"
        desk.jump(1)
        assert desk.upkeep().swept == 1
        assert desk.cancel(queue="q", token="t") == Canceled(1, 0)
        assert desk.at("b") == "canceled/requested"

    def test_a_token_works_within_one_batch(self, desk: Desk) -> None:
        desk.add("a")
        command = Cancel(where=Selector(queue="q"), token="t")
        assert desk.ask(command, command) == [Canceled(1, 0), Canceled(1, 0)]

    def test_a_repeated_settle_answers_the_stored_outcome(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.done(claim)
        desk.jump(SECOND)
        with desk.unchanged():
            assert desk.settle(claim, Fail("late")) == Settled("a", State.DONE)

    def test_a_repeated_settle_is_answered_from_the_tombstone(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.fail(claim)
        desk.purge("a")
        with desk.unchanged():
            assert desk.fail(claim) == Settled("a", State.FAILED)
        desk.refusal(LostClaim, Settle("a", claim.fence + 1, Done()))
        desk.jump(HOUR)
        desk.upkeep()
        desk.refusal(LostClaim, Settle("a", claim.fence, Done()))

    def test_fence_zero_is_nobodys(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.add("b", key=replace("k"))
        desk.refusal(LostClaim, Settle("a", 0, Done()))
        desk.refusal(LostClaim, Settle("b", 0, Done()))

    def test_upkeep_is_the_same_the_second_time(self, desk: Desk) -> None:
        desk.add("a", delay=SECOND)
        desk.jump(SECOND)
        first, second = desk.ask(Upkeep(), Upkeep())
        assert getattr(first, "woken", None) == 1
        assert getattr(second, "woken", None) == 0
