"""The only reader of real time. Everything else takes time as an argument: int64 microseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Wall time in microseconds since 1970, for stored stamps."""
        ...


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1000
