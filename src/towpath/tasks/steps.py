"""Durable steps inside a handler: `towpath.step`.

A step is a call inside a handler whose result is kept in a note of the job, `step/<job id>/<number>`. The
note is written with the fence of the claim, in one commit per step. A later attempt reads the notes and
returns the kept results instead of calling the functions again. Nothing else of the handler is recorded or
replayed: code between the steps runs again in every attempt."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import msgspec
from msgspec import UNSET, Raw, UnsetType

from towpath.core import checks
from towpath.core.commands import Note, Progress, Result
from towpath.core.job import STATE_TTL, Reason
from towpath.core.views import NoteQuery
from towpath.errors import Described, InvalidInput, LostClaim, StepsChanged, TowpathError, Unsupported
from towpath.ledger import Ledger
from towpath.tasks.codec import ResultCodec, result_codec
from towpath.tasks.context import Running, current
from towpath.tasks.outcomes import Fail, StopRequested

R = TypeVar("R")

MAX_STEPS = 1_000
"""Steps of one job."""
PAGE = 1_000
"""Notes of one read."""

_inside: ContextVar[str] = ContextVar("towpath_step", default="")
"""The name of the step that runs here."""
_making = threading.Lock()
_codecs: weakref.WeakKeyDictionary[Any, ResultCodec] = weakref.WeakKeyDictionary()


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The note of a step. `job` is the `seq` of its job: a later job with the same id has another one."""

    job: int
    name: str
    result: Raw | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StepRecord).decode


def step_key(id: str, number: int | None = None) -> str:
    """The key of the note of a step, or the prefix of all steps of the job."""
    return f"step/{id}/" if number is None else f"step/{id}/{number:04}"


def read_steps(ledger: Ledger, id: str, seq: int) -> dict[int, StepRecord]:
    """The recorded steps of a job, by their numbers."""
    prefix, page = step_key(id), None
    found: dict[int, StepRecord] = {}
    while True:
        notes = ledger.notes(NoteQuery(prefix=prefix, limit=PAGE, page=page))
        for note in notes.notes:
            number = note.key.removeprefix(prefix)
            # The id of another job may begin with this prefix.
            if number.isdecimal() and (record := _decode(note.value)).job == seq:
                found[int(number)] = record
        if (page := notes.next) is None:
            return found


@overload
def step(
    function: Callable[..., Coroutine[Any, Any, R]], /, *args: Any, name: str | None = None, **kwargs: Any
) -> Coroutine[Any, Any, R]: ...


@overload
def step(function: Callable[..., R], /, *args: Any, name: str | None = None, **kwargs: Any) -> R: ...


def step(function: Callable[..., Any], /, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
    """Call a function once for the running job and keep its result: `await step(charge, order)` with an
    `async def`, `step(charge, order)` with a `def`. Later attempts, on any worker, get the kept result
    without a call. The result is any JSON value, read by the return annotation of the function.

    Steps are known by their order and their names (`name`, by default that of the function). If an earlier
    attempt recorded another name at the same place, `StepsChanged` ends the job. A function that raises keeps
    nothing and runs again in the next attempt. In an async handler call a blocking function with
    `await step(asyncio.to_thread, function, ...)`."""
    running = current()
    with _making:
        steps = running.steps
        if steps is None:
            steps = running.steps = Steps(running)
    subject = args[0] if function is asyncio.to_thread and args else function
    asynchronous = _is_async(function)
    call = StepCall(steps, _name_of(subject) if name is None else name, subject)
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
        self._changed: StepsChanged | None = None
        self._stored: set[int] = set()

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
        found = read_steps(self.engine.ledger, self.running.id, self.running.record.seq)
        with self._lock:
            self._recorded = found if self._recorded is None else self._recorded

    def recorded(self, number: int, name: str) -> StepRecord | None:
        """The record of a step, if an earlier attempt has made one. Raises `StepsChanged`."""
        assert self._recorded is not None
        record = self._recorded.get(number)
        if record is not None and record.name != name:
            self._changed = self._changed or StepsChanged(
                id=self.running.id, number=number, recorded=record.name, came=name
            )
        if self._changed is not None:
            raise self._changed
        return record

    def progress(self, number: int, record: StepRecord) -> Progress:
        """The command that stores a record."""
        content = _encode(record)
        if len(content) > checks.MAX_NOTE:
            error = InvalidInput(
                field=f"the result of step {record.name}",
                value=Described(f"{len(content)} bytes"),
                expected=f"at most {checks.MAX_NOTE} bytes; store it elsewhere and return where it is",
            )
            raise Fail(str(error)) from error
        with self._lock:
            self._stored.add(number)
        note = Note(key=step_key(self.running.id, number), value=content, ttl=STATE_TTL)
        return Progress(self.running.id, self.running.fence, notes=(note,))

    def commit(self, command: Progress) -> None:
        """Commit a record; returns when it is durable."""
        with self._refusals():
            try:
                reply = self.engine.call(command)
            except TowpathError as error:
                if not error.retryable:
                    raise
                # The function has run: wait until the ledger is back, as a settle does.
                [reply] = self.engine.call_all([command], retried=True)
            self._received(reply)

    async def acommit(self, command: Progress) -> None:
        with self._refusals():
            try:
                reply = await self.engine.acall(command)
            except TowpathError as error:
                if not error.retryable:
                    raise
                [reply] = await self.engine.acall_all([command], retried=True)
            self._received(reply)

    def _received(self, reply: Result) -> None:
        self.running.on_reply(reply)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except LostClaim as lost:
            self.running.on_reply(lost)
            raise StopRequested(Reason.LOST) from lost

    def deletions(self) -> tuple[Note, ...]:
        """The notes that the settle of a job that is done deletes."""
        numbers = sorted(self._stored | (self._recorded or {}).keys())
        return tuple([Note(key=step_key(self.running.id, number), value=None) for number in numbers])


class StepCall:
    """One call of `step`."""

    __slots__ = ("_codec", "_result", "_steps", "name", "number")

    def __init__(self, steps: Steps, name: str, subject: Callable[..., Any]) -> None:
        checks.text("name", name, least=1)
        self._steps, self.name, self.number = steps, name, 0
        self._codec = _codec_of(subject)
        self._result: bytes | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        steps = self._steps
        if steps.unread:
            steps.read()
        if not self._finished_before():
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
            with self._running():
                value = await function(*args, **kwargs)
            await steps.acommit(self._finish(value))
        return self._codec.decode_result(self._result)

    def _finished_before(self) -> bool:
        """True if an earlier attempt kept the result. Else the function runs now, unless the job is asked to
        stop."""
        record = self._steps.recorded(self.number, self.name)
        if record is not None and record.result is not UNSET:
            self._result = bytes(record.result)
            return True
        self._steps.running.check()
        return False

    @contextmanager
    def _running(self) -> Iterator[None]:
        token = _inside.set(self.name)
        try:
            yield
        finally:
            _inside.reset(token)

    def _finish(self, value: Any) -> Progress:
        """The command that keeps the result. The handler gets the value that a later attempt would read, so
        that both see the same types."""
        try:
            self._result = self._codec.encode_result(value)
            self._codec.decode_result(self._result)
        except InvalidInput as error:
            raise Fail(str(error)) from error
        result = Raw(b"null" if self._result is None else self._result)
        record = StepRecord(self._steps.running.record.seq, self.name, result)
        return self._steps.progress(self.number, record)


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
