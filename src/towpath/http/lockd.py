"""The routes of lockd's protocol, and those for the operation of the server. lockd does not check the
method."""

from __future__ import annotations

from functools import partial

from towpath.http.access import Right
from towpath.http.context import ServerContext
from towpath.http.deliveries import DeliveryRoutes
from towpath.http.documents import DocumentRoutes
from towpath.http.health import HealthRoutes
from towpath.http.lock_routes import LockRoutes
from towpath.http.queues import QueueRoutes
from towpath.http.receipts import ReceiptRoutes
from towpath.http.table import Media, Route
from towpath.http.wire import (
    AckRequest,
    AckResponse,
    AcquireRequest,
    AcquireResponse,
    DequeueRequest,
    DequeueResponse,
    DescribeResponse,
    EnqueueMeta,
    EnqueueResponse,
    ExtendRequest,
    ExtendResponse,
    KeepaliveRequest,
    KeepaliveResponse,
    KeyArguments,
    NackRequest,
    NackResponse,
    ReleaseRequest,
    ReleaseResponse,
    RemoveResponse,
    StatsRequest,
    StatsResponse,
    UpdateResponse,
    WatchEvent,
)

_BODY = ("invalid_body", "invalid_namespace", "invalid_queue", "missing_queue")
_DELIVERY = (
    *_BODY,
    "missing_owner",
    "payload_lost",
    "invalid_txn",
    "waiting",
    "queue_busy",
    "shutdown_draining",
)
_RECEIPT = (*_BODY, "missing_fields", "not_found", "queue_message_lease_mismatch", "cas_mismatch")
_KEY = ("invalid_body", "invalid_namespace", "invalid_key")
_HOLDER = (*_KEY, "missing_params", "missing_fencing_token", "invalid_fencing_token")
_LEASE = ("lease_required", "lease_expired", "fencing_mismatch", "missing_txn", "txn_mismatch")
_STATE = ("not_found", "queue_message_lease_mismatch", "lease_conflict")
_CHANGE = (*_HOLDER, *_LEASE, *_STATE, "version_conflict", "etag_mismatch")
_FENCE = {"X-Fencing-Token": "The fencing token of the acquire or of the delivery."}
_CLAIM = {"X-Lease-ID": "The lease.", "X-Txn-ID": "The txn_id of the lease.", **_FENCE}
_CONDITIONS = {
    "X-If-Version": "Write only at this version.",
    "X-If-State-ETag": "Write only over the document with this etag.",
}
_EXPECTED = {
    "X-Expected-Bytes": "The length of the body.",
    "X-Expected-SHA256": "The SHA-256 of the body in hex.",
}
_MESSAGES = Media(
    "multipart/related",
    "For each message a part `meta` (JSON, this schema) and a part `payload` with its Content-Length.",
    DequeueResponse,
)
_STREAM = Media(
    "multipart/related",
    "The same parts, without end: each message is written when it arrives. The response ends when the "
    "server drains.",
    DequeueResponse,
)


def lockd_routes(context: ServerContext, health: HealthRoutes) -> tuple[Route, ...]:
    return (
        *_message_routes(context),
        *_receipt_routes(context),
        *_watch_routes(context),
        *_lock_routes(context),
        *_document_routes(context),
        *_server_routes(health),
    )


def _message_routes(context: ServerContext) -> tuple[Route, ...]:
    queues, deliveries = QueueRoutes(context), DeliveryRoutes(context)
    post = partial(Route, method="POST", tag="messages", right=Right.CONSUME, any_method=True)
    deliver = partial(post, request=DequeueRequest, errors=_DELIVERY)
    return (
        post(
            path="/v1/queue/enqueue",
            handler=queues.enqueue,
            summary="Store a message: the part `meta` first, then `payload`.",
            right=Right.PRODUCE,
            request=Media(
                "multipart/form-data",
                "A part `meta` (JSON, this schema), then a part `payload`.",
                EnqueueMeta,
            ),
            response=EnqueueResponse,
            errors=(
                *_BODY,
                "invalid_content_type",
                "multipart_error",
                "payload_too_large",
                "throttled",
                "shutdown_draining",
            ),
        ),
        deliver(
            path="/v1/queue/dequeue",
            handler=deliveries.dequeue,
            summary="Receive up to `page_size` messages; wait for the first.",
            response=_MESSAGES,
        ),
        deliver(
            path="/v1/queue/dequeueWithState",
            handler=deliveries.dequeue_with_state,
            summary="Receive one message, with the lease of its state.",
            response=_MESSAGES,
        ),
        deliver(
            path="/v1/queue/subscribe",
            handler=deliveries.subscribe,
            summary="Receive messages as they arrive, in one endless response.",
            response=_STREAM,
        ),
        deliver(
            path="/v1/queue/subscribeWithState",
            handler=deliveries.subscribe_with_state,
            summary="Receive messages as they arrive, with the leases of their states.",
            response=_STREAM,
        ),
    )


def _receipt_routes(context: ServerContext) -> tuple[Route, ...]:
    receipts = ReceiptRoutes(context)
    post = partial(Route, method="POST", tag="messages", right=Right.CONSUME, any_method=True)
    return (
        post(
            path="/v1/queue/ack",
            handler=receipts.ack,
            summary="A message is done.",
            request=AckRequest,
            response=AckResponse,
            errors=_RECEIPT,
        ),
        post(
            path="/v1/queue/nack",
            handler=receipts.nack,
            summary="Return a message after `delay_seconds`.",
            request=NackRequest,
            response=NackResponse,
            errors=(*_RECEIPT, "invalid_nack_intent", "invalid_nack_last_error"),
        ),
        post(
            path="/v1/queue/extend",
            handler=receipts.extend,
            summary="The lease of a message ends `extend_by_seconds` from now.",
            request=ExtendRequest,
            response=ExtendResponse,
            errors=_RECEIPT,
        ),
    )


def _watch_routes(context: ServerContext) -> tuple[Route, ...]:
    queues = QueueRoutes(context)
    post = partial(Route, method="POST", tag="messages", right=Right.CONSUME, any_method=True)
    return (
        post(
            path="/v1/queue/stats",
            handler=queues.stats,
            summary="The head of a queue, and the consumers that wait at this server.",
            request=StatsRequest,
            response=StatsResponse,
            errors=_BODY,
        ),
        post(
            path="/v1/queue/watch",
            handler=queues.watch,
            summary="Changes of the head of a queue, as server-sent events.",
            request=StatsRequest,
            response=Media("text/event-stream", "Events `queue_watch` with this JSON as data.", WatchEvent),
            errors=(*_BODY, "shutdown_draining"),
        ),
    )


def _lock_routes(context: ServerContext) -> tuple[Route, ...]:
    locks = LockRoutes(context)
    post = partial(Route, method="POST", tag="locks", right=Right.CONSUME, any_method=True)
    return (
        post(
            path="/v1/acquire",
            handler=locks.acquire,
            summary="A lease on a key, for one client at a time; wait for it.",
            request=AcquireRequest,
            response=AcquireResponse,
            headers={"X-Txn-ID": "A txn_id for the lease."},
            errors=(
                *_KEY,
                "missing_owner",
                "invalid_ttl",
                "invalid_txn",
                "waiting",
                "already_exists",
                "lease_conflict",
                "shutdown_draining",
            ),
        ),
        post(
            path="/v1/keepalive",
            handler=locks.keepalive,
            summary="Renew the lease on a key.",
            request=KeepaliveRequest,
            response=KeepaliveResponse,
            headers=_FENCE,
            errors=(
                *_HOLDER,
                *_LEASE,
                "invalid_ttl",
                "missing_key",
                "missing_lease",
                "lease_conflict",
                "queue_state_keepalive_unsupported",
            ),
        ),
        post(
            path="/v1/release",
            handler=locks.release,
            summary="End the lease on a key; publish its changes, or drop them with `rollback`.",
            request=ReleaseRequest,
            response=ReleaseResponse,
            headers=_FENCE,
            errors=(*_HOLDER, *_LEASE, "missing_key", "missing_lease", "lease_conflict"),
        ),
        post(
            path="/v1/describe",
            method="GET",
            arguments=KeyArguments,
            handler=locks.describe,
            summary="The lease and the version of a key.",
            response=DescribeResponse,
            errors=(*_KEY, "missing_key"),
        ),
    )


def _document_routes(context: ServerContext) -> tuple[Route, ...]:
    documents = DocumentRoutes(context)
    keyed = partial(
        Route, method="POST", tag="locks", right=Right.CONSUME, any_method=True, arguments=KeyArguments
    )
    document = Media("application/json", "The document.")
    return (
        keyed(
            path="/v1/get",
            handler=documents.get,
            summary="The document of a key, for the holder of its lease.",
            response=document,
            responses={204: "The key has no document."},
            headers=_CLAIM,
            errors=(*_HOLDER, *_LEASE, *_STATE),
        ),
        keyed(
            path="/v1/update",
            handler=documents.update,
            summary="Write the document of a key.",
            request=document,
            response=UpdateResponse,
            headers={**_CLAIM, **_CONDITIONS, **_EXPECTED},
            errors=(
                *_CHANGE,
                "expected_bytes_mismatch",
                "expected_sha256_mismatch",
                "document_too_large",
            ),
        ),
        keyed(
            path="/v1/remove",
            handler=documents.remove,
            summary="Delete the document of a key.",
            response=RemoveResponse,
            headers={**_CLAIM, **_CONDITIONS},
            errors=_CHANGE,
        ),
    )


def _server_routes(health: HealthRoutes) -> tuple[Route, ...]:
    get = partial(Route, method="GET", tag="server", any_method=True)
    return (
        get(path="/healthz", handler=health.healthz, summary="The process answers."),
        get(
            path="/readyz",
            handler=health.readyz,
            summary="The server takes new work, and its ledger answers.",
            errors=("shutdown_draining",),
        ),
        get(
            path="/metrics",
            handler=health.metrics,
            summary="Prometheus metrics of the ledger and of this process.",
            response=Media("text/plain", "The exposition format of Prometheus."),
        ),
    )
