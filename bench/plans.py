"""Speed of plans, as ratios to the plain rate of the engine in the same run.

    python bench/plans.py [--quick] [--dir DIR] [--only NAME]

`steps`: the steps of a plan over 50 nodes, one at a time on each, with 3 dependencies each and a task that
does nothing. `rollback`: the undos of a plan that fails at its end, from the decision of the coordinator to
the end of the plan. Both are compared with plain jobs of the same task, on the same SQLite file, alternately.
The other figures come from the modules that they measure. The last line is JSON. TARGETS has the target of
each ratio.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import durable
from ledger import sync_rate
from measure import Alternating, Report
from workload import sqlite

from towpath import App, Plan, Step, StepRetry
from towpath.flows.kinds import PlanState

TARGETS = {"steps": 0.25, "rollback": 0.2, **durable.TARGETS}
MODULES = {
    "planning": ("plans_shards", "bench_planning"),
    "move": ("plans_shards", "bench_move"),
    "durable_steps": ("durable", "bench_durable_steps"),
}
"""Figures that other files of this folder measure: the file and its function. A function takes the folder,
the report and the sizes, and calls `report.ratio` or `report.limit`."""
NODES, DEPENDENCIES, WINDOW = 50, 3, 2_000
CONCURRENCY = 64


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.steps = 20_000 if quick else 100_000
        self.undos = 10_000 if quick else 50_000
        self.rounds = 1 if quick else 3
        self.budget = 30.0 if quick else 600.0


class PlanApp:
    """An app with tasks that do nothing, and its worker in this process."""

    def __init__(self, url: str) -> None:
        self.app = App(url)

        async def nothing() -> None: ...

        async def fail() -> None:
            raise RuntimeError("the last step fails")

        self.nothing: Any = self.app.task(name="bench.nothing", queue="plain")(nothing)
        self.fail: Any = self.app.task(name="bench.fail", queue="plain")(fail)
        self._number = 0

    def plan(self, count: int, fails: bool) -> Plan:
        rng, call = random.Random(self._number), self.nothing.of()
        steps = []
        for n in range(count):
            first = max(0, n - WINDOW)
            after = {f"s{rng.randrange(first, n)}" for _ in range(DEPENDENCIES)} if n >= NODES else ()
            steps.append(Step(f"s{n}", f"n{n % NODES}", call, undo=call, after=tuple(after)))
        if fails:
            last = tuple(f"s{n}" for n in range(count - WINDOW, count))
            steps.append(
                Step("last", "n0", self.fail.of(), undo=call, after=last, retry=StepRetry(attempts=1))
            )
        return Plan("bench", tuple(steps))

    def steps(self, count: int) -> float:
        """Steps per second, from the start of a worker to the end of the plan."""
        self._number += 1
        handle = self.app.plans.submit(self.plan(count, False), id=f"steps-{self._number}")
        started = time.perf_counter()
        self._run("node/*")
        spent = time.perf_counter() - started
        assert handle.status().state is PlanState.DONE, handle.status()
        return count / spent

    def rollback(self, count: int) -> float:
        """Undos per second, from the decision of the coordinator to the end of the plan."""
        self._number += 1
        handle = self.app.plans.submit(self.plan(count, True), id=f"rollback-{self._number}")
        self.app.queue("towpath/flows").pause()
        self._run("node/*")
        self.app.queue("towpath/flows").resume()
        started = time.perf_counter()
        self._run("node/*")
        spent = time.perf_counter() - started
        status = handle.status()
        assert (status.state, status.undo.done) == (PlanState.ROLLED_BACK, count + 1), status
        return count / spent

    def plain(self, count: int) -> float:
        """Plain jobs per second."""
        call = self.nothing.of()
        for _ in range(0, count, 1000):
            self.nothing.enqueue_many([call] * 1000)
        started = time.perf_counter()
        self._run("plain")
        return count / (time.perf_counter() - started)

    def _run(self, queue: str) -> None:
        self.app.run(queues=(queue,), burst=True, concurrency=CONCURRENCY)


def bench_plans(folder: Path, report: Report, sizes: Sizes) -> None:
    ours = PlanApp(sqlite(folder / "plans.db"))
    runs: Mapping[str, Callable[[], float]] = {
        "plain": lambda: ours.plain(sizes.steps),
        "steps": lambda: ours.steps(sizes.steps),
        "rollback": lambda: ours.rollback(sizes.undos),
    }
    try:
        ours.plain(1000)
        ours.steps(1000)
        found = Alternating(sizes.rounds - 1, runs, sizes.budget) if sizes.rounds > 1 else None
        rates = (
            {name: [run()] for name, run in runs.items()}
            if found is None
            else {name: found[name] for name in runs}
        )
    finally:
        ours.app.close()
    report.ratio("steps", rates["steps"], rates["plain"])
    report.ratio("rollback", rates["rollback"], rates["plain"])


def bench_others(name: str, folder: Path, report: Report, sizes: Sizes) -> None:
    module, function = MODULES[name]
    getattr(importlib.import_module(module), function)(folder, report, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20,000 steps and one round; ends within 60 s")
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    parser.add_argument("--only", choices=["plans", *MODULES], help="measure this alone")
    options = parser.parse_args()
    sizes = Sizes(options.quick)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(f"{sync_rate(folder):,.0f} disk syncs per second; SQLite with WAL, synchronous=FULL")
        report = Report(TARGETS)
        if options.only in (None, "plans"):
            bench_plans(folder, report, sizes)
        for each in MODULES if options.only is None else {options.only} & MODULES.keys():
            bench_others(each, folder, report, sizes)
    print(json.dumps({"ratios": report.ratios, "values": report.latency}))


if __name__ == "__main__":
    main()
