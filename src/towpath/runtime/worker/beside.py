"""Claims from a queue beside the own queues of a worker, only while that queue has ready jobs.

A claim from one queue is the fast path of a ledger. So the other queue is not part of every claim: it is read
after commits, with a pause in between, and claimed when it has ready jobs."""

from __future__ import annotations

from collections.abc import Callable

from towpath.core.job import ClaimedJob
from towpath.errors import TowpathError
from towpath.runtime.claims.dispatcher import Waiter
from towpath.runtime.engine import Engine

MOST = 64
"""Jobs of one claim."""


class BesideClaims:
    """`room` returns how many claims the worker may take beside those that it asks for; it is called under
    the commit lock, as `deliver` and `failed` are. Without a queue it does nothing."""

    def __init__(
        self,
        engine: Engine,
        queue: str,
        lease: int,
        deliver: Callable[[list[ClaimedJob]], None],
        failed: Callable[[TowpathError], None],
        room: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._deliver_to, self._room = deliver, room
        self._waiter = Waiter((queue,), self._deliver, lease, failed, self._empty, self._demand)
        self._asked = 0
        self._is_open = False
        self.waits = False
        """The queue has ready jobs, and the next batch claims them."""
        self.stale = True
        """As in `Refreshable`."""

    def open(self) -> None:
        if self._queue:
            self._is_open = True
            self._engine.components.refresher.add(self)

    def close(self) -> None:
        if self._queue:
            self._is_open = False
            self._engine.components.refresher.remove(self)
            self._leave()

    def refresh(self) -> None:
        """In the caretaker's thread, after a commit."""
        if self.waits:
            return
        view = self._engine.ledger.queue(self._queue)
        if view is not None and view.counts.ready and not view.paused:
            self.waits = True
            self._engine.dispatcher.add(self._waiter)
            if not self._is_open:  # closed meanwhile
                self._leave()

    # In the committing thread

    def _demand(self) -> tuple[int, int]:
        self._asked = min(MOST, max(0, self._room()))
        return self._asked, self._asked

    def _deliver(self, claims: list[ClaimedJob]) -> None:
        self._deliver_to(claims)
        if len(claims) < self._asked:
            self._leave()

    def _empty(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self.waits = False
        self._engine.dispatcher.remove(self._waiter)
