"""How far ahead of its slots a worker claims."""

from __future__ import annotations

import math
import time

MAX_AHEAD = 10_000


class Pace:
    """How many jobs end within two commits: that many may be claimed ahead of the slots."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._commit = 0.0
        self._count = 0
        self._since = time.monotonic()

    def ended(self, count: int) -> None:
        self._count += count
        now = time.monotonic()
        spent = now - self._since
        if spent >= 0.005:
            rate = self._count / spent
            # Quick to grow, and an idle time counts as what it was.
            self._rate = rate if spent > 1 else 0.5 * self._rate + 0.5 * rate
            self._count, self._since = 0, now

    def committed(self, seconds: float) -> None:
        self._commit = 0.8 * self._commit + 0.2 * min(seconds, 1.0)

    def ahead(self) -> int:
        return min(MAX_AHEAD, math.ceil(2 * self._rate * self._commit))
