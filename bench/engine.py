"""Speed of the engine, as ratios to its peers and to the raw limit in the same run.

    python bench/engine.py [--quick] [--dir DIR]

No-op handlers, 100-byte arguments, SQLite with WAL and synchronous=FULL, one worker process. All sides run
alternately in every round; a ratio is the median over the rounds. Towpath keeps the history of every job.
`commit_fn` compares jobs with a commit function, which inserts a row into a user's table, with plain jobs.
The last line is JSON. TARGETS has the target of each ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ledger import specs, sync_rate
from measure import Alternating, PeerSet, Report, rate
from peers import IN_TURNS, peers
from raw import Raw
from workload import ARGUMENT, IDLE, BenchApp, sqlite

TARGETS = {
    "vs_best_peer": 8.0,
    "vs_raw": 0.4,
    "enqueue_single": 0.7,
    "enqueue_64_threads": 3.0,
    "enqueue_64_tasks": 7.0,
    "enqueue_many": 0.4,
    "threads_vs_async": 0.4,
    "commit_fn": 0.3,
}
P50_IN_COMMITS, MAX_P99, MAX_OTHER_P50 = 3.0, 10.0, 5.0
MAX_IDLE_CPU, MAX_GROWTH = 1.0, 1.1
WORKLOAD = Path(__file__).with_name("workload.py")


class Sizes:
    """Jobs per round, and rounds."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 9 if quick else 11
        self.jobs = 6_000 if quick else 20_000
        self.peer_jobs = 200 if quick else 500
        self.enqueue_rounds = 25
        self.singles = 100
        self.threads = self.tasks = 64
        self.each = 20
        self.bulk = 3_000
        self.budget = 20.0 if quick else 600.0
        self.enqueue_budget = 11.0 if quick else 300.0
        self.samples = 300 if quick else 1_000
        self.idle = 3 if quick else 10
        self.memory = 0 if quick else 1_000_000


def bench_jobs(folder: Path, report: Report, sizes: Sizes) -> None:
    """Jobs completed per second: ours, the peers, and the claim-100/settle-100 loop of bench/ledger.py."""
    peer_set, raw = PeerSet(peers(folder, IN_TURNS)), Raw(folder / "raw.db", "q")
    with BenchApp(sqlite(folder / "ours.db")) as ours:
        ours.make_table()
        runs: dict[str, Callable[[], float]] = {
            "async": lambda: ours.complete(sizes.jobs, ours.noop),
            "raw": lambda: raw_loop(raw, sizes.jobs),
            "threads": lambda: ours.complete(sizes.jobs // 2, ours.noop_sync),
            "commit": lambda: ours.complete(sizes.jobs // 2, ours.pay),
        }
        for name, length in IN_TURNS.items():
            runs[name] = partial(peer_set.rate, name, int(sizes.peer_jobs * length))
        found = Alternating(sizes.rounds, runs, sizes.budget)
    best = max(peer_set.peers, key=lambda name: statistics.median(found[name]))
    report.ratio("vs_best_peer", found["async"], found[best])
    report.ratio("vs_raw", found["async"], found["raw"])
    report.ratio("threads_vs_async", found["threads"], found["async"])
    report.ratio("commit_fn", found["commit"], found["async"])
    rates = ", ".join(f"{name} {statistics.median(found[name]):,.0f}" for name in peer_set.peers)
    print(f"{'':20} peers, jobs/s: {rates}; {len(found['async'])} rounds")
    peer_set.close()
    raw.close()


def raw_loop(raw: Raw, jobs: int) -> float:
    for _ in range(jobs // 1000):
        raw.append(raw.rows(specs(1000)))

    def loop() -> None:
        held: list[tuple[int, int]] = []
        for _ in range(jobs // 100):
            held = raw.settle_and_claim(held, 100)
        raw.settle_and_claim(held, 0)

    return rate(jobs, loop)


def bench_enqueues(folder: Path, report: Report, sizes: Sizes) -> None:
    raw = Raw(folder / "raw-enqueue.db", "q")

    def raw_single() -> float:
        rows = [raw.rows([spec]) for spec in specs(sizes.singles)]
        return rate(sizes.singles, lambda: raw.append_each(rows))

    def raw_bulk() -> float:
        rows = [raw.rows(specs(1000)) for _ in range(sizes.bulk // 1000)]
        return rate(sizes.bulk, lambda: raw.append_each(rows))

    with BenchApp(sqlite(folder / "enqueue.db")) as ours:
        found = Alternating(
            sizes.enqueue_rounds,
            {
                "raw": raw_single,
                "one": lambda: rate(
                    sizes.singles, lambda: [ours.noop.enqueue(ARGUMENT) for _ in range(sizes.singles)]
                ),
                "threads": lambda: ours.put_from_threads(sizes.threads, sizes.each),
                "tasks": lambda: asyncio.run(from_tasks(ours, sizes.tasks, sizes.each)),
                "raw bulk": raw_bulk,
                "many": lambda: rate(sizes.bulk, lambda: ours.put_many(ours.noop, sizes.bulk)),
            },
            sizes.enqueue_budget,
        )
    report.ratio("enqueue_single", found["one"], found["raw"])
    report.ratio("enqueue_64_threads", found["threads"], found["raw"])
    report.ratio("enqueue_64_tasks", found["tasks"], found["raw"])
    report.ratio("enqueue_many", found["many"], found["raw bulk"])
    raw.close()


async def from_tasks(ours: BenchApp, count: int, each: int) -> float:
    async def work() -> None:
        for _ in range(each):
            await ours.noop.aenqueue(ARGUMENT)

    gc.collect()
    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(count)))
    return count * each / (time.perf_counter() - started)


def bench_latency(folder: Path, report: Report, sizes: Sizes) -> None:
    """From the call of enqueue to the start of the handler, in an idle process."""
    path, raw = folder / "latency.db", Raw(folder / "raw-latency.db", "q")
    commits: list[float] = []
    waited: list[float] = []
    with BenchApp(sqlite(path)) as ours, ours.working():
        for number in range(sizes.samples + 20):
            rows = raw.rows(specs(1))
            # The same rest as before each job of the worker.
            time.sleep(IDLE)
            before = time.perf_counter()
            raw.append(rows)
            commit = time.perf_counter() - before
            latency = ours.pick_up()
            if number >= 20:
                commits.append(commit * 1e3)
                waited.append(latency)
        other = ours.picked_up_from(lambda: child("enqueue", path, sizes.samples), sizes.samples)
    raw.close()
    report.latency = {
        "p50": round(statistics.median(waited), 3),
        "p99": worst_of_100(waited),
        "raw_commit": round(statistics.median(commits), 3),
        "raw_commit_p99": worst_of_100(commits),
        "other_process_p50": round(statistics.median(other), 3),
    }
    report.limit(
        "latency p50",
        report.latency["p50"],
        P50_IN_COMMITS * report.latency["raw_commit"],
        "ms (3 raw commits)",
    )
    # A disk stall delays both.
    report.limit(
        "latency p99",
        report.latency["p99"],
        MAX_P99,
        f"ms (a raw commit's: {report.latency['raw_commit_p99']:.2f})",
    )
    report.limit("other process p50", report.latency["other_process_p50"], MAX_OTHER_P50, "ms")


def worst_of_100(milliseconds: list[float]) -> float:
    return round(statistics.quantiles(milliseconds, n=100)[98], 3)


def child(what: str, path: Path, number: int) -> list[float]:
    """Run a workload in its own process and return the numbers that it prints."""
    command = [sys.executable, str(WORKLOAD), what, sqlite(path), str(number)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(word) for word in ended.stdout.split()]


def bench_rest(folder: Path, report: Report, sizes: Sizes) -> None:
    (cpu,) = child("idle", folder / "idle.db", sizes.idle)
    report.limit("idle worker", 100 * cpu / sizes.idle, MAX_IDLE_CPU, "% CPU")
    if sizes.memory:
        early, late = child("memory", folder / "memory.db", sizes.memory)
        text = f"times, {early:.0f} MB after a tenth of {sizes.memory:,} jobs, {late:.0f} MB at the end"
        report.limit("memory growth", late / early, MAX_GROWTH, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, no memory run; ends within 60 s"
    )
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    options = parser.parse_args()
    sizes = Sizes(options.quick)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(f"{sync_rate(folder):,.0f} disk syncs per second; 100-byte arguments, WAL, synchronous=FULL")
        report = Report(TARGETS)
        for bench in (bench_enqueues, bench_latency, bench_jobs, bench_rest):
            bench(folder, report, sizes)
    ratios = {name: report.ratios[name] for name in TARGETS}
    print(json.dumps({"ratios": ratios, "latency_ms": report.latency}))


if __name__ == "__main__":
    main()
