"""What a type checker must accept. It is checked, and it is run by nobody."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, assert_type

from towpath import App, Call, GroupHandle, Job, JobHandle, Task
from towpath.tasks import AsyncTask

app = App("memory://")


@app.task
def add(a: int, b: int = 2) -> int:
    return a + b


@app.task(queue="mail", max_attempts=3, backoff=[1, 2, timedelta(minutes=5)], unique="{to}", priority="high", process=True)
async def send(to: str, *, subject: str | None = None) -> bytes:
    return b""


@app.task()
def untouched() -> None: ...


@app.cron("*/5 * * * *", tz="Europe/Vienna", missed="once")
async def tick() -> None: ...


@app.every(timedelta(hours=1))
@app.task(queue="care")
def sweep(limit: int = 5) -> str:
    return ""


async def main() -> None:
    assert_type(add(1), int)
    coroutine: Coroutine[Any, Any, bytes] = send("x")
    assert_type(await coroutine, bytes)
    assert_type(await send("x", subject=None), bytes)
    assert_type(add.enqueue(1), JobHandle[int])
    assert_type(await add.aenqueue(1, b=5), JobHandle[int])
    assert_type(send.enqueue("x", subject="y"), JobHandle[bytes])
    assert_type((await send.aenqueue("x")).result(timeout=5), bytes)
    assert_type(await send.enqueue("x").aresult(), bytes)
    assert_type(add.of(1), Call[int])
    assert_type(add.enqueue_many([add.of(1), add.of(2, 3)]), list[JobHandle[int]])
    assert_type(await add.aenqueue_many(add.of(n) for n in range(5)), list[JobHandle[int]])
    later = add.options(delay=5, priority=3, after=[send.enqueue("x"), "id"], key="k", on_conflict="replace", window=60)
    assert_type(later.enqueue(1), JobHandle[int])
    assert_type(add.enqueue(1).status(), Job)
    assert_type(tick.enqueue(), JobHandle[None])
    assert_type(sweep.enqueue(limit=3), JobHandle[str])
    assert_type(app.group([add.of(1), add.of(2)], then=untouched.of(), on_failure="abort"), GroupHandle[int])
    assert_type(app.group([add.of(1)]).result(), list[int])
    with app.batch() as batch:
        assert_type(batch.add(send.of("x")), JobHandle[bytes])
    with app.testing() as bench:
        assert_type(bench.drain(), int)
        bench.assert_enqueued(add, a=1)


def takes_task(task: Task[[str], Any], other: AsyncTask[[], None]) -> None: ...
