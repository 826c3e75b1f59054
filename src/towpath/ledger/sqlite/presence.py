"""Whether the files under the ledger's name are still those that were opened. SQLite itself goes on in a deleted file."""

from __future__ import annotations

import os
import sys
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
        # Of the file without opening it: closing a second descriptor of it would drop SQLite's locks.
        self._handle = os.open(self._file, os.O_PATH | os.O_CLOEXEC) if sys.platform == "linux" else -1

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def check_file(self) -> None:
        """After a commit, before it is acknowledged: is what was committed in a file that still has a name? If it was given
        another name, nothing is lost, and the next look sees it."""
        gone = os.fstat(self._handle).st_nlink == 0 if self._handle >= 0 else _number(self._file) != self._opened[0]
        if gone:
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
