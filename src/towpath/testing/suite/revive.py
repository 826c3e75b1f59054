"""Revive: dead letters wait again, and so do the jobs that failed only because of them."""

from __future__ import annotations

from typing import Any

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import GroupState, OnFailure, Placed, Revived
from towpath.core.ids import derived
from towpath.core.job import Done, Reason, RetryOutcome, Spec, State
from towpath.core.views import Counts
from towpath.testing.suite.harness import Harness, Suite, anyway, ids, replace, spec, unique, whole_group


class ReviveSuite(Suite):
    """Failed and canceled jobs only."""

    def test_a_dead_letter_comes_back_with_its_budgets(self, harness: Harness) -> None:
        harness.add("a", max_attempts=2, max_losses=3, payload=b"p")
        harness.take()
        harness.lose()
        for _ in range(2):
            harness.settle(harness.take(), RetryOutcome(error="boom"))
        before = harness.job("a")
        assert (before.state, before.failures, before.losses) == (State.FAILED, 2, 1)
        assert harness.revive("a") == Revived(1)
        job = harness.job("a")
        assert (job.state, job.reason, job.failures, job.losses) == (State.READY, Reason.REVIVED, 0, 0)
        assert (job.finished_at, job.purge_at, job.attempts, job.fence) == (None, None, 3, 3)
        assert (job.error, job.payload, job.seq, job.settled_fence) == ("boom", b"p", 1, 3)
        assert ids(harness.claim()) == ["a"]

    def test_a_canceled_job_comes_back_without_its_request(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.cancel("a")
        harness.settle(claim, RetryOutcome())
        assert harness.revive("a") == Revived(1)
        assert (harness.at("a"), harness.job("a").cancel_requested) == ("ready/revived", None)

    def test_a_time_to_come_still_holds(self, harness: Harness) -> None:
        harness.add("a", delay=SECOND)
        harness.cancel("a")
        harness.revive("a")
        assert harness.at("a") == "scheduled/revived"
        harness.jump(SECOND)
        harness.upkeep()
        assert harness.at("a") == "ready/revived"

    def test_an_expired_job_comes_back_for_good(self, harness: Harness) -> None:
        harness.append(spec("a", ttl=SECOND), spec("b", ttl=9 * SECOND))
        harness.cancel("b")
        harness.jump(SECOND)
        harness.upkeep()
        expires = harness.job("b").expires_at
        assert harness.revive("a", "b") == Revived(2)
        assert (harness.job("a").expires_at, harness.job("b").expires_at) == (None, expires)

    def test_dependents_come_back_with_it(self, harness: Harness) -> None:
        harness.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=["b"]), spec("d", "o", after=[anyway("a")])
        )
        harness.fail(harness.take())
        assert harness.revive("a") == Revived(3)
        assert harness.at("a", "b", "c", "d") == "ready/revived blocked/revived blocked/revived ready"
        for id in "abc":
            claim = harness.take()
            assert claim.id == id
            harness.done(claim)

    def test_by_a_filter_dependents_are_not_refused_or_counted_twice(self, harness: Harness) -> None:
        harness.append(spec("b", after=["a"]), spec("a"))
        harness.fail(harness.take())
        assert harness.revive(queue="q") == Revived(2)
        assert harness.at("b", "a") == "blocked/revived ready/revived"

    def test_waits_are_counted_anew(self, harness: Harness) -> None:
        a = harness.started("a")
        harness.done(harness.started("done"))
        harness.append(spec("x", "o"), spec("b", after=["a", "x", "done"]))
        harness.fail(a)
        harness.revive("a")
        assert harness.job("b").waits == 2
        harness.done(harness.take())
        harness.done(harness.take("o"))
        assert harness.at("b") == "ready"

    def test_dependents_of_two_dead_letters_wait_for_both(self, harness: Harness) -> None:
        a, b = harness.started("a"), harness.started("b")
        harness.add("c", after=["a", "b"])
        harness.fail(a)
        harness.fail(b)
        assert harness.revive("a") == Revived(1)
        assert harness.at("c") == "failed/dependency"
        assert harness.revive("b") == Revived(2)
        assert harness.at("c") == "blocked/revived"
        assert harness.job("c").waits == 2

    def test_met_edges_are_not_met_again(self, harness: Harness) -> None:
        a = harness.started("a")
        harness.append(spec("x", "o"), spec("b", after=[anyway("a"), "x"]))
        harness.fail(a)
        assert harness.job("b").waits == 1
        harness.revive("a")
        harness.done(harness.take())
        assert (harness.at("b"), harness.job("b").waits) == ("blocked", 1)

    def test_what_has_run_meanwhile_is_not_touched(self, harness: Harness) -> None:
        a = harness.started("a")
        harness.add("b", after=[anyway("a")])
        harness.fail(a)
        b = harness.take()
        harness.revive("a")
        harness.fail(harness.take())
        assert harness.at("b") == "running"
        harness.done(b)

    def test_what_is_not_failed_or_canceled_is_refused(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.started("running")
        harness.append(spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["ready"]))
        with harness.unchanged():
            answer = harness.revive("ready", "done", "running", "scheduled", "blocked", "nowhere")
        assert answer.revived == 0
        assert sorted(answer.refused) == [
            (id, f"it is {id}") for id in ("blocked", "done", "ready", "running", "scheduled")
        ]

    def test_by_a_filter_only_dead_jobs_match(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.add("ready")
        assert harness.revive(queue="q") == Revived(1)

    def test_superseded_is_refused(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.done(harness.started("b", key=replace("k")))
        with harness.unchanged():
            assert harness.revive("a") == Revived(0, (("a", "superseded"),))

    def test_a_key_held_by_another_is_refused(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k")))
        claim = harness.started("b", key=unique("k"))
        with harness.unchanged():
            assert harness.revive("a") == Revived(0, (("a", "its key is held by b"),))
        harness.done(claim)
        assert harness.revive("a") == Revived(1)

    def test_the_key_is_taken_again(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k")))
        harness.revive("a")
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)

    def test_two_dead_holders_of_one_key(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k")))
        harness.fail(harness.started("b", key=unique("k")))
        assert harness.revive(queue="q") == Revived(1, (("b", "its key is held by a"),))

    def test_the_window_of_a_finished_holder_does_not_bar(self, harness: Harness) -> None:
        harness.fail(harness.started("a", key=unique("k", window=SECOND)))
        assert harness.revive("a") == Revived(1)

    def test_an_aborting_group_is_refused(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g"))
        harness.seal("g")
        claim = harness.take()
        harness.abort("g")
        with harness.unchanged():
            assert harness.revive("b") == Revived(0, (("b", "group g is aborting"),))
        harness.settle(claim, Done())
        assert harness.revive("b") == Revived(1)

    def test_a_dead_dependency_is_refused(self, harness: Harness) -> None:
        b, a = harness.started("b"), harness.started("a")
        harness.add("c", after=["a", "b"])
        harness.cancel("a")
        harness.settle(a, RetryOutcome())
        harness.fail(b)
        with harness.unchanged():
            assert harness.revive("c") == Revived(0, (("c", "its dependency b is failed; revive b first"),))

    def test_a_deleted_dependency_does_not_bar(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]))
        harness.fail(harness.take())
        harness.purge("a")
        assert harness.revive("b") == Revived(1)
        assert harness.at("b") == "ready/revived"

    def test_refused_dependents_stay_and_are_not_named(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"], key=unique("k")), spec("c", after=["b"]))
        harness.fail(harness.take())
        harness.add("h", "o", key=unique("k"))
        assert harness.revive("a") == Revived(1)
        assert harness.at("a", "b", "c") == "ready/revived failed/dependency failed/dependency"

    def test_only_what_failed_because_of_it_comes_back(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]))
        harness.cancel("b")
        harness.fail(harness.take())
        assert harness.revive("a") == Revived(1)
        assert harness.at("b") == "canceled/requested"

    def test_a_member_of_an_open_group_waits_for_the_seal_again(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("a", group="g")
        harness.cancel("a")
        harness.revive("a")
        assert (harness.at("a"), harness.job("a").waits, harness.group("g").unfinished) == (
            "blocked/revived",
            1,
            1,
        )
        harness.seal("g")
        assert harness.at("a") == "ready"

    def test_a_sealed_group_waits_for_the_revived(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g"))
        harness.seal("g")
        harness.fail(harness.take())
        harness.revive("a")
        group = harness.group("g")
        assert (group.unfinished, group.failed) == (2, 0)
        for claim in harness.claim(n=2):
            harness.done(claim)
        assert harness.group("g").outcome is State.DONE

    def test_a_limited_revive_takes_the_lowest_seqs_first(self, harness: Harness) -> None:
        for n in range(3):
            harness.fail(harness.started(f"j{n}"))
        assert harness.revive(queue="q", limit=2) == Revived(2, more=True)
        assert harness.counts() == Counts(ready=2, failed=1)

    def test_counters_follow(self, harness: Harness) -> None:
        harness.fail(harness.started("a", part="p"))
        harness.revive("a")
        assert (harness.counts(), harness.part("p").ready) == (Counts(ready=1), 1)


class ReopenSuite(Suite):
    """A group with a revived member waits again, and its callbacks follow the new outcome."""

    def closed(self, harness: Harness, *more: Spec, **fields: Any) -> None:
        """A group g of a and b, of which a failed and b is done, and other jobs."""
        harness.open("g", **fields)
        harness.append(spec("a", group="g"), spec("b", group="g"), *more)
        harness.seal("g")
        first, second = harness.claim(n=2)
        harness.fail(first)
        harness.done(second)
        assert harness.group("g").outcome is State.FAILED

    def test_a_revived_member_reopens_its_group(self, harness: Harness) -> None:
        self.closed(harness)
        assert harness.revive("a") == Revived(1)
        group = harness.group("g")
        assert (group.state, group.outcome, group.closed_at) == (GroupState.SEALED, None, None)
        assert (group.total, group.unfinished, group.failed, group.done) == (2, 1, 0, 1)
        harness.done(harness.take())
        group = harness.group("g")
        assert (group.state, group.outcome, group.done) == (GroupState.CLOSED, State.DONE, 2)

    def test_what_needed_the_group_waits_again(self, harness: Harness) -> None:
        self.closed(harness, spec("w", "o", after=[whole_group("g")]), spec("x", "o", after=["w"]))
        assert harness.at("w", "x") == "failed/dependency failed/dependency"
        assert harness.revive("a") == Revived(3)
        assert harness.at("a", "w", "x") == "ready/revived blocked/revived blocked/revived"
        harness.done(harness.take())
        assert harness.at("w", "x") == "ready blocked/revived"

    def test_what_needed_the_group_ends_with_it_again(self, harness: Harness) -> None:
        self.closed(harness, spec("w", "o", after=[whole_group("g")]))
        harness.revive("a")
        harness.fail(harness.take())
        assert (harness.group("g").outcome, harness.at("w")) == (State.FAILED, "failed/dependency")
        assert harness.revive("a") == Revived(2)

    def test_what_was_appended_after_the_end_comes_back_too(self, harness: Harness) -> None:
        self.closed(harness)
        harness.add("w", "o", after=[whole_group("g")])
        assert harness.at("w") == "failed/dependency"
        assert harness.revive("a") == Revived(2)
        assert harness.at("w") == "blocked/revived"

    def test_a_waiter_cannot_come_back_alone(self, harness: Harness) -> None:
        self.closed(harness, spec("w", "o", after=[whole_group("g")]))
        with harness.unchanged():
            assert harness.revive("w") == Revived(
                0, (("w", "group g, which it needs, is failed; revive a first"),)
            )
        assert harness.revive("w", "a") == Revived(2)

    def test_a_waiter_comes_back_alone_when_all_that_failed_is_deleted(self, harness: Harness) -> None:
        self.closed(harness, spec("w", "o", after=[whole_group("g")]))
        harness.purge("a")
        assert harness.revive("w") == Revived(1)
        assert harness.at("w") == "ready/revived"

    def test_what_runs_anyway_and_has_not_begun_waits_again(self, harness: Harness) -> None:
        late = spec("late", "o", after=[whole_group("g", run_anyway=True)], delay=HOUR)
        blocked = spec("more", "o", after=[whole_group("g", run_anyway=True), "other"])
        self.closed(
            harness,
            spec("w", "o", after=[whole_group("g", run_anyway=True)]),
            spec("other", "p"),
            late,
            blocked,
        )
        assert harness.at("w", "late", "more") == "ready scheduled/delay blocked"
        assert harness.revive("a") == Revived(1)
        assert harness.at("w", "late", "more") == "blocked blocked blocked"
        assert [harness.job(id).waits for id in ("w", "late", "more")] == [1, 1, 2]
        harness.done(harness.take())
        assert harness.at("w", "late", "more") == "ready scheduled/delay blocked"

    def test_what_ran_for_the_old_outcome_does_not_run_twice(self, harness: Harness) -> None:
        self.closed(
            harness, *[spec(id, id, after=[whole_group("g", run_anyway=True)]) for id in ("ran", "runs")]
        )
        harness.done(harness.take("ran"))
        claim = harness.take("runs")
        harness.revive("a")
        harness.done(harness.take())
        assert (harness.group("g").outcome, harness.at("ran", "runs")) == (State.DONE, "done running")
        harness.done(claim)

    def test_callbacks_that_wait_follow_the_new_outcome(self, harness: Harness) -> None:
        self.closed(harness, then={"failed": (spec("x", "o"),), "done": (spec("x", "o"),)})
        failed, done = derived("g", "then:failed", 0), derived("g", "then:done", 0)
        assert harness.at(failed) == "ready"
        harness.revive("a")
        assert harness.at(failed) == "blocked"
        harness.done(harness.take())
        assert harness.at(failed, done) == "canceled/dependency ready"
        why = "it follows the outcome failed of group g, which is done"
        assert harness.revive(failed) == Revived(0, ((failed, why),))

    def test_a_callback_that_ran_stays_and_is_not_appended_again(self, harness: Harness) -> None:
        self.closed(harness, then={"failed": (spec("x", "o"),), "done": (spec("x", "o"),)})
        failed, done = derived("g", "then:failed", 0), derived("g", "then:done", 0)
        harness.done(harness.take("o"))
        harness.revive("a")
        harness.fail(harness.take())
        assert (harness.group("g").outcome, harness.at(failed)) == (State.FAILED, "done")
        harness.purge(failed)
        harness.jump(2 * HOUR)
        harness.upkeep()
        harness.revive("a")
        harness.fail(harness.take())
        assert harness.ledger.get(failed) is None
        harness.revive("a")
        harness.done(harness.take())
        assert harness.at(done) == "ready"

    def test_a_callback_that_waits_is_woken_by_the_same_outcome(self, harness: Harness) -> None:
        self.closed(harness, then={"failed": (spec("x", "o"),)})
        failed = derived("g", "then:failed", 0)
        harness.revive("a")
        harness.fail(harness.take())
        assert harness.at(failed) == "ready"
        assert ids(harness.claim("o", n=9)) == [failed]

    def test_several_members_of_an_aborted_group(self, harness: Harness) -> None:
        harness.open("g", on_failure=OnFailure.ABORT)
        harness.append(*[spec(id, group="g") for id in "abc"], spec("w", "o", after=[whole_group("g")]))
        harness.seal("g")
        harness.fail(harness.take())
        assert (
            harness.at("a", "b", "c", "w")
            == "failed/fatal canceled/aborted canceled/aborted failed/dependency"
        )
        assert harness.revive(group="g") == Revived(4)
        assert harness.group("g").state is GroupState.SEALED
        for claim in harness.claim(n=3):
            harness.done(claim)
        assert (harness.group("g").outcome, harness.at("w")) == (State.DONE, "ready")

    def test_a_reopened_group_aborts_for_a_new_failure_only(self, harness: Harness) -> None:
        harness.open("g", on_failure=OnFailure.ABORT)
        harness.append(*[spec(id, group="g") for id in "abcd"])
        harness.seal("g")
        harness.fail(harness.take())
        assert harness.revive("b", "c", "d") == Revived(3)
        harness.done(harness.take())
        assert harness.at("c", "d") == "ready/revived ready/revived"
        harness.fail(harness.take())
        assert harness.at("d") == "canceled/aborted"
        assert harness.group("g").outcome is State.FAILED

    def test_groups_behind_groups_reopen_together(self, harness: Harness) -> None:
        harness.open("h")
        self.closed(
            harness,
            spec("m", "o", group="h", after=[whole_group("g")]),
            spec("w", "o", after=[whole_group("h")]),
        )
        harness.seal("h")
        assert (harness.group("h").outcome, harness.at("m", "w")) == (
            State.FAILED,
            "failed/dependency failed/dependency",
        )
        assert harness.revive("a") == Revived(3)
        assert harness.at("m", "w") == "blocked/revived blocked/revived"
        assert harness.group("h").state is GroupState.SEALED
        harness.done(harness.take())
        harness.done(harness.take("o"))
        assert (harness.group("h").outcome, harness.at("w")) == (State.DONE, "ready")

    def test_a_waiter_of_two_failed_groups_waits_for_both(self, harness: Harness) -> None:
        harness.open("h")
        harness.add("c", "p", group="h")
        self.closed(harness, spec("w", "o", after=[whole_group("g"), whole_group("h")]))
        harness.seal("h")
        harness.fail(harness.take("p"))
        assert harness.revive("a") == Revived(1)
        assert harness.at("w") == "failed/dependency"
        assert harness.revive("c") == Revived(2)
        assert (harness.at("w"), harness.job("w").waits) == ("blocked/revived", 2)

    def test_a_deleted_member_stays_counted(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g"))
        harness.seal("g")
        for claim in harness.claim(n=2):
            harness.fail(claim)
        harness.purge("a")
        harness.revive("b")
        harness.done(harness.take())
        assert (harness.group("g").outcome, harness.group("g").failed) == (State.FAILED, 1)

    def test_a_member_does_not_come_back_into_a_circle(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("old", "p", key=replace("k"), delay=HOUR)
        harness.append(spec("a", group="g", after=["old"]), spec("b", group="g"))
        harness.seal("g")
        harness.cancel("a")
        harness.add("new", "p", key=replace("k"), after=[whole_group("g", run_anyway=True)])
        with harness.unchanged():
            assert harness.revive("a") == Revived(
                0, (("a", "it waits for new, which waits for its group g"),)
            )

    def test_a_reopened_group_is_not_swept(self, harness: Harness) -> None:
        self.closed(harness)
        harness.revive("a")
        harness.purge("b")
        harness.jump(8 * DAY)
        harness.upkeep()
        assert harness.group("g").state is GroupState.SEALED
