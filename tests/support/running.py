"""Apps with a running worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tests.support.waiting import WAIT
from towpath import App
from towpath.commands import Claim, Claimed, Want
from towpath.core.checks import SECOND
from towpath.core.job import ClaimedJob
from towpath.operations.service import RunOptions, Service
from towpath.tasks.attempt import Attempt


@contextmanager
def working(app: App, **options: object) -> Iterator[Service]:
    """A worker in a thread of its own; stopped, drained and joined at the end."""
    service = app._service(RunOptions(**options))  # type: ignore[typeddict-item]
    failure: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert failure == []


@asynccontextmanager
async def aworking(app: App, **options: Any) -> AsyncIterator[tuple[Service, asyncio.Task[None]]]:
    """A worker as a task of the running event loop; stopped at the end."""
    service = app._service({"grace": 5, **options})  # type: ignore[typeddict-item]
    task = asyncio.create_task(service.arun())
    try:
        yield service, task
    finally:
        service.stop()
        await task


def worked(app: App, main: Callable[[], Awaitable[Any]], **options: Any) -> Any:
    """Run `main` beside a worker in one event loop; its result."""

    async def run() -> Any:
        async with aworking(app, **{"concurrency": 4, **options}):
            return await main()

    return asyncio.run(run())


def work(app: App, most: int = 1000) -> int:
    """Run the ready jobs one after the other, in this thread; their number."""
    ran = 0
    while ran < most:
        answer = app.engine.call(Claim(owner=app.engine.owner, wants=(Want("*"),), lease=60_000_000))
        assert isinstance(answer, Claimed)
        if not answer.claims:
            break
        for claim in answer.claims:
            app.engine.call(Attempt(app._registry, claim, app.tasks[claim.job.kind]).run())
            ran += 1
    return ran


def claimed(app: App, lease: int = 60 * SECOND) -> ClaimedJob:
    """Claim the first ready job."""
    answer = app.engine.call(Claim(owner="me", wants=(Want("*"),), lease=lease))
    assert isinstance(answer, Claimed)
    return answer.claims[0]
