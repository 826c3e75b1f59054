"""Lanes with `ageing`: from time to time, what has waited so long becomes urgent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from towpath.core.checks import SECOND, micros
from towpath.core.commands import Hasten, Hastened
from towpath.core.lanes import AGEING_STEPS, Lane
from towpath.errors import LedgerClosed
from towpath.runtime.office import Office
from towpath.runtime.tickets import Reply


class Ageing:
    """Belongs to the worker's loop. Every worker of a fleet does it; the second one finds nothing to do."""

    def __init__(self, office: Office, lanes: Iterable[Lane]) -> None:
        self._office = office
        self._spans = {",".join(lane.queues): micros(lane.ageing) for lane in lanes if lane.ageing is not None}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = True
        for queues in self._spans:
            self._hasten(queues)

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._started = False

    def _hasten(self, queues: str) -> None:
        span = self._spans[queues]

        def heard(replies: Sequence[Reply]) -> None:
            more = any(isinstance(reply, Hastened) and reply.more for reply in replies)
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._later, queues, 0.0 if more else span / AGEING_STEPS / SECOND)

        with contextlib.suppress(LedgerClosed):
            self._office.committer.post([Hasten(queues, span)], heard)

    def _later(self, queues: str, seconds: float) -> None:
        if self._started:
            self._timers[queues] = self._loop.call_later(seconds, self._hasten, queues)
