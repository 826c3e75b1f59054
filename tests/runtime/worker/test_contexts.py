"""Context variables: each handler runs in a copy of the context of the worker."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from tests.support.waiting import WAIT
from towpath import App

tenant: ContextVar[str] = ContextVar("tenant", default="none")


def _work(app: App, concurrency: int) -> None:
    """A worker in a context with a value of its own."""
    token = tenant.set("worker")
    try:
        app.run(burst=True, concurrency=concurrency)
    finally:
        tenant.reset(token)


@pytest.mark.ledgers("memory", "sqlite")
@pytest.mark.parametrize("concurrency", [1, 4])
def test_values_of_one_job_are_not_those_of_the_next(app: App, concurrency: int) -> None:
    seen: list[str] = []

    @app.task(name="on_loop")
    async def on_loop(n: int) -> None:
        seen.append(tenant.get())
        tenant.set(f"on_loop {n}")
        await asyncio.sleep(0)

    @app.task(name="in_thread")
    def in_thread(n: int) -> None:
        seen.append(tenant.get())
        tenant.set(f"in_thread {n}")

    for n in range(10):
        on_loop.enqueue(n)
        in_thread.enqueue(n)
    _work(app, concurrency)
    assert seen == ["worker"] * 20


@pytest.mark.ledgers("memory", "sqlite")
def test_a_job_that_a_handler_enqueues_has_no_values_of_the_handler(app: App) -> None:
    """The handler's thread may commit the enqueue and the claim itself."""
    seen: list[str] = []

    @app.task(name="child")
    async def child(n: int) -> None:
        seen.append(tenant.get())

    @app.task(name="parent")
    def parent() -> None:
        tenant.set("parent")
        for n in range(20):
            child.enqueue(n).result(WAIT, wait_inside=True)

    parent.enqueue()
    _work(app, 4)
    assert seen == ["worker"] * 20
