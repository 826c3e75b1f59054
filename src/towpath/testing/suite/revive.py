"""Revive: dead letters come back, and with them what failed only because of them."""

from __future__ import annotations

from typing import Any

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import GroupState, OnFailure, Placed, Revived
from towpath.core.ids import derived
from towpath.core.job import Done, Reason, Retry, Spec, State
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
        desk.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=["b"]), spec("d", "o", after=[anyway("a")])
        )
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
        assert sorted(answer.refused) == [
            (id, f"it is {id}") for id in ("blocked", "done", "ready", "running", "scheduled")
        ]

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
            assert desk.revive("c") == Revived(0, (("c", "its dependency b is failed; revive b first"),))

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

    def test_a_limited_revive_takes_the_lowest_seqs_first(self, desk: Desk) -> None:
        for n in range(3):
            desk.fail(desk.started(f"j{n}"))
        assert desk.revive(queue="q", limit=2) == Revived(2, more=True)
        assert desk.counts() == Counts(ready=2, failed=1)

    def test_counters_follow(self, desk: Desk) -> None:
        desk.fail(desk.started("a", part="p"))
        desk.revive("a")
        assert (desk.counts(), desk.part("p").ready) == (Counts(ready=1), 1)


class ReopenSuite(Suite):
    """A group whose member is revived waits again, and what follows it follows the new outcome."""

    def closed(self, desk: Desk, *more: Spec, **fields: Any) -> None:
        """A group g of a and b, of which a failed and b is done, and other jobs."""
        desk.open("g", **fields)
        desk.append(spec("a", group="g"), spec("b", group="g"), *more)
        desk.seal("g")
        first, second = desk.claim(n=2)
        desk.fail(first)
        desk.done(second)
        assert desk.group("g").outcome is State.FAILED

    def test_a_revived_member_reopens_its_group(self, desk: Desk) -> None:
        self.closed(desk)
        assert desk.revive("a") == Revived(1)
        group = desk.group("g")
        assert (group.state, group.outcome, group.closed_at) == (GroupState.SEALED, None, None)
        assert (group.total, group.unfinished, group.failed, group.done) == (2, 1, 0, 1)
        desk.done(desk.take())
        group = desk.group("g")
        assert (group.state, group.outcome, group.done) == (GroupState.CLOSED, State.DONE, 2)

    def test_what_needed_the_group_waits_again(self, desk: Desk) -> None:
        self.closed(desk, spec("w", "o", after=[whole_group("g")]), spec("x", "o", after=["w"]))
        assert desk.at("w", "x") == "failed/dependency failed/dependency"
        assert desk.revive("a") == Revived(3)
        assert desk.at("a", "w", "x") == "ready/revived blocked/revived blocked/revived"
        desk.done(desk.take())
        assert desk.at("w", "x") == "ready blocked/revived"

    def test_what_needed_the_group_ends_with_it_again(self, desk: Desk) -> None:
        self.closed(desk, spec("w", "o", after=[whole_group("g")]))
        desk.revive("a")
        desk.fail(desk.take())
        assert (desk.group("g").outcome, desk.at("w")) == (State.FAILED, "failed/dependency")
        assert desk.revive("a") == Revived(2)

    def test_what_was_appended_after_the_end_comes_back_too(self, desk: Desk) -> None:
        self.closed(desk)
        desk.add("w", "o", after=[whole_group("g")])
        assert desk.at("w") == "failed/dependency"
        assert desk.revive("a") == Revived(2)
        assert desk.at("w") == "blocked/revived"

    def test_a_waiter_cannot_come_back_alone(self, desk: Desk) -> None:
        self.closed(desk, spec("w", "o", after=[whole_group("g")]))
        with desk.unchanged():
            assert desk.revive("w") == Revived(
                0, (("w", "group g, which it needs, is failed; revive a first"),)
            )
        assert desk.revive("w", "a") == Revived(2)

    def test_a_waiter_comes_back_alone_when_all_that_failed_is_deleted(self, desk: Desk) -> None:
        self.closed(desk, spec("w", "o", after=[whole_group("g")]))
        desk.purge("a")
        assert desk.revive("w") == Revived(1)
        assert desk.at("w") == "ready/revived"

    def test_what_runs_anyway_and_has_not_begun_waits_again(self, desk: Desk) -> None:
        late = spec("late", "o", after=[whole_group("g", run_anyway=True)], delay=HOUR)
        blocked = spec("more", "o", after=[whole_group("g", run_anyway=True), "other"])
        self.closed(
            desk, spec("w", "o", after=[whole_group("g", run_anyway=True)]), spec("other", "p"), late, blocked
        )
        assert desk.at("w", "late", "more") == "ready scheduled/delay blocked"
        assert desk.revive("a") == Revived(1)
        assert desk.at("w", "late", "more") == "blocked blocked blocked"
        assert [desk.job(id).waits for id in ("w", "late", "more")] == [1, 1, 2]
        desk.done(desk.take())
        assert desk.at("w", "late", "more") == "ready scheduled/delay blocked"

    def test_what_ran_for_the_old_outcome_does_not_run_twice(self, desk: Desk) -> None:
        self.closed(
            desk, *[spec(id, id, after=[whole_group("g", run_anyway=True)]) for id in ("ran", "runs")]
        )
        desk.done(desk.take("ran"))
        claim = desk.take("runs")
        desk.revive("a")
        desk.done(desk.take())
        assert (desk.group("g").outcome, desk.at("ran", "runs")) == (State.DONE, "done running")
        desk.done(claim)

    def test_callbacks_that_wait_follow_the_new_outcome(self, desk: Desk) -> None:
        self.closed(desk, then={"failed": (spec("x", "o"),), "done": (spec("x", "o"),)})
        failed, done = derived("g", "then:failed", 0), derived("g", "then:done", 0)
        assert desk.at(failed) == "ready"
        desk.revive("a")
        assert desk.at(failed) == "blocked"
        desk.done(desk.take())
        assert desk.at(failed, done) == "canceled/dependency ready"
        why = "it follows the outcome failed of group g, which is done"
        assert desk.revive(failed) == Revived(0, ((failed, why),))

    def test_a_callback_that_ran_stays_and_is_not_appended_again(self, desk: Desk) -> None:
        self.closed(desk, then={"failed": (spec("x", "o"),), "done": (spec("x", "o"),)})
        failed, done = derived("g", "then:failed", 0), derived("g", "then:done", 0)
        desk.done(desk.take("o"))
        desk.revive("a")
        desk.fail(desk.take())
        assert (desk.group("g").outcome, desk.at(failed)) == (State.FAILED, "done")
        desk.purge(failed)
        desk.jump(2 * HOUR)
        desk.upkeep()
        desk.revive("a")
        desk.fail(desk.take())
        assert desk.ledger.get(failed) is None
        desk.revive("a")
        desk.done(desk.take())
        assert desk.at(done) == "ready"

    def test_a_callback_that_waits_is_woken_by_the_same_outcome(self, desk: Desk) -> None:
        self.closed(desk, then={"failed": (spec("x", "o"),)})
        failed = derived("g", "then:failed", 0)
        desk.revive("a")
        desk.fail(desk.take())
        assert desk.at(failed) == "ready"
        assert ids(desk.claim("o", n=9)) == [failed]

    def test_several_members_of_an_aborted_group(self, desk: Desk) -> None:
        desk.open("g", on_failure=OnFailure.ABORT)
        desk.append(*[spec(id, group="g") for id in "abc"], spec("w", "o", after=[whole_group("g")]))
        desk.seal("g")
        desk.fail(desk.take())
        assert (
            desk.at("a", "b", "c", "w") == "failed/fatal canceled/aborted canceled/aborted failed/dependency"
        )
        assert desk.revive(group="g") == Revived(4)
        assert desk.group("g").state is GroupState.SEALED
        for claim in desk.claim(n=3):
            desk.done(claim)
        assert (desk.group("g").outcome, desk.at("w")) == (State.DONE, "ready")

    def test_a_reopened_group_aborts_for_a_new_failure_only(self, desk: Desk) -> None:
        desk.open("g", on_failure=OnFailure.ABORT)
        desk.append(*[spec(id, group="g") for id in "abcd"])
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.revive("b", "c", "d") == Revived(3)
        desk.done(desk.take())
        assert desk.at("c", "d") == "ready/revived ready/revived"
        desk.fail(desk.take())
        assert desk.at("d") == "canceled/aborted"
        assert desk.group("g").outcome is State.FAILED

    def test_groups_behind_groups_reopen_together(self, desk: Desk) -> None:
        desk.open("h")
        self.closed(
            desk,
            spec("m", "o", group="h", after=[whole_group("g")]),
            spec("w", "o", after=[whole_group("h")]),
        )
        desk.seal("h")
        assert (desk.group("h").outcome, desk.at("m", "w")) == (
            State.FAILED,
            "failed/dependency failed/dependency",
        )
        assert desk.revive("a") == Revived(3)
        assert desk.at("m", "w") == "blocked/revived blocked/revived"
        assert desk.group("h").state is GroupState.SEALED
        desk.done(desk.take())
        desk.done(desk.take("o"))
        assert (desk.group("h").outcome, desk.at("w")) == (State.DONE, "ready")

    def test_a_waiter_of_two_failed_groups_waits_for_both(self, desk: Desk) -> None:
        desk.open("h")
        desk.add("c", "p", group="h")
        self.closed(desk, spec("w", "o", after=[whole_group("g"), whole_group("h")]))
        desk.seal("h")
        desk.fail(desk.take("p"))
        assert desk.revive("a") == Revived(1)
        assert desk.at("w") == "failed/dependency"
        assert desk.revive("c") == Revived(2)
        assert (desk.at("w"), desk.job("w").waits) == ("blocked/revived", 2)

    def test_a_deleted_member_stays_counted(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g"), spec("b", group="g"))
        desk.seal("g")
        for claim in desk.claim(n=2):
            desk.fail(claim)
        desk.purge("a")
        desk.revive("b")
        desk.done(desk.take())
        assert (desk.group("g").outcome, desk.group("g").failed) == (State.FAILED, 1)

    def test_a_member_does_not_come_back_into_a_circle(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("old", "p", key=replace("k"), delay=HOUR)
        desk.append(spec("a", group="g", after=["old"]), spec("b", group="g"))
        desk.seal("g")
        desk.cancel("a")
        desk.add("new", "p", key=replace("k"), after=[whole_group("g", run_anyway=True)])
        with desk.unchanged():
            assert desk.revive("a") == Revived(0, (("a", "it waits for new, which waits for its group g"),))

    def test_a_reopened_group_is_not_swept(self, desk: Desk) -> None:
        self.closed(desk)
        desk.revive("a")
        desk.purge("b")
        desk.jump(8 * DAY)
        desk.upkeep()
        assert desk.group("g").state is GroupState.SEALED
