"""Claims for code that handles messages by hand, and the wait for them, by a thread or by a coroutine.

No claim is lost: a claim that is not taken before the receiver is closed, or that arrives later, is released
as if it had never been claimed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import msgspec

from towpath.core.commands import Claim as ClaimCommand
from towpath.core.commands import Claimed, Want
from towpath.core.job import ClaimedJob, Reason
from towpath.errors import TowpathError
from towpath.runtime.claims.dispatcher import Waiter, release
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine

T = TypeVar("T")


class LeaseTerms(msgspec.Struct, frozen=True):
    """The lease in microseconds, and the seconds for which it is renewed at most."""

    lease: int
    max_hold: float


class Sleep(NamedTuple):
    """Sleep until the function given to `start` is called, at most `seconds`."""

    start: Callable[[Callable[[], None]], None]
    seconds: float | None


Steps = Generator[Sleep, None, T]
"""A procedure that yields its sleeps, so that `run` and `arun` share it. It is closed if they are
interrupted."""


def run(steps: Steps[T]) -> T:
    """Run it in this thread."""
    try:
        while True:
            sleep = next(steps)
            woken = threading.Event()
            sleep.start(woken.set)
            woken.wait(sleep.seconds)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(steps: Steps[T]) -> T:
    """Run it on the current event loop."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            sleep = next(steps)
            woken = asyncio.Event()
            sleep.start(_waker(loop, woken))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(sleep.seconds):
                    await woken.wait()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _waker(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> Callable[[], None]:
    def wake() -> None:
        # A closed loop has no waiters.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    return wake


class Receiver:
    """Claims of one queue that were delivered and not taken yet. Their leases are renewed. Safe from any
    thread."""

    def __init__(self, engine: Engine, queue: str, terms: LeaseTerms) -> None:
        self._engine = engine
        self._committer, self._leases, self._dispatcher = engine.committer, engine.leases, engine.dispatcher
        self._queue = queue
        self._terms = terms
        self._lock = threading.Lock()
        self._claims: deque[ClaimedJob] = deque()
        self._wake: Callable[[], None] | None = None
        self._error: TowpathError | None = None
        self._waiter: Waiter | None = None
        self._asked = self._told = False
        """The first claim has returned, and the caller was woken for it."""
        self.closed = False

    def fetch(self, n: int, wait: float) -> Steps[list[ClaimedJob]]:
        """Up to n claims. If there are none, wait at most `wait` seconds for the first. Closes the
        receiver."""
        try:
            end = time.monotonic() + wait
            if wait > 0:
                self.expect(n, once=n)
            else:
                yield Sleep(self._claim(n), None)
                self.check_open()
            while not self._claims and (left := end - time.monotonic()) > 0:
                yield Sleep(self.wake_when_filled, None if left == math.inf else left)
                self.check_open()
                if self._asked and not self._claims:
                    # Not before: a process that finds its messages at once needs no caretaker.
                    self.keep_waiting()
            self._stop_waiting()
            return self.take(n)
        finally:
            self.close()

    def expect(self, n: int, once: int) -> None:
        """Wait for up to n claims of the dispatcher; `once` as in `Want`."""
        self._waiter = Waiter((self._queue,), self.deliver, self._terms.lease, self._failed, self._empty)
        self._waiter.want, self._waiter.once = n, once
        self._dispatcher.add(self._waiter)

    def keep_waiting(self) -> None:
        """Wait also through an outage, and start the caretaker: it notices the messages of other processes
        and delayed messages that become due."""
        self._asked = self._told = True
        self._engine.start_caretaker()

    def more(self, n: int) -> None:
        if self._waiter is not None:
            self._dispatcher.more(self._waiter, n)

    def wake_when_filled(self, wake: Callable[[], None]) -> None:
        """Call `wake` once: as soon as there is a claim to take, an error, the first claim was empty, or the
        receiver is closed."""
        with self._lock:
            if not (self._claims or self.closed or self._error or (self._asked and not self._told)):
                self._wake = wake
                return
            self._told = self._asked
        wake()

    def check_open(self) -> None:
        """Raise the error of the first claim, or of an engine that delivers no more."""
        if self._error is not None:
            raise self._error

    def take(self, n: int) -> list[ClaimedJob]:
        with self._lock:
            return [self._claims.popleft() for _ in range(min(n, len(self._claims)))]

    def deliver(self, claims: Sequence[ClaimedJob]) -> None:
        """Called in the committing thread."""
        with self._lock:
            if not (closed := self.closed):
                self._claims.extend(claims)
                until = time.monotonic() + self._terms.max_hold
                self._leases.hold(claims, self._terms.lease, self._forget, _not_started, until)
            wake, self._wake = self._wake, None
        if closed:
            release(self._committer, claims)
        elif wake is not None:
            wake()

    def close(self) -> None:
        """Release the claims that were not taken."""
        self._stop_waiting()
        with self._lock:
            self.closed = True
            left = list(self._claims)
            self._claims.clear()
            wake, self._wake = self._wake, None
        for claim in left:
            self._leases.drop(claim.id, claim.fence)
        release(self._committer, left)
        if wake is not None:
            wake()

    def _claim(self, n: int) -> Callable[[Callable[[], None]], None]:
        command = ClaimCommand(
            owner=self._engine.owner, wants=(Want(self._queue, n),), lease=self._terms.lease
        )

        def start(wake: Callable[[], None]) -> None:
            def answered(replies: Sequence[Reply]) -> None:
                (reply,) = replies
                if isinstance(reply, Claimed):
                    self.deliver(reply.claims)
                elif isinstance(reply, TowpathError):
                    self._error = reply
                wake()

            self._committer.post([command], answered, retried=False)

        return start

    def _empty(self) -> None:
        """A claim has returned nothing. Called in the committing thread, as `_failed`."""
        self._wake_with(None)

    def _failed(self, error: TowpathError) -> None:
        """A wait outlives an outage of the ledger; the first claim of a caller does not."""
        if error.fatal or not self._asked:
            self._wake_with(error)

    def _wake_with(self, error: TowpathError | None) -> None:
        with self._lock:
            self._asked, self._error = True, error or self._error
            wake, self._wake = self._wake, None
            self._told = wake is not None
        if wake is not None:
            wake()

    def _stop_waiting(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._dispatcher.remove(waiter)

    def _forget(self, id: str) -> None:
        """The lease of a claim was lost before the claim was taken."""
        with self._lock:
            self._claims = deque([claim for claim in self._claims if claim.id != id])


class Subscription(Generic[T]):
    """All claims of a queue, for `for` or `async for`, with `prefetch` claims ahead. Leaving the loop or the
    `with` closes it and releases the claims that were not consumed. `close` may be called by another thread
    and ends the loop."""

    def __init__(self, receiver: Receiver, prefetch: int, make: Callable[[ClaimedJob], T]) -> None:
        self._receiver = receiver
        self._prefetch = prefetch
        self._make = make
        self._consumed = 0
        self._open = False

    def __iter__(self) -> Iterator[T]:
        with self:
            while (claim := run(self._next())) is not None:
                yield self._make(claim)

    async def __aiter__(self) -> AsyncIterator[T]:
        async with self:
            while (claim := await arun(self._next())) is not None:
                yield self._make(claim)

    def close(self) -> None:
        self._receiver.close()

    async def aclose(self) -> None:
        self._receiver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Steps[ClaimedJob | None]:
        """The next claim; None when closed."""
        receiver = self._receiver
        if not self._open and not receiver.closed:
            self._open = True
            receiver.keep_waiting()
            receiver.expect(self._prefetch, once=1)
        while not receiver.closed:
            if taken := receiver.take(1):
                self._consumed += 1
                # Half of the prefetch at a time: a batch for each message would be mostly empty.
                if 2 * self._consumed >= self._prefetch:
                    consumed, self._consumed = self._consumed, 0
                    receiver.more(consumed)
                return taken[0]
            yield Sleep(receiver.wake_when_filled, None)
            receiver.check_open()
        return None


def _not_started(id: str, reason: Reason) -> None:
    """A stop request for a claim that was not taken: the reply to the next renewal repeats it."""
