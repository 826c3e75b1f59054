"""Lifespans and middleware, in workers and handler processes."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support import hooked
from tests.support.running import working
from tests.support.traced import Pool, Session, Traced, with_pool
from towpath import Fail, Running, current, provided
from towpath.errors import HookFailed, JobFailed


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    with traced.app:
        yield traced


# Lifespans


def test_lifespans_start_in_order_and_stop_in_reverse_order(traced: Traced) -> None:
    for name in ("a", "b"):
        traced.lifespan_of(name)

    @traced.app.task
    def handler() -> None:
        traced.trace.append("work")

    with working(traced.app):
        handler.enqueue().result(10)
    assert traced.trace == ["start a", "start b", "work", "stop b", "stop a"]


def test_each_worker_starts_them_again(traced: Traced) -> None:
    traced.lifespan_of("a")
    for _ in range(2):
        with working(traced.app):
            pass
    assert traced.trace == ["start a", "stop a"] * 2


def test_a_lifespan_that_fails_stops_the_earlier_ones_and_the_worker_does_not_start(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    traced.lifespan_of("a")

    @traced.hooks.lifespan
    async def broken() -> AsyncIterator[None]:
        raise OSError("no route to the database")
        yield

    traced.lifespan_of("never")
    with pytest.raises(HookFailed, match=r"lifespan .*broken failed at .*: OSError: no route") as caught:
        traced.app.run(burst=True)
    assert isinstance(caught.value.__cause__, OSError)
    assert traced.trace == ["start a", "stop a"]
    assert "Traceback" in caplog.text


def test_a_lifespan_that_fails_to_stop_is_logged_and_the_others_stop(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    traced.lifespan_of("a")

    @traced.hooks.lifespan
    def broken() -> Iterator[None]:
        yield
        raise OSError("already gone")

    @traced.hooks.lifespan
    def twice() -> Iterator[None]:
        yield
        yield

    traced.app.run(burst=True)
    assert traced.trace == ["start a", "stop a"]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        f"lifespan {__name__}.{twice.__qualname__} failed at its stop",
        f"lifespan {__name__}.{broken.__qualname__} failed at its stop",
    ]


def test_lifespans_stop_when_a_worker_is_cancelled(traced: Traced) -> None:
    traced.lifespan_of("a")

    async def main() -> None:
        worker = asyncio.create_task(traced.app.arun())
        while not traced.trace:
            await asyncio.sleep(0)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)

    asyncio.run(main())
    assert traced.trace == ["start a", "stop a"]


def test_one_task_enters_and_leaves_an_async_lifespan(traced: Traced) -> None:
    @traced.hooks.lifespan
    async def bounded() -> AsyncIterator[None]:
        before = asyncio.current_task()
        async with asyncio.timeout(60):
            yield
        traced.trace.append(str(asyncio.current_task() is before))

    traced.app.run(burst=True)
    assert traced.trace == ["True"]


def test_a_lifespan_is_provided_with_the_values_of_earlier_ones(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)

    @traced.hooks.lifespan
    def session(pool: Pool = provided) -> Iterator[Session]:
        yield Session(pool)

    @traced.app.task
    def handler(a: int, *, session: Session = provided) -> str:
        return f"{a} {session.pool.name[:2]}"

    with working(traced.app):
        assert handler.enqueue(1).result(10) == "1 on"
    assert traced.trace == ["open", "close"]


# Middleware


def test_middleware_surrounds_sync_and_async_handlers_in_the_order_of_declaration(traced: Traced) -> None:
    traced.middleware_of("outer")
    traced.async_middleware_of("middle")
    traced.middleware_of("inner")

    @traced.app.task
    def sync(n: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        traced.trace.append("handler")
        return n

    @traced.app.task
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        traced.trace.append("handler")
        return n

    expected = ["outer before 1", "middle before 1", "inner before 1", "handler"]
    expected += ["inner after 7", "middle after", "outer after 7"]
    for task in (sync, later):
        traced.trace.clear()
        with working(traced.app):
            assert task.enqueue(7).result(10) == 7
        assert traced.trace == expected


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_passes_the_middleware(traced: Traced, is_async: bool) -> None:
    traced.middleware_of("outer")
    if is_async:
        traced.async_middleware_of("inner")

    @traced.app.task(max_attempts=1)
    def broken() -> None:
        raise ValueError("no")

    with working(traced.app):
        with pytest.raises(JobFailed, match="ValueError: no"):
            broken.enqueue().result(10)
    assert traced.trace[-1] == "outer after no"


@pytest.mark.parametrize("place", ["before", "after", "twice", "never"])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_a_middleware_fails_the_attempt_and_not_the_worker(
    traced: Traced, place: str, is_async: bool
) -> None:
    def fail_at(here: str) -> None:
        if here == place:
            raise LookupError(f"at {here}")

    if is_async:

        @traced.hooks.middleware
        async def around(job: Running) -> AsyncIterator[None]:
            if place == "never" and job.task.kind == "broken":
                return
            if job.task.kind == "broken":
                fail_at("before")
            yield
            if job.task.kind == "broken":
                fail_at("after")
                if place == "twice":
                    yield
    else:

        @traced.hooks.middleware
        def also(job: Running) -> Iterator[None]:
            if place == "never" and job.task.kind == "broken":
                return
            if job.task.kind == "broken":
                fail_at("before")
            yield
            if job.task.kind == "broken":
                fail_at("after")
                if place == "twice":
                    yield

    @traced.app.task(name="broken", max_attempts=1)
    def broken() -> None: ...

    @traced.app.task
    def fine() -> int:
        return 5

    expected = {"twice": "more than one `yield`", "never": "returned before its `yield`"}
    with working(traced.app):
        with pytest.raises(JobFailed, match=expected.get(place, f"LookupError: at {place}")):
            broken.enqueue().result(10)
        assert fine.enqueue().result(10) == 5


def test_a_middleware_may_replace_or_handle_the_exception(traced: Traced) -> None:
    @traced.hooks.middleware
    def translate(job: Running) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise Fail("the shop is closed") from error
        except KeyError:
            traced.trace.append("handled")

    @traced.app.task
    def handler(kind: str) -> str:
        raise {"connection": ConnectionError, "key": KeyError}[kind]

    with working(traced.app):
        with pytest.raises(JobFailed, match="the shop is closed"):
            handler.enqueue("connection").result(10)
        assert handler.enqueue("key").finished(10).state == "done"
    assert traced.trace == ["handled"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_context_of_the_middleware_is_that_of_the_handler(traced: Traced, is_async: bool) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")

    @traced.hooks.middleware
    def bind(job: Running) -> Iterator[None]:
        token = tenant.set(job.job.queue)
        yield
        tenant.reset(token)

    if is_async:
        traced.async_middleware_of("a")

    @traced.app.task(queue="acme")
    def handler() -> str:
        assert current().attempt == 1
        return tenant.get()

    with working(traced.app):
        assert handler.enqueue().result(10) == "acme"


def test_a_middleware_sees_a_timeout(traced: Traced) -> None:
    @traced.hooks.middleware
    async def around(job: Running) -> AsyncIterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            traced.trace.append("cancelled")
            raise

    @traced.app.task(timeout=0.05, max_attempts=1)
    async def slow() -> None:
        await asyncio.Event().wait()

    with working(traced.app):
        with pytest.raises(JobFailed, match="it ran longer than"):
            slow.enqueue().result(10)
    assert traced.trace == ["cancelled"]


def test_a_middleware_with_a_type_surrounds_only_the_handlers_that_need_it(traced: Traced) -> None:
    with_pool(traced.hooks, [])

    @traced.hooks.middleware
    def session(job: Running, pool: Pool = provided) -> Iterator[Session]:
        traced.trace.append("begin")
        yield Session(pool)
        traced.trace.append("commit")

    @traced.hooks.middleware
    def name(job: Running, session: Session = provided) -> Iterator[str]:
        yield f"session {session.pool.name[:2]}"

    @traced.app.task
    def plain(n: int) -> int:
        return n

    @traced.app.task
    def direct(n: int, session: Session = provided) -> int:
        return n

    @traced.app.task
    async def indirect(n: int, name: str = provided, *, more: int = 0) -> str:
        return f"{name} {n} {more}"

    with working(traced.app):
        assert plain.enqueue(1).result(10) == 1
        assert traced.trace == []
        assert direct.enqueue(1).result(10) == 1
        assert traced.trace == ["begin", "commit"]
        assert indirect.enqueue(1, more=2).result(10) == "session on 1 2"
        assert traced.trace == ["begin", "commit"] * 2


# In processes of their own


def test_a_handler_process_has_lifespans_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooked.TRACE, str(tmp_path / "trace"))
    with hooked.app, working(hooked.app, concurrency=1):
        pid, running, main = hooked.sync.enqueue().result(30)
        assert (running, main) == (True, True)
        assert hooked.later.enqueue().result(30) == [pid, True]
    lines = (tmp_path / "trace").read_text().splitlines()
    here = [line.split()[1] for line in lines if not line.startswith(f"{pid} ")]
    there = [line.split()[1] for line in lines if line.startswith(f"{pid} ")]
    assert here == ["start", "open", "close", "stop"]
    assert there == ["start", "open", "before", "after", "before", "after", "close", "stop"]


def test_a_lifespan_that_fails_in_a_process_fails_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hooked.TRACE, str(tmp_path / "trace"))
    monkeypatch.setenv(hooked.BROKEN, "1")
    with hooked.app, working(hooked.app):
        with pytest.raises(JobFailed, match="OSError: no route to the database"):
            hooked.sync.enqueue().result(30)
