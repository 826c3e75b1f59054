"""Waiting for other jobs inside a handler: refused, because a worker with waits in all slots runs nothing;
allowed with `wait_inside=True`, which is logged."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import handlers
from tests.support.running import working
from tests.support.waiting import until
from towpath import App, current
from towpath.errors import JobFailed, WaitInHandler
from towpath.runtime import completion

WAIT = 30.0


def refusal(wait: Callable[[], Any]) -> str:
    """The error of a wait. A coroutine runs to its first suspension."""
    try:
        waiting = wait()
        if asyncio.iscoroutine(waiting):
            waiting.send(None)
            waiting.close()
    except WaitInHandler as error:
        return str(error)
    return "it waited"


@pytest.fixture
def memory() -> Any:
    with App("memory://") as app:
        yield app


def nothing() -> None: ...


def test_every_wait_is_refused_in_a_thread(memory: App) -> None:
    child = memory.task(nothing)

    @memory.task(max_attempts=1)
    def parent() -> list[str]:
        job, group = child.enqueue(), memory.group([child.of()])
        waits: list[Callable[[], Any]] = [job.result, job.finished, job.aresult, job.afinished]
        waits += [group.result, group.closed, group.aresult, group.aclosed]
        return [refusal(wait) for wait in waits]

    with working(memory, concurrency=1):
        job = parent.enqueue()
        errors = job.result(WAIT)
    assert len(errors) == 8
    for text in errors:
        assert text.startswith(f"a handler must not wait for another job: job {job.id} ({parent.kind}) would")


def test_every_wait_is_refused_on_the_event_loop(memory: App) -> None:
    child = memory.task(nothing)

    @memory.task(max_attempts=1)
    async def parent() -> list[str]:
        job, group = await child.aenqueue(), await memory.agroup([child.of()])
        errors = []
        for wait in (job.aresult, job.afinished, group.aresult, group.aclosed):
            with pytest.raises(WaitInHandler) as caught:
                await wait()
            errors.append(str(caught.value))
        return [*errors, *[refusal(wait) for wait in (job.result, group.closed)]]

    with working(memory, concurrency=1):
        errors = parent.enqueue().result(WAIT)
    assert len(errors) == 6
    assert all("must not wait" in text for text in errors)


def test_the_threads_of_a_handler_are_inside_it(memory: App) -> None:
    child = memory.task(nothing)

    @memory.task(max_attempts=1)
    async def in_a_worker_thread() -> str:
        job = await child.aenqueue()
        return await asyncio.to_thread(refusal, job.result)

    @memory.task(max_attempts=1)
    def in_its_own_thread() -> str:
        errors: list[str] = []
        context, job = contextvars.copy_context(), child.enqueue()
        thread = threading.Thread(target=lambda: errors.append(context.run(refusal, job.result)))
        thread.start()
        thread.join(WAIT)
        return errors[0]

    with working(memory, concurrency=1):
        for task in (in_a_worker_thread, in_its_own_thread):
            assert "must not wait" in task.enqueue().result(WAIT)


def test_a_process_is_inside_its_handler() -> None:
    with handlers.app, working(handlers.app, concurrency=1):
        job = handlers.waits.enqueue("another")
        with pytest.raises(JobFailed, match="must not wait for another job") as caught:
            job.result(WAIT)
    assert caught.value.error is not None
    assert caught.value.error.startswith(
        f"towpath.errors.WaitInHandler: a handler must not wait for another job: job {job.id} "
        "(tests.support.handlers.waits) would hold its slot until job another has ended, and if all slots "
        "wait, no job runs. Put what follows into a job of its own: app.chain(...), "
        "app.group(calls, then=...) or current().spawn(...). If slots of other workers run job another, "
        "pass wait_inside=True"
    )


def test_the_bench_refuses_it_too(memory: App) -> None:
    child = memory.task(nothing)

    @memory.task(max_attempts=1)
    def parent() -> None:
        current().spawn(child.of()).result()

    with memory.testing() as bench:
        job = parent.enqueue()
        bench.drain()
        with pytest.raises(JobFailed, match="must not wait for another job"):
            job.result()


def test_reading_without_a_wait_is_allowed(memory: App) -> None:
    child = memory.task(nothing)

    @memory.task(max_attempts=1)
    def parent(done: str) -> str:
        assert memory.job(done).result(0) is None
        with pytest.raises(TimeoutError):
            child.enqueue().result(timeout=0)
        return str(memory.job(done).status().state)

    with working(memory, concurrency=1):
        first = child.enqueue()
        first.finished(WAIT)
        assert parent.enqueue(first.id).result(WAIT) == "done"


def test_wait_inside_waits(app: App) -> None:
    @app.task
    def child(n: int) -> int:
        return 2 * n

    @app.task
    def parent() -> list[int]:
        group = app.group([child.of(n) for n in range(3)])
        return [child.enqueue(7).result(WAIT, wait_inside=True), *group.result(WAIT, wait_inside=True)]

    @app.task
    async def aparent() -> list[int]:
        job, group = await child.aenqueue(7), await app.agroup([child.of(1)])
        return [
            await job.aresult(WAIT, wait_inside=True),
            *await group.aresult(WAIT, wait_inside=True),
        ]

    with working(app, concurrency=2):
        assert parent.enqueue().result(WAIT) == [14, 0, 2, 4]
        assert aparent.enqueue().result(WAIT) == [14, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_that_lasts_is_logged(
    memory: App, is_async: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "REPORT_AFTER", 0.02)

    @memory.task(queue="others")
    def child() -> str:
        return "done"

    def parent() -> str:
        return child.enqueue().result(WAIT, wait_inside=True)

    async def aparent() -> str:
        return await (await child.aenqueue()).aresult(WAIT, wait_inside=True)

    task = memory.task(name="parent", queue="own")(aparent if is_async else parent)

    def reports() -> list[str]:
        return [each.getMessage() for each in caplog.records if "holds its slot" in each.getMessage()]

    with caplog.at_level(logging.WARNING, "towpath.worker"), working(memory, queues=["own"], concurrency=1):
        job = task.enqueue()
        until(lambda: len(reports()) > 1)
        with working(memory, queues=["others"], concurrency=1):
            assert job.result(WAIT) == "done"
    assert reports()[0].startswith(f"job {job.id} (parent) holds its slot while it waits: ")
    assert reports()[0].endswith("no running worker consumes queue others")


def test_a_timeout_inside_is_a_timeout(memory: App) -> None:
    child = memory.task(queue="others")(nothing)

    @memory.task(max_attempts=1, queue="own")
    def parent() -> str:
        with pytest.raises(TimeoutError, match=r"no result after 0\.05 s; ") as caught:
            child.enqueue().result(0.05, wait_inside=True)
        return str(caught.value)

    with working(memory, queues=["own"], concurrency=1):
        assert "queue others" in parent.enqueue().result(WAIT)
