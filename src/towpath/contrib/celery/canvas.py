"""Signatures, chains, groups and chords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from towpath import JobHandle
from towpath.contrib.celery.options import CALL_OPTIONS, check_options
from towpath.contrib.celery.results import AsyncResult, GroupResult
from towpath.errors import InvalidInput

if TYPE_CHECKING:
    from towpath.contrib.celery.app import Celery, CeleryTask


class Signature:
    """A call that is not enqueued yet."""

    def __init__(
        self,
        task: CeleryTask,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        immutable: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_options(f"call of {task.name}", options or {}, CALL_OPTIONS)
        self.task = task
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.immutable = immutable
        self.options = dict(options or {})

    def __repr__(self) -> str:
        return f"{self.task.name}({', '.join(map(repr, self.args))})"

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        return Signature(
            self.task,
            self.args,
            self.kwargs,
            self.immutable if immutable is None else immutable,
            {**self.options, **options},
        )

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Signature:
        """The same call with these arguments in front."""
        return Signature(
            self.task,
            (*args, *self.args),
            {**self.kwargs, **(kwargs or {})},
            self.immutable,
            {**self.options, **options},
        )

    def __or__(self, other: Step) -> chain | chord:
        return chain(self, other)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it here."""
        return self.task(*args, *self.args, **{**self.kwargs, **kwargs})

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        return self.clone(args, kwargs).apply_async()

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        call = self.clone(args, kwargs, **options)
        app = self.task.app
        if app.conf.get("task_always_eager"):
            result = call.task.apply(call.args, call.kwargs)
            if app.conf.get("task_eager_propagates") and result.failed():
                result.get()
            return result
        return AsyncResult(call._enqueue((), 0).id, app)

    def _enqueue(self, after: Sequence[JobHandle[Any]], takes: int) -> JobHandle[Any]:
        options = self.task.app._call_options(self.task, self.options)
        if after:
            options["after"] = list(after)
        task = self.task.towpath.options(**options)
        return task.enqueue(list(self.args), self.kwargs, 0 if self.immutable else takes)


def _empty(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, value=None, expected="complete", message=message)


class chain:
    """Calls one after the other; a group inside runs side by side, and the next call gets all its results."""

    def __init__(self, *steps: Step | Iterable[Step]) -> None:
        flat: list[Step] = []
        for step in (
            steps if len(steps) != 1 or isinstance(steps[0], (Signature, group, chord, chain)) else steps[0]
        ):
            flat += step.steps if isinstance(step, chain) else [cast(Step, step)]
        if not flat:
            raise _empty("chain", "a chain needs at least one signature: chain(task.s(1))")
        self.steps: list[Step] = flat

    def __or__(self, other: Step) -> chain:
        return chain(self, other)

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncResult | GroupResult:
        return self.apply_async(args, kwargs)

    delay = __call__

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> AsyncResult | GroupResult:
        app = _app_of(self.steps[0])
        with app.towpath.batch():
            before: list[JobHandle[Any]] = []
            takes = 0
            for n, step in enumerate(_flattened(self.steps)):
                calls = step if isinstance(step, list) else [step]
                if n == 0 and (args or kwargs):
                    calls = [call.clone(args, kwargs) for call in calls]
                before = [call._enqueue(before, takes) for call in calls]
                takes = 2 if isinstance(step, list) else 1
        results = [AsyncResult(handle.id, app) for handle in before]
        return results[0] if takes == 1 else GroupResult(results)


class group:
    """Calls side by side."""

    def __init__(self, *calls: Signature | Iterable[Signature]) -> None:
        found: list[Signature] = []
        for each in calls:
            found += [each] if isinstance(each, Signature) else list(each)
        if not found:
            raise _empty("group", "a group needs at least one signature: group([task.s(1)])")
        self.tasks = found

    def __or__(self, other: Signature) -> chord:
        return chord(self, other)

    def __call__(self, *args: Any, **kwargs: Any) -> GroupResult:
        return self.apply_async(args, kwargs)

    delay = __call__

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> GroupResult:
        return cast(GroupResult, chain(self).apply_async(args, kwargs))


class chord:
    """Calls side by side, then one call with the list of their results: `chord(header)(body)`."""

    def __init__(self, header: group | Iterable[Signature], body: Signature | None = None) -> None:
        self.header = header if isinstance(header, group) else group(header)
        self.body = body

    def __or__(self, other: Step) -> chain:
        return chain(self, other)

    def __call__(self, body: Signature | None = None) -> AsyncResult:
        return self.apply_async(body=body)

    def delay(self) -> AsyncResult:
        return self.apply_async()

    def apply_async(self, args: Sequence[Any] = (), body: Signature | None = None) -> AsyncResult:
        last = body or self.body
        if last is None:
            raise _empty("chord", "a chord needs a body: chord(header)(callback.s())")
        return cast(AsyncResult, chain(self.header, last).apply_async(args))


Step = Signature | chain | group | chord


def _flattened(steps: Iterable[Step]) -> list[Signature | list[Signature]]:
    """The steps in order; a list is a group. Each call of a step waits for all calls of the step before."""
    flat: list[Signature | list[Signature]] = []
    for step in steps:
        if isinstance(step, chain):
            flat += _flattened(step.steps)
        elif isinstance(step, chord):
            flat += _flattened([step.header, *([step.body] if step.body else [])])
        else:
            flat.append(list(step.tasks) if isinstance(step, group) else step)
    return flat


def _app_of(step: Step) -> Celery:
    if isinstance(step, Signature):
        return step.task.app
    inner: Step = (
        step.tasks[0]
        if isinstance(step, group)
        else step.header
        if isinstance(step, chord)
        else step.steps[0]
    )
    return _app_of(inner)
