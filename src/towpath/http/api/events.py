"""Events of this server's process as server-sent events.

The events are those of the bus: of the commands that this process commits (for its HTTP clients, for remote
ledgers, for a worker inside it) and of its own upkeep. The commands of other processes on the same ledger are
not among them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from towpath.events import KINDS, Bus, Event, JobsClaimed
from towpath.http.access import Right
from towpath.http.api.common import check_right, pattern_of
from towpath.http.api.waiting import LongPolls
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Disconnected, bad_argument
from towpath.http.table import Media, Route

MAX_BUFFERED = 1000
"""Events that wait for a slow client. Further ones are dropped and counted."""
KEEPALIVE = 20.0
"""Seconds between two comments in a stream without events."""
_BY_NAME = {kind.__name__: kind for kind in KINDS}


class EventArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kinds: Annotated[
        tuple[str, ...], Meta(description=f"Kinds of events: {', '.join(_BY_NAME)}. Default: all.")
    ] = ()
    queue: Annotated[str, Meta(description="Only events of this queue.")] = ""
    namespace: Annotated[str, Meta(description="Namespace of the queue.")] = ""


class StreamedEvent(msgspec.Struct, kw_only=True):
    """The `data` of an event: its sentence, and its fields by name. The event `dropped` has the number of
    events that were dropped since the one before, because the client reads too slowly."""

    event: str
    sentence: str
    fields: dict[str, Any]


class EventRoutes:
    def __init__(self, context: ServerContext, polls: LongPolls) -> None:
        self._context = context
        self._polls = polls

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/v1/events",
                handler=self.stream,
                summary="The events of this server's process, as server-sent events.",
                tag="server",
                right=Right.CONSUME,
                arguments=EventArguments,
                response=Media(
                    "text/event-stream",
                    "Events named by their kind, with this JSON as data. The response ends when the server "
                    "drains.",
                    StreamedEvent,
                ),
                errors=("invalid_namespace", "queue_busy", "shutdown_draining"),
            ),
        )

    async def stream(self, exchange: Exchange) -> None:
        arguments = exchange.query(EventArguments)
        if unknown := [name for name in arguments.kinds if name not in _BY_NAME]:
            raise bad_argument(f"there are no events {unknown[0]}; there are {', '.join(_BY_NAME)}")
        queue = pattern_of(arguments.queue, arguments.namespace)
        check_right(exchange.principal, Right.CONSUME, queue)
        if "*" in queue:
            raise bad_argument("queue must be one queue: leave it out for all queues")
        self._context.refuse_when_draining()
        kinds = tuple(_BY_NAME[name] for name in arguments.kinds) or KINDS
        with self._polls.place():
            buffer = EventBuffer(self._context.engine.bus, kinds, queue)
            try:
                await self._write(exchange, buffer)
            finally:
                buffer.close()

    async def _write(self, exchange: Exchange, buffer: EventBuffer) -> None:
        await exchange.start(
            200,
            [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                (b"x-correlation-id", exchange.own_correlation().encode()),
            ],
        )
        # The client can rely on the subscription from here on.
        await exchange.write(b": subscribed\n\n")
        gone = asyncio.ensure_future(exchange.disconnected())
        drained = asyncio.ensure_future(self._context.drained.wait())
        try:
            while not (gone.done() or drained.done()):
                waits = [gone, drained, more := asyncio.ensure_future(buffer.wait())]
                await asyncio.wait(waits, timeout=KEEPALIVE, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
                await exchange.write(buffer.take() or b": keepalive\n\n")
        finally:
            gone.cancel()
            drained.cancel()
        if gone.done() and not gone.cancelled():
            raise Disconnected
        await exchange.write(b"", more=False)


class EventBuffer:
    """The events for one client. The delivery thread of the bus adds them."""

    def __init__(self, bus: Bus, kinds: tuple[type[Event], ...], queue: str) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._woken = asyncio.Event()
        self._number = 0
        self._unsubscribe: Callable[[], None] = bus.subscribe(kinds, self._add)

    def close(self) -> None:
        self._unsubscribe()

    async def wait(self) -> None:
        """Return when there are events."""
        await self._woken.wait()

    def take(self) -> bytes:
        """The waiting events as text."""
        with self._lock:
            self._woken.clear()
            taken, self._events = list(self._events), deque()
            dropped, self._dropped = self._dropped, 0
        pieces = [self._text(type(event).__name__, str(event), _fields(event)) for event in taken]
        if dropped:
            text = f"{dropped} events were dropped: the client reads too slowly"
            pieces.append(self._text("dropped", text, {"count": dropped}))
        return b"".join(pieces)

    def _text(self, name: str, sentence: str, found: dict[str, Any]) -> bytes:
        self._number += 1
        data = msgspec.json.encode(StreamedEvent(event=name, sentence=sentence, fields=found))
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self._number, name.encode(), data)

    def _add(self, event: Event) -> None:
        """In the delivery thread."""
        if self._queue and not _is_of(event, self._queue):
            return
        with self._lock:
            if len(self._events) >= MAX_BUFFERED:
                self._dropped += 1
                return
            self._events.append(event)
            is_first = len(self._events) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._woken.set)


def _is_of(event: Event, queue: str) -> bool:
    """Whether the event is about this queue. A claim is if all of its jobs are of it."""
    if isinstance(event, JobsClaimed):
        return event.queues == (queue,)
    return getattr(event, "queue", None) == queue


def _fields(event: Event) -> dict[str, Any]:
    return {field.name: getattr(event, field.name) for field in fields(event)}
