"""Consumers: a handler for every message of a queue.

The logic is one set of tasks on an event loop: one task receives messages, `concurrency` tasks run handlers
and settle, and one task for each held message extends its lease. `AsyncMessageConsumer` awaits the handler;
`MessageConsumer` runs the loop in the calling thread and the handlers in threads. Messages are received by
dequeue, not by subscribe, so that the client decides how many it holds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict, TypeVar

from towpath.core import checks
from towpath.core.retry import Backoff, Exponential, Fixed
from towpath.errors import CallFailed, InvalidInput, LostLease, NotAllowed, ServerAway, TowpathError
from towpath.escapes import get_logger
from towpath.http.client.calls import MAX_PAGE, Calls
from towpath.http.client.connection import ClientSettings
from towpath.http.client.messages import AsyncReceivedMessage, ReceivedMessage
from towpath.http.client.received import HeldDelivery
from towpath.http.client.requests import LONG_POLL, ReceiveOptions, Span, whole_seconds
from towpath.http.client.transport import AsyncTransport
from towpath.queues.receipts import last_words

log = get_logger("towpath.client")
T = TypeVar("T")

MAX_CONCURRENCY = 1000
RESTART = Exponential(base=0.25, cap=30.0, jitter=0.2)
NACK_DELAY = Exponential(base=1.0, cap=300.0, jitter=0.2)


class ConsumerOptions(TypedDict, total=False):
    """`concurrency`: handlers at once (1). `prefetch`: messages held ahead of them (as many as
    `concurrency`). `visibility`: the lease of a message, which is extended while it is held (30 s).
    `restart`: pauses after failed calls. `nack_delay`: seconds, or a backoff by the number of deliveries,
    after which a message whose handler has failed is delivered again."""

    concurrency: int
    prefetch: int
    visibility: Span
    namespace: str
    owner: str
    stateful: bool
    restart: Backoff
    nack_delay: Backoff | Span


class _Held:
    """A message of a consumer, from its meta part to its settlement."""

    def __init__(self, delivery: HeldDelivery) -> None:
        self.delivery = delivery
        self.handler: asyncio.Future[BaseException | None] | None = None
        self.ended = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.delivery.view.message_id


class ConsumerTasks:
    """`call` runs the handler and returns its exception. `interrupt` ends a handler whose lease is lost, as
    far as that is possible."""

    def __init__(
        self,
        settings: ClientSettings,
        queue: str,
        options: ConsumerOptions,
        call: Callable[[HeldDelivery], Coroutine[Any, Any, BaseException | None]],
        interrupt: Callable[[asyncio.Future[Any]], object],
    ) -> None:
        self._settings, self._queue = settings, queue
        self._call, self._interrupt = call, interrupt
        self.concurrency = options.get("concurrency", 1)
        checks.whole("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        self._prefetch = options.get("prefetch", self.concurrency)
        checks.whole("prefetch", self._prefetch, 0, MAX_CONCURRENCY)
        self._restart = options.get("restart", RESTART)
        delay = options.get("nack_delay", NACK_DELAY)
        self._nack_delay: Backoff = delay if isinstance(delay, Backoff) else Fixed(delay)
        self._visibility = whole_seconds("visibility", options.get("visibility", 30.0))
        if self._visibility < 1:
            raise InvalidInput(field="visibility", value=self._visibility, expected="at least 1 s")
        self._receive = ReceiveOptions(wait=LONG_POLL, visibility=self._visibility)
        for name in ("namespace", "owner", "stateful"):
            if name in options:
                self._receive[name] = options[name]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_early = False

    def stop(self) -> None:
        """Safe in every thread and in signal handlers."""
        self._stop_early = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._ready: asyncio.Queue[_Held | None] = asyncio.Queue()
        self._held: set[_Held] = set()
        self._calls = Calls(self._settings, AsyncTransport(self._settings))
        self._loop = asyncio.get_running_loop()
        if self._stop_early:
            self._stopping.set()
        workers = [asyncio.create_task(self._work()) for _ in range(self.concurrency)]
        try:
            await self._fetch_all()
        except asyncio.CancelledError:
            for held in self._held:
                if held.handler is not None:
                    self._interrupt(held.handler)
            raise
        finally:
            await self._finish(workers)

    async def _finish(self, workers: list[asyncio.Task[None]]) -> None:
        """Give back what no handler has begun, and wait for the handlers that run."""
        self._stopping.set()
        waiting = [self._ready.get_nowait() for _ in range(self._ready.qsize())]
        await asyncio.gather(*(self._give_back(held) for held in waiting if held is not None))
        for _ in workers:
            self._ready.put_nowait(None)
        await asyncio.gather(*workers)
        self._loop = None
        await self._calls.close()

    async def _fetch_all(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            if (n := self._room()) == 0:
                self._changed.clear()
                await self._unless_stopped(self._changed.wait())
                continue
            try:
                await self._fetch(n)
                failures = 0
            except TowpathError as error:
                if isinstance(error, NotAllowed | InvalidInput) or getattr(error, "status", 0) == 400:
                    log.error("the consumer of queue %s ends: %s", self._queue, error)
                    raise
                failures += 1
                pause = max(self._restart.delay(failures, random.random), getattr(error, "retry_after", 0.0))
                log.warning("consumer of queue %s: %s; next attempt in %.1f s", self._queue, error, pause)
                await self._unless_stopped(asyncio.sleep(pause))

    def _room(self) -> int:
        """Messages to ask for. While handlers have enough to do, wait until several are wanted."""
        if self._ready.qsize() > self._prefetch // 2:
            return 0
        room = self.concurrency + self._prefetch - len(self._held)
        return max(0, min(room, 1 if self._receive.get("stateful") else MAX_PAGE))

    async def _fetch(self, n: int) -> None:
        """Receive up to n messages. A request that waits ends when the consumer stops; a response that has
        begun is read to its end, so that each of its messages can be given back."""
        started = time.monotonic()
        stream = await self._unless_stopped(self._calls.receive(self._queue, n, self._receive))
        if stream is None:
            await self._unless_stopped(self._calls.pause_after(started))
            return
        try:
            while (delivery := await stream.next()) is not None:
                held = self._hold(delivery)
                try:
                    await delivery.store()
                except BaseException:
                    await self._give_back(held)
                    raise
                self._ready.put_nowait(held)
        finally:
            await stream.abandon()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work; None if the consumer stops first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _hold(self, delivery: HeldDelivery) -> _Held:
        held = _Held(delivery)
        self._held.add(held)
        held.keeper = asyncio.create_task(self._keep(held))
        return held

    async def _keep(self, held: _Held) -> None:
        """Extend the lease at half of its time until the message is settled. An outage of the server is
        survived up to the end of the lease."""
        delivery = held.delivery
        pause = delivery.lease / 2
        while not await _happens(held.ended, pause):
            if delivery.settled is not None:
                return  # by the handler itself
            try:
                await delivery.extend(self._visibility)
                pause = delivery.lease / 2
            except TowpathError as error:
                left = delivery.ends - time.monotonic()
                if (error.retryable or delivery.settling) and left > 0:
                    pause = min(1.0, max(0.05, left / 4))
                    continue
                if delivery.settled is not None or held.ended.is_set():
                    return
                log.warning("message %s: the lease is lost: %s", held.id, error)
                delivery.lost = error
                if held.handler is not None:
                    self._interrupt(held.handler)
                return

    async def _work(self) -> None:
        while (held := await self._ready.get()) is not None:
            self._changed.set()
            try:
                if self._stopping.is_set():
                    await self._give_back(held)
                elif held.delivery.lost is None:
                    await self._handle(held)
            except Exception:
                # A defect must not end the task: the other messages need it.
                log.exception("message %s of queue %s was not settled", held.id, self._queue)
            finally:
                self._drop(held)

    async def _handle(self, held: _Held) -> None:
        held.handler = asyncio.ensure_future(self._call(held.delivery))
        error: BaseException | None
        try:
            await asyncio.wait([held.handler])
        except asyncio.CancelledError:
            self._interrupt(held.handler)
            await asyncio.wait([held.handler])
            raise
        finally:
            await self._release(held)
        if held.handler.cancelled():
            error = asyncio.CancelledError("the handler was cancelled")
        else:
            error = held.handler.result()
        delivery = held.delivery
        if delivery.settled is not None or delivery.lost is not None:
            return
        if error is None:
            await self._settle(held, delivery.ack)
        elif isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            await self._settle(held, lambda: delivery.nack(defer=True))
        else:
            words = last_words(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            log.warning("message %s of queue %s failed: %s", held.id, self._queue, words["reason"])
            pause = self._nack_delay.delay(max(1, delivery.view.failure_attempts + 1), random.random)
            await self._settle(held, lambda: delivery.nack(pause, **words))

    async def _settle(self, held: _Held, settle: Callable[[], Awaitable[None]]) -> None:
        """Send the ack or nack, again after an outage of up to one lease. A message that could not be settled
        is delivered again."""
        end = time.monotonic() + held.delivery.lease
        failures, unclear = 0, False
        while True:
            try:
                await settle()
                return
            except TowpathError as error:
                # A repeated receipt finds that the first one was applied.
                if unclear and isinstance(error, LostLease) and error.code in ("not_found", "cas_mismatch"):
                    return
                if not error.retryable or time.monotonic() >= end:
                    log.warning("message %s was not settled: %s", held.id, error)
                    return
                unclear = unclear or (isinstance(error, ServerAway) and error.sent)
                failures += 1
                await asyncio.sleep(min(1.0, self._restart.delay(failures, random.random)))

    async def _give_back(self, held: _Held) -> None:
        """Return a message that no handler has begun; it counts as no failure."""
        await self._release(held)
        try:
            if held.delivery.lost is None:
                await held.delivery.nack(defer=True)
        except (CallFailed, ServerAway) as error:
            log.warning("message %s was not given back: %s", held.id, error)
        finally:
            self._drop(held)

    @staticmethod
    async def _release(held: _Held) -> None:
        """End the extension of the lease. An extend that was sent is awaited: it may change the receipt."""
        held.ended.set()
        if held.keeper is not None:
            await asyncio.wait([held.keeper])

    def _drop(self, held: _Held) -> None:
        held.ended.set()
        held.delivery.discard()
        self._held.discard(held)
        self._changed.set()


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event happens within this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class AsyncMessageConsumer:
    """Awaits the handler for each message. A handler that returns acknowledges its message, an exception is a
    nack. `run` returns after `stop`, when the running handlers have ended; messages that no handler has begun
    go back to the queue."""

    def __init__(
        self,
        settings: ClientSettings,
        queue: str,
        handler: Callable[[AsyncReceivedMessage], Awaitable[object]],
        options: ConsumerOptions,
    ) -> None:
        self._handler = handler
        self._tasks = ConsumerTasks(settings, queue, options, self._call, lambda task: task.cancel())

    async def _call(self, delivery: HeldDelivery) -> BaseException | None:
        try:
            await self._handler(AsyncReceivedMessage(delivery))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    async def run(self) -> None:
        """Consume until `stop`. Raises `NotAllowed` if the server refuses the client."""
        await self._tasks.run()

    def stop(self) -> None:
        """End `run`. Safe in every thread and in signal handlers."""
        self._tasks.stop()


class MessageConsumer:
    """Calls the handler for each message, in `concurrency` threads. A handler that returns acknowledges its
    message, an exception is a nack. A handler whose lease is lost cannot be ended: it can look at
    `message.lost`."""

    def __init__(
        self,
        settings: ClientSettings,
        queue: str,
        handler: Callable[[ReceivedMessage], object],
        options: ConsumerOptions,
    ) -> None:
        self._handler = handler
        self._tasks = ConsumerTasks(settings, queue, options, self._call, lambda task: None)

    async def _call(self, delivery: HeldDelivery) -> BaseException | None:
        loop = asyncio.get_running_loop()

        def run(work: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        def call() -> BaseException | None:
            try:
                self._handler(ReceivedMessage(delivery, run))
            except BaseException as error:
                return error
            return None

        return await loop.run_in_executor(self._pool, call)

    def run(self) -> None:
        """Consume until `stop`. Raises `NotAllowed` if the server refuses the client."""
        with ThreadPoolExecutor(self._tasks.concurrency, "towpath-consumer") as self._pool:
            asyncio.run(self._tasks.run())

    def stop(self) -> None:
        """End `run`. Safe in every thread and in signal handlers."""
        self._tasks.stop()
