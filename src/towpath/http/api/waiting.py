"""Requests that wait for an event: each ends with the event, with its client, or when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Disconnected, Problem


class LongPolls:
    """The waiting requests of a server, at most `limit` at once. Used on its event loop only."""

    def __init__(self, context: ServerContext, limit: int) -> None:
        self._context = context
        self._limit = limit
        self.open = 0

    async def wait(self, exchange: Exchange, event: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Wait until the coroutine of `event` returns, at most until the server drains. Raises `Disconnected`
        if the client leaves, and a `Problem` if too many requests wait."""
        with self.place():
            waits = [
                asyncio.ensure_future(each)
                for each in (event(), exchange.disconnected(), self._context.drained.wait())
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if waits[1].done():
                    raise Disconnected
                if waits[0].done():
                    waits[0].result()
            finally:
                for each in waits:
                    each.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the waiting requests."""
        if self.open >= self._limit:
            raise Problem(503, "queue_busy", "too many requests wait at this server", retry_after=1)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
