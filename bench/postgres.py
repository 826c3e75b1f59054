"""How fast the engine is on PostgreSQL, next to its peers and to raw psycopg in the same run. Ratios, because
machines are noisy.

    python bench/postgres.py [--quick] [--dir DIR]

Starts a server of its own (`PG_BINDIR` chooses another version) with fsync on. No-op handlers, 100-byte
arguments, history kept. All sides take turns in every round; a ratio is the median over the rounds. The last
line is JSON. TARGETS has the target of each ratio.

`commit_fn` compares jobs with a commit function, which inserts a row into a table of the user, with plain
jobs, `two_processes` two worker processes with one, `enqueue_30` 30 callers at once with raw inserts one at a
time. `other_process_p50` is the time from the call of enqueue in one process to the start of the handler in
another idle process. An idle worker is measured by its CPU and by the statements in the server's log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ledger import sync_rate
from measure import Alternating, PeerSet, Report, rate
from pg_peers import IN_TURNS, peers
from pg_raw import Raw
from workload import ARGUMENT, PATIENCE, BenchApp

from towpath.testing.postgres import Server, place

TARGETS = {
    "vs_best_peer": 1.5,
    "vs_raw": 0.45,
    "two_processes": 1.2,
    "enqueue_single": 0.65,
    "enqueue_30": 2.5,
    "enqueue_many": 0.4,
    "commit_fn": 0.15,
}
MAX_IDLE_CPU, MAX_IDLE_STATEMENTS, MAX_OTHER_P50 = 1.0, 2.0, 10.0
GAP = 50
"""Milliseconds after which a worker that had a job is idle again."""
WORKLOAD = Path(__file__).with_name("workload.py")


class Sizes:
    """How much of everything: jobs per round, and rounds."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 5 if quick else 11
        self.jobs = 6_000 if quick else 20_000
        # Of two processes the one that ends first waits for the other, and both wait for the beginning: that
        # is not what is measured.
        self.shared_rounds, self.shared_jobs = (7, 18_000) if quick else (11, 60_000)
        self.enqueue_rounds = 25
        self.singles = 100
        self.callers, self.each = 30, 20
        self.bulk = 3_000
        self.budget = 20.0 if quick else 600.0
        self.enqueue_budget = 16.0 if quick else 300.0
        self.shared_budget = 16.0 if quick else 300.0
        self.idle = 5 if quick else 20
        self.samples = 60 if quick else 300


def bench_jobs(server: Server, report: Report, sizes: Sizes) -> None:
    """Jobs completed per second by one worker process: ours, the peers, and the raw loop that claims and
    settles 100 at a time."""
    peer_set, raw = PeerSet(peers(server, IN_TURNS)), Raw(server.create_database())

    def raw_loop() -> float:
        raw.append(raw.rows(sizes.jobs))
        return rate(sizes.jobs, lambda: raw.done(sizes.jobs))

    with BenchApp(server.create_database()) as ours:
        ours.make_table()
        runs: dict[str, Callable[[], float]] = {
            "ours": lambda: ours.complete(sizes.jobs, ours.noop),
            "raw": raw_loop,
            "commit": lambda: ours.complete(sizes.jobs // 3, ours.pay),
        }
        for name, length in IN_TURNS.items():
            runs[name] = partial(peer_set.rate, name, int(sizes.jobs * length))
        found = Alternating(sizes.rounds, runs, sizes.budget)
    best = max(peer_set.peers, key=lambda name: statistics.median(found[name]))
    report.ratio("vs_best_peer", found["ours"], found[best])
    report.ratio("vs_raw", found["ours"], found["raw"])
    report.ratio("commit_fn", found["commit"], found["ours"])
    rates = "; ".join(f"{name}: {statistics.median(found[name]):,.0f}" for name in peer_set.peers)
    print(f"{'':20} peers, jobs/s: {rates}; {len(found['ours'])} rounds")
    peer_set.close()
    raw.close()


def bench_processes(server: Server, report: Report, sizes: Sizes) -> None:
    with workers(server.create_database(), 1) as one, workers(server.create_database(), 2) as two:
        sides = {"one": one, "two": two}
        runs = {name: partial(side.completed_by_others, sizes.shared_jobs) for name, side in sides.items()}
        found = Alternating(sizes.shared_rounds, runs, sizes.shared_budget)
    report.ratio("two_processes", found["two"], found["one"])


@contextlib.contextmanager
def workers(url: str, count: int) -> Iterator[BenchApp]:
    """So many worker processes, all there, and an App on their ledger."""
    with BenchApp(url) as ours:
        # The ledger is made before they come.
        ours.done()
        children = [subprocess.Popen([sys.executable, str(WORKLOAD), "work", url]) for _ in range(count)]
        try:
            until = time.monotonic() + PATIENCE
            while len(ours.app.workers.list()) < count:
                if time.monotonic() > until:
                    raise TimeoutError(f"{count} workers did not start within {PATIENCE:g} s")
                time.sleep(0.05)
            yield ours
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()


def bench_enqueues(server: Server, report: Report, sizes: Sizes) -> None:
    raw = Raw(server.create_database())

    def raw_single() -> float:
        rows = raw.rows(sizes.singles)
        return rate(sizes.singles, lambda: raw.append_each(rows))

    def raw_bulk() -> float:
        batches = [raw.rows(1000) for _ in range(sizes.bulk // 1000)]
        return rate(sizes.bulk, lambda: raw.append_all(batches))

    with BenchApp(server.create_database()) as ours:
        found = Alternating(
            sizes.enqueue_rounds,
            {
                "raw": raw_single,
                "one": lambda: rate(
                    sizes.singles, lambda: [ours.noop.enqueue(ARGUMENT) for _ in range(sizes.singles)]
                ),
                "callers": lambda: ours.put_from_threads(sizes.callers, sizes.each),
                "copy": raw_bulk,
                "many": lambda: rate(sizes.bulk, lambda: ours.put_many(ours.noop, sizes.bulk)),
            },
            sizes.enqueue_budget,
        )
    report.ratio("enqueue_single", found["one"], found["raw"])
    report.ratio("enqueue_30", found["callers"], found["raw"])
    report.ratio("enqueue_many", found["many"], found["copy"])
    raw.close()


def bench_latency(server: Server, report: Report, sizes: Sizes) -> None:
    url = server.create_database()
    enqueue = [sys.executable, str(WORKLOAD), "enqueue", url, str(sizes.samples), str(GAP)]
    with BenchApp(url) as ours, ours.working():
        waited = ours.picked_up_from(lambda: subprocess.run(enqueue, check=True), sizes.samples)
    report.latency = {"other_process_p50": round(statistics.median(waited), 3)}
    report.limit("other process p50", report.latency["other_process_p50"], MAX_OTHER_P50, "ms")


def idle(server: Server, seconds: int) -> dict[str, float]:
    """What a worker with nothing to do costs its machine and the server."""
    url = server.create_database()
    server.query(f"ALTER DATABASE {url.rpartition('/')[2]} SET log_statement = 'all'")
    with BenchApp(url) as ours, ours.working():
        # Started, and done with looking around.
        time.sleep(2.0)
        spent, executed = time.process_time(), statements(server)
        time.sleep(seconds)
        spent, executed = time.process_time() - spent, statements(server) - executed
    cost = {
        "cpu_percent": round(100 * spent / seconds, 3),
        "statements_per_second": round(executed / seconds, 3),
    }
    Report.limit("idle worker", cost["cpu_percent"], MAX_IDLE_CPU, "% CPU")
    Report.limit("idle worker", cost["statements_per_second"], MAX_IDLE_STATEMENTS, "statements a second")
    return cost


def statements(server: Server) -> int:
    """How many there are in the log, however they were sent."""
    log = server.log.read_bytes()
    return log.count(b"LOG:  statement: ") + log.count(b"LOG:  execute ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; ends within 90 s")
    parser.add_argument("--dir", type=Path, help="where to put the server (default: a temporary directory)")
    options = parser.parse_args()
    sizes = Sizes(options.quick)
    with place(options.dir) as folder:
        print(f"the disk syncs {sync_rate(folder):,.0f} times a second; 100-byte arguments, fsync on")
        with Server.start(folder / "server", fsync=True) as server:
            report = Report(TARGETS)
            for bench in (bench_enqueues, bench_latency, bench_jobs, bench_processes):
                bench(server, report, sizes)
            cost = idle(server, sizes.idle)
    ratios = {name: report.ratios[name] for name in TARGETS}
    print(json.dumps({"ratios": ratios, "latency_ms": report.latency, "idle": cost}))


if __name__ == "__main__":
    main()
