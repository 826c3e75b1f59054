"""`planning` and `move` of bench/plans.py: placements of 3,000 shards over 100 nodes, and a shard of
1,000,000 rows that moves while a writer inserts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shard_moves
from measure import Report

from towpath.apps.shards.placement import balanced, initial

SHARDS, NODES, COPIES = 3_000, 100, 3


def planning() -> dict[str, float]:
    """Seconds of each kind of planning: a new table, 10 nodes more, 10 nodes drained, 2 nodes lost."""
    nodes = [f"node-{number:03}" for number in range(NODES)]
    more = [f"more-{number:03}" for number in range(10)]
    placement = initial(nodes, SHARDS, COPIES)
    kinds: dict[str, Callable[[], object]] = {
        "new": lambda: initial(nodes, SHARDS, COPIES),
        "add": lambda: balanced(placement, nodes + more, COPIES),
        "drain": lambda: balanced(placement, nodes[10:], COPIES, nodes[:10]),
        "lose": lambda: balanced(placement, nodes[2:], COPIES),
    }
    seconds = {}
    for name, plan in kinds.items():
        begin = time.perf_counter()
        plan()
        seconds[name] = time.perf_counter() - begin
    return seconds


def bench_planning(folder: Path, report: Report, sizes: Any) -> None:
    """The slowest kind of planning."""
    slowest = max(planning().values())
    report.limit("planning", slowest, 2.0, "s")
    report.latency["planning_seconds"] = round(slowest, 3)


def bench_move(folder: Path, report: Report, sizes: Any) -> None:
    """The time of a move beside a bare copy, and the longest insert while it runs."""
    found = shard_moves.move()
    report.limit("move", found["ratio"], 1.3, "times a bare copy")
    report.limit("move: pause", found["longest_insert"], 2.0, "s")
    report.latency["move_ratio"] = round(found["ratio"], 3)
    report.latency["move_pause_seconds"] = round(found["longest_insert"], 3)
