"""Where handlers run that are not coroutines: threads here, and processes that can be killed.

Results cross back to the event loop in bunches: the loop is woken once for all that finished meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NoReturn

from towpath.escapes import get_logger

OnDone = Callable[[Any, BaseException | None], None]
"""Called on the event loop with the value or the exception."""
Work = tuple[Callable[[], Any], OnDone]
Key = tuple[str, int]
"""Id and fence: the same job may be here twice, once lost and once anew."""


class ThreadPool:
    """Threads are made as they are needed, up to `size`. They are daemons: a handler that never returns
    cannot keep the process from ending."""

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
        """Threads that are there already stay."""
        with self._lock:
            self._size = size

    def close(self) -> None:
        """Idle threads end; busy ones end when their handler does."""
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
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            # The loop is closed: the worker has left, and the lease will tell the ledger.
            return

    def _hand_over(self) -> None:
        with self._lock:
            self._woken = False
        while self._finished:
            done, value, error = self._finished.popleft()
            done(value, error)


class ProcessDied(Exception):
    """The process that ran a handler ended before it answered."""


class ProcessDiedIdle(ProcessDied):
    """The process ended before it took the request: the handler has not begun."""


class HandlerProcess:
    """One spawned process that answers requests. Never forked: a forked copy of a ledger's connection
    destroys data."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=target, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def ask(self, request: bytes, heard: Callable[[bytes], bool]) -> None:
        """Send a request; `heard` gets each message that comes back and says whether it was the last. The
        first message is empty and acknowledges the request."""
        begun = False
        try:
            self._here.send_bytes(request)
            self._here.recv_bytes()
            begun = True
            while not heard(self._here.recv_bytes()):
                pass
        except (EOFError, OSError) as error:
            self._process.join(5)
            kind = ProcessDied if begun else ProcessDiedIdle
            raise kind(f"the process ended with exit code {self._process.exitcode}") from error

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._here.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()


class ProcessPool:
    """Children for reuse. A child that was killed or died is replaced. `run` and `kill` name a run by its
    key."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._idle: list[HandlerProcess] = []
        self._running: dict[Key, HandlerProcess | None] = {}
        """None while the process is being started."""
        self._doomed: set[Key] = set()

    def run(self, key: Key, request: bytes, heard: Callable[[bytes], bool]) -> None:
        """Blocks the calling thread until the child answered. `kill(key)` ends it with ProcessDied, at any
        time. A child that died while it was idle is replaced: the next one gets the request."""
        try:
            while not self._ran(key, request, heard):
                pass
        finally:
            with self._lock:
                del self._running[key]
                self._doomed.discard(key)

    def _ran(self, key: Key, request: bytes, heard: Callable[[bytes], bool]) -> bool:
        """False if the child had died idle; a new one that dies before it begins is an error, or its start
        would be tried for ever."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
            self._running[key] = child
            if child is not None and key in self._doomed:
                child.kill()
        reused = child is not None
        try:
            if child is None:
                child = self._start(key)
            child.ask(request, heard)
        except BaseException as error:
            if child is not None:
                child.kill()
                child.close()
            with self._lock:
                again = reused and isinstance(error, ProcessDiedIdle) and key not in self._doomed
            if again:
                return False
            raise
        with self._lock:
            self._idle.append(child)
        return True

    def _start(self, key: Key) -> HandlerProcess:
        child = HandlerProcess(self._target)
        with self._lock:
            self._running[key] = child
            if key in self._doomed:
                child.kill()
        return child

    def kill(self, key: Key) -> None:
        with self._lock:
            # Without a child its thread has not come to it, or starts the process just now: that takes longer
            # than some timeouts.
            self._doomed.add(key)
            if (child := self._running.get(key)) is not None:
                child.kill()

    def close(self) -> None:
        with self._lock:
            children = [*self._idle, *(child for child in self._running.values() if child is not None)]
            self._idle.clear()
        for child in children:
            child.close()


log = get_logger("towpath.worker")

_generation = 0
_undo_in_children: list[Callable[[], None]] = []
_mask = threading.local()


def generation() -> int:
    """Another number in a child than in its parent. (To ask for the process number would cost a system
    call.)"""
    return _generation


@contextlib.contextmanager
def undo_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """A child that is forked inside the block calls `undo` first. SIGINT and SIGTERM for the child wait for
    that."""
    _undo_in_children.append(undo)
    try:
        yield
    finally:
        _undo_in_children.remove(undo)


def end_forked_child(id: str, error: BaseException | None) -> NoReturn:
    """End a child that came back from the handler of this job, as a child of a program would end that got
    there."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        log.warning(
            "job %s: process %d, which its handler forked, came back from the handler and is ended; only the one that forked it "
            "says how the job ended. Let a forked process end with os._exit.",
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
        # A signal that came before `undo` would be caught by the handlers of the parent, and forgotten by
        # Python.
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
