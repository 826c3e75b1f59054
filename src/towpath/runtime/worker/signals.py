"""The signals of a worker process: SIGINT and SIGTERM stop it, SIGHUP reloads its settings."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from towpath.escapes import get_logger
from towpath.runtime.worker import executors

log = get_logger("towpath.worker")

REPETITION = 0.5
"""Seconds in which a second signal counts as a repetition of the first: a service manager signals all
processes, and a parent its children."""


@contextlib.contextmanager
def signals(
    stop: Callable[[], None], reload: Callable[[], None], stop_seconds: Callable[[], float]
) -> Iterator[None]:
    """In the main thread: SIGINT and SIGTERM call `stop`; the second one, or `stop_seconds()` seconds after
    the first, ends the process. SIGHUP calls `reload` in a thread of its own; if the terminal was closed, it
    is treated as SIGTERM.

    The signal only writes a byte to a pipe. A thread reads it, because the event loop may be blocked. The
    interpreter writes the byte at once. The Python handler writes one too, but runs only when the main thread
    executes bytecode, which may be never if the thread is about to block. Both are needed because other code
    may take over the interpreter's wakeup descriptor, as asyncio does for its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    reader = _SignalReader(reads, stop, reload, stop_seconds)
    before = {
        number: signal.signal(number, lambda number, _: _write(writes, number | _LATE)) for number in numbers
    }
    woken = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def restore() -> None:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    listener = threading.Thread(target=reader.listen, name="towpath-signals", daemon=True)
    listener.start()
    try:
        # The pipe is shared with forked children: their signals must not stop us.
        with executors.undo_in_children(restore):
            yield
    finally:
        restore()
        _write(writes, 0)
        listener.join()
        os.close(reads)
        os.close(writes)


_LATE = 128
"""The bit that the handler adds to the number of its signal."""


def _write(pipe: int, number: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(pipe, bytes([number]))


class _SignalReader:
    def __init__(
        self,
        pipe: int,
        stop: Callable[[], None],
        reload: Callable[[], None],
        stop_seconds: Callable[[], float],
    ) -> None:
        self._pipe, self._stop, self._reload, self._stop_seconds = pipe, stop, reload, stop_seconds
        self._terminal = os.isatty(0)
        self._early: Counter[int] = Counter()
        self._late: Counter[int] = Counter()

    def listen(self) -> None:
        """Read signals until the byte 0."""
        while (first := self._next()) in (None, signal.SIGHUP):
            # In a thread of its own: a blocked ledger must not delay a stop.
            if first is not None:
                threading.Thread(target=self._reload, name="towpath-reload", daemon=True).start()
        if not first:
            return
        stopped_at = time.monotonic()
        name = signal.Signals(first).name
        log.warning(
            "%s: no new jobs are claimed; running jobs may finish. A second signal ends the process at once.",
            name,
        )
        self._stop()
        while (left := stopped_at + self._stop_seconds() - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], left)[0]:
                continue
            if (number := self._next()) == 0:
                return
            if number is not None and number != signal.SIGHUP and time.monotonic() - stopped_at >= REPETITION:
                # The ledger is consistent at any time; running jobs run again when their leases are over.
                os._exit(128 + number)
        log.critical(
            "the worker did not end within %g s: a handler blocks its event loop. The process ends; "
            "its jobs run again.",
            self._stop_seconds(),
        )
        os._exit(128 + first)

    def _next(self) -> int | None:
        """The next signal, 0 for the end. None for another signal, or for the second byte of a signal that
        was read already."""
        byte = os.read(self._pipe, 1)[0]
        number = byte & ~_LATE
        if number == 0:
            return 0
        known = max(self._early[number], self._late[number])
        seen = self._late if byte & _LATE else self._early
        seen[number] += 1
        if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) or seen[number] <= known:
            return None
        closed = number == signal.SIGHUP and self._terminal and not os.isatty(0)
        return signal.SIGTERM if closed else number
