"""Tasks with hooks that are run in processes of their own. Hooks write what they do to the file `TRACE`; with
`BROKEN` one of the lifespans fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from towpath import App, Hooks, JobFailure, Running, provided

TRACE, BROKEN = "TOWPATH_TEST_TRACE", "TOWPATH_TEST_BROKEN"
hooks = Hooks()
app = App("memory://", hooks=hooks)


def write(text: str) -> None:
    with Path(os.environ[TRACE]).open("a") as file:
        file.write(f"{os.getpid()} {text}\n")


class Pool:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop


@hooks.lifespan
def first() -> Iterator[None]:
    if multiprocessing.parent_process() is not None and BROKEN in os.environ:
        raise OSError("no route to the database")
    write("start")
    yield
    write("stop")


@hooks.lifespan
async def pool() -> AsyncIterator[Pool]:
    write("open")
    yield Pool(asyncio.get_running_loop())
    write("close")


@hooks.middleware
async def around(job: Running) -> AsyncIterator[None]:
    write("before")
    await asyncio.sleep(0)
    yield
    write("after")


@app.task(process=True, max_attempts=1)
def sync(pool: Pool = provided) -> list[int | bool]:
    return [os.getpid(), pool.loop.is_running(), threading.current_thread() is threading.main_thread()]


@app.task(process=True, max_attempts=1)
async def later(pool: Pool = provided) -> list[int | bool]:
    return [os.getpid(), pool.loop is asyncio.get_running_loop()]


failures: list[JobFailure] = []
hooks.on_dead(failures.append)
