"""Notifications between processes: after a commit, one byte of `<database>-wake` is touched.

A notification is a hint. Each waiter also polls, so a lost notification only delays it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from towpath.ledger.sqlite.files import open_beside

_POLL_PAUSE: Final = 0.05
_MAX_IDLE: Final = 4


class WakeFile:
    def __init__(self, path: Path) -> None:
        self._name = os.path.realpath(path) + "-wake"
        self._lock = threading.Lock()
        self._closed = False
        # Reused, because closing an inotify descriptor takes most of a millisecond.
        self._idle: list[_FileWatch] = []
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = open_beside(path, "-wake", os.O_RDWR)
            _prepare(self._fd)

    def notify(self) -> None:
        """Wake every watch of every process. Never raises: the commit before it has already happened."""
        # The lock keeps `close` away: the descriptor's number could belong to another file by then.
        with self._lock:
            if self._fd is not None:
                try:
                    _touch(self._fd)
                except OSError:
                    return

    def watch(self) -> WakeWatch:
        return WakeWatch(self)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, None
            idle, self._idle = self._idle, []
        if fd is not None:
            os.close(fd)
        for watch in idle:
            watch.close()

    def _take_watch(self) -> _FileWatch | None:
        with self._lock:
            watch = self._idle.pop() if self._idle else None
        if watch is not None:
            watch.wait(0.0)  # discard notifications from while it was idle
            return watch
        try:
            return _open_watch(self._name)
        except OSError:  # no file, or too many watches or descriptors
            return None

    def _return_watch(self, watch: _FileWatch) -> None:
        with self._lock:
            if kept := not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(watch)
        if not kept:
            watch.close()


class WakeWatch:
    """Receives every notification from `__enter__` on: enter first, then check whether there is something to
    wait for."""

    def __init__(self, wake: WakeFile) -> None:
        self._wake = wake
        self._watch: _FileWatch | None = None

    def __enter__(self) -> Self:
        self._watch = self._wake._take_watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._wake._return_watch(watch)

    def wait(self, timeout: float) -> bool:
        """Sleep until a notification, at most `timeout` seconds. False: the time has passed, or the file
        cannot be watched and this was a short sleep. The caller checks its condition in both cases."""
        timeout = max(0.0, timeout)
        if self._watch is not None:
            return self._watch.wait(timeout)
        time.sleep(min(timeout, _POLL_PAUSE))
        return False


class _FileWatch(Protocol):
    def wait(self, timeout: float) -> bool: ...

    def close(self) -> None: ...


def _prepare(fd: int) -> None:
    """Make sure that the file has one byte to read or overwrite."""
    if os.fstat(fd).st_size == 0:
        os.write(fd, b"\n")


if sys.platform == "linux":

    def _touch(fd: int) -> None:
        # inotify reports reads too, and a read does not touch the file system's journal, which the commit has
        # just synced.
        os.pread(fd, 1, 0)

elif sys.platform == "win32":

    def _touch(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"\n")

else:

    def _touch(fd: int) -> None:
        os.pwrite(fd, b"\n", 0)


if sys.platform == "linux":
    import ctypes

    _IN_ACCESS: Final = 0x1
    _IN_MODIFY: Final = 0x2
    _IN_ATTRIB: Final = 0x4
    _IN_CLOSE_WRITE: Final = 0x8
    _IN_DONT_FOLLOW: Final = 0x02000000
    _libc: Final = ctypes.CDLL(None, use_errno=True)

    class _Inotify:
        def __init__(self, name: str) -> None:
            self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            try:
                mask = _IN_ACCESS | _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE | _IN_DONT_FOLLOW
                _checked(_libc.inotify_add_watch(self._fd, os.fsencode(name), ctypes.c_uint32(mask)))
            except BaseException:
                os.close(self._fd)
                raise
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)

        def close(self) -> None:
            os.close(self._fd)

        def wait(self, timeout: float) -> bool:
            if not self._poll.poll(timeout * 1000):
                return False
            with contextlib.suppress(BlockingIOError):
                while os.read(self._fd, 65536):
                    pass
            return True

    def _checked(answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer

    def _open_watch(name: str) -> _FileWatch | None:
        return _Inotify(name)

elif sys.platform != "win32" and hasattr(select, "kqueue"):

    class _Kqueue:
        def __init__(self, name: str) -> None:
            self._file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self._queue = select.kqueue()
            except BaseException:
                os.close(self._file)
                raise
            what = select.KQ_NOTE_WRITE | select.KQ_NOTE_EXTEND | select.KQ_NOTE_ATTRIB
            flags = select.KQ_EV_ADD | select.KQ_EV_CLEAR
            self._queue.control([select.kevent(self._file, select.KQ_FILTER_VNODE, flags, what)], 0)

        def close(self) -> None:
            self._queue.close()
            os.close(self._file)

        def wait(self, timeout: float) -> bool:
            return bool(self._queue.control(None, 1, timeout))

    def _open_watch(name: str) -> _FileWatch | None:
        return _Kqueue(name)

else:

    def _open_watch(name: str) -> _FileWatch | None:
        return None
