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
SELDOM = 10 * SECOND
"""The same on a server while no queue has a depth to warn at."""


class Host(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def bus(self) -> Bus: ...


class Depths:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._alarm = Alarm()
        self._looked_at, self._pause = 0, 0
        self._next: int | None = None

    def due(self, now: int) -> int | None:
        """Look, at most once a second; when to look again, None if no queue has a depth to warn at."""
        if self._looked_at <= now < self._looked_at + self._pause:
            return self._next
        ledger = self._host.ledger
        self._looked_at, self._pause, self._next = now, EVERY, now + EVERY
        limits = depths_of(ledger.note(KEY))
        if not limits:
            self._alarm = Alarm()
            self._pause, self._next = SELDOM if ledger.capabilities.remote else EVERY, None
            return None
        waiting = {name: view.counts.waiting for name, view in self._host.ledger.queues().items()}
        for queue in self._alarm.passed(limits, waiting):
            log.warning("queue %s is deep: %d waiting, warn_depth %d", queue, waiting[queue], limits[queue])
            if self._host.bus.wants(QueueDeep):
                self._host.bus.publish(QueueDeep(queue, waiting[queue], limits[queue]))
        return self._next
