"""Tasks that are run in processes of their own."""

from __future__ import annotations

import asyncio
import os
import time

from towpath import App, Breaker, current

app = App("memory://")


@app.task(process=True)
def pid(n: int) -> list[int]:
    job = current()
    job.progress(n, 10)
    job.checkpoint({"n": n})
    return [n, os.getpid()]


@app.task(process=True)
async def slowly(n: int) -> int:
    return n


@app.task(process=True, max_attempts=1)
def breaks(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "commit":
        current().commit(print)
    raise ValueError(how)


@app.task(process=True, timeout=0.5, max_attempts=1)
def hangs() -> None:
    time.sleep(600)


@app.task(process=True)
def spawns() -> str:
    return current().spawn(slowly.of(7)).id


@app.task(process=True, max_attempts=1)
def waits(id: str) -> None:
    app.job(id).result()


@app.task
async def quick(n: int) -> int:
    return n


@app.task(timeout=0.2, max_attempts=1)
async def endless() -> None:
    await asyncio.sleep(600)


@app.task(process=True, breaker=Breaker("processes", failures=2, cooldown=600), max_attempts=1)
def dies(how: str) -> None:
    if how == "exit":
        os._exit(3)
    raise ValueError(how)
