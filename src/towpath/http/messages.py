"""Messages on the wire and in the ledger: the payload and the attributes of an enqueue, the view of a
delivery."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from towpath.core.blobs import HEADER, without_blob
from towpath.core.checks import SECOND
from towpath.core.job import PRIORITIES, Job, Key, KeyPolicy, Spec, rank
from towpath.http.multipart import BINARY
from towpath.http.problems import Problem, bad_body
from towpath.http.wire import DequeueResponse, EnqueueMeta, LeaseIds, MessageView, QueueName, lease_ids
from towpath.queues.blobs import StoredPayload

MILLISECOND = SECOND // 1000
MAX_ATTEMPTS = 5
"""Failed attempts after which a message is a dead letter, if the producer asks for no other number."""
ATTRIBUTES = "towpath-attributes"
"""The header of a message for the attributes that are not text. The others are headers of their own."""
_CONTENT_TYPE = re.compile(r"[\x20-\x7e]{1,255}")


def too_large(limit: int) -> Problem:
    detail = f"the payload has more than {limit} bytes, the largest that this server stores"
    return Problem(413, "payload_too_large", detail)


def spec_of(
    id: str,
    name: QueueName,
    meta: EnqueueMeta,
    payload: StoredPayload,
    correlation: str,
    priorities: Mapping[str, int] = PRIORITIES,
) -> Spec:
    """The spec of a message. Raises a `Problem` or `InvalidInput`."""
    content_type = meta.payload_content_type or BINARY
    if _CONTENT_TYPE.fullmatch(content_type) is None:
        raise bad_body("payload_content_type must be 1 to 255 visible characters")
    if meta.dedupe_window_ms and not meta.dedupe_key:
        raise bad_body("dedupe_window_ms needs a dedupe_key")
    delay, ttl = _milliseconds(meta, "delay"), _milliseconds(meta, "ttl")
    window = max(0, meta.dedupe_window_ms) * MILLISECOND
    attempts = meta.max_attempts if meta.max_attempts > 0 else MAX_ATTEMPTS
    return Spec(
        id=id,
        queue=name.stored,
        **payload.fields(),
        content_type=content_type,
        headers=headers_of(meta.attributes or {}),
        priority=rank("normal" if meta.priority == "" else meta.priority, priorities),
        part=meta.part or None,
        delay=delay,
        ttl=ttl or None,
        key=Key(meta.dedupe_key, KeyPolicy.UNIQUE, window) if meta.dedupe_key else None,
        max_attempts=attempts,
        # A consumer that crashed is a failed attempt too.
        max_losses=attempts,
        correlation_id=correlation,
    )


def _milliseconds(meta: EnqueueMeta, name: str) -> int:
    """A span of a message, in microseconds: `<name>_ms`, or else `<name>_seconds`."""
    exact, whole = getattr(meta, f"{name}_ms"), getattr(meta, f"{name}_seconds")
    if exact > 0 and whole > 0:
        raise bad_body(f"{name}_ms and {name}_seconds exclude each other: give one of them")
    return int(max(0, exact) * MILLISECOND or max(0, whole) * SECOND)


def headers_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    headers = {key: value for key, value in attributes.items() if _is_header(key, value)}
    if rest := {key: value for key, value in attributes.items() if key not in headers}:
        headers[ATTRIBUTES] = msgspec.json.encode(rest).decode()
    return headers


def _is_header(key: str, value: object) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(key) <= 255
        and "\0" not in key + value
        and key not in (ATTRIBUTES, HEADER)
    )


def attributes_of(headers: Mapping[str, str]) -> dict[str, Any] | None:
    """None if there are none."""
    headers = without_blob(headers)
    if ATTRIBUTES not in headers:
        return dict(headers) or None
    found: dict[str, Any] = {key: value for key, value in headers.items() if key != ATTRIBUTES}
    try:
        return found | msgspec.json.decode(headers[ATTRIBUTES], type=dict[str, Any])
    except msgspec.MsgspecError:
        return dict(headers)


def view_of(name: QueueName, job: Job, stateful: bool) -> DequeueResponse:
    """A delivered message. The state has the lease of its message."""
    ids: LeaseIds = lease_ids(job.id, job.fence)
    until = (job.lease_until or 0) // SECOND
    view = MessageView(
        namespace=name.namespace,
        queue=name.queue,
        message_id=job.id,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        failure_attempts=job.failures + job.losses,
        not_visible_until_unix=until,
        visibility_timeout_seconds=(job.lease_len or 0) // SECOND,
        attributes=attributes_of(job.headers),
        payload_content_type=job.content_type,
        payload_bytes=job.size,
        correlation_id=job.correlation_id or "",
        lease_id=ids.lease,
        lease_expires_at_unix=until,
        fencing_token=job.fence,
        txn_id=ids.txn,
        meta_etag=ids.meta_etag,
    )
    if stateful:
        view.state_etag = ids.state_lease
        view.state_lease_id = ids.state_lease
        view.state_lease_expires_at_unix = until
        view.state_fencing_token = job.fence
        view.state_txn_id = ids.txn
    return DequeueResponse(message=view)
