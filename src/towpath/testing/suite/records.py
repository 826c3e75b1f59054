"""Every column of a job after each change, compared with the rule in `core.lifecycle`."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.core import lifecycle
from towpath.core.admission import new_job
from towpath.core.checks import SECOND
from towpath.core.commands import Append, Claim, Want
from towpath.core.job import (
    FINISHED,
    After,
    ClaimedJob,
    Done,
    FailOutcome,
    Outcome,
    Reason,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    State,
    Stop,
)
from towpath.testing.suite.harness import LEASE, Harness, Suite, spec

OUTCOMES = (
    Done(b"5"),
    Done(),
    RetryOutcome(SECOND, "busy"),
    RetryOutcome(),
    SnoozeOutcome(SECOND),
    Release(),
    Refuse(error="unknown kind"),
    FailOutcome("broken"),
    Stop("enough"),
)
# A spec with no relations takes the fast paths of a ledger, a spec in a part does not.
SPECS = (
    {"payload": b"1"},
    {"payload": b"1", "part": "p"},
    {"payload": b"1", "headers": {"a": "b"}, "ttl": SECOND},
)


class RecordSuite(Suite):
    """SQL that repeats a rule writes the same record as the rule, in every column."""

    @pytest.mark.parametrize("fields", SPECS, ids=("plain", "part", "headers"))
    def test_an_append_stores_the_new_job(self, harness: Harness, fields: dict[str, Any]) -> None:
        specs = [spec("a", **fields), spec("b", delay=SECOND, **fields)]
        placed = harness.append(*specs)
        expected = [new_job(each, at.seq, harness.now) for each, at in zip(specs, placed, strict=True)]
        assert [harness.job(id) for id in "ab"] == expected

    @pytest.mark.parametrize("fields", SPECS, ids=("plain", "part", "headers"))
    def test_a_claim_stores_the_taken_job(self, harness: Harness, fields: dict[str, Any]) -> None:
        ready = harness.add("a", **fields)
        harness.jump(7)
        expected = lifecycle.take(ready, "me", LEASE, harness.now)
        assert harness.take(owner="me").job == harness.job("a") == expected

    def test_a_claim_in_the_batch_of_the_append(self, harness: Harness) -> None:
        harness.done(harness.started("first"))
        harness.jump(7)
        one = spec("a", payload=b"1")
        harness.ask(Append((one,)), Claim(owner="me", wants=(Want("q"),), lease=LEASE))
        job = harness.job("a")
        assert job == lifecycle.take(new_job(one, job.seq, harness.now), "me", LEASE, harness.now)

    @pytest.mark.parametrize("fields", SPECS, ids=("plain", "part", "headers"))
    @pytest.mark.parametrize("outcome", OUTCOMES, ids=repr)
    def test_a_settle_stores_the_settled_job(
        self, harness: Harness, outcome: Outcome, fields: dict[str, Any]
    ) -> None:
        running = harness.started("a", **fields).job
        harness.jump(7)
        change = lifecycle.settle(running, outcome, harness.now)
        settled = lifecycle.settled(running, change, outcome)
        harness.settle(ClaimedJob(running), outcome)
        if change.state in FINISHED:
            expected = lifecycle.ended(settled, change.state, change.reason, harness.now, None)
        else:
            expected = lifecycle.given_back(settled, change)
        assert harness.job("a") == expected

    @pytest.mark.parametrize("losses", [1, 5])
    def test_a_lost_lease_stores_the_lost_job(self, harness: Harness, losses: int) -> None:
        running = harness.started("a", max_losses=losses).job
        harness.advance(LEASE + 1)
        change = lifecycle.lose(running, harness.now)
        harness.upkeep()
        expected = lifecycle.given_back(running, change)
        if change.state in FINISHED:
            expected = lifecycle.ended(expected, change.state, change.reason, harness.now, None)
        assert harness.job("a") == expected

    def test_an_end_wakes_and_dooms_dependents(self, harness: Harness) -> None:
        claim = harness.started("a")
        waiting = harness.add("b", "other", after=[After("a", run_anyway=True)], delay=60 * SECOND)
        doomed = harness.add("c", "other", after=["a"])
        harness.jump(7)
        harness.fail(claim)
        assert harness.job("b") == lifecycle.lowered(waiting, harness.now)
        assert harness.job("c") == lifecycle.ended(doomed, State.FAILED, Reason.DEPENDENCY, harness.now, None)

    def test_a_scheduled_job_wakes(self, harness: Harness) -> None:
        scheduled = harness.add("a", delay=SECOND)
        harness.jump(SECOND)
        harness.upkeep()
        assert harness.job("a") == lifecycle.woken(scheduled)

    def test_a_paused_group_holds_its_members(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g", after=["a"]))
        harness.seal("g")
        before = [harness.job(id) for id in "ab"]
        harness.unseal("g")
        assert [harness.job(id) for id in "ab"] == [lifecycle.held(job) for job in before]

    def test_a_revival_stores_the_revived_job(self, harness: Harness) -> None:
        harness.fail(harness.started("a", ttl=SECOND))
        dead = harness.job("a")
        harness.jump(2 * SECOND)
        harness.revive("a")
        assert harness.job("a") == lifecycle.revived(dead, 0, harness.now)
