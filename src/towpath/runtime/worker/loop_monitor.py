"""Notices when something blocks an event loop, and says what."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from towpath.core.job import Job
from towpath.escapes import get_logger
from towpath.events import Bus, HandlerBlocked

log = get_logger("towpath.worker")

TICK = 0.5
BLOCKED = 1.0
"""Seconds without a beat that are worth a word."""
FRAMES = 12
"""How much of the stack is told."""
MAX_NAMED = 20
"""How many jobs are named if it may have been any of them."""


class BlockedLoop(NamedTuple):
    """A loop that stands still. `task` is what it was found in, `again` if this was told before."""

    seconds: float
    task: asyncio.Task[Any] | None
    stack: Sequence[traceback.FrameSummary]
    again: bool

    def told(self, bus: Bus, running: Sequence[tuple[asyncio.Task[Any], Job]]) -> None:
        """In the log every time, on the bus once. `running` are the jobs that run on the loop: the guilty one
        is known by its task; if a task of a handler's own is to blame, or a callback, it may have been any of
        them."""
        guilty = [job for task, job in running if task is self.task] or [job for _, job in running]
        innermost = self.stack[-1] if self.stack else None
        where = (
            "an unknown place"
            if innermost is None
            else f"{innermost.filename}:{innermost.lineno} in {innermost.name}"
        )
        log.warning(
            "the event loop has been blocked for %.1f s by %s at %s: use a plain `def` for blocking work.\n%s",
            self.seconds,
            _named(guilty),
            where,
            "".join(traceback.format_list(self.stack)),
        )
        if not self.again and bus.wants(HandlerBlocked):
            id, kind = (guilty[0].id, guilty[0].kind) if len(guilty) == 1 else ("", "")
            bus.publish(HandlerBlocked(id, kind, self.seconds, where))


def _named(guilty: Sequence[Job]) -> str:
    if not guilty:
        return "something that is no handler"
    names = ", ".join(f"{job.kind} (job {job.id})" for job in guilty[:MAX_NAMED])
    more = f" and {len(guilty) - MAX_NAMED} more" if len(guilty) > MAX_NAMED else ""
    return names if len(guilty) == 1 else f"one of {names}{more}"


class LoopMonitor:
    """Calls `blocked` from a thread of its own: once when the loop stands still, and at every doubling."""

    def __init__(self, loop: asyncio.AbstractEventLoop, blocked: Callable[[BlockedLoop], None]) -> None:
        self._loop = loop
        self._blocked = blocked
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._timer = loop.call_later(TICK, self._beat)
        self._thread = threading.Thread(target=self._run, name="towpath-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(TICK, self._beat)

    def _run(self) -> None:
        told = 0.0
        while not self._closed.wait(TICK):
            still = time.monotonic() - self._last
            if still < TICK + BLOCKED:
                told = 0.0
            elif still >= 2 * told:
                self._blocked(
                    BlockedLoop(still, asyncio.current_task(self._loop), self._stack(), again=told > 0)
                )
                told = still

    def _stack(self) -> Sequence[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._thread_id)
        return [] if frame is None else traceback.extract_stack(frame, limit=FRAMES)

    def close(self) -> None:
        """On the loop."""
        self._closed.set()
        self._timer.cancel()
        self._thread.join()
