"""enqueue, stats and watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from towpath.core.checks import SECOND
from towpath.core.commands import Append, Appended
from towpath.core.job import READY, Job
from towpath.core.views import Query
from towpath.http.access import Right
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.messages import spec_of, too_large
from towpath.http.multipart import EnqueueParts, boundary_of
from towpath.http.problems import Disconnected
from towpath.http.wire import (
    MAX_JSON,
    EnqueueMeta,
    EnqueueResponse,
    QueueName,
    StatsRequest,
    StatsResponse,
    WatchEvent,
    decode,
)
from towpath.queues.blobs import astore
from towpath.tasks.new_jobs import new_id

WATCH_INTERVAL = 1.0
"""Seconds after which a watch looks whether the server drains."""
WATCH_PAUSE = 0.05
"""Seconds between two reads of a watched queue at least: a busy ledger commits hundreds of times a second."""
WATCH_READ = 1.0
"""Seconds after which a watched queue is read in any case."""
KEEPALIVE = 20.0
"""Seconds between two comments in a stream of events that has no events."""


def check_length(exchange: Exchange, limit: int) -> None:
    """Refuse a payload that is certainly too large by the length of the request, before it is read."""
    length = exchange.header(b"content-length")
    if length is not None and int(length) > limit + 2 * MAX_JSON:
        raise too_large(limit)


class QueueRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine

    async def enqueue(self, exchange: Exchange) -> None:
        context = self._context
        context.refuse_when_draining()
        limit = context.options.max_payload
        check_length(exchange, limit)
        parts = EnqueueParts(boundary_of(exchange.header(b"content-type")), exchange.piece)
        meta = decode(await parts.meta(), EnqueueMeta)
        name = context.queue(meta.namespace, meta.queue or exchange.argument("queue"))
        exchange.principal.check(Right.PRODUCE, name.namespace, name.queue)
        payload = await astore(parts.payload(), context.put_chunk, limit, too_large)
        id = new_id()
        spec = spec_of(id, name, meta, payload, exchange.own_correlation(), self._engine.priorities)
        answer = await self._engine.acall(Append((spec,)))
        assert isinstance(answer, Appended)
        [placed] = answer.jobs
        correlation = spec.correlation_id or ""
        visibility = meta.visibility_timeout_seconds
        response = EnqueueResponse(
            namespace=name.namespace,
            queue=name.queue,
            message_id=placed.id,
            attempts=0,
            max_attempts=spec.max_attempts,
            not_visible_until_unix=context.now() + spec.delay // SECOND,
            visibility_timeout_seconds=visibility if visibility > 0 else context.options.visibility,
            payload_bytes=payload.size,
            correlation_id=correlation,
            duplicate=placed.id != id,
        )
        await exchange.reply(response, correlation)

    async def stats(self, exchange: Exchange) -> None:
        name = await self._named(exchange)
        head = await self._head(name)
        context = self._context
        response = StatsResponse(
            namespace=name.namespace,
            queue=name.queue,
            waiting_consumers=context.consumers.by_queue[name.stored],
            pending_candidates=0,
            total_consumers=context.consumers.total,
            has_active_watcher=True,
            available=head is not None,
            correlation_id=exchange.own_correlation(),
        )
        if head is not None:
            response.head_message_id = head.id
            response.head_enqueued_at_unix = head.created_at // SECOND
            response.head_not_visible_until_unix = head.ready_at // SECOND
            response.head_age_seconds = max(0, context.now() - head.created_at // SECOND)
        await exchange.reply(response, response.correlation_id)

    async def watch(self, exchange: Exchange) -> None:
        """Server-sent events: the head of the queue, now and after each change of it. The end of a delay or a
        lease is a change too, because the caretaker commits it."""
        name = await self._named(exchange)
        self._context.refuse_when_draining()
        correlation = exchange.own_correlation()
        await exchange.start(
            200,
            [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                (b"x-correlation-id", correlation.encode()),
            ],
        )
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await self._events(exchange, name, correlation, gone)
        finally:
            gone.cancel()

    async def _events(
        self, exchange: Exchange, name: QueueName, correlation: str, gone: asyncio.Future[None]
    ) -> None:
        loop = asyncio.get_running_loop()
        seen: tuple[bool, str] | None = None
        number, sent = 0, loop.time()
        async for _ in self._changes(gone):
            head = await self._head(name)
            now = (head is not None, "" if head is None else head.id)
            if now != seen:
                seen, number, sent = now, number + 1, loop.time()
                event = WatchEvent(
                    namespace=name.namespace,
                    queue=name.queue,
                    available=now[0],
                    head_message_id=now[1],
                    changed_at_unix=self._context.now(),
                    correlation_id=correlation,
                )
                data = msgspec.json.encode(event)
                await exchange.write(b"id: %d\nevent: queue_watch\ndata: %b\n\n" % (number, data))
            elif loop.time() >= sent + KEEPALIVE:
                sent = loop.time()
                await exchange.write(b": keepalive\n\n")
        if gone.done():
            raise Disconnected
        await exchange.write(b"", more=False)

    async def _changes(self, gone: asyncio.Future[None]) -> AsyncIterator[None]:
        """Yield now, after commits and at times; end when the client has left or the server drains."""
        loop, watch = asyncio.get_running_loop(), self._engine.watch
        version: int | None = None
        read_at = -WATCH_READ
        while not (gone.done() or self._context.draining):
            before, version = version, await watch.changed(version, WATCH_INTERVAL)
            if version != before or loop.time() >= read_at + WATCH_READ:
                yield
                read_at = loop.time()
                await asyncio.wait([gone], timeout=WATCH_PAUSE)

    async def _named(self, exchange: Exchange) -> QueueName:
        request = await exchange.json(StatsRequest)
        name = self._context.queue(
            request.namespace or exchange.argument("namespace"), request.queue or exchange.argument("queue")
        )
        exchange.principal.check(Right.CONSUME, name.namespace, name.queue)
        return name

    async def _head(self, name: QueueName) -> Job | None:
        """The oldest message that could be delivered now."""
        query = Query(queue=name.stored, states=(READY,), oldest_first=True, bodies=False, limit=1)
        page = await self._context.read(self._engine.ledger.find, query)
        return page.jobs[0] if page.jobs else None
