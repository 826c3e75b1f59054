"""Cancel and Purge, and the selection of bulk commands."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Canceled, Placed, Purged
from towpath.core.job import Reason, State
from towpath.core.views import Counts
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite, anyway, spec, unique, whole_group


class CancelSuite(Suite):
    """Waiting jobs are canceled, running jobs are asked to stop."""

    def test_waiting_jobs_are_canceled(self, harness: Harness) -> None:
        harness.started("run")
        harness.append(spec("a"), spec("b", delay=SECOND), spec("c", after=["run"]))
        harness.jump(SECOND)
        assert harness.cancel("a", "b", "c") == Canceled(3, 0)
        assert harness.at("a", "b", "c") == " ".join(["canceled/requested"] * 3)
        job = harness.job("c")
        assert (job.finished_at, job.waits, job.cancel_requested) == (harness.now, 0, None)
        assert harness.counts() == Counts(running=1, canceled=3)

    def test_running_jobs_are_asked_once(self, harness: Harness) -> None:
        harness.started("a")
        assert harness.cancel("a") == Canceled(0, 1)
        assert harness.job("a").cancel_requested is Reason.REQUESTED
        with harness.unchanged():
            assert harness.cancel("a") == Canceled(0, 0)

    def test_finished_and_unknown_jobs_do_not_match(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        with harness.unchanged():
            assert harness.cancel("a", "nowhere") == Canceled(0, 0)

    def test_dependents_fall_but_are_not_counted_twice(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]), spec("c", after=["b"], queue="other"))
        assert harness.cancel(queue="q") == Canceled(2, 0)
        assert harness.at("a", "b", "c") == "canceled/requested canceled/requested canceled/dependency"

    def test_one_set_ends_together(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c", "other", after=[anyway("a"), anyway("b")]))
        harness.cancel("a", "b")
        assert harness.at("c") == "ready"

    def test_members_of_a_group(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(
            spec("a", group="g"),
            spec("b", group="g"),
            spec("w", "o", after=[whole_group("g", run_anyway=True)]),
        )
        harness.seal("g")
        assert harness.cancel(group="g") == Canceled(2, 0)
        assert (harness.group("g").outcome, harness.at("w")) == (State.CANCELED, "ready")

    def test_a_limit_takes_the_lowest_seqs_first(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}", priority=-n) for n in range(5)])
        assert harness.cancel(queue="q", limit=2) == Canceled(2, 0, more=True)
        assert harness.found(states=(State.CANCELED,)) == ["j0", "j1"]
        assert harness.cancel(queue="q", limit=3) == Canceled(3, 0, more=False)

    def test_the_order_of_the_ids_does_not_matter(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c"))
        assert harness.cancel("c", "b", "a", limit=1) == Canceled(1, 0, more=True)
        assert harness.at("a", "b", "c") == "canceled/requested ready ready"

    def test_the_parts_counters_follow(self, harness: Harness) -> None:
        harness.append(spec("a", part="p"), spec("b", part="p"))
        harness.cancel("a")
        assert harness.part("p").ready == 1

    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            ({"queue": "x/1"}, ["a", "e"]),
            ({"queue": "x/*"}, ["a", "b", "e"]),
            ({"part": "p"}, ["b"]),
            ({"group": "g"}, ["c"]),
            ({"key": "k"}, ["d"]),
            ({"kind": "mail"}, ["b", "d"]),
            ({"parent": "m"}, ["b", "d", "e"]),
            ({"parent": "m", "generation": 0}, ["d"]),
            ({"parent": "m", "generation": 1}, ["b", "e"]),
            ({"parent": "m", "generation": 1, "queue": "x/1"}, ["e"]),
            ({"parent": "m", "generation": 2}, []),
            ({"generation": 0}, ["a", "c", "d"]),
            ({"generation": 1}, ["b", "e"]),
            ({"states": (State.SCHEDULED,)}, ["e"]),
            ({"states": (State.SCHEDULED, State.BLOCKED)}, ["c", "e"]),
            ({"created_before": START + SECOND}, ["a", "b", "c", "d"]),
            ({"ids": ("a", "b", "d"), "kind": "mail"}, ["b", "d"]),
            ({"queue": "x/*", "kind": "mail", "part": "p"}, ["b"]),
            ({"queue": "x/*", "part": "other"}, []),
            ({"states": (State.DONE,)}, []),
            ({"finished_before": START + HOUR}, []),
        ],
    )
    def test_every_condition_must_hold(
        self, harness: Harness, where: dict[str, Any], expected: list[str]
    ) -> None:
        harness.open("g")
        second = {"parent": "m", "generation": 1}
        harness.append(
            spec("a", "x/1"), spec("b", "x/2", part="p", kind="mail", **second), spec("c", "y", group="g")
        )
        harness.append(spec("d", "y", key=unique("k"), kind="mail", parent="m"))
        harness.jump(SECOND)
        harness.append(spec("e", "x/1", delay=SECOND, **second))
        others = {field: value for field, value in where.items() if field != "ids"}
        assert harness.cancel(*where.get("ids", ()), **others).canceled == len(expected)
        assert harness.found(states=(State.CANCELED,)) == expected


class PurgeSuite(Suite):
    """Finished jobs can be deleted; a tombstone stays for an hour."""

    def test_only_finished_jobs_are_deleted(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.append(
            spec("canceled"), spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["ready"])
        )
        harness.cancel("canceled")
        harness.add("running", "r")
        harness.take("r")
        assert harness.purge(queue="*") == Purged(3)
        assert harness.found() == ["ready", "scheduled", "blocked", "running"]
        assert harness.counts() == Counts(ready=1, scheduled=1, blocked=1)
        assert harness.ledger.get("done") is None

    def test_by_age_and_state(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.jump(SECOND)
        harness.done(harness.started("b"))
        harness.fail(harness.started("c"))
        assert harness.purge(finished_before=START + SECOND) == Purged(1)
        assert harness.purge(states=(State.FAILED,)) == Purged(1)
        assert harness.found() == ["b"]

    def test_a_limit_takes_the_oldest_first(self, harness: Harness) -> None:
        for n in range(4):
            harness.done(harness.started(f"j{n}"))
        assert harness.purge(queue="q", limit=3) == Purged(3, more=True)
        assert harness.found() == ["j3"]
        assert harness.purge(queue="q", limit=1) == Purged(1, more=False)

    def test_edges_of_a_deleted_job_are_gone(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.add("b", after=["a"])
        claim = harness.take()
        harness.purge("a")
        harness.done(claim)
        assert harness.at("b") == "done"

    def test_a_met_edge_does_not_count_after_the_deletion(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.append(spec("x", "o"), spec("b", after=["a", "x"]))
        harness.done(claim)
        harness.purge("a")
        assert (harness.at("b"), harness.job("b").waits) == ("blocked", 1)
        harness.done(harness.take("o"))
        assert harness.at("b") == "ready"

    def test_a_tombstone_stays_for_an_hour(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.purge("a")
        assert harness.upkeep().next_due == START + HOUR
        harness.add("other")
        harness.jump(HOUR)
        assert harness.upkeep().swept == 1
        assert harness.append(spec("a")) == (Placed("a", 3),)

    def test_groups_keep_their_counts(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("a", group="g")
        harness.add("b", group="g")
        harness.seal("g")
        harness.done(harness.take())
        harness.purge("a")
        assert (harness.group("g").total, harness.group("g").done) == (2, 1)
        harness.done(harness.take())
        assert harness.group("g").outcome is State.DONE

    def test_the_large_bodies_go_too(self, harness: Harness) -> None:
        harness.add("a", payload=b"x" * 3_000_000)
        harness.cancel("a")
        assert harness.purge("a") == Purged(1)
        assert harness.ledger.get("a") is None
