"""Ids for new jobs: one source for all threads of a process, a new one after a fork."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, cast

from towpath.clock import SystemClock
from towpath.core.commands import Appended
from towpath.core.ids import IdSource
from towpath.core.job import Job, Spec
from towpath.errors import Unsupported
from towpath.ledger import Ledger, Transactional
from towpath.observe.tracing import CONTEXT, HEADER, inject

_BLOCK = 8192


class _Entropy:
    """Random bytes from the system, read in blocks: a system call for each id would cost more than the id."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()

    def take(self, n: int) -> bytes:
        taken = self._stream.read(n)
        if len(taken) < n:
            self._stream = io.BytesIO(os.urandom(_BLOCK))
            taken = self._stream.read(n)
        return taken


class _SharedSource:
    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """A forked child must neither continue its parent's ids nor use a lock that a thread of the parent
        held."""
        self._next = IdSource(_Entropy().take).new
        self._now = SystemClock().now
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """A new id for a job: a UUIDv7, later than every id this process made before. Safe from any
        thread."""
        with self._lock:
            return self._next(self._now())


_source = _SharedSource()
new_id = _source.new_id
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_source.begin_anew)


_NONE: Mapping[str, str] = {}


class CurrentJob(Protocol):
    """The job that runs in this context."""

    record: Job


running: ContextVar[CurrentJob | None] = ContextVar("towpath_running", default=None)
"""Set around every handler, in whatever thread, task or process it runs."""


def inherited(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that `job` enqueues. Defaults are the correlation id of the job and the trace of
    its handler (the trace of the job, if the handler has none)."""
    headers = fields.get("headers", {})
    if not isinstance(headers, Mapping):
        # The constructor of the spec reports the wrong type.
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


def append_on(ledger: Ledger, connection: Any, specs: Sequence[Spec]) -> Appended:
    """Append in the user's transaction; the jobs are durable and visible when the user has committed."""
    return Appended(_transactional(ledger).append_on(connection, specs))


async def aappend_on(ledger: Ledger, connection: Any, specs: Sequence[Spec]) -> Appended:
    transactional = _transactional(ledger)
    # A connection to SQLite has no coroutines, and so neither has its ledger.
    append = getattr(transactional, "aappend_on", None)
    return Appended(
        transactional.append_on(connection, specs) if append is None else await append(connection, specs)
    )


def begin_on(ledger: Ledger, connection: Any) -> bool:
    """On SQLite: begin a transaction with the write lock, in turn with the processes that use the ledger.
    False if one is open."""
    users = getattr(_transactional(ledger), "users", None)
    return users is not None and bool(users.begin(connection))


def _transactional(ledger: Ledger) -> Transactional:
    if not ledger.capabilities.transactional:
        raise Unsupported(
            what="an append in a transaction of yours; that needs a ledger on SQLite or PostgreSQL"
        )
    return cast(Transactional, ledger)
