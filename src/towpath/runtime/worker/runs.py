"""Running handlers: where they run, their timeouts, how they are stopped, and the monitor of the event loop
that they share."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from towpath.core.commands import Settle
from towpath.core.job import ClaimedJob, Job, Reason
from towpath.errors import ProcessDied
from towpath.escapes import get_logger
from towpath.events import Bus, HandlerBlocked
from towpath.runtime.worker.executors import ProcessPool, ThreadPool
from towpath.runtime.worker.options import RunnableAttempt

log = get_logger("towpath.worker")

TICK = 0.5
BLOCKED = 1.0
"""Seconds by which a tick is late when the loop is reported as blocked."""
FRAMES = 12
"""Stack frames in the report."""
MAX_NAMED = 20
"""Jobs named in the report if the blocking one is unknown."""


class HandlerRun:
    """A handler that runs, or that has been asked to stop and has not returned."""

    __slots__ = ("attempt", "claim", "late", "over", "started", "stop_reason", "stuck", "task", "timer")

    def __init__(self, claim: ClaimedJob, attempt: RunnableAttempt) -> None:
        self.claim = claim
        self.attempt = attempt
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = time.monotonic()
        self.stop_reason: Reason | None = None
        self.late = False
        """Its timeout has passed."""
        self.over = False
        self.stuck = False
        """It did not stop within the grace time after its timeout."""

    def __str__(self) -> str:
        return f"{self.claim.id} ({self.claim.job.kind})"


class HandlerRuns:
    """The runs of one worker. Belongs to the worker's loop; `running` and `len` may be called from any
    thread.

    `finished` is called once for each run, with its settle. `stuck` is called when a run has not stopped
    `grace` seconds after its timeout."""

    def __init__(
        self,
        finished: Callable[[HandlerRun, Settle], None],
        stuck: Callable[[HandlerRun], None],
        child: Callable[[Any], None] | None,
    ) -> None:
        self._finished, self._stuck, self._child = finished, stuck, child
        self._by_id: dict[str, HandlerRun] = {}
        self._lost: set[HandlerRun] = set()
        """Runs that lost their job before the worker claimed it again: they have a slot, but the id belongs
        to the new run."""
        self.grace = 0.0
        self.stopping = False
        """The worker drains: an interrupted handler releases its job."""

    def open(self, slots: int) -> None:
        """On the loop."""
        self._loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        """The context of the worker. Each handler runs in a copy: a job that starts when another one ends, or
        when the thread of a handler commits, must not have the context variables of that handler."""
        self._threads = ThreadPool(slots, self._loop)
        self._processes = ProcessPool(self._child) if self._child is not None else None

    def resize(self, slots: int) -> None:
        self._threads.resize(slots)

    def close(self) -> None:
        self._threads.close()
        if self._processes is not None:
            self._processes.close()

    def __len__(self) -> int:
        return len(self._by_id) + len(self._lost)

    @property
    def running(self) -> list[HandlerRun]:
        return [*self._by_id.values(), *self._lost]

    def get(self, id: str) -> HandlerRun | None:
        return self._by_id.get(id)

    def displace(self, run: HandlerRun) -> None:
        """Another claim of the same job has arrived: the lease of this run is lost."""
        del self._by_id[run.claim.id]
        self._lost.add(run)

    def start(self, run: HandlerRun) -> None:
        job, attempt = run.claim.job, run.attempt
        self._by_id[job.id] = run
        if attempt.mode == "loop":
            # `loop.create_task` costs half as much again, and handlers need no task factory.
            run.task = asyncio.Task(
                self._run_on_loop(run), loop=self._loop, name=job.kind, context=self.context.copy()
            )
        else:
            work = attempt.run if attempt.mode == "thread" else partial(_run_in_process, run, self._processes)
            work = partial(self.context.copy().run, work)
            self._threads.submit(work, lambda settle, error: self._returned(run, settle, error))
        if attempt.timeout is not None:
            run.timer = self._loop.call_later(attempt.timeout, self._timed_out, run)

    def interrupt(self, run: HandlerRun, reason: Reason) -> None:
        """Ask the handler to stop; cancel its task or kill its process."""
        run.attempt.stop(reason)
        if run.task is not None:
            run.task.cancel()
            if inspect.getcoroutinestate(run.task.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
                # Cancelled before its first step: `_run_on_loop` will not be entered.
                self.finish(run, run.attempt.stopped())
        elif run.attempt.mode == "process" and self._processes is not None:
            self._processes.kill((run.claim.id, run.claim.fence))

    def abandon(self) -> None:
        """Stop all runs and settle their jobs as stopped; later results of their handlers are dropped."""
        for run in self.running:
            self.interrupt(run, Reason.RELEASED)
            self.finish(run, run.attempt.stopped())

    def finish(self, run: HandlerRun, settle: Settle) -> None:
        """The first call for a run counts."""
        if run.over:
            return
        run.over = True
        if run.timer is not None:
            run.timer.cancel()
        if self._by_id.get(run.claim.id) is run:
            del self._by_id[run.claim.id]
        else:
            self._lost.discard(run)
        self._finished(run, settle)

    async def _run_on_loop(self, run: HandlerRun) -> None:
        try:
            self.finish(run, await run.attempt.arun())
        except asyncio.CancelledError:
            self.finish(run, self._interrupted(run))
        except Exception as error:
            # A defect of the engine. Without a settle the job would keep its slot and its lease for ever.
            self.finish(run, run.attempt.ended(error))

    def _returned(self, run: HandlerRun, settle: Settle | None, error: BaseException | None) -> None:
        if settle is not None:
            self.finish(run, settle)
        elif isinstance(error, ProcessDied) and (run.late or run.stop_reason or self.stopping):
            self.finish(run, self._interrupted(run))
        elif isinstance(error, ProcessDied):  # its traceback has only frames of this package
            self.finish(run, run.attempt.ended(error.with_traceback(None)))
        else:
            self.finish(run, run.attempt.ended(error or RuntimeError("the handler returned no outcome")))

    def _interrupted(self, run: HandlerRun) -> Settle:
        """The settle of a handler that was cancelled, or killed with its process."""
        if run.stop_reason or run.late or self.stopping:
            return run.attempt.stopped()
        return run.attempt.ended(asyncio.CancelledError("the handler was cancelled from inside"))

    def _timed_out(self, run: HandlerRun) -> None:
        if not run.over:
            run.late = True
            self.interrupt(run, Reason.EXPIRED)
            if run.attempt.mode == "thread":
                log.warning(
                    "job %s: its handler was asked to stop after %g s (timeout); a thread cannot be killed",
                    run,
                    run.attempt.timeout,
                )
            self._loop.call_later(self.grace, self._check_stopped, run)

    def _check_stopped(self, run: HandlerRun) -> None:
        if not run.over:
            log.error(
                "job %s: its handler has not stopped %g s after its timeout. It keeps its slot until it "
                "returns; the job runs again when its lease has expired.",
                run,
                self.grace,
            )
            run.stuck = True
            self._stuck(run)


def _run_in_process(run: HandlerRun, processes: ProcessPool | None) -> Settle:
    """Run the handler in another process; return the settle that the process sends last."""
    assert processes is not None
    settles: list[Settle] = []

    def receive(message: bytes) -> bool:
        settle = run.attempt.receive(message)
        if settle is not None:
            settles.append(settle)
        return settle is not None

    processes.run((run.claim.id, run.claim.fence), run.attempt.request(), receive)
    return settles[0]


class BlockedLoop(NamedTuple):
    """A blocked loop. `task` is its current task; `again`: it was reported before."""

    seconds: float
    task: asyncio.Task[Any] | None
    stack: Sequence[traceback.FrameSummary]
    again: bool

    def report(self, bus: Bus, running: Sequence[tuple[asyncio.Task[Any], Job]]) -> None:
        """Log it every time, publish it once. `running` are the jobs that run on the loop. The blocking job
        is found by its task; if a task that a handler started or a callback blocks, every job is possible."""
        possible = [job for task, job in running if task is self.task] or [job for _, job in running]
        innermost = self.stack[-1] if self.stack else None
        where = (
            "an unknown place"
            if innermost is None
            else f"{innermost.filename}:{innermost.lineno} in {innermost.name}"
        )
        log.warning(
            "the event loop has been blocked for %.1f s by %s at %s: use a plain `def` for blocking work\n%s",
            self.seconds,
            _named(possible),
            where,
            "".join(traceback.format_list(self.stack)),
        )
        if not self.again and bus.wants(HandlerBlocked):
            id, kind = (possible[0].id, possible[0].kind) if len(possible) == 1 else ("", "")
            bus.publish(HandlerBlocked(id, kind, self.seconds, where))


def _named(possible: Sequence[Job]) -> str:
    if not possible:
        return "code outside of any handler"
    names = ", ".join(f"{job.kind} (job {job.id})" for job in possible[:MAX_NAMED])
    more = f" and {len(possible) - MAX_NAMED} more" if len(possible) > MAX_NAMED else ""
    return names if len(possible) == 1 else f"one of {names}{more}"


def report_is_due(seconds: float, reported: float, limit: float) -> bool:
    """Is a report due after so many seconds of a blocked loop? `reported`: the seconds of the last report, 0
    before the first."""
    return seconds >= TICK + BLOCKED and (seconds >= 2 * reported or reported < limit <= seconds)


class LoopMonitor:
    """Calls `blocked` from its own thread when the loop is blocked, each time that duration has doubled, and
    after `limit` seconds."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, blocked: Callable[[BlockedLoop], None], limit: float
    ) -> None:
        self._loop = loop
        self._blocked = blocked
        self._limit = limit
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._timer = loop.call_later(TICK, self._tick)
        self._thread = threading.Thread(target=self._run, name="towpath-loop-monitor", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(TICK, self._tick)

    def _run(self) -> None:
        reported = 0.0
        while not self._closed.wait(TICK):
            seconds = time.monotonic() - self._last
            if seconds < TICK + BLOCKED:
                reported = 0.0
            elif report_is_due(seconds, reported, self._limit):
                self._blocked(
                    BlockedLoop(seconds, asyncio.current_task(self._loop), self._stack(), again=reported > 0)
                )
                reported = seconds

    def _stack(self) -> Sequence[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._thread_id)
        return [] if frame is None else traceback.extract_stack(frame, limit=FRAMES)

    def close(self) -> None:
        """On the loop."""
        self._closed.set()
        self._timer.cancel()
        self._thread.join()
