"""Two workers, of which the first holds all jobs and is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import holder
from tests.support.waiting import WAIT, until
from towpath import App, State
from towpath.commands import Query

HELD = 200


@contextlib.contextmanager
def process(url: str, folder: Path, name: str, concurrency: int = HELD) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, holder.__file__, url, name, str(concurrency)]
    with (folder / f"{name}.log").open("wb") as log:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=WAIT)


def running(app: App, name: str) -> int:
    found = app.ledger.find(Query(states=(State.RUNNING,), bodies=False, limit=1000)).jobs
    return len([job for job in found if (job.owner or "").startswith(f"{name}#")])


def caretaker_of(app: App) -> str:
    note = app.ledger.note("towpath/caretaker")
    return "" if note is None else note.value.decode().partition("#")[0]


@contextlib.contextmanager
def two_workers(
    app: App, folder: Path, caretaker: str
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """The first holds all jobs, the second waits for some. `caretaker` is the first, or this process."""

    @app.task(name="hold")
    async def hold(n: int) -> None: ...

    if caretaker != "first":
        app.engine.start_caretaker()
        until(lambda: caretaker_of(app) != "")
    hold.enqueue_many([hold.of(n) for n in range(HELD)])
    with process(app.engine.url, folder, "first") as first:
        until(lambda: running(app, "first") == HELD)
        until(lambda: (caretaker_of(app) == "first") == (caretaker == "first"))
        with process(app.engine.url, folder, "second") as second:
            until(lambda: any(worker.name == "second" for worker in app.workers.list()))
            yield first, second
