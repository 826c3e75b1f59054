"""Those who want to know soon what was committed, by us or by another process: what is asked to stop, who is paused.

A commit makes everybody's picture stale; a look refreshes it. Looks only read, and each waits a multiple of what the last one cost,
so a busy ledger does not pay for them. While nothing is committed nobody looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

SHARE: Final = 100
"""A look is followed by a pause of so many times what it took: it may cost one hundredth of a core."""
SHORTEST, LONGEST = 0.01, 0.5
"""Seconds of that pause."""


class Looker(Protocol):
    stale: bool
    """Has anything happened since the last look? Also the looker itself may say so."""

    def look(self) -> None: ...


class Lookout:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[Looker, float] = {}

    def add(self, looker: Looker) -> None:
        with self._lock:
            self._next[looker] = self._clock()

    def remove(self, looker: Looker) -> None:
        with self._lock:
            self._next.pop(looker, None)

    def go(self, changed: bool) -> float | None:
        """Let those look whose picture is stale; the seconds until somebody who had to wait may, None if nobody has to."""
        with self._lock:
            lookers = list(self._next.items())
        waits: list[float] = []
        for looker, due in lookers:
            if changed:
                looker.stale = True
            began = self._clock()
            if looker.stale and began < due:
                waits.append(due - began)
            elif looker.stale:
                # Before the look: what is committed during it may be missing from it.
                looker.stale = False
                try:
                    looker.look()
                except BaseException:
                    looker.stale = True
                    raise
                finally:
                    ended = self._clock()
                    with self._lock:
                        if looker in self._next:
                            self._next[looker] = ended + min(LONGEST, max(SHORTEST, SHARE * (ended - began)))
        return min(waits, default=None)
