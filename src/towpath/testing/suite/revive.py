"""Revive: dead letters come back, and with them what failed only because of them."""

from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.commands import GroupState, OnFailure, Placed, Revived
from towpath.core.job import Done, Reason, Retry, State
from towpath.core.views import Counts
from towpath.testing.suite.desk import Desk, Suite, anyway, ids, replace, spec, unique, whole_group


class ReviveSuite(Suite):
    """Failed and canceled jobs only."""

    def test_a_dead_letter_comes_back_with_its_budgets(self, desk: Desk) -> None:
        desk.add("a", max_attempts=2, max_losses=3, payload=b"p")
        desk.take()
        desk.lose()
        for _ in range(2):
            desk.settle(desk.take(), Retry(error="boom"))
        before = desk.job("a")
        assert (before.state, before.failures, before.losses) == (State.FAILED, 2, 1)
        assert desk.revive("a") == Revived(1)
        job = desk.job("a")
        assert (job.state, job.reason, job.failures, job.losses) == (State.READY, Reason.REVIVED, 0, 0)
        assert (job.finished_at, job.purge_at, job.attempts, job.fence) == (None, None, 3, 3)
        assert (job.error, job.payload, job.seq, job.settled_fence) == ("boom", b"p", 1, 3)
        assert ids(desk.claim()) == ["a"]

    def test_a_canceled_job_comes_back_without_its_request(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.cancel("a")
        desk.settle(claim, Retry())
        assert desk.revive("a") == Revived(1)
        assert (desk.at("a"), desk.job("a").cancel_requested) == ("ready/revived", None)

    def test_a_time_to_come_still_holds(self, desk: Desk) -> None:
        desk.add("a", delay=SECOND)
        desk.cancel("a")
        desk.revive("a")
        assert desk.at("a") == "scheduled/revived"
        desk.jump(SECOND)
        desk.upkeep()
        assert desk.at("a") == "ready/revived"

    def test_an_expired_job_comes_back_for_good(self, desk: Desk) -> None:
        desk.append(spec("a", ttl=SECOND), spec("b", ttl=9 * SECOND))
        desk.cancel("b")
        desk.jump(SECOND)
        desk.upkeep()
        expires = desk.job("b").expires_at
        assert desk.revive("a", "b") == Revived(2)
        assert (desk.job("a").expires_at, desk.job("b").expires_at) == (None, expires)

    def test_dependents_come_back_with_it(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=["b"]), spec("d", "o", after=[anyway("a")]))
        desk.fail(desk.take())
        assert desk.revive("a") == Revived(3)
        assert desk.at("a", "b", "c", "d") == "ready/revived blocked/revived blocked/revived ready"
        for id in "abc":
            claim = desk.take()
            assert claim.id == id
            desk.done(claim)

    def test_by_a_filter_dependents_are_not_refused_or_counted_twice(self, desk: Desk) -> None:
        desk.append(spec("b", after=["a"]), spec("a"))
        desk.fail(desk.take())
        assert desk.revive(queue="q") == Revived(2)
        assert desk.at("b", "a") == "blocked/revived ready/revived"

    def test_waits_are_counted_anew(self, desk: Desk) -> None:
        a = desk.started("a")
        desk.done(desk.started("done"))
        desk.append(spec("x", "o"), spec("b", after=["a", "x", "done"]))
        desk.fail(a)
        desk.revive("a")
        assert desk.job("b").waits == 2
        desk.done(desk.take())
        desk.done(desk.take("o"))
        assert desk.at("b") == "ready"

    def test_dependents_of_two_dead_letters_wait_for_both(self, desk: Desk) -> None:
        a, b = desk.started("a"), desk.started("b")
        desk.add("c", after=["a", "b"])
        desk.fail(a)
        desk.fail(b)
        assert desk.revive("a") == Revived(1)
        assert desk.at("c") == "failed/dependency"
        assert desk.revive("b") == Revived(2)
        assert desk.at("c") == "blocked/revived"
        assert desk.job("c").waits == 2

    def test_met_edges_are_not_met_again(self, desk: Desk) -> None:
        a = desk.started("a")
        desk.append(spec("x", "o"), spec("b", after=[anyway("a"), "x"]))
        desk.fail(a)
        assert desk.job("b").waits == 1
        desk.revive("a")
        desk.done(desk.take())
        assert (desk.at("b"), desk.job("b").waits) == ("blocked", 1)

    def test_what_has_run_meanwhile_is_not_touched(self, desk: Desk) -> None:
        a = desk.started("a")
        desk.add("b", after=[anyway("a")])
        desk.fail(a)
        b = desk.take()
        desk.revive("a")
        desk.fail(desk.take())
        assert desk.at("b") == "running"
        desk.done(b)

    def test_what_is_not_failed_or_canceled_is_refused(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.started("running")
        desk.append(spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["ready"]))
        with desk.unchanged():
            answer = desk.revive("ready", "done", "running", "scheduled", "blocked", "nowhere")
        assert answer.revived == 0
        assert sorted(answer.refused) == [(id, f"it is {id}") for id in ("blocked", "done", "ready", "running", "scheduled")]

    def test_by_a_filter_only_dead_jobs_match(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.fail(desk.started("failed"))
        desk.add("ready")
        assert desk.revive(queue="q") == Revived(1)

    def test_superseded_is_refused(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.done(desk.started("b", key=replace("k")))
        with desk.unchanged():
            assert desk.revive("a") == Revived(0, (("a", "superseded"),))

    def test_a_key_held_by_another_is_refused(self, desk: Desk) -> None:
        desk.fail(desk.started("a", key=unique("k")))
        claim = desk.started("b", key=unique("k"))
        with desk.unchanged():
            assert desk.revive("a") == Revived(0, (("a", "its key is held by b"),))
        desk.done(claim)
        assert desk.revive("a") == Revived(1)

    def test_the_key_is_taken_again(self, desk: Desk) -> None:
        desk.fail(desk.started("a", key=unique("k")))
        desk.revive("a")
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)

    def test_two_dead_holders_of_one_key(self, desk: Desk) -> None:
        desk.fail(desk.started("a", key=unique("k")))
        desk.fail(desk.started("b", key=unique("k")))
        assert desk.revive(queue="q") == Revived(1, (("b", "its key is held by a"),))

    def test_the_window_of_a_finished_holder_does_not_bar(self, desk: Desk) -> None:
        desk.fail(desk.started("a", key=unique("k", window=SECOND)))
        assert desk.revive("a") == Revived(1)

    def test_an_aborting_group_is_refused(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g"), spec("b", group="g"))
        desk.seal("g")
        claim = desk.take()
        desk.abort("g")
        with desk.unchanged():
            assert desk.revive("b") == Revived(0, (("b", "group g is aborting"),))
        desk.settle(claim, Done())
        assert desk.revive("b") == Revived(1)

    def test_a_dead_dependency_is_refused(self, desk: Desk) -> None:
        b, a = desk.started("b"), desk.started("a")
        desk.add("c", after=["a", "b"])
        desk.cancel("a")
        desk.settle(a, Retry())
        desk.fail(b)
        with desk.unchanged():
            assert desk.revive("c") == Revived(0, (("c", "its dependency b is failed"),))

    def test_a_deleted_dependency_does_not_bar(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]))
        desk.fail(desk.take())
        desk.purge("a")
        assert desk.revive("b") == Revived(1)
        assert desk.at("b") == "ready/revived"

    def test_refused_dependents_stay_and_are_not_named(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"], key=unique("k")), spec("c", after=["b"]))
        desk.fail(desk.take())
        desk.add("h", "o", key=unique("k"))
        assert desk.revive("a") == Revived(1)
        assert desk.at("a", "b", "c") == "ready/revived failed/dependency failed/dependency"

    def test_only_what_failed_because_of_it_comes_back(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]))
        desk.cancel("b")
        desk.fail(desk.take())
        assert desk.revive("a") == Revived(1)
        assert desk.at("b") == "canceled/requested"

    def test_a_member_of_an_open_group_waits_for_the_seal_again(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("a", group="g")
        desk.cancel("a")
        desk.revive("a")
        assert (desk.at("a"), desk.job("a").waits, desk.group("g").unfinished) == ("blocked/revived", 1, 1)
        desk.seal("g")
        assert desk.at("a") == "ready"

    def test_a_sealed_group_waits_for_the_revived(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g"), spec("b", group="g"))
        desk.seal("g")
        desk.fail(desk.take())
        desk.revive("a")
        group = desk.group("g")
        assert (group.unfinished, group.failed) == (2, 0)
        for claim in desk.claim(n=2):
            desk.done(claim)
        assert desk.group("g").outcome is State.DONE

    def test_a_closed_group_stays_closed_and_its_counters_follow(self, desk: Desk) -> None:
        desk.open("g", on_failure=OnFailure.ABORT)
        desk.append(spec("a", group="g"), spec("w", "o", after=[whole_group("g")]))
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.revive("a") == Revived(1)
        group = desk.group("g")
        assert (group.state, group.outcome, group.unfinished, group.failed) == (GroupState.CLOSED, State.FAILED, 1, 0)
        desk.done(desk.take())
        assert (desk.group("g").outcome, desk.group("g").done) == (State.FAILED, 1)
        assert desk.at("w") == "failed/dependency"

    def test_what_needed_a_group_comes_back_alone(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g"), spec("w", "o", after=[whole_group("g")]))
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.revive("w") == Revived(1)
        assert desk.at("w") == "ready/revived"

    def test_a_limited_revive_takes_the_lowest_seqs_first(self, desk: Desk) -> None:
        for n in range(3):
            desk.fail(desk.started(f"j{n}"))
        assert desk.revive(queue="q", limit=2) == Revived(2, more=True)
        assert desk.counts() == Counts(ready=2, failed=1)

    def test_counters_follow(self, desk: Desk) -> None:
        desk.fail(desk.started("a", part="p"))
        desk.revive("a")
        assert (desk.counts(), desk.part("p").ready) == (Counts(ready=1), 1)
