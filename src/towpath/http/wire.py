"""The JSON types of the protocol, in the order of their fields on the wire, and the rules for names and ids.

A field with a default is left out of a response when it has that value."""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from towpath.http.problems import Problem, bad_body

MAX_JSON = 64 * 1024
"""Bytes of a JSON body, and of the meta part of an enqueue."""
MAX_NAME = 128
MAX_CORRELATION = 128
DEFAULT_NAMESPACE = "default"
"""Queues of this namespace have their plain name in the ledger: `app.queue("orders")` is the same queue."""

R = TypeVar("R", bound=msgspec.Struct)
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_NAME = re.compile(r"[a-z0-9._-]{1,128}")
_VISIBLE = re.compile(r"[\x20-\x7e]{1,128}")
_TXN = re.compile(r"[0-9a-v]{20}")


class _JsonRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    namespace: str = ""
    queue: str = ""


class EnqueueMeta(msgspec.Struct, kw_only=True):
    """The meta part. Unknown fields are ignored. The last fields are not lockd's: `delay_ms` and `ttl_ms`
    are milliseconds instead of seconds; a smaller `priority` is delivered sooner. While a message with a
    `dedupe_key` is not done, and for `dedupe_window_ms` after its enqueue, another one with the key is not
    stored: the answer is the first message."""

    namespace: str = ""
    queue: str = ""
    delay_seconds: Int64 = 0
    visibility_timeout_seconds: Int64 = 0
    ttl_seconds: Int64 = 0
    max_attempts: Int64 = 0
    attributes: dict[str, Any] | None = None
    payload_content_type: str = ""
    priority: int | str = ""
    delay_ms: Int64 = 0
    ttl_ms: Int64 = 0
    dedupe_key: str = ""
    dedupe_window_ms: Int64 = 0
    part: str = ""


class EnqueueResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str = ""
    queue: str
    message_id: str
    attempts: int
    max_attempts: int
    failure_attempts: int = 0
    not_visible_until_unix: int
    visibility_timeout_seconds: int
    payload_bytes: int
    correlation_id: str = ""
    duplicate: bool = False
    """Another message holds the `dedupe_key`; `message_id` is its id."""


class DequeueRequest(_JsonRequest, forbid_unknown_fields=True, kw_only=True):
    owner: str = ""
    txn_id: str = ""
    visibility_timeout_seconds: Int64 = 0
    wait_seconds: Int64 = 0
    page_size: Int64 = 0
    start_after: str = ""


class MessageView(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str = ""
    queue: str
    message_id: str
    attempts: int
    max_attempts: int
    failure_attempts: int = 0
    not_visible_until_unix: int
    visibility_timeout_seconds: int
    attributes: dict[str, Any] | None = None
    payload_content_type: str = ""
    payload_bytes: int
    correlation_id: str = ""
    lease_id: str
    lease_expires_at_unix: int
    fencing_token: int
    txn_id: str = ""
    meta_etag: str
    state_etag: str = ""
    state_lease_id: str = ""
    state_lease_expires_at_unix: int = 0
    state_fencing_token: int = 0
    state_txn_id: str = ""


class DequeueResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    message: MessageView
    next_cursor: str = ""


class AckRequest(_JsonRequest, forbid_unknown_fields=True, kw_only=True):
    message_id: str = ""
    lease_id: str = ""
    txn_id: str = ""
    fencing_token: Int64 = 0
    meta_etag: str = ""
    state_etag: str = ""
    state_lease_id: str = ""
    state_fencing_token: Int64 = 0


class AckResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    acked: bool
    correlation_id: str = ""


class NackRequest(AckRequest, forbid_unknown_fields=True, kw_only=True):
    delay_seconds: Int64 = 0
    intent: str = ""
    last_error: Any = None


class NackResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    requeued: bool
    meta_etag: str
    correlation_id: str = ""


class ExtendRequest(_JsonRequest, forbid_unknown_fields=True, kw_only=True):
    message_id: str = ""
    lease_id: str = ""
    txn_id: str = ""
    fencing_token: Int64 = 0
    meta_etag: str = ""
    extend_by_seconds: Int64 = 0
    state_lease_id: str = ""
    state_fencing_token: Int64 = 0


class ExtendResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    lease_expires_at_unix: int
    visibility_timeout_seconds: int
    meta_etag: str
    state_lease_expires_at_unix: int = 0
    correlation_id: str = ""


class StatsRequest(_JsonRequest, forbid_unknown_fields=True, kw_only=True):
    """Of stats and watch."""


class StatsResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str
    queue: str
    waiting_consumers: int
    pending_candidates: int
    total_consumers: int
    has_active_watcher: bool
    available: bool
    head_message_id: str = ""
    head_enqueued_at_unix: int = 0
    head_not_visible_until_unix: int = 0
    head_age_seconds: int = 0
    correlation_id: str = ""


class WatchEvent(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str
    queue: str
    available: bool
    head_message_id: str = ""
    changed_at_unix: int
    correlation_id: str = ""


class AcquireRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    namespace: str = ""
    key: str = ""
    ttl_seconds: Int64 = 0
    owner: str = ""
    block_seconds: Int64 = 0
    if_not_exists: bool = False
    txn_id: str = ""


class AcquireResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str
    lease_id: str
    txn_id: str = ""
    key: str
    owner: str
    expires_at_unix: int
    version: int
    state_etag: str = ""
    fencing_token: int = 0
    correlation_id: str = ""


class KeepaliveRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    namespace: str = ""
    key: str = ""
    lease_id: str = ""
    ttl_seconds: Int64 = 0
    txn_id: str = ""


class KeepaliveResponse(msgspec.Struct):
    expires_at_unix: int


class ReleaseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    namespace: str = ""
    key: str = ""
    lease_id: str = ""
    txn_id: str = ""
    rollback: bool = False


class ReleaseResponse(msgspec.Struct):
    released: bool


class UpdateResponse(msgspec.Struct):
    new_version: int
    new_state_etag: str
    bytes: int
    metadata: dict[str, Any] = {}


class RemoveResponse(msgspec.Struct):
    removed: bool
    new_version: int


class DescribeResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    namespace: str
    key: str
    owner: str = ""
    lease_id: str = ""
    expires_at_unix: int = 0
    version: int
    state_etag: str = ""
    updated_at_unix: int = 0
    metadata: dict[str, Any]


class KeyArguments(msgspec.Struct, kw_only=True):
    """The query string of the calls about the document of a key."""

    key: Annotated[str, msgspec.Meta(description="The key, or `q/<queue>/state/<message id>`.")]
    namespace: str = ""
    public: Annotated[str, msgspec.Meta(description="`1`: without a lease, as published. For get.")] = ""


def encode(value: object) -> bytes:
    """One JSON object and a line feed. Like Go, escape the characters that HTML would interpret."""
    text = msgspec.json.encode(value)
    if b"<" in text or b">" in text or b"&" in text:
        text = text.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    return text + b"\n"


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@lru_cache(maxsize=64)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(body: bytes, kind: type[R]) -> R:
    """The JSON object of a body; an empty body is an object without fields, and a field that is null is left
    out, as in Go."""
    try:
        found: R = _decoder(kind).decode(body or b"{}")
        return found
    except _UNREADABLE as error:
        with contextlib.suppress(*_UNREADABLE):
            return _without_nulls(body, kind)
        raise bad_body(str(error) or "the JSON is nested too deep") from None


def _without_nulls(body: bytes, kind: type[R]) -> R:
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    known = kind.__struct_fields__
    return msgspec.convert(
        {name: fields[name] for name in fields if fields[name] is not None or name not in known}, kind
    )


class QueueName(NamedTuple):
    """A queue as the client names it, and its name in the ledger."""

    namespace: str
    queue: str
    stored: str


@lru_cache(maxsize=4096)
def queue_name(namespace: str, queue: str) -> QueueName:
    """Any spelling of a name is the lower-case name. Raises a `Problem`."""
    space = namespace_name(namespace)
    name = queue.strip().lower()
    if not name:
        raise Problem(400, "missing_queue", "queue must be given")
    if _NAME.fullmatch(name) is None:
        detail = f"queue must be 1 to {MAX_NAME} letters, digits or ._-"
        raise Problem(400, "invalid_queue", detail)
    stored = name if space == DEFAULT_NAMESPACE else f"{space}/{name}"
    if len(stored) > 255:
        raise Problem(400, "invalid_queue", "namespace and queue together have more than 254 characters")
    return QueueName(space, name, stored)


def namespace_name(namespace: str) -> str:
    name = namespace.strip().lower()
    if _NAME.fullmatch(name) is None or name.startswith("."):
        detail = f"namespace must be 1 to {MAX_NAME} letters, digits or ._- and must not begin with a dot"
        raise Problem(400, "invalid_namespace", detail)
    return name


def correlation_of(text: str | None) -> str:
    """A correlation id of a client in its normal form; empty if it cannot be used."""
    if text is None:
        return ""
    found = text.strip()
    return found if _VISIBLE.fullmatch(found) is not None else ""


class LeaseIds(NamedTuple):
    """The ids of one delivery. Every server on the ledger derives them from the message id and the fence, so
    that no server stores them."""

    lease: str
    txn: str
    state_lease: str
    meta_etag: str


def lease_ids(message_id: str, fence: int) -> LeaseIds:
    digest = blake2b(f"{message_id}\0{fence}".encode(), digest_size=40, person=b"towpath-lease").hexdigest()
    # The form of an xid: 20 characters, of which the last carries one bit.
    return LeaseIds(f"{digest[:19]}0", f"{digest[20:39]}0", f"{digest[40:59]}0", digest[60:])


def is_txn(text: str) -> bool:
    return _TXN.fullmatch(text) is not None
