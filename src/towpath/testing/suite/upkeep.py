"""Upkeep: reap, expire, wake, purge, sweep; and when the next is due."""

from __future__ import annotations

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Settle, Upkept
from towpath.core.job import Done, RetryOutcome, State
from towpath.core.limits import Rate
from towpath.core.views import Counts
from towpath.errors import LostClaim
from towpath.testing.clock import START
from towpath.testing.suite.harness import LEASE, Harness, Suite, anyway, ids, spec, unique


class ReapSuite(Suite):
    """Leases that have ended."""

    def test_a_lost_job_is_ready_again_at_once(self, harness: Harness) -> None:
        harness.started("a")
        assert harness.lose() == Upkept(reaped=1)
        job = harness.job("a")
        assert (job.state, job.reason, job.losses, job.failures, job.attempts) == (
            State.READY,
            "lost",
            1,
            0,
            1,
        )
        assert (job.owner, job.lease_until, job.fence, job.settled_fence, job.settled_as) == (
            None,
            None,
            1,
            0,
            None,
        )
        assert harness.take().fence == 2

    def test_not_before_the_lease_is_over(self, harness: Harness) -> None:
        harness.started("a")
        harness.advance(LEASE)
        assert harness.upkeep().reaped == 0
        harness.advance(1)
        assert harness.upkeep().reaped == 1

    def test_losses_have_a_budget(self, harness: Harness) -> None:
        harness.add("a", max_losses=2)
        harness.add("b", "o", after=["a"])
        harness.take()
        assert harness.lose().failed == ()
        harness.take()
        assert harness.lose().failed == ("a",)
        assert harness.at("a", "b") == "failed/lost failed/dependency"
        assert (harness.job("a").losses, harness.job("a").purge_at, harness.job("a").finished_at) == (
            2,
            None,
            harness.now,
        )

    def test_a_single_attempt_is_lost_for_good(self, harness: Harness) -> None:
        harness.started("a", max_attempts=1)
        harness.lose()
        assert harness.at("a") == "failed/lost"

    def test_what_was_asked_to_stop_is_canceled(self, harness: Harness) -> None:
        harness.started("a")
        harness.add("b", "o", after=[anyway("a")])
        harness.cancel("a")
        harness.lose()
        assert harness.at("a", "b") == "canceled/requested ready"

    def test_failed_ones_end_before_canceled_ones(self, harness: Harness) -> None:
        harness.started("a")
        harness.started("b", max_attempts=1)
        harness.cancel("a")
        harness.add("c", "o", after=["a", "b"])
        harness.lose()
        assert harness.at("a", "b", "c") == "canceled/requested failed/lost failed/dependency"

    def test_by_the_end_of_the_lease(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        harness.take()
        harness.take(lease=LEASE // 2)
        harness.take()
        harness.advance(LEASE + 1, step=LEASE // 8)
        for id in "bac":
            assert harness.upkeep(limit=1).reaped == 1
            assert harness.at(id) == "ready/lost"

    def test_a_jump_of_time_reaps_nothing_for_one_lease(self, harness: Harness) -> None:
        harness.started("a")
        harness.jump(10 * LEASE)
        assert harness.upkeep().reaped == 0
        harness.advance(LEASE - 1)
        assert harness.upkeep().reaped == 0
        harness.advance(2)
        assert harness.upkeep().reaped == 1

    def test_half_a_lease_is_no_jump(self, harness: Harness) -> None:
        harness.started("a")
        harness.advance(LEASE // 2 * 3, step=LEASE // 2)
        assert harness.upkeep().reaped == 1

    def test_more_than_half_a_lease_is_a_jump(self, harness: Harness) -> None:
        harness.started("a")
        harness.advance(LEASE // 2)
        harness.jump(LEASE // 2 + 1)
        assert harness.upkeep().reaped == 0

    def test_a_jump_is_measured_by_the_lease_of_each_job(self, harness: Harness) -> None:
        harness.append(spec("long"), spec("short"))
        harness.take(lease=60 * SECOND)
        harness.advance(45 * SECOND, step=5 * SECOND)
        harness.take(lease=20 * SECOND)
        harness.jump(21 * SECOND)
        assert harness.upkeep().reaped == 1
        assert harness.at("short", "long") == "running ready/lost"

    def test_a_jump_protects_only_what_it_ran_over(self, harness: Harness) -> None:
        harness.started("a")
        harness.advance(LEASE, step=LEASE // 4)
        harness.jump(LEASE)
        assert harness.upkeep().reaped == 1

    def test_a_claim_after_the_jump_is_reaped_in_its_time(self, harness: Harness) -> None:
        harness.add("a")
        harness.jump(10 * LEASE)
        harness.take()
        assert harness.lose().reaped == 1

    def test_the_counters_of_the_part_follow(self, harness: Harness) -> None:
        harness.started("a", part="p")
        harness.lose()
        assert (harness.part("p").ready, harness.part("p").running) == (1, 0)


class DeadOwnerSuite(Suite):
    """Jobs of owners with an ended process."""

    def test_they_are_lost_before_their_lease_is_over(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        harness.take(owner="dead")
        harness.take(owner="alive")
        harness.take(owner="dead too")
        assert harness.upkeep(dead=("dead", "dead too", "nobody")).reaped == 2
        assert harness.at("a", "b", "c") == "ready/lost running ready/lost"
        assert [harness.job(id).losses for id in "abc"] == [1, 0, 1]
        assert harness.upkeep(dead=("dead", "dead too")).reaped == 0

    def test_a_loss_is_charged_as_for_a_lease(self, harness: Harness) -> None:
        harness.started("once", max_attempts=1)
        harness.started("last", max_losses=1)
        harness.started("asked")
        harness.cancel("asked")
        harness.add("next", "o", after=["once"])
        harness.upkeep(dead=("worker",))
        assert (
            harness.at("once", "last", "asked", "next")
            == "failed/lost failed/lost canceled/requested failed/dependency"
        )

    def test_a_jump_of_time_does_not_spare_them(self, harness: Harness) -> None:
        harness.started("a")
        harness.jump(10 * LEASE)
        assert harness.upkeep(dead=("worker",)).reaped == 1

    def test_in_the_order_of_appending_and_before_late_ones(self, harness: Harness) -> None:
        harness.append(spec("late"), spec("a"), spec("b"))
        harness.take(owner="slow", lease=LEASE // 2)
        harness.take(owner="dead", lease=2 * LEASE)
        harness.take(owner="dead", lease=LEASE)
        harness.advance(LEASE // 2 + 1, step=LEASE // 8)
        for id in ("a", "b", "late"):
            upkept = harness.upkeep(limit=1, dead=("dead",))
            assert (upkept.reaped, upkept.more, harness.at(id)) == (1, True, "ready/lost")

    def test_a_late_settle_is_a_lost_claim(self, harness: Harness) -> None:
        held = harness.started("a")
        harness.upkeep(dead=("worker",))
        harness.refusal(LostClaim, Settle(held.id, held.fence, Done()))


class UpkeepSuite(Suite):
    """Expire, wake, purge and sweep, in this order, at most `limit` rows."""

    def test_nothing_to_do_writes_nothing(self, harness: Harness) -> None:
        harness.add("a")
        version = harness.ledger.version()
        harness.jump(SECOND)
        with harness.unchanged():
            assert harness.upkeep() == Upkept()
        assert harness.ledger.version() == version
        harness.jump(-SECOND // 2)
        assert harness.add("b").created_at == START + SECOND // 2

    def test_an_empty_ledger_has_nothing_due(self, harness: Harness) -> None:
        assert harness.upkeep() == Upkept()

    def test_expired_jobs_fail(self, harness: Harness) -> None:
        harness.add("run", "r")
        harness.append(
            spec("a", ttl=SECOND), spec("b", ttl=SECOND, delay=DAY), spec("c", ttl=SECOND, after=["run"])
        )
        harness.append(
            spec("d", "o", after=["a"]), spec("e", "o", after=[anyway("a"), anyway("b"), anyway("c")])
        )
        harness.jump(SECOND - 1)
        assert harness.upkeep().expired == 0
        harness.jump(1)
        assert harness.upkeep() == Upkept(expired=3)
        assert harness.at("a", "b", "c") == " ".join(["failed/expired"] * 3)
        assert harness.at("d", "e") == "failed/dependency ready"

    def test_expiry_does_not_stop_for_a_pause(self, harness: Harness) -> None:
        harness.add("a", ttl=SECOND)
        harness.set_queue(paused=True)
        harness.jump(SECOND)
        assert harness.upkeep().expired == 1

    def test_expired_jobs_go_by_their_time(self, harness: Harness) -> None:
        harness.append(spec("a", ttl=3), spec("b", ttl=2), spec("c", ttl=2))
        harness.jump(5)
        for id in "bca":
            harness.upkeep(limit=1)
            assert harness.at(id) == "failed/expired"

    def test_due_jobs_wake(self, harness: Harness) -> None:
        harness.append(spec("a", delay=SECOND), spec("b", delay=2 * SECOND))
        harness.settle(harness.started("c", "r"), RetryOutcome(SECOND))
        harness.jump(SECOND)
        assert harness.upkeep() == Upkept(woken=2, next_due=START + 2 * SECOND)
        assert harness.at("a", "b", "c") == "ready scheduled/delay ready/retry"

    def test_jobs_wake_by_queue_then_time(self, harness: Harness) -> None:
        harness.append(
            spec("a", "y", delay=1), spec("b", "x", delay=3), spec("c", "x", delay=2), spec("d", "x", delay=2)
        )
        harness.jump(5)
        for id in "cdba":
            assert harness.upkeep(limit=1).woken == 1
            assert harness.at(id) == "ready"

    def test_old_jobs_are_purged(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.fail(harness.started("b"))
        harness.add("c")
        harness.cancel("c")
        harness.jump(7 * DAY - 1)
        assert harness.upkeep().purged == 0
        harness.jump(1)
        assert harness.upkeep() == Upkept(purged=2, next_due=harness.now + HOUR)
        assert harness.found() == ["b"]

    def test_dead_letters_stay(self, harness: Harness) -> None:
        harness.fail(harness.started("a", retention=1))
        harness.jump(10_000 * DAY)
        assert harness.upkeep() == Upkept()

    def test_keep_bounds_what_a_queue_remembers(self, harness: Harness) -> None:
        harness.set_queue(keep=2)
        for n in range(4):
            harness.done(harness.started(f"d{n}"))
        harness.append(spec("c0"), spec("x", "other"))
        harness.cancel("c0", "x")
        harness.fail(harness.started("f"))
        assert harness.upkeep().purged == 3
        assert harness.found() == ["d3", "c0", "x", "f"]

    def test_keep_goes_by_the_time_of_purging(self, harness: Harness) -> None:
        harness.set_queue(keep=1)
        harness.done(harness.started("a", retention=DAY))
        harness.done(harness.started("b", retention=SECOND))
        assert harness.upkeep().purged == 1
        assert harness.found() == ["a"]

    def test_keep_of_zero_keeps_nothing(self, harness: Harness) -> None:
        harness.set_queue(keep=0)
        harness.done(harness.started("a"))
        assert harness.upkeep().purged == 1

    def test_notes_are_swept(self, harness: Harness) -> None:
        harness.write("k", ttl=SECOND)
        harness.write("l")
        assert harness.upkeep().next_due == START + SECOND
        harness.jump(SECOND)
        assert harness.upkeep() == Upkept(swept=1)

    def test_key_windows_are_swept(self, harness: Harness) -> None:
        harness.done(harness.started("a", key=unique("k", window=SECOND)))
        harness.add("b", key=unique("l", window=SECOND))
        harness.jump(SECOND)
        assert harness.upkeep().swept == 2
        # The second key is still held, by an unfinished job; only its window is closed.
        assert [(row[1], row[2], row[4]) for row in harness.ledger.dump()["keys"]] == [("l", "b", 0)]
        harness.done(harness.take())
        assert harness.ledger.dump()["keys"] == []
        assert harness.upkeep().swept == 0

    def test_upkeep_at_its_own_next_due_reaps_in_the_end(self, harness: Harness) -> None:
        harness.started("a")
        # The idle time before the first upkeep counts as a clock jump; the second upkeep is not delayed
        # again.
        for _ in range(2):
            due = harness.upkeep().next_due
            assert due is not None
            harness.now = max(harness.now, due)
        harness.upkeep()
        assert harness.at("a") == "ready/lost"

    def test_closed_groups_go_after_their_members(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("a", group="g")
        harness.seal("g")
        harness.done(harness.take())
        harness.open("empty")
        harness.seal("empty")
        harness.jump(7 * DAY - 1)
        harness.upkeep()
        assert harness.ledger.group("g") is not None
        assert harness.ledger.group("empty") is not None
        harness.jump(1)
        harness.upkeep()
        assert harness.ledger.group("g") is None
        assert harness.ledger.group("empty") is None

    def test_idle_parts_are_swept(self, harness: Harness) -> None:
        harness.done(harness.started("a", part="p"))
        harness.set_part("configured", weight=1)
        harness.started("b", part="busy")
        assert harness.upkeep().swept == 1
        assert sorted(harness.ledger.parts("q")) == ["busy", "configured"]

    def test_a_part_with_a_rate_in_use_is_configured(self, harness: Harness) -> None:
        harness.set_part("p", rate=Rate(1, 3600))
        harness.done(harness.started("a", part="p"))
        harness.upkeep()
        assert harness.part("p").next_at == START + HOUR

    def test_the_limit_counts_all_rows_in_order(self, harness: Harness) -> None:
        harness.set_queue("old", retention=5)
        harness.done(harness.started("a", "old"))
        harness.append(spec("b", ttl=5), spec("c", delay=5), spec("d", delay=5))
        harness.write("k", ttl=5)
        harness.jump(5)
        assert harness.upkeep(limit=2) == Upkept(expired=1, woken=1, more=True, next_due=harness.now)
        assert harness.upkeep(limit=2) == Upkept(woken=1, purged=1, more=True, next_due=harness.now)
        assert harness.upkeep(limit=2) == Upkept(swept=1, next_due=harness.now + HOUR)

    def test_more_if_the_limit_was_reached(self, harness: Harness) -> None:
        harness.append(spec("a", delay=1))
        harness.jump(1)
        assert harness.upkeep(limit=1) == Upkept(woken=1, more=True)

    def test_no_more_than_asked(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}", delay=1) for n in range(10)])
        harness.jump(1)
        assert harness.upkeep(limit=4) == Upkept(woken=4, more=True, next_due=START + 1)
        assert harness.counts() == Counts(ready=4, scheduled=6)


class DueSuite(Suite):
    """The time at which the next upkeep is due."""

    def test_a_lease(self, harness: Harness) -> None:
        harness.started("a")
        assert harness.upkeep().next_due == START + LEASE + 1

    def test_a_lease_that_a_jump_spared(self, harness: Harness) -> None:
        harness.started("a")
        harness.jump(10 * LEASE)
        assert harness.upkeep().next_due == harness.now + LEASE
        harness.advance(LEASE)
        assert harness.upkeep() == Upkept(reaped=1)

    def test_an_expiry_a_delay_and_a_purge(self, harness: Harness) -> None:
        harness.done(harness.started("a", retention=3 * SECOND))
        assert harness.upkeep().next_due == START + 3 * SECOND
        harness.add("b", delay=2 * SECOND)
        assert harness.upkeep().next_due == START + 2 * SECOND
        harness.add("c", ttl=SECOND)
        assert harness.upkeep().next_due == START + SECOND

    def test_a_reply(self, harness: Harness) -> None:
        harness.write("k", token="t")
        assert harness.upkeep().next_due == START + HOUR

    def test_a_tombstone(self, harness: Harness) -> None:
        harness.fail(harness.started("a"))
        harness.purge("a")
        assert harness.upkeep().next_due == START + HOUR

    def test_a_key_window(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k", window=SECOND)))
        assert harness.upkeep().next_due == START + SECOND

    def test_a_rate_with_ready_jobs_behind_it(self, harness: Harness) -> None:
        harness.set_queue(rate=Rate(1))
        harness.append(spec("a"), spec("b"))
        claim = harness.take()
        assert harness.upkeep().next_due == START + SECOND
        harness.fail(claim)
        harness.cancel("b")
        assert harness.upkeep().next_due == START + 7 * DAY

    def test_a_held_part_with_ready_jobs_behind_it(self, harness: Harness) -> None:
        harness.set_part("p", not_before=START + SECOND)
        assert harness.upkeep().next_due is None
        harness.add("a", part="p")
        assert harness.upkeep().next_due == START + SECOND

    def test_a_held_queue_without_ready_jobs_is_not_due(self, harness: Harness) -> None:
        harness.set_queue(not_before=START + SECOND)
        assert harness.upkeep().next_due is None

    def test_a_ready_job_is_nobodys_upkeep(self, harness: Harness) -> None:
        harness.add("a")
        assert harness.upkeep().next_due is None
        assert ids(harness.claim()) == ["a"]
