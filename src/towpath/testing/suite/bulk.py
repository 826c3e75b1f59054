"""Cancel and Purge, and how a bulk command chooses."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Canceled, Placed, Purged
from towpath.core.job import Reason, State
from towpath.core.views import Counts
from towpath.testing.clock import START
from towpath.testing.suite.desk import Desk, Suite, anyway, spec, unique, whole_group


class CancelSuite(Suite):
    """What waits is canceled, what runs is asked to stop."""

    def test_waiting_jobs_are_canceled(self, desk: Desk) -> None:
        desk.started("run")
        desk.append(spec("a"), spec("b", delay=SECOND), spec("c", after=["run"]))
        desk.jump(SECOND)
        assert desk.cancel("a", "b", "c") == Canceled(3, 0)
        assert desk.at("a", "b", "c") == " ".join(["canceled/requested"] * 3)
        job = desk.job("c")
        assert (job.finished_at, job.waits, job.cancel_requested) == (desk.now, 0, None)
        assert desk.counts() == Counts(running=1, canceled=3)

    def test_running_jobs_are_asked_once(self, desk: Desk) -> None:
        desk.started("a")
        assert desk.cancel("a") == Canceled(0, 1)
        assert desk.job("a").cancel_requested is Reason.REQUESTED
        with desk.unchanged():
            assert desk.cancel("a") == Canceled(0, 0)

    def test_finished_and_unknown_jobs_do_not_match(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        with desk.unchanged():
            assert desk.cancel("a", "nowhere") == Canceled(0, 0)

    def test_dependents_fall_but_are_not_counted_twice(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=["b"], queue="other"))
        assert desk.cancel(queue="q") == Canceled(2, 0)
        assert desk.at("a", "b", "c") == "canceled/requested canceled/requested canceled/dependency"

    def test_one_set_ends_together(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c", "other", after=[anyway("a"), anyway("b")]))
        desk.cancel("a", "b")
        assert desk.at("c") == "ready"

    def test_members_of_a_group(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(
            spec("a", group="g"),
            spec("b", group="g"),
            spec("w", "o", after=[whole_group("g", run_anyway=True)]),
        )
        desk.seal("g")
        assert desk.cancel(group="g") == Canceled(2, 0)
        assert (desk.group("g").outcome, desk.at("w")) == (State.CANCELED, "ready")

    def test_a_limit_takes_the_lowest_seqs_first(self, desk: Desk) -> None:
        desk.append(*[spec(f"j{n}", priority=-n) for n in range(5)])
        assert desk.cancel(queue="q", limit=2) == Canceled(2, 0, more=True)
        assert desk.found(states=(State.CANCELED,)) == ["j0", "j1"]
        assert desk.cancel(queue="q", limit=3) == Canceled(3, 0, more=False)

    def test_the_order_of_the_ids_does_not_matter(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b"), spec("c"))
        assert desk.cancel("c", "b", "a", limit=1) == Canceled(1, 0, more=True)
        assert desk.at("a", "b", "c") == "canceled/requested ready ready"

    def test_the_parts_counters_follow(self, desk: Desk) -> None:
        desk.append(spec("a", part="p"), spec("b", part="p"))
        desk.cancel("a")
        assert desk.part("p").ready == 1

    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            ({"queue": "x/1"}, ["a", "e"]),
            ({"queue": "x/*"}, ["a", "b", "e"]),
            ({"part": "p"}, ["b"]),
            ({"group": "g"}, ["c"]),
            ({"key": "k"}, ["d"]),
            ({"kind": "mail"}, ["b", "d"]),
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
    def test_every_condition_must_hold(self, desk: Desk, where: dict[str, Any], expected: list[str]) -> None:
        desk.open("g")
        desk.append(spec("a", "x/1"), spec("b", "x/2", part="p", kind="mail"), spec("c", "y", group="g"))
        desk.append(spec("d", "y", key=unique("k"), kind="mail"))
        desk.jump(SECOND)
        desk.append(spec("e", "x/1", delay=SECOND))
        others = {field: value for field, value in where.items() if field != "ids"}
        assert desk.cancel(*where.get("ids", ()), **others).canceled == len(expected)
        assert desk.found(states=(State.CANCELED,)) == expected


class PurgeSuite(Suite):
    """What is finished can be deleted; a tombstone stays for an hour."""

    def test_only_finished_jobs_are_deleted(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.fail(desk.started("failed"))
        desk.append(
            spec("canceled"), spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["ready"])
        )
        desk.cancel("canceled")
        desk.add("running", "r")
        desk.take("r")
        assert desk.purge(queue="*") == Purged(3)
        assert desk.found() == ["ready", "scheduled", "blocked", "running"]
        assert desk.counts() == Counts(ready=1, scheduled=1, blocked=1)
        assert desk.ledger.get("done") is None

    def test_by_age_and_state(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.jump(SECOND)
        desk.done(desk.started("b"))
        desk.fail(desk.started("c"))
        assert desk.purge(finished_before=START + SECOND) == Purged(1)
        assert desk.purge(states=(State.FAILED,)) == Purged(1)
        assert desk.found() == ["b"]

    def test_a_limit_takes_the_oldest_first(self, desk: Desk) -> None:
        for n in range(4):
            desk.done(desk.started(f"j{n}"))
        assert desk.purge(queue="q", limit=3) == Purged(3, more=True)
        assert desk.found() == ["j3"]
        assert desk.purge(queue="q", limit=1) == Purged(1, more=False)

    def test_edges_of_a_deleted_job_are_gone(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.add("b", after=["a"])
        claim = desk.take()
        desk.purge("a")
        desk.done(claim)
        assert desk.at("b") == "done"

    def test_a_met_edge_does_not_count_after_the_deletion(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.append(spec("x", "o"), spec("b", after=["a", "x"]))
        desk.done(claim)
        desk.purge("a")
        assert (desk.at("b"), desk.job("b").waits) == ("blocked", 1)
        desk.done(desk.take("o"))
        assert desk.at("b") == "ready"

    def test_a_tombstone_stays_for_an_hour(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.purge("a")
        assert desk.upkeep().next_due == START + HOUR
        desk.jump(HOUR)
        assert desk.upkeep().swept == 1
        assert desk.append(spec("a")) == (Placed("a", 2),)

    def test_groups_keep_their_counts(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("a", group="g")
        desk.add("b", group="g")
        desk.seal("g")
        desk.done(desk.take())
        desk.purge("a")
        assert (desk.group("g").total, desk.group("g").done) == (2, 1)
        desk.done(desk.take())
        assert desk.group("g").outcome is State.DONE

    def test_the_large_bodies_go_too(self, desk: Desk) -> None:
        desk.add("a", payload=b"x" * 3_000_000)
        desk.cancel("a")
        assert desk.purge("a") == Purged(1)
        assert desk.ledger.get("a") is None
