"""Requests that wait for messages: each is a waiter of the dispatcher. A message is claimed for a request
that waits, and given back at once if the request ends first.

The server does not renew these leases: they belong to the clients. So the claims have an owner of their own,
which is not announced, and stay valid when the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence

from towpath.core.job import ClaimedJob
from towpath.errors import TowpathError
from towpath.http.options import ServerOptions
from towpath.http.problems import Problem
from towpath.runtime.claims.dispatcher import Waiter, release
from towpath.runtime.engine import Engine


class Consumers:
    """All waiting requests of a server. Used on its event loop only."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.committer = engine.committer
        self.dispatcher = engine.dispatcher
        self.owner = f"{engine.owner}/http"
        self._limit = options.max_consumers
        is_watched = options.watch and not engine.ledger.capabilities.remote
        self._interval = options.resilient_poll_interval if is_watched else options.poll_interval
        self._jitter = options.poll_jitter
        self._polling: asyncio.TimerHandle | None = None
        """The next safety poll; None while no request waits."""
        self._open: set[Consumer] = set()
        self.by_queue: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return len(self._open)

    def open(self, queue: str, n: int, lease: int, owner: str) -> Consumer:
        """A consumer of up to n messages of the queue; `lease` is microseconds."""
        if len(self._open) >= self._limit:
            raise Problem(503, "queue_busy", "too many consumers", retry_after=1)
        consumer = Consumer(self, queue, n, lease, owner)
        self._open.add(consumer)
        self.by_queue[queue] += 1
        if self._polling is None:
            self._poll_later()
        return consumer

    def _poll_later(self) -> None:
        if self._interval:
            pause = self._interval + random.uniform(0, self._jitter)
            self._polling = asyncio.get_running_loop().call_later(pause, self._poll)

    def _poll(self) -> None:
        """Claim for the waiting requests, in case that a notification was lost."""
        self._polling = None
        if self._open:
            self.committer.kick()
            self._poll_later()

    def closed(self, consumer: Consumer) -> None:
        if consumer in self._open:
            self._open.remove(consumer)
            self.by_queue[consumer.queue] -= 1
            if not self.by_queue[consumer.queue]:
                del self.by_queue[consumer.queue]

    def interrupt(self) -> None:
        """End the waits of all requests."""
        for consumer in list(self._open):
            consumer.interrupt()


class Consumer:
    def __init__(self, consumers: Consumers, queue: str, n: int, lease: int, owner: str) -> None:
        self.queue = queue
        self._consumers = consumers
        self._loop = asyncio.get_running_loop()
        self._claims: list[ClaimedJob] = []
        self._woken = asyncio.Event()
        self._was_empty = False
        """A claim has found no message."""
        self._interrupted = False
        self._closed = False
        self._error: TowpathError | None = None
        self._waiter = Waiter((queue,), self._deliver, lease, self._failed, self._empty)
        self._waiter.want, self._waiter.owner = n, consumers.owner
        consumers.dispatcher.add(self._waiter)

    async def first(self) -> list[ClaimedJob]:
        """The messages that are ready now; empty if there are none."""
        while not (self._claims or self._was_empty or self._interrupted):
            await self._woken.wait()
            self._woken.clear()
            self._check(any_error=True)
        return self._take()

    async def wait(self, seconds: float | None) -> list[ClaimedJob]:
        """The next messages; empty if none arrives within `seconds`, or after `interrupt`."""
        timer = None if seconds is None else self._loop.call_later(seconds, self.interrupt)
        try:
            while not (self._claims or self._interrupted):
                await self._woken.wait()
                self._woken.clear()
                self._check(any_error=False)
        finally:
            if timer is not None:
                timer.cancel()
        return self._take()

    def more(self, n: int) -> None:
        """Want n further messages."""
        self._was_empty = False
        self._consumers.dispatcher.more(self._waiter, n)

    def interrupt(self) -> None:
        self._interrupted = True
        self._woken.set()

    def close(self) -> None:
        """Give back the messages that were not taken; a claim that arrives later is given back too."""
        self._closed = True
        self._consumers.dispatcher.remove(self._waiter)
        self._consumers.closed(self)
        self.give_back(self._take())

    def give_back(self, claims: Sequence[ClaimedJob]) -> None:
        release(self._consumers.committer, claims, lambda _: self._consumers.dispatcher.returned(self.queue))

    def _take(self) -> list[ClaimedJob]:
        taken, self._claims = self._claims, []
        return taken

    def _check(self, any_error: bool) -> None:
        """A request that waits long outlives an outage of the ledger; the first claim of a request does not
        wait for its end."""
        error, self._error = self._error, None
        if error is not None and (any_error or not error.retryable):
            raise error

    # Called in the committing thread.

    def _deliver(self, claims: list[ClaimedJob]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._received, claims)
        except RuntimeError:  # the loop is closed
            self.give_back(claims)

    def _failed(self, error: TowpathError) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_error, error)

    def _empty(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_empty)

    # On the event loop.

    def _received(self, claims: list[ClaimedJob]) -> None:
        if self._closed:
            self.give_back(claims)
        else:
            self._claims += claims
            self._woken.set()

    def _set_error(self, error: TowpathError) -> None:
        self._error = error
        self._woken.set()

    def _set_empty(self) -> None:
        if not self._was_empty:
            self._was_empty = True
            self._woken.set()
