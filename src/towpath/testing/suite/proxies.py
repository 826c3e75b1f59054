"""Members and dependencies that were refused for their keys: the job that holds the key represents them."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Append, GroupState, OnFailure, Placed, Revived
from towpath.core.job import Done, Reason, State, Stop
from towpath.core.views import Winner
from towpath.errors import DependencyCycle, GroupClosed, UnknownGroup
from towpath.testing.suite.desk import Desk, Suite, anyway, replace, spec, unique, whole_group


class ProxySuite(Suite):
    """A group waits for the winner and counts it; its result has the place of the refused member."""

    def joined(self, desk: Desk, **fields: object) -> None:
        """A sealed group g of a, of one that w represents, and of b."""
        desk.add("w", "o", key=unique("k"))
        desk.open("g", **fields)
        placed = desk.append(
            spec("a", group="g"), spec("x", "o", group="g", key=unique("k")), spec("b", group="g")
        )
        assert [place.id for place in placed] == ["a", "w", "b"]
        desk.seal("g")

    def test_the_group_waits_for_the_winner(self, desk: Desk) -> None:
        self.joined(desk)
        desk.add("then", "p", after=[whole_group("g")])
        assert (desk.group("g").total, desk.group("g").unfinished) == (3, 3)
        for claim in desk.claim(n=2):
            desk.done(claim)
        assert (desk.group("g").state, desk.group("g").unfinished, desk.at("then")) == (
            GroupState.SEALED,
            1,
            "blocked",
        )
        desk.done(desk.take("o"))
        group = desk.group("g")
        assert (group.outcome, group.total, group.done, desk.at("then")) == (State.DONE, 3, 3, "ready")

    def test_its_place_is_that_of_the_refused_member(self, desk: Desk) -> None:
        self.joined(desk)
        assert desk.ledger.winners(group="g") == [Winner("x", 3, "w")]
        assert [desk.job(id).seq for id in ("a", "b")] == [2, 4]
        assert desk.job("w").group is None

    def test_the_failure_of_the_winner_is_one_of_the_group(self, desk: Desk) -> None:
        self.joined(desk, on_failure=OnFailure.ABORT)
        desk.fail(desk.take("o"))
        assert (desk.group("g").outcome, desk.group("g").failed) == (State.FAILED, 1)
        assert desk.at("a", "b") == "canceled/aborted canceled/aborted"

    def test_a_winner_that_has_ended_is_counted_at_once(self, desk: Desk) -> None:
        desk.done(desk.started("w", "o", key=unique("k", HOUR)))
        desk.open("g")
        desk.add("a", group="g")
        desk.append(spec("x", "o", group="g", key=unique("k", HOUR)))
        assert (desk.group("g").total, desk.group("g").unfinished, desk.group("g").done) == (2, 1, 1)
        desk.seal("g")
        desk.done(desk.take())
        assert desk.group("g").outcome is State.DONE

    def test_a_winner_that_has_failed_fails_the_group(self, desk: Desk) -> None:
        desk.fail(desk.started("w", "o", key=unique("k", HOUR)))
        desk.open("g")
        desk.append(spec("x", "o", group="g", key=unique("k", HOUR)))
        desk.seal("g")
        assert desk.group("g").outcome is State.FAILED

    def test_a_winner_may_be_a_member_itself(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("a", group="g", key=unique("k")), spec("b", group="g", key=unique("k")))
        desk.seal("g")
        assert (desk.group("g").total, desk.group("g").unfinished) == (2, 2)
        desk.done(desk.take())
        assert (desk.group("g").outcome, desk.group("g").done) == (State.DONE, 2)

    def test_a_winner_may_be_a_member_of_another_group(self, desk: Desk) -> None:
        desk.open("h", on_failure=OnFailure.ABORT)
        desk.append(spec("w", group="h", key=unique("k")), spec("v", group="h"))
        desk.open("g")
        desk.append(spec("x", group="g", key=unique("k")))
        for group in "gh":
            desk.seal(group)
        desk.abort("h")
        assert (desk.at("w"), desk.group("g").outcome, desk.group("g").canceled) == (
            "canceled/aborted",
            State.CANCELED,
            1,
        )

    def test_an_abort_does_not_touch_the_winner(self, desk: Desk) -> None:
        self.joined(desk)
        desk.abort("g")
        assert (desk.group("g").outcome, desk.group("g").canceled) == (State.CANCELED, 3)
        assert desk.at("w") == "ready"
        desk.done(desk.take("o"))
        assert desk.group("g").canceled == 3

    def test_a_reopened_group_counts_the_winner_as_it_is_now(self, desk: Desk) -> None:
        self.joined(desk)
        desk.abort("g")
        desk.done(desk.take("o"))
        assert desk.revive(group="g") == Revived(2)
        assert (desk.group("g").done, desk.group("g").unfinished, desk.group("g").canceled) == (1, 2, 0)

    def test_reviving_the_winner_reopens_the_group(self, desk: Desk) -> None:
        self.joined(desk)
        desk.add("then", "p", after=[whole_group("g")])
        for claim in desk.claim(n=2):
            desk.done(claim)
        desk.fail(desk.take("o"))
        assert desk.revive("then").refused == (
            ("then", "group g, which it needs, is failed; revive w first"),
        )
        assert desk.revive("w") == Revived(2)
        assert (desk.group("g").state, desk.group("g").unfinished, desk.at("then")) == (
            GroupState.SEALED,
            1,
            "blocked/revived",
        )
        desk.done(desk.take("o"))
        assert (desk.group("g").outcome, desk.at("then")) == (State.DONE, "ready")

    def test_a_group_that_is_closed_is_not_joined(self, desk: Desk) -> None:
        self.joined(desk)
        assert (
            desk.refusal(GroupClosed, Append((spec("y", group="g", key=unique("k")),))).details["group"]
            == "g"
        )
        desk.refusal(UnknownGroup, Append((spec("y", "o", group="nowhere", key=unique("k")),)))

    def test_the_same_append_again_counts_nothing_twice(self, desk: Desk) -> None:
        desk.add("w", "o", key=unique("k"))
        desk.open("g")
        member = spec("x", "o", group="g", key=unique("k"))
        desk.append(member)
        for _ in range(2):
            assert desk.append(member) == (Placed("w", 1),)
            desk.jump(2 * HOUR)
            desk.upkeep()
        assert desk.group("g").total == 1

    def test_a_winner_that_waits_for_the_group_is_a_cycle(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("v", "o", after=[whole_group("g")]), spec("w", "o", key=unique("k"), after=["v"]))
        desk.refusal(DependencyCycle, Append((spec("x", "o", group="g", key=unique("k")),)))

    def test_a_newer_job_represents_what_the_superseded_one_did(self, desk: Desk) -> None:
        self.joined(desk)
        for claim in desk.claim(n=2):
            desk.done(claim)
        desk.add("n", "o", key=replace("k"))
        assert desk.at("w", "n") == "canceled/superseded ready"
        assert desk.ledger.winners(group="g") == [Winner("x", 3, "n")]
        running = desk.take("o")
        desk.add("m", "o", key=replace("k"))
        desk.settle(running, Stop())
        assert desk.group("g").unfinished == 1
        desk.done(desk.take("o"))
        assert desk.group("g").outcome is State.DONE

    def test_a_newer_job_that_waits_for_the_group_is_a_cycle(self, desk: Desk) -> None:
        self.joined(desk)
        desk.refusal(DependencyCycle, Append((spec("n", "o", key=replace("k"), after=[whole_group("g")]),)))

    def test_a_newer_job_that_waits_for_a_group_of_the_winner_and_its_proxies_is_a_cycle(
        self, desk: Desk
    ) -> None:
        desk.open("g")
        desk.append(spec("w", group="g", key=unique("k")), spec("x", group="g", key=unique("k")))
        desk.refusal(
            DependencyCycle, Append((spec("n", key=replace("k"), after=[whole_group("g", run_anyway=True)]),))
        )

    def test_children_join_by_proxy(self, desk: Desk) -> None:
        desk.add("w", "o", key=unique("k"))
        desk.open("g")
        desk.add("a", group="g")
        desk.seal("g")
        desk.done(desk.take(), [spec("x", "o", group="g", key=unique("k"))])
        assert (desk.group("g").state, desk.group("g").total, desk.group("g").unfinished) == (
            GroupState.SEALED,
            2,
            1,
        )
        desk.done(desk.take("o"))
        assert desk.group("g").outcome is State.DONE

    def test_a_dependency_is_named_as_the_spec_names_it(self, desk: Desk) -> None:
        desk.add("w", "o", key=unique("k"))
        desk.append(spec("x", "o", key=unique("k")), spec("d", after=["x", anyway("w")]))
        assert desk.ledger.winners(job="d") == [Winner("x", 0, "w")]
        desk.settle(desk.take("o"), Done(b"1"))
        assert desk.at("d") == "ready"
        desk.jump(2 * HOUR)
        desk.upkeep()
        assert desk.ledger.winners(job="d") == [Winner("x", 0, "w")]
        desk.done(desk.take())
        desk.purge("d")
        assert desk.ledger.winners(job="d") == []

    def test_the_heir_of_a_superseded_dependency_is_known(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.add("d", "o", after=["a"])
        desk.add("b", key=replace("k"))
        desk.take()
        desk.add("c", key=replace("k"))
        assert desk.ledger.winners(job="d") == [Winner("a", 0, "c"), Winner("b", 0, "c")]

    def test_a_winner_of_which_only_the_key_is_left(self, desk: Desk) -> None:
        desk.done(desk.started("w", "o", key=unique("k", 9 * HOUR)))
        desk.purge("w")
        desk.jump(2 * HOUR)
        desk.upkeep()
        desk.open("g")
        desk.append(spec("x", "o", group="g", key=unique("k")), spec("d", after=["x"]))
        desk.seal("g")
        assert (desk.group("g").outcome, desk.at("d")) == (State.DONE, "ready")
        assert desk.ledger.winners(group="g") == [Winner("x", 2, None)]

    def test_a_swept_group_leaves_nothing(self, desk: Desk) -> None:
        self.joined(desk)
        desk.abort("g")
        desk.purge(group="g")
        desk.jump(200 * HOUR)
        desk.upkeep()
        assert (desk.ledger.group("g"), desk.ledger.winners(group="g")) == (None, [])
        assert desk.job("w").reason is Reason.NONE
        desk.jump(SECOND)
