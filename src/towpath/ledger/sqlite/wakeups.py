"""Telling waiting processes that something was committed: one byte of `<database>-wake` is touched.

A wake-up is a hint. Nobody may depend on it: who waits must look again from time to time, and a bell that
cannot be rung or heard only makes things slower."""

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

_BLIND_PAUSE: Final = 0.05
_MAX_IDLE: Final = 4


class Wake:
    def __init__(self, path: Path) -> None:
        self._name = os.path.realpath(path) + "-wake"
        self._lock = threading.Lock()
        self._closed = False
        # Kept between watches: letting go of an inotify descriptor costs most of a millisecond.
        self._idle: list[_Ear] = []
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = open_beside(path, "-wake", os.O_RDWR)
            _prepare(self._fd)

    def ring(self) -> None:
        """Wake every watch of every process. Never fails: it is called after a commit, which has happened."""
        with (
            self._lock
        ):  # against close(): the number could by then belong to another file, even the database
            if self._fd is not None:
                try:
                    _touch(self._fd)
                except OSError:
                    return

    def watch(self) -> Watch:
        return Watch(self)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, None
            idle, self._idle = self._idle, []
        if fd is not None:
            os.close(fd)
        for ear in idle:
            ear.close()

    def _take_ear(self) -> _Ear | None:
        with self._lock:
            ear = self._idle.pop() if self._idle else None
        if ear is not None:
            ear.hear(0.0)  # forget what rang while it was idle
            return ear
        try:
            return _listen(self._name)
        except OSError:  # no file, or too many watches or descriptors
            return None

    def _keep_ear(self, ear: _Ear) -> None:
        with self._lock:
            if kept := not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(ear)
        if not kept:
            ear.close()


class Watch:
    """Hears every ring from `with` on: enter first, then look whether there is something to wait for."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._ear: _Ear | None = None

    def __enter__(self) -> Self:
        self._ear = self._wake._take_ear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            self._wake._keep_ear(ear)

    def wait(self, timeout: float) -> bool:
        """Sleep until somebody rang, at most `timeout` seconds. False: nobody rang, or nothing can be heard
        here and this was only a short sleep. Look again either way."""
        timeout = max(0.0, timeout)
        if self._ear is not None:
            return self._ear.hear(timeout)
        time.sleep(min(timeout, _BLIND_PAUSE))
        return False


class _Ear(Protocol):
    def hear(self, timeout: float) -> bool: ...

    def close(self) -> None: ...


def _prepare(fd: int) -> None:
    """A byte that can be read or written over."""
    if os.fstat(fd).st_size == 0:
        os.write(fd, b"\n")


if sys.platform == "linux":

    def _touch(fd: int) -> None:
        # Reading is seen as well as writing is, and leaves the file system's journal alone, which a commit
        # has just synced.
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

        def hear(self, timeout: float) -> bool:
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

    def _listen(name: str) -> _Ear | None:
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

        def hear(self, timeout: float) -> bool:
            return bool(self._queue.control(None, 1, timeout))

    def _listen(name: str) -> _Ear | None:
        return _Kqueue(name)

else:

    def _listen(name: str) -> _Ear | None:
        return None
