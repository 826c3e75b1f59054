"""Whether the files under the ledger's name are still those that were opened. SQLite itself goes on in a deleted file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from towpath.errors import LedgerGone

PAUSE = 0.1
"""Seconds between two looks where nothing is acknowledged: a look costs as much as a third of a small read."""

READS = range(123, 128)
"""The bytes of the `-shm` file that SQLite locks for a read transaction. The layout is part of SQLite's file format."""
LOOKS, BETWEEN = 10, 0.1
"""How often, and how many seconds apart, `long_readers` looks."""


class Presence:
    """Made right after opening. SQLite keeps the database, its log and its shared memory as long as anybody has them open."""

    def __init__(self, path: Path) -> None:
        self._file, self._log, self._shared = str(path), f"{path}-wal", f"{path}-shm"
        self._opened = self._numbers()
        self._due = 0.0
        # Descriptors that only name the files: closing an ordinary one would drop SQLite's locks.
        self._handles: list[int] = []
        if sys.platform == "linux":
            for name, number in zip((self._log, self._file, self._shared), self._opened, strict=True):
                if number is not None:
                    self._handles.append(_handle(name, self._file))

    def close(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            os.close(handle)

    def check_file(self) -> int:
        """After a commit, before it is acknowledged: are the files that it went into still there? Returns the length of the log
        file. A file that was only renamed is noticed by the next `check`: nothing is lost until then."""
        if self._handles:
            found = [os.fstat(handle) for handle in self._handles]
            if 0 in [each.st_nlink for each in found]:
                self._due = 0.0
            length = found[0].st_size
        else:
            self._due = 0.0
            length = _length(self._log)
        self.check()
        return length

    def check(self) -> None:
        """Now and then."""
        if (now := time.monotonic()) < self._due:
            return
        # If a file is gone, the next call looks again: nobody gets another answer afterwards.
        self._due = 0.0
        if self._numbers() != self._opened:
            raise LedgerGone(path=self._file)
        self._due = now + PAUSE

    def _numbers(self) -> tuple[tuple[int, int] | None, ...]:
        return _number(self._log), _number(self._file), _number(self._shared)


def _handle(name: str, file: str) -> int:
    try:
        return os.open(name, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LedgerGone(path=file) from None


def _number(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _length(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return 0


def long_readers(path: Path) -> list[str] | None:
    """The other processes that had a read transaction open for a second, as "process 4711 (python report.py)". None where the system
    does not list locks. The files themselves are not opened: closing them would drop SQLite's locks."""
    found: set[int] | None = None
    for look in range(LOOKS):
        try:
            locks = Path("/proc/locks").read_text()
            inode = os.stat(f"{path}-shm").st_ino
        except OSError:
            return None
        now = _readers(locks, inode) - {os.getpid()}
        found = now if found is None else found & now
        if not found:
            return []
        if look < LOOKS - 1:
            time.sleep(BETWEEN)
    return [f"process {pid} ({_command(pid)})" for pid in sorted(found or ())]


def _readers(locks: str, inode: int) -> set[int]:
    """From lines such as `3: POSIX  ADVISORY  READ 4711 fe:00:1310 124 124`. A process of another container has the number 0."""
    found = set()
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[1] != "POSIX" or fields[3] != "READ" or fields[5].rpartition(":")[2] != str(inode):
            continue
        last = READS[-1] if fields[7] == "EOF" else int(fields[7])
        if int(fields[6]) <= READS[-1] and last >= READS[0]:
            found.add(int(fields[4]))
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "of another user or container"
    return b" ".join(words).decode(errors="backslashreplace").strip()[:100]
