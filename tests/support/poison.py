"""One job that ends its process, among other jobs, and a supervisor that restarts the worker.

`supervise` is for tests. `python -m tests.support.poison URL` runs the full size: 500 innocents of 0.2 s,
concurrency 32.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from towpath import App
from towpath.core.job import Job, State
from towpath.core.views import Query

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "poisoned"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: how long an innocent job takes. `patience`: seconds until the supervisor gives up."""

    innocents: int = 500
    seconds: float = 0.2
    concurrency: int = 32
    lease: float = 2.0
    patience: float = 300.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    poison: str
    dead: list[str]
    done: int
    starts: int
    losses: int
    """The most that an innocent job lost."""


def app_of(url: str, load: Load) -> App:
    app = App(url)

    @app.task(name="poison", queue=QUEUE)
    async def poison() -> None:
        os._exit(3)

    @app.task(name="innocent", queue=QUEUE)
    async def innocent(n: int) -> int:
        await asyncio.sleep(load.seconds)
        return n

    return app


def supervise(url: str, load: Load) -> Found:
    """Append the jobs, start the worker again whenever it ends, until nothing is left to do."""
    until = time.monotonic() + load.patience
    with app_of(url, load) as app:
        # The supervisor does the upkeep, so that no time passes until a dead caretaker is replaced.
        app.engine.start_caretaker()
        poison = app.tasks["poison"].enqueue()
        innocent = app.tasks["innocent"]
        innocent.enqueue_many([innocent.of(n) for n in range(load.innocents)])
        starts, worker = 0, None
        try:
            while time.monotonic() < until and _unfinished(app):
                if worker is None or worker.poll() is not None:
                    starts += 1
                    worker = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.poison", url, "--work", _encoded(load)],
                        cwd=ROOT,
                    )
                app.ledger.wait(app.ledger.version(), 0.1)
        finally:
            if worker is not None:
                worker.send_signal(signal.SIGTERM)
                worker.wait(30)
        jobs = _jobs(app)
        dead = [job.id for job in jobs if job.state is State.FAILED]
        losses = max(job.losses for job in jobs if job.id != poison.id)
        done = sum(job.state is State.DONE for job in jobs)
        assert app.ledger.check() == []
        return Found(poison=poison.id, dead=dead, done=done, starts=starts, losses=losses)


def _unfinished(app: App) -> int:
    counts = app.ledger.queues()[QUEUE].counts
    return counts.blocked + counts.scheduled + counts.ready + counts.running


def _jobs(app: App) -> list[Job]:
    found: list[Job] = []
    query = Query(queue=QUEUE)
    while True:
        page = app.ledger.find(query)
        found += page.jobs
        if page.next is None:
            return found
        query = msgspec.structs.replace(query, page=page.next)


def _encoded(load: Load) -> str:
    return msgspec.json.encode(load).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--work", metavar="LOAD")
    given = parser.parse_args()
    if given.work is None:
        print(supervise(given.url, Load()))
        return
    load = msgspec.json.decode(given.work, type=Load)
    with app_of(given.url, load) as app:
        app.run(concurrency=load.concurrency, lease=load.lease, grace=1)


if __name__ == "__main__":
    main()
