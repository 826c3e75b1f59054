"""Values that workers provide to handlers, and hooks in `app.testing()`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.support.running import worked, working
from tests.support.traced import Pool, Session, Traced, with_pool
from towpath import App, Hooks, provided
from towpath.errors import InvalidInput, JobFailed


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    with traced.app:
        yield traced


# Provided values


def test_an_async_handler_gets_a_value_of_its_own_loop(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)

    @traced.app.task
    async def handler(pool: Pool = provided) -> bool:
        return pool.name == f"on {id(asyncio.get_running_loop())}"

    async def main() -> bool:
        return await (await handler.aenqueue()).aresult(10)

    assert worked(traced.app, main) is True


def test_a_provided_parameter_is_no_argument(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)

    @traced.app.task(name="ship", unique=True)
    def ship(order: int, pool: Pool = provided) -> str:
        return pool.name

    assert ship.spec_for((7,), {}).payload == b'{"order":7}'
    with pytest.raises(InvalidInput, match=r"ship\(pool\) is provided by the worker: leave it out"):
        ship.enqueue(7, pool=Pool("mine"))
    with pytest.raises(InvalidInput, match="too many positional arguments"):
        ship.enqueue(7, Pool("mine"))
    assert ship(7, Pool("mine")) == ship(7, pool=Pool("mine")) == "mine"
    with pytest.raises(InvalidInput, match=r"ship\(pool\) has no value: .* a direct call must pass it"):
        ship(7)


def test_a_provided_parameter_comes_last_or_by_keyword() -> None:
    app = App("memory://")

    def between(a: int, pool: Pool = provided, b: int = 2) -> None: ...
    def before_many(a: int, pool: Pool = provided, *rest: int) -> None: ...
    def by_position(pool: Pool = provided, /) -> None: ...

    for function in (between, before_many, by_position):
        with pytest.raises(InvalidInput, match=r"\(pool\) has the default `provided`; it must be behind all"):
            app.task(function)


def test_a_type_without_a_provider_is_an_error_before_the_worker_starts(traced: Traced) -> None:
    @traced.app.task(name="ship")
    def ship(order: int, pool: Pool = provided) -> None: ...

    message = r"ship\(pool\) needs Pool, which no lifespan or middleware .* Provided types: none\."
    with pytest.raises(InvalidInput, match=message):
        traced.app.run(burst=True)
    with pytest.raises(InvalidInput, match=message):
        with traced.app.testing():
            pass


def test_two_providers_of_one_type_are_an_error(traced: Traced) -> None:
    with_pool(traced.hooks, [])
    with_pool(traced.hooks, [])
    with pytest.raises(InvalidInput, match=r"lifespan .* and lifespan .* provide the same type, Pool"):
        traced.app.run(burst=True)


def test_a_provided_parameter_needs_an_annotation(traced: Traced) -> None:
    with pytest.raises(InvalidInput, match=r"task ship\(pool\) .* must be annotated"):

        @traced.app.task(name="ship")
        def ship(pool=provided) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001


def test_what_is_no_hook_is_refused_where_it_is_declared() -> None:
    hooks: Any = Hooks()

    @contextmanager
    def manager() -> Iterator[None]:
        yield

    @asynccontextmanager
    async def later() -> AsyncIterator[None]:
        yield

    for wrong in (manager, later, lambda: None):
        with pytest.raises(InvalidInput, match="a generator function with one `yield`"):
            hooks.lifespan(wrong)

    def nothing() -> Iterator[None]:
        yield

    def something(given: object) -> Iterator[None]:
        yield

    with pytest.raises(InvalidInput, match="a function of one parameter"):
        hooks.middleware(nothing)
    with pytest.raises(InvalidInput, match="a function of no parameters"):
        hooks.lifespan(something)


def test_a_lifespan_that_returns_another_type_is_refused_at_the_start(traced: Traced) -> None:
    @traced.hooks.lifespan  # type: ignore[type-var]
    def pool() -> Pool:  # type: ignore[misc]
        yield Pool("")

    with pytest.raises(InvalidInput, match=r"return annotation of lifespan .* must be Iterator\[...\]"):
        traced.app.run(burst=True)


def test_a_task_that_is_declared_after_the_start(traced: Traced) -> None:
    with_pool(traced.hooks, [])
    with working(traced.app, queues=("*",)):

        @traced.app.task
        def fits(pool: Pool = provided) -> str:
            return pool.name[:2]

        @traced.app.task(max_attempts=1)
        def needs_more(pool: Session = provided) -> None: ...

        assert fits.enqueue().result(10) == "on"
        with pytest.raises(JobFailed, match="needs Session, which no lifespan"):
            needs_more.enqueue().result(10)


# Plain tasks


def test_a_task_without_hooks_keeps_its_own_function(traced: Traced) -> None:
    """The plain path costs what it costs without hooks."""
    with_pool(traced.hooks, [])

    @traced.app.task
    def plain() -> None: ...

    with working(traced.app) as service:
        assert service._tasks.get(plain.kind) is plain
    unused = App("memory://")
    assert unused._service({})._tasks is unused._registry.tasks


# In tests of a program


def test_the_bench_opens_and_closes(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)
    traced.middleware_of("m")
    traced.async_middleware_of("n")

    @traced.app.task
    def sync(pool: Pool = provided) -> str:
        assert threading.current_thread() is threading.main_thread()
        return pool.name

    @traced.app.task
    async def later(pool: Pool = provided) -> str:
        assert pool.name == f"on {id(asyncio.get_running_loop())}"
        return pool.name

    with traced.app.testing() as bench:
        jobs = [sync.enqueue(), later.enqueue()]
        bench.drain()
        assert jobs[0].result() == jobs[1].result()
    assert traced.trace[:3] == ["open", "m before 1", "n before 1"]
    assert traced.trace[-1] == "close"


def test_the_async_bench_uses_the_running_loop(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)
    traced.async_middleware_of("n")

    @traced.app.task
    async def later(pool: Pool = provided) -> str:
        return pool.name

    @traced.app.task
    def sync(pool: Pool = provided) -> str:
        return pool.name

    async def main() -> None:
        async with traced.app.testing() as bench:
            jobs = [await later.aenqueue(), await sync.aenqueue()]
            await bench.adrain()
            for job in jobs:
                assert await job.aresult() == f"on {id(asyncio.get_running_loop())}"

    asyncio.run(main())
    assert traced.trace == ["open", *["n before 1", "n after"] * 2, "close"]


def test_values_of_the_test_replace_the_hooks(traced: Traced) -> None:
    with_pool(traced.hooks, traced.trace)

    @traced.app.task
    def handler(pool: Pool = provided) -> str:
        return pool.name

    with traced.app.testing(provided={Pool: Pool("fake")}) as bench:
        job = handler.enqueue()
        bench.drain()
        assert job.result() == "fake"
    assert traced.trace == []
    with pytest.raises(InvalidInput, match=r"provided=\.\.\.\) needs Session"):
        with traced.app.testing(provided={Session: None}):
            pass
