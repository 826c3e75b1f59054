"""Messages: jobs that are consumed by hand. Put, get, and then `ack` or `nack` each message.

    orders = app.queue("orders")
    orders.put({"id": 7})
    with orders.get(wait=None) as message:
        handle(message.json())
        message.ack()

Every method has an async form with the prefix `a`. The App renews the lease of a received message until it is
acknowledged, or until `max_hold`. Every command of a message carries its fence: a command after the loss of
the lease raises `LostClaim`."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, Unpack, overload

import msgspec

from towpath.core import checks
from towpath.core.blobs import without_blob
from towpath.core.checks import SECOND, micros
from towpath.core.commands import MAX_BULK, Append, Appended, PutChunk, Renew, Result, Settle, Settled
from towpath.core.job import STATE_TTL, ClaimedJob, Job, Key, KeyPolicy, Reason, Spec, rank, state_key
from towpath.core.views import JobStatus
from towpath.errors import AlreadySettled, InvalidInput, LostClaim, TowpathError
from towpath.escapes import get_logger
from towpath.queues import blobs, receipts
from towpath.queues.queue import QueueGate
from towpath.queues.receipts import Receipt
from towpath.runtime.claims.receiver import LeaseTerms, Receiver, Steps, Subscription, arun, run
from towpath.runtime.engine import Engine, same_as
from towpath.runtime.notes import Document
from towpath.tasks import codec
from towpath.tasks.new_jobs import aappend_on, append_on, inherited, new_id, running, traced

log = get_logger("towpath.messages")

Span = float | timedelta

_BINARY: Final = "application/octet-stream"
_POLICIES: Final[Mapping[str, KeyPolicy]] = {
    "keep": KeyPolicy.UNIQUE,
    "replace": KeyPolicy.REPLACE,
    "serial": KeyPolicy.SERIAL,
}


class PutOptions(TypedDict, total=False):
    """The options of `put`. Spans are seconds or timedeltas. `on` is a connection of yours to the ledger's
    database: the message is part of its transaction."""

    on: Any
    delay: Span
    priority: int | str
    part: str
    key: str
    on_conflict: Literal["keep", "replace", "serial"]
    ttl: Span
    headers: Mapping[str, str]
    content_type: str
    correlation_id: str | None
    max_attempts: int
    id: str


class Queue(QueueGate):
    """A queue of messages, with its limits (`configure`, `pause`, `stats`). Making the object writes
    nothing."""

    _engine: Engine

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"

    def put(self, payload: object, **options: Unpack[PutOptions]) -> str:
        """Add a message and return its id, or the id of the message that already holds its key. Returns when
        it is durable. Bytes and text are stored as they are, other values as JSON. A binary file or an
        iterator of bytes may have any size: it is read and stored chunk by chunk."""
        if (stream := blobs.stream_of(payload)) is not None:
            _refuse_on(options)
            payload = blobs.store(stream, self._engine.committer.call)
        return self._append((self._spec(payload, options),), options)[0]

    @same_as(put)
    async def aput(self, payload: object, **options: Unpack[PutOptions]) -> str:
        if (stream := blobs.astream_of(payload)) is not None:
            _refuse_on(options)
            payload = await blobs.astore(stream, self._put_chunk)
        return (await self._aappend((self._spec(payload, options),), options))[0]

    def put_many(self, payloads: Iterable[object], **options: Unpack[PutOptions]) -> list[str]:
        """Add a message for each payload, all or none, in one commit. `id` and `key` are for single
        messages."""
        specs = self._specs(payloads, options)
        return self._append(specs, options) if specs else []

    @same_as(put_many)
    async def aput_many(self, payloads: Iterable[object], **options: Unpack[PutOptions]) -> list[str]:
        specs = self._specs(payloads, options)
        return await self._aappend(specs, options) if specs else []

    @overload
    def get(self, wait: None, lease: Span = 30.0, max_hold: Span = 3600.0) -> Message: ...

    @overload
    def get(self, wait: Span = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0) -> Message | None: ...

    def get(self, wait: Span | None = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0) -> Message | None:
        """The next message, or None if none arrives within `wait` seconds; `wait=None` waits until one
        arrives. The lease is renewed while the process lives, at most `max_hold` seconds; after a crash the
        message is delivered again when `lease` seconds have passed."""
        found = self.get_many(1, wait, lease, max_hold)
        return found[0] if found else None

    @overload
    async def aget(self, wait: None, lease: Span = 30.0, max_hold: Span = 3600.0) -> Message: ...

    @overload
    async def aget(self, wait: Span = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0) -> Message | None: ...

    @same_as(get)
    async def aget(
        self, wait: Span | None = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0
    ) -> Message | None:
        found = await self.aget_many(1, wait, lease, max_hold)
        return found[0] if found else None

    def get_many(
        self, n: int, wait: Span | None = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0
    ) -> list[Message]:
        """Up to n messages; waits only for the first."""
        return run(self._fetch(n, wait, terms_of(lease, max_hold)))

    @same_as(get_many)
    async def aget_many(
        self, n: int, wait: Span | None = 0.0, lease: Span = 30.0, max_hold: Span = 3600.0
    ) -> list[Message]:
        return await arun(self._fetch(n, wait, terms_of(lease, max_hold)))

    def subscribe(
        self, lease: Span = 30.0, prefetch: int = 8, max_hold: Span = 3600.0
    ) -> Subscription[Message]:
        """All messages as they arrive, for `for` and `async for`; `prefetch` of them are claimed ahead."""
        checks.whole("prefetch", prefetch, 1, MAX_BULK)
        engine, terms = self._engine, terms_of(lease, max_hold)
        return Subscription(
            Receiver(engine, self.name, terms), prefetch, lambda claim: Message(engine, claim, terms)
        )

    async def _put_chunk(self, command: PutChunk) -> asyncio.Future[Result]:
        return asyncio.ensure_future(self._engine.committer.acall(command))

    def _append(self, specs: tuple[Spec, ...], options: PutOptions) -> list[str]:
        on = options.get("on")
        return _ids(
            self._engine.committer.call(Append(specs))
            if on is None
            else append_on(self._engine.ledger, on, specs)
        )

    async def _aappend(self, specs: tuple[Spec, ...], options: PutOptions) -> list[str]:
        on = options.get("on")
        return _ids(
            await (
                self._engine.committer.acall(Append(specs))
                if on is None
                else aappend_on(self._engine.ledger, on, specs)
            )
        )

    def _fetch(self, n: int, wait: Span | None, terms: LeaseTerms) -> Steps[list[Message]]:
        checks.whole("n", n, 1, MAX_BULK)
        seconds = math.inf if wait is None else micros(wait, "wait") / SECOND
        claims = yield from Receiver(self._engine, self.name, terms).fetch(n, seconds)
        return [Message(self._engine, claim, terms) for claim in claims]

    def _specs(self, payloads: Iterable[object], options: PutOptions) -> tuple[Spec, ...]:
        for field in ("id", "key"):
            if field in options:
                message = f"put_many takes no {field}, because it names one message: use put"
                raise InvalidInput(
                    field=field, value=options.get(field), expected="left out", message=message
                )
        if isinstance(payloads, str | bytes | bytearray | memoryview | Mapping):
            raise InvalidInput(
                field="payloads", value=payloads, expected="a list of payloads, not a single one"
            )
        return tuple([self._spec(payload, options) for payload in payloads])

    def _spec(self, payload: object, options: PutOptions) -> Spec:
        if isinstance(payload, blobs.StoredPayload):
            fields: dict[str, Any] = {**payload.fields(), "content_type": _BINARY}
        else:
            body, content_type = _body(payload)
            fields = {"payload": body, "content_type": content_type}
        fields = {"id": new_id(), **fields, **options}
        if unknown := options.keys() - PutOptions.__annotations__.keys():
            raise TypeError(str(checks.unknown("option", min(unknown), PutOptions.__annotations__, "put")))
        if "delay" in fields:
            fields["delay"] = micros(fields["delay"], "delay")
        if "ttl" in fields:
            fields["ttl"] = checks.some_micros(fields["ttl"], "ttl")
        conflict, _ = fields.pop("on_conflict", None), fields.pop("on", None)
        if "key" in fields:
            fields["key"] = _key(fields["key"], conflict or "keep")
        elif conflict is not None:
            raise checks.without_key("on_conflict", conflict, "put(payload, key=..., on_conflict=...)")
        fields["priority"] = rank(fields.get("priority", "normal"), self._engine.priorities)
        parent = running.get()
        fields = traced(fields) if parent is None else inherited(parent.record, fields)
        return Spec(queue=self.name, **fields)


class MessageState(Document):
    """The state of a message: the note `state/<id>`."""


class Message:
    """A received message. `lost` becomes true when the lease is lost, `cancel_requested` when a cancel is
    requested; the heartbeat sets both. Leaving its `with` without ack or nack is a nack."""

    def __init__(self, engine: Engine, claim: ClaimedJob, terms: LeaseTerms) -> None:
        self._engine = engine
        self._claim = claim
        self.receipt = Receipt.of(claim)
        """Id and fence, for `towpath ack`, `nack` and `extend` in another process; `str()` is its text."""
        self._lease = terms.lease
        self._until = time.monotonic() + terms.max_hold
        self._state: MessageState | None = None
        self._payload: bytes | None = None
        self._settled = ""
        """The outcome of the delivery in one word, if it was settled here."""
        self.lost = False
        self.cancel_requested: Reason | None = claim.job.cancel_requested
        self._hold()

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.record.queue}, attempt {self.attempt}>"

    @property
    def job(self) -> JobStatus:
        """The job of the message at the time of the claim. Made at each access."""
        return codec.job_status(self.record, None)

    @property
    def record(self) -> Job:
        """The record of the job at the time of the claim, as the ledger stores it."""
        return self._claim.job

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def payload(self) -> bytes:
        """The stored bytes, of at most 16 MiB; `text()` and `json()` decode them. `chunks()` reads a payload
        of any size."""
        if self._payload is None:
            self._payload = blobs.whole(self.record, self._engine.ledger.chunk)
        return self._payload

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.record.size

    def chunks(self) -> blobs.Chunks:
        """The payload in pieces, for `for` and `async for`. A large one is read from the ledger piece by
        piece, 1 MiB at a time."""
        return blobs.Chunks(self.record, self._engine.ledger.chunk)

    @property
    def headers(self) -> Mapping[str, str]:
        return without_blob(self.record.headers)

    @property
    def content_type(self) -> str:
        return self.record.content_type

    @property
    def correlation_id(self) -> str | None:
        return self.record.correlation_id

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self.record.attempts

    @property
    def fence(self) -> int:
        """Grows with every delivery of this message. Pass it to systems that must refuse an older
        delivery."""
        return self.record.fence

    @property
    def state(self) -> MessageState:
        """A JSON document that survives nacks and crashes; the ack deletes it."""
        if self._state is None:
            self._state = MessageState(
                self._engine.ledger, self._engine.committer, state_key(self.id), STATE_TTL
            )
        return self._state

    def text(self) -> str:
        try:
            return self.payload.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(
                field="payload", value=self.payload, expected=f"text in UTF-8: {error}"
            ) from None

    def json(self, type: Any = Any) -> Any:
        """The payload as a value, checked against a type if one is given."""
        try:
            return msgspec.json.decode(self.payload, type=type)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidInput(field="payload", value=self.payload, expected=f"JSON: {error}") from None

    def ack(self, result: object = None) -> None:
        """The message is done; its state is deleted. `result` is stored with the finished job."""
        command = self._ack(result)
        self._close(command, self._engine.committer.call(command))

    @same_as(ack)
    async def aack(self, result: object = None) -> None:
        command = self._ack(result)
        self._close(command, await self._engine.committer.acall(command))

    def nack(self, delay: Span = 0.0, reason: str | None = None, defer: bool = False) -> None:
        """Not done: deliver the message again after `delay`. Counts as a failure with that reason, and the
        last failure that `max_attempts` allows makes it a dead letter; `defer` postpones it without a
        failure."""
        command = self._nack(delay, reason, defer)
        self._close(command, self._engine.committer.call(command))

    @same_as(nack)
    async def anack(self, delay: Span = 0.0, reason: str | None = None, defer: bool = False) -> None:
        command = self._nack(delay, reason, defer)
        self._close(command, await self._engine.committer.acall(command))

    def extend(self, seconds: Span) -> None:
        """Renew the lease for so many seconds from now, whatever `max_hold` is."""
        self._extended(self._engine.committer.call(self._renew(seconds)), seconds)

    @same_as(extend)
    async def aextend(self, seconds: Span) -> None:
        self._extended(await self._engine.committer.acall(self._renew(seconds)), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            try:
                self.nack(**receipts.last_words(error))
            except TowpathError as failure:
                self._report_failed_nack(error, failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            try:
                await self.anack(**receipts.last_words(error))
            except TowpathError as failure:
                self._report_failed_nack(error, failure)

    def _ack(self, result: object) -> Settle:
        body = None if result is None else _body(result, "result")[0]
        self._check_open()
        # The first claim of all cannot have left a state behind.
        return receipts.ack(self.receipt, body, stateful=self.fence > 1 or self._state is not None)

    def _nack(self, delay: Span, reason: str | None, defer: bool) -> Settle:
        self._check_open()
        return receipts.nack(self.receipt, micros(delay, "delay"), reason, defer)

    def _close(self, command: Settle, answer: Result) -> None:
        self._engine.leases.drop(self.id, self.fence)
        assert isinstance(answer, Settled)
        self._settled = receipts.outcome_of(answer)
        receipts.settled(command, answer)

    def _check_open(self) -> None:
        if self._settled:
            raise AlreadySettled(id=self.id, fence=self.fence, outcome=self._settled)

    def _renew(self, seconds: Span) -> Renew:
        self._check_open()
        return receipts.extend(self.receipt, micros(seconds, "seconds"))

    def _extended(self, answer: Result, seconds: Span) -> None:
        try:
            receipts.extended(self.receipt, answer)
        except LostClaim:
            self.lost = True
            raise
        self._lease = micros(seconds, "seconds")
        self._until = max(self._until, time.monotonic() + self._lease / SECOND)
        self._hold()

    def _hold(self) -> None:
        """Hold the lease by weak references: a message that the program dropped must not be renewed."""
        me = weakref.ref(self)

        def on_lost(id: str) -> None:
            if (message := me()) is not None:
                message.lost = True

        def on_cancel(id: str, reason: Reason) -> None:
            if (message := me()) is not None:
                message.cancel_requested = reason

        self._engine.leases.hold((self._claim,), self._lease, on_lost, on_cancel, self._until)

    def _report_failed_nack(self, error: BaseException | None, failure: TowpathError) -> None:
        """The nack failed; an exception of the user's block is more important."""
        self._engine.leases.drop(self.id, self.fence)
        if error is None:
            raise failure
        log.warning("message %s: the nack failed: %s", self.id, failure)


def terms_of(lease: Span, max_hold: Span) -> LeaseTerms:
    return LeaseTerms(micros(lease, "lease"), micros(max_hold, "max_hold") / SECOND)


def _body(payload: object, field: str = "payload") -> tuple[bytes, str]:
    """The payload as bytes, and its content type."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), _BINARY
    if isinstance(payload, str):
        try:
            return payload.encode(), "text/plain; charset=utf-8"
        except UnicodeEncodeError:
            raise InvalidInput(field=field, value=payload, expected="text without lone surrogates") from None
    return codec.encode(payload, field), "application/json"


def _refuse_on(options: PutOptions) -> None:
    """The chunks of a stream are committed before its message, and an open transaction may exclude them."""
    if (on := options.get("on")) is not None:
        raise InvalidInput(field="on", value=on, expected="left out beside a stream")


def _key(name: str, conflict: str) -> Key:
    if conflict not in _POLICIES:
        raise InvalidInput(field="on_conflict", value=conflict, expected="keep, replace or serial")
    return Key(name, _POLICIES[conflict])


def _ids(answer: Result) -> list[str]:
    assert isinstance(answer, Appended)
    return [placed.id for placed in answer.jobs]
