"""How soon the jobs of a killed worker run again elsewhere: SIGKILL of a worker with 200 running jobs, beside
an idle second worker, with default settings.

    python bench/recovery.py [--runs 10] [--ledger sqlite,postgres]

The time is from the signal until all 200 run in the second worker. The killed worker is the caretaker in
every other run. A run that misses its target is marked; TARGETS are for two idle cores. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from towpath import App, State
from towpath.commands import Query

TARGETS = {"sqlite": 1.0, "postgres": 4.0}
"""Seconds."""
HELD = 200
PATIENCE = 60.0
CARETAKER = "towpath/caretaker"
WORKER = f"""
import asyncio, sys
import towpath

app = towpath.App(sys.argv[1], name=sys.argv[2])

@app.task(name="hold")
async def hold(n: int) -> None:
    await asyncio.Event().wait()

app.run(concurrency={HELD}, grace=0.0)
"""


@contextmanager
def worker(url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, url, name], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"not within {PATIENCE:g} s")
        time.sleep(0.01)


def running(app: App, name: str) -> int:
    found = app.ledger.find(Query(states=(State.RUNNING,), bodies=False, limit=1000)).jobs
    return sum((job.owner or "").startswith(f"{name}#") for job in found)


def caretaker(app: App) -> str:
    note = app.ledger.note(CARETAKER)
    return "" if note is None else note.value.decode().partition("#")[0]


def recover(url: str, kill_caretaker: bool) -> float:
    """Seconds from the kill of the first worker until the second runs all its jobs."""
    with App(url) as app, ExitStack() as stack:
        task = app.task(name="hold")(lambda n: None)
        if not kill_caretaker:
            stack.enter_context(worker(url, "caretaker"))
            until(lambda: caretaker(app) == "caretaker")
            # Paused, it stays the caretaker and takes no jobs.
            app.workers.pause("caretaker")
            until(lambda: any(each.paused for each in app.workers.list()))
        task.enqueue_many([task.of(n) for n in range(HELD)])
        first = stack.enter_context(worker(url, "first"))
        until(lambda: running(app, "first") == HELD)
        if kill_caretaker:
            until(lambda: caretaker(app) == "first")
        stack.enter_context(worker(url, "second"))
        until(lambda: any(each.name == "second" for each in app.workers.list()))
        killed = time.monotonic()
        first.kill()
        until(lambda: running(app, "second") == HELD)
        return time.monotonic() - killed


def measure(ledger: str, runs: int) -> list[float]:
    times = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if ledger == "postgres":
            from towpath.testing.postgres import Server, place

            server = stack.enter_context(Server.start(stack.enter_context(place()) / "bench", fsync=True))
        for run in range(runs):
            url = f"sqlite:///{folder / f'{run}.db'}" if ledger == "sqlite" else server.create_database()
            took = recover(url, kill_caretaker=run % 2 == 0)
            times.append(took)
            missed = "" if took <= TARGETS[ledger] else f"  more than {TARGETS[ledger]:g} s"
            role = "the caretaker" if run % 2 == 0 else "not the caretaker"
            print(f"{ledger:9} run {run + 1:2}: {took:5.2f} s  ({role}){missed}", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds until the jobs of a killed worker run again.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ledger", default="sqlite,postgres")
    given = parser.parse_args()
    print(f"{HELD} running jobs, default settings; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    report: dict[str, dict[str, float]] = {}
    for ledger in given.ledger.split(","):
        times = measure(ledger, given.runs)
        report[ledger] = {
            "median": round(statistics.median(times), 2),
            "min": round(min(times), 2),
            "max": round(max(times), 2),
            "target": TARGETS[ledger],
            "missed": sum(took > TARGETS[ledger] for took in times),
        }
    for ledger, found in report.items():
        spread = f"median {found['median']} s, {found['min']} to {found['max']} s"
        print(f"{ledger:9} {spread}; at most {found['target']:g} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
