"""dequeue and subscribe: messages to consumers, with and without state."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from towpath.core import checks
from towpath.core.blobs import HEADER, JobBlob, blob_of
from towpath.core.checks import SECOND
from towpath.core.job import ClaimedJob
from towpath.http.access import Right
from towpath.http.consumers import Consumer
from towpath.http.context import ServerContext, draining
from towpath.http.exchange import Exchange
from towpath.http.messages import view_of
from towpath.http.multipart import MessageWriter
from towpath.http.problems import Disconnected, Headers, Problem, bad_body
from towpath.http.wire import DequeueRequest, QueueName, is_txn
from towpath.queues.blobs import achunks_of
from towpath.runtime.claims.dispatcher import release
from towpath.tasks.new_jobs import new_id

MAX_PAGE = 64
MAX_OWNER = 512
NO_WAIT = -1
WRITTEN = 64 * 1024
"""Bytes of a blob that are written at once."""


class Demanded(NamedTuple):
    """The request of a consumer. `lease` is microseconds; `wait` is seconds, None without limit."""

    name: QueueName
    owner: str
    n: int
    lease: int
    wait: float | None
    stateful: bool
    retry_hint: int


class DeliveryRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def dequeue(self, exchange: Exchange) -> None:
        await self._dequeue(exchange, stateful=False)

    async def dequeue_with_state(self, exchange: Exchange) -> None:
        await self._dequeue(exchange, stateful=True)

    async def subscribe(self, exchange: Exchange) -> None:
        await self._subscribe(exchange, stateful=False)

    async def subscribe_with_state(self, exchange: Exchange) -> None:
        await self._subscribe(exchange, stateful=True)

    async def _dequeue(self, exchange: Exchange, stateful: bool) -> None:
        demanded = await self._demanded(exchange, stateful)
        if stateful:
            demanded = demanded._replace(n=1)
        consumer = self._consumer(demanded)
        try:
            claims = await self._first(exchange, consumer, demanded)
        finally:
            consumer.close()
        if exchange.left:
            consumer.give_back(claims)
            raise Disconnected
        self._context.delivered(claims, stateful)
        writer = MessageWriter()
        if any(HEADER in claim.job.headers for claim in claims):
            await self._send_large(exchange, writer, demanded, claims)
            return
        document = writer.document(
            [(view_of(demanded.name, claim.job, stateful), claim.job.payload) for claim in claims]
        )
        await exchange.send(200, self._headers(writer, claims), document)

    async def _send_large(
        self, exchange: Exchange, writer: MessageWriter, demanded: Demanded, claims: list[ClaimedJob]
    ) -> None:
        """A document with payloads that are read and written chunk by chunk."""
        heads = [
            writer.message(
                view_of(demanded.name, claim.job, demanded.stateful),
                claim.job.size,
                number if len(claims) > 1 else None,
            )
            for number, claim in enumerate(claims)
        ]
        framing = sum(map(len, heads)) + len(claims) * len(writer.after_payload()) + len(writer.end())
        length = framing + sum([claim.job.size for claim in claims])
        headers = [*self._headers(writer, claims), (b"content-length", str(length).encode())]
        await exchange.start(200, headers)
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await self._write(exchange, claims, heads, writer.after_payload(), gone)
            await exchange.write(writer.end(), more=False)
        finally:
            gone.cancel()

    async def _write(
        self,
        exchange: Exchange,
        claims: list[ClaimedJob],
        heads: list[bytes],
        end: bytes,
        gone: asyncio.Future[None],
    ) -> None:
        """Write messages, each with its head, the payload and `end`: inline payloads together, blobs chunk by
        chunk. When the client leaves, the messages that it cannot have received are given back."""
        pieces: list[bytes] = []
        complete = 0
        try:
            for number, (claim, head) in enumerate(zip(claims, heads, strict=True)):
                pieces += (head, claim.job.payload)
                if (blob := blob_of(claim.job.headers)) is not None:
                    await exchange.write(b"".join(pieces))
                    await self._write_blob(exchange, blob, gone)
                    complete, pieces = number, []
                pieces.append(end)
            await exchange.write(b"".join(pieces))
            # Waits until the client has read most of it: a write alone only fills the buffer.
            await exchange.write(b"")
            _check_present(exchange, gone)
        except Disconnected:
            self._context.returned(claims[complete:])
            release(self._context.engine.committer, claims[complete:])
            raise

    async def _write_blob(self, exchange: Exchange, blob: JobBlob, gone: asyncio.Future[None]) -> None:
        async for chunk in achunks_of(blob, self._context.engine.ledger.chunk):
            # A larger piece would be copied to the buffer of the connection.
            for start in range(0, len(chunk), WRITTEN):
                await exchange.write(chunk[start : start + WRITTEN])
            del chunk  # before the next one is read
            _check_present(exchange, gone)

    async def _subscribe(self, exchange: Exchange, stateful: bool) -> None:
        demanded = await self._demanded(exchange, stateful)
        consumer = self._consumer(demanded)
        gone: asyncio.Future[None] | None = None
        try:
            claims = await self._first(exchange, consumer, demanded)
            gone = _watch(exchange, consumer)
            await self._stream(exchange, consumer, demanded, claims, gone)
        finally:
            consumer.close()
            if gone is not None:
                gone.cancel()

    async def _stream(
        self,
        exchange: Exchange,
        consumer: Consumer,
        demanded: Demanded,
        claims: list[ClaimedJob],
        gone: asyncio.Future[None],
    ) -> None:
        """Write messages until the client leaves or the server drains; with a wait of -1 until the queue is
        empty."""
        writer = MessageWriter()
        await exchange.start(200, self._headers(writer, claims))
        while claims:
            self._context.delivered(claims, demanded.stateful)
            views = [view_of(demanded.name, claim.job, demanded.stateful) for claim in claims]
            heads = [writer.message(view, claim.job.size) for view, claim in zip(views, claims, strict=True)]
            await self._write(exchange, claims, heads, writer.after_payload(), gone)
            consumer.more(len(claims))
            no_wait = demanded.wait is not None and demanded.wait < 0
            claims = await (consumer.first() if no_wait else consumer.wait(None))
        if gone.done():
            raise Disconnected
        await exchange.write(writer.end(), more=False)

    async def _first(self, exchange: Exchange, consumer: Consumer, demanded: Demanded) -> list[ClaimedJob]:
        """The first messages. Raises a `Problem` if there are none within the wait."""
        claims = await consumer.first()
        if not claims and not (demanded.wait is not None and demanded.wait < 0):
            claims = await self._wait(exchange, consumer, demanded.wait)
        if claims:
            return claims
        self._context.refuse_when_draining()
        raise Problem(409, "waiting", "no messages available", retry_after=demanded.retry_hint)

    async def _wait(self, exchange: Exchange, consumer: Consumer, seconds: float | None) -> list[ClaimedJob]:
        gone = _watch(exchange, consumer)
        try:
            claims = await consumer.wait(seconds)
            if gone.done():
                consumer.give_back(claims)
                raise Disconnected
            return claims
        finally:
            gone.cancel()

    def _consumer(self, demanded: Demanded) -> Consumer:
        return self._context.consumers.open(demanded.name.stored, demanded.n, demanded.lease, demanded.owner)

    async def _demanded(self, exchange: Exchange, stateful: bool) -> Demanded:
        request = await exchange.json(DequeueRequest)
        context, options = self._context, self._context.options
        name = context.queue(
            request.namespace or exchange.argument("namespace"), request.queue or exchange.argument("queue")
        )
        exchange.principal.check(Right.CONSUME, name.namespace, name.queue)
        owner = request.owner or exchange.argument("owner")
        if not owner.strip():
            raise Problem(400, "missing_owner", "owner must be given")
        if len(owner) > MAX_OWNER or not checks.storable(owner):
            raise bad_body(f"owner must have at most {MAX_OWNER} characters and no NUL")
        if request.txn_id:
            detail = "this server has no transactions: leave out txn_id"
            raise Problem(400, "invalid_txn", detail if is_txn(request.txn_id) else "txn_id is not an xid")
        if context.draining:
            raise draining()
        asked = request.visibility_timeout_seconds
        lease = min(asked, options.max_visibility) if asked > 0 else options.visibility
        wait = request.wait_seconds
        return Demanded(
            name,
            owner + exchange.principal.suffix,
            min(max(request.page_size, 1), MAX_PAGE),
            lease * SECOND,
            -1.0 if wait == NO_WAIT else float(wait) if wait > 0 else None,
            stateful,
            0 if wait == NO_WAIT else max(wait, 1),
        )

    @staticmethod
    def _headers(writer: MessageWriter, claims: list[ClaimedJob]) -> Headers:
        correlation = claims[0].job.correlation_id or new_id()
        return [
            (b"content-type", writer.content_type),
            (b"x-correlation-id", correlation.encode("ascii", "replace")),
        ]


def _check_present(exchange: Exchange, gone: asyncio.Future[None]) -> None:
    if gone.done() or exchange.left:
        raise Disconnected


def _watch(exchange: Exchange, consumer: Consumer) -> asyncio.Future[None]:
    """A future that is done when the client has left; the wait of the consumer ends then."""
    gone = asyncio.ensure_future(exchange.disconnected())

    def left(gone: asyncio.Future[None]) -> None:
        if not gone.cancelled():
            consumer.interrupt()

    gone.add_done_callback(left)
    return gone
