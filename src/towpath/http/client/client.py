"""`QueueClient`: queues and locks of a server, for programs that block."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from towpath.http.client.calls import BulkAck, BulkEnqueue, Calls, EventStream
from towpath.http.client.connection import DEFAULT_TIMEOUT, settings
from towpath.http.client.consumer import ConsumerOptions, MessageConsumer
from towpath.http.client.documents import (
    DocumentCalls,
    DocumentLease,
    LockCalls,
    StoredDocument,
    read_document,
)
from towpath.http.client.messages import HeldLock, ReceivedMessage, StateDocumentClient
from towpath.http.client.received import MessageStream
from towpath.http.client.requests import (
    Content,
    DeliveryReceipt,
    EnqueueOptions,
    Payload,
    ReceiveOptions,
    Span,
)
from towpath.http.client.transport import SyncTransport, drive
from towpath.http.wire import (
    DescribeResponse,
    EnqueueResponse,
    ExtendResponse,
    StatsResponse,
    WatchEvent,
)

PREFETCH = 16


class ReceivedMessages:
    """An iterator of messages; the request is sent when the first one is asked for. A payload that was not
    read before the next message is stored: in memory up to 4 MiB, else in a temporary file. `with` or `close`
    ends the connection."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, MessageStream | None]]) -> None:
        self._open = open
        self._stream: MessageStream | None = None

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self

    def __next__(self) -> ReceivedMessage:
        if self._stream is None:
            self._stream = drive(self._open())
        found = None if self._stream is None else drive(self._stream.next())
        if found is None:
            raise StopIteration
        return ReceivedMessage(found, drive)

    def close(self) -> None:
        if self._stream is not None:
            drive(self._stream.abandon())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WatchedQueue:
    """An iterator of the changes of a queue's head."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, EventStream]]) -> None:
        self._open = open
        self._events: EventStream | None = None

    def __iter__(self) -> Iterator[WatchEvent]:
        return self

    def __next__(self) -> WatchEvent:
        if self._events is None:
            self._events = drive(self._open())
        found = drive(self._events.next())
        if found is None:
            raise StopIteration
        return found

    def close(self) -> None:
        if self._events is not None:
            drive(self._events.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LockClient:
    """Locks and their documents."""

    def __init__(self, calls: Calls) -> None:
        self._calls = LockCalls(calls)

    def acquire(
        self,
        key: str,
        ttl: Span = 30.0,
        wait: Span | None = None,
        owner: str | None = None,
        namespace: str | None = None,
    ) -> HeldLock:
        """The lock, as soon as it is free; `wait=0` does not wait. Raises `LockBusy` if the time is over.
        `with client.locks.acquire("key"):` renews it and releases it at the end."""
        holder = drive(self._calls.acquire(key, ttl, wait, owner, namespace))
        return HeldLock(holder, drive, self.document(holder.lease))

    def keepalive(self, lease: DocumentLease, ttl: Span = 30.0) -> int:
        """The new end of the lease, in Unix seconds."""
        return drive(self._calls.keepalive(lease, ttl)).expires_at_unix

    def release(self, lease: DocumentLease, rollback: bool = False) -> None:
        drive(self._calls.release(lease, rollback))

    def describe(self, key: str, namespace: str | None = None) -> DescribeResponse:
        return drive(self._calls.describe(key, namespace))

    def document(self, lease: DocumentLease) -> StateDocumentClient:
        """The document of a lease: of a lock, or of the state of a message."""
        return StateDocumentClient(DocumentCalls(self._calls.calls, lease), drive)

    def published(self, key: str, namespace: str | None = None) -> StoredDocument:
        """The document of a key as the last holder has left it."""
        return drive(read_document(self._calls.calls, key, self._calls.namespace(namespace), {}))


class QueueClient:
    """Queues and locks of an HTTP server. Safe for threads; one for a process is enough.

    `server` is `http://host:port`, `https://host:port` or `unix:///path`, or several of them; the next one is
    asked when one does not answer. Without it the variable `TOWPATH_SERVER` is read. `token` is a bearer
    token, or the variable `TOWPATH_TOKEN`. `bundle` is a PEM file with CA, certificate and key; `ca` is a PEM
    file with the CA of the server."""

    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        ca: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        namespace: str = "",
    ) -> None:
        self._settings = settings(
            server, token=token, bundle=bundle, ca=ca, timeout=timeout, namespace=namespace
        )
        self._calls = Calls(self._settings, SyncTransport(self._settings))
        self.locks = LockClient(self._calls)

    def __repr__(self) -> str:
        return f"<queue client of {self._settings}>"

    def enqueue(
        self, queue: str, payload: Payload = b"", **options: Unpack[EnqueueOptions]
    ) -> EnqueueResponse:
        """Store a message; it is durable when this returns. A file or an iterable of bytes is sent piece by
        piece."""
        return drive(self._calls.enqueue(queue, payload, options))

    def enqueue_many(
        self, queue: str, payloads: Iterable[Content], **options: Unpack[EnqueueOptions]
    ) -> list[BulkEnqueue]:
        """Store messages, all or none, with one request and one commit. For a Towpath server."""
        return drive(self._calls.enqueue_many(queue, payloads, options))

    def dequeue(self, queue: str, **options: Unpack[ReceiveOptions]) -> ReceivedMessage | None:
        """The next message, or None if there is none within `wait` seconds (0 without the option)."""
        found = drive(self._calls.dequeue(queue, options))
        return None if found is None else ReceivedMessage(found, drive)

    def dequeue_many(self, queue: str, n: int, **options: Unpack[ReceiveOptions]) -> ReceivedMessages:
        """Up to `n` messages, at most 64; waits only for the first."""
        return ReceivedMessages(partial(self._calls.receive, queue, n, options))

    def subscribe(
        self, queue: str, prefetch: int = PREFETCH, **options: Unpack[ReceiveOptions]
    ) -> ReceivedMessages:
        """Messages as they arrive, in one response. It ends if there is no first message within `wait`
        (without limit if it is not given), and when the server drains. The server sends without waiting for
        acks; `consume` limits the messages that are held."""
        return ReceivedMessages(partial(self._calls.receive, queue, prefetch, options, stream=True))

    def ack(self, receipt: DeliveryReceipt) -> None:
        drive(self._calls.ack(receipt))

    def nack(
        self, receipt: DeliveryReceipt, delay: Span = 0.0, reason: str | None = None, defer: bool = False
    ) -> None:
        drive(self._calls.nack(receipt, delay, reason, defer))

    def extend(self, receipt: DeliveryReceipt, seconds: Span | None = None) -> ExtendResponse:
        return drive(self._calls.extend(receipt, seconds))

    def ack_many(self, receipts: Iterable[DeliveryReceipt]) -> list[BulkAck]:
        """Acknowledge many messages with one request; one that fails does not
        hinder the others. For a Towpath server."""
        return drive(self._calls.ack_many(receipts))

    def stats(self, queue: str, namespace: str | None = None) -> StatsResponse:
        return drive(self._calls.stats(queue, namespace))

    def watch(self, queue: str, namespace: str | None = None) -> WatchedQueue:
        """The head of the queue, now and after each change, until the server drains."""
        return WatchedQueue(partial(self._calls.watch, queue, namespace))

    def consumer(
        self, queue: str, handler: Callable[[ReceivedMessage], object], **options: Unpack[ConsumerOptions]
    ) -> MessageConsumer:
        """A consumer, for `run` and `stop`."""
        return MessageConsumer(self._settings, queue, handler, options)

    def consume(
        self, queue: str, handler: Callable[[ReceivedMessage], object], **options: Unpack[ConsumerOptions]
    ) -> None:
        """Call the handler for each message, in threads, until an error that lasts."""
        self.consumer(queue, handler, **options).run()

    def close(self) -> None:
        drive(self._calls.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
