"""The ledger cannot be reached for a while. Two lines in the log, however long it lasts and however often it is tried."""

from __future__ import annotations

import threading
import time

from towpath.errors import TowpathError
from towpath.escapes import get_logger

log = get_logger("towpath.ledger")


class Outage:
    """Any thread may notice it; a batch that was committed ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._batches = 0

    def noticed(self, error: TowpathError, batches: int = 0) -> None:
        """`batches`: how many failed by it."""
        with self._lock:
            begins = self._since is None
            if self._since is None:
                self._since = time.monotonic()
            self._batches += batches
        if begins:
            log.warning("%s. What is under way is kept, and it is tried again and again until it succeeds.", error)
        else:
            log.debug("still: %s", error)

    def over(self) -> None:
        if self._since is None:
            return
        with self._lock:
            since, batches = self._since, self._batches
            self._since, self._batches = None, 0
        if since is not None:
            away = time.monotonic() - since
            log.info("the ledger is back after %.1f s; %d batches failed meanwhile and were tried again", away, batches)
