"""Schedules as the code declares them: `@app.cron(...)` and `@app.every(...)`. They are written down when a worker starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from towpath.core import checks
from towpath.core.schedule import Missed, Schedule, every_of, missed_of
from towpath.errors import InvalidInput
from towpath.schedules import Host, by_name, register
from towpath.tasks.task import AsyncTask, Task

P = ParamSpec("P")
R = TypeVar("R")

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._\-/:@]+")


class CronOptions(TypedDict, total=False):
    """`name` (else the task's), the time zone `tz` (else UTC), what becomes of fires that were `missed`, and the arguments."""

    name: str
    tz: str
    missed: Literal["skip", "once", "all"]
    args: Mapping[str, Any]


class Scheduled(Protocol):
    """What `app.cron(...)` gives: a task stays the task it is, a function becomes one."""

    @overload
    def __call__(self, function: AsyncTask[P, R], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Task[P, R], /) -> Task[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]: ...


def make_schedule(task: Task[..., Any], options: CronOptions, *, cron: str | None = None, every: int | None = None) -> Schedule:
    """The schedule of a task. Its arguments are checked now, not when it fires."""
    unknown = sorted(set(options) - set(CronOptions.__annotations__))
    if unknown:
        expected = f"one of {', '.join(CronOptions.__annotations__)}"
        raise InvalidInput(field=f"options of the schedule of {task.kind}", value=unknown[0], expected=expected)
    name = options.get("name") or _NOT_IN_A_NAME.sub("-", task.kind)
    checks.name("name", name)
    # The id is never used; it must be the same each time the code declares the same.
    spec = task.of(**by_name(options.get("args", {}))).spec(id=f"schedule/{name}")
    missed = missed_of(options.get("missed", Missed.SKIP))
    return Schedule(name=name, spec=spec, cron=cron, every=every, tz=options.get("tz", "UTC"), missed=missed)


def from_settings(tasks: Mapping[str, Task[..., Any]], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Schedule]:
    """The schedules of a settings file: the `task` by its name, `cron` or `every` (seconds), and the options of `@app.cron`."""
    found: dict[str, Schedule] = {}
    for name, table in tables.items():
        task = tasks.get(table.get("task", ""))
        if task is None:
            expected = f"with the name of a task: {', '.join(sorted(tasks)) or 'there is none'}"
            raise InvalidInput(field=f"the task of schedule {name}", value=table.get("task"), expected=expected)
        if ("cron" in table) == ("every" in table):
            raise InvalidInput(field=f"schedule {name}", value=dict(table), expected="with either cron or every")
        every = every_of(table["every"]) if "every" in table else None
        options: Any = {key: value for key, value in table.items() if key in CronOptions.__annotations__} | {"name": name}
        found[name] = make_schedule(task, options, cron=table.get("cron"), every=every)
    return found


def write_down(host: Host, schedules: Mapping[str, Schedule]) -> None:
    """Tell the ledger what the code declares."""
    for schedule in schedules.values():
        register(host, schedule)
