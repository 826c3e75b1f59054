"""Received messages, their state and held locks, for callers that block and for coroutines. Each class calls
the coroutines of `received` and `documents`; a test compares the two surfaces."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec

from towpath.errors import InvalidInput, TowpathError
from towpath.escapes import get_logger
from towpath.http.client.documents import DocumentCalls, DocumentLease, LockHolder, StoredDocument
from towpath.http.client.received import HeldDelivery
from towpath.http.client.requests import DeliveryReceipt, Span
from towpath.http.wire import MessageView
from towpath.queues.receipts import last_words

log = get_logger("towpath.client")
T = TypeVar("T")


class Runner(Protocol):
    """Runs a coroutine to its end."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


class MessageFacts:
    """The fields of a delivered message."""

    def __init__(self, delivery: HeldDelivery) -> None:
        self._delivery = delivery

    def __repr__(self) -> str:
        return f"<message {self.id} of queue {self.queue}>"

    @property
    def id(self) -> str:
        return self.view.message_id

    @property
    def queue(self) -> str:
        return self.view.queue

    @property
    def attempts(self) -> int:
        """Deliveries, with this one."""
        return self.view.attempts

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self._delivery.size

    @property
    def content_type(self) -> str:
        return self.view.payload_content_type

    @property
    def attributes(self) -> Mapping[str, Any]:
        return self.view.attributes or {}

    @property
    def correlation_id(self) -> str:
        return self.view.correlation_id

    @property
    def view(self) -> MessageView:
        """All fields of the protocol."""
        return self._delivery.view

    @property
    def receipt(self) -> DeliveryReceipt:
        """For `ack`, `nack` and `extend` of the client, also in another process."""
        return self._delivery.receipt

    @property
    def lost(self) -> bool:
        """The lease could not be extended by a consumer: another consumer may have the message."""
        return self._delivery.lost is not None

    @property
    def settled(self) -> bool:
        return self._delivery.settled is not None


class StateDocumentClient:
    """The JSON document of a message or lock: `get`, `update`, `remove`. `expect` is the version that the
    document must have."""

    def __init__(self, calls: DocumentCalls, run: Runner) -> None:
        self._calls, self._run = calls, run

    def get(self) -> StoredDocument:
        return self._run(self._calls.get())

    def update(self, value: Any, expect: int | None = None) -> StoredDocument:
        return self._run(self._calls.update(value, expect))

    def remove(self, expect: int | None = None) -> bool:
        """Whether there was a document."""
        return self._run(self._calls.remove(expect))


class AsyncStateDocumentClient:
    def __init__(self, calls: DocumentCalls) -> None:
        self._calls = calls

    async def get(self) -> StoredDocument:
        return await self._calls.get()

    async def update(self, value: Any, expect: int | None = None) -> StoredDocument:
        return await self._calls.update(value, expect)

    async def remove(self, expect: int | None = None) -> bool:
        return await self._calls.remove(expect)


class ReceivedMessage(MessageFacts):
    """A message that this client holds. Leaving `with message:` without `ack` or `nack` is a nack."""

    def __init__(self, delivery: HeldDelivery, run: Runner) -> None:
        super().__init__(delivery)
        self._run = run

    @property
    def state(self) -> StateDocumentClient:
        """The state of a message that was received with `stateful=True`."""
        lease = DocumentLease.of_state(self.view)
        return StateDocumentClient(DocumentCalls(self._delivery.calls, lease), self._run)

    def read(self) -> bytes:
        """The whole payload. It stays in memory, so that it can be read again."""
        return self._run(self._delivery.read())

    def json(self) -> Any:
        """The payload as JSON. Raises `InvalidInput` if it is none."""
        return _json(self.read())

    def pieces(self) -> Iterator[bytes]:
        """The payload as it arrives; once."""
        while piece := self._run(self._delivery.piece()):
            yield piece

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the payload to a file; return its size."""
        return self._run(self._delivery.save(path))

    def ack(self) -> None:
        """The message is done. Raises `LostLease` if it belongs to another consumer."""
        self._run(self._delivery.ack())

    def nack(self, delay: Span = 0.0, reason: str | None = None, defer: bool = False) -> None:
        """Return the message to its queue after `delay`. It counts as a failed attempt, unless it is a
        `defer`."""
        self._run(self._delivery.nack(delay, reason, defer))

    def extend(self, seconds: Span | None = None) -> None:
        """The lease ends so many seconds from now; None: as many as it had."""
        self._run(self._delivery.extend(seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.settled:
            try:
                self.nack(**last_words(error))
            except TowpathError as failure:
                report_nack(self.id, error, failure)


class AsyncReceivedMessage(MessageFacts):
    """`ReceivedMessage` for coroutines."""

    @property
    def state(self) -> AsyncStateDocumentClient:
        return AsyncStateDocumentClient(
            DocumentCalls(self._delivery.calls, DocumentLease.of_state(self.view))
        )

    async def read(self) -> bytes:
        return await self._delivery.read()

    async def json(self) -> Any:
        return _json(await self.read())

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._delivery.piece():
            yield piece

    async def save(self, path: str | os.PathLike[str]) -> int:
        return await self._delivery.save(path)

    async def ack(self) -> None:
        await self._delivery.ack()

    async def nack(self, delay: Span = 0.0, reason: str | None = None, defer: bool = False) -> None:
        await self._delivery.nack(delay, reason, defer)

    async def extend(self, seconds: Span | None = None) -> None:
        await self._delivery.extend(seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.settled:
            try:
                await self.nack(**last_words(error))
            except TowpathError as failure:
                report_nack(self.id, error, failure)


def report_nack(id: str, error: BaseException | None, failure: TowpathError) -> None:
    """Raise the failure of a nack, unless another exception is on its way."""
    if error is None:
        raise failure
    log.warning("message %s: the nack failed: %s", id, failure)


def _json(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(field="payload", value=payload[:80], expected=f"JSON ({error})") from None


class LockFacts:
    def __init__(self, holder: LockHolder) -> None:
        self._holder = holder

    def __repr__(self) -> str:
        return f"<lock {self.key}>"

    @property
    def key(self) -> str:
        return self._holder.lease.key

    @property
    def fencing_token(self) -> int:
        """Larger than that of every holder before. Pass it to systems that must refuse an old holder."""
        return self._holder.lease.fencing_token

    @property
    def lease(self) -> DocumentLease:
        """For `keepalive`, `release` and `document` of `client.locks`, also in another process."""
        return self._holder.lease

    @property
    def expires_at_unix(self) -> int:
        """The end of the lease when it was acquired."""
        return self._holder.answer.expires_at_unix

    @property
    def version(self) -> int:
        """The version of the document when the lock was acquired."""
        return self._holder.answer.version

    @property
    def lost(self) -> bool:
        return self._holder.lost is not None

    def check(self) -> None:
        """Raise if the lease is lost: call it before work that must not be done twice."""
        self._holder.check()


class HeldLock(LockFacts):
    """A lock. `with lock:` renews it in a thread and releases it at the end; after an exception, changes of
    its document are dropped."""

    def __init__(self, holder: LockHolder, run: Runner, document: StateDocumentClient) -> None:
        super().__init__(holder)
        self._run = run
        self.document = document
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def keepalive(self, ttl: Span | None = None) -> None:
        self._run(self._holder.keepalive(ttl))

    def release(self, rollback: bool = False) -> None:
        self._run(self._holder.release(rollback))

    def __enter__(self) -> Self:
        async def pause(seconds: float) -> bool:
            return self._stopped.wait(seconds)

        self._thread = threading.Thread(
            target=lambda: self._run(self._holder.keep(pause)), name=f"lock {self.key}", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.release(rollback=error is not None)
        except TowpathError as failure:
            _report_release(self.key, error, failure)


class AsyncHeldLock(LockFacts):
    """`HeldLock` for coroutines; a task renews it."""

    def __init__(self, holder: LockHolder, document: AsyncStateDocumentClient) -> None:
        super().__init__(holder)
        self.document = document
        self._task: asyncio.Task[None] | None = None

    async def keepalive(self, ttl: Span | None = None) -> None:
        await self._holder.keepalive(ttl)

    async def release(self, rollback: bool = False) -> None:
        await self._holder.release(rollback)

    async def __aenter__(self) -> Self:
        async def pause(seconds: float) -> bool:
            await asyncio.sleep(seconds)
            return False

        self._task = asyncio.create_task(self._holder.keep(pause))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self.release(rollback=error is not None)
        except TowpathError as failure:
            _report_release(self.key, error, failure)


def _report_release(key: str, error: BaseException | None, failure: TowpathError) -> None:
    if error is None:
        raise failure
    log.warning("lock %s: the release failed: %s", key, failure)
