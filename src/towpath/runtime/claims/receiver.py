"""Where claims arrive for somebody who handles them by hand, and the waiting for them: by a thread or by a
coroutine.

Nothing is lost here: what nobody takes out before the inbox is closed, or what arrives afterwards, is given
back to the ledger as if it had never been claimed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import msgspec

from towpath.core.commands import Claim as ClaimCommand
from towpath.core.commands import Claimed, Settle, Want
from towpath.core.job import ClaimedJob, Reason, Release
from towpath.errors import LedgerClosed, TowpathError
from towpath.runtime.claims.dispatcher import Waiter
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine

OPEN_CHECK = 1.0
"""Seconds after which one who waits looks whether the ledger is still open."""

T = TypeVar("T")


class LeaseTerms(msgspec.Struct, frozen=True):
    """How long a lease is (microseconds), and how many seconds it is renewed at most."""

    lease: int
    max_hold: float


class Sleep(NamedTuple):
    """Sleep until the function given to `start` is called, at most `seconds`."""

    start: Callable[[Callable[[], None]], None]
    seconds: float | None


Steps = Generator[Sleep, None, T]
"""A procedure that sleeps now and then; `run` and `arun` carry it out in two ways. If they are interrupted,
it is closed."""


def run(steps: Steps[T]) -> T:
    """Carry it out in this thread."""
    try:
        while True:
            nap = next(steps)
            woken = threading.Event()
            nap.start(woken.set)
            woken.wait(nap.seconds)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(steps: Steps[T]) -> T:
    """Carry it out on the running event loop."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            nap = next(steps)
            woken = asyncio.Event()
            nap.start(_waker(loop, woken))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(nap.seconds):
                    await woken.wait()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _waker(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> Callable[[], None]:
    def wake() -> None:
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    return wake


class Receiver:
    """Claims of one queue on their way to their taker, kept alive until he takes them. Any thread may call
    anything."""

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
        self.closed = False

    def fetch(self, n: int, wait: float) -> Steps[list[ClaimedJob]]:
        """Up to n claims: one try, and if there is nothing, wait for the first so many seconds. Closes the
        inbox."""
        try:
            yield Sleep(self._ask(n), None)
            if self._error is not None:
                raise self._error
            end = time.monotonic() + wait
            if not self._claims and wait > 0:
                self.expect(n, once=n)
            while not self._claims and (left := end - time.monotonic()) > 0:
                yield Sleep(self.wake_when_filled, min(left, OPEN_CHECK))
                self.check_open()
            self._stop_waiting()
            return self.take(n)
        finally:
            self.close()

    def expect(self, n: int, once: int) -> None:
        """From now on take up to n claims from the dispatcher; `once` as in `Want`."""
        self._engine.start_caretaker()
        self._waiter = Waiter((self._queue,), self.deliver, self._terms.lease)
        self._waiter.want, self._waiter.once = n, once
        self._dispatcher.add(self._waiter)

    def more(self, n: int) -> None:
        if self._waiter is not None:
            self._dispatcher.more(self._waiter, n)

    def wake_when_filled(self, wake: Callable[[], None]) -> None:
        """Call it once, as soon as there is something to take (or nothing more will come)."""
        with self._lock:
            if not (self._claims or self.closed):
                self._wake = wake
                return
        wake()

    def check_open(self) -> None:
        """Raises LedgerClosed when nothing will come any more. A ledger that is only busy is waited for."""
        try:
            self._engine.ledger.version()
        except TowpathError as error:
            if not error.retryable:
                raise

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
        """Give back what was not taken."""
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

    def _ask(self, n: int) -> Callable[[Callable[[], None]], None]:
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

            self._committer.post([command], answered, patient=False)

        return start

    def _stop_waiting(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._dispatcher.remove(waiter)

    def _forget(self, id: str) -> None:
        """A claim was lost while it lay here."""
        with self._lock:
            self._claims = deque([claim for claim in self._claims if claim.id != id])


class Subscription(Generic[T]):
    """Everything that comes, for `for` or `async for`, with `prefetch` claims in hand. Leaving the loop or
    the `with` closes it: what was not consumed goes back. `close` may be called by another thread, which ends
    the loop."""

    def __init__(self, inbox: Receiver, prefetch: int, make: Callable[[ClaimedJob], T]) -> None:
        self._inbox = inbox
        self._prefetch = prefetch
        self._make = make
        self._owed = 0
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
        self._inbox.close()

    async def aclose(self) -> None:
        self._inbox.close()

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
        inbox = self._inbox
        if not self._open and not inbox.closed:
            self._open = True
            inbox.expect(self._prefetch, once=1)
        while not inbox.closed:
            if taken := inbox.take(1):
                self._owed += 1
                # Half of them at a time: a batch for every single message would be mostly empty.
                if 2 * self._owed >= self._prefetch:
                    owed, self._owed = self._owed, 0
                    inbox.more(owed)
                return taken[0]
            yield Sleep(inbox.wake_when_filled, OPEN_CHECK)
            inbox.check_open()
        return None


def release(committer: Committer, claims: Sequence[ClaimedJob]) -> None:
    """As if they had never been claimed. If that fails, their leases run out."""
    if claims:
        with contextlib.suppress(LedgerClosed):
            committer.post([Settle(claim.id, claim.fence, Release()) for claim in claims], _ignore)


def _ignore(replies: Sequence[Reply]) -> None:
    """Nobody waits for it."""


def _not_started(id: str, reason: Reason) -> None:
    """Asked to stop before anybody began: whoever takes it is told by the next renewal."""
