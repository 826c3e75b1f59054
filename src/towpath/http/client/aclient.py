"""`AsyncQueueClient`: the surface of `QueueClient` for coroutines. A test compares the two."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from towpath.http.client.calls import BulkAck, BulkEnqueue, Calls, EventStream
from towpath.http.client.client import PREFETCH
from towpath.http.client.connection import DEFAULT_TIMEOUT, settings
from towpath.http.client.consumer import AsyncMessageConsumer, ConsumerOptions
from towpath.http.client.documents import (
    DocumentCalls,
    DocumentLease,
    LockCalls,
    StoredDocument,
    read_document,
)
from towpath.http.client.messages import AsyncHeldLock, AsyncReceivedMessage, AsyncStateDocumentClient
from towpath.http.client.received import MessageStream
from towpath.http.client.requests import (
    Content,
    DeliveryReceipt,
    EnqueueOptions,
    Payload,
    ReceiveOptions,
    Span,
)
from towpath.http.client.transport import AsyncTransport
from towpath.http.wire import (
    DescribeResponse,
    EnqueueResponse,
    ExtendResponse,
    StatsResponse,
    WatchEvent,
)


class AsyncReceivedMessages:
    """`ReceivedMessages` for coroutines."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, MessageStream | None]]) -> None:
        self._open = open
        self._stream: MessageStream | None = None

    def __aiter__(self) -> AsyncIterator[AsyncReceivedMessage]:
        return self

    async def __anext__(self) -> AsyncReceivedMessage:
        if self._stream is None:
            self._stream = await self._open()
        found = None if self._stream is None else await self._stream.next()
        if found is None:
            raise StopAsyncIteration
        return AsyncReceivedMessage(found)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncWatchedQueue:
    """`WatchedQueue` for coroutines."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, EventStream]]) -> None:
        self._open = open
        self._events: EventStream | None = None

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        if self._events is None:
            self._events = await self._open()
        found = await self._events.next()
        if found is None:
            raise StopAsyncIteration
        return found

    async def close(self) -> None:
        if self._events is not None:
            await self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncLockClient:
    """`LockClient` for coroutines."""

    def __init__(self, calls: Calls) -> None:
        self._calls = LockCalls(calls)

    async def acquire(
        self,
        key: str,
        ttl: Span = 30.0,
        wait: Span | None = None,
        owner: str | None = None,
        namespace: str | None = None,
    ) -> AsyncHeldLock:
        holder = await self._calls.acquire(key, ttl, wait, owner, namespace)
        return AsyncHeldLock(holder, self.document(holder.lease))

    async def keepalive(self, lease: DocumentLease, ttl: Span = 30.0) -> int:
        return (await self._calls.keepalive(lease, ttl)).expires_at_unix

    async def release(self, lease: DocumentLease, rollback: bool = False) -> None:
        await self._calls.release(lease, rollback)

    async def describe(self, key: str, namespace: str | None = None) -> DescribeResponse:
        return await self._calls.describe(key, namespace)

    def document(self, lease: DocumentLease) -> AsyncStateDocumentClient:
        return AsyncStateDocumentClient(DocumentCalls(self._calls.calls, lease))

    async def published(self, key: str, namespace: str | None = None) -> StoredDocument:
        return await read_document(self._calls.calls, key, self._calls.namespace(namespace), {})


class AsyncQueueClient:
    """`QueueClient` for coroutines."""

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
        self._calls = Calls(self._settings, AsyncTransport(self._settings))
        self.locks = AsyncLockClient(self._calls)

    def __repr__(self) -> str:
        return f"<queue client of {self._settings}>"

    async def enqueue(
        self, queue: str, payload: Payload = b"", **options: Unpack[EnqueueOptions]
    ) -> EnqueueResponse:
        return await self._calls.enqueue(queue, payload, options)

    async def enqueue_many(
        self, queue: str, payloads: Iterable[Content], **options: Unpack[EnqueueOptions]
    ) -> list[BulkEnqueue]:
        return await self._calls.enqueue_many(queue, payloads, options)

    async def dequeue(self, queue: str, **options: Unpack[ReceiveOptions]) -> AsyncReceivedMessage | None:
        found = await self._calls.dequeue(queue, options)
        return None if found is None else AsyncReceivedMessage(found)

    def dequeue_many(self, queue: str, n: int, **options: Unpack[ReceiveOptions]) -> AsyncReceivedMessages:
        return AsyncReceivedMessages(partial(self._calls.receive, queue, n, options))

    def subscribe(
        self, queue: str, prefetch: int = PREFETCH, **options: Unpack[ReceiveOptions]
    ) -> AsyncReceivedMessages:
        return AsyncReceivedMessages(partial(self._calls.receive, queue, prefetch, options, stream=True))

    async def ack(self, receipt: DeliveryReceipt) -> None:
        await self._calls.ack(receipt)

    async def nack(
        self, receipt: DeliveryReceipt, delay: Span = 0.0, reason: str | None = None, defer: bool = False
    ) -> None:
        await self._calls.nack(receipt, delay, reason, defer)

    async def extend(self, receipt: DeliveryReceipt, seconds: Span | None = None) -> ExtendResponse:
        return await self._calls.extend(receipt, seconds)

    async def ack_many(self, receipts: Iterable[DeliveryReceipt]) -> list[BulkAck]:
        return await self._calls.ack_many(receipts)

    async def stats(self, queue: str, namespace: str | None = None) -> StatsResponse:
        return await self._calls.stats(queue, namespace)

    def watch(self, queue: str, namespace: str | None = None) -> AsyncWatchedQueue:
        return AsyncWatchedQueue(partial(self._calls.watch, queue, namespace))

    def consumer(
        self,
        queue: str,
        handler: Callable[[AsyncReceivedMessage], Awaitable[object]],
        **options: Unpack[ConsumerOptions],
    ) -> AsyncMessageConsumer:
        return AsyncMessageConsumer(self._settings, queue, handler, options)

    async def consume(
        self,
        queue: str,
        handler: Callable[[AsyncReceivedMessage], Awaitable[object]],
        **options: Unpack[ConsumerOptions],
    ) -> None:
        await self.consumer(queue, handler, **options).run()

    async def close(self) -> None:
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
