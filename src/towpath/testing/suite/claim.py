"""Claim: which jobs, in which order, and what being claimed means."""

from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.commands import PROMOTE, Claim, Claimed, Want
from towpath.core.job import Outcome, Refuse, Release, Retry, Snooze, Spec, State
from towpath.core.lifecycle import LONGEST_SUSPICION, suspicion
from towpath.core.limits import Rate
from towpath.core.views import Counts
from towpath.testing.clock import START
from towpath.testing.suite.desk import LEASE, Desk, Suite, ids, spec


class ClaimSuite(Suite):
    """The best n of each queue."""

    def test_a_claimed_job_is_running_on_lease(self, desk: Desk) -> None:
        desk.add("a", payload=b"x", headers={"h": "1"})
        desk.jump(SECOND)
        claim = desk.take(owner="w1")
        job = desk.job("a")
        assert claim.job == job
        assert (job.state, job.reason, job.attempts, job.fence, job.owner) == (State.RUNNING, "", 1, 1, "w1")
        assert (job.lease_until, job.lease_len, job.started_at) == (desk.now + LEASE, LEASE, desk.now)
        assert (job.payload, dict(job.headers)) == (b"x", {"h": "1"})
        assert desk.counts() == Counts(running=1)

    def test_by_priority_then_seq(self, desk: Desk) -> None:
        desk.append(
            spec("a", priority=5), spec("b", priority=-1), spec("c", priority=5), spec("d", priority=0)
        )
        assert ids(desk.claim(n=3)) == ["b", "d", "a"]
        assert ids(desk.claim(n=3)) == ["c"]
        assert desk.claim(n=3) == []

    def test_no_queue_no_jobs(self, desk: Desk) -> None:
        with desk.unchanged():
            assert desk.claim("nowhere", "*") == []

    def test_each_want_has_its_own_n(self, desk: Desk) -> None:
        desk.append(*[spec(f"{queue}{n}", queue) for queue in "xyz" for n in range(3)])
        assert ids(desk.claim(Want("z", 1), Want("x", 2), Want("nowhere", 5))) == ["z0", "x0", "x1"]

    def test_the_same_queue_may_be_wanted_twice(self, desk: Desk) -> None:
        desk.append(*[spec(f"x{n}", "x") for n in range(4)])
        assert ids(desk.claim(Want("x", 1), Want("x", 2))) == ["x0", "x1", "x2"]

    def test_upto_bounds_a_want_and_those_before_it_together(self, desk: Desk) -> None:
        desk.append(*[spec(f"{queue}{n}", queue) for queue in "xy" for n in range(4)])
        wants = (
            Want("x", 1, upto=3),
            Want("y", 1, upto=3),
            Want("x", 9, upto=3),
            Want("y", 9, upto=3),
            Want("y", 1, upto=4),
        )
        assert ids(desk.claim(*wants)) == ["x0", "y0", "x1", "y1"]
        assert ids(desk.claim(Want("nowhere", 2, upto=2), *wants[3:])) == ["y2", "y3"]
        assert ids(desk.claim(Want("x", 9, upto=0))) == []
        assert ids(desk.claim(*wants)) == ["x2", "x3"]

    def test_once_of_a_claim_bounds_all_its_wants_together(self, desk: Desk) -> None:
        desk.append(
            *[spec(f"{queue}{n}", queue, max_attempts=1 + n // 2) for queue in "xy" for n in range(3)]
        )
        wants = Want("x", 9), Want("y", 9), Want("x", 9)
        claim = Claim(owner="w", wants=wants, lease=LEASE, once=3)
        assert ids(desk.do(Claimed, claim).claims) == ["x0", "x1", "x2", "y0"]
        claim = Claim(owner="w", wants=(Want("y", 9, 5),), lease=LEASE, once=0)
        assert ids(desk.do(Claimed, claim).claims) == []

    def test_a_job_is_only_claimed_once(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        assert ids(desk.claim("q", "*", n=2)) == ["a", "b"]

    def test_a_pattern_takes_the_best_of_all_its_queues(self, desk: Desk) -> None:
        desk.append(
            spec("a", "t/1"), spec("b", "t/2", priority=1), spec("c", "u/1", priority=0), spec("d", "t/2")
        )
        desk.append(spec("e", "t/1", priority=1))
        assert ids(desk.claim("t/*", n=9)) == ["b", "e", "a", "d"]

    def test_n_bounds_a_pattern_as_a_whole(self, desk: Desk) -> None:
        desk.append(spec("a", "t/1"), spec("b", "t/2"), spec("c", "t/1"), spec("d", "t/2"))
        assert ids(desk.claim("t/*", n=3)) == ["a", "b", "c"]

    def test_a_star_is_any_run_of_characters(self, desk: Desk) -> None:
        desk.append(spec("a", "x/a/z"), spec("b", "x/z"), spec("c", "x.z"), spec("d", "xz"))
        assert ids(desk.claim("x/*z", n=9)) == ["a", "b"]
        assert ids(desk.claim("*.z", n=9)) == ["c"]
        assert ids(desk.claim("*", n=9)) == ["d"]

    def test_blocked_and_scheduled_jobs_are_not_claimed(self, desk: Desk) -> None:
        desk.append(spec("a", delay=SECOND), spec("b", after=["a"]))
        assert desk.claim(n=9) == []

    def test_due_jobs_are_promoted(self, desk: Desk) -> None:
        desk.append(
            spec("a", delay=SECOND), spec("b", delay=2 * SECOND), spec("c", delay=SECOND, priority="high")
        )
        desk.jump(SECOND)
        assert ids(desk.claim(n=9)) == ["c", "a"]
        assert desk.counts() == Counts(running=2, scheduled=1)

    def test_due_jobs_of_a_pattern_are_promoted(self, desk: Desk) -> None:
        desk.append(spec("a", "t/1", delay=SECOND))
        desk.jump(SECOND)
        assert ids(desk.claim("t/*")) == ["a"]

    def test_promotion_happens_behind_a_closed_gate_too(self, desk: Desk) -> None:
        desk.append(spec("a", delay=SECOND))
        desk.set_queue(paused=True)
        desk.jump(SECOND)
        assert desk.claim() == []
        assert desk.at("a") == "ready"

    def test_promotion_is_bounded(self, desk: Desk) -> None:
        specs = [spec(f"j{n}", delay=n + 1) for n in range(PROMOTE + 10)]
        desk.append(*specs, spec("last", delay=PROMOTE + 50, priority="high"))
        desk.jump(2 * PROMOTE)
        assert ids(desk.claim()) == ["j0"]
        assert desk.counts() == Counts(running=1, ready=PROMOTE - 1, scheduled=11)
        assert ids(desk.claim()) == ["last"]
        assert desk.counts() == Counts(running=2, ready=PROMOTE + 9)

    def test_promotion_keeps_the_reasons_that_ready_may_have(self, desk: Desk) -> None:
        outcomes: list[Outcome] = [Retry(SECOND), Snooze(SECOND), Release(SECOND), Refuse(SECOND)]
        desk.append(*[spec(f"j{n}") for n in range(4)])
        for claim, outcome in zip(desk.claim(n=4), outcomes, strict=True):
            desk.settle(claim, outcome)
        desk.append(spec("delayed", delay=SECOND), spec("first", delay=SECOND, priority="high"))
        desk.jump(SECOND)
        assert ids(desk.claim()) == ["first"]
        assert (
            desk.at("j0", "j1", "j2", "j3", "delayed")
            == "ready/retry ready/snoozed ready/released ready ready"
        )

    def test_expired_jobs_are_never_returned(self, desk: Desk) -> None:
        desk.append(spec("a", ttl=SECOND), spec("b", ttl=SECOND + 1), spec("c", delay=SECOND, ttl=SECOND))
        desk.jump(SECOND)
        assert ids(desk.claim(n=9)) == ["b"]
        assert desk.at("a", "c") == "failed/expired failed/expired"

    def test_expired_jobs_of_a_part_stand_in_nobodys_way(self, desk: Desk) -> None:
        desk.append(spec("a", part="p", ttl=SECOND), spec("b", part="r"))
        desk.jump(SECOND)
        assert ids(desk.claim(n=1)) == ["b"]

    def test_ttl_does_not_run_while_running(self, desk: Desk) -> None:
        claim = desk.started("a", ttl=SECOND)
        desk.advance(2 * SECOND)
        assert desk.upkeep().expired == 0
        desk.settle(claim, Retry())
        assert desk.claim() == []
        assert desk.at("a") == "failed/expired"

    def test_the_fence_only_grows(self, desk: Desk) -> None:
        claim = desk.started("a")
        for fence in range(2, 6):
            desk.settle(claim, Release())
            claim = desk.take()
            assert (claim.fence, claim.job.attempts) == (fence, 1)

    def test_once_bounds_the_jobs_with_a_single_attempt(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", max_attempts=1), spec("c"), spec("d", max_attempts=1), spec("e"))
        assert ids(desk.claim(Want("q", 9, once=1))) == ["a", "b", "c"]
        assert desk.claim(Want("q", 9, once=0)) == []
        assert ids(desk.claim(Want("q", 9, once=1))) == ["d", "e"]

    def test_without_once_all_n_may_be_single_attempts(self, desk: Desk) -> None:
        desk.append(spec("a", max_attempts=1), spec("b", max_attempts=1))
        assert ids(desk.claim(n=2)) == ["a", "b"]

    def test_once_ends_the_list_of_its_queue_only(self, desk: Desk) -> None:
        desk.append(spec("a", "t/1", max_attempts=1), spec("b", "t/2"), spec("c", "t/1"), spec("d", "t/2"))
        assert ids(desk.claim(Want("t/*", 9, once=0))) == ["b", "d"]

    def test_once_is_shared_by_the_queues_of_a_pattern(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}", f"t/{n}", max_attempts=1) for n in range(3)])
        assert ids(desk.claim(Want("t/*", 9, once=2))) == ["j0", "j1"]

    def test_once_belongs_to_its_want(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}", max_attempts=1) for n in range(3)])
        assert ids(desk.claim(Want("q", 9, once=1), Want("q", 9, once=1))) == ["j0", "j1"]

    def test_a_lease_may_be_as_long_as_asked(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"))
        assert desk.take(lease=1).job.lease_until == START + 1
        assert desk.take(lease=3 * SECOND).job.lease_len == 3 * SECOND


class QueueGateSuite(Suite):
    """What a queue allows."""

    def test_a_paused_queue_gives_nothing(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", "t"))
        desk.set_queue(paused=True, why="maintenance")
        assert (desk.queue().paused, desk.queue().why) == (True, "maintenance")
        assert ids(desk.claim("q", "*", n=9)) == ["b"]
        desk.set_queue(paused=False)
        assert ids(desk.claim()) == ["a"]

    def test_a_pause_can_precede_the_first_job(self, desk: Desk) -> None:
        desk.set_queue(paused=True)
        assert desk.counts() == Counts()
        desk.add("a")
        assert desk.claim() == []

    def test_a_held_queue_gives_nothing_before_its_time(self, desk: Desk) -> None:
        desk.add("a")
        desk.set_queue(not_before=START + SECOND)
        assert desk.queue().next_at == START + SECOND
        desk.jump(SECOND - 1)
        assert desk.claim() == []
        desk.jump(1)
        assert ids(desk.claim()) == ["a"]

    def test_a_cap_bounds_what_runs(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}") for n in range(5)])
        desk.set_queue(cap=2)
        first, _ = desk.claim(n=5)
        assert desk.claim(n=5) == []
        desk.done(first)
        assert ids(desk.claim(n=5)) == ["j2"]
        desk.set_queue(cap=0)
        assert desk.claim(n=5) == []
        desk.set_queue(cap=None)
        assert len(desk.claim(n=5)) == 2

    def test_a_cap_below_what_runs_gives_nothing(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}") for n in range(5)])
        desk.claim(n=3)
        desk.set_queue(cap=1)
        assert desk.claim(n=5) == []

    def test_a_rate_bounds_the_starts(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}") for n in range(9)])
        desk.set_queue(rate=Rate(2, SECOND))
        assert ids(desk.claim(n=9)) == ["j0"]
        assert desk.queue().next_at == START + SECOND // 2
        assert desk.claim(n=9) == []
        desk.jump(SECOND // 2)
        assert ids(desk.claim(n=9)) == ["j1"]

    def test_a_burst_may_come_at_once(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}") for n in range(9)])
        desk.set_queue(rate=Rate(1, SECOND, burst=3))
        assert len(desk.claim(n=9)) == 3
        desk.jump(SECOND)
        assert len(desk.claim(n=9)) == 1
        desk.jump(10 * SECOND)
        assert len(desk.claim(n=9)) == 3

    def test_release_and_refuse_give_the_permit_back(self, desk: Desk) -> None:
        desk.add("a", part="p")
        desk.set_queue(rate=Rate(1, SECOND))
        desk.set_part("p", rate=Rate(1, 2 * SECOND))
        for outcome in (Release(), Refuse()):
            claim = desk.take()
            assert (desk.queue().next_at, desk.part("p").next_at) == (
                desk.now + SECOND,
                desk.now + 2 * SECOND,
            )
            desk.settle(claim, outcome)
            assert (desk.queue().next_at, desk.part("p").next_at) == (desk.now, desk.now)

    def test_retry_and_snooze_keep_the_permit(self, desk: Desk) -> None:
        desk.add("a")
        desk.set_queue(rate=Rate(1, SECOND))
        desk.settle(desk.take(), Retry())
        assert desk.claim() == []
        desk.jump(SECOND)
        desk.settle(desk.take(), Snooze())
        assert desk.claim() == []

    def test_every_queue_of_a_pattern_keeps_its_own_limits(self, desk: Desk) -> None:
        desk.append(*[spec(f"{queue[-1]}{n}", queue) for n in range(3) for queue in ("t/a", "t/b", "t/c")])
        desk.set_queue("t/a", cap=1)
        desk.set_queue("t/b", paused=True)
        assert ids(desk.claim("t/*", n=9)) == ["a0", "c0", "c1", "c2"]

    def test_a_rate_is_spent_by_what_was_taken_only(self, desk: Desk) -> None:
        desk.append(spec("a", "t/1"), spec("b", "t/2", priority="low"))
        desk.set_queue("t/1", rate=Rate(1, SECOND, burst=5))
        desk.set_queue("t/2", rate=Rate(1, SECOND, burst=5))
        assert ids(desk.claim("t/*", n=1)) == ["a"]
        assert desk.queue("t/1").next_at == START - 4 * SECOND + SECOND
        assert desk.queue("t/2").next_at == 0

    def test_queue_settings_left_out_stay(self, desk: Desk) -> None:
        desk.set_queue(paused=True, why="x", capacity=5, cap=4, rate=Rate(3), retention=7, keep=8)
        before = desk.queue()
        desk.set_queue()
        assert desk.queue() == before
        desk.set_queue(why=None, capacity=None, cap=None, rate=None, retention=None, keep=None)
        after = desk.queue()
        assert (after.paused, after.why, after.capacity, after.cap) == (True, None, None, None)
        assert (after.rate, after.retention, after.keep) == (None, None, None)

    def test_setting_a_queue_twice_is_the_same(self, desk: Desk) -> None:
        desk.set_queue(cap=3, not_before=START + 5)
        with desk.unchanged():
            desk.set_queue(cap=3, not_before=START + 5)

    def test_a_queue_is_never_deleted(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.purge("a")
        assert desk.counts() == Counts()


def _lose_twice(desk: Desk, *specs: Spec) -> None:
    """Append jobs and let the leases of all of them run out twice; the delay is over."""
    desk.append(*specs)
    for _ in range(2):
        desk.claim(*[Want(queue, len(specs)) for queue in sorted({spec.queue for spec in specs})])
        desk.lose()
        desk.jump(LONGEST_SUSPICION)


class SuspectSuite(Suite):
    """Jobs that lost their lease twice: they come back late and apart, and a claim says how many of them it
    takes."""

    def test_a_second_loss_is_followed_by_a_delay(self, desk: Desk) -> None:
        desk.started("a")
        desk.lose()
        assert desk.at("a") == "ready/lost"
        desk.take()
        upkept = desk.lose()
        job = desk.job("a")
        assert (job.state, job.reason, job.losses, job.owner) == (State.SCHEDULED, "lost", 2, None)
        assert job.ready_at == desk.now + suspicion("a", 2)
        assert upkept.next_due == job.ready_at
        assert desk.claim() == []
        desk.jump(job.ready_at - desk.now)
        claim = desk.take()
        assert (claim.fence, claim.job.ready_at) == (3, job.ready_at)

    def test_the_delay_grows_until_the_budget_is_spent(self, desk: Desk) -> None:
        desk.add("a")
        for losses in range(1, 5):
            desk.take()
            desk.lose()
            job = desk.job("a")
            assert job.losses == losses
            desk.jump(job.ready_at - desk.now if losses > 1 else 0)
        desk.take()
        desk.lose()
        assert desk.at("a") == "failed/lost"

    def test_those_that_were_lost_together_come_back_apart(self, desk: Desk) -> None:
        desk.append(*[spec(f"a{n}") for n in range(20)])
        for _ in range(2):
            desk.claim(n=20)
            desk.lose()
        times = sorted(desk.job(f"a{n}").ready_at - desk.now for n in range(20))
        assert len(set(times)) == 20
        assert times[0] < SECOND // 4
        assert SECOND // 2 < times[-1] <= SECOND

    def test_a_claim_says_how_many_suspects_it_takes(self, desk: Desk) -> None:
        _lose_twice(desk, spec("a"), spec("b"), spec("c"))
        desk.append(spec("d"), spec("e"))
        assert ids(desk.claim(Want("q", 9, suspects=0))) == ["d", "e"]
        assert ids(desk.claim(Want("q", 9, suspects=1))) == ["a"]
        assert ids(desk.claim(Want("q", 9, suspects=0))) == []
        assert ids(desk.claim(n=9)) == ["b", "c"]

    def test_without_a_limit_suspects_are_taken_in_order(self, desk: Desk) -> None:
        _lose_twice(desk, spec("a", priority=5), spec("b", priority=0))
        desk.append(spec("c", priority=0), spec("d", priority=-1), spec("e", priority=9))
        assert ids(desk.claim(n=9)) == ["d", "b", "c", "a", "e"]

    def test_the_order_stays_as_far_as_the_limit_allows(self, desk: Desk) -> None:
        _lose_twice(desk, spec("a", priority=5), spec("b", priority=0))
        desk.append(spec("c", priority=0), spec("d", priority=-1), spec("e", priority=9))
        assert ids(desk.claim(Want("q", 1, suspects=1))) == ["d"]
        assert ids(desk.claim(Want("q", 9, suspects=1))) == ["b", "c", "e"]

    def test_the_limit_of_a_claim_holds_for_all_its_wants(self, desk: Desk) -> None:
        _lose_twice(desk, spec("x0", "x"), spec("y0", "y"), spec("x1", "x"))
        desk.append(spec("x2", "x"), spec("y2", "y"))
        claim = Claim(owner="w", wants=(Want("x", 9), Want("y", 9)), lease=LEASE, suspects=1)
        assert ids(desk.do(Claimed, claim).claims) == ["x0", "x2", "y2"]
        claim = Claim(owner="w", wants=(Want("x,y", 9, suspects=5),), lease=LEASE, suspects=1)
        assert ids(desk.do(Claimed, claim).claims) == ["y0"]

    def test_several_queues_of_a_want_share_its_limit(self, desk: Desk) -> None:
        _lose_twice(desk, spec("x0", "x"), spec("y0", "y"))
        desk.append(spec("x1", "x"), spec("y1", "y"), spec("y2", "y"))
        assert ids(desk.claim(Want("x,y", 9, suspects=1))) == ["x0", "x1", "y1", "y2"]
        assert ids(desk.claim(Want("x,y", 9, suspects=1))) == ["y0"]

    def test_a_part_of_suspects_only_keeps_no_other_part_from_its_turn(self, desk: Desk) -> None:
        _lose_twice(desk, spec("p0", part="p"), spec("r0", part="r"))
        desk.append(spec("s0", part="s"), spec("s1", part="s"), spec("a"))
        assert ids(desk.claim(Want("q", 1, suspects=0))) == ["a"]
        assert ids(desk.claim(Want("q", 1, suspects=0))) == ["s0"]
        assert ids(desk.claim(Want("q", 9, suspects=0))) == ["s1"]
        assert ids(desk.claim(Want("q", 1, suspects=1))) == ["p0"]
        assert ids(desk.claim(Want("q", 1, suspects=1))) == ["r0"]

    def test_a_suspect_is_given_back_as_a_suspect(self, desk: Desk) -> None:
        _lose_twice(desk, spec("a"))
        desk.settle(desk.take(), Release())
        assert desk.claim(Want("q", 1, suspects=0)) == []
        desk.settle(desk.take(), Retry(SECOND))
        desk.jump(SECOND)
        assert desk.claim(Want("q", 1, suspects=0)) == []
        assert desk.take().id == "a"

    def test_a_revived_job_is_no_suspect(self, desk: Desk) -> None:
        _lose_twice(desk, spec("a", max_losses=3))
        desk.take()
        desk.lose()
        desk.revive("a")
        assert ids(desk.claim(Want("q", 1, suspects=0))) == ["a"]

    def test_a_suspect_of_a_paused_group_waits_for_it(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g"))
        desk.seal("g")
        for _ in range(2):
            desk.take()
            if desk.job("a").losses:
                desk.unseal("g")
            desk.lose()
        assert desk.at("a") == "blocked"
        desk.jump(SECOND)
        desk.seal("g")
        assert desk.claim(Want("q", 1, suspects=0)) == []
        assert desk.take().id == "a"
