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
    _UNCHANGED: Final = 0.1
    """Seconds after which the first waiter is suspected to be stopped: the others then test whether the turn
    is free."""
    _UNUSED: Final = 0.02
    """Seconds. A first waiter that runs takes a free turn within two milliseconds; one that leaves it free
    for so long is stopped."""

    class ProcessTurns:
        """For one thread at a time. Raises `LedgerBusy` after `timeout` seconds, so that a stopped holder
        does not block other processes forever.

        Record locks belong to the process: two instances of one process still exclude each other, but not in
        order."""

        def __init__(self, path: Path, timeout: float) -> None:
            self._path = path
            self._timeout = timeout
            self._stopped: list[int] = []
            """The places of waiters that are stopped, which do not count. On Linux."""
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
            if self._stopped:
                self._stopped = [each for each in self._stopped if self._holder(each, each + 1) is not None]
            suspicion = Suspicion()
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
                        assert place is not None
                        if waited > _UNCHANGED and sys.platform == "linux":
                            self._suspect(suspicion, place, since)
                    time.sleep(min(_pause(first, time.monotonic() - since), self._timeout - waited))
            finally:
                fcntl.lockf(self._next, fcntl.LOCK_UN)

        def _suspect(self, suspicion: Suspicion, place: int, now: float) -> None:
            """Add the first waiter to the stopped waiters if it leaves a free turn unused."""
            lowest = self._lowest(place)
            if lowest is None or lowest != suspicion.place:
                suspicion.place, suspicion.since, suspicion.free_since = lowest, now, None
            elif now - suspicion.since > _UNCHANGED:
                if not self._take_turn():
                    suspicion.free_since = None
                    return
                fcntl.flock(self._turn, fcntl.LOCK_UN)
                if suspicion.free_since is None:
                    suspicion.free_since = now
                elif now - suspicion.free_since > _UNUSED:
                    self._stopped = sorted([*self._stopped, lowest])

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
            """Whether the queue is empty below this place, apart from stopped waiters; place 0 means the
            whole queue."""
            if sys.platform == "linux":
                return self._lowest(place) is None
            try:
                fcntl.lockf(self._next, _PEEK, place)
            except BlockingIOError:
                return False
            fcntl.lockf(self._next, fcntl.LOCK_UN, place)
            return True

        def _lowest(self, place: int) -> int | None:
            """The first place below this one that another process holds, apart from stopped waiters; place 0
            means the whole queue."""
            start = 0
            for end in (*[each for each in self._stopped if not place or each < place], place):
                found = self._holder(start, end)
                while found is not None and (below := self._holder(start, found)) is not None:
                    found = below
                if found is not None:
                    return found
                start = end + 1
            return None

        def _holder(self, start: int, end: int) -> int | None:
            """A place from `start` to before `end` that another process holds; an end of 0 means no end.
            F_GETLK is one call instead of lock and unlock, and this runs before every turn."""
            if 0 < end <= start:
                return None
            asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, end and end - start, 0)
            kind, _, place, _, _ = _FLOCK.unpack(fcntl.fcntl(self._next, fcntl.F_GETLK, asked))
            return None if kind == fcntl.F_UNLCK else place

    class Suspicion:
        """The first waiter of the queue, since when it is the first, and since when the turn is free."""

        __slots__ = ("free_since", "place", "since")

        def __init__(self) -> None:
            self.place: int | None = None
            self.since = 0.0
            self.free_since: float | None = None

    def _pause(first: bool, since: float) -> float:
        """The first waiter polls more often than the others, because a late poll is time in which no process
        writes. Its interval grows with the length of the turn it waits for."""
        return min(max(since / 8, 0.0001), 0.002) if first else 0.0005
