"""Speed of the ledgers, as ratios to the raw limit in the same run.

    python bench/ledger.py [--quick] [--dir DIR]

The last line is JSON. TARGETS has the target of each ratio.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from raw import Raw

from towpath.core.commands import Append, Appended, Claim, Claimed, Command, Settle, Want
from towpath.core.ids import IdSource
from towpath.core.job import After, Done, Spec
from towpath.core.job import ClaimedJob as Held
from towpath.ledger import Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger

TARGETS = {
    "append_single": 0.8,
    "append_bulk": 0.5,
    "claim_settle": 0.5,
    "claim_settle_busy": 0.25,
    "backlog_1m": 0.8,
    "scheduled_1m": 0.8,
    "serial_key": 0.8,
    "dag": 0.3,
    "memory": 0.1,
}
MAX_RSS = 60
LEASE = 3_600_000_000
NOW = 1_800_000_000_000_000
PAYLOAD = b"x" * 100
MILLION = 1_000_000
FILL = Path(__file__).with_name("fill.py")

_ids = IdSource(os.urandom)


def specs(count: int, queue: str = "q") -> list[Spec]:
    return [Spec(id=_ids.new(NOW), queue=queue, kind="bench", payload=PAYLOAD) for _ in range(count)]


def timed(run: Callable[[], object]) -> float:
    # Keep objects prepared for later rounds out of the garbage collection of this round.
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    run()
    spent = time.perf_counter() - started
    gc.unfreeze()
    return spent


def compare(
    rounds: int, jobs: int, ours: Callable[[], object], limit: Callable[[], object]
) -> tuple[float, float, float]:
    """Run both alternately, so that noise affects both. Returns (ratio of the speeds, µs per job of ours, of
    the limit)."""
    pairs = [(timed(ours), timed(limit)) for _ in range(rounds)]
    ratio = statistics.median(theirs / mine for mine, theirs in pairs)
    mine, theirs = (statistics.median(times) / jobs * 1e6 for times in zip(*pairs, strict=True))
    return ratio, mine, theirs


def append_each(ledger: Ledger, batches: Iterable[Sequence[Spec]]) -> None:
    for batch in batches:
        (answer,) = ledger.apply([Append(tuple(batch))], NOW)
        assert isinstance(answer, Appended)


def drain(ledger: Ledger, batches: int | None, n: int = 100, queue: str = "q") -> int:
    """Settle the jobs of the last batch and claim the next n, in one batch. Returns the number of settled
    jobs."""
    held: tuple[Held, ...] = ()
    settled = rounds = 0
    while batches is None or rounds < batches:
        commands: list[Command] = [Settle(claim.id, claim.fence, Done()) for claim in held]
        commands.append(Claim(owner="bench", wants=(Want(queue, n),), lease=LEASE))
        answer = ledger.apply(commands, NOW)[-1]
        assert isinstance(answer, Claimed)
        settled += len(held)
        held = answer.claims
        rounds += 1
        if not held and batches is None:
            break
    ledger.apply([Settle(claim.id, claim.fence, Done()) for claim in held], NOW)
    return settled + len(held)


class Report:
    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self.rss = 0.0
        print(f"{'':18} {'ratio':>7} {'target':>7} {'ours µs':>9} {'limit µs':>9}")

    def add(self, name: str, ratio: float, ours: float, limit: float) -> None:
        self.ratios[name] = round(ratio, 3)
        verdict = "" if ratio >= TARGETS[name] else "  below target"
        print(f"{name:18} {ratio:7.2f} {TARGETS[name]:7.2f} {ours:9.1f} {limit:9.1f}{verdict}", flush=True)


def bench_appends(folder: Path, report: Report, rounds: int) -> None:
    ledger, raw = SqliteLedger(folder / "ours.db"), Raw(folder / "raw.db", "q")
    # Many short rounds, because the time is mostly disk latency, which varies.
    singles, bulk, often = 100, 10, 3 * rounds
    ours = [specs(singles) for _ in range(often)]
    theirs = [[raw.rows([spec]) for spec in specs(singles)] for _ in range(often)]
    result = compare(
        often,
        singles,
        lambda: append_each(ledger, [[spec] for spec in ours.pop()]),
        lambda: raw.append_each(theirs.pop(0)),
    )
    report.add("append_single", *result)
    many = [[specs(1000) for _ in range(bulk)] for _ in range(rounds)]
    rows = [[raw.rows(specs(1000)) for _ in range(bulk)] for _ in range(rounds)]
    result = compare(
        rounds,
        bulk * 1000,
        lambda: append_each(ledger, many.pop()),
        lambda: raw.append_each(rows.pop(0)),
    )
    report.add("append_bulk", *result)
    bench_claims(ledger, raw, report, rounds)
    ledger.close()
    raw.close()


def bench_claims(ledger: Ledger, raw: Raw, report: Report, rounds: int) -> None:
    batches = 25

    def limit() -> None:
        held: list[tuple[int, int]] = []
        for _ in range(batches):
            held = raw.settle_and_claim(held, 100)
        raw.settle_and_claim(held, 0)

    report.add("claim_settle", *compare(rounds, batches * 100, lambda: drain(ledger, batches), limit))
    # The worker sets this switch interval; use it for both sides.
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    alone = [timed(lambda: drain(ledger, 10)) for _ in range(rounds)]
    stop = threading.Event()
    busy = threading.Thread(target=spin, args=(stop,))
    busy.start()
    beside = [timed(lambda: drain(ledger, 10)) for _ in range(rounds)]
    stop.set()
    busy.join()
    sys.setswitchinterval(before)
    mine, theirs = statistics.median(beside) / 1000 * 1e6, statistics.median(alone) / 1000 * 1e6
    report.add("claim_settle_busy", theirs / mine, mine, theirs)


def spin(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for number in range(10_000):
            total += number


BACKLOGS = {
    "backlog_1m": [f"ready {MILLION}"],
    # A million scheduled jobs and a quarter of a million blocked jobs in the same queue.
    "scheduled_1m": ["ready 30000", f"scheduled {MILLION}", f"blocked {MILLION // 4}"],
    "serial_key": ["ready 30000", "serial 100000"],
}


def bench_backlogs(folder: Path, report: Report, rounds: int) -> None:
    small = SqliteLedger(folder / "small.db")
    append_each(small, [specs(1000) for _ in range(10 * rounds + 10)])
    drain(small, 20)
    for name, content in BACKLOGS.items():
        path = folder / f"{name}.db"
        SqliteLedger(path).close()
        # In its own process, so that its memory is not counted here.
        subprocess.run([sys.executable, str(FILL), str(path), "q", *content], check=True)
        _compare_backlog(name, path, small, report, rounds)
        for file in folder.glob(f"{name}.db*"):
            file.unlink()
    small.close()


def _compare_backlog(name: str, path: Path, small: SqliteLedger, report: Report, rounds: int) -> None:
    large = SqliteLedger(path)
    report.add(name, *compare(rounds, 2000, lambda: drain(large, 20), lambda: drain(small, 20)))
    large.close()
    if name == "backlog_1m":
        # In a new process: here freed memory of earlier measurements would be used again.
        measured = subprocess.run(
            [sys.executable, __file__, "--growth", str(path)], check=True, capture_output=True, text=True
        )
        report.rss = float(measured.stdout)


def growth(path: Path) -> float:
    """Growth of the resident memory in MB with a million jobs, relative to a ledger with ten thousand."""
    with tempfile.TemporaryDirectory() as folder:
        small = SqliteLedger(Path(folder) / "small.db")
        append_each(small, [specs(1000) for _ in range(10)])
        drain(small, 50)
        small.close()
        before = resident()
        large = SqliteLedger(path)
        drain(large, 50)
        after = resident()
        large.close()
        return after - before


def resident() -> float:
    """Resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def bench_dag(folder: Path, report: Report, layers: int, width: int = 100) -> None:
    def run(name: str, graph: list[Spec]) -> float:
        ledger = SqliteLedger(folder / name)

        def work() -> None:
            append_each(ledger, [graph])
            assert drain(ledger, None) == len(graph)

        spent = timed(work)
        ledger.close()
        return spent

    count = layers * width
    plain = run("plain.db", specs(count))
    spent = run("dag.db", layered(layers, width))
    report.add("dag", plain / spent, spent / count * 1e6, plain / count * 1e6)


def layered(layers: int, width: int) -> list[Spec]:
    graph = specs(width)
    for layer in range(1, layers):
        above = graph[(layer - 1) * width :]
        for n, spec in enumerate(specs(width)):
            after = tuple(After(above[(n + step) % width].id) for step in (0, 7, 31))
            graph.append(Spec(id=spec.id, queue="q", kind="bench", payload=PAYLOAD, after=after))
    return graph


def bench_memory(report: Report, rounds: int) -> None:
    count = 10_000

    def ours() -> None:
        ledger = MemoryLedger()
        for batch in work.pop():
            append_each(ledger, [batch])
            drain(ledger, 1)

    def bare() -> None:
        lock, heap = threading.Lock(), list[tuple[int, int, bytes]]()
        for start in range(0, count, 100):
            for number in range(start, start + 100):
                with lock:
                    heapq.heappush(heap, (5, number, PAYLOAD))
            for _ in range(100):
                with lock:
                    heapq.heappop(heap)

    often = 2 * rounds
    work = [[specs(100) for _ in range(count // 100)] for _ in range(often)]
    report.add("memory", *compare(often, count, ours, bare))


def sync_rate(folder: Path) -> float:
    fd = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY)

    def run() -> None:
        for _ in range(200):
            os.pwrite(fd, PAYLOAD * 40, 0)
            os.fdatasync(fd)

    spent = timed(run)
    os.close(fd)
    return 200 / spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 50 s")
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    parser.add_argument("--growth", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.growth is not None:
        print(growth(options.growth))
        return
    rounds = 5 if options.quick else 15
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(f"{sync_rate(folder):,.0f} disk syncs per second; 100-byte payloads, WAL, synchronous=FULL")
        report = Report()
        bench_memory(report, rounds)
        bench_appends(folder, report, rounds)
        bench_backlogs(folder, report, rounds)
        bench_dag(folder, report, 200 if options.quick else 1000)
    print(f"{'rss_1m_mb':18} {report.rss:7.1f} {MAX_RSS:7.1f}")
    print(json.dumps({"ratios": report.ratios, "rss_1m_mb": round(report.rss, 1)}))


if __name__ == "__main__":
    main()
