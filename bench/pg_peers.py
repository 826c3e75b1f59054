"""The peers: other queues on PostgreSQL, each used as documented and tuned for speed, with
history and logged tables.

    python bench/pg_peers.py [--jobs N] [--rounds N] [--dir DIR]

tries each of them in every way that may be its best. What each does per job decides what can be compared:

pgqueuer        takes jobs in batches, deletes them in batches and writes a row of its log for each: a few
                commits per hundred jobs. It
                buffers what has ended for up to 0.1 s, so a crash repeats work.
                asyncpg and uvloop, as in its own benchmark.
procrastinate   fetches one job, finishes one job: two commits per job, as many at once as its concurrency
                allows. The job stays in
                its table as succeeded, with its events beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import procrastinate
import uvloop
from measure import Peer, PeerSet
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from towpath.testing.postgres import Server, place

ARGUMENT = "x" * 100
_CHUNK = 1000

for _name in ("procrastinate", "pgqueuer"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class PgQueuer:
    """One or several of its queue managers in one process, each with a connection, or all with a pool."""

    def __init__(self, url: str, batch: int = 500, managers: int = 1, pool: bool = False) -> None:
        self._url, self._batch, self._managers, self._pool = url, batch, managers, pool
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._db: Any = self._runner.run(asyncpg.connect(url))
        self._queries: Any = Queries(AsyncpgDriver(self._db))
        self._runner.run(self._queries.install())

    def fill(self, count: int) -> None:
        async def main() -> None:
            for start in range(0, count, _CHUNK):
                n = min(_CHUNK, count - start)
                await self._queries.enqueue(["noop"] * n, [ARGUMENT.encode()] * n, [0] * n)

        self._runner.run(main())

    def drain(self, count: int) -> float:
        return self._runner.run(self._drain(count))

    async def _drain(self, count: int) -> float:
        called, left = asyncio.Event(), count
        connections = [await self._connect() for _ in range(self._managers)]
        managers: list[Any] = [QueueManager(Queries(driver)) for driver, _ in connections]

        async def noop(job: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                called.set()

        for manager in managers:
            manager.entrypoint("noop", accepts_context=False)(noop)
        started = time.perf_counter()
        running = [
            asyncio.ensure_future(manager.run(dequeue_timeout=timedelta(seconds=1), batch_size=self._batch))
            for manager in managers
        ]
        await called.wait()
        # All have been called; a row leaves the queue with the commit that logs it.
        while await self._db.fetchval("SELECT EXISTS (SELECT FROM pgqueuer)"):
            await asyncio.sleep(0.001)
        spent = time.perf_counter() - started
        for manager in managers:
            manager.shutdown.set()
        await asyncio.gather(*running)
        for _, connection in connections:
            await connection.close()
        return spent

    async def _connect(self) -> tuple[Any, Any]:
        if self._pool:
            pool = await asyncpg.create_pool(self._url, min_size=4, max_size=4)
            return AsyncpgPoolDriver(pool), pool
        connection = await asyncpg.connect(self._url)
        return AsyncpgDriver(connection), connection

    def enqueue(self, count: int) -> float:
        return self._runner.run(_timed(lambda: self._queries.enqueue("noop", ARGUMENT.encode()), count))

    def close(self) -> None:
        self._runner.run(self._db.close())
        self._runner.close()


class Procrastinate:
    def __init__(self, url: str, concurrency: int) -> None:
        self._concurrency = concurrency
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        connector = procrastinate.PsycopgConnector(
            conninfo=url, min_size=concurrency + 1, max_size=concurrency + 1
        )
        self._app: Any = procrastinate.App(connector=connector)

        async def noop(argument: str) -> None:
            pass

        self._task: Any = self._app.task(name="noop", queue="bench")(noop)
        self._runner.run(self._open())

    async def _open(self) -> None:
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()

    def fill(self, count: int) -> None:
        async def main() -> None:
            for start in range(0, count, _CHUNK):
                await self._task.batch_defer_async(
                    *({"argument": ARGUMENT} for _ in range(min(_CHUNK, count - start)))
                )

        self._runner.run(main())

    def drain(self, count: int) -> float:
        async def main() -> None:
            how = {
                "wait": False,
                "listen_notify": False,
                "install_signal_handlers": False,
                "delete_jobs": "never",
            }
            await self._app.run_worker_async(queues=["bench"], concurrency=self._concurrency, **how)

        started = time.perf_counter()
        self._runner.run(main())
        return time.perf_counter() - started

    def enqueue(self, count: int) -> float:
        return self._runner.run(_timed(lambda: self._task.defer_async(argument=ARGUMENT), count))

    def close(self) -> None:
        self._runner.run(self._app.close_async())
        self._runner.close()


async def _timed(work: Callable[[], Awaitable[object]], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        await work()
    return time.perf_counter() - started


WAYS: Mapping[str, Callable[[str], Peer]] = {
    "pgqueuer, 100": lambda url: PgQueuer(url, 100),
    "pgqueuer, 500": PgQueuer,
    "pgqueuer, 1000": lambda url: PgQueuer(url, 1000),
    "pgqueuer, 500, pool": lambda url: PgQueuer(url, pool=True),
    "pgqueuer, 2 x 500": lambda url: PgQueuer(url, managers=2),
    "procrastinate, 1": lambda url: Procrastinate(url, 1),
    "procrastinate, 10": lambda url: Procrastinate(url, 10),
    "procrastinate, 30": lambda url: Procrastinate(url, 30),
}
IN_TURNS: Mapping[str, float] = {"pgqueuer, 500": 1.0, "pgqueuer, 500, pool": 1.0, "procrastinate, 30": 0.03}
"""What bench/postgres.py runs, and how long its rounds are relative to each other: a job of procrastinate
takes forty times as long."""


def peers(server: Server, names: Iterable[str]) -> dict[str, Peer]:
    """These, each in a database of its own."""
    return {name: WAYS[name](server.create_database()) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=10_000, help="jobs per round; a tenth of it for procrastinate"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to put the server (default: a temporary directory)")
    options = parser.parse_args()
    with place(options.dir) as folder, Server.start(folder / "server", fsync=True) as server:
        peer_set = PeerSet(peers(server, WAYS))
        done: dict[str, list[float]] = {way: [] for way in WAYS}
        put: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, peer in peer_set.peers.items():
                done[way].append(
                    peer_set.rate(way, options.jobs if "pgqueuer" in way else options.jobs // 10)
                )
                put[way].append(200 / peer.enqueue(200))
                peer.drain(200)
        peer_set.close()
        (version,) = server.query("SHOW server_version")[0]
    print(f"PostgreSQL {version}, fsync on, 100-byte arguments; medians of {options.rounds} rounds")
    print(f"{'':20} {'jobs/s':>8} {'enqueue/s':>10}")
    for way in WAYS:
        print(f"{way:20} {statistics.median(done[way]):8,.0f} {statistics.median(put[way]):10,.0f}")


if __name__ == "__main__":
    main()
