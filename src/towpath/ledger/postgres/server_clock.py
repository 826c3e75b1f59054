"""Jumps of the server's clock: its advance minus the advance of the local monotonic clock.

An outage counts as a jump, because no lease can be renewed during it: holders get time to renew before their
jobs are reaped. The time in which sessions wait for a lock of a frozen process counts as well. An outage may
affect some statements only (a locked table), so it ends when an upkeep succeeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from towpath.core import checks
from towpath.core.commands import Command, Upkeep
from towpath.core.lifecycle import Jumps


class ServerClock:
    """`fail` and `succeed` may be called from any thread, the other methods under the write lock."""

    def __init__(self) -> None:
        self.jumps = Jumps()
        # Seconds of the local monotonic clock.
        self._seen_at = time.monotonic()
        """When the server's time was last read."""
        self._good_at = self._seen_at
        """The last success before an outage."""
        self._failing = False
        self._back_at: float | None = None
        """The first success since the outage began."""

    def begin(self, present: int, real: bool) -> None:
        """Note the time at which a batch begins. `real`: it is the server's time, not a given one."""
        before, self._seen_at = self._seen_at, time.monotonic()
        self.jumps.note(present, _micros(self._seen_at - before) if real else 0)

    def begin_upkeep(self, present: int, real: bool) -> None:
        """Add the outage as a jump before an upkeep reaps leases."""
        if self._failing and real:
            now = time.monotonic()
            back_at = self._back_at or now
            self.jumps.add(present - _micros(now - back_at), _micros(back_at - self._good_at))

    def stall(self, present: int, seconds: float) -> None:
        """Add the wait of a batch for a lock as a jump: renewals may wait for the same lock."""
        self.jumps.add(present, _micros(seconds))

    def succeed(self, commands: Sequence[Command] = ()) -> None:
        now = time.monotonic()
        if self._failing and any(type(command) is Upkeep for command in commands):
            self._failing, self._back_at = False, None
        if not self._failing:
            self._good_at = now
        elif self._back_at is None:
            self._back_at = now

    def fail(self) -> None:
        self._failing, self._back_at = True, None

    @contextmanager
    def tracking(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.fail()
            raise
        self.succeed()


def _micros(seconds: float) -> int:
    return int(seconds * checks.SECOND)
