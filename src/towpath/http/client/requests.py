"""Requests of the client as values, and its errors from responses. Pure: nothing is sent here."""

from __future__ import annotations

import base64
import math
import os
import re
import secrets
import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, BinaryIO, TypedDict, TypeVar
from urllib.parse import urlencode

import msgspec

from towpath.core.checks import SECOND, micros
from towpath.errors import (
    BadResponse,
    CallFailed,
    InvalidInput,
    LockBusy,
    LostLease,
    NotAllowed,
    ServerBusy,
    TowpathError,
)
from towpath.http.client.transport import PIECE, Outgoing, Transport
from towpath.http.problems import ErrorEnvelope
from towpath.http.wire import AckRequest, DequeueRequest, ExtendRequest, MessageView, NackRequest

Span = float | timedelta
Content = bytes | bytearray | memoryview | str
Payload = Content | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]
R = TypeVar("R")

NO_WAIT = -1
TEXT, BINARY = "text/plain; charset=utf-8", "application/octet-stream"
LONG_POLL = 20
"""Seconds that one request waits at the server. A longer wait is several requests, so that a server that
disappears is noticed."""
WAITING = "waiting"
BUSY = (429, 502, 503, 504)
LOST = ("lease_required", "lease_expired", "fencing_mismatch", "queue_message_lease_mismatch")
LOST_RECEIPT = ("cas_mismatch", "lease_conflict", "not_found")
"""Of ack, nack and extend only."""
RECEIPTS = ("ack", "nack", "extend")
_LINE = re.compile(r"[\x20-\x7e]{1,255}")
ZERO = ("priority", 0)
_JSON = (("Content-Type", "application/json"),)


class EnqueueOptions(TypedDict, total=False):
    """Options of a new message. Spans are seconds or timedeltas, rounded up to whole seconds.
    `correlation_id` comes back with every delivery. The last four are not in the protocol of lockd, whose
    server ignores them: a smaller `priority` is delivered sooner; while a message with a `dedupe_key` is not
    done, and for the `dedupe_window` after its enqueue, another one with this key is not stored."""

    namespace: str
    delay: Span
    visibility: Span
    ttl: Span
    max_attempts: int
    attributes: Mapping[str, Any]
    content_type: str
    correlation_id: str
    priority: int | str
    part: str
    dedupe_key: str
    dedupe_window: Span


class ReceiveOptions(TypedDict, total=False):
    """Options of a consumer. `wait`: seconds to wait for the first message, 0 not at all, None without limit.
    `visibility`: the lease of each message. `stateful`: each message has the lease of its state."""

    namespace: str
    wait: Span | None
    visibility: Span
    owner: str
    stateful: bool


class DeliveryReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery of a message: all that an ack, nack or extend needs. Another process may send it."""

    queue: str
    message_id: str
    lease_id: str
    fencing_token: int = 0
    meta_etag: str = ""
    namespace: str = ""
    txn_id: str = ""
    state_lease_id: str = ""
    state_fencing_token: int = 0
    state_etag: str = ""

    @classmethod
    def of(cls, view: MessageView) -> DeliveryReceipt:
        return cls(**{name: getattr(view, name) for name in cls.__struct_fields__})


def whole_seconds(field: str, value: Span) -> int:
    """Seconds, rounded up. Raises `InvalidInput`."""
    return math.ceil(micros(value, field) / SECOND)


def default_owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def json_body(content: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """A JSON object without the fields that have no value."""
    fields = msgspec.structs.asdict(content) if isinstance(content, msgspec.Struct) else content
    # A priority of 0 is not the default; of the other fields 0 is.
    given = {
        name: value for name, value in fields.items() if value not in ("", 0, None) or (name, value) == ZERO
    }
    try:
        return msgspec.json.encode(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(field="request", value=given, expected=f"JSON values ({error})") from None


def post(call: str, path: str, content: msgspec.Struct | Mapping[str, Any], **more: Any) -> Outgoing:
    return Outgoing(call=call, path=path, headers=_JSON, body=json_body(content), **more)


def dequeue(queue: str, seconds: int, page: int, options: ReceiveOptions, stream: bool = False) -> Outgoing:
    """A dequeue or, with `stream`, a subscribe that waits so many seconds for its first message."""
    visibility = options.get("visibility")
    request = DequeueRequest(
        namespace=options.get("namespace", ""),
        queue=queue,
        owner=options.get("owner") or default_owner(),
        visibility_timeout_seconds=0 if visibility is None else whole_seconds("visibility", visibility),
        wait_seconds=seconds or NO_WAIT,
        page_size=page,
    )
    verb = "subscribe" if stream else "dequeue"
    path = f"/v1/queue/{verb}{'WithState' if options.get('stateful') else ''}"
    return post(verb, path, request, wait=None if stream else float(seconds))


def ack(receipt: DeliveryReceipt) -> Outgoing:
    return post("ack", "/v1/queue/ack", AckRequest(**msgspec.structs.asdict(receipt)))


def ack_many(receipts: Iterable[DeliveryReceipt]) -> Outgoing | None:
    """None for no receipts."""
    unused = ("state_fencing_token", "state_etag")
    given = [
        {name: value for name, value in msgspec.structs.asdict(each).items() if name not in unused}
        for each in receipts
    ]
    content = {"receipts": [msgspec.Raw(json_body(each)) for each in given]}
    return post("ackMany", "/v1/queue/ackMany", content) if given else None


def nack(
    receipt: DeliveryReceipt, delay: Span = 0.0, reason: str | None = None, defer: bool = False
) -> Outgoing:
    request = NackRequest(
        **msgspec.structs.asdict(receipt),
        delay_seconds=whole_seconds("delay", delay),
        intent="defer" if defer else "failure",
        last_error=None if reason is None or defer else {"detail": reason},
    )
    return post("nack", "/v1/queue/nack", request)


def extend(receipt: DeliveryReceipt, seconds: Span | None = None) -> Outgoing:
    """None: for the length that the lease had."""
    fields = {name: value for name, value in msgspec.structs.asdict(receipt).items() if name != "state_etag"}
    by = 0 if seconds is None else max(1, whole_seconds("seconds", seconds))
    return post("extend", "/v1/queue/extend", ExtendRequest(**fields, extend_by_seconds=by))


def document(call: str, key: str, namespace: str, headers: Mapping[str, str], body: bytes = b"") -> Outgoing:
    """get, update or remove of a document."""
    query = {"key": key} | ({"namespace": namespace} if namespace else {})
    lines = tuple((name, header_value(name, value)) for name, value in headers.items() if value)
    return Outgoing(call=call, path=f"/v1/{call}?{urlencode(query)}", headers=(*_JSON, *lines), body=body)


def header_value(field: str, value: str) -> str:
    if _LINE.fullmatch(value) is None:
        raise InvalidInput(field=field, value=value, expected="1 to 255 visible ASCII characters")
    return value


def enqueue_meta(queue: str, options: EnqueueOptions, content_type: str) -> dict[str, Any]:
    meta: dict[str, Any] = {"namespace": options.get("namespace", ""), "queue": queue}
    meta["delay_seconds"] = whole_seconds("delay", options.get("delay", 0.0))
    meta["ttl_seconds"] = whole_seconds("ttl", options.get("ttl", 0.0))
    meta["visibility_timeout_seconds"] = whole_seconds("visibility", options.get("visibility", 0.0))
    meta["dedupe_window_ms"] = math.ceil(micros(options.get("dedupe_window", 0.0), "dedupe_window") / 1000)
    for same in ("max_attempts", "priority", "dedupe_key", "part"):
        meta[same] = options.get(same)
    meta["attributes"] = dict(options.get("attributes") or {}) or None
    meta["payload_content_type"] = header_value("content_type", options.get("content_type") or content_type)
    return meta


def enqueue_many(queue: str, payloads: Iterable[Content], options: EnqueueOptions) -> Outgoing | None:
    """Messages that are stored all or none, in one request. None for no messages."""
    correlation = options.get("correlation_id", "")
    messages = []
    for payload in payloads:
        if not isinstance(payload, Content):
            raise InvalidInput(field="payloads", value=payload, expected="bytes or text")
        kind = TEXT if isinstance(payload, str) else BINARY
        content = base64.b64encode(_bytes(payload)).decode()
        meta = enqueue_meta(queue, options, kind) | {"correlation_id": correlation}
        messages.append(msgspec.Raw(json_body(meta | {"payload_base64": content})))
    request = post("enqueueMany", "/v1/queue/enqueueMany", {"messages": messages}, repeatable=False)
    return request if messages else None


def enqueue(queue: str, payload: Payload, options: EnqueueOptions, transport: Transport) -> Outgoing:
    """A message as a multipart body: in one piece if its payload is in memory, else in chunks."""
    boundary = secrets.token_hex(30)
    content_type = TEXT if isinstance(payload, str) else BINARY
    meta = enqueue_meta(queue, options, content_type)
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    head = (
        f'{part}"meta"\r\nContent-Type: application/json\r\n\r\n'.encode()
        + json_body(meta)
        + f'\n\r\n{part}"payload"\r\nContent-Type: {meta["payload_content_type"]}\r\n\r\n'.encode()
    )
    end = f"\r\n--{boundary}--\r\n".encode()
    headers = [("Content-Type", f"multipart/related; boundary={boundary}")]
    if correlation := options.get("correlation_id"):
        headers.append(("X-Correlation-Id", header_value("correlation_id", correlation)))
    body: Any
    if isinstance(payload, Content):
        body = b"".join((head, _bytes(payload), end))
    else:
        body = StreamedPayload(head, payload, end, transport)
    return Outgoing(
        call="enqueue", path="/v1/queue/enqueue", headers=tuple(headers), body=body, repeatable=False
    )


def _bytes(payload: Content) -> bytes:
    if not isinstance(payload, str):
        return bytes(payload)
    try:
        return payload.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field="payload", value=payload, expected="text without lone surrogates") from None


class StreamedPayload:
    """The body of an enqueue whose payload is a binary file or an iterable of bytes."""

    def __init__(self, head: bytes, payload: object, end: bytes, transport: Transport) -> None:
        self._head, self._payload, self._end, self._transport = head, payload, end, transport
        self._start: int | None = None
        if callable(getattr(payload, "read", None)):
            self._start = _position(payload)
        elif isinstance(payload, Mapping) or not isinstance(
            payload, Iterable | AsyncIterable if transport.suspends else Iterable
        ):
            expected = "bytes, text, a binary file or an iterable of bytes"
            raise InvalidInput(field="payload", value=payload, expected=expected)
        self._begun = False
        self._pieces = self._all()

    async def next(self) -> bytes:
        self._begun = True
        return await anext(self._pieces, b"")

    def rewind(self) -> bool:
        if not self._begun:
            return True
        if self._start is None:
            return False
        self._payload.seek(self._start)  # type: ignore[attr-defined]
        self._pieces = self._all()
        return True

    async def _all(self) -> AsyncIterator[bytes]:
        yield self._head
        async for piece in self._content():
            if not isinstance(piece, bytes | bytearray | memoryview):
                raise InvalidInput(field="payload", value=piece, expected="a binary file or pieces of bytes")
            if piece:
                yield bytes(piece)
        yield self._end

    async def _content(self) -> AsyncIterator[Any]:
        payload: Any = self._payload
        if callable(getattr(payload, "read", None)):
            while piece := await self._transport.blocking(payload.read, PIECE):
                yield piece
        elif isinstance(payload, AsyncIterable):
            async for piece in payload:
                yield piece
        else:
            pieces: Iterator[Any] = iter(payload)
            for piece in pieces:
                yield piece


def _position(file: Any) -> int | None:
    """Where a file is read from; None if it cannot be read twice."""
    try:
        return int(file.tell()) if file.seekable() else None
    except (AttributeError, OSError, ValueError):
        return None


def decoded(call: str, server: str, body: bytes, kind: type[R]) -> R:
    """The JSON of a response. Raises `BadResponse`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadResponse(call=call, server=server, why=f"not the expected JSON: {error}") from None


def failure(request: Outgoing, server: str, status: int, location: str | None, body: bytes) -> TowpathError:
    """The error of a response that is not a success."""
    call = request.call
    try:
        envelope = msgspec.json.decode(body, type=ErrorEnvelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if status < 400:
            why = f"status {status}" + ("" if location is None else f", a redirect to {location[:200]}")
            return BadResponse(call=call, server=server, why=why)
        envelope = ErrorEnvelope(error="", detail=body[:200].decode("utf-8", "replace").strip())
    code = envelope.error
    if code in LOST or (call in RECEIPTS and code in LOST_RECEIPT):
        kind: type[CallFailed] = LostLease
    elif code == WAITING and call == "acquire":
        kind = LockBusy
    elif status in (401, 403):
        kind = NotAllowed
    else:
        kind = ServerBusy if status in BUSY else CallFailed
    return kind(
        call=call,
        status=status,
        code=code,
        detail=envelope.detail,
        retry_after=envelope.retry_after_seconds,
        version=envelope.current_version,
        etag=envelope.current_etag,
    )
