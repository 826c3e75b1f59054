"""One attempt at a job of a task: decode the arguments, run the handler, return the settle. Used by the
worker, its processes and the test bench.

A task with `process=True` runs in a spawned process: `Attempt.request` encodes the request, `serve` runs it
there, and its messages (progress on the way, the settle at the end) are passed to `Attempt.receive`. Only
JSON and MessagePack cross the pipe; no pickle."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from towpath.core.checks import SECOND
from towpath.core.commands import Note, Progress, Progressed, Settle
from towpath.core.job import ClaimedJob, Done, FailOutcome, Job, Outcome, Reason, Release, Spec, Stop
from towpath.core.retry import Chance
from towpath.errors import Forked, Refused, TimedOut, TowpathError, UserFunctionFailed
from towpath.observe import tracing
from towpath.runtime.commit.pending import Reply
from towpath.runtime.worker import executors
from towpath.runtime.worker.options import Mode
from towpath.tasks import outcomes
from towpath.tasks.active_hooks import ThreadedHooks, failing
from towpath.tasks.context import Poster, Running
from towpath.tasks.task import Registry, Task, outcome_of

if TYPE_CHECKING:  # an App without process tasks starts faster
    from multiprocessing.connection import Connection


class ProcessRequest(msgspec.Struct, frozen=True):
    """A request to a process: run this job with the task of that kind in that module."""

    module: str
    name: str
    kind: str
    job: Job
    deploy_window: int


class ProcessAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The end of an attempt in a process."""

    outcome: Outcome
    spawn: tuple[Spec, ...] = ()
    notes: tuple[Note, ...] = ()
    throttled: int | None = None


QUIET = (outcomes.Control, outcomes.StopRequested)
"""Exceptions that a handler raises on purpose; they are no errors of its span."""
_reports: msgspec.msgpack.Decoder[ProcessAnswer | Progress] = msgspec.msgpack.Decoder(
    ProcessAnswer | Progress
)
_requests = msgspec.msgpack.Decoder(ProcessRequest)


_HIDDEN = tuple(
    os.path.dirname(file) + os.sep for file in (os.path.dirname(os.path.abspath(__file__)), asyncio.__file__)
)
"""Directories of Towpath and asyncio: their frames are not shown above a line of the user."""


def hide_own_frames(error: BaseException) -> None:
    """Remove the frames of Towpath and asyncio above the last line of the user's code, in the tracebacks of
    the error and of its causes, so that the log, the stored error and the hooks show the user's lines. The
    frames below the last line stay: they show where a call of Towpath failed."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        todo += [each.__cause__, each.__context__]
        traces, trace = [], each.__traceback__
        while trace is not None:
            traces.append(trace)
            trace = trace.tb_next
        users = [not trace.tb_frame.f_code.co_filename.startswith(_HIDDEN) for trace in traces]
        if True in users:
            last = len(users) - users[::-1].index(True)
            kept = [trace for n, trace in enumerate(traces) if users[n] or n >= last]
            for upper, lower in pairwise(kept):
                upper.tb_next = lower
            each.__traceback__ = kept[0]


class Attempt:
    """`run` and `arun` never raise, except for exceptions that end the process or cancel the coroutine."""

    __slots__ = (
        "_chance",
        "_generation",
        "_report",
        "claim",
        "error",
        "mode",
        "running",
        "task",
        "throttled",
        "timeout",
    )

    def __init__(
        self,
        registry: Registry,
        claim: ClaimedJob,
        task: Task[..., Any],
        chance: Chance = random.random,
        report: Callable[[Outcome], None] | None = None,
        poster: Poster | None = None,
    ) -> None:
        self.claim = claim
        self._report = report
        self.error: BaseException | None = None
        """The exception of the handler."""
        self.throttled: int | None = None
        self._chance = chance
        self._generation = executors.generation()
        self.task = task
        span = self._span() if tracing.wanted(claim.job.headers) else None
        self.running = Running(registry, claim, task, span, poster)
        self.mode: Mode = task.mode
        self.timeout = None if claim.job.timeout is None else claim.job.timeout / SECOND

    async def arun(self) -> Settle:
        try:
            with self.running:
                args, kwargs = self.task.decode(self.claim.job)
                result = self.task.function(*args, **kwargs)
                if self.task.is_async:
                    result = await result
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._raised(error)
        return self._returned(result)

    def run(self) -> Settle:
        try:
            with self.running:
                args, kwargs = self.task.decode(self.claim.job)
                result = self.task.function(*args, **kwargs)
                if self.task.is_async:
                    result = _finished(result)
        except BaseException as error:
            return self._raised(error)
        return self._returned(result)

    def _returned(self, result: Any) -> Settle:
        if self._generation != executors.generation():
            executors.end_forked_child(self.claim.id, None)
        if self.running.stopped:
            return self.stopped()
        return self._settle(outcome_of(self.task, self.claim.job, result))

    def _raised(self, error: BaseException) -> Settle:
        if self._generation != executors.generation():
            executors.end_forked_child(self.claim.id, error)
        return (
            self.stopped()
            if isinstance(error, outcomes.StopRequested) and self.running.cancelled
            else self.ended(error)
        )

    def ended(self, error: BaseException) -> Settle:
        """The settle of an attempt that ended with this error: the handler's own, or one that names the
        reason of its stop."""
        hide_own_frames(error)
        self.error = error
        self.throttled = outcomes.throttling(error)
        return self._settle(outcome_of(self.task, self.claim.job, error=error, chance=self._chance))

    def stopped(self) -> Settle:
        """The settle of a handler that was asked to stop and ended before its work was complete. A timeout is
        a failure; a stop of the worker costs no attempt. The ledger handles a later request to cancel: a
        canceled job never waits again."""
        reason = self.running.asked
        if reason is Reason.EXPIRED:
            return self.ended(TimedOut(seconds=self.timeout or 0.0))
        if reason is None or reason is Reason.RELEASED:
            return self._settle(Release())
        return self._settle(Stop(error=str(reason)))

    def refused(self, refusal: Refused) -> Settle:
        """The settle after the ledger refused the children, notes or functions of the handler. The refusal is
        a failure of the handler: a function of `commit` that raises is treated as if the handler had raised
        the same."""
        cause = refusal.__cause__ if isinstance(refusal, UserFunctionFailed) else None
        return self.ended(cause or refusal)

    def stop(self, reason: Reason) -> None:
        """Ask the handler to stop."""
        if reason is Reason.LOST:
            self.running.lose()
        else:
            self.running.ask(reason)
        if self.mode == "loop":
            # Its coroutine is cancelled: a value returned after that is not a complete result.
            self.running.interrupt()

    def _settle(self, outcome: Outcome) -> Settle:
        """Children, notes and functions are part of a success only: another attempt produces its own."""
        if self._report is not None:
            self._report_outcome(outcome)
        extras = self.running.outcome_extras()
        job = self.claim.job
        if extras is None or type(outcome) is not Done:
            return Settle(job.id, job.fence, outcome)
        return Settle(job.id, job.fence, outcome, *extras)

    def _report_outcome(self, outcome: Outcome) -> None:
        """Report the outcome to the breaker, once. A refusal by the ledger is no failure of the called
        service, and a throttling service is not down."""
        report, self._report = self._report, None
        if report is not None and self.throttled is None:
            report(outcome)

    def _span(self) -> AbstractContextManager[None]:
        job = self.claim.job
        return tracing.span(
            job.kind, job.headers, tracing.job_attributes(job.id, job.queue, job.attempts), QUIET
        )

    # In another process

    def request(self) -> bytes:
        """The request for a process, encoded."""
        task, function = self.task, self.task.function
        window = task.registry.deploy_window
        return msgspec.msgpack.encode(
            ProcessRequest(function.__module__, function.__qualname__, task.kind, self.claim.job, window)
        )

    def receive(self, message: bytes) -> Settle | None:
        """Process a message of the process; return the settle if the message was the last."""
        report = _reports.decode(message)
        if isinstance(report, ProcessAnswer):
            return self._settle_of(report)
        if report.done is not None:
            self.running.at = report.done, report.total
        self.running.engine.committer.post_progress(report, self.running.on_reply)
        return None

    def _settle_of(self, answer: ProcessAnswer) -> Settle:
        self.throttled = answer.throttled
        self._report_outcome(answer.outcome)
        return Settle(self.claim.id, self.claim.fence, answer.outcome, answer.spawn, answer.notes)


def _finished(coroutine: Any) -> Any:
    """Run a coroutine in a thread or process without an event loop."""
    with asyncio.Runner() as runner:
        return runner.run(coroutine)


def serve(connection: Connection, setup: Callable[[], object] | None = None) -> None:
    """The main function of a process: serve requests until the pipe is closed. `setup` is called after the
    import of the first task. SIGINT is ignored: the worker receives it and ends its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="towpath-parent", daemon=True).start()
    open_hooks: OpenHooks = {}
    setups = [] if setup is None else [setup]
    while True:
        try:
            request = _requests.decode(connection.recv_bytes())
            connection.send_bytes(
                b""
            )  # accepted: from now on the end of this process is a failure of the job
        except (EOFError, OSError):
            break
        connection.send_bytes(msgspec.msgpack.encode(_answer(request, connection, open_hooks, setups)))
    for hooks in open_hooks.values():
        hooks.close()


def _end_with_parent() -> None:
    """End with the worker: a killed worker cannot end its processes, and no reader is left for their
    results."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


OpenHooks = dict[Registry, ThreadedHooks]
"""The open hooks of a process, by app."""


def _answer(
    request: ProcessRequest,
    connection: Connection,
    open_hooks: OpenHooks,
    setups: list[Callable[[], object]],
) -> ProcessAnswer:
    try:
        task = _find(request)
        if setups:
            setups[0]()
            setups.clear()
    except Exception as error:
        return ProcessAnswer(
            FailOutcome(error=f"the process for {request.kind} cannot begin: {type(error).__name__}: {error}")
        )
    task.registry.deploy_window = request.deploy_window
    attempt = Attempt(
        task.registry,
        ClaimedJob(request.job),
        _with_hooks(task, open_hooks),
        poster=_Pipe(connection),
    )
    settle = attempt.run()
    return ProcessAnswer(settle.outcome, settle.spawn, settle.notes, attempt.throttled)


def _with_hooks(task: Task[..., Any], open_hooks: OpenHooks) -> Task[..., Any]:
    """The task with the hooks of its app. The first job of an app opens them; if that fails, the attempt
    fails, and the next job tries again."""
    registry = task.registry
    if not (registry.hooks or task.uses_hooks):
        return task
    try:
        hooks = open_hooks.get(registry)
        if hooks is None:
            hooks = open_hooks[registry] = ThreadedHooks(registry)
    except TowpathError as error:
        return failing(task, error)
    return hooks.active.get(task.kind) or task


def _find(request: ProcessRequest) -> Task[..., Any]:
    """Find the task in its module: under its own name, or in an app of the module."""
    main = sys.modules.get("__mp_main__") or sys.modules["__main__"]
    module = (
        main if request.module in ("__main__", "__mp_main__") else importlib.import_module(request.module)
    )
    found: Any = module
    for name in request.name.split("."):
        found = getattr(found, name, None)
    if isinstance(found, Task) and found.kind == request.kind:
        return found
    for value in vars(module).values():
        tasks = getattr(value, "tasks", None)
        if isinstance(tasks, Mapping) and isinstance(task := tasks.get(request.kind), Task):
            return task
    raise LookupError(
        f"no task {request.kind} in module {request.module}; "
        "a task with process=True must be defined at its top level"
    )


class _Pipe:
    """Sends the progress of a job to the worker that waits for its process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._generation, self._pid = executors.generation(), os.getpid()

    def post_progress(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        if self._generation != executors.generation():
            raise Forked(path="the pipe to the worker", opener=self._pid)
        self._connection.send_bytes(msgspec.msgpack.encode(progress))
        call(Progressed())
