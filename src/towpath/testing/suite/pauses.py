"""Unseal: a paused group is open again."""

from __future__ import annotations

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import Abort, GroupSet, GroupState, Unseal
from towpath.core.job import Outcome, Reason, Refuse, Release, RetryOutcome, SnoozeOutcome, State
from towpath.errors import UnknownGroup
from towpath.testing.suite.groups import group_of
from towpath.testing.suite.harness import Harness, Suite, spec


class PauseSuite(Suite):
    """No job of a paused group starts, not even a retry of a running one."""

    def test_an_unsealed_group_is_paused(self, harness: Harness) -> None:
        harness.open("g")
        specs = [
            spec("a", group="g"),
            spec("b", group="g", after=["a"]),
            spec("c", group="g", delay=60 * SECOND),
        ]
        harness.append(*specs, spec("d", group="g", part="p"))
        harness.seal("g")
        harness.unseal("g")
        assert harness.group("g").state is GroupState.OPEN
        assert [harness.job(id).waits for id in "abcd"] == [1, 2, 1, 1]
        assert harness.at("a", "b", "c", "d") == "blocked blocked blocked blocked"
        assert harness.claim(n=9) == []
        harness.seal("g")
        assert harness.at("a", "b", "c", "d") == "ready blocked scheduled/delay ready"
        assert len(harness.claim(n=9)) == 2

    def test_a_pause_has_a_reason_until_it_is_over(self, harness: Harness) -> None:
        group_of(harness)
        assert not harness.group("g").paused, "it is open and was never paused"
        harness.seal("g")
        harness.unseal("g", "a new disk")
        assert (harness.group("g").paused, harness.group("g").why) == (True, "a new disk")
        with harness.unchanged():
            harness.unseal("g", "a new disk")
        harness.unseal("g", "two new disks")
        assert harness.group("g").why == "two new disks"
        harness.seal("g")
        assert (harness.group("g").paused, harness.group("g").why) == (False, None)
        harness.unseal("g")
        assert (harness.group("g").paused, harness.group("g").why) == (True, None)
        harness.abort("g")
        assert not harness.group("g").paused

    @pytest.mark.parametrize("outcome", [RetryOutcome(), SnoozeOutcome(SECOND), Release(), Refuse()])
    def test_what_comes_back_to_a_paused_group_waits(self, harness: Harness, outcome: Outcome) -> None:
        group_of(harness)
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.unseal("g")
        assert harness.at("m0", "m1") == "running running"
        harness.settle(a, outcome)
        assert harness.at("m0") == "blocked"
        assert harness.job("m0").waits == 1
        harness.done(b)
        assert harness.group("g").state is GroupState.OPEN
        harness.jump(5 * SECOND)
        assert harness.claim(n=9) == []
        harness.seal("g")
        [again] = harness.claim(n=9)
        harness.done(again)
        assert harness.group("g").outcome is State.DONE

    def test_a_lost_lease_in_a_paused_group(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.seal("g")
        harness.claim(lease=SECOND)
        harness.unseal("g")
        for _ in range(5):
            harness.jump(SECOND)
            harness.upkeep()
        assert harness.at("m0") == "blocked"
        assert harness.job("m0").losses == 1
        harness.seal("g")
        assert harness.at("m0") == "ready"

    def test_unseal_of_what_is_not_sealed(self, harness: Harness) -> None:
        group_of(harness, 1)
        with harness.unchanged():
            harness.unseal("g")
        harness.seal("g")
        harness.done(harness.take())
        with harness.unchanged():
            harness.unseal("g")
        assert isinstance(harness.ask(Unseal("nothing"))[0], UnknownGroup)

    def test_a_paused_group_may_be_aborted(self, harness: Harness) -> None:
        group_of(harness)
        harness.seal("g")
        harness.claim()
        harness.unseal("g")
        assert harness.ask(Abort("g")) == [GroupSet("g")]
        assert harness.at("m1") == "canceled/aborted"
        assert harness.job("m0").cancel_requested is Reason.ABORTED
