"""The delivery thread of a bus: calls in order, outside of every lock, with a bounded backlog."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from towpath.escapes import get_logger

log = get_logger("towpath.events")

MAX_BACKLOG = 10_000
"""Events that may wait for their listeners. Further ones are dropped and counted."""

IDLE = 10.0
"""Seconds without an event after which the thread ends, until the next one."""

Delivered = Callable[[], object]


class Delivery:
    """The thread starts with the first call that is queued. Any thread may queue."""

    def __init__(self) -> None:
        # Only `with` on the lock itself is safe from an interrupt of the publisher.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: deque[Delivered] = deque()
        self._thread: threading.Thread | None = None
        self._busy = self._idle = self._closing = False
        self.dropped = 0

    @property
    def pending(self) -> bool:
        return self._busy or bool(self._waiting)

    def put(self, call: Delivered, always: bool = False) -> None:
        """`always`: not subject to the bound."""
        with self._lock:
            if len(self._waiting) >= MAX_BACKLOG and not always:
                self.dropped += 1
                if self.dropped > 1:
                    return
            else:
                self._waiting.append(call)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="towpath-events", daemon=True)
                    self._thread.start()
                elif self._idle:
                    self._idle = False
                    self._work.notify()
                return
        log.error(
            "%d events wait for their listeners: further ones are dropped until there is room. `bus.dropped` counts them; "
            "this is logged once.",
            MAX_BACKLOG,
        )

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued so far has been called."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or not self.pending:
            return True
        reached = threading.Event()
        self.put(reached.set, always=True)
        return reached.wait(timeout)

    def close(self, timeout: float) -> None:
        with self._lock:
            thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            self._closing, self._idle = True, False
            self._work.notify()
        thread.join(timeout)
        if thread.is_alive():
            log.error("%d events are not delivered: a listener has not returned for %g s", len(self._waiting) + 1, timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                over = self._closing
                while not self._waiting:
                    if over:
                        self._thread, self._closing, self._idle = None, False, False
                        return
                    self._idle = True
                    over = not self._work.wait(IDLE) or self._closing
                self._busy = True
                call = self._waiting.popleft()
            try:
                call()
            except BaseException:
                log.exception("a call in the delivery thread failed")
