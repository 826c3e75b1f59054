"""The cost and the effect of flow control, as ratios within one run.

    python bench/flow.py [--quick] [--dir DIR]

`all_gates_on`: no-op jobs a second with every gate switched on (two lanes, a breaker, a rate, a cap, a
capacity, fair keys) and none of them shut, beside the plain engine. `resource`: the same where half of the
jobs use a service with an adaptive limit. `fair_share`: one tenant has 100,000 jobs waiting, nine have 100
each; the time the nine need alone, divided by the time they need beside it. Without `--quick` also the
accuracy of bandwidth over 10 s with 8 streams, and the memory of 2,000,000 waiting jobs. The last line is
JSON. TARGETS has the target of each ratio."""

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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ledger import sync_rate
from measure import Alternating, Report
from workload import ARGUMENT, QUEUE, BenchApp, sqlite

import towpath

TARGETS = {"all_gates_on": 0.6, "resource": 0.6, "fair_share": 0.5}
BANDWIDTH_ERROR = 5.0
"""Percent, over 10 s with 8 streams."""
TENANTS = 10
FLOOD, EACH = 100_000, 100
"""Jobs of the large tenant, and of each other tenant."""
QUEUES = ("bench-first", "bench-second")
PATIENCE = 120.0
SOAK = Path(__file__).with_name("soak.py")


class Sizes:
    """Jobs per round, rounds, and the seconds after which no round starts."""

    def __init__(self, quick: bool) -> None:
        self.jobs = 6_000 if quick else 20_000
        self.rounds = 7 if quick else 11
        self.budget = 16.0 if quick else 300.0


class Gated(BenchApp):
    """All gates, none of which ever closes: two lanes with a queue each, a breaker, fair keys, and for each
    queue a rate, a cap and a capacity that are never reached."""

    def __init__(self, path: Path) -> None:
        super().__init__(sqlite(path))
        self.run_options = {"lanes": {queue: towpath.Lane(queues=(queue,)) for queue in QUEUES}}
        for queue in QUEUES:
            self.app.queue(queue).configure(rate="1000000/s:1000000", cap=100_000, capacity=10_000_000)
        self.tasks = [self._task(queue) for queue in QUEUES]

    def _task(self, queue: str) -> Any:
        return self.app.task(name=f"bench.{queue}", queue=queue, breaker="service", part=_tenant)(
            self.noop.function
        )

    def put_many(self, task: Any, count: int, chunk: int = 1000) -> None:
        """Enqueue jobs of alternating tenants."""
        tenants = itertools.cycle(range(TENANTS))
        for _ in range(0, count, chunk):
            task.enqueue_many(task.of(f"{next(tenants)}{ARGUMENT[1:]}") for _ in range(chunk))


def _tenant(argument: str) -> str:
    return argument[:1]


class Metered(BenchApp):
    """Half of the jobs use a resource with an adaptive limit."""

    def __init__(self, path: Path) -> None:
        super().__init__(sqlite(path))
        self.app.resource("service")
        metered = self.app.task(name="bench.metered", queue=QUEUES[0], resource="service")(self.noop.function)
        self.tasks = [metered, self.noop]


def bench_gates(folder: Path, report: Report, sizes: Sizes) -> None:
    with (
        BenchApp(sqlite(folder / "plain.db")) as plain,
        Gated(folder / "gated.db") as gated,
        Metered(folder / "metered.db") as metered,
    ):
        found = Alternating(
            sizes.rounds,
            {
                "plain": lambda: plain.complete(sizes.jobs, plain.noop),
                "gated": lambda: gated.complete(sizes.jobs, *gated.tasks),
                "metered": lambda: metered.complete(sizes.jobs, *metered.tasks),
            },
            sizes.budget,
        )
    report.ratio("all_gates_on", found["gated"], found["plain"])
    report.ratio("resource", found["metered"], found["plain"])


class Tenants(BenchApp):
    """Nine tenants with a few jobs each, and a tenth with `flood` waiting jobs."""

    def __init__(self, path: Path, flood: int) -> None:
        super().__init__(sqlite(path))
        self._flood = flood
        self._served = threading.Event()
        self._small: Iterator[int] = iter(())

        async def serve(tenant: str, argument: str) -> None:
            if tenant != "flood" and next(self._small) == 1:
                self._served.set()

        self.serve: Any = self.app.task(name="bench.serve", queue=QUEUE, part="{tenant}")(serve)

    def nine(self) -> float:
        """Jobs of the nine tenants per second, from the start of a worker until the last of them was
        called."""
        view = self.app.ledger.parts(QUEUE).get("flood")
        self._enqueue("flood", self._flood - (view.ready if view else 0))
        for number in range(TENANTS - 1):
            self._enqueue(f"tenant-{number}", EACH)
        count = (TENANTS - 1) * EACH
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
        alone = stack.enter_context(Tenants(folder / "alone.db", 0))
        beside = stack.enter_context(Tenants(folder / "beside.db", FLOOD))
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
    ended = subprocess.run(
        [sys.executable, str(SOAK), "2000000", str(folder)], stdout=subprocess.PIPE, text=True, check=False
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    Report.limit("memory", found["peak_mb"], found["max_mb"], f"MB with {found['waiting']:,} waiting")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, ratios only; ends within 60 s"
    )
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    options = parser.parse_args()
    sizes = Sizes(options.quick)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(f"{sync_rate(folder):,.0f} disk syncs per second; 100-byte arguments, WAL, synchronous=FULL")
        report = Report(TARGETS)
        bench_gates(folder, report, sizes)
        bench_fairness(folder, report, sizes)
        if not options.quick:
            bench_bandwidth()
            bench_memory(folder)
    print(json.dumps({"ratios": {name: report.ratios[name] for name in ("all_gates_on", "fair_share")}}))


if __name__ == "__main__":
    main()
