"""Several processes that write to one SQLite ledger as fast as they can."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from towpath.ledger.sqlite.ledger import SqliteLedger

BOUND = 64 * 1024 * 1024
"""Of the `-wal` file, under any mix of writers and without a long reader."""
PROCESS = """
import sys, threading
from towpath import App

app = App(sys.argv[1])

@app.task(name="work")
def work(text: str) -> None:
    pass

def produce():
    while True:
        work.enqueue_many([work.of("x" * 500) for _ in range(20)])

if sys.argv[2] == "worker":
    app.run(concurrency=16)
for _ in range(4):
    threading.Thread(target=produce).start()
"""


class Growth(msgspec.Struct, frozen=True):
    largest: int
    """Bytes of the `-wal` file at its longest."""
    done: int
    """Jobs that were run."""


def write_together(
    path: Path, seconds: float, jobs: int | None = None, producers: int = 2, workers: int = 2
) -> Growth:
    """Real processes that write at once for so many seconds, or until so many jobs are done."""
    largest = done = 0
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(SqliteLedger(path)))
        for role in ("producer",) * producers + ("worker",) * workers:
            process = subprocess.Popen([sys.executable, "-c", PROCESS, f"sqlite:///{path}", role])
            stack.callback(process.wait)
            stack.callback(process.kill)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (jobs is None or done < jobs):
            largest = max(largest, size(path))
            done = sum(view.counts.done for view in ledger.queues().values())
            time.sleep(0.02)
    with closing(SqliteLedger(path)) as ledger:
        assert ledger.check() == []
    return Growth(largest, done)


def size(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size
