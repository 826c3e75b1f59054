"""`move` of bench/plans.py: a shard of 1,000,000 rows moves from one PostgreSQL server to another, beside a
bare CREATE SUBSCRIPTION of the same table on the same servers. During both a writer inserts rows.

    python bench/shard_moves.py --quick     # 100,000 rows

The bare copy ends when the subscription is ready. The move ends when its plan is done: with the checks before
it, verified rows, the switch on three nodes and the removal of the old table. The last line is JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from towpath import App
from towpath.apps.shards.catalogue import Catalogue, Shard, TableRecord
from towpath.apps.shards.columns import described
from towpath.apps.shards.moves import move_plan
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.plans import create_plan
from towpath.apps.shards.routines import Cluster, install
from towpath.clock import SystemClock
from towpath.testing.postgres import Server, place

ROWS, QUICK_ROWS = 1_000_000, 100_000
NODES = ("n1", "n2", "n3")
COLUMNS = "id bigint, name text NOT NULL, at timestamptz NOT NULL DEFAULT now(), amount numeric"
SETTINGS = {
    "wal_level": "logical",
    "wal_retrieve_retry_interval": "100ms",
    "max_wal_size": "8GB",
    "shared_buffers": "256MB",
}
_FILL = """
INSERT INTO public.items (id, name, at, amount)
SELECT g, 'item number ' || g, now(), g * 1.5 FROM generate_series(1, %s) g
"""


class InsertTimes:
    """Inserts rows through one node; `longest` is the longest time of one insert, in seconds."""

    def __init__(self, url: str) -> None:
        self.longest, self.rows = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not self._stop.wait(0.002):
                begun = time.perf_counter()
                connection.execute(
                    "INSERT INTO public.items (id, name) VALUES (%s, 'w')", [1_000_000_000 + self.rows]
                )
                self.longest = max(self.longest, time.perf_counter() - begun)
                self.rows += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(NODES)) as threads:
        folders = [folder / node for node in NODES]
        started = list(threads.map(lambda each: Server.start(each, settings=SETTINGS), folders))
        for server in started:
            stack.enter_context(server)
        yield dict(zip(NODES, started, strict=True))


def bare_copy(source: Server, target: Server, rows: int) -> float:
    """Seconds of a bare CREATE SUBSCRIPTION from its statement until the table is ready, beside a writer."""
    for server in (source, target):
        server.query(f"CREATE TABLE public.items ({COLUMNS}, PRIMARY KEY (id))")
    source.query(_FILL, [rows])
    source.query("CREATE PUBLICATION bare FOR TABLE public.items")
    writer = InsertTimes(source.url())
    begun = time.perf_counter()
    target.query(f"CREATE SUBSCRIPTION bare CONNECTION '{source.url()}' PUBLICATION bare")
    with psycopg.connect(target.url(), autocommit=True) as connection:
        ready = "SELECT srsubstate = 'r' FROM pg_subscription_rel"
        while connection.execute(ready).fetchone() != (True,):
            time.sleep(0.01)
    seconds = time.perf_counter() - begun
    writer.close()
    target.query("DROP SUBSCRIPTION bare")
    for server in (source, target):
        server.query("DROP TABLE public.items")
    source.query("DROP PUBLICATION bare")
    return seconds


def moved(servers: dict[str, Server], folder: Path, rows: int) -> dict[str, Any]:
    """Seconds of the whole plan of a move, and the pause of the writer."""
    nodes = Nodes({node: server.url() for node, server in servers.items()})
    app = App(f"sqlite:///{folder / 'ledger.db'}", name="bench")
    cluster = Cluster(nodes, Catalogue(app.ledger, SystemClock()))
    install(app, cluster)
    with nodes.connect("n1") as connection:
        columns, constraints = described(connection, COLUMNS, ("id",))
    record = TableRecord(
        table="items",
        columns=columns,
        key=("id",),
        constraints=constraints,
        rf=1,
        nodes=NODES,
        shards=(Shard(nodes=("n1",)),),
        plan="create-items",
    )
    stop = threading.Event()
    queues = tuple(f"node/{node}" for node in NODES)
    worker = threading.Thread(target=_work, args=(app, queues, stop), daemon=True)
    worker.start()
    try:
        assert app.plans.submit(create_plan(record), id="create-items").wait(60).state == "done"
        servers["n1"].query(_FILL, [rows])
        writer = InsertTimes(servers["n3"].url())
        begun = time.perf_counter()
        plan = move_plan(cluster.catalogue.get("items"), 0, "n1", "n2", "move")
        handle = app.plans.submit(plan, id="move")
        state = handle.wait(600).state
        seconds = time.perf_counter() - begun
        writer.close()
        assert state == "done", handle.status()
        steps = {step.name: step for step in handle.steps()}
        count = servers["n3"].query("SELECT count(*) FROM public.items")[0][0]
        assert count == rows + writer.rows, (count, rows, writer.rows)
        return {
            "seconds": seconds,
            "pause": steps["pivot"].result["pause"],
            "longest_insert": writer.longest,
            "inserted": writer.rows,
            "steps": {name: round(step.duration or 0.0, 3) for name, step in steps.items()},
        }
    finally:
        stop.set()
        worker.join(30)
        app.close()


def _work(app: App, queues: tuple[str, ...], stop: threading.Event) -> None:
    import asyncio

    async def until_stopped() -> None:
        running = asyncio.create_task(app.arun(queues=queues))
        await asyncio.to_thread(stop.wait)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(until_stopped())


def move(rows: int = ROWS) -> dict[str, Any]:
    """The figures of the bench: `ratio` is to be at most 1.3, `pause` and `longest_insert` below 2 s."""
    with place() as folder, servers(folder) as started, tempfile.TemporaryDirectory() as files:
        bare = bare_copy(started["n1"], started["n2"], rows)
        found = moved(started, Path(files), rows)
    return {"rows": rows, "bare_seconds": bare, "ratio": found["seconds"] / bare, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    found = move(QUICK_ROWS if given.quick else ROWS)
    print(
        f"{found['rows']} rows: bare copy {found['bare_seconds']:.2f} s, move {found['seconds']:.2f} s"
        f" ({found['ratio']:.2f} x), pause {found['pause']:.3f} s, longest insert"
        f" {found['longest_insert']:.3f} s",
        file=sys.stderr,
    )
    print(json.dumps({"move": found}))


if __name__ == "__main__":
    main()
