"""Memory under backlog: enqueue many jobs while a slow worker runs in the same process.

    python bench/soak.py [JOBS] [DIR]

Waiting jobs are in the ledger and not in the process, so memory must not grow with them. The last line is
JSON; the exit code is 1 above MAX_MB."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path

from ledger import resident

from towpath import App

MAX_MB = 150.0
CHUNK = 1000
ARGUMENT = "x" * 100


def soak(path: Path, jobs: int) -> dict[str, float]:
    app = App(f"sqlite:///{path}")
    ran = 0
    begun = threading.Event()

    async def slow(argument: str) -> None:
        nonlocal ran
        begun.set()
        await asyncio.sleep(0.05)
        ran += 1

    task = app.task(name="soak.slow", queue="soak")(slow)
    peak = resident()
    with app:
        task.enqueue(ARGUMENT)

        async def work() -> None:
            await app.arun(concurrency=8)

        loop = asyncio.new_event_loop()
        working = loop.create_task(work())
        thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([working])))
        thread.start()
        begun.wait()
        for _ in range(0, jobs, CHUNK):
            task.enqueue_many(task.of(ARGUMENT) for _ in range(CHUNK))
            peak = max(peak, resident())
        counts = app.queue("soak").stats().counts
        peak = max(peak, resident())
        loop.call_soon_threadsafe(working.cancel)
        thread.join()
        loop.close()
    return {
        "jobs": jobs,
        "ran": ran,
        "waiting": counts.waiting,
        "running": counts.running,
        "peak_mb": round(peak, 1),
    }


def main() -> int:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        found = soak(Path(folder) / "soak.db", jobs)
    print(json.dumps({**found, "max_mb": MAX_MB}))
    return int(found["peak_mb"] > MAX_MB)


if __name__ == "__main__":
    sys.exit(main())
