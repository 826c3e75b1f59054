"""The worker: claims what its slots can start, runs it, and tells the ledger how it ended.

Everything happens on one event loop. Claims arrive in bunches from the committing thread; outcomes leave in
one hand-over per turn of the loop, together with the demand for what comes next, so that settling and
claiming share a commit."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import Settle
from towpath.core.job import SUSPECT, Claim, Done, Reason, Refuse, Release
from towpath.errors import TowpathError, WorkerStuck
from towpath.escapes import get_logger
from towpath.events import Event, JobsClaimed, JobStarted, WorkerDraining, WorkerStarted, WorkerStopped
from towpath.runtime.engine import Engine
from towpath.runtime.worker.buffer import ClaimBuffer, PlainBuffer
from towpath.runtime.worker.executors import ProcessDied, ProcessPool, ThreadPool
from towpath.runtime.worker.lanes import LaneBuffer
from towpath.runtime.worker.loop_monitor import BlockedLoop, LoopMonitor
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, max_unsettled
from towpath.runtime.worker.settling import HandlerRun, SettleSender, run_in_process, wait_until

log = get_logger("towpath.worker")

SWITCH_INTERVAL = 0.0005
"""Seconds. The committing thread must get the interpreter back quickly beside busy handlers."""
CLEANUP = 5.0
"""Seconds that cancelled handlers get to clean up."""


class HeldClaims(NamedTuple):
    """The claims of a worker: not started (or given back, without an answer), running, and ended without an
    answered settle."""

    claimed: int
    running: int
    ended: int


class Worker:
    """`make` turns a claim into an attempt, or into how it is given back; None if nobody here knows its kind.
    One run per object."""

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Claim], RunnableAttempt | Settle | None],
        options: WorkerOptions,
        child: Callable[[Any], None] | None = None,
        empty: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._make = make
        self._options = options
        self._child = child
        self._empty = empty
        self._lease = checks.micros(options.lease)
        self._account = ClaimCounts()
        self.intake = self._new_intake()
        self._runs: dict[str, HandlerRun] = {}
        self._strays: set[HandlerRun] = set()
        """Runs that lost their job and have not ended when it is back here: the slot is theirs, the id is
        not."""
        self._outbox = SettleSender(engine, self._account, self._call, self._answered, self._failed)
        self._blocked_by_settles = False
        """Handlers could start, but too many have ended and are not settled."""
        self._held_up = False
        """The same, at some time since `_watch`."""
        self._gathered = 0
        """Outcomes that were not handed over at the last turn of the loop."""
        self._watching: asyncio.TimerHandle | None = None
        self._flushing = self._stopping = self._paused = False
        self._paused_lanes: Collection[str] = ()
        self._ruin: TowpathError | None = None

    @property
    def patience(self) -> float:
        """Seconds after `stop()` by which `run` has returned, unless a handler blocks the event loop."""
        return self._options.grace + 3 * CLEANUP

    async def run(self) -> None:
        """Work until `stop()`, then drain. Raises the error if the ledger is gone for good."""
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._settled = asyncio.Event()
        self._stop = asyncio.Event()
        self._threads = ThreadPool(self._options.concurrency, self._loop)
        self._processes = ProcessPool(self._child) if self._child is not None else None
        pulse = LoopMonitor(self._loop, self._blocked)
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_INTERVAL))
        self._stand_in_line()
        self._publish(WorkerStarted(self._engine.owner, self._options.queues, self._options.concurrency))
        try:
            await self._stop.wait()
            await self._drain()
            self._flush()
            await wait_until(self._settled, lambda: not self._outbox.unsettled, CLEANUP)
        finally:
            self._stopping = True
            if self._watching is not None:
                self._watching.cancel()
            self.intake.close()
            self._give_back(self.intake)
            self._let_go()
            self._flush()
            self._threads.close()
            if self._processes is not None:
                self._processes.close()
            pulse.close()
            self._publish(WorkerStopped(self._engine.owner))
            sys.setswitchinterval(before)
        if self._ruin is not None:
            raise self._ruin

    @property
    def running(self) -> list[HandlerRun]:
        """What runs here now; from any thread."""
        return [*self._runs.values(), *self._strays]

    @property
    def held(self) -> HeldClaims:
        """What this worker holds now; from any thread. In the ledger the sum is at most the slots and what may be claimed ahead of them.
        Here the settles of a batch count until they are answered, a moment after the claims of the same batch. `ended` is at most
        `prefetch.max_unsettled`."""
        running, ended = len(self._runs) + len(self._strays), self._outbox.ended
        return HeldClaims(
            max(0, self._account.taken - self._account.settled - running - ended), running, ended
        )

    def _publish(self, event: Event) -> None:
        if self._engine.bus.wants(type(event)):
            self._engine.bus.publish(event)

    def stop(self) -> None:
        """From any thread: take no more, let what runs finish for the time of grace. `run` returns when that
        is over."""
        self._call(self._stop.set)

    def pause(self, paused: bool) -> None:
        """On the loop, or before `run`: start nothing new and give back what has not started; or go on."""
        if paused != self._paused:
            self._paused = paused
            self._stand_in_line()

    def pause_lanes(self, names: Collection[str]) -> None:
        """On the loop, or before `run`: the same for these lanes, and no others."""
        self._paused_lanes = names
        self.intake.pause(names)
        if hasattr(self, "_loop"):
            self._fill()
            self._flush_soon()

    def change(self, options: WorkerOptions) -> None:
        """On the loop: work like this from now on. What runs here goes on; what was claimed and not started
        goes back."""
        self.intake.close()
        self._give_back(self.intake)
        self._options, self._lease = options, checks.micros(options.lease)
        self._threads.resize(options.concurrency)
        before, self.intake = self.intake, self._new_intake()
        self.intake.adopt([run.claim for run in self.running], before)
        self.intake.pause(self._paused_lanes)
        self._stand_in_line()
        self._leave_if_stuck()

    def _new_intake(self) -> ClaimBuffer:
        def deliver(claims: list[Claim]) -> None:
            self._arrived(intake, claims)

        kind = LaneBuffer if self._options.lanes or self._options.resources else PlainBuffer
        intake: ClaimBuffer = kind(
            self._engine, self._options, self._lease, deliver, self._failed, self._empty, self._account
        )
        return intake

    def _stand_in_line(self) -> None:
        self.intake.close()
        if self._paused:
            self._give_back(self.intake)
        elif not self._stopping and hasattr(self, "_loop"):
            self.intake.open()
            self.intake.ask(self._free(), kick=False)
            self._engine.committer.kick()

    # Claims arrive

    def _arrived(self, intake: ClaimBuffer, claims: list[Claim]) -> None:
        """In the committing thread."""
        self._account.taken += len(claims)
        try:
            self._loop.call_soon_threadsafe(self._accept, intake, claims)
        except RuntimeError:
            for claim in claims:
                self._outbox.add(Settle(claim.id, claim.fence, Release()), claim.job)
            self._outbox.send()

    def _accept(self, intake: ClaimBuffer, claims: list[Claim]) -> None:
        if self._engine.bus.wants(JobsClaimed):
            self._engine.bus.publish(JobsClaimed(tuple([claim.job for claim in claims])))
        self._engine.leases.hold(claims, self._lease, self._lost, self._asked_to_stop)
        intake.add(claims, self._engine.committer.batch_seconds)
        if self._stopping or self._paused or intake is not self.intake:
            self._give_back(intake)
        self._fill()
        self._flush_soon()

    def _fill(self) -> None:
        """Start what there are slots for, while not too many have ended that are not settled."""
        intake = self.intake
        if intake.counts:
            for each, outcome in intake.surplus():
                self._end(each, Settle(each.id, each.fence, outcome))
        free = self._startable()
        while free > 0 and (claim := intake.next()) is not None:
            attempt = self._make(claim)
            if attempt is None:
                self._end(
                    claim,
                    Settle(claim.id, claim.fence, Refuse(error=f"no task here is called {claim.job.kind!r}")),
                )
                intake.ended(claim, False, None)
            elif isinstance(attempt, Settle):
                self._end(claim, attempt)
                intake.ended(claim, False, None)
            else:
                self._begin(HandlerRun(claim, attempt))
                free -= 1

    def _startable(self) -> int:
        """How many handlers may start now."""
        free, most = self._free(), max_unsettled(self._options.concurrency) - len(self.running)
        self._blocked_by_settles = False
        if most - self._outbox.ended < free:
            # In this order: an answer that comes now is either counted or finds the flag.
            self._blocked_by_settles = self._held_up = True
        return min(free, most - self._outbox.ended)

    def _begin(self, run: HandlerRun) -> None:
        job, attempt = run.claim.job, run.attempt
        if job.id in self._runs:
            # The ledger gave us the job again, so the claim of the one that still runs is lost.
            self._strays.add(self._runs[job.id])
            self._on_lost(job.id)
        self._runs[job.id] = run
        if self._engine.bus.wants(JobStarted):
            # Not `started_at`: a claim may have lain in the buffer since.
            waited = max(0, self._engine.clock.now() - job.ready_at) / SECOND
            self._engine.bus.publish(JobStarted(job.id, job.kind, job.queue, job.attempts, waited))
        if attempt.mode == "loop":
            # Not by the loop's own method, which costs half as much again; a task factory is nothing a
            # handler needs.
            run.task = asyncio.Task(self._run_here(run), loop=self._loop, name=job.kind)
        else:
            work = attempt.run if attempt.mode == "thread" else partial(run_in_process, run, self._processes)
            self._threads.submit(work, lambda settle, error: self._ended(run, settle, error))
        if attempt.timeout is not None:
            run.timer = self._loop.call_later(attempt.timeout, self._too_late, run)

    async def _run_here(self, run: HandlerRun) -> None:
        try:
            self._finish(run, await run.attempt.arun())
        except asyncio.CancelledError:
            self._finish(run, self._interrupted(run))
        except Exception as error:
            # A defect of ours; without an end the job would keep its slot and its lease for ever.
            self._finish(run, run.attempt.ended(error))

    def _ended(self, run: HandlerRun, settle: Settle | None, error: BaseException | None) -> None:
        if settle is not None:
            self._finish(run, settle)
        elif isinstance(error, ProcessDied) and (run.late or run.asked or self._stopping):
            self._finish(run, self._interrupted(run))
        else:
            self._finish(
                run, run.attempt.ended(error or RuntimeError("the handler did not say how it ended"))
            )

    def _interrupted(self, run: HandlerRun) -> Settle:
        """The handler was cancelled, or its process killed: by this worker, or by itself."""
        if run.asked or run.late or self._stopping:
            return run.attempt.stopped()
        return run.attempt.ended(asyncio.CancelledError("the handler was cancelled from inside"))

    # Outcomes leave

    def _finish(self, run: HandlerRun, settle: Settle) -> None:
        if run.over:
            return
        run.over = True
        if run.timer is not None:
            run.timer.cancel()
        if self._runs.get(settle.id) is run:
            del self._runs[settle.id]
        else:
            self._strays.discard(run)
        if self.intake.counts or run.claim.job.losses >= SUSPECT:
            self.intake.ended(run.claim, type(settle.outcome) is Done, run.attempt)
        if type(settle.outcome) is Release:
            log.info(
                "job %s (%s): stopped before it was finished, and given back", settle.id, run.claim.job.kind
            )
        self._outbox.add(settle, run.claim.job, time.monotonic() - run.started, run.attempt)
        if not self._flushing:
            self._flush_soon()
        if self._stopping and self._drained_now():
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
        """Once per turn of the loop: all outcomes, the demand that they leave room for, and what can start in
        their place."""
        self._flushing = False
        sending = len(self._outbox.waiting) > 0
        if self._held_up and self._gathers():
            self._fill()
            self._flush_soon()
            return
        self._gathered = 0
        if sending:
            self.intake.paces.measure(self._outbox.waiting)
        if not (self._stopping or self._paused):
            self.intake.ask(self._free(), kick=not sending)
        if sending:
            self._outbox.send()
        self._fill()
        if self._watching is None and self.intake:
            self._watch()

    def _gathers(self) -> bool:
        """Where handlers wait for settles, a commit of few settles holds up all others. So the outcomes of
        handlers that end at once are handed over together: while every turn of the loop brings some, and
        there is more to start. Not where the ledger is on a server, which commits while handlers run here."""
        before, self._gathered = self._gathered, len(self._outbox.waiting)
        if not self.intake:
            self._held_up = False
        if self._stopping or self._engine.ledger.capabilities.remote:
            return False
        return self._held_up and self._gathered > before and self._startable() > 0

    def _answered(self, seconds: float) -> None:
        """In the committing thread: settles were answered."""
        self.intake.paces.committed(seconds)
        if self._stopping and not self._outbox.unsettled:
            self._call(self._settled.set)
        if self._blocked_by_settles:
            self._blocked_by_settles = False
            self._call(self._fill)

    def _watch(self) -> None:
        """See after a while whether what is at hand could start."""
        self._held_up = False
        self.intake.paces.watch()
        due = self._loop.time() + self.intake.paces.max_wait
        self._watching = self._loop.call_at(due, self._give_back_late, self.intake, due)

    def _give_back_late(self, intake: ClaimBuffer, due: float) -> None:
        """Claims that wait too long for a slot go back, for a worker that has one free. Not where the event
        loop itself was late, or where the settles are what everything waits for: that says nothing about the
        handlers."""
        self._watching = None
        late = self._loop.time() - due > 0.5 * intake.paces.max_wait
        if intake is self.intake and not late and not self._held_up:
            for claim in intake.late():
                self._end(claim, Settle(claim.id, claim.fence, Release()))
        if self.intake:
            self._watch()

    def _failed(self, error: TowpathError) -> None:
        """In the committing thread: a batch failed. If the ledger will not come back, nothing that runs here
        counts any more."""
        if error.fatal:
            self._call(self._leave, error)

    def _leave(self, error: TowpathError) -> None:
        if self._ruin is None:
            log.critical(
                "%s",
                error
                if isinstance(error, WorkerStuck)
                else f"the worker ends, the ledger is lost to it: {error}",
            )
            self._ruin = error
            for event in (self._stop, self._drained, self._settled):
                event.set()

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
            if (waiting := self.intake.find(id)) is not None:
                self._end(waiting, Settle(waiting.id, waiting.fence, Release()))
            return
        run.asked = reason
        self._interrupt(run, reason)

    def _too_late(self, run: HandlerRun) -> None:
        if not run.over:
            run.late = True
            self._interrupt(run, Reason.EXPIRED)
            if run.attempt.mode == "thread":
                log.warning("job %s: its handler in a thread ran too long and was told to stop", run.claim.id)
            self._loop.call_later(self._options.grace, self._give_up, run)

    def _give_up(self, run: HandlerRun) -> None:
        """A thread cannot be stopped, and a coroutine may refuse. It keeps its slot; its lease runs out."""
        if not run.over:
            log.error(
                "job %s: its handler does not stop; its slot is lost until it does, the job goes to another",
                run.claim.id,
            )
            self._engine.leases.drop(run.claim.id, run.claim.fence)
            run.stuck = True
            self._leave_if_stuck()

    def _leave_if_stuck(self) -> None:
        """A worker without a slot that could become free does nothing but hold its jobs: a new process is
        needed."""
        slots = self._options.concurrency
        if not self._stopping and sum(run.stuck for run in self.running) >= slots:
            self._leave(WorkerStuck(slots=slots, grace=self._options.grace))

    def _interrupt(self, run: HandlerRun, reason: Reason) -> None:
        run.attempt.stop(reason)
        if run.task is not None:
            run.task.cancel()
            if inspect.getcoroutinestate(run.task.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
                # Cancelled before its first step: `_run_here` will not be entered.
                self._finish(run, run.attempt.stopped())
        elif run.attempt.mode == "process" and self._processes is not None:
            self._processes.kill((run.claim.id, run.claim.fence))

    def _blocked(self, seen: BlockedLoop) -> None:
        """From the pulse's thread."""
        runs = self.running
        seen.report(self._engine.bus, [(run.task, run.claim.job) for run in runs if run.task is not None])
        if seen.seconds >= 60:
            self._engine.leases.drop_all([(run.claim.id, run.claim.fence) for run in runs])

    # The end

    async def _drain(self) -> None:
        self._stopping = True
        self._publish(WorkerDraining(self._engine.owner, len(self.running), self._options.grace))
        self.intake.close()
        self._give_back(self.intake)
        await wait_until(self._drained, self._drained_now, 0.0 if self._ruin else self._options.grace)
        for run in self.running:
            self._interrupt(run, Reason.RELEASED)
        await wait_until(self._drained, self._drained_now, CLEANUP)
        for run in self.running:
            log.warning("job %s: its handler does not stop; it is given back", run.claim.id)
        self._let_go()

    def _drained_now(self) -> bool:
        """Is there nothing left to wait for? Handlers that do not stop are not waited for."""
        return all(run.stuck for run in self.running)

    def _let_go(self) -> None:
        """What still runs goes back to the ledger; whatever its handler says from now on is not heard."""
        for run in self.running:
            self._interrupt(run, Reason.RELEASED)
            self._finish(run, run.attempt.stopped())

    def _free(self) -> int:
        return self._options.concurrency - len(self._runs) - len(self._strays)

    def _give_back(self, intake: ClaimBuffer) -> None:
        """Claims that were not started cost nothing."""
        for claim in intake.clear():
            self._end(claim, Settle(claim.id, claim.fence, Release()))
