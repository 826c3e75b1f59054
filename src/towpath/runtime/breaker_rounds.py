"""The caretaker's part in circuit breakers: probes that never report must not wedge one."""

from __future__ import annotations

import logging
from typing import Final

from msgspec.structs import replace

from towpath.core.breaker import Phase, Record
from towpath.core.checks import SECOND
from towpath.runtime.breakers import Breakers, running

log = logging.getLogger("towpath.breakers")

ROUND: Final = SECOND
"""Between two looks at all breakers."""


class BreakerRounds:
    """Any number of them may look at the same time."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._looked_at: int | None = None
        self._next: int | None = None
        self._told: dict[str, int] = {}
        """Since when it is half open, where that was told."""
        self._made_way: dict[str, int] = {}

    def due(self, now: int) -> int | None:
        """Make way where jobs are stuck in a gate, and tell which breakers are half open. When to come again,
        None if only a commit can bring something."""
        at = self._looked_at
        if at is not None and at <= now < at + ROUND and (self._next is None or now < self._next):
            # What changes meanwhile is seen with one of the next commits; the caretaker makes some itself.
            return self._next
        times = [self._look(name, now) for name in self._breakers.names()]
        self._looked_at = now
        self._next = min((time for time in times if time is not None), default=None)
        return self._next

    def _look(self, name: str, now: int) -> int | None:
        record, _ = self._breakers.read(name)
        if record is None:
            return None
        status = record.status
        if status.phase(now) is not Phase.HALF_OPEN:
            return status.until or None
        if self._told.get(name) != status.until:
            self._told[name] = status.until
            self._breakers.tell(name, Phase.HALF_OPEN, status)
        return self._make_way(record, now)

    def _make_way(self, record: Record, now: int) -> int | None:
        """Jobs that fill a gate for a whole cool-down without a word do not count any more."""
        name, limit = record.breaker.name, record.limit
        views = [view for gate in record.gates if (view := self._breakers.view(gate)) is not None]
        full = max((running(view) for view in views if view.cap is not None and running(view) >= view.cap == limit), default=0)
        if not full:
            return None
        patience = max(record.status.until, self._made_way.get(name, 0)) + record.breaker.rest
        if now < patience:
            return patience
        self._made_way[name] = now
        log.warning("breaker %s: %d jobs fill its gate without a word; more probes may try", name, full)

        def change(found: Record) -> Record:
            same = found.status.until == record.status.until
            return replace(found, status=replace(found.status, stuck=full)) if same else found

        self._breakers.edit(name, change, now)
        return now + record.breaker.rest
