"""The caretaker's part in circuit breakers: probes that never report must not wedge one, and its gates stay as it set them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from towpath.core.breaker import Phase, Record
from towpath.core.checks import SECOND
from towpath.core.views import PartView, QueueView
from towpath.escapes import get_logger
from towpath.runtime.breakers import Breakers, running

log = get_logger("towpath.breakers")

View = QueueView | PartView | None

ROUND: Final = SECOND
"""Between two looks at all breakers."""
SELDOM: Final = 10 * SECOND
"""The same on a server while there are no breakers."""


class BreakerRounds:
    """Any number of them may look at the same time."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._looked_at: int | None = None
        self._pause = ROUND
        self._next: int | None = None
        self._told: dict[str, int] = {}
        """Since when it is half open, where that was told."""
        self._made_way: dict[str, int] = {}

    def due(self, now: int) -> int | None:
        """Set gates again that somebody changed, make way where jobs are stuck in one, and tell which breakers are half open. When
        to come again, None if only a commit can bring something."""
        at = self._looked_at
        if at is not None and at <= now < at + self._pause and (self._next is None or now < self._next):
            # What changes meanwhile is seen with one of the next commits; the caretaker makes some itself.
            return self._next
        names = self._breakers.names()
        times = [self._look(name, now) for name in names]
        self._looked_at, self._pause = now, ROUND if names or not self._breakers.remote else SELDOM
        self._next = min((time for time in times if time is not None), default=None)
        return self._next

    def _look(self, name: str, now: int) -> int | None:
        record, _ = self._breakers.read(name)
        if record is None:
            return None
        status = record.status
        if status.until == 0:
            return None
        views = [self._breakers.view(gate) for gate in record.gates]
        if _changed(record, views, now):
            self._breakers.edit(name, lambda found: found, now, anew=True)
        if status.phase(now) is Phase.OPEN:
            return status.until
        if self._told.get(name) != status.until:
            self._told[name] = status.until
            self._breakers.tell(name, Phase.HALF_OPEN, status)
        return self._make_way(record, views, now)

    def _make_way(self, record: Record, views: Sequence[View], now: int) -> int | None:
        """Jobs that fill a gate for a whole cool-down without a word do not count any more; those that have ended count again."""
        name, limit = record.breaker.name, record.limit
        most = max((running(view) for view in views if view is not None), default=0)
        if most < record.status.stuck:
            self._count_stuck(record, most, now)
        full = max((running(view) for view in views if view is not None and running(view) >= limit == view.cap), default=0)
        if not full:
            return None
        patience = max(record.status.until, self._made_way.get(name, 0)) + record.breaker.rest
        if now < patience:
            return patience
        self._made_way[name] = now
        log.warning("breaker %s: %d jobs fill its gate without a word; more probes may try", name, full)
        self._count_stuck(record, full, now)
        return now + record.breaker.rest

    def _count_stuck(self, record: Record, count: int, now: int) -> None:
        def change(found: Record) -> Record:
            same = found.status.until == record.status.until
            return replace(found, status=replace(found.status, stuck=count)) if same else found

        self._breakers.edit(record.breaker.name, change, now)


def _changed(record: Record, views: Sequence[View], now: int) -> bool:
    """Has somebody set a limit of a gate that the breaker holds? Then more might pass than its probes."""
    for setting, view in zip(record.settings(), views, strict=True):
        opened = now < record.status.until and view is not None and view.next_at < record.status.until
        if view is None or view.cap != setting.cap or opened:
            return True
    return False
