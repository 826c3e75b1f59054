"""Waiting for jobs to finish, and for any commit: while there are waiters, one thread per engine watches the
ledger and reads the jobs of all waiters at once.

A waiter registers first and then reads its job. A commit after that read changes the ledger's version, and
the thread reads again. So no end is missed, and no waiter polls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from towpath.clock import SystemClock
from towpath.core import checks
from towpath.core.commands import GroupState
from towpath.core.job import FINISHED, Job
from towpath.core.views import GroupView
from towpath.errors import LedgerClosed, TowpathError, UnknownGroup, UnknownJob
from towpath.fleet import explained
from towpath.ledger import Ledger

T = TypeVar("T", Job, GroupView)
Wake = Callable[[], None]
Version = asyncio.Future[int]
Report = Callable[[str], None]
"""Called with the reason while a wait lasts."""

WAIT_SLICE = 0.25
"""Seconds after which the thread checks for waiters."""
IDLE_SLICES = 8
"""Checks without a waiter after which the thread ends."""
REPORT_AFTER = 10.0
"""Seconds after which a wait is reported the first time; then the time doubles."""
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


class WaitLimit:
    """How long a wait may last, and when it is reported next."""

    def __init__(self, timeout: float | None, report: Report | None) -> None:
        timeout = None if timeout is None else checks.micros(timeout, "timeout") / checks.SECOND
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._report = report
        self._pause = REPORT_AFTER
        self._due = math.inf if report is None else time.monotonic() + REPORT_AFTER

    def left(self) -> float | None:
        """Seconds until the deadline or the next report; None without either."""
        due = min(self._deadline, self._due)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def end(self, reason: Callable[[], str]) -> None:
        """These seconds are over: raise TimeoutError at the deadline, else report."""
        if self._report is None or self._deadline <= self._due:
            raise TimeoutError(f"no result after {self._timeout:g} s; {reason()}") from None
        self._report(reason())
        self._pause *= 2
        self._due = time.monotonic() + self._pause


class CompletionWatcher:
    """`job(id, timeout)` and `group(id, timeout)` block; `ajob` and `agroup` are the same for a coroutine. A
    wait that lasts is reported to `report`, if one is given. `changed` waits for a commit."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._waiting: set[CompletionWaiter] = set()
        self._versions: dict[asyncio.AbstractEventLoop, dict[Version, int]] = {}
        """The waiters of `changed`, each with the version that it has seen."""
        self._current: int | None = None
        """The version that the thread has read last."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def job(self, id: str, timeout: float | None = None, report: Report | None = None) -> Job:
        """The finished job. Raises TimeoutError, or UnknownJob if the ledger does not have it."""
        return self._block(id, False, lambda: self._finished(id), WaitLimit(timeout, report))

    async def ajob(self, id: str, timeout: float | None = None, report: Report | None = None) -> Job:
        return await self._suspend(id, False, lambda: self._finished(id), WaitLimit(timeout, report))

    def group(self, id: str, timeout: float | None = None, report: Report | None = None) -> GroupView:
        """The closed group. Raises TimeoutError or UnknownGroup."""
        return self._block(id, True, lambda: self._closed_group(id), WaitLimit(timeout, report))

    async def agroup(self, id: str, timeout: float | None = None, report: Report | None = None) -> GroupView:
        return await self._suspend(id, True, lambda: self._closed_group(id), WaitLimit(timeout, report))

    async def changed(self, seen: int | None, timeout: float | None = None) -> int | None:
        """The version of the ledger as soon as it is not `seen`, or `seen` after `timeout` seconds: the async
        form of `ledger.wait`. None has seen nothing: the version now. Any number of callers share one thread
        and cost nothing until there is a commit; a call may return early, without one."""
        loop = asyncio.get_running_loop()
        future: Version = loop.create_future()
        with self._lock:
            self._start()
            if self._current is not None and self._current != seen:
                return self._current
            self._versions.setdefault(loop, {})[future] = -1 if seen is None else seen
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return seen
        finally:
            with self._lock:
                same = self._versions.get(loop, {})
                if same.pop(future, None) is not None and not same:
                    del self._versions[loop]

    async def until_ended(self, id: str, group: bool, timeout: float) -> bool:
        """Wait until the job, or the group, has ended or does not exist; False after `timeout` seconds. The
        ledger is not read on the event loop."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        ready = partial(_resolve, loop, (woken,), None)
        with self._registered(CompletionWaiter(id, group, ready)) as waiting:
            if await asyncio.to_thread(self._is_over, id, group):
                return True
            try:
                async with asyncio.timeout(timeout):
                    await woken
            except TimeoutError:
                return False
            if waiting.error is not None:
                raise waiting.error
            return True

    def _is_over(self, id: str, group: bool) -> bool:
        try:
            return (self._closed_group(id) if group else self._finished(id)) is not None
        except (UnknownJob, UnknownGroup):
            return True

    def close(self) -> None:
        """All waiters get `LedgerClosed`."""
        self._end(LedgerClosed(path="the engine"), closed=True)

    def _block(self, id: str, group: bool, read: Callable[[], T | None], limit: WaitLimit) -> T:
        if (found := read()) is not None:
            return found
        woken = threading.Event()
        while True:
            with self._registered(CompletionWaiter(id, group, woken.set)) as waiting:
                if (found := read()) is not None:
                    return found
                if not woken.wait(limit.left()):
                    limit.end(lambda: self._reason(id, group))
                woken.clear()
                if waiting.error is not None:
                    raise waiting.error

    async def _suspend(self, id: str, group: bool, read: Callable[[], T | None], limit: WaitLimit) -> T:
        """`_block` for a coroutine. Reads run in a thread: a ledger that answers slowly must not block the
        event loop."""
        if (found := await asyncio.to_thread(read)) is not None:
            return found
        loop = asyncio.get_running_loop()
        while True:
            woken: asyncio.Future[None] = loop.create_future()
            ready = partial(_resolve, loop, (woken,), None)
            with self._registered(CompletionWaiter(id, group, ready)) as waiting:
                if (found := await asyncio.to_thread(read)) is not None:
                    return found
                try:
                    async with asyncio.timeout(limit.left()):
                        await woken
                except TimeoutError:
                    await asyncio.to_thread(limit.end, lambda: self._reason(id, group))
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

    def _reason(self, id: str, group: bool) -> str:
        return f"group {id} is not closed" if group else str(explained(self._ledger, id, SystemClock().now()))

    @contextlib.contextmanager
    def _registered(self, waiting: CompletionWaiter) -> Iterator[CompletionWaiter]:
        with self._lock:
            self._start()
            self._waiting.add(waiting)
        try:
            yield waiting
        finally:
            with self._lock:
                self._waiting.discard(waiting)

    def _start(self) -> None:
        """Start the thread, unless it runs; under the lock."""
        if self._closed:
            raise LedgerClosed(path="the engine")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towpath-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        idle = 0
        while True:
            try:
                # Read before the jobs: a commit after it ends the wait at once.
                seen, changed = self._ledger.version(), True
                while True:
                    with self._lock:
                        idle = 0 if self._waiting or self._versions else idle + 1
                        if self._closed or idle > IDLE_SLICES:
                            self._thread = self._current = None
                            return
                    if changed:
                        self._pass_on(seen)
                    version = self._ledger.wait(seen, WAIT_SLICE)
                    seen, changed = version, version != seen
            except TowpathError as error:
                if not error.retryable:
                    self._end(error)
                    return
                time.sleep(WAIT_SLICE)

    def _pass_on(self, version: int) -> None:
        """Wake the waiters for this version."""
        with self._lock:
            waiting = list(self._waiting)
            self._current = version
            over = self._take_versions(version)
        for loop, futures in over:
            _resolve(loop, futures, version)
        began = time.monotonic()
        self._wake(waiting)
        if len(waiting) > MANY_WAITERS:
            # Such a read is expensive, and a busy ledger commits hundreds of times a second.
            time.sleep(min(MAX_PAUSE, 2 * (time.monotonic() - began)))

    def _take_versions(self, version: int | None) -> list[tuple[asyncio.AbstractEventLoop, list[Version]]]:
        """Take out the waiters of `changed` that have not seen this version; under the lock."""
        over = []
        for loop, same in list(self._versions.items()):
            over.append((loop, [future for future, seen in same.items() if seen != version]))
            self._versions[loop] = {future: seen for future, seen in same.items() if seen == version}
            if not self._versions[loop]:
                del self._versions[loop]
        return over

    def _wake(self, waiting: list[CompletionWaiter]) -> None:
        """Wake the waiters of finished and deleted jobs; one read for all jobs."""
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

    def _end(self, error: TowpathError, closed: bool = False) -> None:
        """All waiters get the error."""
        with self._lock:
            self._closed |= closed
            if not closed:
                self._thread = self._current = None
            left, over = list(self._waiting), self._take_versions(None)
            self._waiting.clear()
        for loop, futures in over:
            _resolve(loop, futures, error)
        for each in left:
            each.error = error
            each.ready()


def _resolve(loop: asyncio.AbstractEventLoop, futures: Sequence[asyncio.Future[Any]], result: object) -> None:
    """Resolve futures of an event loop from another thread."""

    def resolve() -> None:
        for future in futures:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    # A closed loop has no waiters.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(resolve)
