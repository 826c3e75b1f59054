"""Threads and processes for handlers that are not coroutines. Only a process can be killed.

Results return to the event loop in batches: the loop is woken once for all handlers that finished
meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from towpath.errors import ProcessDied
from towpath.escapes import get_logger

if TYPE_CHECKING:  # an App without process tasks starts faster
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

CLOSE_SECONDS = 5.0
"""Seconds that all idle processes together get to end."""
OnDone = Callable[[Any, BaseException | None], None]
"""Called on the event loop with the value or the exception."""
Work = tuple[Callable[[], Any], OnDone]
Key = tuple[str, int]
"""Id and fence: a process may run the same job twice, under a lost claim and under a new one."""


class ThreadPool:
    """Threads are started when needed, up to `size`. They are daemons: a handler that never returns cannot
    keep the process from ending."""

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._size = size
        self._loop = loop
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._finished: deque[tuple[OnDone, Any, BaseException | None]] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._busy = 0
        self._threads = 0

    def submit(self, call: Callable[[], Any], done: OnDone) -> None:
        with self._lock:
            self._busy += 1
            if grow := self._busy > self._threads and self._threads < self._size:
                self._threads += 1
        self._work.put((call, done))
        if grow:
            threading.Thread(target=self._run, name="towpath-handler", daemon=True).start()

    def resize(self, size: int) -> None:
        """Change the limit; running threads stay."""
        with self._lock:
            self._size = size

    def close(self) -> None:
        """Idle threads end at once, busy ones when their handler returns."""
        with self._lock:
            for _ in range(self._threads):
                self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            call, done = work
            value: Any = None
            error: BaseException | None = None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            self._report(done, value, error)
            del call, done, work, value, error

    def _report(self, done: OnDone, value: Any, error: BaseException | None) -> None:
        self._finished.append((done, value, error))
        with self._lock:
            self._busy -= 1
            if self._woken:
                return
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: the worker has ended, and the lease will expire.
            return

    def _deliver(self) -> None:
        with self._lock:
            self._woken = False
        while self._finished:
            done, value, error = self._finished.popleft()
            done(value, error)


class HandlerProcess:
    """A spawned process that serves requests. Never forked: a forked copy of a ledger's connection destroys
    data."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=target, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def request(self, request: bytes, receive: Callable[[bytes], bool]) -> None:
        """Send a request; `receive` is called with each message of the process and returns whether it was the
        last. The first message is empty and acknowledges the request."""
        begun = False
        try:
            self._here.send_bytes(request)
            self._here.recv_bytes()
            begun = True
            while not receive(self._here.recv_bytes()):
                pass
        except (EOFError, OSError):
            self._process.join(5)
            raise ProcessDied(exit_code=self._process.exitcode, begun=begun) from None

    def kill(self) -> None:
        self._process.kill()

    def hang_up(self) -> None:
        """Close the pipe: an idle process closes what it has opened, and ends."""
        self._here.close()

    def close(self, seconds: float = 1.0) -> None:
        self.hang_up()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()


class ProcessPool:
    """Processes for reuse. A process that was killed or died is replaced. `run` and `kill` identify a run by
    its key."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._idle: list[HandlerProcess] = []
        self._running: dict[Key, HandlerProcess | None] = {}
        """None while the process is being started."""
        self._killed: set[Key] = set()

    def run(self, key: Key, request: bytes, receive: Callable[[bytes], bool]) -> None:
        """Block until the last message. `kill(key)` ends it with ProcessDied at any time. A process that died
        while it was idle is replaced, and the next one gets the request."""
        try:
            while not self._try_run(key, request, receive):
                pass
        finally:
            with self._lock:
                del self._running[key]
                self._killed.discard(key)

    def _try_run(self, key: Key, request: bytes, receive: Callable[[bytes], bool]) -> bool:
        """False if the process had died while idle. A new process that dies before it begins is an error:
        otherwise its start would be retried for ever."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
            self._running[key] = process
            if process is not None and key in self._killed:
                process.kill()
        reused = process is not None
        try:
            if process is None:
                process = self._start(key)
            process.request(request, receive)
        except BaseException as error:
            if process is not None:
                process.kill()
                process.close()
            with self._lock:
                again = (
                    reused and isinstance(error, ProcessDied) and not error.begun and key not in self._killed
                )
            if again:
                return False
            raise
        with self._lock:
            self._idle.append(process)
        return True

    def _start(self, key: Key) -> HandlerProcess:
        process = HandlerProcess(self._target)
        with self._lock:
            self._running[key] = process
            if key in self._killed:
                process.kill()
        return process

    def kill(self, key: Key) -> None:
        with self._lock:
            # Without a process the run has not begun, or its process is being started, which takes longer
            # than some timeouts.
            self._killed.add(key)
            if (process := self._running.get(key)) is not None:
                process.kill()

    def close(self) -> None:
        with self._lock:
            processes = [*self._idle, *(process for process in self._running.values() if process is not None)]
            self._idle.clear()
        for process in processes:
            process.hang_up()
        due = time.monotonic() + CLOSE_SECONDS
        for process in processes:
            process.close(max(0.0, due - time.monotonic()))


log = get_logger("towpath.worker")

_generation = 0
_undo_in_children: list[Callable[[], None]] = []
_mask = threading.local()


def generation() -> int:
    """A number that differs between a forked child and its parent. (`os.getpid` would cost a system call.)"""
    return _generation


@contextlib.contextmanager
def undo_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """A child that is forked inside the block calls `undo` first. SIGINT and SIGTERM for the child are
    blocked until then."""
    _undo_in_children.append(undo)
    try:
        yield
    finally:
        _undo_in_children.remove(undo)


def end_forked_child(id: str, error: BaseException | None) -> NoReturn:
    """End a forked child that returned from the handler of this job, with the exit code of a program that
    ends there."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        log.warning(
            "job %s: its handler forked process %d, which returned from the handler and was ended. Only the "
            "parent process settles the job. End a forked process with os._exit.",
            id,
            os.getpid(),
            exc_info=error,
        )
        code = 0 if error is None else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _before_fork() -> None:
    if _undo_in_children:
        # A signal before `undo` would be caught by the signal handlers of the parent, and lost in the child.
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _unblock() -> None:
    before = getattr(_mask, "before", None)
    if before is not None:
        _mask.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1
    for undo in _undo_in_children:
        undo()
    _undo_in_children.clear()
    _unblock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_fork)
