"""Events that were gathered, and waiting for them: for tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

E = TypeVar("E")


class Collected(Generic[E]):
    """Events in the order they came. `expect` and `aexpect` sleep until there are enough; nothing polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[E] = []
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    @property
    def events(self) -> list[E]:
        """A copy of what came so far."""
        with self._lock:
            return list(self._events)

    def add(self, event: E) -> None:
        with self._lock:
            self._events.append(event)
            content = [pair for pair in self._waiting if pair[0]()]
            self._waiting = [pair for pair in self._waiting if pair not in content]
        for _, wake in content:
            wake()

    def expect(self, count: int = 1, timeout: float = 5.0, where: Callable[[E], bool] | None = None) -> list[E]:
        """The first `count` events (for which `where` holds), as soon as they have come. Raises TimeoutError."""
        come = threading.Event()
        self._wake_when(count, where, come.set)
        come.wait(timeout)
        return self._first(count, timeout, where)

    async def aexpect(self, count: int = 1, timeout: float = 5.0, where: Callable[[E], bool] | None = None) -> list[E]:
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
            raise TimeoutError(f"{len(found)} of {count} expected events in {timeout:g} s, {seen} seen in all")
        return found
