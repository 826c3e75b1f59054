"""Whether the files under the ledger's name are still those that were opened. SQLite itself goes on in a deleted file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from towpath.errors import LedgerGone

PAUSE = 0.1
"""Seconds between two looks where nothing is acknowledged: a look costs as much as a third of a small read."""


class Presence:
    """Made right after opening. SQLite keeps the file and its log as long as anybody has them open."""

    def __init__(self, path: Path) -> None:
        self._file, self._log = str(path), f"{path}-wal"
        self._opened = _number(self._file), _number(self._log)
        self._due = 0.0

    def check_file(self) -> None:
        """After a commit, before it is acknowledged."""
        if _number(self._file) != self._opened[0]:
            self._due = 0.0
        self.check()

    def check(self) -> None:
        """Now and then."""
        if (now := time.monotonic()) < self._due:
            return
        # If it is gone, the next one looks again: nobody is told otherwise afterwards.
        self._due = 0.0
        if (_number(self._file), _number(self._log)) != self._opened:
            raise LedgerGone(path=self._file)
        self._due = now + PAUSE


def _number(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino
