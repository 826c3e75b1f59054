"""Detects a blocked event loop and reports the code that blocks it."""

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
"""Seconds without a tick after which the loop is reported as blocked."""
FRAMES = 12
"""Stack frames in the report."""
MAX_NAMED = 20
"""Jobs named in the report if the blocking one is unknown."""


class BlockedLoop(NamedTuple):
    """A blocked loop. `task` is its current task; `again`: it was reported before."""

    seconds: float
    task: asyncio.Task[Any] | None
    stack: Sequence[traceback.FrameSummary]
    again: bool

    def report(self, bus: Bus, running: Sequence[tuple[asyncio.Task[Any], Job]]) -> None:
        """Log it every time, publish it once. `running` are the jobs that run on the loop. The blocking job
        is found by its task; if a task that a handler started or a callback blocks, every job is possible."""
        possible = [job for task, job in running if task is self.task] or [job for _, job in running]
        innermost = self.stack[-1] if self.stack else None
        where = (
            "an unknown place"
            if innermost is None
            else f"{innermost.filename}:{innermost.lineno} in {innermost.name}"
        )
        log.warning(
            "the event loop has been blocked for %.1f s by %s at %s: use a plain `def` for blocking work\n%s",
            self.seconds,
            _named(possible),
            where,
            "".join(traceback.format_list(self.stack)),
        )
        if not self.again and bus.wants(HandlerBlocked):
            id, kind = (possible[0].id, possible[0].kind) if len(possible) == 1 else ("", "")
            bus.publish(HandlerBlocked(id, kind, self.seconds, where))


def _named(possible: Sequence[Job]) -> str:
    if not possible:
        return "code outside of any handler"
    names = ", ".join(f"{job.kind} (job {job.id})" for job in possible[:MAX_NAMED])
    more = f" and {len(possible) - MAX_NAMED} more" if len(possible) > MAX_NAMED else ""
    return names if len(possible) == 1 else f"one of {names}{more}"


class LoopMonitor:
    """Calls `blocked` from its own thread when the loop is blocked, and each time that duration has
    doubled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, blocked: Callable[[BlockedLoop], None]) -> None:
        self._loop = loop
        self._blocked = blocked
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._timer = loop.call_later(TICK, self._tick)
        self._thread = threading.Thread(target=self._run, name="towpath-loop-monitor", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(TICK, self._tick)

    def _run(self) -> None:
        reported = 0.0
        while not self._closed.wait(TICK):
            seconds = time.monotonic() - self._last
            if seconds < TICK + BLOCKED:
                reported = 0.0
            elif seconds >= 2 * reported:
                self._blocked(
                    BlockedLoop(seconds, asyncio.current_task(self._loop), self._stack(), again=reported > 0)
                )
                reported = seconds

    def _stack(self) -> Sequence[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._thread_id)
        return [] if frame is None else traceback.extract_stack(frame, limit=FRAMES)

    def close(self) -> None:
        """On the loop."""
        self._closed.set()
        self._timer.cancel()
        self._thread.join()
