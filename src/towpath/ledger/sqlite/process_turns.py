"""Fair turns between processes, first come, first served.

SQLite's busy handler can starve a process for seconds. So a process takes `<database>-turn` before it writes.
If the turn is taken, the process queues in `<database>-next`: it locks the one byte at the offset of its time
of arrival, and is first when no byte below is locked. The kernel frees the locks of a process that ends.

The turns only provide fairness. SQLite's own lock protects the data, also when these files are deleted or
truncated.

A waiter also writes the current time into the first bytes of `-next`. An old time means that no process is
queued; reading it is cheaper than querying the kernel for locks. The bytes are read and written, not mapped:
access to a mapped page that was truncated, or that the disk has no room for, ends the process with SIGBUS.

Rejected: a plain lock on `-next` is not fair (a third process was seen waiting for twenty turns of two busy
ones). Blocking locks are fair but cannot time out."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from towpath.errors import LedgerBusy
from towpath.ledger.sqlite.files import open_beside, translate_os

if sys.platform == "win32":

    class NoProcessTurns:
        """Windows has no flock, and its own locks exclude readers too: SQLite's busy handler decides
        alone."""

        def __init__(self, path: Path, timeout: float) -> None:
            self._path = path

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            return

        def leave(self) -> None:
            return

        def close(self) -> None:
            return

    ProcessTurns = NoProcessTurns

else:
    import fcntl

    _TAKE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
    _PEEK: Final = fcntl.LOCK_SH | fcntl.LOCK_NB
    _FLOCK: Final = struct.Struct("@hhqqi0q")
    """Linux's struct flock, with its padding."""
    _STAMP: Final = struct.Struct("@q")
    _STAMP_HOLDS: Final = 20_000_000
    """Nanoseconds for which a stamp counts. A waiter writes a new one every two milliseconds or sooner. A
    stamp from before a reboot may be in the future and does not count."""

    class ProcessTurns:
        """For one thread at a time. Raises `LedgerBusy` after `timeout` seconds, so that a stopped holder
        does not block other processes forever.

        Record locks belong to the process: two instances of one process still exclude each other, but not in
        order."""

        def __init__(self, path: Path, timeout: float) -> None:
            self._path = path
            self._timeout = timeout
            try:
                self._next = open_beside(path, "-next", os.O_RDWR)
                try:
                    if os.fstat(self._next).st_size < _STAMP.size:
                        os.pwrite(self._next, bytes(_STAMP.size), 0)
                    self._turn = open_beside(path, "-turn", os.O_RDONLY)  # flock needs no write permission
                except BaseException:
                    os.close(self._next)
                    raise
            except OSError as error:
                raise translate_os(error, path) from error

        def __enter__(self) -> Self:
            try:
                # Inlined: after the disk, this is the largest part of a single writer's wait.
                stamp = os.pread(self._next, _STAMP.size, 0)
                since = (
                    time.monotonic_ns() - _STAMP.unpack(stamp)[0]
                    if len(stamp) == _STAMP.size
                    else _STAMP_HOLDS
                )
                if -_STAMP_HOLDS < since < _STAMP_HOLDS and not self._is_first(0):
                    self._queue()
                    return self
                try:
                    fcntl.flock(self._turn, _TAKE)
                except BlockingIOError:
                    self._queue()
            except BaseException as error:
                fcntl.flock(self._turn, fcntl.LOCK_UN)  # an interrupt may come right after the lock
                if isinstance(error, OSError):
                    raise translate_os(error, self._path) from error
                raise
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

        def leave(self) -> None:
            """Release the turn if this object holds it."""
            fcntl.flock(self._turn, fcntl.LOCK_UN)

        def close(self) -> None:
            fds = [fd for fd in (self._next, self._turn) if fd >= 0]
            self._next = self._turn = -1
            for fd in fds:
                os.close(fd)

        def _queue(self) -> None:
            began = since = time.monotonic()
            place = None
            try:
                while True:
                    place = place or self._take_place()
                    waited = time.monotonic() - began
                    self._write_stamp()
                    # Without a place, or behind a process that seems stopped, compete for the turn.
                    first = place is None or waited > self._timeout / 2 or self._is_first(place)
                    if first and self._take_turn():
                        return
                    if waited >= self._timeout:
                        raise LedgerBusy(path=str(self._path), seconds=self._timeout)
                    if not first:
                        since = time.monotonic()
                    time.sleep(min(_pause(first, time.monotonic() - since), self._timeout - waited))
            finally:
                fcntl.lockf(self._next, fcntl.LOCK_UN)

        def _write_stamp(self) -> None:
            try:
                os.pwrite(self._next, _STAMP.pack(time.monotonic_ns()), 0)
            except OSError:
                # The file was truncated and the disk is full: turns are less fair until there is room.
                return

        def _take_turn(self) -> bool:
            try:
                fcntl.flock(self._turn, _TAKE)
            except BlockingIOError:
                return False
            return True

        def _take_place(self) -> int | None:
            place = time.monotonic_ns()
            try:
                fcntl.lockf(self._next, _TAKE, 1, place)
            except BlockingIOError:  # the same nanosecond, or another process checks the queue
                return None
            return place

        def _is_first(self, place: int) -> bool:
            """Whether the queue is empty below this place; place 0 means the whole queue."""
            if sys.platform == "linux":
                # F_GETLK is one call instead of lock and unlock, and this runs before every turn.
                answer = fcntl.fcntl(
                    self._next, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, place, 0)
                )
                return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)
            try:
                fcntl.lockf(self._next, _PEEK, place)
            except BlockingIOError:
                return False
            fcntl.lockf(self._next, fcntl.LOCK_UN, place)
            return True

    def _pause(first: bool, since: float) -> float:
        """The first waiter polls more often than the others, because a late poll is time in which no process
        writes. Its interval grows with the length of the turn it waits for."""
        return min(max(since / 8, 0.0001), 0.002) if first else 0.0005
