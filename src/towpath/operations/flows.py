"""The built-in kinds of flows in a worker: attempts at coordinators, locks and the steps of plans.

Every app has them, so that every worker runs them. A step runs on the event loop of the worker, unless it
calls a task of a sync function: then it runs in a thread, so that the slots, timeouts and stops of threads
apply to it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from towpath.core.checks import SECOND
from towpath.core.commands import Command, Result, Settle
from towpath.core.job import ClaimedJob, Job, Reason, SnoozeOutcome
from towpath.core.retry import unknown_kind
from towpath.core.steps import SAGA, decode_saga
from towpath.errors import ActionRefused, NodeError, TimedOut, TowpathError
from towpath.flows.actions import Action, Answer, TaskCall
from towpath.flows.coordinator import Settlement, advance, take_locks
from towpath.flows.kinds import (
    ADVANCE,
    CHECK,
    LOCKS,
    STEP,
    UNDO,
    StoredStepJob,
    decode_advance,
    decode_locks,
    decode_stored_step,
)
from towpath.flows.saga import end_saga
from towpath.flows.step import (
    WAIT,
    Again,
    Finished,
    GaveUp,
    Move,
    Verdict,
    Waits,
    after_check,
    after_run,
    begin,
    facts_of,
    verdict_text,
)
from towpath.ledger import LedgerReads
from towpath.operations.executors import EXECUTORS, ActionContext, Executor
from towpath.operations.service import ActiveSettings
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine
from towpath.tasks.attempt import Attempt
from towpath.tasks.codec import Bound
from towpath.tasks.context import current
from towpath.tasks.outcomes import BreakerOpen, Cancel, Control, Fail, Retry, Snooze
from towpath.tasks.task import Registry, Task, TaskSource


class EngineDoor:
    """The ledger of an engine, as the flows see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def reads(self) -> LedgerReads:
        return self._engine.ledger

    def now(self) -> int:
        return self._engine.clock.now()

    def apply(self, commands: Sequence[Command]) -> Sequence[Result | TowpathError]:
        replies: list[Reply] = []
        answered = threading.Event()

        def receive(found: Sequence[Reply]) -> None:
            replies.extend(found)
            answered.set()

        self._engine.committer.post(commands, receive, retried=False)
        answered.wait()
        return replies


class BuiltInTask(Task[..., Any]):
    """A task without arguments of its own: its function has the payload of the job already."""

    def decode(self, job: Job) -> Bound:
        return (), {}

    def calling(self, function: Callable[[], Any], is_async: bool, threaded: bool) -> BuiltInTask:
        """The task with the function of one job."""
        made = object.__new__(BuiltInTask)
        made.__dict__.update(self.__dict__)
        made.function, made.is_async = function, is_async
        made.mode = "thread" if threaded else "loop"
        return made


class FlowAttempt(Attempt):
    """An attempt at a step. A stop of the worker is no release: the handler has begun, and the next delivery
    must ask the check first."""

    __slots__ = ()

    def stopped(self) -> Settle:
        settle = super().stopped()
        if self.running.asked in (None, Reason.RELEASED):
            return Settle(settle.id, settle.fence, SnoozeOutcome())
        return settle

    def ended(self, error: BaseException) -> Settle:
        """An error of a node needs no traceback: it would show lines of Towpath only."""
        if isinstance(error, Control) and error.__cause__ is None:
            error.__traceback__ = None
        return super().ended(error)


class FlowRuns:
    """Makes the attempts at the jobs of built-in kinds, for the workers of one app."""

    def __init__(self, registry: Registry, configuration: ActiveSettings) -> None:
        self._registry = registry
        self._configuration = configuration
        self._door = EngineDoor(registry.engine)
        self._tasks: dict[str, BuiltInTask] = {}
        self._executors: dict[type[Action], Executor] = {}
        self._kinds: dict[str, Callable[[ClaimedJob, TaskSource], Attempt | Settle]] = {
            ADVANCE: self._advance,
            LOCKS: self._locks,
            SAGA: self._saga,
            STEP: self._step,
            UNDO: self._step,
            CHECK: self._step,
        }

    def attempt(self, claim: ClaimedJob, tasks: TaskSource) -> Attempt | Settle | None:
        """The attempt at a job of a built-in kind, or the settle that returns it; None for other kinds."""
        make = self._kinds.get(claim.job.kind)
        return None if make is None else make(claim, tasks)

    def _task(self, kind: str) -> BuiltInTask:
        if kind not in self._tasks:
            self._tasks[kind] = BuiltInTask(self._registry, _nothing, {"name": kind})
        return self._tasks[kind]

    def _advance(self, claim: ClaimedJob, tasks: TaskSource) -> Attempt:
        job = decode_advance(claim.job.payload)
        return self._settling(claim, partial(advance, self._door, job.plan, job.number))

    def _locks(self, claim: ClaimedJob, tasks: TaskSource) -> Attempt:
        job = decode_locks(claim.job.payload)
        return self._settling(claim, partial(take_locks, self._door, job.plan, job.locks))

    def _saga(self, claim: ClaimedJob, tasks: TaskSource) -> Attempt:
        return self._settling(claim, partial(end_saga, self._door, decode_saga(claim.job.payload)))

    def _settling(self, claim: ClaimedJob, decide: Callable[[], Settlement]) -> Attempt:
        def handler() -> None:
            settlement = decide()
            if settlement.again is not None:
                raise Snooze(settlement.again / SECOND)
            current().settlement = settlement.spawn, settlement.notes

        return Attempt(self._registry, claim, self._task(claim.job.kind).calling(handler, False, True))

    # Steps

    def _step(self, claim: ClaimedJob, tasks: TaskSource) -> Attempt | Settle:
        job = claim.job
        work = decode_stored_step(job.payload)
        step = work.step
        action = {STEP: step.action, UNDO: step.undo, CHECK: None}[job.kind]
        calls = [each for each in (action, step.check) if isinstance(each, TaskCall)]
        threaded = False
        for call in calls:
            task = tasks.get(call.task)
            if task is None:
                return Settle(job.id, job.fence, unknown_kind(call.task, job.error, self._door.now()))
            threaded = threaded or not task.is_async
        run = StepRun(work, action, tasks, self._executor, self._context(work, job))
        run.loop = asyncio._get_running_loop() if threaded else None
        handler = run.answer if job.kind == CHECK else run.run
        attempt = FlowAttempt(self._registry, claim, self._task(job.kind).calling(handler, True, threaded))
        if threaded:
            attempt.timeout = step.timeout
        return attempt

    def _context(self, work: StoredStepJob, job: Job) -> ActionContext:
        return ActionContext(
            settings=self._configuration.settings,
            plan=work.plan,
            step=work.step.name,
            job=job.id,
            attempt=job.attempts,
            fence=job.fence,
            undo=job.kind == UNDO,
            timeout=work.step.timeout,
        )

    def _executor(self, kind: type[Action]) -> Executor:
        if kind not in self._executors:
            self._executors[kind] = EXECUTORS[kind]()
        return self._executors[kind]


async def _nothing() -> Any:
    return None


class StepRun:
    """One delivery of a step: asks `flows.step` what comes next, and does it."""

    def __init__(
        self,
        work: StoredStepJob,
        action: Action | None,
        tasks: TaskSource,
        executor: Callable[[type[Action]], Executor],
        context: ActionContext,
    ) -> None:
        self._work, self._step, self._action = work, work.step, action
        self._tasks, self._executor, self._context = tasks, executor, context
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the worker, if the delivery runs in a thread."""
        self._error: Exception | None = None
        """The failure of the action, or of a check after it."""

    async def run(self) -> Any:
        step, action = self._step, self._action
        if action is None:  # the undo of a step that many others wait for, and that has nothing to undo
            return None
        undo, job = self._context.undo, current().record
        retry = (step.undo_retry or step.retry) if undo else step.retry
        facts = facts_of(job, retry, step.check is not None, undo)
        result: Any = None
        failed = final = False
        move: Move | Verdict = begin(facts)
        while isinstance(move, Move):
            if move is Move.CHECK:
                move = after_check(facts, await self._asked(), failed, final)
                continue
            try:
                result = await self._timed(self._call(action))
            except (Snooze, BreakerOpen):
                raise
            except Exception as error:
                if isinstance(error, Control) and not isinstance(error, Retry | Fail | Cancel):
                    raise
                self._error, failed = error, True
                final = isinstance(error, Fail | Cancel | ActionRefused)
            move = after_run(facts, not failed, final)
        return self._ended(move, result, retry.backoff)

    def _ended(self, verdict: Verdict, result: Any, backoff: Any) -> Any:
        error, fence = self._error, self._context.fence
        cause = None if isinstance(error, NodeError | TimedOut) else error
        text = "no further run is allowed" if error is None else f"{type(error).__name__}: {error}"
        match verdict:
            case Finished():
                return result
            case Waits():
                raise Snooze(WAIT)
            case Again():
                after = getattr(error, "after", None)
                if after is None:
                    after = backoff.delay(verdict.failure, random.random)
                raise Retry(verdict_text(verdict, fence, text), after=after) from cause
            case GaveUp():
                raise Fail(verdict_text(verdict, fence, text)) from cause

    async def answer(self) -> str:
        """For a rehearsal: the answer of the check alone."""
        return Answer.UNKNOWN if self._step.check is None else await self._asked()

    async def _asked(self) -> Answer:
        check = self._step.check
        assert check is not None
        try:
            if isinstance(check, TaskCall):
                return answer_of(await self._timed(self._call_task(check)))
            executor = self._executor(type(check))
            answer: Answer = await self._timed(executor.answer(check, self._step.node, self._context))
            return answer
        except Exception as error:
            if isinstance(error, Control) and not isinstance(error, Retry | Fail | Cancel):
                raise
            self._error = self._error or error
            return Answer.UNKNOWN

    async def _timed(self, running: Any) -> Any:
        seconds = self._step.timeout
        if seconds is None:
            return await running
        try:
            async with asyncio.timeout(seconds) as limit:
                return await running
        except TimeoutError:
            if limit.expired():
                raise TimedOut(seconds=seconds) from None
            raise

    async def _call(self, action: Action) -> Any:
        if not isinstance(action, TaskCall):
            return await self._executor(type(action)).run(action, self._step.node, self._context)
        task = self._tasks.get(action.task)
        assert task is not None
        content = task.codec.encode_result(await self._call_task(action))
        return None if content is None else msgspec.json.decode(content)

    async def _call_task(self, call: TaskCall) -> Any:
        """Call the function of a task, with the hooks of the worker."""
        task = self._tasks.get(call.task)
        assert task is not None
        if task.mode == "process":
            raise Fail(f"task {task.kind} has process=True; a step of a plan runs in the worker itself")
        args, kwargs = task.decode(_with_payload(current().record, bytes(call.args)))
        if not task.is_async:
            return task.function(*args, **kwargs)
        if self.loop is None:
            return await task.function(*args, **kwargs)
        # The delivery has a loop of its own in a thread; async functions belong to the loop of the worker.
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(task.function(*args, **kwargs), self.loop)
        )


def _with_payload(job: Job, payload: bytes) -> Job:
    return msgspec.structs.replace(job, payload=payload)


def answer_of(value: Any) -> Answer:
    """The answer in the result of a task that is a check: True, False or None, or the text of an answer."""
    if value is None:
        return Answer.UNKNOWN
    if isinstance(value, bool):
        return Answer.APPLIED if value else Answer.NOT_APPLIED
    return Answer(value)
