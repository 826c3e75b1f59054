"""The worker: claims what its slots can start, runs it, and tells the ledger how it ended.

Everything happens on one event loop. Claims arrive in bunches from the committing thread; outcomes leave in one hand-over per turn
of the loop, together with the demand for what comes next, so that settling and claiming share a commit.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import Settle
from towpath.core.job import Claim, Reason, Refuse, Release
from towpath.events import Event, JobsClaimed, JobStarted, WorkerDraining, WorkerStarted, WorkerStopped
from towpath.runtime.dispatcher import Waiter
from towpath.runtime.executors import ProcessDied, Processes, Threads
from towpath.runtime.office import Attempt, Office, WorkerOptions
from towpath.runtime.outbox import Outbox
from towpath.runtime.pace import Pace
from towpath.runtime.pulse import Blocked, Pulse

log = logging.getLogger("towpath.worker")

SWITCH_INTERVAL = 0.0005
"""Seconds. The committing thread must get the interpreter back quickly beside busy handlers."""
LAST_WORD = 5.0
"""Seconds that cancelled handlers get to clean up."""


class _Run:
    """A handler that is running, or was told to stop and still is."""

    __slots__ = ("asked", "attempt", "claim", "late", "over", "started", "task", "timer")

    def __init__(self, claim: Claim, attempt: Attempt) -> None:
        self.claim = claim
        self.attempt = attempt
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = time.monotonic()
        self.asked: Reason | None = None
        self.late = False
        self.over = False


class TimedOut(Exception):
    """The handler ran longer than its task allows."""


class Stopped(Exception):
    """The handler was told to stop: canceled, superseded, or its group aborted."""


class Worker:
    """`make` turns a claim into an attempt, or None if nobody here knows its kind. One run per object."""

    def __init__(
        self,
        office: Office,
        make: Callable[[Claim], Attempt | None],
        options: WorkerOptions,
        child: Callable[[Any], None] | None = None,
        empty: Callable[[], None] | None = None,
    ) -> None:
        self._office = office
        self._make = make
        self._options = options
        self._child = child
        self._lease = checks.micros(options.lease)
        self._waiter = Waiter(options.queues, self._arrived, self._lease, empty)
        self._buffer: deque[Claim] = deque()
        self._runs: dict[str, _Run] = {}
        self._pace = Pace()
        self._outbox = Outbox(office, self._pace, self._call, self._told_all)
        self._flushing = self._stopping = False

    async def run(self) -> None:
        """Work until `stop()`, then drain."""
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._settled = asyncio.Event()
        self._stop = asyncio.Event()
        self._threads = Threads(self._options.concurrency, self._loop)
        self._processes = Processes(self._child) if self._child is not None else None
        pulse = Pulse(self._loop, self._blocked)
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_INTERVAL))
        self._waiter.want = self._waiter.once = self._options.concurrency
        self._office.dispatcher.add(self._waiter)
        self._office.committer.kick()
        self._publish(WorkerStarted(self._office.owner, self._options.queues, self._options.concurrency))
        try:
            await self._stop.wait()
            await self._drain()
            self._flush()
            await self._until(self._settled, lambda: self._outbox.empty, LAST_WORD)
        finally:
            self._office.dispatcher.remove(self._waiter)
            self._give_back()
            self._flush()
            self._threads.close()
            if self._processes is not None:
                self._processes.close()
            pulse.close()
            self._publish(WorkerStopped(self._office.owner))
            sys.setswitchinterval(before)

    def _publish(self, event: Event) -> None:
        if self._office.bus.wants(type(event)):
            self._office.bus.publish(event)

    def stop(self) -> None:
        """From any thread: take no more, let what runs finish for the time of grace. `run` returns when that is over."""
        self._loop.call_soon_threadsafe(self._stop.set)

    # Claims arrive

    def _arrived(self, claims: list[Claim]) -> None:
        """In the committing thread."""
        try:
            self._loop.call_soon_threadsafe(self._accept, claims)
        except RuntimeError:
            for claim in claims:
                self._outbox.add(Settle(claim.id, claim.fence, Release()), claim.job)
            self._outbox.send()

    def _accept(self, claims: list[Claim]) -> None:
        if self._office.bus.wants(JobsClaimed):
            self._office.bus.publish(JobsClaimed(tuple([claim.job for claim in claims])))
        self._office.leases.hold(claims, self._lease, self._lost, self._asked_to_stop)
        self._buffer.extend(claims)
        if self._stopping:
            self._give_back()
        self._fill()
        self._flush_soon()

    def _fill(self) -> None:
        """Start what there are slots for."""
        while self._buffer and len(self._runs) < self._options.concurrency:
            claim = self._buffer.popleft()
            attempt = self._make(claim)
            if attempt is None:
                self._end(claim, Settle(claim.id, claim.fence, Refuse(error=f"no task here is called {claim.job.kind!r}")))
            else:
                self._begin(_Run(claim, attempt))

    def _begin(self, run: _Run) -> None:
        if run.claim.job.id in self._runs:
            # The ledger gave us the job again, so the claim of the one that still runs is lost.
            self._on_lost(run.claim.id)
        self._runs[run.claim.job.id] = run
        attempt = run.attempt
        if self._office.bus.wants(JobStarted):
            job = run.claim.job
            # Not `started_at`: a claim may have lain in the buffer since.
            waited = max(0, self._office.clock.now() - job.ready_at) / SECOND
            self._office.bus.publish(JobStarted(job.id, job.kind, job.queue, job.attempts, waited))
        if attempt.mode == "loop":
            # Not by the loop's own method, which costs half as much again; a task factory is nothing a handler needs.
            run.task = asyncio.Task(self._run_here(run), loop=self._loop, name=run.claim.job.kind)
        elif attempt.mode == "thread":
            self._threads.submit(attempt.run, lambda settle, error: self._ended(run, settle, error))
        else:
            self._threads.submit(lambda: self._run_in_process(run), lambda settle, error: self._ended(run, settle, error))
        if attempt.timeout is not None:
            run.timer = self._loop.call_later(attempt.timeout, self._too_late, run)

    async def _run_here(self, run: _Run) -> None:
        try:
            self._finish(run, await run.attempt.arun())
        except asyncio.CancelledError:
            self._finish(run, self._interrupted(run))

    def _run_in_process(self, run: _Run) -> Settle:
        assert self._processes is not None
        answer: list[Settle] = []

        def heard(message: bytes) -> bool:
            settle = run.attempt.heard(message)
            if settle is not None:
                answer.append(settle)
            return settle is not None

        self._processes.run(run.claim.id, run.attempt.request(), heard)
        return answer[0]

    def _ended(self, run: _Run, settle: Settle | None, error: BaseException | None) -> None:
        if settle is not None:
            self._finish(run, settle)
        elif isinstance(error, ProcessDied) and (run.late or run.asked or self._stopping):
            self._finish(run, self._interrupted(run))
        else:
            self._finish(run, run.attempt.ended(error or RuntimeError("the handler did not say how it ended")))

    def _interrupted(self, run: _Run) -> Settle:
        """A handler that we stopped, and why."""
        if run.asked is not None:
            return run.attempt.ended(Stopped(run.asked))
        if run.late:
            return run.attempt.ended(TimedOut(f"it ran longer than {run.attempt.timeout:g} s"))
        if self._stopping:
            return Settle(run.claim.id, run.claim.fence, Release())
        return run.attempt.ended(asyncio.CancelledError("the handler was cancelled from inside"))

    # Outcomes leave

    def _finish(self, run: _Run, settle: Settle) -> None:
        if run.over:
            return
        run.over = True
        if run.timer is not None:
            run.timer.cancel()
        if self._runs.get(settle.id) is run:
            del self._runs[settle.id]
        self._outbox.add(settle, run.claim.job, time.monotonic() - run.started, run.attempt)
        if not self._flushing:
            self._flush_soon()
        if self._stopping and not self._runs:
            self._drained.set()

    def _end(self, claim: Claim, settle: Settle) -> None:
        """No handler was called."""
        self._outbox.add(settle, claim.job)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Once per turn of the loop: all outcomes, the demand that they leave room for, and what can start in their place."""
        self._flushing = False
        sending = len(self._outbox) > 0
        if not self._stopping:
            self._ask_for_more(kick=not sending)
        if sending:
            self._outbox.send()
        self._fill()

    def _ask_for_more(self, kick: bool) -> None:
        free = self._options.concurrency - len(self._runs)
        self._waiter.once = max(0, free - len(self._buffer))
        missing = free + self._pace.ahead() - len(self._buffer) - self._waiter.want
        if missing > 0:
            self._office.dispatcher.more(self._waiter, missing, kick)

    def _told_all(self) -> None:
        """In the committing thread: the ledger has heard of everything so far."""
        if self._stopping:
            self._call(self._settled.set)

    # Things that happen to a running job; lost and asked_to_stop come from the committing thread

    def _lost(self, id: str) -> None:
        self._call(self._on_lost, id)

    def _asked_to_stop(self, id: str, reason: Reason) -> None:
        self._call(self._on_asked, id, reason)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return

    def _on_lost(self, id: str) -> None:
        if (run := self._runs.get(id)) is not None:
            self._outbox.lost(run.claim.job)
            log.warning("job %s: the lease was lost while it ran; its handler is told to stop", id)
        self._on_asked(id, Reason.LOST)

    def _on_asked(self, id: str, reason: Reason) -> None:
        run = self._runs.get(id)
        if run is None:
            waiting = next((claim for claim in self._buffer if claim.id == id), None)
            if waiting is not None:
                self._buffer.remove(waiting)
                self._end(waiting, Settle(waiting.id, waiting.fence, Release()))
            return
        run.asked = reason
        self._interrupt(run, reason)

    def _too_late(self, run: _Run) -> None:
        if not run.over:
            run.late = True
            self._interrupt(run, Reason.EXPIRED)
            if run.attempt.mode == "thread":
                # A thread cannot be stopped. It keeps its slot; its lease runs out after a time of grace.
                log.warning("job %s: its handler in a thread ran too long and was told to stop", run.claim.id)
                self._loop.call_later(self._options.grace, self._office.leases.drop, run.claim.id, run.claim.fence)

    def _interrupt(self, run: _Run, reason: Reason) -> None:
        run.attempt.stop(reason)
        if run.task is not None:
            run.task.cancel()
        elif run.attempt.mode == "process" and self._processes is not None:
            self._processes.kill(run.claim.id)

    def _blocked(self, seen: Blocked) -> None:
        """From the pulse's thread."""
        runs = list(self._runs.values())
        seen.told(self._office.bus, [(run.task, run.claim.job) for run in runs if run.task is not None])
        if seen.seconds >= 60:
            self._office.leases.drop_all([(run.claim.id, run.claim.fence) for run in runs])

    # The end

    async def _drain(self) -> None:
        self._stopping = True
        self._publish(WorkerDraining(self._office.owner, len(self._runs), self._options.grace))
        self._office.dispatcher.remove(self._waiter)
        self._give_back()
        await self._until(self._drained, lambda: not self._runs, self._options.grace)
        for run in list(self._runs.values()):
            self._interrupt(run, Reason.RELEASED)
        await self._until(self._drained, lambda: not self._runs, LAST_WORD)
        for run in list(self._runs.values()):
            log.warning("job %s: its handler does not stop; it is given back", run.claim.id)
            self._finish(run, Settle(run.claim.id, run.claim.fence, Release()))

    @staticmethod
    async def _until(event: asyncio.Event, so: Callable[[], bool], seconds: float) -> None:
        event.clear()
        if not so():
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return

    def _give_back(self) -> None:
        """Claims that were not started cost nothing."""
        while self._buffer:
            claim = self._buffer.popleft()
            self._end(claim, Settle(claim.id, claim.fence, Release()))
