"""The routes of the server as values: method, path, handler, and what the OpenAPI document and the reference
in the documentation state about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from towpath.http.access import Right
from towpath.http.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]
Tag = Literal["messages", "queues", "dead letters", "locks", "jobs", "groups", "fleet", "ledger", "server"]


class Media(msgspec.Struct, frozen=True):
    """A body that is not a JSON object of one type. `schema` is the type of its text or of its events."""

    content_type: str
    description: str
    schema: type | None = None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `{name}` in the path is a parameter.

    `arguments` is the type of the query string: its fields are the allowed arguments. `errors` are the codes
    that this route adds to the codes of `errors_of`. A route with `any_method` does not check the method,
    as lockd does not; `method` is the documented one."""

    method: str
    path: str
    handler: Handler
    summary: str
    tag: Tag
    right: Right | None = None
    arguments: type[msgspec.Struct] | None = None
    headers: Mapping[str, str] = {}
    """The headers that the request may have, with their meanings."""
    request: type | Media | None = None
    response: type | Media | None = None
    responses: Mapping[int, str] = {}
    """Further statuses of success, with their meanings."""
    errors: tuple[str, ...] = ()
    error_type: str = ""
    """A further content type of errors, besides JSON."""
    any_method: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters in the path."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))


PATH_PARAMETERS: Mapping[str, str] = {
    "queue": "Name of the queue in the ledger; encode a slash as %2F.",
    "part": "Name of a part of the queue.",
    "id": "Id of the job or group.",
    "name": "Name of the schedule, worker, lane or breaker.",
}


class ErrorCode(msgspec.Struct, frozen=True):
    """The meaning of a code, and what the client does next."""

    status: int
    meaning: str
    next_step: str


_REPEAT = "Send the request again after the time in Retry-After."
_CORRECT = "Correct the request; `detail` names the field and what would be right."

ERRORS: Mapping[str, ErrorCode] = {
    "invalid_body": ErrorCode(400, "The body or a value in the request is wrong.", _CORRECT),
    "invalid_argument": ErrorCode(400, "An argument of the query string is unknown or wrong.", _CORRECT),
    "invalid_content_type": ErrorCode(
        400, "The body of an enqueue is not multipart.", "Send multipart/related or form-data."
    ),
    "multipart_error": ErrorCode(400, "The multipart framing is broken.", _CORRECT),
    "missing_queue": ErrorCode(400, "The request names no queue.", "Add `queue`."),
    "missing_owner": ErrorCode(400, "The request names no owner.", "Add `owner`."),
    "missing_fields": ErrorCode(400, "A receipt lacks a field.", "Send the fields of the delivery."),
    "missing_params": ErrorCode(400, "An argument or header is missing.", _CORRECT),
    "missing_key": ErrorCode(400, "The request names no key.", "Add `key`."),
    "missing_lease": ErrorCode(400, "The request has no lease.", "Add the `lease_id` of the acquire."),
    "missing_txn": ErrorCode(400, "The request has no txn_id.", "Add the `txn_id` of the acquire."),
    "missing_fencing_token": ErrorCode(400, "X-Fencing-Token is missing.", "Add the token of the acquire."),
    "invalid_fencing_token": ErrorCode(400, "X-Fencing-Token is no number.", "Send the token unchanged."),
    "invalid_namespace": ErrorCode(400, "The namespace is no valid name.", _CORRECT),
    "invalid_queue": ErrorCode(400, "The queue is no valid name.", _CORRECT),
    "invalid_key": ErrorCode(400, "The key is no valid name.", _CORRECT),
    "invalid_ttl": ErrorCode(400, "The time of a lease is negative.", _CORRECT),
    "invalid_txn": ErrorCode(400, "The txn_id cannot be used.", "Leave out `txn_id`."),
    "invalid_nack_intent": ErrorCode(400, "The intent of a nack is unknown.", "Send failure or defer."),
    "invalid_nack_last_error": ErrorCode(400, "A defer has an error.", "Leave out `last_error`."),
    "unsupported_format": ErrorCode(
        400, "The client and the server use different versions of the format.", "Use the same version."
    ),
    "unknown_dependency": ErrorCode(
        400, "`after` names a job or group that does not exist.", "Enqueue it first, or in the same request."
    ),
    "dependency_cycle": ErrorCode(400, "Jobs wait for each other.", "Remove the cycle."),
    "unsupported": ErrorCode(400, "This ledger does not have the feature.", "Use another ledger."),
    "unauthorized": ErrorCode(
        401, "The client has no valid token or certificate.", "Send `Authorization: Bearer TOKEN`."
    ),
    "forbidden": ErrorCode(403, "The client has no right to this call.", "Use a client with the right."),
    "namespace_forbidden": ErrorCode(
        403, "The client has no right in this namespace or queue.", "Use a client with the right."
    ),
    "invalid_namespace_claims": ErrorCode(
        403, "The certificate of the client has no usable claims.", "Use a certificate with claims."
    ),
    "lease_required": ErrorCode(403, "The client does not hold the lease.", "Acquire the key again."),
    "lease_expired": ErrorCode(403, "The lease has ended.", "Acquire the key again."),
    "fencing_mismatch": ErrorCode(403, "The fencing token is outdated.", "Acquire the key again."),
    "queue_state_keepalive_unsupported": ErrorCode(
        403, "The state of a message has the lease of its message.", "Call /v1/queue/extend."
    ),
    "not_found": ErrorCode(404, "The message does not exist any more.", "Drop the receipt."),
    "unknown_path": ErrorCode(404, "The server has no such path.", "See /openapi.json for the paths."),
    "unknown_queue": ErrorCode(404, "The queue does not exist.", "GET /v1/queues lists the queues."),
    "unknown_job": ErrorCode(
        404, "The job does not exist, or was deleted after its retention.", "GET /v1/jobs lists the jobs."
    ),
    "unknown_group": ErrorCode(404, "The group does not exist.", "GET /v1/groups lists the groups."),
    "unknown_name": ErrorCode(
        404, "No schedule, worker, lane or breaker has this name.", "`detail` lists the names."
    ),
    "method_not_allowed": ErrorCode(405, "The path has no such method.", "Use a method of the header Allow."),
    "waiting": ErrorCode(409, "There is no message, or the key is held.", "Send the request again."),
    "queue_message_lease_mismatch": ErrorCode(
        409, "The lease of the message is lost; it is delivered again.", "Drop the result of this delivery."
    ),
    "cas_mismatch": ErrorCode(409, "The record has changed.", "Read it again and decide again."),
    "version_conflict": ErrorCode(409, "The document has another version.", "Read it again."),
    "etag_mismatch": ErrorCode(409, "The document has another etag.", "Read it again."),
    "expected_bytes_mismatch": ErrorCode(409, "The body has another length.", "Send the body again."),
    "expected_sha256_mismatch": ErrorCode(409, "The body has another digest.", "Send the body again."),
    "already_exists": ErrorCode(409, "The key has a document.", "Use another key."),
    "lease_conflict": ErrorCode(409, "Other clients change the key.", _REPEAT),
    "txn_mismatch": ErrorCode(409, "The lease has another txn_id.", "Send the txn_id of the acquire."),
    "group_closed": ErrorCode(409, "The group takes no more jobs.", "Create another group."),
    "not_revivable": ErrorCode(
        409, "The job cannot be retried.", "`detail` names the obstacle; enqueue a new job otherwise."
    ),
    "not_resolvable": ErrorCode(
        409, "The job runs or is done, and cannot be marked or skipped.", "`detail` names the obstacle."
    ),
    "payload_lost": ErrorCode(409, "A payload in parts was deleted meanwhile.", "Enqueue the message again."),
    "payload_too_large": ErrorCode(413, "The payload is too large.", "Store the data elsewhere."),
    "document_too_large": ErrorCode(413, "The document is too large.", "Store the data elsewhere."),
    "body_too_large": ErrorCode(413, "The body is too large.", "Divide the request."),
    "unsupported_media_type": ErrorCode(
        415, "The body is not JSON.", "Send JSON with content-type: application/json."
    ),
    "throttled": ErrorCode(429, "The queue or part is full, or the client sends too many requests.", _REPEAT),
    "internal_error": ErrorCode(500, "The server failed.", "Its log has the reason; report it."),
    "queue_busy": ErrorCode(503, "Too many requests wait at this server.", _REPEAT),
    "shutdown_draining": ErrorCode(503, "The server stops.", "Use another server, or try again."),
    "unavailable": ErrorCode(503, "The ledger is unavailable.", _REPEAT),
}
"""All codes of errors. An error of the framing (400 `invalid_request`, 431, 503 `too_many_connections`) is
answered before a route is chosen."""

_ALWAYS = ("internal_error", "unavailable")


def next_step(code: str) -> str:
    found = ERRORS.get(code)
    return "" if found is None else found.next_step


def errors_of(route: Route) -> tuple[str, ...]:
    """All codes that a route may answer with, in the order of the table."""
    found = {*route.errors, *_ALWAYS}
    if route.right is not None:
        found |= {"unauthorized", "forbidden", "namespace_forbidden", "invalid_namespace_claims", "throttled"}
    if route.arguments is not None:
        found.add("invalid_argument")
    if not route.any_method:
        found |= {"method_not_allowed", "invalid_argument", "invalid_body"}
        if _is_json(route.request):
            found |= {"unsupported_media_type", "body_too_large"}
    return tuple(code for code in ERRORS if code in found)


def _is_json(request: Any) -> bool:
    return request is not None and not isinstance(request, Media)


def by_path(routes: Sequence[Route]) -> dict[str, dict[str, Route]]:
    """The routes of each path by method."""
    found: dict[str, dict[str, Route]] = {}
    for route in routes:
        methods = found.setdefault(route.path, {})
        assert route.method not in methods, f"two routes for {route.method} {route.path}"
        methods[route.method] = route
    return found
