"""Durable steps inside a handler: `towpath.step`.

A step is a call inside a handler; its result is kept in a note of the job, `step/<job id>/<number>`. The
note is written with the fence of the claim, in one commit per step. A later attempt reads the notes and
returns the kept results instead of calling the functions again. Nothing else of the handler is recorded or
replayed: code between the steps runs again in every attempt.

A step with an undo has two commits: the undo is durable before the function is called. `flows.saga` runs the
undos if the job fails or is canceled."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from msgspec import UNSET, Raw, UnsetType

from towpath.core import checks
from towpath.core.commands import Append, Command, Note, Progress, Result
from towpath.core.job import Reason
from towpath.core.steps import (
    SagaJob,
    StepRecord,
    UndoRecord,
    read_steps,
    saga_key,
    saga_spec,
    step_key,
    step_note,
)
from towpath.errors import (
    InvalidInput,
    LostClaim,
    NoteConflict,
    StepsChanged,
    TowpathError,
    Unsupported,
)
from towpath.tasks.codec import ResultCodec, result_codec
from towpath.tasks.context import Running, current
from towpath.tasks.mistakes import no_call
from towpath.tasks.outcomes import Fail, StopRequested
from towpath.tasks.task import Call

R = TypeVar("R")

MAX_STEPS = 1_000
"""Steps of one job."""
_inside: ContextVar[str] = ContextVar("towpath_step", default="")
"""The name of the step that runs here."""
_making = threading.Lock()
_codecs: weakref.WeakKeyDictionary[Any, ResultCodec] = weakref.WeakKeyDictionary()


@overload
def step(
    function: Callable[..., Coroutine[Any, Any, R]],
    /,
    *args: Any,
    name: str | None = None,
    undo: Call[Any] | None = None,
    **kwargs: Any,
) -> Coroutine[Any, Any, R]: ...


@overload
def step(
    function: Callable[..., R],
    /,
    *args: Any,
    name: str | None = None,
    undo: Call[Any] | None = None,
    **kwargs: Any,
) -> R: ...


def step(
    function: Callable[..., Any],
    /,
    *args: Any,
    name: str | None = None,
    undo: Call[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function once for the running job and keep its result: `await step(charge, order)` with an
    `async def`, `step(charge, order)` with a `def`. Later attempts, on any worker, get the kept result
    without a call. The result is any JSON value, read by the return annotation of the function.

    Steps are known by their order and their names (`name`, by default that of the function). If an earlier
    attempt recorded another name at the same place, `StepsChanged` ends the job. A function that raises keeps
    nothing and runs again in the next attempt. In an async handler call a blocking function with
    `await step(asyncio.to_thread, function, ...)`.

    `undo`, a call of a task (`refund.of(order)`), is stored before the function is called. If the job fails
    or is canceled, the undos of its steps run in reverse order, as the rollback of a plan. An undo must
    succeed if there is nothing to undo: the function may not have been called, or may have raised."""
    running = current()
    with _making:
        steps = running.steps
        if steps is None:
            steps = running.steps = Steps(running)
    subject = args[0] if function is asyncio.to_thread and args else function
    asynchronous = _is_async(function)
    call = StepCall(steps, _name_of(subject) if name is None else name, subject, undo)
    _check_form(running, call.name, asynchronous)
    call.number = steps.take(call.name)
    return call.arun(function, args, kwargs) if asynchronous else call.run(function, args, kwargs)


def _is_async(function: Callable[..., Any]) -> bool:
    """True if a call returns a coroutine. A task of an `async def` has `is_async`."""
    return (
        inspect.iscoroutinefunction(function)
        or getattr(function, "is_async", False) is True
        or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    )


def _name_of(function: Any) -> str:
    """The qualified name of a function; of a `functools.partial`, that of its function."""
    if not callable(function):
        raise InvalidInput(field="step", value=function, expected="a function and its arguments")
    found = getattr(function, "func", function)
    return str(getattr(found, "__qualname__", type(found).__name__))


def _check_form(running: Running, name: str, asynchronous: bool) -> None:
    if outer := _inside.get():
        message = f"step {name} is called inside step {outer}: call its function directly there"
        raise InvalidInput(field="step", value=name, expected="no step inside a step", message=message)
    on_loop = asyncio._get_running_loop() is not None
    if asynchronous and not on_loop:
        message = f"step {name} has an async function, and the handler is a plain def: make it an async def"
        raise InvalidInput(field="step", value=name, expected="a plain function", message=message)
    if not asynchronous and on_loop and running.task.is_async:
        message = (
            f"step {name} has a plain function, which would block the event loop of the async handler: "
            "write `await step(asyncio.to_thread, function, ...)`, or make the function an async def"
        )
        raise InvalidInput(field="step", value=name, expected="an async function", message=message)


class Steps:
    """The steps of one attempt. Any thread or coroutine of the handler may use it."""

    def __init__(self, running: Running) -> None:
        self.running, self.engine = running, running.engine
        if running.in_child and not self.engine.ledger.capabilities.shared:
            raise Unsupported(what="steps of a task with process=True need a ledger that processes can share")
        self._lock = threading.Lock()
        self._taken = 0
        self._recorded: dict[int, StepRecord] | None = {} if running.fence == 1 else None
        """The steps of earlier attempts; None before they are read. The first delivery has none."""
        self._refused: Exception | None = None
        """Why no further step of this attempt runs."""
        self._stored: set[int] = set()
        self._saga = False
        """A job waits for the end of this one, to run the undos."""

    def take(self, name: str) -> int:
        """The number of the next step, from 1."""
        with self._lock:
            if self._taken == MAX_STEPS:
                raise Fail(f"step {name} would be step {MAX_STEPS + 1}; a job has at most {MAX_STEPS} steps")
            self._taken += 1
            return self._taken

    @property
    def unread(self) -> bool:
        return self._recorded is None

    def read(self) -> None:
        """Read the steps of earlier attempts."""
        ledger, job = self.engine.ledger, self.running.record
        found = read_steps(ledger.notes, job.id, job.seq)
        rolled_back = ledger.note(saga_key(job.seq)) is not None
        with self._lock:
            if self._recorded is None:
                self._recorded = found
                self._saga = any(record.undo for record in found.values())
                self._refused = self._rolled_back() if rolled_back else None

    def _rolled_back(self) -> Fail:
        return Fail(f"the steps of job {self.running.id} were rolled back: enqueue a new job instead")

    def recorded(self, number: int, name: str) -> StepRecord | None:
        """The record of a step, if an earlier attempt has made one. Raises `StepsChanged`."""
        assert self._recorded is not None
        record = self._recorded.get(number)
        if record is not None and record.name != name:
            self._refused = self._refused or StepsChanged(
                id=self.running.id, number=number, recorded=record.name, came=name
            )
        if self._refused is not None:
            raise self._refused
        return record

    def storing(self, number: int, record: StepRecord, *notes: Note) -> list[Command]:
        """The commands that store the record of a step."""
        written = step_note(self.running.id, number, record)
        with self._lock:
            self._stored.add(number)
        return [Progress(self.running.id, self.running.fence, notes=(written, *notes))]

    def intending(self, number: int, record: StepRecord) -> list[Command]:
        """The commands that store the undo of a step. The job that runs the undos comes first: it does
        nothing where there are none."""
        job = self.running.record
        stored = self.storing(number, record, Note(key=saga_key(job.seq), value=None, expect=0))
        if self._saga:
            return stored
        return [Append((saga_spec(SagaJob(job.id, job.seq, job.fence)),), inside=True), *stored]

    def commit(self, commands: Sequence[Command]) -> None:
        """Returns when the commands are durable."""
        with self._refusals():
            try:
                replies = (
                    [self.engine.call(commands[0])] if len(commands) == 1 else self.engine.call_all(commands)
                )
            except TowpathError as error:
                if not error.retryable:
                    raise
                # The function may have run: wait until the ledger is back, as a settle does.
                replies = self.engine.call_all(commands, retried=True)
            self._received(replies)

    async def acommit(self, commands: Sequence[Command]) -> None:
        with self._refusals():
            try:
                replies = (
                    [await self.engine.acall(commands[0])]
                    if len(commands) == 1
                    else await self.engine.acall_all(commands)
                )
            except TowpathError as error:
                if not error.retryable:
                    raise
                replies = await self.engine.acall_all(commands, retried=True)
            self._received(replies)

    def _received(self, replies: Sequence[Result]) -> None:
        self._saga = self._saga or len(replies) > 1
        self.running.on_reply(replies[-1])

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except LostClaim as lost:
            self.running.on_reply(lost)
            raise StopRequested(Reason.LOST) from lost
        except NoteConflict:
            raise self._rolled_back() from None

    def deletions(self) -> tuple[Note, ...]:
        """The notes that the settle of a job that is done deletes."""
        numbers = sorted(self._stored | (self._recorded or {}).keys())
        return tuple([Note(key=step_key(self.running.id, number), value=None) for number in numbers])


class StepCall:
    """One call of `step`."""

    __slots__ = ("_codec", "_result", "_steps", "_undo", "_undos", "name", "number")

    def __init__(
        self, steps: Steps, name: str, subject: Callable[..., Any], undo: Call[Any] | None = None
    ) -> None:
        checks.text("name", name, least=1)
        self._steps, self.name, self.number = steps, name, 0
        self._codec = _codec_of(subject)
        self._undo = None if undo is None else _undo_record(undo)
        self._undos: tuple[UndoRecord, ...] = ()
        self._result: bytes | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        steps = self._steps
        if steps.unread:
            steps.read()
        if not self._finished_before():
            if commands := self._intend():
                steps.commit(commands)
            with self._running():
                value = function(*args, **kwargs)
            steps.commit(self._finish(value))
        return self._codec.decode_result(self._result)

    async def arun(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        steps = self._steps
        if steps.unread:
            await asyncio.to_thread(steps.read)
        if not self._finished_before():
            if commands := self._intend():
                await steps.acommit(commands)
            with self._running():
                value = await function(*args, **kwargs)
            await steps.acommit(self._finish(value))
        return self._codec.decode_result(self._result)

    def _finished_before(self) -> bool:
        """True if an earlier attempt kept the result. Else the function runs now, unless the job is asked to
        stop."""
        record = self._steps.recorded(self.number, self.name)
        if record is not None:
            self._undos = record.undo
            if record.result is not UNSET:
                self._result = bytes(record.result)
                return True
        self._steps.running.check()
        return False

    def _intend(self) -> list[Command]:
        """The commands that store the undo, unless an earlier attempt stored the same. The undo of an earlier
        attempt stays: its function may have taken effect."""
        if self._undo is None or self._undo in self._undos:
            return []
        self._undos = (*self._undos, self._undo)
        return self._steps.intending(self.number, self._record(UNSET))

    @contextmanager
    def _running(self) -> Iterator[None]:
        token = _inside.set(self.name)
        try:
            yield
        finally:
            _inside.reset(token)

    def _finish(self, value: Any) -> list[Command]:
        """The commands that keep the result. The handler gets the value that a later attempt would read, so
        that both see the same types."""
        try:
            self._result = self._codec.encode_result(value)
            self._codec.decode_result(self._result)
            result = Raw(b"null" if self._result is None else self._result)
            return self._steps.storing(self.number, self._record(result))
        except InvalidInput as error:
            raise Fail(str(error)) from error

    def _record(self, result: Raw | UnsetType) -> StepRecord:
        return StepRecord(self._steps.running.record.seq, self.name, result, self._undos)


def _undo_record(undo: Call[Any]) -> UndoRecord:
    if type(undo) is not Call:
        raise no_call(undo, "step(..., undo=...)")
    if undo.task.process:
        expected = "a call of a task without process=True: an undo runs in the worker itself"
        raise InvalidInput(field="undo", value=undo.task.kind, expected=expected)
    spec = undo.spec()
    return UndoRecord(spec.kind, Raw(undo.payload), spec.queue, spec.max_attempts)


def _codec_of(function: Any) -> ResultCodec:
    found = getattr(function, "func", getattr(function, "__func__", function))
    try:
        codec = _codecs.get(found)
        if codec is None:
            codec = _codecs[found] = _new_codec(found)
        return codec
    except TypeError:  # a callable without a hash or a weak reference
        return _new_codec(found)


def _new_codec(function: Any) -> ResultCodec:
    name = _name_of(function)
    return result_codec(function, name, f"step {name}")
