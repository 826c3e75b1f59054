"""The error envelope: one exception for every answer that is not a success, and the answer to each error of
the library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from towpath import errors
from towpath.escapes import get_logger

log = get_logger("towpath.http")

Headers = list[tuple[bytes, bytes]]
_STATUS_HEADERS = {
    401: (b"www-authenticate", b'Bearer realm="towpath"'),
    429: (b"x-lockd-qrf-state", b"engaged"),
}


class ErrorEnvelope(msgspec.Struct, omit_defaults=True, kw_only=True):
    error: str
    detail: str = ""
    leader_endpoint: str = ""
    current_version: int = 0
    current_etag: str = ""
    retry_after_seconds: int = 0
    next_step: str = ""
    """Only of routes that lockd does not have."""


class Problem(Exception):
    """An answer with an error: HTTP status, code and a sentence. `close` ends the connection, because
    the body of the request was not read to its end."""

    def __init__(
        self, status: int, code: str, detail: str = "", *, retry_after: int = 0, close: bool = False
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.close = close
        self.allow = ""
        """The methods of the path."""
        self.envelope = ErrorEnvelope(error=code, detail=detail, retry_after_seconds=retry_after)

    @property
    def code(self) -> str:
        return self.envelope.error

    def versioned(self, version: int, etag: str) -> Problem:
        """The same problem with the version and the etag that the record has."""
        self.envelope.current_version, self.envelope.current_etag = version, etag
        return self

    def headers(self) -> Headers:
        found: Headers = [(b"content-type", b"application/json")]
        if self.envelope.retry_after_seconds:
            found.append((b"retry-after", str(self.envelope.retry_after_seconds).encode()))
        if self.close:
            found.append((b"connection", b"close"))
        if self.allow:
            found.append((b"allow", self.allow.encode()))
        if self.status in _STATUS_HEADERS:
            found.append(_STATUS_HEADERS[self.status])
        return found


class Disconnected(Exception):
    """The client has closed the connection. No answer can be sent."""


def bad_body(detail: str) -> Problem:
    return Problem(400, "invalid_body", detail)


def bad_argument(detail: str) -> Problem:
    return Problem(400, "invalid_argument", detail)


def missing(code: str, *fields: str) -> Problem:
    names = " and ".join(fields)
    return Problem(400, code, f"{names} must be given")


def first_missing(code: str, fields: Sequence[tuple[str, str]]) -> None:
    """Raise if one of the fields (name, value) is empty."""
    if absent := [name for name, value in fields if not value]:
        raise missing(code, *absent)


def problem_of(error: errors.TowpathError) -> Problem:
    """The answer to an error of the library."""
    match error:
        case errors.InvalidInput():
            return bad_body(str(error))
        case errors.QueueFull():
            seconds = error.details.get("retry_after") or 1
            return Problem(429, "throttled", str(error), retry_after=max(1, math.ceil(seconds)))
        case errors.LostClaim():
            return Problem(409, "queue_message_lease_mismatch", str(error))
        case errors.UnknownJob():
            return Problem(404, "unknown_job", str(error))
        case errors.UnknownGroup():
            return Problem(404, "unknown_group", f"there is no group {error.details['group']}")
        case errors.UnknownDependency():
            return Problem(400, "unknown_dependency", str(error))
        case errors.DependencyCycle():
            return Problem(400, "dependency_cycle", str(error))
        case errors.GroupClosed():
            return Problem(409, "group_closed", str(error))
        case errors.NotRevivable():
            return Problem(409, "not_revivable", str(error))
        case errors.NotResolvable():
            return Problem(409, "not_resolvable", str(error))
        case errors.Unsupported():
            return Problem(400, "unsupported", str(error))
        case errors.NoteConflict():
            return Problem(409, "cas_mismatch", str(error))
        case errors.UnusableBlob():
            return Problem(409, "payload_lost", str(error))
        case errors.LedgerClosed():
            return Problem(503, "shutdown_draining", "the server stops", retry_after=1)
        case errors.LedgerError() if error.retryable:
            return Problem(503, "unavailable", "the ledger is unavailable; try again", retry_after=1)
    return unexpected(error)


def unexpected(error: Exception) -> Problem:
    """A defect, or a ledger that is damaged. The details are for the log, not for a stranger."""
    log.error("a request failed", exc_info=error)
    return Problem(500, "internal_error", "the server failed; its log has the reason")
