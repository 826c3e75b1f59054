"""Hooks: functions of a program around its work. A `lifespan` surrounds the work of a process, a `middleware`
surrounds each attempt, `on_failure` and `on_dead` are called after a failure.

Here they are declared and checked. `active_hooks.py` opens and calls them."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar, get_args, get_origin, get_type_hints

from towpath.errors import InvalidInput

if TYPE_CHECKING:
    from towpath.tasks.handles import JobHandle

if TYPE_CHECKING:
    from towpath.tasks.context import Running
    from towpath.tasks.task import Task


class Provided:
    """The default of a parameter that a worker fills in by the parameter's type, such as
    `def ship(order: int, engine: Engine = provided)`. The parameter is not an argument of the job."""

    def __repr__(self) -> str:
        return "provided"


provided: Any = Provided()


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A failed attempt, or a job that became a dead letter because its lease was lost too often."""

    job: JobHandle[Any]
    kind: str
    queue: str
    attempt: int
    error: str
    """The stored error: one line, then the traceback. After a loss, a line with the number of losses."""
    exception: BaseException | None
    """None if the handler ran in a process of its own, or after a loss."""
    dead: bool
    """True if the job is a dead letter now; False if it will be tried again, or was canceled."""


FailureFunction = Callable[Concatenate[JobFailure, ...], object]
L = TypeVar("L", bound=Callable[..., Iterator[Any] | AsyncIterator[Any]])
M = TypeVar("M", bound=Callable[Concatenate["Running", ...], Iterator[Any] | AsyncIterator[Any]])
F = TypeVar("F", bound=FailureFunction)


@dataclass(frozen=True, slots=True)
class Hook:
    """A declared function. `what` is its role and name, for messages."""

    function: Callable[..., Any]
    what: str
    is_async: bool


class Hooks:
    """The hooks of an app: `hooks = Hooks()`, `App(url, hooks=hooks)`. A worker uses the hooks that
    are declared when it starts. Parameters with the default `provided` are filled in by their type."""

    def __init__(self) -> None:
        self.lifespans: list[Hook] = []
        self.middlewares: list[Hook] = []
        self.failure_hooks: list[Hook] = []
        self.dead_hooks: list[Hook] = []
        self.last_lost: object = None
        """The last event of lost jobs that was handled."""

    def __bool__(self) -> bool:
        return bool(self.lifespans or self.middlewares or self.failure_hooks or self.dead_hooks)

    def lifespan(self, function: L) -> L:
        """A generator with one `yield`, sync or async. The part before the `yield` runs when a process starts
        to work, the part behind it when the process stops: in reverse order, also after a failure. What it
        yields is provided by the type in its return annotation: `-> Iterator[Engine]`."""
        self.lifespans.append(_generator("lifespan", function, 0))
        return function

    def middleware(self, function: M) -> M:
        """A generator with one `yield` around each attempt, sync or async; the first one is the outermost.
        Its first parameter is the running job. The `yield` returns the result of the handler or raises its
        exception. If its return annotation names a type (`-> Iterator[Session]`), it surrounds only the
        handlers that need the type, and they are provided with what it yields."""
        self.middlewares.append(_generator("middleware", function, 1))
        return function

    def on_failure(self, function: F) -> F:
        """Call the function with a `JobFailure` after each failed attempt of each task, once its outcome is
        stored: at most once."""
        self.failure_hooks.append(failure_hook("on_failure", function))
        return function

    def on_dead(self, function: F) -> F:
        """Call the function with a `JobFailure` after a job of any task has become a dead letter: at most
        once, in the process that stored it."""
        self.dead_hooks.append(failure_hook("on_dead", function))
        return function


def failure_hook(what: str, function: Callable[..., object]) -> Hook:
    """A function for `on_failure` or `on_dead`, checked."""
    hook = _hook(what, function, 1)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidInput(field=hook.what, value=function, expected="a function without `yield`")
    return hook


def provided_parameters(function: Callable[..., Any], what: str) -> tuple[str, ...]:
    """The parameters with the default `provided`. Other parameters may follow them only by keyword: the
    position of an argument is the same for the caller of `enqueue` and for the handler."""
    found: list[str] = []
    for each in inspect.signature(function).parameters.values():
        if each.default is provided:
            found.append(each.name)
            if each.annotation is Parameter.empty:
                field, expected = f"{what}({each.name})", "annotated with the type that is to be provided"
                message = f"{field} has the default `provided`; it must be {expected}"
                raise InvalidInput(field=field, value=provided, expected=expected, message=message)
            misplaced = each.kind is Parameter.POSITIONAL_ONLY
        else:
            by_position = each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
            misplaced = by_position and bool(found)
        if misplaced:
            field, expected = f"{what}({found[-1]})", "behind all other parameters, or behind `*`"
            message = f"{field} has the default `provided`; it must be {expected}"
            raise InvalidInput(field=field, value=provided, expected=expected, message=message)
    return tuple(found)


def _generator(what: str, function: Callable[..., Any], given: int) -> Hook:
    hook = _hook(what, function, given)
    if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        expected = "a generator function with one `yield` (without @contextmanager)"
        raise InvalidInput(field=hook.what, value=function, expected=expected)
    return hook


def _hook(what: str, function: Callable[..., Any], given: int) -> Hook:
    if not callable(function):
        raise InvalidInput(field=what, value=function, expected="a function")
    name = f"{what} {getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    try:
        inspect.signature(function).bind(*[None] * given)
    except TypeError as error:
        first = "one parameter" if given else "no parameters"
        expected = f"a function of {first}, and of others with the default `provided` ({error})"
        raise InvalidInput(field=name, value=function, expected=expected) from None
    provided_parameters(function, name)
    is_async = inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)
    return Hook(function, name, is_async)


# Values by type

_YIELDING = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


@dataclass(frozen=True, slots=True)
class Provider:
    """A hook with its types: the type that it provides (None: nothing), and the type of each parameter that
    is provided to it."""

    hook: Hook
    provides: Any
    needs: Mapping[str, Any]

    def call(self, values: Mapping[Any, Any], *given: Any) -> Any:
        return self.hook.function(*given, **pick(self.needs, values))


def pick(needs: Mapping[str, Any], values: Mapping[Any, Any]) -> dict[str, Any]:
    return {parameter: values[kind] for parameter, kind in needs.items()}


def hints_of(function: Callable[..., Any], what: str) -> dict[str, Any]:
    """The annotations of a function as types. Raises InvalidInput, caused by a NameError, if one cannot be
    looked up (yet)."""
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as error:
        message = (
            f"{what} has an annotation that cannot be looked up when the program runs ({error}): "
            "define or import the type in its module"
        )
        raise InvalidInput(
            field=what, value=function, expected="known annotations", message=message
        ) from error


def needs_of(function: Callable[..., Any], what: str) -> dict[str, Any]:
    """The provided parameters of a function, with their types."""
    names = provided_parameters(function, what)
    hints = hints_of(function, what) if names else {}
    return {name: hints[name] for name in names}


def _provider(hook: Hook, yields: bool) -> Provider:
    kind = None
    if yields and (hint := hints_of(hook.function, hook.what).get("return")) is not None:
        if get_origin(hint) not in _YIELDING:
            expected = "Iterator[...] or AsyncIterator[...] with the type that it yields"
            raise InvalidInput(field=f"return annotation of {hook.what}", value=hint, expected=expected)
        kind = get_args(hint)[0]
    return Provider(hook, None if kind in (NoneType, Any) else kind, needs_of(hook.function, hook.what))


class HookPlan:
    """The hooks in the order of their use. Raises InvalidInput if a type has no provider, or two. `replaced`
    has values by type, which are used instead of the hooks' values."""

    def __init__(self, hooks: Hooks, replaced: Mapping[Any, Any]) -> None:
        self._providers: dict[Any, str] = {}
        self.lifespans = [self._add(_provider(hook, True)) for hook in hooks.lifespans]
        self._of_process = frozenset(self._providers)
        self.middlewares = [self._add(_provider(hook, True)) for hook in hooks.middlewares]
        for kind in replaced:
            self._check("app.testing(provided=...)", kind)
        self.lifespans = [each for each in self.lifespans if each.provides not in replaced]
        self.middlewares = [each for each in self.middlewares if each.provides not in replaced]

    def _add(self, provider: Provider) -> Provider:
        what, kind = provider.hook.what, provider.provides
        for parameter, needed in provider.needs.items():
            self._check(f"{what}({parameter})", needed)
        if kind in self._providers:
            message = f"{what} and {self._providers[kind]} provide the same type, {_shown(kind)}"
            raise InvalidInput(field=what, value=kind, expected="a type of its own", message=message)
        if kind is not None:
            self._providers[kind] = what
        return provider

    def _check(self, field: str, kind: Any) -> None:
        if kind not in self._providers:
            raise _no_provider(field, kind, "lifespan or middleware", self._providers)

    def needs(self, task: Task[..., Any]) -> dict[str, Any]:
        """The provided parameters of a task, with their types."""
        needs = needs_of(task.function, f"task {task.kind}")
        for parameter, kind in needs.items():
            self._check(f"{task.kind}({parameter})", kind)
        return needs

    def failure_hook(self, hook: Hook) -> Provider:
        """A hook for failures. It is called outside of attempts, without the values of middleware."""
        provider = _provider(hook, False)
        for parameter, kind in provider.needs.items():
            if kind not in self._of_process:
                raise _no_provider(f"{hook.what}({parameter})", kind, "lifespan", self._of_process)
        return provider

    def layers(self, needs: Iterable[Any]) -> list[Provider]:
        """The middleware of a handler that needs these types, the outermost first."""
        needed, layers = set(needs), []
        for each in reversed(self.middlewares):
            if each.provides is None or each.provides in needed:
                layers.append(each)
                needed |= set(each.needs.values())
        return layers[::-1]


def _no_provider(field: str, kind: Any, hooks: str, known: Iterable[Any]) -> InvalidInput:
    names = ", ".join(map(_shown, known)) or "none"
    expected = f"a type that a {hooks} declared before it provides ({names})"
    message = (
        f"{field} needs {_shown(kind)}, which no {hooks} declared before it provides. "
        f"Provided types: {names}. Declare `@hooks.lifespan` with the return annotation "
        f"`Iterator[{_shown(kind)}]` and pass the Hooks to the App."
    )
    return InvalidInput(field=field, value=kind, expected=expected, message=message)


def _shown(kind: Any) -> str:
    return getattr(kind, "__qualname__", None) or str(kind)
