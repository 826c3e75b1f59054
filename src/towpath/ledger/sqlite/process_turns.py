"""Fair turns between processes, first come, first served.

SQLite's busy handler let one process starve for seconds. Here whoever finds `<database>-turn` taken queues in
`<database>-next` by locking there the one byte whose offset is the time of its arrival; the first is who finds nobody below.
The kernel forgets the locks of the dead. This is fairness only: SQLite's own lock keeps the data safe, also when somebody
deletes or truncates these files. A waiter also writes the time into the first bytes of `-next`: to read there that nobody has
queued lately is cheaper than to ask the kernel for locks, and most turns find nobody. The bytes are read and written, not mapped:
a page of a mapped file that the disk has no room for, or that was cut off, ends the process with SIGBUS.

(A plain lock on `-next` instead of a queue is not fair: who gets it is who happens to look just then, and
beside two busy processes a third was seen waiting for twenty turns. Blocking locks would be fair, but they
cannot be given up.)"""

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

    class ProcessTurns:
        """There is no flock here and its Windows kin excludes other readers too: SQLite's busy handler alone
        must do."""

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

else:
    import fcntl

    _TAKE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
    _PEEK: Final = fcntl.LOCK_SH | fcntl.LOCK_NB
    _FLOCK: Final = struct.Struct("@hhqqi0q")
    """Linux's struct flock, with its padding."""
    _STAMP: Final = struct.Struct("@q")
    _STAMP_HOLDS: Final = 20_000_000
    """Nanoseconds. Who queues stamps again at each look, every two milliseconds or sooner. A stamp from before the last start of the
    machine may be in the future: it is as good as none."""

    class ProcessTurns:
        """For one thread at a time. `timeout` bounds the wait; then `LedgerBusy`, so a stopped holder hangs
        nobody.

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
                    self._turn = open_beside(path, "-turn", os.O_RDONLY)  # flock asks for no right to write
                except BaseException:
                    os.close(self._next)
                    raise
            except OSError as error:
                raise translate_os(error, path) from error

        def __enter__(self) -> Self:
            try:
                # Written out, as it is most of all that a lone writer waits for beside the disk.
                stamp = os.pread(self._next, _STAMP.size, 0)
                since = (
                    time.monotonic_ns() - _STAMP.unpack(stamp)[0]
                    if len(stamp) == _STAMP.size
                    else _STAMP_HOLDS
                )
                if -_STAMP_HOLDS < since < _STAMP_HOLDS and not self._nobody_before(0):
                    self._queue()
                    return self
                try:
                    fcntl.flock(self._turn, _TAKE)
                except BlockingIOError:
                    self._queue()
            except BaseException as error:
                fcntl.flock(self._turn, fcntl.LOCK_UN)  # an interrupt may come just after we took it
                if isinstance(error, OSError):
                    raise translate_os(error, self._path) from error
                raise
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

        def leave(self) -> None:
            """Let the turn go if we have it."""
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
                    # Without a place, or behind somebody who seems stopped, we take our chance.
                    first = place is None or waited > self._timeout / 2 or self._nobody_before(place)
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
            except BlockingIOError:  # the same nanosecond, or somebody is peeking
                return None
            return place

        def _nobody_before(self, place: int) -> bool:
            """Whether the queue is empty below this place; place 0 asks for the whole queue."""
            if sys.platform == "linux":
                # Asking takes one call, taking and giving back two; and this is asked before every turn.
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
        """Only the first looks often, and less so the longer the turn takes: a late look is time in which
        nobody writes."""
        return min(max(since / 8, 0.0001), 0.002) if first else 0.0005
