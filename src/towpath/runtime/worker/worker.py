"""The worker: claims jobs for its slots, runs their handlers, and settles them.

All of it runs on one event loop. Claims arrive in batches from the committing thread. Outcomes are posted
once per iteration of the loop, together with the demand for new claims, so that settles and claims share a
commit."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import Settle
from towpath.core.job import SUSPECT, ClaimedJob, Done, Reason, Release
from towpath.core.lifecycle import interrupts
from towpath.core.retry import unknown_kind
from towpath.errors import TowpathError, WorkerStuck
from towpath.escapes import get_logger
from towpath.events import Event, JobsClaimed, JobStarted, WorkerDraining, WorkerStarted, WorkerStopped
from towpath.runtime.engine import Engine
from towpath.runtime.worker.buffer import ClaimBuffer, PlainBuffer
from towpath.runtime.worker.lanes import LaneBuffer
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, max_unsettled
from towpath.runtime.worker.runs import BlockedLoop, HandlerRun, HandlerRuns, LoopMonitor
from towpath.runtime.worker.settling import OnEnd, SettleSender

log = get_logger("towpath.worker")

SWITCH_INTERVAL = 0.0005
"""Seconds. Beside busy handlers, the committing thread must get the interpreter back soon."""
CLEANUP = 5.0
"""Seconds that cancelled handlers get to clean up."""
MAX_BLOCKED = 60.0
"""Seconds of a blocked event loop after which the leases of the running jobs are not renewed."""


class HeldClaims(NamedTuple):
    """The claims of a worker: not started (or released without a reply), running, and ended without a
    committed settle."""

    claimed: int
    running: int
    ended: int


class Worker:
    """`make` turns a claim into an attempt, or into the settle that returns the job; None if its kind is
    unknown. `ended_badly` is called in the committing thread for each stored outcome that is not a success,
    with the exception of the handler. One run per object."""

    def __init__(
        self,
        engine: Engine,
        make: Callable[[ClaimedJob], RunnableAttempt | Settle | None],
        options: WorkerOptions,
        child: Callable[[Any], None] | None = None,
        empty: Callable[[], None] | None = None,
        ended_badly: OnEnd | None = None,
    ) -> None:
        self._engine = engine
        self._make = make
        self._options = options
        self._on_empty = empty
        self._lease = checks.micros(options.lease)
        self._counts = ClaimCounts()
        self.buffer = self._new_buffer()
        self._runs = HandlerRuns(self._finished, self._stuck, child)
        self._settles = SettleSender(
            engine, self._counts, self._call, self._committed, self._batch_failed, self._runs.__len__
        )
        self._log = self._settles.log
        self._settles.ended_badly = ended_badly
        self._blocked_by_settles = False
        """Handlers could start, but too many have ended and are not settled."""
        self._settles_delayed = False
        """`_blocked_by_settles` was set at some time since the last `_check_starts_later`."""
        self._gathered = 0
        """Outcomes that were kept back in the last iteration of the loop."""
        self._start_check: asyncio.TimerHandle | None = None
        self._started = self._flushing = self._stopping = self._paused = False
        self._paused_lanes: Collection[str] = ()
        self._fatal: TowpathError | None = None

    def leave(self, kinds: Callable[[], tuple[str, ...]]) -> None:
        """Before `run`: leave jobs of the kinds that this function returns to other workers. It is called
        before every claim, under the commit lock."""
        self._counts.without = kinds

    @property
    def stop_seconds(self) -> float:
        """Seconds after `stop()` by which `run` has returned, unless a handler blocks the event loop."""
        return self._options.grace + 3 * CLEANUP

    async def run(self) -> None:
        """Work until `stop()`, then drain. Raises the error if the ledger is lost."""
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._settled = asyncio.Event()
        self._stop = asyncio.Event()
        self._started = True
        self._runs.grace = self._options.grace
        self._runs.open(self._options.concurrency)
        monitor = LoopMonitor(self._loop, self._loop_blocked, MAX_BLOCKED)
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_INTERVAL))
        self._log.open(self._loop)
        self._restart_claiming()
        self._publish(WorkerStarted(self._engine.owner, self._options.queues, self._options.concurrency))
        try:
            await self._stop.wait()
            await self._drain()
            self._flush()
            await _wait_until(self._settled, lambda: not self._settles.unsettled, CLEANUP)
        finally:
            self._stopping = self._runs.stopping = True
            if self._start_check is not None:
                self._start_check.cancel()
            self.buffer.close()
            self._release_buffered(self.buffer)
            self._runs.abandon()
            self._flush()
            self._runs.close()
            monitor.close()
            self._log.close()
            self._publish(WorkerStopped(self._engine.owner))
            sys.setswitchinterval(before)
        if self._fatal is not None:
            raise self._fatal

    @property
    def running(self) -> list[HandlerRun]:
        """The handlers that run now; from any thread."""
        return self._runs.running

    @property
    def held(self) -> HeldClaims:
        """The claims that this worker holds now; from any thread. In the ledger their number is at most the
        slots and the prefetch. Here the settles of a batch count until they are answered, a moment after the
        claims of the same batch. `ended` is at most `prefetch.max_unsettled`."""
        running, ended = len(self._runs), self._settles.ended
        return HeldClaims(max(0, self._counts.taken - self._counts.settled - running - ended), running, ended)

    def _publish(self, event: Event) -> None:
        if self._engine.bus.wants(type(event)):
            self._engine.bus.publish(event)

    def stop(self) -> None:
        """From any thread: claim no more, and let running handlers finish within the grace time. Then `run`
        returns."""
        self._call(self._stop.set)

    def pause(self, paused: bool) -> None:
        """On the loop, or before `run`: start nothing and release the buffered claims; or resume."""
        if paused != self._paused:
            self._paused = paused
            self._restart_claiming()

    def pause_lanes(self, names: Collection[str]) -> None:
        """On the loop, or before `run`: the same for exactly these lanes."""
        self._paused_lanes = names
        self.buffer.pause(names)
        if self._started:
            self._fill()
            self._flush_soon()

    def change(self, options: WorkerOptions) -> None:
        """On the loop: use other options from now on. Running handlers go on; buffered claims are
        released."""
        self.buffer.close()
        self._release_buffered(self.buffer)
        self._options, self._lease = options, checks.micros(options.lease)
        self._runs.grace = options.grace
        self._runs.resize(options.concurrency)
        before, self.buffer = self.buffer, self._new_buffer()
        self.buffer.adopt([run.claim for run in self.running], before)
        self.buffer.pause(self._paused_lanes)
        self._restart_claiming()
        self._fail_if_stuck()

    def _new_buffer(self) -> ClaimBuffer:
        def deliver(claims: list[ClaimedJob]) -> None:
            self._arrived(buffer, claims)

        kind = LaneBuffer if self._options.lanes or self._options.resources else PlainBuffer
        buffer: ClaimBuffer = kind(
            self._engine,
            self._options,
            self._lease,
            deliver,
            self._batch_failed,
            self._on_empty,
            self._counts,
        )
        return buffer

    def _restart_claiming(self) -> None:
        self.buffer.close()
        if self._paused:
            self._release_buffered(self.buffer)
        elif not self._stopping and self._started:
            self.buffer.open()
            self.buffer.ask(self._free(), kick=False)
            self._engine.committer.kick()

    # Claims arrive

    def _arrived(self, buffer: ClaimBuffer, claims: list[ClaimedJob]) -> None:
        """In the committing thread."""
        self._counts.taken += len(claims)
        try:
            self._loop.call_soon_threadsafe(self._accept, buffer, claims, context=self._runs.context)
        except RuntimeError:
            # The loop is closed.
            for claim in claims:
                self._settles.add(Settle(claim.id, claim.fence, Release()), claim.job)
            self._settles.send()

    def _accept(self, buffer: ClaimBuffer, claims: list[ClaimedJob]) -> None:
        if self._engine.bus.wants(JobsClaimed):
            ids = tuple([claim.id for claim in claims])
            queues = tuple(sorted({claim.job.queue for claim in claims}))
            self._engine.bus.publish(JobsClaimed(ids, queues, self._engine.owner))
        self._engine.leases.hold(claims, self._lease, self._lost, self._stop_requested)
        buffer.add(claims, self._engine.committer.batch_seconds)
        if self._stopping or self._paused or buffer is not self.buffer:
            self._release_buffered(buffer)
        self._fill()
        self._flush_soon()

    def _fill(self) -> None:
        """Start buffered claims in the free slots, unless too many handlers have ended and are not
        settled."""
        buffer = self.buffer
        if buffer.tracks_ends:
            for each, outcome in buffer.surplus():
                self._settle_unstarted(each, Settle(each.id, each.fence, outcome))
        free = self._startable()
        while free > 0 and (claim := buffer.next()) is not None:
            attempt = self._make(claim)
            if attempt is None:
                refusal = unknown_kind(claim.job.kind, claim.job.error, self._engine.clock.now())
                attempt = Settle(claim.id, claim.fence, refusal)
            if isinstance(attempt, Settle):
                self._settle_unstarted(claim, attempt)
                buffer.ended(claim, False, None)
            else:
                self._start(HandlerRun(claim, attempt))
                free -= 1

    def _startable(self) -> int:
        """How many handlers may start now."""
        free, most = self._free(), max_unsettled(self._options.concurrency) - len(self._runs)
        self._blocked_by_settles = False
        if most - self._settles.ended < free:
            # In this order: a concurrent reply is either counted below or finds the flag set.
            self._blocked_by_settles = self._settles_delayed = True
        return min(free, most - self._settles.ended)

    def _start(self, run: HandlerRun) -> None:
        job = run.claim.job
        if (older := self._runs.get(job.id)) is not None:
            # The ledger has given out the job again, so the claim of the older run is lost.
            self._runs.displace(older)
            self._interrupt_lost(older)
        if self._engine.bus.wants(JobStarted):
            # Not `started_at`, the time of the claim: the claim may have been buffered since.
            waited = max(0, self._engine.clock.now() - job.ready_at) / SECOND
            self._engine.bus.publish(JobStarted(job.id, job.kind, job.queue, job.attempts, waited))
        if self._log.lines:
            self._log.started(job)
        self._runs.start(run)

    # Outcomes leave

    def _finished(self, run: HandlerRun, settle: Settle) -> None:
        if self.buffer.tracks_ends or run.claim.job.losses >= SUSPECT:
            self.buffer.ended(run.claim, type(settle.outcome) is Done, run.attempt)
        if type(settle.outcome) is Release:
            log.info("job %s: stopped before its end and released; it will run again", run)
        self._settles.add(settle, run.claim.job, time.monotonic() - run.started, run.attempt)
        if not self._flushing:
            self._flush_soon()
        if self._stopping and self._is_drained():
            self._drained.set()

    def _settle_unstarted(self, claim: ClaimedJob, settle: Settle) -> None:
        """Settle a claim without a call of the handler."""
        self._settles.add(settle, claim.job)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Once per iteration of the loop: post all outcomes and the demand for the slots that they free, and
        start buffered claims in these slots."""
        self._flushing = False
        sending = len(self._settles.waiting) > 0
        if self._settles_delayed and self._should_gather():
            self._fill()
            self._flush_soon()
            return
        self._gathered = 0
        if sending:
            self.buffer.prefetch.measure(self._settles.waiting)
        if not (self._stopping or self._paused):
            self.buffer.ask(self._free(), kick=not sending)
        if sending:
            self._settles.send()
        self._fill()
        if self._start_check is None and self.buffer:
            self._check_starts_later()

    def _should_gather(self) -> bool:
        """If handlers wait for settles, a commit of few settles delays all others. So outcomes are kept back
        and posted together as long as every iteration of the loop adds some and there is more to start. Not
        for a ledger on a server, which commits while handlers run here."""
        before, self._gathered = self._gathered, len(self._settles.waiting)
        if not self.buffer:
            self._settles_delayed = False
        if self._stopping or self._engine.ledger.capabilities.remote:
            return False
        return self._settles_delayed and self._gathered > before and self._startable() > 0

    def _committed(self, seconds: float) -> None:
        """In the committing thread: settles were answered."""
        self.buffer.prefetch.committed(seconds)
        if self._stopping and not self._settles.unsettled:
            self._call(self._settled.set)
        if self._blocked_by_settles:
            self._blocked_by_settles = False
            self._call(self._fill)

    def _check_starts_later(self) -> None:
        """Check after `max_wait` whether the buffered claims could start."""
        self._settles_delayed = False
        self.buffer.prefetch.watch()
        due = self._loop.time() + self.buffer.prefetch.max_wait
        self._start_check = self._loop.call_at(due, self._release_late, self.buffer, due)

    def _release_late(self, buffer: ClaimBuffer, due: float) -> None:
        """Release claims that wait too long for a slot, for a worker with a free one. Not if the event loop
        was late, or if settles delayed the handlers: then the wait does not measure the handlers."""
        self._start_check = None
        late = self._loop.time() - due > 0.5 * buffer.prefetch.max_wait
        if buffer is self.buffer and not late and not self._settles_delayed:
            for claim in buffer.late():
                self._settle_unstarted(claim, Settle(claim.id, claim.fence, Release()))
        if self.buffer:
            self._check_starts_later()

    def _batch_failed(self, error: TowpathError) -> None:
        """In the committing thread. After a fatal error no settle of this worker can be committed."""
        if error.fatal:
            self._call(self._fail, error)

    def _fail(self, error: TowpathError) -> None:
        """Stop the worker; `run` raises the error."""
        if self._fatal is None:
            stuck = isinstance(error, WorkerStuck)
            log.critical("%s", error if stuck else f"the worker stops because the ledger is lost: {error}")
            self._fatal = error
            for event in (self._stop, self._drained, self._settled):
                event.set()

    # Events of a running job. `_lost` and `_stop_requested` are called in the committing thread.

    def _lost(self, id: str) -> None:
        self._call(self._on_lost, id)

    def _stop_requested(self, id: str, reason: Reason) -> None:
        self._call(self._on_stop_request, id, reason)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop, from any thread. Does nothing after the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args, context=self._runs.context)

    def _on_lost(self, id: str) -> None:
        if (run := self._runs.get(id)) is not None:
            self._interrupt_lost(run)
        else:
            self._on_stop_request(id, Reason.LOST)

    def _interrupt_lost(self, run: HandlerRun) -> None:
        self._settles.lost(run.claim.job)
        log.warning("job %s: its lease was lost while it ran; its handler is stopped", run)
        run.stop_reason = Reason.LOST
        self._runs.interrupt(run, Reason.LOST)

    def _on_stop_request(self, id: str, reason: Reason) -> None:
        if (run := self._runs.get(id)) is not None:
            if interrupts(reason):
                run.stop_reason = reason
                self._runs.interrupt(run, reason)
        elif (waiting := self.buffer.find(id)) is not None:
            self._settle_unstarted(waiting, Settle(waiting.id, waiting.fence, Release()))

    def _stuck(self, run: HandlerRun) -> None:
        """A thread cannot be stopped, and a coroutine may refuse to. The run keeps its slot; its lease
        expires."""
        self._engine.leases.drop(run.claim.id, run.claim.fence)
        self._fail_if_stuck()

    def _fail_if_stuck(self) -> None:
        """If every slot is stuck, the worker only holds its jobs: a new process is needed."""
        slots = self._options.concurrency
        if not self._stopping and sum(run.stuck for run in self.running) >= slots:
            self._fail(WorkerStuck(slots=slots, grace=self._options.grace))

    def _loop_blocked(self, blocked: BlockedLoop) -> None:
        """In the monitor's thread."""
        runs = self.running
        blocked.report(self._engine.bus, [(run.task, run.claim.job) for run in runs if run.task is not None])
        if blocked.seconds >= MAX_BLOCKED:
            self._engine.leases.drop_all([(run.claim.id, run.claim.fence) for run in runs])

    # The end

    async def _drain(self) -> None:
        self._stopping = self._runs.stopping = True
        self._publish(WorkerDraining(self._engine.owner, len(self._runs), self._options.grace))
        self.buffer.close()
        self._release_buffered(self.buffer)
        await _wait_until(self._drained, self._is_drained, 0.0 if self._fatal else self._options.grace)
        for run in self.running:
            self._runs.interrupt(run, Reason.RELEASED)
        await _wait_until(self._drained, self._is_drained, CLEANUP)
        for run in self.running:
            log.warning("job %s: its handler does not stop; the job is released and will run again", run)
        self._runs.abandon()

    def _is_drained(self) -> bool:
        """Stuck handlers are not waited for."""
        return all(run.stuck for run in self.running)

    def _free(self) -> int:
        return self._options.concurrency - len(self._runs)

    def _release_buffered(self, buffer: ClaimBuffer) -> None:
        """Release the claims that have not started; this costs no attempt."""
        for claim in buffer.clear():
            self._settle_unstarted(claim, Settle(claim.id, claim.fence, Release()))


async def _wait_until(event: asyncio.Event, condition: Callable[[], bool], seconds: float) -> None:
    """Wait for the event, at most so many seconds, unless the condition holds already."""
    event.clear()
    if not condition():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
