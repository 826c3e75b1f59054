"""Says when a queue becomes deep. The caretaker asks it, so a fleet says it once."""

from __future__ import annotations

from typing import Protocol

from towpath.core.checks import SECOND
from towpath.core.depths import KEY, Alarm, depths_of
from towpath.escapes import get_logger
from towpath.events import Bus, QueueDeep
from towpath.ledger import Ledger

log = get_logger("towpath.queues")

EVERY = SECOND


class Host(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def bus(self) -> Bus: ...


class Depths:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._alarm = Alarm()
        self._next = 0

    def due(self, now: int) -> int | None:
        """Look, at most once a second; when to look again, None if no queue has a depth to warn at."""
        if self._next - EVERY <= now < self._next:
            return self._next
        self._next = now + EVERY
        limits = depths_of(self._host.ledger.note(KEY))
        if not limits:
            self._alarm = Alarm()
            return None
        waiting = {name: view.counts.waiting for name, view in self._host.ledger.queues().items()}
        for queue in self._alarm.passed(limits, waiting):
            log.warning("queue %s is deep: %d waiting, warn_depth %d", queue, waiting[queue], limits[queue])
            if self._host.bus.wants(QueueDeep):
                self._host.bus.publish(QueueDeep(queue, waiting[queue], limits[queue]))
        return self._next
