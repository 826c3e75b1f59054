"""An app at work while a test looks on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from towpath import App
from towpath.operations.service import Service


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
