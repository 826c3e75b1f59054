"""Unseal: a paused group is one that is open again."""

from __future__ import annotations

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import Abort, GroupSet, GroupState, Unseal
from towpath.core.job import Outcome, Reason, Refuse, Release, Retry, Snooze, State
from towpath.errors import UnknownGroup
from towpath.testing.suite.desk import Desk, Suite, spec
from towpath.testing.suite.groups import group_of


class PauseSuite(Suite):
    """Nothing of a paused group starts, also what comes back from running."""

    def test_an_unsealed_group_is_paused(self, desk: Desk) -> None:
        desk.open("g")
        specs = [
            spec("a", group="g"),
            spec("b", group="g", after=["a"]),
            spec("c", group="g", delay=60 * SECOND),
        ]
        desk.append(*specs, spec("d", group="g", part="p"))
        desk.seal("g")
        desk.unseal("g")
        assert desk.group("g").state is GroupState.OPEN
        assert [desk.job(id).waits for id in "abcd"] == [1, 2, 1, 1]
        assert desk.at("a", "b", "c", "d") == "blocked blocked blocked blocked"
        assert desk.claim(n=9) == []
        desk.seal("g")
        assert desk.at("a", "b", "c", "d") == "ready blocked scheduled/delay ready"
        assert len(desk.claim(n=9)) == 2

    def test_a_pause_has_a_reason_until_it_is_over(self, desk: Desk) -> None:
        group_of(desk)
        assert not desk.group("g").paused, "it is open, but nobody paused it"
        desk.seal("g")
        desk.unseal("g", "a new disk")
        assert (desk.group("g").paused, desk.group("g").why) == (True, "a new disk")
        with desk.unchanged():
            desk.unseal("g", "a new disk")
        desk.unseal("g", "two new disks")
        assert desk.group("g").why == "two new disks"
        desk.seal("g")
        assert (desk.group("g").paused, desk.group("g").why) == (False, None)
        desk.unseal("g")
        assert (desk.group("g").paused, desk.group("g").why) == (True, None)
        desk.abort("g")
        assert not desk.group("g").paused

    @pytest.mark.parametrize("outcome", [Retry(), Snooze(SECOND), Release(), Refuse()])
    def test_what_comes_back_to_a_paused_group_waits(self, desk: Desk, outcome: Outcome) -> None:
        group_of(desk)
        desk.seal("g")
        a, b = desk.claim(n=2)
        desk.unseal("g")
        assert desk.at("m0", "m1") == "running running"
        desk.settle(a, outcome)
        assert desk.at("m0") == "blocked"
        assert desk.job("m0").waits == 1
        desk.done(b)
        assert desk.group("g").state is GroupState.OPEN
        desk.jump(5 * SECOND)
        assert desk.claim(n=9) == []
        desk.seal("g")
        [again] = desk.claim(n=9)
        desk.done(again)
        assert desk.group("g").outcome is State.DONE

    def test_a_lost_lease_in_a_paused_group(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.seal("g")
        desk.claim(lease=SECOND)
        desk.unseal("g")
        for _ in range(5):
            desk.jump(SECOND)
            desk.upkeep()
        assert desk.at("m0") == "blocked"
        assert desk.job("m0").losses == 1
        desk.seal("g")
        assert desk.at("m0") == "ready"

    def test_unseal_of_what_is_not_sealed(self, desk: Desk) -> None:
        group_of(desk, 1)
        with desk.unchanged():
            desk.unseal("g")
        desk.seal("g")
        desk.done(desk.take())
        with desk.unchanged():
            desk.unseal("g")
        assert isinstance(desk.ask(Unseal("nothing"))[0], UnknownGroup)

    def test_a_paused_group_may_be_aborted(self, desk: Desk) -> None:
        group_of(desk)
        desk.seal("g")
        desk.claim()
        desk.unseal("g")
        assert desk.ask(Abort("g")) == [GroupSet("g")]
        assert desk.at("m1") == "canceled/aborted"
        assert desk.job("m0").cancel_requested is Reason.ABORTED
