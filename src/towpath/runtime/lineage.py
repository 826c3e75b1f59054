"""Which job runs here, and what those that it enqueues have from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from towpath.core.job import Job
from towpath.observe.tracing import CONTEXT, HEADER, inject

_NONE: Mapping[str, str] = {}


class Running(Protocol):
    """An attempt that is being made."""

    job: Job


running: ContextVar[Running | None] = ContextVar("towpath_running", default=None)
"""Set around every handler, in whatever thread, task or process it runs."""


def inherited(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that `job` enqueues: its correlation id, and the trace of its handler (its own, if nobody traces
    here), unless they say otherwise."""
    headers = fields.get("headers", {})
    if not isinstance(headers, Mapping):
        # Whoever makes the spec says what is wrong with them.
        return dict(fields)
    headers = inject(headers)
    if HEADER not in headers and HEADER in job.headers:
        headers = {**headers, **{name: job.headers[name] for name in CONTEXT if name in job.headers}}
    return {"correlation_id": job.correlation_id, **fields, "headers": headers}


def traced(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a spec that no job enqueues, with the trace context of the caller in its headers."""
    headers = fields.get("headers", _NONE)
    carried = inject(headers) if isinstance(headers, Mapping) else headers
    return fields if carried is headers else {**fields, "headers": carried}
