"""An app with hooks that record their calls in a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from towpath import App, Hooks, Running


class Pool:
    """A value that has no JSON form."""

    def __init__(self, name: str) -> None:
        self.name = name


class Session:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool


class Traced:
    """An app with every kind of hook; the hooks record their calls in `trace`."""

    def __init__(self, url: str = "memory://") -> None:
        self.trace: list[str] = []
        self.hooks = Hooks()
        self.app = App(url, hooks=self.hooks)

    def lifespan_of(self, name: str) -> None:
        """A lifespan without a value."""

        @self.hooks.lifespan
        def surround() -> Iterator[None]:
            self.trace.append(f"start {name}")
            yield
            self.trace.append(f"stop {name}")

    def middleware_of(self, name: str) -> None:
        @self.hooks.middleware
        def surround(job: Running) -> Generator[None, Any, None]:
            self.trace.append(f"{name} before {job.attempt}")
            try:
                result = yield
            except Exception as error:
                self.trace.append(f"{name} after {error}")
                raise
            self.trace.append(f"{name} after {result}")

    def async_middleware_of(self, name: str) -> None:
        @self.hooks.middleware
        async def surround(job: Running) -> AsyncIterator[None]:
            self.trace.append(f"{name} before {job.attempt}")
            await asyncio.sleep(0)
            try:
                yield
            except Exception as error:
                self.trace.append(f"{name} after {error}")
                raise
            self.trace.append(f"{name} after")


def with_pool(hooks: Hooks, trace: list[str]) -> None:
    @hooks.lifespan
    async def pool() -> AsyncIterator[Pool]:
        trace.append("open")
        await asyncio.sleep(0)
        yield Pool(f"on {id(asyncio.get_running_loop())}")
        trace.append("close")
