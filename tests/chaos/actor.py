"""One process of an experiment: a worker, or a producer.

    python -m tests.chaos.actor URL FOLDER NAME worker LEASE [POINT NTH]   # until SIGTERM or the fault point
    python -m tests.chaos.actor URL FOLDER NAME producer PACE BYTES  # PACE: seconds per request

`<name>.runs` and `<name>.asked` have the lines of `tests.support.postgres_member`. A job is recorded in
`<name>.asked` after the call that enqueued it has returned.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

import towpath
from tests.support.postgres_member import Acknowledged, LineFile, Tasks
from towpath import App
from towpath.errors import LedgerError
from towpath.tasks.new_jobs import new_id

TABLE = "chaos_applied"
CREATE = f"CREATE TABLE {TABLE} (id text NOT NULL, fence bigint NOT NULL)"
WORK = 0.005
"""Seconds that a handler takes at most."""


class Work(Tasks):
    """The tasks of a fleet, and one with a commit function. They have no limit of failures: the audit finds a
    failed job."""

    def __init__(self, app: App, folder: Path | None = None, name: str = "") -> None:
        super().__init__(app, folder, name)
        mark = "?" if app.engine.url.startswith("sqlite") else "%s"
        insert = f"INSERT INTO {TABLE} VALUES ({mark}, {mark})"
        dice = random.Random(name)

        async def plain(label: str) -> None:
            with self._recorded(label):
                await asyncio.sleep(dice.random() * WORK)

        async def apply(label: str) -> None:
            with self._recorded(label):
                running = towpath.current()
                row = (running.id, running.fence)
                running.commit(lambda db: db.execute(insert, row))
                await asyncio.sleep(dice.random() * WORK)

        self.plain: Any = app.task(name="plain", queue="fleet")(plain)
        self.apply: Any = app.task(name="apply", queue="fleet")(apply)


class Producer:
    """Enqueues jobs of every kind, each request until it is acknowledged: its ids make a repetition
    harmless."""

    def __init__(self, app: App, folder: Path, name: str, size: int) -> None:
        self._app, self._work = app, Work(app)
        self._asked = LineFile(folder / f"{name}.asked")
        self._dice = random.Random(name)
        self._label = self._dice.randbytes(size).hex()[:size]
        self.over = threading.Event()

    def run(self, pace: float) -> None:
        while not self.over.wait(pace * 2 * self._dice.random()):
            ids = [new_id() for _ in range(self._dice.choice((1, 1, 1, 3, 20)))]
            tasks = [
                self._dice.choice((self._work.plain, self._work.plain, self._work.apply, self._work.thread))
                for _ in ids
            ]
            while not self._put(ids, tasks):
                if self.over.wait(0.05):
                    return
            for id in ids:
                self._asked.write(Acknowledged(id))

    def _put(self, ids: list[str], tasks: list[Any]) -> bool:
        """Several jobs are one batch, in which each waits for the one before."""
        try:
            if len(ids) == 1:
                tasks[0].options(id=ids[0]).enqueue(self._label)
                return True
            with self._app.batch():
                for n, (id, task) in enumerate(zip(ids, tasks, strict=True)):
                    task.options(id=id, after=ids[n - 1 : n]).enqueue(self._label)
        except LedgerError as error:
            if error.fatal:
                raise
            return False
        return True


def _die_at(point: str, nth: int) -> None:
    """Give the SQLite ledgers that this process opens a fault that kills it."""
    from towpath.ledger.sqlite import ledger
    from towpath.testing.faults import die_at

    plain, fault = ledger.options_of, die_at(point, nth)

    def options_of(url: str) -> tuple[str, ledger.SqliteOptions]:
        path, options = plain(url)
        return path, msgspec.structs.replace(options, fault=fault)

    ledger.options_of = options_of


def main() -> None:
    url, folder, name, role, *rest = sys.argv[1:]
    if role == "worker":
        lease, *fault = rest
        if fault:
            _die_at(fault[0], int(fault[1]))
        app = App(url, name=name)
        Work(app, Path(folder), name)
        with app:
            app.run(concurrency=8, lease=float(lease))
        return
    with App(url, name=name) as app:
        producer = Producer(app, Path(folder), name, int(rest[1]))
        signal.signal(signal.SIGTERM, lambda *_: producer.over.set())
        producer.run(float(rest[0]))


if __name__ == "__main__":
    main()
