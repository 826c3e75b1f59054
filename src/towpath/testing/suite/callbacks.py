"""Callbacks of a group that depend on each other or have a group of their own."""

from __future__ import annotations

from towpath.core.commands import GroupState, OnFailure
from towpath.core.ids import callback_id
from towpath.core.job import FailOutcome, Spec, State
from towpath.core.views import Counts
from towpath.testing.suite.groups import group_of
from towpath.testing.suite.harness import Harness, Suite, anyway, spec, unique


def ids_of(outcome: State, count: int) -> list[str]:
    return [callback_id("g", outcome, n) for n in range(count)]


class CallbackSuite(Suite):
    def test_callbacks_depend_on_each_other(self, harness: Harness) -> None:
        """Also on a later spec of the list, and in the order in which they were given."""
        then = (spec("last", "t", after=["a", anyway("b")]), spec("a", "t"), spec("b", "t", after=["a"]))
        group_of(harness, 1, then={"failed": then, "done": (spec("a", "u"),)})
        harness.seal("g")
        harness.fail(harness.take())
        last, a, b = ids_of(State.FAILED, 3)
        assert harness.at(last, a, b) == "blocked ready blocked"
        harness.done(harness.take("t"))
        assert harness.at(last, a, b) == "blocked done ready"
        harness.settle(harness.take("t"), FailOutcome())
        assert harness.at(last, a, b) == "ready done failed/fatal"

    def test_a_callback_opens_its_group(self, harness: Harness) -> None:
        then = (spec("a", "t", group="undo"), spec("b", "t", group="undo", after=["a"]))
        group_of(harness, 1, then={"failed": then})
        harness.seal("g")
        assert harness.ledger.group("undo") is None
        harness.fail(harness.take())
        undo = harness.group("undo")
        assert (undo.state, undo.on_failure, undo.total, undo.unfinished) == (
            GroupState.SEALED,
            OnFailure.CONTINUE,
            2,
            2,
        )
        assert undo.created_at == harness.now
        assert harness.at(*ids_of(State.FAILED, 2)) == "ready blocked"
        harness.done(harness.take("t"))
        harness.done(harness.take("t"))
        assert harness.group("undo").outcome is State.DONE

    def test_a_callback_joins_an_open_group(self, harness: Harness) -> None:
        harness.open("undo")
        group_of(harness, 1, then={"done": (spec("a", "t", group="undo"),)})
        harness.seal("g")
        harness.done(harness.take())
        assert harness.at(*ids_of(State.DONE, 1)) == "blocked"
        harness.seal("undo")
        assert harness.at(*ids_of(State.DONE, 1)) == "ready"

    def test_callbacks_of_a_group_that_takes_no_members_fail(self, harness: Harness) -> None:
        """No caller could receive the refusal: the end of the group is not lost, and the jobs are dead
        letters with the reason."""
        harness.open("undo")
        harness.seal("undo")
        then = (spec("a", "t", group="undo"), spec("b", "t", after=["a"]), spec("c", "t", group="other"))
        group_of(harness, 1, then={"done": then})
        harness.seal("g")
        harness.done(harness.take())
        assert harness.group("g").outcome is State.DONE
        assert harness.at(*ids_of(State.DONE, 3)) == "failed/fatal failed/fatal failed/fatal"
        job = harness.job(ids_of(State.DONE, 1)[0])
        assert job.error == "group undo is closed; only a running member may add to it after the seal"
        assert (job.group, harness.ledger.group("other")) == (None, None)
        assert harness.counts("t") == Counts(failed=3)
        harness.revive(job.id)
        assert harness.take("t").job.error == job.error, "a claim reads all bodies"

    def test_a_group_of_callbacks_that_are_represented_closes(self, harness: Harness) -> None:
        """The member is refused for its key, and the job that represents it has ended."""
        harness.done(harness.started("winner", key=unique("k", 60_000_000)))
        group_of(harness, 1, then={"done": (spec("a", "t", group="undo", key=unique("k")),)})
        harness.seal("g")
        harness.done(harness.take())
        assert (harness.group("undo").outcome, harness.group("undo").done) == (State.DONE, 1)

    def test_callbacks_follow_a_reopened_group(self, harness: Harness) -> None:
        then: tuple[Spec, ...] = (spec("a", "t", group="undo"), spec("b", "t", group="undo", after=["a"]))
        group_of(harness, 1, then={"failed": then})
        harness.seal("g")
        harness.fail(harness.take())
        harness.revive("m0")
        assert harness.at(*ids_of(State.FAILED, 2)) == "blocked blocked"
        harness.done(harness.take())
        ended = "canceled/dependency canceled/dependency"
        assert harness.at(*ids_of(State.FAILED, 2)) == ended
        assert harness.group("undo").outcome is State.CANCELED
