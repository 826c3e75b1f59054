"""Detects which processes that claim jobs are alive. Each process holds a lock that the kernel frees when the
process ends, however it ends.

`<database>-live` has slots of a fixed size. A process locks the bytes of the first free slot and writes the
name of its owner there. A slot with a name and without a lock belongs to a process that ended without closing
the ledger. `close` clears the name first, so jobs that are still held then (a message with a receipt in
another process) wait for the end of their lease.

The locks belong to the open file, not to the process (F_OFD_SETLK): closing another descriptor of the same
file does not free them. A forked child shares them, so it closes its copy at once. Without this file, and on
systems without such locks, only leases count."""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from towpath.escapes import get_logger
from towpath.ledger import LeasesOnly
from towpath.ledger.sqlite.files import open_beside

if sys.platform == "linux":
    import fcntl

log = get_logger("towpath.sqlite")

SUFFIX: Final = "-live"
SLOT: Final = 1024
"""Bytes of a slot. A longer name is not announced."""
SLOTS: Final = 4096
_FLOCK: Final = struct.Struct("@hhqqi0q")
"""Linux's struct flock, with its padding."""


class SqliteOwners:
    """Safe from any thread. The first call opens the file. The first error of the file system is logged;
    after an error only leases count."""

    uncertain = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._own: dict[int, bytes] = {}
        """Slots that this object holds."""
        self._failed = False

    def announce(self, owner: str) -> None:
        name = owner.encode()
        with self._lock:
            if len(name) <= SLOT and name not in self._own.values():
                self._attempt(lambda: self._take_slot(name))

    def dead(self) -> tuple[str, ...]:
        found: list[str] = []
        with self._lock:
            self._attempt(
                lambda: found.extend([name.decode(errors="replace") for _, name in self._abandoned()])
            )
        return tuple(found)

    def forget(self, owners: Sequence[str]) -> None:
        names = {owner.encode() for owner in owners}

        def clear() -> None:
            for slot, name in self._abandoned():
                if name in names:
                    self._write(slot, b"")

        with self._lock:
            self._attempt(clear)

    def close(self) -> None:
        """Clear the names of this object, then free their locks."""
        with self._lock:
            own, self._own = self._own, {}
            if self._fd >= 0:
                try:
                    for slot in own:
                        self._write(slot, b"")
                except OSError as error:
                    log.debug("%s%s: %s", self._path, SUFFIX, error)
                finally:
                    self._close()

    def left_to_parent(self) -> None:
        """For a forked child: its copy of the descriptor would keep the locks of a killed parent."""
        if self._fd >= 0:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            self._open()
            work()
        except OSError as error:
            if not self._failed:
                log.warning(
                    "cannot use %s%s: jobs of a killed worker run again only after their lease ends: %s",
                    self._path,
                    SUFFIX,
                    error,
                )
            self._failed = True

    def _open(self) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            # The file was deleted. Other processes announce their owners in a new one.
            self._close()
        if self._fd < 0:
            self._fd = open_beside(self._path, SUFFIX, os.O_RDWR)
            own, self._own = self._own, {}
            for name in own.values():
                self._take_slot(name)

    def _take_slot(self, name: bytes) -> None:
        for slot in range(SLOTS):
            if slot in self._own or not self._locked(slot):
                continue
            if self._read(slot):
                self._unlock(slot)
                continue
            self._own[slot] = name
            self._write(slot, name)
            # So that the jobs of this owner are released at once after a power failure, too.
            os.fsync(self._fd)
            return

    def _abandoned(self) -> Iterator[tuple[int, bytes]]:
        """Slots with a name and without a holder. Each is locked while it is yielded, so that no other
        process takes it."""
        for slot in range(-(-os.fstat(self._fd).st_size // SLOT)):
            if slot not in self._own and self._read(slot) and self._locked(slot):
                try:
                    # Read again under the lock: the holder may have closed the ledger, or another process may
                    # have taken the slot.
                    if name := self._read(slot):
                        yield slot, name
                finally:
                    self._unlock(slot)

    def _read(self, slot: int) -> bytes:
        return os.pread(self._fd, SLOT, slot * SLOT).rstrip(b"\0")

    def _write(self, slot: int, name: bytes) -> None:
        os.pwrite(self._fd, name.ljust(SLOT, b"\0"), slot * SLOT)

    def _locked(self, slot: int) -> bool:
        try:
            fcntl.fcntl(
                self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot * SLOT, SLOT, 0)
            )
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, slot: int) -> None:
        fcntl.fcntl(
            self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, slot * SLOT, SLOT, 0)
        )


def owners_of(path: Path) -> SqliteOwners | LeasesOnly:
    return SqliteOwners(path) if sys.platform == "linux" else LeasesOnly()
