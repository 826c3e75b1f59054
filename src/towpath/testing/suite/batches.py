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
from towpath.core.job import Done, FailOutcome, Release, State
from towpath.errors import LostClaim, NoteConflict, UnknownDependency, UnknownGroup
from towpath.ledger import Ledger
from towpath.testing.clock import START, ManualClock
from towpath.testing.suite.harness import LEASE, Harness, Suite, ids, replace, spec


class BatchSuite(Suite):
    """One transaction, one answer per command, one time."""

    def test_answers_come_in_the_order_of_the_commands(self, harness: Harness) -> None:
        first, second, third = harness.ask(
            Append((spec("a"),)),
            Claim(owner="w", wants=(Want("q"),), lease=LEASE),
            Settle("a", 1, Done()),
        )
        assert first == Appended((Placed("a", 1),))
        assert isinstance(second, Claimed)
        assert ids(second.claims) == ["a"]
        assert third == Settled("a", State.DONE)

    def test_an_empty_batch_has_no_answers(self, harness: Harness) -> None:
        with harness.unchanged():
            assert harness.ask() == []

    def test_a_refused_command_does_not_disturb_its_neighbours(self, harness: Harness) -> None:
        answers = harness.ask(
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
        assert harness.found() == ["a", "d"]

    def test_a_dependent_can_be_claimed_in_the_batch_that_frees_it(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.add("b", after=["a"])
        _, answer = harness.ask(
            Settle("a", claim.fence, Done()),
            Claim(owner="w", wants=(Want("q"),), lease=LEASE),
        )
        assert isinstance(answer, Claimed)
        assert ids(answer.claims) == ["b"]

    def test_a_claim_skips_what_expired_and_was_given_back_in_its_batch(self, harness: Harness) -> None:
        claim = harness.started("a", ttl=SECOND)
        harness.advance(2 * SECOND)
        harness.add("b")
        take = Claim(owner="w", wants=(Want("q", 9),), lease=LEASE)
        _, claimed = harness.ask(Settle("a", claim.fence, Release()), take)
        assert isinstance(claimed, Claimed)
        assert ids(claimed.claims) == ["b"]
        assert harness.at("a") == "failed/expired"

    def test_a_claim_counts_a_suspect_that_was_given_back_in_its_batch(self, harness: Harness) -> None:
        harness.append(spec("a"))
        for _ in range(2):
            harness.take()
            harness.lose()
        harness.jump(SECOND)
        held = harness.take()
        harness.add("b")
        release = Settle("a", held.fence, Release())
        for wanted, expected in ((Want("q", 9, suspects=0), ["b"]), (Want("q", 9, suspects=1), ["a"])):
            _, claimed = harness.ask(release, Claim(owner="w", wants=(wanted,), lease=LEASE))
            assert isinstance(claimed, Claimed)
            assert ids(claimed.claims) == expected

    def test_time_never_runs_backwards(self, harness: Harness) -> None:
        harness.add("a")
        harness.jump(-10 * SECOND)
        assert harness.add("b").created_at == START
        assert harness.take().job.lease_until == START + LEASE

    def test_a_batch_that_wrote_nothing_does_not_move_time(self, harness: Harness) -> None:
        harness.add("a", "other")
        harness.jump(50 * SECOND)
        assert harness.claim() == []
        harness.ask(Append((spec("x", after=["nowhere"]),)), Seal("nothing"), Settle("a", 7, Done()))
        harness.upkeep()
        harness.jump(-40 * SECOND)
        assert harness.add("b").created_at == START + 10 * SECOND

    def test_without_now_the_ledgers_clock_counts(self, ledger: Ledger, clock: ManualClock) -> None:
        clock.advance(5)
        ledger.apply([Append((spec("a", delay=SECOND),))])
        job = ledger.get("a")
        assert job is not None
        assert (job.created_at, job.ready_at) == (START + 5 * SECOND, START + 6 * SECOND)

    def test_seq_counts_from_one_in_list_order(self, harness: Harness) -> None:
        assert harness.append(spec("b"), spec("a"), spec("c")) == (
            Placed("b", 1),
            Placed("a", 2),
            Placed("c", 3),
        )
        assert [harness.job(id).seq for id in "bac"] == [1, 2, 3]

    def test_seq_is_not_used_by_refused_or_repeated_specs(self, harness: Harness) -> None:
        harness.add("a")
        harness.ask(Append((spec("b"), spec("c", after=["nowhere"]))))
        harness.append(spec("a"))
        assert harness.add("d").seq == 2

    def test_seq_is_never_used_twice(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.add("b")
        harness.cancel("b")
        harness.purge("a", "b")
        assert harness.add("c").seq == 3

    def test_version_is_different_after_every_commit(self, harness: Harness, ledger: Ledger) -> None:
        seen = {ledger.version()}
        for id in "abc":
            harness.add(id)
            assert ledger.version() not in seen
            seen.add(ledger.version())

    def test_wait_returns_at_once_if_something_has_changed(self, harness: Harness, ledger: Ledger) -> None:
        seen = ledger.version()
        harness.add("a")
        assert ledger.wait(seen, 60) == ledger.version()

    def test_wait_returns_when_time_is_up(self, harness: Harness, ledger: Ledger) -> None:
        harness.add("a")
        seen = ledger.version()
        assert ledger.wait(seen, 0.001) == seen

    def test_wait_is_woken_by_a_commit(self, harness: Harness, ledger: Ledger) -> None:
        seen = ledger.version()
        woken: list[int] = []
        waiter = threading.Thread(target=lambda: woken.append(ledger.wait(seen, 60)))
        waiter.start()
        harness.add("a")
        waiter.join(30)
        assert not waiter.is_alive()
        assert len(woken) == 1
        assert woken != [seen]
        if not ledger.capabilities.remote:  # A ledger on a server may receive notifications of other commits.
            assert woken == [ledger.version()]


class RepeatSuite(Suite):
    """Every command may be applied twice."""

    def test_a_repeated_append_answers_by_the_known_ids(self, harness: Harness) -> None:
        first = harness.append(spec("a"), spec("b", after=["a"]))
        with harness.unchanged():
            assert harness.append(spec("a"), spec("b", after=["a"])) == first

    def test_a_repeated_claim_with_a_token_gets_the_same_jobs(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        first = harness.claim(n=2, token="t")
        with harness.unchanged():
            again = harness.claim(n=2, token="t")
        assert [(claim.id, claim.fence) for claim in again] == [(claim.id, claim.fence) for claim in first]

    def test_a_repeated_claim_answers_only_what_still_runs_under_its_fence(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        a, b, _ = harness.claim(n=3, token="t")
        harness.done(a)
        harness.fail(b)
        assert ids(harness.claim(n=3, token="t")) == ["c"]
        harness.lose()
        assert ids(harness.claim()) == ["c"]
        assert harness.claim(n=3, token="t") == []

    def test_a_claim_without_a_token_takes_more(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        assert ids(harness.claim()) == ["a"]
        assert ids(harness.claim()) == ["b"]

    def test_a_claim_that_found_nothing_is_not_kept(self, harness: Harness) -> None:
        assert harness.claim(token="t") == []
        harness.add("a")
        assert ids(harness.claim(token="t")) == ["a"]

    def test_a_repeated_cancel_with_a_token_does_nothing(self, harness: Harness) -> None:
        harness.add("a")
        assert harness.cancel(queue="q", token="t") == Canceled(1, 0)
        harness.add("b")
        with harness.unchanged():
            assert harness.cancel(queue="q", token="t") == Canceled(1, 0)
        assert harness.at("b") == "ready"

    def test_a_repeated_revive_with_a_token_does_nothing(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        harness.cancel("a")
        assert harness.revive(queue="q", token="t") == Revived(1)
        harness.cancel("b")
        with harness.unchanged():
            assert harness.revive(queue="q", token="t") == Revived(1)

    def test_a_repeated_purge_with_a_token_does_nothing(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        harness.cancel("a")
        assert harness.purge(queue="q", token="t") == Purged(1)
        harness.cancel("b")
        with harness.unchanged():
            assert harness.purge(queue="q", token="t") == Purged(1)

    def test_a_bulk_command_that_changed_nothing_is_not_kept(self, harness: Harness) -> None:
        assert harness.cancel(queue="q", token="c") == Canceled(0, 0)
        assert harness.purge(queue="q", token="p") == Purged(0)
        assert harness.revive(queue="q", token="r") == Revived(0)
        harness.append(spec("a"), spec("b"))
        assert harness.cancel("a", token="c") == Canceled(1, 0)
        assert harness.revive("a", token="r") == Revived(1)
        harness.cancel("a")
        assert harness.purge("a", token="p") == Purged(1)

    def test_a_repeated_note_with_a_token_gets_the_first_answer(self, harness: Harness) -> None:
        first = harness.write("k", b"1", expect=0, token="t")
        harness.write("k", b"2")
        with harness.unchanged():
            assert harness.write("k", b"1", expect=0, token="t") == first

    def test_a_refusal_is_not_kept(self, harness: Harness) -> None:
        harness.write("k", b"1")
        (answer,) = harness.ask(Note(key="k", value=b"2", expect=0, token="t"))
        assert answer == NoteConflict(key="k", version=1, expect=0)
        harness.write("k", None)
        assert harness.write("k", b"2", expect=0, token="t").version == 2

    def test_an_answer_is_kept_for_an_hour(self, harness: Harness) -> None:
        harness.add("a")
        harness.cancel(queue="q", token="t")
        harness.add("b")
        harness.jump(HOUR - 1)
        harness.upkeep()
        assert harness.cancel(queue="q", token="t") == Canceled(1, 0)
        assert harness.at("b") == "ready"
        harness.jump(1)
        assert harness.upkeep().swept == 1
        assert harness.cancel(queue="q", token="t") == Canceled(1, 0)
        assert harness.at("b") == "canceled/requested"

    def test_a_token_works_within_one_batch(self, harness: Harness) -> None:
        harness.add("a")
        command = Cancel(where=Selector(queue="q"), token="t")
        assert harness.ask(command, command) == [Canceled(1, 0), Canceled(1, 0)]

    def test_a_repeated_settle_answers_the_stored_outcome(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.done(claim)
        harness.jump(SECOND)
        with harness.unchanged():
            assert harness.settle(claim, FailOutcome("late")) == Settled("a", State.DONE)

    def test_a_repeated_settle_is_answered_from_the_tombstone(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.fail(claim)
        harness.purge("a")
        with harness.unchanged():
            assert harness.fail(claim) == Settled("a", State.FAILED)
        harness.refusal(LostClaim, Settle("a", claim.fence + 1, Done()))
        harness.jump(HOUR)
        harness.upkeep()
        harness.refusal(LostClaim, Settle("a", claim.fence, Done()))

    def test_fence_zero_is_nobodys(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.add("b", key=replace("k"))
        harness.refusal(LostClaim, Settle("a", 0, Done()))
        harness.refusal(LostClaim, Settle("b", 0, Done()))

    def test_upkeep_is_the_same_the_second_time(self, harness: Harness) -> None:
        harness.add("a", delay=SECOND)
        harness.jump(SECOND)
        first, second = harness.ask(Upkeep(), Upkeep())
        assert getattr(first, "woken", None) == 1
        assert getattr(second, "woken", None) == 0
