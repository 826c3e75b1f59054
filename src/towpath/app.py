"""Ids for new jobs. The App, the front door of the library, will grow here."""

from __future__ import annotations

import os
import threading

from towpath.clock import SystemClock
from towpath.core.ids import IdSource


class _SharedSource:
    """One id source for all threads of a process."""

    def __init__(self) -> None:
        self._source = IdSource(os.urandom)
        self._clock = SystemClock()
        self._lock = threading.Lock()

    def new(self) -> str:
        with self._lock:
            return self._source.new(self._clock.now())


# By process id: a forked child must neither continue its parent's ids nor meet a lock that a thread of the parent held.
_sources: dict[int, _SharedSource] = {}


def new_id() -> str:
    """A new id for a job: a UUIDv7, later than every id this process made before. Any thread may ask."""
    pid = os.getpid()
    # `setdefault` is atomic, so that two first callers share one source.
    source = _sources.get(pid) or _sources.setdefault(pid, _SharedSource())
    return source.new()
