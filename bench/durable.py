"""Speed of durable functions, as ratios to single commits of the raw limit in the same run.

    python bench/durable.py [--quick] [--dir DIR]

`durable_steps`: steps per second inside one plain function, one commit each. `durable_steps_async`: the same
in a coroutine. `saga_steps`: steps with an undo, two commits each. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from ledger import specs
from measure import Alternating, Report, rate
from raw import Raw
from workload import sqlite

from towpath import App, Task, step

TARGETS = {"durable_steps": 0.5, "durable_steps_async": 0.25, "saga_steps": 0.25}


def noop(n: int) -> int:
    return n


async def anoop(n: int) -> int:
    return n


def bench_steps(
    folder: Path, report: Report, rounds: int = 9, count: int = 100, budget: float = 10.0
) -> None:
    raw = Raw(folder / "raw-steps.db", "q")
    app = App(sqlite(folder / "steps.db"))

    @app.task(name="undo", queue="undos")
    def undo(n: int) -> None: ...

    @app.task(name="plain")
    def plain(count: int) -> float:
        return rate(count, lambda: [step(noop, n) for n in range(count)])

    @app.task(name="coroutine")
    async def coroutine(count: int) -> float:
        began = time.perf_counter()
        for n in range(count):
            await step(anoop, n)
        return count / (time.perf_counter() - began)

    @app.task(name="saga")
    def saga(count: int) -> float:
        return rate(count, lambda: [step(noop, n, undo=undo.of(n)) for n in range(count)])

    def raw_single() -> float:
        rows = [raw.rows([spec]) for spec in specs(count)]
        return rate(count, lambda: raw.append_each(rows))

    def run(task: Task[[int], float]) -> float:
        """The rate that the function measures; the start of the worker is not part of it."""
        job = task.enqueue(count)
        app.run(concurrency=1, burst=True)
        return job.result()

    runs = {"raw": raw_single, "plain": lambda: run(plain), "coroutine": lambda: run(coroutine)}
    with app:
        found = Alternating(rounds, {**runs, "saga": lambda: run(saga)}, budget)
    report.ratio("durable_steps", found["plain"], found["raw"])
    report.ratio("durable_steps_async", found["coroutine"], found["raw"])
    report.ratio("saga_steps", found["saga"], found["raw"])
    raw.close()


def bench_durable_steps(folder: Path, report: Report, sizes: object) -> None:
    """For `bench/plans.py`."""
    bench_steps(folder, report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        report = Report(TARGETS)
        bench_steps(Path(folder), report, 5 if options.quick else 15)
    print(json.dumps(report.ratios))


if __name__ == "__main__":
    main()
