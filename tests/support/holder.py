"""A worker process with handlers that wait: `python holder.py <url> <name> <concurrency>`, until a stop
signal."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import towpath

app = towpath.App(
    sys.argv[1] if len(sys.argv) > 1 else "memory://", name=sys.argv[2] if len(sys.argv) > 2 else "holder"
)


@app.task(name="hold")
async def hold(n: int) -> None:
    await asyncio.Event().wait()


@app.task(name="forks")
def forks() -> None:
    """Starts a child that outlives its parent."""
    if os.fork() == 0:
        os.write(1, f"child {os.getpid()}\n".encode())
        sys.stdin.readline()
        os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    app.run(concurrency=int(sys.argv[3]), grace=0.0)
    app.close()
