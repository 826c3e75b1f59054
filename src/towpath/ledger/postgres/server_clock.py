"""How the server's time passes, as this process sees it: what it went beyond the time that has passed here
was a jump.

While the server is away nobody can renew a lease, so that time is a jump too, and those who held jobs can say
so before they are taken for dead. So is the time in which sessions wait for a lock that a frozen process
holds. It may be away for some statements only (a table is locked), so that it is sure to be back when an
upkeep succeeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from towpath.core import checks
from towpath.core.commands import Command, Upkeep
from towpath.core.lifecycle import Jumps


class ServerClock:
    """Any thread may say that something failed or succeeded; the rest is for one at a time."""

    def __init__(self) -> None:
        self.jumps = Jumps()
        # In seconds of our own clock, which nobody sets.
        self._seen_at = time.monotonic()
        """When we last knew the server's time."""
        self._good_at = self._seen_at
        """The last success before something failed."""
        self._failing = False
        self._back_at: float | None = None
        """The first success since something failed."""

    def begin(self, present: int, real: bool) -> None:
        """A batch begins. Is it `real` time? Otherwise somebody says how it passes."""
        before, self._seen_at = self._seen_at, time.monotonic()
        self.jumps.note(present, _micros(self._seen_at - before) if real else 0)

    def begin_upkeep(self, present: int, real: bool) -> None:
        """It is for an upkeep."""
        if self._failing and real:
            now = time.monotonic()
            back_at = self._back_at or now
            self.jumps.add(present - _micros(now - back_at), _micros(back_at - self._good_at))

    def stall(self, present: int, seconds: float) -> None:
        """A batch waits, or has waited, for a lock that somebody held for long; renewals of others may wait
        as well."""
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
