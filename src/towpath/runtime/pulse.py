"""Notices when something blocks an event loop, and says what."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

BEAT = 0.5
BLOCKED = 1.0
"""Seconds without a beat that are worth a word."""


class Pulse:
    """Calls `blocked(seconds, stack)` from a thread of its own: once when the loop stands still, and at every doubling."""

    def __init__(self, loop: asyncio.AbstractEventLoop, blocked: Callable[[float, str], None]) -> None:
        self._loop = loop
        self._blocked = blocked
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._timer = loop.call_later(BEAT, self._beat)
        self._thread = threading.Thread(target=self._run, name="towpath-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _run(self) -> None:
        told = 0.0
        while not self._closed.wait(BEAT):
            still = time.monotonic() - self._last
            if still < BEAT + BLOCKED:
                told = 0.0
            elif still >= 2 * told:
                told = still
                frame = sys._current_frames().get(self._thread_id)
                self._blocked(still, "".join(traceback.format_stack(frame, limit=12)) if frame is not None else "")

    def close(self) -> None:
        """On the loop."""
        self._closed.set()
        self._timer.cancel()
        self._thread.join()
