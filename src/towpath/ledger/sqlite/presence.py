"""Detects that the ledger's files were deleted or replaced. SQLite itself keeps writing to a deleted file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from towpath.errors import LedgerGone

PAUSE = 0.1
"""Seconds between two checks before reads: a check costs a third of a small read."""

TICK = 0.05
"""Seconds, longer than the clock tick of a file system. Two changes of a directory within one tick have the
same time stamp, so the files themselves are checked for this long after a change."""
READS = range(123, 128)
"""The bytes of the `-shm` file that SQLite locks for a read transaction. The layout is part of SQLite's file
format."""
LOCK_READS, LOCK_READ_PAUSE = 10, 0.1
"""`long_readers` reads the list of locks this many times, this many seconds apart."""


class Presence:
    """The files as they were right after opening. SQLite keeps the database, its log and its shared memory
    while any connection has them open.

    A removed or renamed file changes the time stamp of its directory, which one `fstat` reads. The files
    themselves are not read at each commit: since Linux 6.13 a file gets a new time stamp with each write
    after its times were read, which makes a commit 27 µs longer."""

    def __init__(self, path: Path) -> None:
        self._file, self._log, self._shared = str(path), f"{path}-wal", f"{path}-shm"
        self._directory = os.open(path.parent, os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY))
        self._changed_at: int | None = None
        self._settled = 0.0
        self._opened = self._numbers()
        self._due = 0.0

    def close(self) -> None:
        os.close(self._directory)

    def check_file(self) -> None:
        """After a commit, before its results are returned: raise `LedgerGone` if its files are gone."""
        changed_at, now = os.fstat(self._directory).st_mtime_ns, time.monotonic()
        if changed_at != self._changed_at:
            self._changed_at, self._settled = changed_at, now + TICK
        if now < self._settled:
            self._due = 0.0
        self.check()

    def check(self) -> None:
        """Raise `LedgerGone` if the files are gone; at most every `PAUSE` seconds."""
        if (now := time.monotonic()) >= self._due:
            self._check(now)

    def check_now(self) -> None:
        """Raise `LedgerGone` if the files are gone."""
        self._check(time.monotonic())

    def _check(self, now: float) -> None:
        # If a file is gone, each later call checks again and raises too.
        self._due = 0.0
        if self._numbers() != self._opened:
            raise LedgerGone(path=self._file)
        self._due = now + PAUSE

    def _numbers(self) -> tuple[tuple[int, int] | None, ...]:
        return _number(self._log), _number(self._file), _number(self._shared)


def _number(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def long_readers(path: Path) -> list[str] | None:
    """The other processes that had a read transaction open for a second, as "process 4711 (python
    report.py)". None where the system does not list locks. The files are not opened: closing them would drop
    SQLite's locks."""
    found: set[int] | None = None
    for read in range(LOCK_READS):
        try:
            locks = Path("/proc/locks").read_text()
            inode = os.stat(f"{path}-shm").st_ino
        except OSError:
            return None
        now = _readers(locks, inode) - {os.getpid()}
        found = now if found is None else found & now
        if not found:
            return []
        if read < LOCK_READS - 1:
            time.sleep(LOCK_READ_PAUSE)
    return [f"process {pid} ({_command(pid)})" for pid in sorted(found or ())]


def _readers(locks: str, inode: int) -> set[int]:
    """The process ids in lines such as `3: POSIX  ADVISORY  READ 4711 fe:00:1310 124 124`. A process of
    another container has the id 0."""
    found = set()
    for line in locks.splitlines():
        fields = line.split()
        if (
            len(fields) != 8
            or fields[1] != "POSIX"
            or fields[3] != "READ"
            or fields[5].rpartition(":")[2] != str(inode)
        ):
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
