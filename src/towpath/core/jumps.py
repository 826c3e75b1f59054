"""Forward jumps of a ledger object's time: after one, the leases that it overran get a second chance."""

from __future__ import annotations

from towpath.core import checks

LEAST = checks.SECOND // 2
"""Shorter jumps are not worth remembering: a lease of less than a second is not protected."""
KEPT = 16
"""How many jumps are remembered at most, the largest."""


class Jumps:
    """Fed with the time of every `apply`. A process that slept, or a clock that was set, must not look like a dead worker."""

    __slots__ = ("_jumps", "_last")

    def __init__(self) -> None:
        self._last: int | None = None
        self._jumps: list[tuple[int, int]] = []

    def note(self, now: int, passed: int = 0) -> None:
        """The ledger's time is `now`. The first time after opening is no jump, nor is what has `passed` since, by a clock that
        nobody sets, where the caller knows it."""
        last, self._last = self._last, now
        if last is not None and now - last - passed > LEAST:
            self.add(now, now - last - passed)

    def add(self, at: int, size: int) -> None:
        """There was a jump, as the caller knows, to the time `at`."""
        jumps = [jump for jump in self._jumps if jump[1] + checks.DAY > at]
        jumps.append((size, at))
        self._jumps = sorted(jumps)[-KEPT:]

    def until(self, lease_len: int, lease_until: int) -> int:
        """The time before which a job with this lease is not reaped; 0 if no jump protects it. A jump protects only the
        leases that it ran over: one that had ended before was lost without its help."""
        return max((at + lease_len for size, at in self._jumps if 2 * size > lease_len and lease_until > at - size), default=0)

    def spares(self, lease_len: int, lease_until: int, now: int) -> bool:
        return now < self.until(lease_len, lease_until)

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """(when, how far) of the jumps remembered."""
        return [(at, size) for size, at in self._jumps]
