"""What flow control costs and keeps, in one run. Ratios, because machines are noisy.

    python bench/flow.py [--quick] [--dir DIR]

`all_gates_on`: no-op jobs a second with every gate switched on and none of them shut, beside the plain engine. `fair_share`: one
tenant has 100,000 jobs waiting, nine have 100 each; the time the nine need alone, divided by the time they need beside it. Without
`--quick` also the accuracy of bandwidth over 10 s with 8 streams, and the memory of 2,000,000 waiting jobs. The last line is JSON.
What each ratio must reach is in TARGETS.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ledger import sync_rate
from rounds import Alternating, Report
from stage import ARGUMENT, QUEUE, Ours, sqlite

import towpath

TARGETS = {"all_gates_on": 0.6, "fair_share": 0.5}
BANDWIDTH_ERROR = 5.0
"""Percent, over 10 s with 8 streams."""
TENANTS = 10
PATIENCE = 120.0
SOAK = Path(__file__).with_name("soak.py")


class Sizes:
    """How much of everything."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 5 if quick else 11
        self.jobs = 6_000 if quick else 20_000
        self.budget = 16.0 if quick else 300.0
        self.flood = 100_000
        self.each = 100


class Gated(Ours):
    """An app whose jobs pass every gate. Each gate is a function of its own in GATES."""

    def __init__(self, path: Path) -> None:
        super().__init__(sqlite(path))
        inner = self.noop.function

        async def noop(argument: str) -> None:
            await inner(argument)

        options: dict[str, Any] = {}
        for gate in GATES:
            options |= gate(self)
        self.gated: Any = self.app.task(name="bench.gated", queue=QUEUE, **options)(noop)

    def put_many(self, task: Any, count: int, chunk: int = 1000) -> None:
        numbers = itertools.count()
        for _ in range(0, count, chunk):
            task.enqueue_many(task.of(f"{next(numbers) % TENANTS}{ARGUMENT[1:]}") for _ in range(chunk))


def rate_limit(ours: Ours) -> dict[str, Any]:
    """A rate that never bites."""
    ours.app.queue(QUEUE).configure(rate="1000000/s:1000000")
    return {}


def cap(ours: Ours) -> dict[str, Any]:
    """A cap that is never reached."""
    ours.app.queue(QUEUE).configure(cap=100_000)
    return {}


def capacity(ours: Ours) -> dict[str, Any]:
    """Room for more than there will be."""
    ours.app.queue(QUEUE).configure(capacity=10_000_000)
    return {}


def fair_keys(ours: Ours) -> dict[str, Any]:
    """Tenants that take turns."""
    return {"part": lambda argument: argument[:1]}


GATES: tuple[Callable[[Ours], dict[str, Any]], ...] = (rate_limit, cap, capacity, fair_keys)
"""Each sets up its gate in the ledger and says which options the task needs for it."""


def bench_gates(folder: Path, report: Report, sizes: Sizes) -> None:
    with Ours(sqlite(folder / "plain.db")) as plain, Gated(folder / "gated.db") as gated:
        found = Alternating(
            sizes.rounds,
            {
                "plain": lambda: plain.complete(plain.noop, sizes.jobs),
                "gated": lambda: gated.complete(gated.gated, sizes.jobs),
            },
            sizes.budget,
        )
    report.ratio("all_gates_on", found["gated"], found["plain"])


class Tenants(Ours):
    """Nine tenants with a few jobs each; `flood` more of a tenth wait beside them."""

    def __init__(self, path: Path, sizes: Sizes, flood: int) -> None:
        super().__init__(sqlite(path))
        self._sizes, self._flood = sizes, flood
        self._served = threading.Event()
        self._small: Iterator[int] = iter(())

        async def serve(tenant: str, argument: str) -> None:
            if tenant != "flood" and next(self._small) == 1:
                self._served.set()

        self.serve: Any = self.app.task(name="bench.serve", queue=QUEUE, part="{tenant}")(serve)

    def nine(self) -> float:
        """Jobs of the nine a second, from the start of a worker until the last of them was called."""
        view = self.app.ledger.parts(QUEUE).get("flood")
        self._enqueue("flood", self._flood - (view.ready if view else 0))
        for number in range(TENANTS - 1):
            self._enqueue(f"tenant-{number}", self._sizes.each)
        count = (TENANTS - 1) * self._sizes.each
        self._small = itertools.count(count, -1)
        self._served.clear()
        gc.collect()
        started = time.perf_counter()
        with self.working():
            if not self._served.wait(PATIENCE):
                raise TimeoutError(f"the nine were not served within {PATIENCE:g} s")
            spent = time.perf_counter() - started
        return count / spent

    def _enqueue(self, tenant: str, count: int) -> None:
        for start in range(0, count, 1000):
            self.serve.enqueue_many(self.serve.of(tenant, ARGUMENT) for _ in range(min(1000, count - start)))


def bench_fairness(folder: Path, report: Report, sizes: Sizes) -> None:
    with ExitStack() as stack:
        alone = stack.enter_context(Tenants(folder / "alone.db", sizes, 0))
        beside = stack.enter_context(Tenants(folder / "beside.db", sizes, sizes.flood))
        found = Alternating(sizes.rounds, {"alone": alone.nine, "beside": beside.nine}, sizes.budget)
    report.ratio("fair_share", found["beside"], found["alone"])


def bench_bandwidth(seconds: float = 10.0, streams: int = 8, rate: int = 10_000_000) -> None:
    limits = towpath.Bandwidth(down=rate)
    end = time.monotonic() + seconds
    had = [0] * streams

    def read(number: int) -> None:
        stream = limits.download(io.BytesIO(bytes(int(2 * rate * seconds / streams))))
        while time.monotonic() < end:
            had[number] += len(stream.read(16_384))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    error = 100 * abs(sum(had) / (rate * seconds) - 1)
    Report.limit("bandwidth error", error, BANDWIDTH_ERROR, f"% over {seconds:g} s with {streams} streams")
    uneven = 100 * (max(had) / min(had) - 1)
    Report.limit("between streams", uneven, BANDWIDTH_ERROR, "% from the least to the most served")


def bench_memory(folder: Path) -> None:
    ended = subprocess.run([sys.executable, str(SOAK), "2000000", str(folder)], stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(ended.stdout.splitlines()[-1])
    Report.limit("memory", found["peak_mb"], found["max_mb"], f"MB with {found['waiting']:,} waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, ratios only; ends within 60 s")
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    options = parser.parse_args()
    sizes = Sizes(options.quick)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(f"the disk syncs {sync_rate(folder):,.0f} times a second; 100-byte arguments, WAL, synchronous=FULL")
        report = Report(TARGETS)
        bench_gates(folder, report, sizes)
        bench_fairness(folder, report, sizes)
        if not options.quick:
            bench_bandwidth()
            bench_memory(folder)
    print(json.dumps({"ratios": report.ratios}))


if __name__ == "__main__":
    main()
