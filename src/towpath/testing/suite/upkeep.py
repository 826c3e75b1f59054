"""Upkeep: reap, expire, wake, purge, sweep; and when the next is due."""

from __future__ import annotations

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Settle, Upkept
from towpath.core.job import Done, Retry, State
from towpath.core.limits import Rate
from towpath.core.views import Counts
from towpath.errors import LostClaim
from towpath.testing.clock import START
from towpath.testing.suite.desk import LEASE, Desk, Suite, anyway, ids, spec, unique


class ReapSuite(Suite):
    """Leases that ran out."""

    def test_a_lost_job_is_ready_again_at_once(self, desk: Desk) -> None:
        desk.started("a")
        assert desk.lose() == Upkept(reaped=1)
        job = desk.job("a")
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
        assert desk.take().fence == 2

    def test_not_before_the_lease_is_over(self, desk: Desk) -> None:
        desk.started("a")
        desk.advance(LEASE)
        assert desk.upkeep().reaped == 0
        desk.advance(1)
        assert desk.upkeep().reaped == 1

    def test_losses_have_a_budget(self, desk: Desk) -> None:
        desk.add("a", max_losses=2)
        desk.add("b", "o", after=["a"])
        desk.take()
        desk.lose()
        desk.take()
        desk.lose()
        assert desk.at("a", "b") == "failed/lost failed/dependency"
        assert (desk.job("a").losses, desk.job("a").purge_at, desk.job("a").finished_at) == (
            2,
            None,
            desk.now,
        )

    def test_a_single_attempt_is_lost_for_good(self, desk: Desk) -> None:
        desk.started("a", max_attempts=1)
        desk.lose()
        assert desk.at("a") == "failed/lost"

    def test_what_was_asked_to_stop_is_canceled(self, desk: Desk) -> None:
        desk.started("a")
        desk.add("b", "o", after=[anyway("a")])
        desk.cancel("a")
        desk.lose()
        assert desk.at("a", "b") == "canceled/requested ready"

    def test_failed_ones_end_before_canceled_ones(self, desk: Desk) -> None:
        desk.started("a")
        desk.started("b", max_attempts=1)
        desk.cancel("a")
        desk.add("c", "o", after=["a", "b"])
        desk.lose()
        assert desk.at("a", "b", "c") == "canceled/requested failed/lost failed/dependency"

    def test_by_the_end_of_the_lease(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        desk.take()
        desk.take(lease=LEASE // 2)
        desk.take()
        desk.advance(LEASE + 1, step=LEASE // 8)
        for id in "bac":
            assert desk.upkeep(limit=1).reaped == 1
            assert desk.at(id) == "ready/lost"

    def test_a_jump_of_time_reaps_nothing_for_one_lease(self, desk: Desk) -> None:
        desk.started("a")
        desk.jump(10 * LEASE)
        assert desk.upkeep().reaped == 0
        desk.advance(LEASE - 1)
        assert desk.upkeep().reaped == 0
        desk.advance(2)
        assert desk.upkeep().reaped == 1

    def test_half_a_lease_is_no_jump(self, desk: Desk) -> None:
        desk.started("a")
        desk.advance(LEASE // 2 * 3, step=LEASE // 2)
        assert desk.upkeep().reaped == 1

    def test_more_than_half_a_lease_is_a_jump(self, desk: Desk) -> None:
        desk.started("a")
        desk.advance(LEASE // 2)
        desk.jump(LEASE // 2 + 1)
        assert desk.upkeep().reaped == 0

    def test_a_jump_is_measured_by_the_lease_of_each_job(self, desk: Desk) -> None:
        desk.append(spec("long"), spec("short"))
        desk.take(lease=60 * SECOND)
        desk.advance(45 * SECOND, step=5 * SECOND)
        desk.take(lease=20 * SECOND)
        desk.jump(21 * SECOND)
        assert desk.upkeep().reaped == 1
        assert desk.at("short", "long") == "running ready/lost"

    def test_a_jump_protects_only_what_it_ran_over(self, desk: Desk) -> None:
        desk.started("a")
        desk.advance(LEASE, step=LEASE // 4)
        desk.jump(LEASE)
        assert desk.upkeep().reaped == 1

    def test_a_claim_after_the_jump_is_reaped_in_its_time(self, desk: Desk) -> None:
        desk.add("a")
        desk.jump(10 * LEASE)
        desk.take()
        assert desk.lose().reaped == 1

    def test_the_counters_of_the_part_follow(self, desk: Desk) -> None:
        desk.started("a", part="p")
        desk.lose()
        assert (desk.part("p").ready, desk.part("p").running) == (1, 0)


class DeadOwnerSuite(Suite):
    """Jobs of owners whose process has ended."""

    def test_they_are_lost_before_their_lease_is_over(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        desk.take(owner="dead")
        desk.take(owner="alive")
        desk.take(owner="dead too")
        assert desk.upkeep(dead=("dead", "dead too", "nobody")).reaped == 2
        assert desk.at("a", "b", "c") == "ready/lost running ready/lost"
        assert [desk.job(id).losses for id in "abc"] == [1, 0, 1]
        assert desk.upkeep(dead=("dead", "dead too")).reaped == 0

    def test_a_loss_is_charged_as_for_a_lease(self, desk: Desk) -> None:
        desk.started("once", max_attempts=1)
        desk.started("last", max_losses=1)
        desk.started("asked")
        desk.cancel("asked")
        desk.add("next", "o", after=["once"])
        desk.upkeep(dead=("worker",))
        assert (
            desk.at("once", "last", "asked", "next")
            == "failed/lost failed/lost canceled/requested failed/dependency"
        )

    def test_a_jump_of_time_does_not_spare_them(self, desk: Desk) -> None:
        desk.started("a")
        desk.jump(10 * LEASE)
        assert desk.upkeep(dead=("worker",)).reaped == 1

    def test_in_the_order_of_appending_and_before_late_ones(self, desk: Desk) -> None:
        desk.append(spec("late"), spec("a"), spec("b"))
        desk.take(owner="slow", lease=LEASE // 2)
        desk.take(owner="dead", lease=2 * LEASE)
        desk.take(owner="dead", lease=LEASE)
        desk.advance(LEASE // 2 + 1, step=LEASE // 8)
        for id in ("a", "b", "late"):
            upkept = desk.upkeep(limit=1, dead=("dead",))
            assert (upkept.reaped, upkept.more, desk.at(id)) == (1, True, "ready/lost")

    def test_a_late_settle_is_a_lost_claim(self, desk: Desk) -> None:
        held = desk.started("a")
        desk.upkeep(dead=("worker",))
        desk.refusal(LostClaim, Settle(held.id, held.fence, Done()))


class UpkeepSuite(Suite):
    """The rest, in order, never more than asked."""

    def test_nothing_to_do_writes_nothing(self, desk: Desk) -> None:
        desk.add("a")
        version = desk.ledger.version()
        desk.jump(SECOND)
        with desk.unchanged():
            assert desk.upkeep() == Upkept()
        assert desk.ledger.version() == version
        desk.jump(-SECOND // 2)
        assert desk.add("b").created_at == START + SECOND // 2

    def test_an_empty_ledger_has_nothing_due(self, desk: Desk) -> None:
        assert desk.upkeep() == Upkept()

    def test_expired_jobs_fail(self, desk: Desk) -> None:
        desk.add("run", "r")
        desk.append(
            spec("a", ttl=SECOND), spec("b", ttl=SECOND, delay=DAY), spec("c", ttl=SECOND, after=["run"])
        )
        desk.append(
            spec("d", "o", after=["a"]), spec("e", "o", after=[anyway("a"), anyway("b"), anyway("c")])
        )
        desk.jump(SECOND - 1)
        assert desk.upkeep().expired == 0
        desk.jump(1)
        assert desk.upkeep() == Upkept(expired=3)
        assert desk.at("a", "b", "c") == " ".join(["failed/expired"] * 3)
        assert desk.at("d", "e") == "failed/dependency ready"

    def test_expiry_does_not_stop_for_a_pause(self, desk: Desk) -> None:
        desk.add("a", ttl=SECOND)
        desk.set_queue(paused=True)
        desk.jump(SECOND)
        assert desk.upkeep().expired == 1

    def test_expired_jobs_go_by_their_time(self, desk: Desk) -> None:
        desk.append(spec("a", ttl=3), spec("b", ttl=2), spec("c", ttl=2))
        desk.jump(5)
        for id in "bca":
            desk.upkeep(limit=1)
            assert desk.at(id) == "failed/expired"

    def test_due_jobs_wake(self, desk: Desk) -> None:
        desk.append(spec("a", delay=SECOND), spec("b", delay=2 * SECOND))
        desk.settle(desk.started("c", "r"), Retry(SECOND))
        desk.jump(SECOND)
        assert desk.upkeep() == Upkept(woken=2, next_due=START + 2 * SECOND)
        assert desk.at("a", "b", "c") == "ready scheduled/delay ready/retry"

    def test_jobs_wake_by_queue_then_time(self, desk: Desk) -> None:
        desk.append(
            spec("a", "y", delay=1), spec("b", "x", delay=3), spec("c", "x", delay=2), spec("d", "x", delay=2)
        )
        desk.jump(5)
        for id in "cdba":
            assert desk.upkeep(limit=1).woken == 1
            assert desk.at(id) == "ready"

    def test_old_jobs_are_purged(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.fail(desk.started("b"))
        desk.add("c")
        desk.cancel("c")
        desk.jump(7 * DAY - 1)
        assert desk.upkeep().purged == 0
        desk.jump(1)
        assert desk.upkeep() == Upkept(purged=2, next_due=desk.now + HOUR)
        assert desk.found() == ["b"]

    def test_dead_letters_stay(self, desk: Desk) -> None:
        desk.fail(desk.started("a", retention=1))
        desk.jump(10_000 * DAY)
        assert desk.upkeep() == Upkept()

    def test_keep_bounds_what_a_queue_remembers(self, desk: Desk) -> None:
        desk.set_queue(keep=2)
        for n in range(4):
            desk.done(desk.started(f"d{n}"))
        desk.append(spec("c0"), spec("x", "other"))
        desk.cancel("c0", "x")
        desk.fail(desk.started("f"))
        assert desk.upkeep().purged == 3
        assert desk.found() == ["d3", "c0", "x", "f"]

    def test_keep_goes_by_the_time_of_purging(self, desk: Desk) -> None:
        desk.set_queue(keep=1)
        desk.done(desk.started("a", retention=DAY))
        desk.done(desk.started("b", retention=SECOND))
        assert desk.upkeep().purged == 1
        assert desk.found() == ["a"]

    def test_keep_of_zero_keeps_nothing(self, desk: Desk) -> None:
        desk.set_queue(keep=0)
        desk.done(desk.started("a"))
        assert desk.upkeep().purged == 1

    def test_notes_are_swept(self, desk: Desk) -> None:
        desk.write("k", ttl=SECOND)
        desk.write("l")
        assert desk.upkeep().next_due == START + SECOND
        desk.jump(SECOND)
        assert desk.upkeep() == Upkept(swept=1)

    def test_key_windows_are_swept(self, desk: Desk) -> None:
        desk.done(desk.started("a", key=unique("k", window=SECOND)))
        desk.add("b", key=unique("l", window=SECOND))
        desk.jump(SECOND)
        assert desk.upkeep().swept == 2
        # The second key is still held, by an unfinished job; only its window is closed.
        assert [(row[1], row[2], row[4]) for row in desk.ledger.dump()["keys"]] == [("l", "b", 0)]
        desk.done(desk.take())
        assert desk.ledger.dump()["keys"] == []
        assert desk.upkeep().swept == 0

    def test_upkeep_at_its_own_next_due_reaps_in_the_end(self, desk: Desk) -> None:
        desk.started("a")
        # Once the idle time up to it looks like a jump; the second time it does not help any more.
        for _ in range(2):
            due = desk.upkeep().next_due
            assert due is not None
            desk.now = max(desk.now, due)
        desk.upkeep()
        assert desk.at("a") == "ready/lost"

    def test_closed_groups_go_after_their_members(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("a", group="g")
        desk.seal("g")
        desk.done(desk.take())
        desk.open("empty")
        desk.seal("empty")
        desk.jump(7 * DAY - 1)
        desk.upkeep()
        assert desk.ledger.group("g") is not None
        assert desk.ledger.group("empty") is not None
        desk.jump(1)
        desk.upkeep()
        assert desk.ledger.group("g") is None
        assert desk.ledger.group("empty") is None

    def test_idle_parts_are_swept(self, desk: Desk) -> None:
        desk.done(desk.started("a", part="p"))
        desk.set_part("configured", weight=1)
        desk.started("b", part="busy")
        assert desk.upkeep().swept == 1
        assert sorted(desk.ledger.parts("q")) == ["busy", "configured"]

    def test_a_part_with_a_rate_in_use_is_configured(self, desk: Desk) -> None:
        desk.set_part("p", rate=Rate(1, HOUR))
        desk.done(desk.started("a", part="p"))
        desk.upkeep()
        assert desk.part("p").next_at == START + HOUR

    def test_the_limit_counts_all_rows_in_order(self, desk: Desk) -> None:
        desk.set_queue("old", retention=5)
        desk.done(desk.started("a", "old"))
        desk.append(spec("b", ttl=5), spec("c", delay=5), spec("d", delay=5))
        desk.write("k", ttl=5)
        desk.jump(5)
        assert desk.upkeep(limit=2) == Upkept(expired=1, woken=1, more=True, next_due=desk.now)
        assert desk.upkeep(limit=2) == Upkept(woken=1, purged=1, more=True, next_due=desk.now)
        assert desk.upkeep(limit=2) == Upkept(swept=1, next_due=desk.now + HOUR)

    def test_more_if_the_limit_was_reached(self, desk: Desk) -> None:
        desk.append(spec("a", delay=1))
        desk.jump(1)
        assert desk.upkeep(limit=1) == Upkept(woken=1, more=True)

    def test_no_more_than_asked(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}", delay=1) for n in range(10)])
        desk.jump(1)
        assert desk.upkeep(limit=4) == Upkept(woken=4, more=True, next_due=START + 1)
        assert desk.counts() == Counts(ready=4, scheduled=6)


class DueSuite(Suite):
    """When somebody should look again."""

    def test_a_lease(self, desk: Desk) -> None:
        desk.started("a")
        assert desk.upkeep().next_due == START + LEASE + 1

    def test_a_lease_that_a_jump_spared(self, desk: Desk) -> None:
        desk.started("a")
        desk.jump(10 * LEASE)
        assert desk.upkeep().next_due == desk.now + LEASE
        desk.advance(LEASE)
        assert desk.upkeep() == Upkept(reaped=1)

    def test_an_expiry_a_delay_and_a_purge(self, desk: Desk) -> None:
        desk.done(desk.started("a", retention=3 * SECOND))
        assert desk.upkeep().next_due == START + 3 * SECOND
        desk.add("b", delay=2 * SECOND)
        assert desk.upkeep().next_due == START + 2 * SECOND
        desk.add("c", ttl=SECOND)
        assert desk.upkeep().next_due == START + SECOND

    def test_a_reply(self, desk: Desk) -> None:
        desk.write("k", token="t")
        assert desk.upkeep().next_due == START + HOUR

    def test_a_tombstone(self, desk: Desk) -> None:
        desk.fail(desk.started("a"))
        desk.purge("a")
        assert desk.upkeep().next_due == START + HOUR

    def test_a_key_window(self, desk: Desk) -> None:
        desk.fail(desk.started("a", key=unique("k", window=SECOND)))
        assert desk.upkeep().next_due == START + SECOND

    def test_a_rate_with_ready_jobs_behind_it(self, desk: Desk) -> None:
        desk.set_queue(rate=Rate(1, SECOND))
        desk.append(spec("a"), spec("b"))
        claim = desk.take()
        assert desk.upkeep().next_due == START + SECOND
        desk.fail(claim)
        desk.cancel("b")
        assert desk.upkeep().next_due == START + 7 * DAY

    def test_a_held_part_with_ready_jobs_behind_it(self, desk: Desk) -> None:
        desk.set_part("p", not_before=START + SECOND)
        assert desk.upkeep().next_due is None
        desk.add("a", part="p")
        assert desk.upkeep().next_due == START + SECOND

    def test_a_held_queue_without_ready_jobs_is_not_due(self, desk: Desk) -> None:
        desk.set_queue(not_before=START + SECOND)
        assert desk.upkeep().next_due is None

    def test_a_ready_job_is_nobodys_upkeep(self, desk: Desk) -> None:
        desk.add("a")
        assert desk.upkeep().next_due is None
        assert ids(desk.claim()) == ["a"]
