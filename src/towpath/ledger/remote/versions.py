"""Notices the commits of a server's ledger: one thread per ledger waits in a request that the server answers
after a commit.

`version` and `wait` cost no request, so a caretaker that calls them all the time is cheap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from towpath.errors import LedgerClosed, TowpathError
from towpath.escapes import get_logger
from towpath.ledger.remote.messages import MAX_WAIT, ServerVersion

log = get_logger("towpath.remote")

MIN_INTERVAL: Final = 0.02
"""Seconds between two requests at least: a busy ledger commits hundreds of times a second."""
PAUSES: Final = (0.1, 0.25, 0.5, 1.0)
"""Seconds after a request that failed; the last value repeats."""
MAX_SERVERS: Final = 16
"""Server processes with a known version: behind a balancer each request may reach another one."""

Poll = Callable[[Mapping[str, int], float], ServerVersion]


class Versions:
    """A number that changes when a server reports another version. `poll(seen, seconds)` is a request. The
    thread starts with the first call of `version` or `wait`."""

    def __init__(self, place: str, poll: Poll) -> None:
        self._place, self._poll = place, poll
        self._changed = threading.Condition()
        self._seen: dict[str, int] = {}
        self._number = 0
        self._error: TowpathError | None = None
        """The last request failed for a reason that no retry removes."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def version(self) -> int:
        with self._changed:
            self._check()
            return self._number

    def wait(self, seen: int, timeout: float) -> int:
        with self._changed:
            self._check()
            self._changed.wait_for(lambda: self._number != seen or self._closed or self._error, timeout)
            self._check()
            return self._number

    def note(self, version: ServerVersion | None) -> None:
        """A response had this version. None: an unknown one, so a commit must be assumed."""
        with self._changed:
            if version is not None:
                if version.number <= self._seen.get(version.server, -1):
                    return
                self._seen.pop(version.server, None)
                self._seen[version.server] = version.number
                if len(self._seen) > MAX_SERVERS:
                    del self._seen[next(iter(self._seen))]
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """The caller ends the request of the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        """Under the lock."""
        if self._closed:
            raise LedgerClosed(path=self._place)
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towpath-versions", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            with self._changed:
                seen = dict(self._seen)
            began = time.monotonic()
            try:
                self.note(self._poll(seen, MAX_WAIT))
                failures, error, pause = 0, None, began + MIN_INTERVAL - time.monotonic()
            except LedgerClosed:
                return
            except TowpathError as found:
                log.debug("commits of %s are not received: %s", self._place, found)
                pause = PAUSES[min(failures, len(PAUSES) - 1)]
                failures, error = failures + 1, None if found.retryable else found
            with self._changed:
                self._error = error
                if error is not None:
                    self._changed.notify_all()
                if pause > 0:
                    self._changed.wait_for(lambda: self._closed, pause)
