"""How the server's time passes, as this process sees it: what it went beyond the time that has passed here was a jump.

While the server is away nobody can renew a lease, so that time is a jump too, and those who held jobs get the chance to say so before
they are taken for dead. It may be away for some statements only (a table is locked), so it is back when an upkeep succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from towpath.core import checks
from towpath.core.commands import Command, Upkeep
from towpath.core.jumps import Jumps


class Passage:
    def __init__(self) -> None:
        self.jumps = Jumps()
        self._seen_at = time.monotonic()
        self._seen: int | None = None
        """The last time of the server's that we know of, and when that was."""
        self._good: int | None = None
        """The same of the last batches that succeeded."""
        self._failing = False

    def begin(self, present: int, real: bool, keeps_up: bool) -> None:
        """A batch begins. Is it `real` time? Otherwise somebody says how it passes."""
        if self._failing and real:
            if keeps_up:
                self.jumps.note(present, since=self._good)
            return
        before, self._seen_at = self._seen_at, time.monotonic()
        self._seen = present
        self.jumps.note(present, int((self._seen_at - before) * checks.SECOND) if real else 0)

    def succeed(self, commands: Sequence[Command]) -> None:
        if self._failing and any(type(command) is Upkeep for command in commands):
            self._failing, self._seen, self._seen_at = False, self.jumps.last, time.monotonic()
        if not self._failing:
            self._good = self._seen

    def fail(self) -> None:
        self._failing = True
