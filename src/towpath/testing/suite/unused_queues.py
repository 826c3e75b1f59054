"""Upkeep deletes queues without jobs and settings after a while."""

from __future__ import annotations

from typing import Any

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Upkept
from towpath.core.limits import Rate
from towpath.core.views import Counts
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite, spec


class UnusedQueueSuite(Suite):
    """Queues without jobs, settings and parts."""

    def test_an_unused_queue_is_deleted_after_an_hour(self, harness: Harness) -> None:
        harness.append(spec("a", "brief", part="p"), spec("b", "brief"))
        harness.done(harness.take("brief"))
        harness.cancel("a", "b")
        harness.upkeep()
        harness.purge("a", "b")
        harness.jump(2 * HOUR)
        assert "brief" in harness.ledger.queues()
        # The hour begins when upkeep finds the queue unused, not with the last job.
        assert harness.upkeep().swept == 2
        assert "brief" in harness.ledger.queues()
        harness.jump(HOUR - 1)
        with harness.unchanged():
            assert harness.upkeep() == Upkept()
        harness.jump(1)
        assert harness.upkeep(limit=1) == Upkept(swept=1, more=True)
        assert harness.ledger.queues() == {}
        assert harness.ledger.queue("brief") is None
        with harness.unchanged():
            assert harness.upkeep() == Upkept()
        harness.add("c", "brief")
        assert harness.counts("brief") == Counts(ready=1)
        assert harness.take("brief").id == "c"

    def test_unused_queues_are_deleted_in_order_within_the_limit(self, harness: Harness) -> None:
        for names in ("dc", "ba"):
            harness.append(*[spec(name, name) for name in names])
            harness.cancel(*names)
            harness.purge(*names)
            harness.upkeep()
            harness.jump(SECOND)
        harness.jump(2 * HOUR)
        assert harness.upkeep(limit=4).swept == 4
        assert harness.upkeep(limit=3).swept == 3
        assert list(harness.ledger.queues()) == ["b"]

    def test_a_used_queue_is_kept(self, harness: Harness) -> None:
        """Jobs in any state, settings, and parts with settings keep a queue."""
        harness.done(harness.started("done", "done", retention=30 * DAY))
        harness.append(spec("ready", "ready"), spec("later", "later", delay=DAY))
        settings: dict[str, dict[str, Any]] = {
            "paused": {"paused": True},
            "capacity": {"capacity": 1},
            "cap": {"cap": 0},
            "rate": {"rate": Rate(1)},
            "retention": {"retention": 0},
            "keep": {"keep": 0},
            "shut": {"not_before": START + 30 * DAY},
        }
        for name, fields in settings.items():
            harness.set_queue(name, **fields)
        harness.add("x", "parted", part="p")
        harness.set_part("p", "parted", weight=2)
        harness.cancel("x")
        harness.purge("x")
        harness.set_queue("plain")
        kept = sorted([*settings, "done", "ready", "later", "parted"])
        for _ in range(3):
            harness.upkeep()
            harness.jump(HOUR)
        assert list(harness.ledger.queues()) == kept
        for name in ("cap", "rate"):
            harness.set_queue(name, cap=None, rate=None)
        harness.upkeep()
        harness.jump(HOUR)
        harness.upkeep()
        assert list(harness.ledger.queues()) == [name for name in kept if name not in ("cap", "rate")]

    def test_use_starts_the_hour_again(self, harness: Harness) -> None:
        """Also if a job is appended and deleted between two upkeeps."""
        harness.append(spec("a", "job"))
        harness.cancel("a")
        harness.purge("a")
        harness.set_queue("set")
        harness.upkeep()
        harness.jump(HOUR - SECOND)
        harness.append(spec("b", "job"))
        harness.cancel("b")
        harness.purge("b")
        harness.set_queue("set")
        harness.jump(SECOND)
        harness.upkeep()
        assert sorted(harness.ledger.queues()) == ["job", "set"]
        harness.jump(HOUR)
        harness.upkeep()
        assert harness.ledger.queues() == {}
