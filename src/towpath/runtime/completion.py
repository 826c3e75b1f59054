"""Waiting for jobs to finish: while there are waiters, one thread per engine watches the ledger and reads the
jobs of all waiters at once.

A waiter registers first and then reads its job. A commit after that read changes the ledger's version, and
the thread reads again. So no end is missed, and no waiter polls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from towpath.clock import SystemClock
from towpath.core.commands import GroupState
from towpath.core.job import FINISHED, Job
from towpath.core.views import GroupView
from towpath.errors import LedgerClosed, TowpathError, UnknownGroup, UnknownJob
from towpath.fleet import explained
from towpath.ledger import Ledger

T = TypeVar("T", Job, GroupView)
Wake = Callable[[], None]

WAIT_SLICE = 0.25
"""Seconds after which the thread checks for waiters."""
IDLE_SLICES = 8
"""Checks without a waiter after which the thread ends."""
MANY_WAITERS, MAX_PAUSE = 100, 0.05
"""With more waiters than this the thread pauses after a read, at most so many seconds."""


class CompletionWaiter:
    """A waiter for the end of a job, or of a group. `ready` is called once, in the watching thread."""

    __slots__ = ("error", "group", "id", "ready")

    def __init__(self, id: str, group: bool, ready: Wake) -> None:
        self.id = id
        self.group = group
        self.ready = ready
        self.error: TowpathError | None = None


class CompletionWatcher:
    """`job(id, timeout)` and `group(id, timeout)` block; `ajob` and `agroup` are the same for a coroutine."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._waiting: set[CompletionWaiter] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def job(self, id: str, timeout: float | None = None) -> Job:
        """The finished job. Raises TimeoutError, or UnknownJob if the ledger does not have it."""
        return self._block(id, False, lambda: self._finished(id), timeout)

    async def ajob(self, id: str, timeout: float | None = None) -> Job:
        return await self._suspend(id, False, lambda: self._finished(id), timeout)

    def group(self, id: str, timeout: float | None = None) -> GroupView:
        """The closed group. Raises TimeoutError or UnknownGroup."""
        return self._block(id, True, lambda: self._closed_group(id), timeout)

    async def agroup(self, id: str, timeout: float | None = None) -> GroupView:
        return await self._suspend(id, True, lambda: self._closed_group(id), timeout)

    def close(self) -> None:
        """All waiters get `LedgerClosed`."""
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
        for each in left:
            each.error = LedgerClosed(path="the engine")
            each.ready()

    def _block(self, id: str, group: bool, read: Callable[[], T | None], timeout: float | None) -> T:
        if (found := read()) is not None:
            return found
        woken = threading.Event()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._registered(CompletionWaiter(id, group, woken.set)) as waiting:
                if (found := read()) is not None:
                    return found
                if not woken.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(self._timeout_text(id, group, timeout))
                woken.clear()
                if waiting.error is not None:
                    raise waiting.error

    async def _suspend(self, id: str, group: bool, read: Callable[[], T | None], timeout: float | None) -> T:
        if (found := read()) is not None:
            return found
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            woken: asyncio.Future[None] = loop.create_future()
            with self._registered(CompletionWaiter(id, group, partial(_set, loop, woken))) as waiting:
                if (found := read()) is not None:
                    return found
                try:
                    async with asyncio.timeout_at(deadline):
                        await woken
                except TimeoutError:
                    raise TimeoutError(self._timeout_text(id, group, timeout)) from None
                if waiting.error is not None:
                    raise waiting.error

    def _finished(self, id: str) -> Job | None:
        job = self._ledger.get(id)
        if job is None:
            raise UnknownJob(id=id)
        return job if job.state in FINISHED else None

    def _closed_group(self, id: str) -> GroupView | None:
        view = self._ledger.group(id)
        if view is None:
            raise UnknownGroup(group=id)
        return view if view.state is GroupState.CLOSED else None

    def _timeout_text(self, id: str, group: bool, timeout: float | None) -> str:
        what = f"group {id} is not closed" if group else str(explained(self._ledger, id, SystemClock().now()))
        return f"no result after {timeout:g} s; {what}"

    @contextlib.contextmanager
    def _registered(self, waiting: CompletionWaiter) -> Iterator[CompletionWaiter]:
        with self._lock:
            if self._closed:
                raise LedgerClosed(path="the engine")
            self._waiting.add(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="towpath-watch", daemon=True)
                self._thread.start()
        try:
            yield waiting
        finally:
            with self._lock:
                self._waiting.discard(waiting)

    def _run(self) -> None:
        idle = 0
        while True:
            try:
                # Read before the jobs: a commit after it ends the wait at once.
                seen = self._ledger.version()
                while True:
                    with self._lock:
                        waiting = list(self._waiting)
                        idle = 0 if waiting else idle + 1
                        if self._closed or idle > IDLE_SLICES:
                            self._thread = None
                            return
                    began = time.monotonic()
                    self._wake(waiting)
                    if len(waiting) > MANY_WAITERS:
                        # Such a read is expensive, and a busy ledger commits hundreds of times a second.
                        time.sleep(min(MAX_PAUSE, 2 * (time.monotonic() - began)))
                    seen = self._ledger.wait(seen, WAIT_SLICE)
            except TowpathError as error:
                if not error.retryable:
                    self._give_up(error)
                    return
                time.sleep(WAIT_SLICE)

    def _wake(self, waiting: list[CompletionWaiter]) -> None:
        """Wake the waiters whose job has finished or is gone; one read for all jobs."""
        ids = list({each.id for each in waiting if not each.group})
        jobs = self._ledger.get_many(ids, bodies=False) if ids else {}
        for each in waiting:
            if each.group:
                view = self._ledger.group(each.id)
                over = view is None or view.state is GroupState.CLOSED
            else:
                over = (job := jobs.get(each.id)) is None or job.state in FINISHED
            if over:
                with self._lock:
                    mine = each in self._waiting
                    self._waiting.discard(each)
                if mine:
                    each.ready()

    def _give_up(self, error: TowpathError) -> None:
        with self._lock:
            self._thread = None
            left = list(self._waiting)
            self._waiting.clear()
        for each in left:
            each.error = error
            each.ready()


def _set(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    # A closed loop has no waiters.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(resolve)
