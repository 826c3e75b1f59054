"""A worker process with durable functions: `python stepper.py <url> <name> <lease>`, until a stop signal.

Each step writes a line to the file of its job. Where `stop` says so, the process of that name prints `at
<place>` and waits to be killed, or stops itself with SIGSTOP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import towpath
from towpath import current, step

NAME = sys.argv[2] if len(sys.argv) > 2 else ""
app = towpath.App(sys.argv[1] if len(sys.argv) > 1 else "memory://", name=NAME or None)


def reached(folder: str, place: str, stop: str) -> None:
    """`stop` is `<process> <what> <place>`."""
    process, what, where = stop.split(" ")
    if (process, where) != (NAME, place):
        return
    os.write(1, f"at {place}\n".encode())
    if what == "freeze":
        with app.engine.committer._commit:  # not inside a transaction, which would lock the whole file
            os.kill(os.getpid(), signal.SIGSTOP)
            # This thread may run on for a moment before the signal stops it.
            while not Path(folder, "go").exists():
                time.sleep(0.005)
    else:
        threading.Event().wait()


def effect(folder: str, name: str, stop: str) -> str:
    with Path(folder, "effects").open("a") as log:
        log.write(f"{name} {NAME}\n")
    reached(folder, f"in-{name}", stop)
    return f"{name} by {NAME}"


async def aeffect(folder: str, name: str, stop: str) -> str:
    return await asyncio.to_thread(effect, folder, name, stop)


@app.task(name="plain")
def plain(folder: str, stop: str) -> list[str]:
    found = []
    for name in ("one", "two", "three"):
        found.append(step(effect, folder, name, stop, name=name))
        reached(folder, f"after-{name}", stop)
    return [*found, str(current().attempt)]


@app.task(name="process", process=True)
def process(folder: str, stop: str) -> list[str]:
    return plain(folder, stop)


@app.task(name="coroutine")
async def coroutine(folder: str, stop: str) -> list[str]:
    found = []
    for name in ("one", "two", "three"):
        found.append(await step(aeffect, folder, name, stop, name=name))
        reached(folder, f"after-{name}", stop)
    return [*found, str(current().attempt)]


@app.task(name="undo", queue="undos", max_attempts=20, backoff=[0])
def undo(folder: str, name: str, stop: str) -> None:
    effect(folder, f"undo-{name}", stop)


@app.task(name="saga", max_attempts=1)
def saga(folder: str, stop: str) -> None:
    for name in ("one", "two"):
        step(effect, folder, name, stop, name=name, undo=undo.of(folder, name, stop))
        reached(folder, f"after-{name}", stop)
    raise towpath.Fail("the end")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    app.run(concurrency=2, grace=0.0, lease=float(sys.argv[3]))
    app.close()
