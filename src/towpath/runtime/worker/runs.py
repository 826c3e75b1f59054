"""Running handlers: where they run, their timeouts, and how they are stopped."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from towpath.core.commands import Settle
from towpath.core.job import ClaimedJob, Reason
from towpath.escapes import get_logger
from towpath.runtime.worker.executors import ProcessDied, ProcessPool, ThreadPool
from towpath.runtime.worker.options import RunnableAttempt

log = get_logger("towpath.worker")


class TimedOut(Exception):
    """The handler ran longer than its task allows."""


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
        """The ledger has given out the job of this run again."""
        del self._by_id[run.claim.id]
        self._lost.add(run)

    def start(self, run: HandlerRun) -> None:
        job, attempt = run.claim.job, run.attempt
        self._by_id[job.id] = run
        if attempt.mode == "loop":
            # `loop.create_task` costs half as much again, and handlers need no task factory.
            run.task = asyncio.Task(self._run_on_loop(run), loop=self._loop, name=job.kind)
        else:
            work = attempt.run if attempt.mode == "thread" else partial(_run_in_process, run, self._processes)
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
        else:
            self.finish(run, run.attempt.ended(error or RuntimeError("the handler returned no outcome")))

    def _interrupted(self, run: HandlerRun) -> Settle:
        """The settle of a handler that was cancelled, or whose process was killed."""
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
