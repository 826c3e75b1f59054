"""Ids for new jobs: one source for all threads of a process, a new one after a fork."""

from __future__ import annotations

import io
import os
import threading

from towpath.clock import SystemClock
from towpath.core.ids import IdSource

_BLOCK = 8192


class _Entropy:
    """Random bytes from the system, many at a time: a system call for each id would cost more than the id."""

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
        """A forked child must neither continue its parent's ids nor meet a lock that a thread of the parent held."""
        self._next = IdSource(_Entropy().take).new
        self._now = SystemClock().now
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """A new id for a job: a UUIDv7, later than every id this process made before. Any thread may ask."""
        with self._lock:
            return self._next(self._now())


_source = _SharedSource()
new_id = _source.new_id
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_source.begin_anew)
