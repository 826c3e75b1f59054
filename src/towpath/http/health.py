"""healthz, readyz and metrics."""

from __future__ import annotations

import asyncio

from towpath.app import App
from towpath.errors import TowpathError
from towpath.http.access import Right
from towpath.http.context import ServerContext, draining
from towpath.http.exchange import Exchange
from towpath.http.problems import Problem
from towpath.observe.metrics import ServedMetrics

READ_TIMEOUT = 2.0
"""Seconds for which a check waits for the ledger."""


class HealthRoutes:
    def __init__(self, app: App, context: ServerContext) -> None:
        self._context = context
        self._metrics = ServedMetrics(app.bus, app.ledger, app.engine.clock)

    def close(self) -> None:
        self._metrics.close()

    async def healthz(self, exchange: Exchange) -> None:
        """The process answers."""
        await exchange.send(200, [])

    async def readyz(self, exchange: Exchange) -> None:
        """The server takes new work: it does not drain, and its ledger answers."""
        if self._context.draining:
            raise draining()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                await self._context.read(self._context.engine.ledger.version)
        except (TimeoutError, TowpathError) as error:
            detail = f"the ledger does not answer: {type(error).__name__}"
            raise Problem(503, "unavailable", detail, retry_after=1) from None
        await exchange.send(200, [])

    async def metrics(self, exchange: Exchange) -> None:
        exchange.principal.check(Right.MONITOR)
        body, content_type = await self._context.read(self._metrics.text)
        await exchange.send(200, [(b"content-type", content_type.encode())], body)
