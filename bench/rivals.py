"""Jobs completed per second by Towpath and by other job systems, in alternating rounds of one run.

    python bench/rivals.py [--quick] [--only NAME,NAME] [--dir DIR]

Each round of each system is a new process with a new database. It enqueues no-op jobs with an argument of 100
bytes (not measured), starts one worker and measures the time until all jobs have run and are stored as
finished. Each system is used as documented, in its fastest documented configuration, with
several configurations tried. The table has the durability of each.

The last line is JSON: jobs per second by system, the median of the rounds, and the ratio to Towpath.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from towpath.testing.postgres import Server, place

ARGUMENT = "x" * 100
PATIENCE = 300.0
"""Seconds after which a round counts as failed."""


class Countdown:
    """Counts handler calls in any thread; `done` is set by the last one."""

    def __init__(self, count: int) -> None:
        self._left = itertools.count(count, -1)
        self.done = threading.Event()

    def call(self, argument: object = None) -> None:
        if next(self._left) == 1:
            self.done.set()


def wait_until(check: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > until:
            raise TimeoutError(f"not finished within {PATIENCE:g} s")
        time.sleep(0.002)


def towpath_rate(url: str, count: int) -> float:
    from towpath import App

    app, calls = App(url), Countdown(count)

    async def noop(argument: str) -> None:
        calls.call()

    task: Any = app.task(name="noop", queue="bench")(noop)
    for _ in range(0, count, 1000):
        task.enqueue_many(task.of(ARGUMENT) for _ in range(min(count, 1000)))
    started = time.perf_counter()
    threading.Thread(target=app.run, daemon=True).start()
    calls.done.wait(PATIENCE)
    wait_until(lambda: app.ledger.queues()["bench"].counts.done == count)
    return count / (time.perf_counter() - started)


def huey_rate(url: str, count: int) -> float:
    import huey

    path, calls = url.removeprefix("sqlite:///"), Countdown(count)
    logging.getLogger("huey").setLevel(logging.ERROR)
    app = huey.SqliteHuey("bench", filename=path, fsync=True, results=False)
    task: Any = app.task()(calls.call)
    stage = huey.SqliteHuey("bench", filename=path, fsync=False).storage
    for _ in range(count):
        stage.enqueue(app.serialize_task(task.s(ARGUMENT)), 0)
    stage.close()
    started = time.perf_counter()
    app.create_consumer(
        workers=4, periodic=False, check_worker_health=False, initial_delay=0.001, max_delay=0.01
    ).start()
    calls.done.wait(PATIENCE)
    return count / (time.perf_counter() - started)


def flexiq_rate(url: str, count: int) -> float:
    import flexiq

    logging.disable(logging.INFO)

    calls = Countdown(count)
    store: dict[str, Any] = {"db_path": url.removeprefix("sqlite:///")}
    if url.startswith("postgresql"):
        store = {"backend": "postgres", "db_url": url}
    queue = flexiq.Queue(**store, workers=4, scheduler_batch_size=100, scheduler_poll_interval_ms=1)
    queue.task(name="noop")(calls.call)
    for start in range(0, count, 1000):
        queue.enqueue_many("noop", [(ARGUMENT,)] * min(1000, count - start))
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        threading.Thread(target=queue.run_worker, daemon=True).start()
        calls.done.wait(PATIENCE)
        wait_until(lambda: queue.stats()["completed"] >= count)
    return count / (time.perf_counter() - started)


def dbos_rate(url: str, count: int) -> float:
    from dbos import DBOS, DBOSClient, DBOSConfig

    calls = Countdown(count)
    config: DBOSConfig = {"name": "bench", "system_database_url": url, "log_level": "ERROR"}
    DBOS(config=config)

    def noop(argument: str) -> None:
        calls.call()

    DBOS.workflow(name="noop")(noop)
    DBOS.launch()
    client = DBOSClient(system_database_url=url)
    options: Any = {"workflow_name": "noop", "queue_name": "bench"}
    for _ in range(count):
        client.enqueue(options, ARGUMENT)
    started = time.perf_counter()
    DBOS.register_queue("bench", polling_interval_sec=0.01)
    calls.done.wait(PATIENCE)
    wait_until(lambda: not DBOS.list_workflows(status=["ENQUEUED", "PENDING"], limit=1))
    return count / (time.perf_counter() - started)


def pgqueuer_rate(url: str, count: int) -> float:
    import pg_peers

    peer = pg_peers.PgQueuer(url)
    peer.fill(count)
    return count / peer.drain(count)


def awa_rate(url: str, count: int) -> float:
    return asyncio.run(_awa(url, count))


async def _awa(url: str, count: int) -> float:
    import awa

    client: Any = awa.AsyncClient(url)
    await client.migrate()
    await client.install_queue_storage()  # its newest storage engine
    calls = Countdown(count)

    async def handler(job: Any) -> None:
        calls.call()

    client.task(AwaNoop, queue="bench")(handler)
    for start in range(0, count, 1000):
        await client.enqueue_many_copy([AwaNoop(ARGUMENT)] * min(1000, count - start), queue="bench")
    started = time.perf_counter()
    await client.start([("bench", 200)], poll_interval_ms=10)
    await asyncio.to_thread(calls.done.wait, PATIENCE)
    # Completion is batched behind the handler.
    until = time.monotonic() + PATIENCE
    while await client.list_jobs(state="running", limit=1) and time.monotonic() < until:
        await asyncio.sleep(0.005)
    return count / (time.perf_counter() - started)


@dataclass
class AwaNoop:
    """The arguments of a job of Awa."""

    argument: str


class Rival(NamedTuple):
    """A system on a database. `jobs`: jobs per round, so that a round takes some seconds."""

    run: Callable[[str, int], float]
    database: str
    jobs: int
    durability: str


RIVALS: Mapping[str, Rival] = {
    "towpath, sqlite": Rival(towpath_rate, "sqlite", 60_000, "WAL, synchronous=FULL"),
    "huey": Rival(huey_rate, "sqlite", 6_000, "WAL, synchronous=FULL; a crash loses running tasks"),
    "flexiq, sqlite": Rival(flexiq_rate, "sqlite", 4_000, "WAL, synchronous=NORMAL: no sync per commit"),
    "dbos, sqlite": Rival(dbos_rate, "sqlite", 1_000, "rollback journal, synchronous=FULL"),
    "towpath, postgres": Rival(towpath_rate, "postgres", 40_000, "fsync and synchronous_commit on"),
    "pgqueuer": Rival(pgqueuer_rate, "postgres", 20_000, "the same; buffers ends for 0.1 s"),
    "awa": Rival(awa_rate, "postgres", 10_000, "the same; batches completions"),
    "flexiq, postgres": Rival(flexiq_rate, "postgres", 2_000, "the same"),
    "dbos, postgres": Rival(dbos_rate, "postgres", 1_000, "the same"),
}


def measure(name: str, url: str, jobs: int) -> float:
    """Jobs per second of one round, in a process of its own."""
    command = [sys.executable, __file__, "--round", name, url, str(jobs)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False, cwd=Path(__file__).parent
    )
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        raise RuntimeError(f"{name}: {ended.stderr.strip()[-2000:]}")
    return float(lines[-1])


def one_round(name: str, url: str, jobs: str) -> None:
    print(RIVALS[name].run(url, int(jobs)), flush=True)
    # Workers of some systems have no way to end from another thread.
    os._exit(0)


@contextlib.contextmanager
def databases(folder: Path, names: list[str]) -> Iterator[Callable[[str], str]]:
    """A function that makes a new database for a system and returns its URL."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        server: Server | None = None
        if any(RIVALS[name].database == "postgres" for name in names):
            server = stack.enter_context(Server.start(folder / "server", fsync=True))

        def make(name: str) -> str:
            if RIVALS[name].database == "sqlite":
                return f"sqlite:///{folder / f'{next(numbers)}.db'}"
            assert server is not None
            return server.create_database()

        yield make


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--only", default=",".join(RIVALS), help="systems, by the beginning of their names")
    parser.add_argument("--dir", type=Path, help="where to put the databases (default: temporary)")
    parser.add_argument("--round", nargs=3, metavar=("NAME", "URL", "JOBS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        one_round(*options.round)
    chosen = [name for name in RIVALS if any(name.startswith(each) for each in options.only.split(","))]
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    with place(options.dir) as folder, databases(folder, chosen) as make:
        for _ in range(3 if options.quick else 7):
            for name in chosen:
                rates[name].append(measure(name, make(name), RIVALS[name].jobs))
    print(f"{'':20} {'jobs/s':>8} {'towpath is':>11}  durability")
    found = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in found.items():
        ours = found.get(f"towpath, {RIVALS[name].database}")
        times = f"{ours / value:.1f} x" if ours else ""
        print(f"{name:20} {value:8,.0f} {times:>11}  {RIVALS[name].durability}")
    print(json.dumps({"rates": {name: round(value) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
