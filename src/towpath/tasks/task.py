"""Tasks: Python functions that handle jobs of a kind, and the registry of a program's tasks. `Task.enqueue`
takes the function's own parameters.

The second half is for running jobs (worker, process, test bench): `Task.decode` returns the arguments of a
stored job and `outcome_of` the outcome of an attempt. Both are pure."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import msgspec

from towpath.core import checks
from towpath.core.checks import micros, optional_seconds
from towpath.core.commands import Append, Appended, Result
from towpath.core.job import (
    After,
    ClaimedJob,
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
from towpath.core.limits import Bounds
from towpath.core.retry import DEPLOY_WINDOW, Chance, misfit, refused_again
from towpath.core.schedule import Schedule
from towpath.errors import InvalidInput, shortened
from towpath.observe.tracing import inject
from towpath.runtime.engine import Engine, same_as
from towpath.runtime.worker.options import Mode
from towpath.tasks import mistakes, outcomes
from towpath.tasks.codec import Bound, Codec, decode_plain, with_after
from towpath.tasks.handles import JobHandle, collecting, open_collector
from towpath.tasks.hooks import FailureFunction, Hook, Hooks, failure_hook, provided, provided_parameters
from towpath.tasks.new_jobs import aappend_on, append_on, inherited, new_id, running
from towpath.tasks.options import (
    CallOptions,
    TaskOptions,
    breaker_of,
    call_terms,
    default_name,
    names,
    policy_of,
    task_terms,
)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_NO_HEADERS: Mapping[str, str] = {}
_NOTHING: Mapping[str, Any] = {}
_DONE = Done()
MAX_TRACE = 16_000
"""Stored characters of a failure."""


class Registry:
    """The tasks, schedules and resources that the code of a program declares, by name; a name is used once.
    `engine` stores the jobs of the tasks. `hooks` surround their work."""

    def __init__(self, engine: Engine, hooks: Hooks | None = None) -> None:
        self.engine = engine
        self.hooks = Hooks() if hooks is None else hooks
        self.tasks: dict[str, Task[..., Any]] = {}
        """The tasks by their names, which are the kinds of their jobs."""
        self.schedules: dict[str, Schedule] = {}
        """The declared schedules. A worker stores them in the ledger when it starts."""
        self.resources: dict[str, Bounds] = {}
        """The services for which the workers of this program limit the load, with the bounds of the limit."""
        self.deploy_window = micros(DEPLOY_WINDOW)
        """Microseconds for which a job with unfit arguments waits for another worker."""
        self.built_in: Callable[[ClaimedJob, TaskSource], Any] = no_built_in
        """Makes the attempt at a job of a built-in kind; None for all other kinds."""

    def add_task(self, task: Task[..., Any]) -> None:
        _check_new("name", task.kind, self.tasks, "task")
        self.tasks[task.kind] = task

    def codec_of(self, kind: str) -> Codec | None:
        """The codec of a task; None if no task has this name."""
        task = self.tasks.get(kind)
        return None if task is None else task.codec

    def decode_result(self, data: bytes | None) -> Any:
        """The result of a job of an unknown task, as plain JSON."""
        return decode_plain(data)

    def add_schedule(self, schedule: Schedule) -> None:
        _check_new("name", schedule.name, self.schedules, "schedule")
        self.schedules[schedule.name] = schedule

    def add_resource(self, name: str, bounds: Bounds) -> None:
        checks.name("resource", name)
        _check_new("resource", name, self.resources, "resource")
        self.resources[name] = bounds


class TaskSource(Protocol):
    """The tasks of a worker by kind, with its hooks."""

    def get(self, kind: str, /) -> Task[..., Any] | None: ...


def no_built_in(claim: ClaimedJob, tasks: TaskSource) -> None:
    """An app without built-in kinds."""


def _check_new(field: str, name: str, known: Mapping[str, object], what: str) -> None:
    if name in known:
        message = f"this app has a {what} {shortened(name)} already; give one of the two another name"
        raise InvalidInput(
            field=field, value=name, expected=f"a name that no other {what} of this app has", message=message
        )


class Task(Generic[P, R]):
    """A function that can be enqueued. Calling it runs the function directly, without the ledger."""

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
        """The name of the resource that its jobs use, and that is measured while they run."""
        self._provided = provided_parameters(function, f"task {self.kind}")
        self.failure_hooks = _failure_hooks("on_failure", options.get("on_failure"))
        self.dead_hooks = _failure_hooks("on_dead", options.get("on_dead"))
        self._terms = task_terms(self.kind, options, self.engine.priorities)
        self._check_names()
        self._on: Any = None
        """The user's connection: its transaction contains the enqueued jobs."""
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

    if not TYPE_CHECKING:  # with it, a type checker would accept every attribute

        def __getattr__(self: Any, name: str) -> Any:
            own = self._own()
            known = {each: use.format(task=own) for each, use in mistakes.TASK_METHODS.items()}
            raise mistakes.no_attribute(self, f"task {own}", name, known)

    def _check_names(self) -> None:
        parameters = [
            each for each in inspect.signature(self.function).parameters if each not in self._provided
        ]
        for field in ("unique", "part", "route"):
            mistakes.check_naming(field, getattr(self._terms, field), f"task {self.kind}", parameters)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here."""
        if self._provided:
            self._check_provided(args, kwargs)
        value: R = self.function(*args, **kwargs)
        return value

    def _check_provided(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A direct call has no worker that provides values: the caller passes them."""
        given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
        for name in self._provided:
            if name not in given:
                field = f"{self.kind}({name})"
                message = f"{field} has no value: a worker provides it, and a direct call must pass it"
                raise InvalidInput(field=field, value=provided, expected="a value", message=message)

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
    def uses_hooks(self) -> bool:
        """True if it has provided parameters or hooks of its own."""
        return bool(self._provided or self.failure_hooks or self.dead_hooks)

    @property
    def timeout(self) -> float | None:
        """The time limit of an attempt in seconds."""
        return optional_seconds(self._terms.fields.get("timeout"))

    def options(self, **options: Unpack[CallOptions]) -> Self:
        """A copy of the task that enqueues with these options."""
        other = object.__new__(type(self))  # `copy` would look up attributes that do not exist
        other.__dict__.update(self.__dict__)
        other._terms = call_terms(self._terms, options, self.engine.priorities)
        other._on = options.get("on", self._on)
        if "part" in options:
            other._check_names()
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

    @same_as(enqueue)
    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        specs = (self.spec_for(args, kwargs),)
        if self._on is None and open_collector.get() is None:
            return self._handle(await self.engine.acall(Append(specs)))
        (handle,) = self._collected(specs) or self._handles(await self._aappend(specs))
        return handle

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[JobHandle[R]]:
        """Enqueue many calls (`task.of(...)`), all or none, in one commit."""
        specs = self._specs(calls, "enqueue_many")
        return self._collected(specs) or self._handles(self._append(specs)) if specs else []

    @same_as(enqueue_many)
    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[JobHandle[R]]:
        specs = self._specs(calls, "aenqueue_many")
        return self._collected(specs) or self._handles(await self._aappend(specs)) if specs else []

    def _specs(self, calls: Iterable[Call[R]], verb: str) -> tuple[Spec, ...]:
        if type(calls) is not list:
            calls = calls_of(calls, self._own(verb))
        return tuple([call.spec() if type(call) is Call else self._refuse(call, verb) for call in calls])

    def _refuse(self, given: object, verb: str) -> Spec:
        raise mistakes.no_call(given, self._own(verb), self._own())

    def _own(self, verb: str = "") -> str:
        """How the program writes the task, or a verb of it."""
        name = self.__dict__.get("__name__", "task")
        return f"{name}.{verb}" if verb else name

    def _collected(self, specs: tuple[Spec, ...]) -> list[JobHandle[R]]:
        """Handles on the jobs that the open batch will append; none without an open batch."""
        if self._on is not None or (batch := collecting(self.engine)) is None:
            return []
        return [batch.collect(spec, self) for spec in specs]

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
        return JobHandle(self.engine, answer.jobs[0].id, self)

    def _handles(self, answer: Result) -> list[JobHandle[R]]:
        assert isinstance(answer, Appended)
        engine = self.engine
        return [JobHandle(engine, placed.id, self) for placed in answer.jobs]

    def of(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later: in a chain, a group, a batch, or with `enqueue_many`."""
        if self._on is not None:
            message = (
                "of(...) enqueues nothing, so it takes no connection: "
                "use enqueue, app.batch(on=...) or task.options(on=...).enqueue_many(...)"
            )
            raise InvalidInput(field="on", value=self._on, expected="left out", message=message)
        codec = self.codec
        try:
            arguments = codec.bind(args, kwargs)
        except InvalidInput as error:
            raise self._misplaced(error, kwargs) from None
        return Call(self, arguments, codec.encode(arguments))

    def spec_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Spec:
        """The spec of a call. Raises InvalidInput if the arguments do not fit."""
        codec = self._codec or self.codec
        try:
            arguments = codec.bind(args, kwargs)
        except InvalidInput as error:
            raise self._misplaced(error, kwargs) from None
        return self._spec(arguments, codec.encode(arguments), _NOTHING)

    def _misplaced(self, error: InvalidInput, kwargs: Mapping[str, Any]) -> InvalidInput:
        extra = [name for name in kwargs if name not in self.codec.parameters]
        return mistakes.misplaced(error, self._own(), extra, CallOptions.__annotations__)

    def _spec(self, arguments: Mapping[str, Any], payload: bytes, more: Mapping[str, Any]) -> Spec:
        if self._model is not None and not more and running.get() is None and not inject(_NO_HEADERS):
            return another(self._model, new_id(), payload)
        terms = self._terms
        fields = {**terms.fields, **more} if more else terms.fields
        if terms.named:
            fields = {**fields, **names(terms, self.codec, arguments)}
        if (parent := running.get()) is not None:
            fields = inherited(parent.record, fields)
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
        """The arguments of a job. Raises `outcomes.ArgumentsUnfit` if they do not fit the signature, and
        `outcomes.Fail` if they are no JSON, so that they fit none."""
        try:
            return (self._codec or self.codec).decode(job.payload)
        except InvalidInput as error:
            if type(error.__cause__) is msgspec.DecodeError:
                raise outcomes.Fail(f"the arguments of job {job.id} do not fit: {error}") from error
            raise outcomes.ArgumentsUnfit(str(error)) from error

    def codec_of(self, kind: str) -> Codec | None:
        """The codec of a task: its own, or that of another task of the app, for a job that held the key."""
        return self.codec if kind == self.kind else self.registry.codec_of(kind)

    def decode_result(self, data: bytes | None) -> R:
        """Decode the result of a finished job."""
        value: R = self.codec.decode_result(data)
        return value


def _failure_hooks(what: str, function: FailureFunction | None) -> list[Hook]:
    return [] if function is None else [failure_hook(what, function)]


class AsyncTask(Task[P, R]):
    """A task of an `async def`: calling it returns a coroutine."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        """Run the function here."""
        if self._provided:
            self._check_provided(args, kwargs)
        running: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return running


class Call(mistakes.CallHints, Generic[R_co]):
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


def calls_of(given: Iterable[Call[R]], where: str) -> Iterator[Call[R]]:
    """The calls, each checked to be one. `where` is the name of the function that takes them."""
    if isinstance(given, Call | Task) or not isinstance(given, Iterable):
        raise mistakes.no_calls(given, where)
    for each in given:
        if type(each) is not Call:
            raise mistakes.no_call(each, where)
        yield each


class Decorator(Protocol):
    """The decorator that `app.task(...)` with options returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]: ...


def make_task(registry: Registry, function: Callable[..., Any], options: TaskOptions) -> Task[..., Any]:
    """The task of a function: an `AsyncTask` for a coroutine function."""
    mistakes.check_function(function, options.get("process", False))
    kind = AsyncTask if inspect.iscoroutinefunction(function) else Task
    return kind(registry, function, options)


def outcome_of(
    task: Task[..., Any],
    job: Job,
    result: Any = None,
    error: BaseException | None = None,
    chance: Chance = random.random,
) -> Outcome:
    """The outcome of an attempt after its handler returned `result` or raised `error`."""
    if error is None:
        if result is None:
            return _DONE
        try:
            return Done(task.codec.encode_result(result))
        except InvalidInput as refused:
            if isinstance(result, BaseException):
                error_name = type(result).__name__
                return FailOutcome(
                    error=f"{task.kind} returned {error_name}(...); raise {error_name}(...) instead"
                )
            return FailOutcome(error=_clean(str(refused)))
    if isinstance(error, outcomes.Snooze):
        return SnoozeOutcome(micros(error.for_))
    if isinstance(error, outcomes.BreakerOpen):
        return Refuse(micros(error.after), error=refused_again(_clean(str(error)), job.error))
    if isinstance(error, outcomes.ArgumentsUnfit):
        registry = task.registry
        return misfit(_clean(str(error)), job.error, registry.deploy_window, registry.engine.clock.now())
    if isinstance(error, outcomes.Cancel):
        return Stop(error=_clean(str(error)))
    if isinstance(error, outcomes.Fail):
        return FailOutcome(error=_clean(str(error)) if error.__cause__ is None else failure_text(error))
    if isinstance(error, outcomes.Retry) and error.after is not None:
        return RetryOutcome(micros(error.after), error=failure_text(error))
    delay = task.policy.delay(error, job.failures + 1, chance)
    return RetryOutcome(micros(delay), error=failure_text(error))


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
