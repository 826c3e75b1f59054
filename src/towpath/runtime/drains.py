"""When to try again at a queue that is full: from how fast it drains, in the whole fleet.

Nothing is measured before the first refusal. Whoever is refused looks at the queue's exact counts, at most once a second however many
are; two looks make a rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from towpath.errors import QueueFull, TowpathError
from towpath.ledger import Ledger

EVERY: Final = 1.0
"""Seconds between two looks at a queue."""
WINDOW: Final = 30.0
"""Seconds that a rate is measured over. What was seen longer ago than that, with nobody refused since, says nothing any more."""
SHORTEST, LONGEST = 0.1, 60.0
"""Bounds of a hint, in seconds."""


class _Look(NamedTuple):
    at: float
    finished: int


class Drains:
    """Safe from any thread."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._looks: dict[str, tuple[_Look, _Look]] = {}
        """Of each queue that was full: the look that its rate begins with, and the last one."""

    def hinted(self, full: QueueFull) -> QueueFull:
        """The same refusal with a hint that is measured, or as it is where nothing is known."""
        if "capacity" not in full.details:
            return full
        queue, excess = full.details["queue"], full.details["depth"] + full.details["asked"] - full.details["capacity"]
        with self._lock:
            try:
                first, last = self._freshen(queue, self._clock())
            except TowpathError:
                return full
        seconds, finished = last.at - first.at, last.finished - first.finished
        if not seconds:
            return full
        # While nothing drains, the time that we have seen it for is all that can be said.
        hint = excess * seconds / finished if finished else seconds
        return type(full)(**{**full.details, "retry_after": round(min(LONGEST, max(SHORTEST, hint)), 1)})

    def _freshen(self, queue: str, now: float) -> tuple[_Look, _Look]:
        known = self._looks.get(queue)
        if known is not None and now < known[1].at + EVERY:
            return known
        view = self._ledger.queues().get(queue)
        look = _Look(now, 0 if view is None else view.counts.finished)
        if known is None or now > known[1].at + WINDOW or look.finished < known[1].finished:
            # The first look for a long time, or retention took finished jobs away.
            first = look
        else:
            first = known[0] if now <= known[0].at + WINDOW else known[1]
        self._looks[queue] = first, look
        return first, look
