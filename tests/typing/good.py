"""Code that a type checker must accept. It is checked and never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, assert_type

import apsw

from towpath import (
    App,
    Call,
    GroupHandle,
    Hooks,
    JobFailure,
    JobHandle,
    JobStatus,
    PartStatus,
    QueueStatus,
    Rate,
    Retry,
    Running,
    Task,
    current,
    provided,
)
from towpath.commands import Job
from towpath.operations.schedules import ScheduleStatus
from towpath.queues.message import Message, Queue
from towpath.tasks.task import AsyncTask
from towpath.testing.app import Bench

app = App("memory://")


@app.task
def add(a: int, b: int = 2) -> int:
    return a + b


@app.task(
    queue="mail",
    max_attempts=3,
    backoff=[1, 2, timedelta(minutes=5)],
    unique="{to}",
    priority="high",
    process=True,
)
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
    later = add.options(
        delay=5, priority=3, after=[send.enqueue("x"), "id"], key="k", on_conflict="replace", window=60
    )
    assert_type(later.enqueue(1), JobHandle[int])
    assert_type(add.enqueue(1).status(), JobStatus)
    assert_type(await add.enqueue(1).astatus(), JobStatus)
    assert_type(await add.enqueue(1).arecord(), Job)
    assert_type(tick.enqueue(), JobHandle[None])
    assert_type(sweep.enqueue(limit=3), JobHandle[str])
    assert_type(app.group([add.of(1), add.of(2)], then=untouched.of(), on_failure="abort"), GroupHandle[int])
    assert_type(app.group([add.of(1)]).result(), list[int])
    mixed = app.group([add.of(1), send.of("x"), untouched.of()])
    for each in mixed.result():
        print(each)
    calls: list[Call[object]] = [add.of(1), send.of("x")]
    assert_type(app.group(calls), GroupHandle[object])
    assert_type((await app.agroup(calls)).jobs, tuple[JobHandle[object], ...])
    handles: list[JobHandle[int | bytes]] = [add.enqueue(1), send.enqueue("x")]
    add.options(after=handles).enqueue(1)
    chained = app.chain(add.of(1), send.of("x"), untouched.of())
    chained.cancel()
    assert_type(send.options(on=object()).enqueue("x"), JobHandle[bytes])
    with app.batch() as batch:
        assert_type(batch.add(send.of("x")), JobHandle[bytes])
    with app.testing() as bench:
        assert_type(bench.drain(), int)
        bench.assert_enqueued(add, a=1)


def messages(orders: Queue) -> None:
    with orders.get(wait=None) as message:
        assert_type(message, Message)
        message.ack()
    maybe = orders.get(wait=5)
    assert_type(maybe, Message | None)
    if maybe:
        with maybe as message:
            message.nack(delay=timedelta(seconds=5))
    for message in orders.get_many(10, wait=None):
        assert_type(message.json(), Any)
    with orders.subscribe() as stream:
        for message in stream:
            assert_type(message.text(), str)
    orders.configure(cap=5, rate="100/m", capacity=None, retention=timedelta(days=1))
    orders.configure(rate=Rate(5))
    orders.part("x").configure(weight=2, not_before=datetime.now(UTC))
    orders.pause("why")
    assert_type(orders.stats(), QueueStatus)
    assert_type(orders.parts(), list[PartStatus])


async def amessages(orders: Queue) -> None:
    async with await orders.aget(wait=None) as message:
        assert_type(message, Message)
    assert_type(await orders.aget(), Message | None)
    async for message in orders.subscribe():
        await message.aack({"n": 1})
    await orders.aconfigure(keep=5)


def schedules() -> None:
    assert_type(app.schedules.list(), list[ScheduleStatus])
    assert_type(app.schedules.set("x", cron="@daily", missed="all", args={"limit": 1}), ScheduleStatus)
    assert_type(app.schedules.trigger("x"), str)
    assert_type(app.queue("x"), Queue)
    with app.testing(database=True) as bench:
        assert_type(bench.database, apsw.Connection)


@app.task
def handler() -> None:
    job = current()
    assert_type(job.spawn(add.of(1)), JobHandle[int])
    job.commit(lambda db: db.execute("SELECT 1"))
    if job.cancelled:
        raise Retry("later", after=timedelta(minutes=1))


hooks = Hooks()
hooked = App("memory://", hooks=hooks)


@hooks.lifespan
def opened() -> Iterator[Path]:
    yield Path()


@hooks.middleware
async def scratch(job: Running, path: Path = provided) -> AsyncIterator[bytearray]:
    yield bytearray(job.attempt)


@hooks.middleware
def watched(job: Running) -> Generator[None, Any, None]:
    result = yield
    print(result)


@hooks.on_dead
async def alert(failure: JobFailure, path: Path = provided) -> None:
    assert_type(failure.exception, BaseException | None)


@hooked.task(on_failure=alert, on_dead=print)
def writes(name: str, *, path: Path = provided, scratch: bytearray = provided) -> int:
    return 0


async def with_hooks() -> None:
    assert_type(writes.enqueue("x"), JobHandle[int])
    assert_type(writes("x", path=Path(), scratch=bytearray()), int)
    with hooked.testing(provided={Path: Path()}) as bench:
        assert_type(bench, Bench)
    async with hooked.testing() as bench:
        assert_type(bench, Bench)


def takes_task(task: Task[[str], Any], other: AsyncTask[[], None]) -> None: ...
