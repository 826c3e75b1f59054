"""An app at work while a test looks on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from towpath import App
from towpath.commands import Claim, Claimed, Want
from towpath.operations.service import Service
from towpath.tasks.attempt import Attempt


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncIterator[None]:
    service = Service(app, {"concurrency": 4, "grace": 5, **options})  # type: ignore[typeddict-item]
    task = asyncio.create_task(service.arun())
    try:
        yield
    finally:
        service.stop()
        await task


def worked(app: App, main: Callable[[], Awaitable[Any]], **options: Any) -> Any:
    """What `main` gives, beside a worker."""

    async def run() -> Any:
        async with working(app, **options):
            return await main()

    return asyncio.run(run())


def work(app: App, most: int = 1000) -> int:
    """Run what is ready, one after the other, in this thread."""
    ran = 0
    while ran < most:
        answer = app.call(Claim(owner=app.owner, wants=(Want("*"),), lease=60_000_000))
        assert isinstance(answer, Claimed)
        if not answer.claims:
            break
        for claim in answer.claims:
            app.call(Attempt(app, claim, app.tasks[claim.job.kind]).run())
            ran += 1
    return ran
