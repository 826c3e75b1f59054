"""Claim: which jobs, in which order, and the record of a claimed job."""

from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.commands import PROMOTE, Append, Claim, Claimed, Settle, Want
from towpath.core.job import Done, Outcome, Refuse, Release, RetryOutcome, SnoozeOutcome, Spec, State
from towpath.core.lifecycle import MAX_SUSPECT_DELAY, suspect_delay
from towpath.core.limits import Rate
from towpath.core.views import Counts
from towpath.testing.clock import START
from towpath.testing.suite.harness import LEASE, Harness, Suite, ids, spec


class ClaimSuite(Suite):
    """The best n of each queue."""

    def test_a_claimed_job_is_running_on_lease(self, harness: Harness) -> None:
        harness.add("a", payload=b"x", headers={"h": "1"})
        harness.jump(SECOND)
        claim = harness.take(owner="w1")
        job = harness.job("a")
        assert claim.job == job
        assert (job.state, job.reason, job.attempts, job.fence, job.owner) == (State.RUNNING, "", 1, 1, "w1")
        assert (job.lease_until, job.lease_len, job.started_at) == (harness.now + LEASE, LEASE, harness.now)
        assert (job.payload, dict(job.headers)) == (b"x", {"h": "1"})
        assert harness.counts() == Counts(running=1)

    def test_by_priority_then_seq(self, harness: Harness) -> None:
        harness.append(
            spec("a", priority=5), spec("b", priority=-1), spec("c", priority=5), spec("d", priority=0)
        )
        assert ids(harness.claim(n=3)) == ["b", "d", "a"]
        assert ids(harness.claim(n=3)) == ["c"]
        assert harness.claim(n=3) == []

    def test_no_queue_no_jobs(self, harness: Harness) -> None:
        with harness.unchanged():
            assert harness.claim("nowhere", "*") == []

    def test_each_want_has_its_own_n(self, harness: Harness) -> None:
        harness.append(*[spec(f"{queue}{n}", queue) for queue in "xyz" for n in range(3)])
        assert ids(harness.claim(Want("z", 1), Want("x", 2), Want("nowhere", 5))) == ["z0", "x0", "x1"]

    def test_the_same_queue_may_be_wanted_twice(self, harness: Harness) -> None:
        harness.append(*[spec(f"x{n}", "x") for n in range(4)])
        assert ids(harness.claim(Want("x", 1), Want("x", 2))) == ["x0", "x1", "x2"]

    def test_a_want_may_have_an_owner_and_a_lease_of_its_own(self, harness: Harness) -> None:
        harness.append(*[spec(f"{queue}{n}", queue) for queue in "xy" for n in range(2)])
        wants = (
            Want("x", 1, owner="near", lease=7 * LEASE),
            Want("x", 1),
            Want("y", 1, lease=2 * LEASE),
            Want("y", 1, upto=9, owner="far"),
        )
        claims = harness.do(Claimed, Claim(owner="w", wants=wants, lease=LEASE)).claims
        assert [(job.id, job.owner, job.lease_len) for job in [claim.job for claim in claims]] == [
            ("x0", "near", 7 * LEASE),
            ("x1", "w", LEASE),
            ("y0", "w", 2 * LEASE),
            ("y1", "far", LEASE),
        ]
        assert all(claim.job == harness.ledger.get(claim.id) for claim in claims)

    def test_one_want_with_an_owner_of_its_own(self, harness: Harness) -> None:
        want = Want("q", owner="near", lease=7 * LEASE)
        harness.append(spec("a"))
        (claim,) = harness.claim(want)
        harness.ask(Settle("a", claim.fence, Done()), Append((spec("b"),)))
        (second,) = harness.claim(want)
        [_, third] = harness.ask(Append((spec("c"),)), Claim(owner="w", wants=(want,), lease=LEASE))
        assert isinstance(third, Claimed)
        for each in (claim, second, *third.claims):
            assert (each.job.owner, each.job.lease_len) == ("near", 7 * LEASE)

    def test_upto_bounds_a_want_and_those_before_it_together(self, harness: Harness) -> None:
        harness.append(*[spec(f"{queue}{n}", queue) for queue in "xy" for n in range(4)])
        wants = (
            Want("x", 1, upto=3),
            Want("y", 1, upto=3),
            Want("x", 9, upto=3),
            Want("y", 9, upto=3),
            Want("y", 1, upto=4),
        )
        assert ids(harness.claim(*wants)) == ["x0", "y0", "x1", "y1"]
        assert ids(harness.claim(Want("nowhere", 2, upto=2), *wants[3:])) == ["y2", "y3"]
        assert ids(harness.claim(Want("x", 9, upto=0))) == []
        assert ids(harness.claim(*wants)) == ["x2", "x3"]

    def test_once_of_a_claim_bounds_all_its_wants_together(self, harness: Harness) -> None:
        harness.append(
            *[spec(f"{queue}{n}", queue, max_attempts=1 + n // 2) for queue in "xy" for n in range(3)]
        )
        wants = Want("x", 9), Want("y", 9), Want("x", 9)
        claim = Claim(owner="w", wants=wants, lease=LEASE, once=3)
        assert ids(harness.do(Claimed, claim).claims) == ["x0", "x1", "x2", "y0"]
        claim = Claim(owner="w", wants=(Want("y", 9, 5),), lease=LEASE, once=0)
        assert ids(harness.do(Claimed, claim).claims) == []

    def test_kinds_are_left_for_others(self, harness: Harness) -> None:
        harness.append(*[spec(f"{kind}{n}", kind=kind) for n in range(3) for kind in "kl"])
        assert ids(harness.claim(Want("q", 2, without=("k", "m")))) == ["l0", "l1"]
        assert ids(harness.claim(Want("q", 9, upto=9, without=("k",)))) == ["l2"]
        assert harness.claim(Want("q", 9, without=("k",))) == []
        assert ids(harness.claim(Want("q", 2))) == ["k0", "k1"]

    def test_kinds_are_left_in_each_queue_of_a_pattern(self, harness: Harness) -> None:
        harness.append(*[spec(f"{queue}{kind}", f"t/{queue}", kind=kind) for queue in "xy" for kind in "kl"])
        harness.append(spec("yp", "t/y", kind="k", part="p"))
        assert sorted(ids(harness.claim(Want("t/*", 9, without=("k",))))) == ["xl", "yk", "yl", "yp"]

    def test_an_appended_job_of_such_a_kind_is_left(self, harness: Harness) -> None:
        claim = Claim(owner="w", wants=(Want("q", 1, without=("k",)),), lease=LEASE)
        assert harness.ask(Append((spec("a", kind="k"),)), claim)[1] == Claimed(())
        harness.ask(Append((spec("b", kind="l"),)), claim)
        assert (harness.at("a"), harness.at("b")) == ("ready", "running")

    def test_a_job_is_only_claimed_once(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        assert ids(harness.claim("q", "*", n=2)) == ["a", "b"]

    def test_a_pattern_takes_the_best_of_all_its_queues(self, harness: Harness) -> None:
        harness.append(
            spec("a", "t/1"), spec("b", "t/2", priority=1), spec("c", "u/1", priority=0), spec("d", "t/2")
        )
        harness.append(spec("e", "t/1", priority=1))
        assert ids(harness.claim("t/*", n=9)) == ["b", "e", "a", "d"]

    def test_n_bounds_a_pattern_as_a_whole(self, harness: Harness) -> None:
        harness.append(spec("a", "t/1"), spec("b", "t/2"), spec("c", "t/1"), spec("d", "t/2"))
        assert ids(harness.claim("t/*", n=3)) == ["a", "b", "c"]

    def test_a_star_is_any_run_of_characters(self, harness: Harness) -> None:
        harness.append(spec("a", "x/a/z"), spec("b", "x/z"), spec("c", "x.z"), spec("d", "xz"))
        assert ids(harness.claim("x/*z", n=9)) == ["a", "b"]
        assert ids(harness.claim("*.z", n=9)) == ["c"]
        assert ids(harness.claim("*", n=9)) == ["d"]

    def test_blocked_and_scheduled_jobs_are_not_claimed(self, harness: Harness) -> None:
        harness.append(spec("a", delay=SECOND), spec("b", after=["a"]))
        assert harness.claim(n=9) == []

    def test_due_jobs_are_promoted(self, harness: Harness) -> None:
        harness.append(
            spec("a", delay=SECOND), spec("b", delay=2 * SECOND), spec("c", delay=SECOND, priority="high")
        )
        harness.jump(SECOND)
        assert ids(harness.claim(n=9)) == ["c", "a"]
        assert harness.counts() == Counts(running=2, scheduled=1)

    def test_due_jobs_of_a_pattern_are_promoted(self, harness: Harness) -> None:
        harness.append(spec("a", "t/1", delay=SECOND))
        harness.jump(SECOND)
        assert ids(harness.claim("t/*")) == ["a"]

    def test_promotion_happens_behind_a_closed_gate_too(self, harness: Harness) -> None:
        harness.append(spec("a", delay=SECOND))
        harness.set_queue(paused=True)
        harness.jump(SECOND)
        assert harness.claim() == []
        assert harness.at("a") == "ready"

    def test_promotion_is_bounded(self, harness: Harness) -> None:
        specs = [spec(f"j{n}", delay=n + 1) for n in range(PROMOTE + 10)]
        harness.append(*specs, spec("last", delay=PROMOTE + 50, priority="high"))
        harness.jump(2 * PROMOTE)
        assert ids(harness.claim()) == ["j0"]
        assert harness.counts() == Counts(running=1, ready=PROMOTE - 1, scheduled=11)
        assert ids(harness.claim()) == ["last"]
        assert harness.counts() == Counts(running=2, ready=PROMOTE + 9)

    def test_promotion_keeps_the_reasons_that_ready_may_have(self, harness: Harness) -> None:
        outcomes: list[Outcome] = [
            RetryOutcome(SECOND),
            SnoozeOutcome(SECOND),
            Release(SECOND),
            Refuse(SECOND),
        ]
        harness.append(*[spec(f"j{n}") for n in range(4)])
        for claim, outcome in zip(harness.claim(n=4), outcomes, strict=True):
            harness.settle(claim, outcome)
        harness.append(spec("delayed", delay=SECOND), spec("first", delay=SECOND, priority="high"))
        harness.jump(SECOND)
        assert ids(harness.claim()) == ["first"]
        assert (
            harness.at("j0", "j1", "j2", "j3", "delayed")
            == "ready/retry ready/snoozed ready/released ready ready"
        )

    def test_expired_jobs_are_never_returned(self, harness: Harness) -> None:
        harness.append(spec("a", ttl=SECOND), spec("b", ttl=SECOND + 1), spec("c", delay=SECOND, ttl=SECOND))
        harness.jump(SECOND)
        assert ids(harness.claim(n=9)) == ["b"]
        assert harness.at("a", "c") == "failed/expired failed/expired"

    def test_expired_jobs_of_a_part_stand_in_nobodys_way(self, harness: Harness) -> None:
        harness.append(spec("a", part="p", ttl=SECOND), spec("b", part="r"))
        harness.jump(SECOND)
        assert ids(harness.claim(n=1)) == ["b"]

    def test_ttl_does_not_run_while_running(self, harness: Harness) -> None:
        claim = harness.started("a", ttl=SECOND)
        harness.advance(2 * SECOND)
        assert harness.upkeep().expired == 0
        harness.settle(claim, RetryOutcome())
        assert harness.claim() == []
        assert harness.at("a") == "failed/expired"

    def test_the_fence_only_grows(self, harness: Harness) -> None:
        claim = harness.started("a")
        for fence in range(2, 6):
            harness.settle(claim, Release())
            claim = harness.take()
            assert (claim.fence, claim.job.attempts) == (fence, 1)

    def test_once_bounds_the_jobs_with_a_single_attempt(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", max_attempts=1), spec("c"), spec("d", max_attempts=1), spec("e"))
        assert ids(harness.claim(Want("q", 9, once=1))) == ["a", "b", "c"]
        assert harness.claim(Want("q", 9, once=0)) == []
        assert ids(harness.claim(Want("q", 9, once=1))) == ["d", "e"]

    def test_without_once_all_n_may_be_single_attempts(self, harness: Harness) -> None:
        harness.append(spec("a", max_attempts=1), spec("b", max_attempts=1))
        assert ids(harness.claim(n=2)) == ["a", "b"]

    def test_once_ends_the_list_of_its_queue_only(self, harness: Harness) -> None:
        harness.append(spec("a", "t/1", max_attempts=1), spec("b", "t/2"), spec("c", "t/1"), spec("d", "t/2"))
        assert ids(harness.claim(Want("t/*", 9, once=0))) == ["b", "d"]

    def test_once_is_shared_by_the_queues_of_a_pattern(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}", f"t/{n}", max_attempts=1) for n in range(3)])
        assert ids(harness.claim(Want("t/*", 9, once=2))) == ["j0", "j1"]

    def test_once_belongs_to_its_want(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}", max_attempts=1) for n in range(3)])
        assert ids(harness.claim(Want("q", 9, once=1), Want("q", 9, once=1))) == ["j0", "j1"]

    def test_a_lease_may_be_as_long_as_asked(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"))
        assert harness.take(lease=1).job.lease_until == START + 1
        assert harness.take(lease=3 * SECOND).job.lease_len == 3 * SECOND


class QueueGateSuite(Suite):
    """The limits of a queue."""

    def test_a_paused_queue_gives_nothing(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", "t"))
        harness.set_queue(paused=True, why="maintenance")
        assert (harness.queue().paused, harness.queue().why) == (True, "maintenance")
        assert ids(harness.claim("q", "*", n=9)) == ["b"]
        harness.set_queue(paused=False)
        assert ids(harness.claim()) == ["a"]

    def test_a_pause_can_precede_the_first_job(self, harness: Harness) -> None:
        harness.set_queue(paused=True)
        assert harness.counts() == Counts()
        harness.add("a")
        assert harness.claim() == []

    def test_a_held_queue_gives_nothing_before_its_time(self, harness: Harness) -> None:
        harness.add("a")
        harness.set_queue(not_before=START + SECOND)
        assert harness.queue().next_at == START + SECOND
        harness.jump(SECOND - 1)
        assert harness.claim() == []
        harness.jump(1)
        assert ids(harness.claim()) == ["a"]

    def test_a_cap_bounds_what_runs(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(5)])
        harness.set_queue(cap=2)
        first, _ = harness.claim(n=5)
        assert harness.claim(n=5) == []
        harness.done(first)
        assert ids(harness.claim(n=5)) == ["j2"]
        harness.set_queue(cap=0)
        assert harness.claim(n=5) == []
        harness.set_queue(cap=None)
        assert len(harness.claim(n=5)) == 2

    def test_a_cap_below_what_runs_gives_nothing(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(5)])
        harness.claim(n=3)
        harness.set_queue(cap=1)
        assert harness.claim(n=5) == []

    def test_a_rate_bounds_the_starts(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(9)])
        harness.set_queue(rate=Rate(2))
        assert ids(harness.claim(n=9)) == ["j0"]
        assert harness.queue().next_at == START + SECOND // 2
        assert harness.claim(n=9) == []
        harness.jump(SECOND // 2)
        assert ids(harness.claim(n=9)) == ["j1"]

    def test_a_burst_may_come_at_once(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(9)])
        harness.set_queue(rate=Rate(1, burst=3))
        assert len(harness.claim(n=9)) == 3
        harness.jump(SECOND)
        assert len(harness.claim(n=9)) == 1
        harness.jump(10 * SECOND)
        assert len(harness.claim(n=9)) == 3

    def test_release_and_refuse_give_the_permit_back(self, harness: Harness) -> None:
        harness.add("a", part="p")
        harness.set_queue(rate=Rate(1))
        harness.set_part("p", rate=Rate(1, 2))
        for outcome in (Release(), Refuse()):
            claim = harness.take()
            assert (harness.queue().next_at, harness.part("p").next_at) == (
                harness.now + SECOND,
                harness.now + 2 * SECOND,
            )
            harness.settle(claim, outcome)
            assert (harness.queue().next_at, harness.part("p").next_at) == (harness.now, harness.now)

    def test_retry_and_snooze_keep_the_permit(self, harness: Harness) -> None:
        harness.add("a")
        harness.set_queue(rate=Rate(1))
        harness.settle(harness.take(), RetryOutcome())
        assert harness.claim() == []
        harness.jump(SECOND)
        harness.settle(harness.take(), SnoozeOutcome())
        assert harness.claim() == []

    def test_every_queue_of_a_pattern_keeps_its_own_limits(self, harness: Harness) -> None:
        harness.append(*[spec(f"{queue[-1]}{n}", queue) for n in range(3) for queue in ("t/a", "t/b", "t/c")])
        harness.set_queue("t/a", cap=1)
        harness.set_queue("t/b", paused=True)
        assert ids(harness.claim("t/*", n=9)) == ["a0", "c0", "c1", "c2"]

    def test_a_rate_is_spent_by_what_was_taken_only(self, harness: Harness) -> None:
        harness.append(spec("a", "t/1"), spec("b", "t/2", priority="low"))
        harness.set_queue("t/1", rate=Rate(1, burst=5))
        harness.set_queue("t/2", rate=Rate(1, burst=5))
        assert ids(harness.claim("t/*", n=1)) == ["a"]
        assert harness.queue("t/1").next_at == START - 4 * SECOND + SECOND
        assert harness.queue("t/2").next_at == 0

    def test_queue_settings_left_out_stay(self, harness: Harness) -> None:
        harness.set_queue(paused=True, why="x", capacity=5, cap=4, rate=Rate(3), retention=7, keep=8)
        before = harness.queue()
        harness.set_queue()
        assert harness.queue() == before
        harness.set_queue(why=None, capacity=None, cap=None, rate=None, retention=None, keep=None)
        after = harness.queue()
        assert (after.paused, after.why, after.capacity, after.cap) == (True, None, None, None)
        assert (after.rate, after.retention, after.keep) == (None, None, None)

    def test_setting_a_queue_twice_is_the_same(self, harness: Harness) -> None:
        harness.set_queue(cap=3, not_before=START + 5)
        with harness.unchanged():
            harness.set_queue(cap=3, not_before=START + 5)

    def test_a_queue_is_never_deleted(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.purge("a")
        assert harness.counts() == Counts()


def _lose_twice(harness: Harness, *specs: Spec) -> None:
    """Append jobs and let the leases of all of them run out twice; the delay is over."""
    harness.append(*specs)
    for _ in range(2):
        harness.claim(*[Want(queue, len(specs)) for queue in sorted({spec.queue for spec in specs})])
        harness.lose()
        harness.jump(MAX_SUSPECT_DELAY)


class SuspectSuite(Suite):
    """Jobs that lost their lease twice: they return after different delays, and a claim limits how many of
    them it takes."""

    def test_a_second_loss_is_followed_by_a_delay(self, harness: Harness) -> None:
        harness.started("a")
        harness.lose()
        assert harness.at("a") == "ready/lost"
        harness.take()
        upkept = harness.lose()
        job = harness.job("a")
        assert (job.state, job.reason, job.losses, job.owner) == (State.SCHEDULED, "lost", 2, None)
        assert job.ready_at == harness.now + suspect_delay("a", 2)
        assert upkept.next_due == job.ready_at
        assert harness.claim() == []
        harness.jump(job.ready_at - harness.now)
        claim = harness.take()
        assert (claim.fence, claim.job.ready_at) == (3, job.ready_at)

    def test_the_delay_grows_until_the_budget_is_spent(self, harness: Harness) -> None:
        harness.add("a")
        for losses in range(1, 5):
            harness.take()
            harness.lose()
            job = harness.job("a")
            assert job.losses == losses
            harness.jump(job.ready_at - harness.now if losses > 1 else 0)
        harness.take()
        harness.lose()
        assert harness.at("a") == "failed/lost"

    def test_those_that_were_lost_together_come_back_apart(self, harness: Harness) -> None:
        harness.append(*[spec(f"a{n}") for n in range(20)])
        for _ in range(2):
            harness.claim(n=20)
            harness.lose()
        times = sorted(harness.job(f"a{n}").ready_at - harness.now for n in range(20))
        assert len(set(times)) == 20
        assert times[0] < SECOND // 4
        assert SECOND // 2 < times[-1] <= SECOND

    def test_a_claim_says_how_many_suspects_it_takes(self, harness: Harness) -> None:
        _lose_twice(harness, spec("a"), spec("b"), spec("c"))
        harness.append(spec("d"), spec("e"))
        assert ids(harness.claim(Want("q", 9, suspects=0))) == ["d", "e"]
        assert ids(harness.claim(Want("q", 9, suspects=1))) == ["a"]
        assert ids(harness.claim(Want("q", 9, suspects=0))) == []
        assert ids(harness.claim(n=9)) == ["b", "c"]

    def test_without_a_limit_suspects_are_taken_in_order(self, harness: Harness) -> None:
        _lose_twice(harness, spec("a", priority=5), spec("b", priority=0))
        harness.append(spec("c", priority=0), spec("d", priority=-1), spec("e", priority=9))
        assert ids(harness.claim(n=9)) == ["d", "b", "c", "a", "e"]

    def test_the_order_stays_as_far_as_the_limit_allows(self, harness: Harness) -> None:
        _lose_twice(harness, spec("a", priority=5), spec("b", priority=0))
        harness.append(spec("c", priority=0), spec("d", priority=-1), spec("e", priority=9))
        assert ids(harness.claim(Want("q", 1, suspects=1))) == ["d"]
        assert ids(harness.claim(Want("q", 9, suspects=1))) == ["b", "c", "e"]

    def test_the_limit_of_a_claim_holds_for_all_its_wants(self, harness: Harness) -> None:
        _lose_twice(harness, spec("x0", "x"), spec("y0", "y"), spec("x1", "x"))
        harness.append(spec("x2", "x"), spec("y2", "y"))
        claim = Claim(owner="w", wants=(Want("x", 9), Want("y", 9)), lease=LEASE, suspects=1)
        assert ids(harness.do(Claimed, claim).claims) == ["x0", "x2", "y2"]
        claim = Claim(owner="w", wants=(Want("x,y", 9, suspects=5),), lease=LEASE, suspects=1)
        assert ids(harness.do(Claimed, claim).claims) == ["y0"]

    def test_several_queues_of_a_want_share_its_limit(self, harness: Harness) -> None:
        _lose_twice(harness, spec("x0", "x"), spec("y0", "y"))
        harness.append(spec("x1", "x"), spec("y1", "y"), spec("y2", "y"))
        assert ids(harness.claim(Want("x,y", 9, suspects=1))) == ["x0", "x1", "y1", "y2"]
        assert ids(harness.claim(Want("x,y", 9, suspects=1))) == ["y0"]

    def test_a_part_of_suspects_only_keeps_no_other_part_from_its_turn(self, harness: Harness) -> None:
        _lose_twice(harness, spec("p0", part="p"), spec("r0", part="r"))
        harness.append(spec("s0", part="s"), spec("s1", part="s"), spec("a"))
        assert ids(harness.claim(Want("q", 1, suspects=0))) == ["a"]
        assert ids(harness.claim(Want("q", 1, suspects=0))) == ["s0"]
        assert ids(harness.claim(Want("q", 9, suspects=0))) == ["s1"]
        assert ids(harness.claim(Want("q", 1, suspects=1))) == ["p0"]
        assert ids(harness.claim(Want("q", 1, suspects=1))) == ["r0"]

    def test_a_suspect_is_given_back_as_a_suspect(self, harness: Harness) -> None:
        _lose_twice(harness, spec("a"))
        harness.settle(harness.take(), Release())
        assert harness.claim(Want("q", 1, suspects=0)) == []
        harness.settle(harness.take(), RetryOutcome(SECOND))
        harness.jump(SECOND)
        assert harness.claim(Want("q", 1, suspects=0)) == []
        assert harness.take().id == "a"

    def test_a_revived_job_is_no_suspect(self, harness: Harness) -> None:
        _lose_twice(harness, spec("a", max_losses=3))
        harness.take()
        harness.lose()
        harness.revive("a")
        assert ids(harness.claim(Want("q", 1, suspects=0))) == ["a"]

    def test_a_suspect_of_a_paused_group_waits_for_it(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"))
        harness.seal("g")
        for _ in range(2):
            harness.take()
            if harness.job("a").losses:
                harness.unseal("g")
            harness.lose()
        assert harness.at("a") == "blocked"
        harness.jump(SECOND)
        harness.seal("g")
        assert harness.claim(Want("q", 1, suspects=0)) == []
        assert harness.take().id == "a"
