"""The options of a task (`@app.task(...)`) and of one call (`task.options(...)`), and their spec fields."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.breaker import Breaker
from towpath.core.job import PRIORITIES, After, Key, KeyPolicy, rank
from towpath.core.retry import Backoff, Exponential, Fixed, Listed, Policy
from towpath.errors import InvalidInput
from towpath.tasks import mistakes
from towpath.tasks.codec import Codec
from towpath.tasks.handles import GroupHandle, JobHandle
from towpath.tasks.hooks import FailureFunction
from towpath.tasks.outcomes import Span

Naming = str | Callable[..., str]
"""A name from a call's arguments: a template such as `"user-{user_id}"`, or a function of the same
parameters."""
Dependency = JobHandle[Any] | GroupHandle[Any] | After | str
Conflict = Literal["keep", "replace", "serial"]


class TaskOptions(TypedDict, total=False):
    """The options of `@app.task(...)`. Spans are seconds or timedeltas."""

    name: str
    queue: str
    max_attempts: int
    backoff: Span | Sequence[Span] | Backoff | Policy
    timeout: Span | None
    priority: int | str
    unique: bool | Naming
    part: Naming | None
    retention: Span | None
    process: bool
    breaker: str | Breaker | None
    route: Naming | None
    resource: str | None
    on_failure: FailureFunction
    on_dead: FailureFunction


class CallOptions(TypedDict, total=False):
    """The options of `task.options(...)`. Spans are seconds or timedeltas. `on` is a connection of yours to
    the ledger's database: the job is part of its transaction."""

    on: Any
    delay: Span
    at: datetime
    ttl: Span
    priority: int | str
    queue: str
    part: Naming | None
    after: Iterable[Dependency] | Dependency
    key: str
    on_conflict: Conflict
    window: Span
    group: GroupHandle[Any] | str
    headers: Mapping[str, str]
    correlation_id: str | None
    max_attempts: int
    timeout: Span | None
    retention: Span | None
    id: str


_OF_TASKS = {
    name: f"it is an option of the task: write @app.task({name}=...)"
    for name in TaskOptions.__annotations__.keys() - CallOptions.__annotations__.keys()
}
_OF_CALLS = {
    name: f"it is an option of a call: write task.options({name}=...).enqueue(...)"
    for name in CallOptions.__annotations__.keys() - TaskOptions.__annotations__.keys()
}
"""The options that are given at the other place, and where that is."""

POLICIES: Mapping[str, KeyPolicy] = {
    "keep": KeyPolicy.UNIQUE,
    "replace": KeyPolicy.REPLACE,
    "serial": KeyPolicy.SERIAL,
}


class Terms(msgspec.Struct, frozen=True):
    """The fields of a task's jobs that do not depend on the arguments. `fields` are fields of `Spec`."""

    kind: str
    fields: Mapping[str, Any] = {}
    unique: bool | Naming = False
    part: Naming | None = None
    route: Naming | None = None
    key: str | None = None
    policy: KeyPolicy = KeyPolicy.UNIQUE
    window: int = 0

    named: bool = False
    """True if the arguments determine a key, a part or the queue."""

    def __post_init__(self) -> None:
        force_setattr(
            self,
            "named",
            any(each not in (None, False) for each in (self.unique, self.part, self.key, self.route)),
        )


def task_terms(kind: str, options: TaskOptions, priorities: Mapping[str, int] = PRIORITIES) -> Terms:
    """`priorities`: the names that a priority may have; one that is left out is `normal`."""
    mistakes.check_options(options, TaskOptions.__annotations__, f"task {kind}", _OF_CALLS)
    checks.text("name", kind, least=1)
    queue = options.get("queue", "default")
    checks.name("queue", queue)
    route = options.get("route")
    if route is not None and not (callable(route) or isinstance(route, str)):
        raise InvalidInput(
            field=f"route of {kind}",
            value=route,
            expected="a function of its parameters, or a template of them",
        )
    if options.get("resource") is not None:
        checks.name(f"resource of {kind}", options["resource"])
    fields: dict[str, Any] = {
        "queue": queue,
        "priority": priorities["normal"],
        **_common(options, priorities),
    }
    breaker = breaker_of(options.get("breaker"))
    if breaker is not None and options.get("part") is None:
        fields["part"] = breaker.part
    return Terms(
        kind=kind, fields=fields, unique=options.get("unique", False), part=options.get("part"), route=route
    )


def call_terms(terms: Terms, options: CallOptions, priorities: Mapping[str, int] = PRIORITIES) -> Terms:
    """A copy with these options. The error of a wrong value names the field."""
    mistakes.check_options(options, CallOptions.__annotations__, f"a call of {terms.kind}", _OF_TASKS)
    given = cast(Mapping[str, object], options)
    if "key" not in options and terms.key is None and terms.unique in (None, False):
        for each in sorted(given.keys() & {"on_conflict", "window"}):
            example = f"options(key=..., {each}=...), or @app.task(unique=True)"
            raise checks.without_key(each, given[each], example)
    fields = {**terms.fields, **_common(options, priorities), **_when(options)}
    checks.optional_text("id", options.get("id"))
    for name in ("queue", "correlation_id", "id"):
        if name in options:
            fields[name] = options[name]
    if "part" in options and "part" in fields:
        message = (
            f"task {terms.kind} takes no part here, because its breaker has the part: "
            "give the task a part and a queue of its own"
        )
        raise InvalidInput(field="part", value=options["part"], expected="left out", message=message)
    headers = {**fields.get("headers", {}), **options.get("headers", {})}
    if "after" in options:
        fields["after"] = dependencies(options["after"])
    if headers:
        fields["headers"] = headers
    if "group" in options:
        group = options["group"]
        fields["group"] = group.id if isinstance(group, GroupHandle) else group
    checks.optional_text("key", options.get("key"), checks.MAX_KEY)
    policy = POLICIES.get(options.get("on_conflict", "keep"))
    if policy is None:
        raise InvalidInput(
            field="on_conflict", value=options["on_conflict"], expected="keep, replace or serial"
        )
    return Terms(
        kind=terms.kind,
        fields=fields,
        unique=terms.unique,
        part=options.get("part", terms.part),
        route=None if "queue" in options else terms.route,
        key=options.get("key", terms.key),
        policy=policy if "on_conflict" in options else terms.policy,
        window=checks.micros(options["window"], "window") if "window" in options else terms.window,
    )


def breaker_of(given: str | Breaker | None) -> Breaker | None:
    """A breaker from its name, with the default settings, or from its settings."""
    return given if given is None or isinstance(given, Breaker) else Breaker(given)


def names(terms: Terms, codec: Codec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that depend on the arguments: key, part and queue."""
    fields: dict[str, Any] = {}
    if terms.key is not None:
        fields["key"] = Key(terms.key, terms.policy, terms.window)
    elif terms.unique is True:
        digest = hashlib.blake2b(codec.canonical(codec.full(arguments)), digest_size=16).hexdigest()
        fields["key"] = Key(f"{terms.kind}:{digest}", terms.policy, terms.window)
    elif terms.unique is not None and terms.unique is not False:
        fields["key"] = Key(
            f"{terms.kind}:{_named(terms.unique, 'unique', codec, arguments)}", terms.policy, terms.window
        )
    if terms.part is not None:
        fields["part"] = _named(terms.part, "part", codec, arguments)
    if terms.route is not None:
        fields["queue"] = _named(terms.route, "route", codec, arguments)
        checks.name(f"route of {codec.name}", fields["queue"])
    return fields


def _named(naming: Naming, field: str, codec: Codec, arguments: Mapping[str, Any]) -> str:
    if not callable(naming):
        try:
            name = naming.format_map(codec.full(arguments))
        except (LookupError, ValueError, AttributeError) as error:
            expected = f"a template of its parameters ({', '.join(codec.parameters)}): {error!r}"
            raise InvalidInput(field=f"{field} of {codec.name}", value=naming, expected=expected) from error
    else:
        args, kwargs = codec.spread(arguments)
        name = naming(*args, **kwargs)
    checks.text(f"{field} of {codec.name}", name, checks.MAX_KEY, least=1)
    return name


def policy_of(backoff: Span | Sequence[Span] | Backoff | Policy | None) -> Policy:
    """A retry policy from seconds, a list of seconds, a backoff, or a policy."""
    if backoff is None:
        return Policy()
    if isinstance(backoff, Policy):
        return backoff
    if isinstance(backoff, Exponential | Fixed | Listed):
        return Policy(default=backoff)
    if isinstance(backoff, str | bytes) or not isinstance(backoff, Sequence | int | float | timedelta):
        expected = "a number of seconds, a list of them, a backoff or a policy"
        raise InvalidInput(field="backoff", value=backoff, expected=expected)
    if isinstance(backoff, Sequence):
        if not backoff:
            raise InvalidInput(field="backoff", value=backoff, expected="a list of at least one delay")
        return Policy(default=Listed(tuple(checks.seconds("backoff", each) for each in backoff)))
    return Policy(default=Fixed(checks.seconds("backoff", backoff)))


def dependencies(given: Iterable[Dependency] | Dependency) -> tuple[After, ...]:
    """One or many dependencies, as `After` values."""
    if isinstance(given, JobHandle | GroupHandle | After | str):
        return (_dependency(given),)
    if not isinstance(given, Iterable):
        raise _no_dependency(given)
    return tuple(_dependency(each) for each in given)


def _dependency(given: Dependency) -> After:
    if isinstance(given, After):
        return given
    if isinstance(given, JobHandle | GroupHandle):
        return After(given.id, group=isinstance(given, GroupHandle))
    if isinstance(given, str):
        return After(given)
    raise _no_dependency(given)


def _no_dependency(given: object) -> InvalidInput:
    return InvalidInput(field="after", value=given, expected="a job, a group, an id or a list of them")


def _common(options: TaskOptions | CallOptions, priorities: Mapping[str, int]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "max_attempts" in options:
        checks.whole("max_attempts", options["max_attempts"], 1, 1_000_000)
        fields["max_attempts"] = options["max_attempts"]
    if "priority" in options:
        fields["priority"] = rank(options["priority"], priorities)
    if "timeout" in options:
        fields["timeout"] = _span("timeout", options["timeout"])
    if "retention" in options:
        fields["retention"] = _span("retention", options["retention"])
    return fields


def _when(options: CallOptions) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "delay" in options and "at" in options:
        message = "delay and at exclude each other: leave one of them out"
        raise InvalidInput(field="at", value=options["at"], expected="left out", message=message)
    if "delay" in options:
        fields["delay"] = checks.micros(options["delay"], "delay")
        fields["ready_at"] = None
    if "at" in options:
        fields["ready_at"] = checks.moment(options["at"], "at")
        fields["delay"] = fields.get("delay", 0)
    if "ttl" in options:
        fields["ttl"] = checks.some_micros(options["ttl"], "ttl")
    return fields


def _span(field: str, value: Span | None) -> int | None:
    if value is None:
        return None
    return checks.some_micros(value, field) if field == "timeout" else checks.micros(value, field)


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
