"""Members and dependencies that were refused for their keys: the job that holds the key represents them."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Append, GroupState, OnFailure, Placed, Revived
from towpath.core.job import Done, Reason, State, Stop
from towpath.core.views import Winner
from towpath.errors import DependencyCycle, GroupClosed, UnknownGroup
from towpath.testing.suite.harness import Harness, Suite, anyway, replace, spec, unique, whole_group


class ProxySuite(Suite):
    """A group waits for the winner and counts it; its result has the position of the refused member."""

    def joined(self, harness: Harness, **fields: object) -> None:
        """A sealed group g of a, of one that w represents, and of b."""
        harness.add("w", "o", key=unique("k"))
        harness.open("g", **fields)
        placed = harness.append(
            spec("a", group="g"), spec("x", "o", group="g", key=unique("k")), spec("b", group="g")
        )
        assert [place.id for place in placed] == ["a", "w", "b"]
        harness.seal("g")

    def test_the_group_waits_for_the_winner(self, harness: Harness) -> None:
        self.joined(harness)
        harness.add("then", "p", after=[whole_group("g")])
        assert (harness.group("g").total, harness.group("g").unfinished) == (3, 3)
        for claim in harness.claim(n=2):
            harness.done(claim)
        assert (harness.group("g").state, harness.group("g").unfinished, harness.at("then")) == (
            GroupState.SEALED,
            1,
            "blocked",
        )
        harness.done(harness.take("o"))
        group = harness.group("g")
        assert (group.outcome, group.total, group.done, harness.at("then")) == (State.DONE, 3, 3, "ready")

    def test_its_place_is_that_of_the_refused_member(self, harness: Harness) -> None:
        self.joined(harness)
        assert harness.ledger.winners(group="g") == [Winner("x", 3, "w")]
        assert [harness.job(id).seq for id in ("a", "b")] == [2, 4]
        assert harness.job("w").group is None

    def test_the_failure_of_the_winner_is_one_of_the_group(self, harness: Harness) -> None:
        self.joined(harness, on_failure=OnFailure.ABORT)
        harness.fail(harness.take("o"))
        assert (harness.group("g").outcome, harness.group("g").failed) == (State.FAILED, 1)
        assert harness.at("a", "b") == "canceled/aborted canceled/aborted"

    def test_a_winner_that_has_ended_is_counted_at_once(self, harness: Harness) -> None:
        harness.done(harness.started("w", "o", key=unique("k", HOUR)))
        harness.open("g")
        harness.add("a", group="g")
        harness.append(spec("x", "o", group="g", key=unique("k", HOUR)))
        assert (harness.group("g").total, harness.group("g").unfinished, harness.group("g").done) == (2, 1, 1)
        harness.seal("g")
        harness.done(harness.take())
        assert harness.group("g").outcome is State.DONE

    def test_a_winner_that_has_failed_fails_the_group(self, harness: Harness) -> None:
        harness.fail(harness.started("w", "o", key=unique("k", HOUR)))
        harness.open("g")
        harness.append(spec("x", "o", group="g", key=unique("k", HOUR)))
        harness.seal("g")
        assert harness.group("g").outcome is State.FAILED

    def test_a_winner_may_be_a_member_itself(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g", key=unique("k")), spec("b", group="g", key=unique("k")))
        harness.seal("g")
        assert (harness.group("g").total, harness.group("g").unfinished) == (2, 2)
        harness.done(harness.take())
        assert (harness.group("g").outcome, harness.group("g").done) == (State.DONE, 2)

    def test_a_winner_may_be_a_member_of_another_group(self, harness: Harness) -> None:
        harness.open("h", on_failure=OnFailure.ABORT)
        harness.append(spec("w", group="h", key=unique("k")), spec("v", group="h"))
        harness.open("g")
        harness.append(spec("x", group="g", key=unique("k")))
        for group in "gh":
            harness.seal(group)
        harness.abort("h")
        assert (harness.at("w"), harness.group("g").outcome, harness.group("g").canceled) == (
            "canceled/aborted",
            State.CANCELED,
            1,
        )

    def test_an_abort_does_not_touch_the_winner(self, harness: Harness) -> None:
        self.joined(harness)
        harness.abort("g")
        assert (harness.group("g").outcome, harness.group("g").canceled) == (State.CANCELED, 3)
        assert harness.at("w") == "ready"
        harness.done(harness.take("o"))
        assert harness.group("g").canceled == 3

    def test_a_reopened_group_counts_the_winner_as_it_is_now(self, harness: Harness) -> None:
        self.joined(harness)
        harness.abort("g")
        harness.done(harness.take("o"))
        assert harness.revive(group="g") == Revived(2)
        assert (harness.group("g").done, harness.group("g").unfinished, harness.group("g").canceled) == (
            1,
            2,
            0,
        )

    def test_reviving_the_winner_reopens_the_group(self, harness: Harness) -> None:
        self.joined(harness)
        harness.add("then", "p", after=[whole_group("g")])
        for claim in harness.claim(n=2):
            harness.done(claim)
        harness.fail(harness.take("o"))
        assert harness.revive("then").refused == (
            ("then", "group g, which it needs, is failed; revive w first"),
        )
        assert harness.revive("w") == Revived(2)
        assert (harness.group("g").state, harness.group("g").unfinished, harness.at("then")) == (
            GroupState.SEALED,
            1,
            "blocked/revived",
        )
        harness.done(harness.take("o"))
        assert (harness.group("g").outcome, harness.at("then")) == (State.DONE, "ready")

    def test_a_group_that_is_closed_is_not_joined(self, harness: Harness) -> None:
        self.joined(harness)
        assert (
            harness.refusal(GroupClosed, Append((spec("y", group="g", key=unique("k")),))).details["group"]
            == "g"
        )
        harness.refusal(UnknownGroup, Append((spec("y", "o", group="nowhere", key=unique("k")),)))

    def test_the_same_append_again_counts_nothing_twice(self, harness: Harness) -> None:
        harness.add("w", "o", key=unique("k"))
        harness.open("g")
        member = spec("x", "o", group="g", key=unique("k"))
        harness.append(member)
        for _ in range(2):
            assert harness.append(member) == (Placed("w", 1),)
            harness.jump(2 * HOUR)
            harness.upkeep()
        assert harness.group("g").total == 1

    def test_a_winner_that_waits_for_the_group_is_a_cycle(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("v", "o", after=[whole_group("g")]), spec("w", "o", key=unique("k"), after=["v"]))
        harness.refusal(DependencyCycle, Append((spec("x", "o", group="g", key=unique("k")),)))

    def test_a_newer_job_represents_what_the_superseded_one_did(self, harness: Harness) -> None:
        self.joined(harness)
        for claim in harness.claim(n=2):
            harness.done(claim)
        harness.add("n", "o", key=replace("k"))
        assert harness.at("w", "n") == "canceled/superseded ready"
        assert harness.ledger.winners(group="g") == [Winner("x", 3, "n")]
        running = harness.take("o")
        harness.add("m", "o", key=replace("k"))
        harness.settle(running, Stop())
        assert harness.group("g").unfinished == 1
        harness.done(harness.take("o"))
        assert harness.group("g").outcome is State.DONE

    def test_a_newer_job_that_waits_for_the_group_is_a_cycle(self, harness: Harness) -> None:
        self.joined(harness)
        harness.refusal(
            DependencyCycle, Append((spec("n", "o", key=replace("k"), after=[whole_group("g")]),))
        )

    def test_a_newer_job_that_waits_for_a_group_of_the_winner_and_its_proxies_is_a_cycle(
        self, harness: Harness
    ) -> None:
        harness.open("g")
        harness.append(spec("w", group="g", key=unique("k")), spec("x", group="g", key=unique("k")))
        harness.refusal(
            DependencyCycle, Append((spec("n", key=replace("k"), after=[whole_group("g", run_anyway=True)]),))
        )

    def test_children_join_by_proxy(self, harness: Harness) -> None:
        harness.add("w", "o", key=unique("k"))
        harness.open("g")
        harness.add("a", group="g")
        harness.seal("g")
        harness.done(harness.take(), [spec("x", "o", group="g", key=unique("k"))])
        assert (harness.group("g").state, harness.group("g").total, harness.group("g").unfinished) == (
            GroupState.SEALED,
            2,
            1,
        )
        harness.done(harness.take("o"))
        assert harness.group("g").outcome is State.DONE

    def test_a_dependency_is_named_as_the_spec_names_it(self, harness: Harness) -> None:
        harness.add("w", "o", key=unique("k"))
        harness.append(spec("x", "o", key=unique("k")), spec("d", after=["x", anyway("w")]))
        assert harness.ledger.winners(job="d") == [Winner("x", 0, "w")]
        harness.settle(harness.take("o"), Done(b"1"))
        assert harness.at("d") == "ready"
        harness.jump(2 * HOUR)
        harness.upkeep()
        assert harness.ledger.winners(job="d") == [Winner("x", 0, "w")]
        harness.done(harness.take())
        harness.purge("d")
        assert harness.ledger.winners(job="d") == []

    def test_the_heir_of_a_superseded_dependency_is_known(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.add("d", "o", after=["a"])
        harness.add("b", key=replace("k"))
        harness.take()
        harness.add("c", key=replace("k"))
        assert harness.ledger.winners(job="d") == [Winner("a", 0, "c"), Winner("b", 0, "c")]

    def test_a_winner_of_which_only_the_key_is_left(self, harness: Harness) -> None:
        harness.done(harness.started("w", "o", key=unique("k", 9 * HOUR)))
        harness.purge("w")
        harness.jump(2 * HOUR)
        harness.upkeep()
        harness.open("g")
        harness.append(spec("x", "o", group="g", key=unique("k")), spec("d", after=["x"]))
        harness.seal("g")
        assert (harness.group("g").outcome, harness.at("d")) == (State.DONE, "ready")
        assert harness.ledger.winners(group="g") == [Winner("x", 2, None)]

    def test_a_swept_group_leaves_nothing(self, harness: Harness) -> None:
        self.joined(harness)
        harness.abort("g")
        harness.purge(group="g")
        harness.jump(200 * HOUR)
        harness.upkeep()
        assert (harness.ledger.group("g"), harness.ledger.winners(group="g")) == (None, [])
        assert harness.job("w").reason is Reason.NONE
        harness.jump(SECOND)
