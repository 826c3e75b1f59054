"""The calls of the client, as coroutines above a transport. Failover between servers is here, the rest is in
`requests` (bytes to send) and `frames` (bytes that arrive)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from towpath.errors import BadResponse, CallFailed, InvalidInput, ServerAway, ServerBusy, TowpathError
from towpath.http.client import requests
from towpath.http.client.connection import ClientSettings
from towpath.http.client.frames import EventParser, Malformed
from towpath.http.client.received import HeldDelivery, MessageStream
from towpath.http.client.requests import (
    LONG_POLL,
    WAITING,
    Content,
    DeliveryReceipt,
    EnqueueOptions,
    Payload,
    ReceiveOptions,
    Span,
)
from towpath.http.client.transport import Incoming, Outgoing, Transport
from towpath.http.wire import (
    AckResponse,
    EnqueueResponse,
    ExtendResponse,
    NackResponse,
    StatsResponse,
    WatchEvent,
)

R = TypeVar("R")
MAX_ANSWER = 4 * 1024 * 1024
"""Bytes of a JSON response."""
MAX_PAGE = 64
EARLY = 0.5
"""A wait that ends within so many seconds was not held by the server."""
WATCH_SILENCE = 60.0
"""Seconds without an event or comment after which a watch is broken. The server sends a comment each 20 s."""


class BulkAck(msgspec.Struct, kw_only=True):
    """The result for one receipt of `ack_many`: `acked`, or `error` and `detail`."""

    message_id: str
    acked: bool = False
    error: str = ""
    detail: str = ""


class _BulkAcks(msgspec.Struct):
    results: list[BulkAck]


class BulkEnqueue(msgspec.Struct, kw_only=True):
    """One message of `enqueue_many`. `duplicate`: another message holds the `dedupe_key`, and this is its
    id."""

    message_id: str
    queue: str
    namespace: str = ""
    duplicate: bool = False


class _BulkEnqueues(msgspec.Struct):
    messages: list[BulkEnqueue]


class Calls:
    """`server` is the name of the server that answered last."""

    def __init__(self, settings: ClientSettings, transport: Transport) -> None:
        self.settings = settings
        self.transport = transport
        self._first = 0

    @property
    def server(self) -> str:
        return self.settings.endpoints[self._first].name

    async def open(self, request: Outgoing) -> Incoming:
        """The response of the first server that takes the request, with status 200 or 204. The next server is
        asked if that cannot apply the request twice, or if twice does no harm."""
        count = len(self.settings.endpoints)
        order = [(self._first + number) % count for number in range(count)]
        for number, place in enumerate(order):
            try:
                response = await self.transport.send(place, request)
                if response.status in (200, 204):
                    self._first = place
                    return response
                raise await self._failure(response, request, self.settings.endpoints[place].name)
            except (ServerAway, ServerBusy) as error:
                if number == count - 1 or not _may_repeat(request, error):
                    raise
        raise AssertionError("there is at least one server")

    async def json(self, request: Outgoing, kind: type[R]) -> R:
        response = await self.open(request)
        body = await self.body(response, request)
        return requests.decoded(request.call, self.server, body, kind)

    async def body(self, response: Incoming, request: Outgoing, limit: int = MAX_ANSWER) -> bytes:
        """The whole body, within the size and the time that a call may take."""
        end = time.monotonic() + self.settings.timeout
        pieces: list[bytes] = []
        size = 0
        try:
            while piece := await response.piece():
                size += len(piece)
                if size > limit:
                    raise BadResponse(call=request.call, server=self.server, why=f"over {limit} bytes")
                if time.monotonic() > end:
                    raise ServerAway(call=request.call, server=self.server, why="it answers too slowly")
                pieces.append(piece)
        finally:
            await response.close()
        return b"".join(pieces)

    async def _failure(self, response: Incoming, request: Outgoing, server: str) -> TowpathError:
        body = b""
        with contextlib.suppress(ServerAway, BadResponse):
            body = await self.body(response, request, 64 * 1024)
        return requests.failure(request, server, response.status, response.headers.get("location"), body)

    async def enqueue(self, queue: str, payload: Payload, options: EnqueueOptions) -> EnqueueResponse:
        options = {"namespace": self.settings.namespace, **options}
        return await self.json(requests.enqueue(queue, payload, options, self.transport), EnqueueResponse)

    async def receive(
        self, queue: str, page: int, options: ReceiveOptions, stream: bool = False
    ) -> MessageStream | None:
        """The messages of a dequeue or subscribe; None if there is none within the wait."""
        options = {"namespace": self.settings.namespace, **options}
        wait = options.get("wait", None if stream else 0.0)
        left = None if wait is None else float(requests.whole_seconds("wait", wait))
        if not 1 <= page <= MAX_PAGE:
            raise InvalidInput(field="n", value=page, expected=f"a whole number from 1 to {MAX_PAGE}")
        while True:
            started = time.monotonic()
            seconds = LONG_POLL if left is None else min(LONG_POLL, int(left))
            request = requests.dequeue(queue, seconds, page, options, stream)
            try:
                return MessageStream(self, request, await self.open(request))
            except CallFailed as error:
                if error.code != WAITING:
                    raise
            if left is not None and (left := left - max(seconds, time.monotonic() - started)) < 1:
                return None
            await self.pause_after(started)

    async def pause_after(self, started: float) -> None:
        """Before a wait is repeated: a server that does not wait must not be asked without end."""
        if time.monotonic() < started + EARLY:
            await self.transport.pause(EARLY)

    async def dequeue(self, queue: str, options: ReceiveOptions) -> HeldDelivery | None:
        stream = await self.receive(queue, 1, options)
        return None if stream is None else await stream.single()

    async def ack(self, receipt: DeliveryReceipt) -> AckResponse:
        return await self.json(requests.ack(receipt), AckResponse)

    async def nack(
        self, receipt: DeliveryReceipt, delay: Span = 0.0, reason: str | None = None, defer: bool = False
    ) -> NackResponse:
        return await self.json(requests.nack(receipt, delay, reason, defer), NackResponse)

    async def extend(self, receipt: DeliveryReceipt, seconds: Span | None = None) -> ExtendResponse:
        return await self.json(requests.extend(receipt, seconds), ExtendResponse)

    async def ack_many(self, receipts: Iterable[DeliveryReceipt]) -> list[BulkAck]:
        request = requests.ack_many(receipts)
        return [] if request is None else (await self.json(request, _BulkAcks)).results

    async def enqueue_many(
        self, queue: str, payloads: Iterable[Content], options: EnqueueOptions
    ) -> list[BulkEnqueue]:
        options = {"namespace": self.settings.namespace, **options}
        request = requests.enqueue_many(queue, payloads, options)
        return [] if request is None else (await self.json(request, _BulkEnqueues)).messages

    async def stats(self, queue: str, namespace: str | None = None) -> StatsResponse:
        return await self.json(
            requests.post("stats", "/v1/queue/stats", self._named(queue, namespace)), StatsResponse
        )

    async def watch(self, queue: str, namespace: str | None = None) -> EventStream:
        content = self._named(queue, namespace)
        request = requests.post("watch", "/v1/queue/watch", content, wait=WATCH_SILENCE)
        response = await self.open(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            await response.close()
            raise BadResponse(call="watch", server=self.server, why="it is no stream of events")
        return EventStream(self, response)

    def _named(self, queue: str, namespace: str | None) -> Mapping[str, Any]:
        return {"namespace": self.settings.namespace if namespace is None else namespace, "queue": queue}

    async def close(self) -> None:
        await self.transport.close()


def _may_repeat(request: Outgoing, error: TowpathError) -> bool:
    """Whether another server may get the request after this error."""
    applied = isinstance(error, ServerAway) and error.sent
    if isinstance(error, ServerBusy) and error.status == 429:
        return False
    if applied and not request.repeatable:
        return False
    return isinstance(request.body, bytes) or request.body.rewind()


class EventStream:
    """The events of a watch."""

    def __init__(self, calls: Calls, response: Incoming) -> None:
        self._calls, self._response = calls, response
        self._parser = EventParser()
        self._events: list[WatchEvent] = []

    async def next(self) -> WatchEvent | None:
        """The next event; None at the end of the stream."""
        while not self._events:
            piece = await self._response.piece()
            if not piece:
                return None
            try:
                self._events += self._parsed(piece)
            except BadResponse:
                await self.close()
                raise
        return self._events.pop(0)

    def _parsed(self, piece: bytes) -> Iterator[WatchEvent]:
        try:
            for name, data in self._parser.feed(piece):
                if name == "queue_watch":
                    yield requests.decoded("watch", self._calls.server, data, WatchEvent)
        except Malformed as error:
            raise BadResponse(call="watch", server=self._calls.server, why=str(error)) from None

    async def close(self) -> None:
        await self._response.close()
