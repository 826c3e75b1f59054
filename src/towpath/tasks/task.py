"""Tasks: Python functions that handle jobs of a kind. `Task.enqueue` takes the function's own parameters.

The second half is for running jobs (worker, process, test bench): `Task.decode` returns the arguments of a
stored job and `outcome_of` the outcome of an attempt. Both are pure."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from towpath.core.commands import Append, Appended, Result
from towpath.core.job import (
    After,
    Done,
    FailOutcome,
    Job,
    Outcome,
    Refuse,
    RetryOutcome,
    SnoozeOutcome,
    Spec,
    Stop,
    another,
)
from towpath.core.retry import Chance
from towpath.errors import InvalidInput
from towpath.observe.tracing import inject
from towpath.runtime.worker.options import Mode
from towpath.tasks import outcomes
from towpath.tasks.codec import Bound, Codec
from towpath.tasks.handles import JobHandle, collecting, open_collector
from towpath.tasks.new_jobs import aappend_on, append_on, inherited, new_id, running
from towpath.tasks.options import (
    CallOptions,
    TaskOptions,
    breaker_of,
    call_terms,
    names,
    policy_of,
    task_terms,
    with_after,
)
from towpath.tasks.registry import Registry

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_NO_HEADERS: Mapping[str, str] = {}
_NOTHING: Mapping[str, Any] = {}
_DONE = Done()
MAX_TRACE = 16_000
"""Stored characters of a failure."""


class Task(Generic[P, R]):
    """A function whose calls can be enqueued. Calling it runs the function directly, without the ledger."""

    __name__: str

    def __init__(self, registry: Registry, function: Callable[..., Any], options: TaskOptions) -> None:
        update_wrapper(self, function)
        self.registry = registry
        self.engine = registry.engine
        self.function = function
        self.kind = options.get("name") or default_name(function)
        self.is_async = inspect.iscoroutinefunction(function)
        self.process = options.get("process", False)
        self.mode: Mode = "process" if self.process else "loop" if self.is_async else "thread"
        """Where the handler runs: on the event loop, in a thread or in a process."""
        self.policy = policy_of(options.get("backoff"))
        self.breaker = breaker_of(options.get("breaker"))
        self.resource = options.get("resource")
        """The resource whose load is measured while its jobs run, by name."""
        self._terms = task_terms(self.kind, options, self.engine.priorities)
        self._on: Any = None
        """The user's connection whose transaction contains the enqueued jobs."""
        self._model: Spec | None = None
        """A template of the specs of its jobs, if they differ only in id and payload."""
        self._codec: Codec | None = None
        try:
            self._codec = Codec(function, self.kind)
        except InvalidInput as error:
            # A type that is defined further down in its module is looked up again at the first use.
            if not isinstance(error.__cause__, NameError):
                raise

    def __repr__(self) -> str:
        return f"<task {self.kind}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here."""
        value: R = self.function(*args, **kwargs)
        return value

    @property
    def codec(self) -> Codec:
        if self._codec is None:
            self._codec = Codec(self.function, self.kind)
        return self._codec

    @property
    def queue(self) -> str:
        """The queue of its jobs, unless options name another."""
        queue: str = self._terms.fields["queue"]
        return queue

    @property
    def shuts_queue(self) -> bool:
        """True if its breaker shuts the whole queue, because its jobs have parts already."""
        return self.breaker is not None and self._terms.part is not None

    @property
    def routed(self) -> bool:
        """True if the arguments choose the queue."""
        return self._terms.route is not None

    @property
    def timeout(self) -> int | None:
        """The time limit of an attempt in microseconds."""
        timeout: int | None = self._terms.fields.get("timeout")
        return timeout

    def options(self, **options: Unpack[CallOptions]) -> Self:
        """A copy of the task whose enqueues have these options."""
        other = copy.copy(self)
        other._terms = call_terms(self._terms, options, self.engine.priorities)
        other._on = options.get("on", self._on)
        other._model = None
        return other

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue a call as a job. Returns when it is durable (inside `app.batch()`: at the end of the batch;
        with `on`: when that transaction is committed)."""
        specs = (self.spec_for(args, kwargs),)
        if self._on is None and open_collector.get() is None:  # the common case
            return self._handle(self.engine.call(Append(specs)))
        (handle,) = self._collected(specs) or self._handles(self._append(specs))
        return handle

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        specs = (self.spec_for(args, kwargs),)
        if self._on is None and open_collector.get() is None:
            return self._handle(await self.engine.acall(Append(specs)))
        (handle,) = self._collected(specs) or self._handles(await self._aappend(specs))
        return handle

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[JobHandle[R]]:
        """Enqueue many calls (`task.of(...)`), all or none, in one commit."""
        specs = tuple([call.spec() for call in calls])
        return self._collected(specs) or self._handles(self._append(specs)) if specs else []

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[JobHandle[R]]:
        specs = tuple([call.spec() for call in calls])
        return self._collected(specs) or self._handles(await self._aappend(specs)) if specs else []

    def _collected(self, specs: tuple[Spec, ...]) -> list[JobHandle[R]]:
        """Handles on the jobs that the open batch will append; none without an open batch."""
        if self._on is not None or (batch := collecting(self.engine)) is None:
            return []
        return [batch.collect(spec, self.decode_result) for spec in specs]

    def _append(self, specs: tuple[Spec, ...]) -> Result:
        return (
            self.engine.call(Append(specs))
            if self._on is None
            else append_on(self.engine.ledger, self._on, specs)
        )

    def _aappend(self, specs: tuple[Spec, ...]) -> Coroutine[Any, Any, Result]:
        return (
            self.engine.acall(Append(specs))
            if self._on is None
            else aappend_on(self.engine.ledger, self._on, specs)
        )

    def _handle(self, answer: Result) -> JobHandle[R]:
        assert type(answer) is Appended
        return JobHandle(self.engine, answer.jobs[0].id, self.decode_result)

    def _handles(self, answer: Result) -> list[JobHandle[R]]:
        assert isinstance(answer, Appended)
        engine, decode = self.engine, self.decode_result
        return [JobHandle(engine, placed.id, decode) for placed in answer.jobs]

    def of(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later: in a chain, a group, a batch, or with `enqueue_many`."""
        if self._on is not None:
            expected = (
                "enqueue, app.batch(on=...) or task.options(on=...).enqueue_many(...): "
                "of(...) alone enqueues nothing"
            )
            raise InvalidInput(field="on", value=self._on, expected=expected)
        codec = self.codec
        arguments = codec.bind(args, kwargs)
        return Call(self, arguments, codec.encode(arguments))

    def spec_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Spec:
        """The spec of a call. Raises InvalidInput if the arguments do not fit."""
        codec = self._codec or self.codec
        arguments = codec.bind(args, kwargs)
        return self._spec(arguments, codec.encode(arguments), _NOTHING)

    def _spec(self, arguments: Mapping[str, Any], payload: bytes, more: Mapping[str, Any]) -> Spec:
        if self._model is not None and not more and running.get() is None and not inject(_NO_HEADERS):
            return another(self._model, new_id(), payload)
        terms = self._terms
        fields = {**terms.fields, **more} if more else terms.fields
        if terms.named:
            fields = {**fields, **names(terms, self.codec, arguments)}
        if (parent := running.get()) is not None:
            fields = inherited(parent.job, fields)
        if "after" in fields:
            payload, fields = with_after(payload, fields)
        if "id" in fields or "headers" in fields:
            fields = {
                **fields,
                "id": fields.get("id") or new_id(),
                "headers": inject(fields.get("headers", _NO_HEADERS)),
            }
            return Spec(kind=terms.kind, payload=payload, **fields)
        spec = Spec(id=new_id(), kind=terms.kind, payload=payload, headers=inject(_NO_HEADERS), **fields)
        if fields is terms.fields and not spec.headers:
            self._model = another(spec, spec.id, b"")
        return spec

    # For the worker

    def decode(self, job: Job) -> Bound:
        """The arguments of a job. Raises `outcomes.Fail` if they do not fit the signature: no retry would
        help."""
        try:
            return (self._codec or self.codec).decode(job.payload)
        except InvalidInput as error:
            raise outcomes.Fail(f"the arguments of job {job.id} do not fit: {error}") from error

    def decode_result(self, data: bytes | None) -> R:
        """Decode the result of a finished job."""
        value: R = self.codec.decode_result(data)
        return value


class AsyncTask(Task[P, R]):
    """A task of an `async def`: calling it returns a coroutine."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        """Run the function here."""
        running: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return running


class Call(Generic[R_co]):
    """One call of a task, not enqueued. Its arguments have been checked. Used twice it makes two jobs."""

    __slots__ = ("arguments", "payload", "task")

    def __init__(self, task: Task[..., R_co], arguments: Mapping[str, Any], payload: bytes) -> None:
        self.task = task
        self.arguments = arguments
        self.payload = payload

    @property
    def after(self) -> tuple[After, ...]:
        """The dependencies in its own options."""
        after: tuple[After, ...] = self.task._terms.fields.get("after", ())
        return after

    def spec(self, **more: Any) -> Spec:
        """The spec, with these fields instead of its own."""
        return self.task._spec(self.arguments, self.payload, more)


class Decorator(Protocol):
    """The decorator that `app.task(...)` with options returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]: ...


def make_task(registry: Registry, function: Callable[..., Any], options: TaskOptions) -> Task[..., Any]:
    """The task of a function: an `AsyncTask` for a coroutine function."""
    if not callable(function):
        raise InvalidInput(field="task", value=function, expected="a function")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidInput(
            field="task", value=function, expected="a function that returns; generators are not supported"
        )
    kind = AsyncTask if inspect.iscoroutinefunction(function) else Task
    return kind(registry, function, options)


def default_name(function: Callable[..., Any]) -> str:
    """`module.function`. A script that is run has the name under which a worker imports it, not
    `__main__`."""
    module = getattr(function, "__module__", None) or "function"
    if module in ("__main__", "__mp_main__"):
        main = sys.modules.get(module)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = (
            spec.name.removesuffix(".__main__") if spec is not None else Path(file).stem if file else module
        )
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def outcome_of(
    task: Task[..., Any],
    job: Job,
    result: Any = None,
    error: BaseException | None = None,
    chance: Chance = random.random,
) -> Outcome:
    """The outcome of an attempt whose handler returned `result` or raised `error`."""
    if error is None:
        if result is None:
            return _DONE
        try:
            return Done(task.codec.encode_result(result))
        except InvalidInput as refused:
            return FailOutcome(error=_clean(str(refused)))
    if isinstance(error, outcomes.Snooze):
        return SnoozeOutcome(error.for_)
    if isinstance(error, outcomes.BreakerOpen):
        return Refuse(error.after, error=_clean(str(error)))
    if isinstance(error, outcomes.Cancel):
        return Stop(error=_clean(str(error)))
    if isinstance(error, outcomes.Fail):
        return FailOutcome(error=_clean(str(error)) if error.__cause__ is None else failure_text(error))
    if isinstance(error, outcomes.Retry) and error.after is not None:
        return RetryOutcome(error.after, error=failure_text(error))
    return RetryOutcome(task.policy.delay(error, job.failures + 1, chance), error=failure_text(error))


def failure_text(error: BaseException) -> str:
    """The error in one line, then its traceback, the end of it if it is long."""
    report = traceback.TracebackException.from_exception(error, limit=-50)
    first = "".join(report.format_exception_only()).strip()
    if error.__traceback__ is None and error.__cause__ is None:
        return _clean(first)
    trace = "".join(report.format())
    head = first[: MAX_TRACE // 4]
    kept = MAX_TRACE - len(head)
    return _clean(f"{head}\n\n{trace if len(trace) <= kept else '...' + trace[-kept:]}")


def _clean(text: str) -> str:
    """Text that every ledger accepts: no NUL, no lone surrogates, not too long."""
    return text[: 2 * MAX_TRACE].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
