"""The delivery thread of a bus: calls in order, outside of every lock, with a bounded backlog."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from towpath.escapes import get_logger

log = get_logger("towpath.events")

MAX_BACKLOG = 10_000
"""Events that may wait for their listeners. Further ones are dropped and counted."""

IDLE = 10.0
"""Seconds without an event after which the thread ends, until the next one."""

Delivered = Callable[[], object]


class Delivery:
    """The thread starts with the first call that is queued. Any thread may queue. `what` is delivered."""

    def __init__(self, what: str = "events") -> None:
        self._what = what
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
                    name = f"towpath-{self._what}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
                elif self._idle:
                    self._idle = False
                    self._work.notify()
                return
        log.error(
            "%d %s wait to be delivered: new ones are dropped until there is room. This is logged once.",
            MAX_BACKLOG,
            self._what,
        )

    def flush(self, timeout: float) -> bool:
        """Wait until every call queued so far has returned."""
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
            log.error(
                "%d %s are not delivered: one of them has not returned for %g s",
                len(self._waiting) + 1,
                self._what,
                timeout,
            )

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
                log.exception("a call in the delivery thread of %s failed", self._what)


E = TypeVar("E")


class Collected(Generic[E]):
    """Events in the order of their arrival. `expect` and `aexpect` sleep until there are enough; nothing
    polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[E] = []
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    @property
    def events(self) -> list[E]:
        """A copy of the events so far."""
        with self._lock:
            return list(self._events)

    def add(self, event: E) -> None:
        with self._lock:
            self._events.append(event)
            content = [pair for pair in self._waiting if pair[0]()]
            self._waiting = [pair for pair in self._waiting if pair not in content]
        for _, wake in content:
            wake()

    def expect(
        self, count: int = 1, timeout: float = 5.0, where: Callable[[E], bool] | None = None
    ) -> list[E]:
        """Return the first `count` events (for which `where` holds) as soon as they have arrived. Raises
        TimeoutError."""
        come = threading.Event()
        self._wake_when(count, where, come.set)
        come.wait(timeout)
        return self._first(count, timeout, where)

    async def aexpect(
        self, count: int = 1, timeout: float = 5.0, where: Callable[[E], bool] | None = None
    ) -> list[E]:
        """`expect` for a coroutine."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        self._wake_when(count, where, lambda: loop.call_soon_threadsafe(come.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(come.wait(), timeout)
        return self._first(count, timeout, where)

    def _wake_when(self, count: int, where: Callable[[E], bool] | None, wake: Callable[[], object]) -> None:
        """Call `wake` once there are `count` events, which may be now."""
        with self._lock:
            if len(self._matching(where)) < count:
                self._waiting.append((lambda: len(self._matching(where)) >= count, wake))
                return
        wake()

    def _matching(self, where: Callable[[E], bool] | None) -> Sequence[E]:
        return self._events if where is None else [event for event in self._events if where(event)]

    def _first(self, count: int, timeout: float, where: Callable[[E], bool] | None) -> list[E]:
        with self._lock:
            found = list(self._matching(where)[:count])
            seen = len(self._events)
        if len(found) < count:
            raise TimeoutError(
                f"{len(found)} of {count} expected events in {timeout:g} s, {seen} seen in all"
            )
        return found
