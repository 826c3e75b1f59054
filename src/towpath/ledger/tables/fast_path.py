"""Counters of a ledger's fast paths: how often each was taken, refused by a rule, or failed.

A fast path applies a common batch in fewer statements than the general path, with the same result. A batch
that a rule keeps from it is refused before anything is written and takes the general path. An error inside a
fast path is a defect: the batch is rolled back and takes the general path, so without these counters the
only sign of the defect would be lower speed."""

from __future__ import annotations

from collections import Counter

from towpath.escapes import get_logger

log = get_logger("towpath.ledger")


class FastPathRefused(Exception):
    """A rule keeps the batch from the fast path. Nothing has been written. `reason` is a metric label: one of
    a few constants, never data."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FastPaths:
    """The counters of one ledger object. `taken` and `failed` are by path, `refused` by path and reason.

    They are written under the ledger's write lock and may be read from any thread."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[str] = Counter()

    def take(self, path: str) -> None:
        self.taken[path] += 1

    def refuse(self, path: str, reason: str) -> None:
        self.refused[path, reason] += 1

    def fail(self, path: str, error: Exception) -> None:
        """Count the error; log the first one of each path with its traceback."""
        self.failed[path] += 1
        if self.failed[path] == 1:
            log.error(
                "fast path %s failed and the general path is used: please report this defect: %s: %s",
                path,
                type(error).__name__,
                error,
                exc_info=error,
            )
