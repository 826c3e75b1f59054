"""Schedules: recurring jobs. They are notes in the ledger, fired exactly once by any number of workers.

The note `schedule/<name>` holds the definition and the time of the next fire. A fire appends a job with an id
that is derived from the name and the fire time, then stores the next fire by compare-and-set: a repeated
append, after a crash or by another worker, adds nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, Final, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import msgspec
from msgspec.structs import replace

from towpath.core import checks
from towpath.core.checks import FOREVER, SECOND
from towpath.core.commands import Append, Appended
from towpath.core.ids import derived
from towpath.core.job import Spec
from towpath.core.schedule import (
    SCHEDULES,
    Missed,
    Schedule,
    ScheduleStatus,
    either_cron_or_every,
    every_of,
    missed_of,
    next_fire,
    plan,
    schedule_status,
)
from towpath.core.views import NoteView
from towpath.errors import InvalidInput, NoteConflict, Refused
from towpath.escapes import get_logger
from towpath.events import ScheduleFired
from towpath.ledger import Ledger
from towpath.runtime.engine import Engine
from towpath.tasks.new_jobs import new_id
from towpath.tasks.task import AsyncTask, Task

__all__ = [
    "Missed",
    "Schedule",
    "ScheduleStatus",
    "Scheduler",
    "Schedules",
    "get_schedule",
    "list_schedules",
    "next_fire",
    "pause",
    "register",
    "remove",
    "resume",
    "set_schedule",
    "trigger",
]

log = get_logger("towpath.schedules")

SCHEDULED_AT: Final = "scheduled-at"
"""The header of a fired job with its scheduled time (ISO 8601, UTC)."""
MANY: Final = 100
LIST_PAUSE: Final = SECOND // 1000
"""More schedules than `MANY` are read at most once in so many times this pause as there are schedules, also
after a commit, so that a busy ledger does not read them all the time."""


def register(engine: Engine, schedule: Schedule) -> Schedule:
    """Store the declared schedule, if the declaration has changed. The next fire stays unless the times
    changed, and so does a pause. Concurrent registrations have the same result."""
    declared = schedule.definition()

    def change(old: Schedule | None) -> Schedule:
        if old is not None and old.declared == declared:
            return old
        same = old is not None and old.times == schedule.times
        return replace(
            schedule,
            paused=schedule.paused if old is None else old.paused,
            next_at=old.next_at if old is not None and same else next_fire(schedule, engine.clock.now()),
            last_at=None if old is None else old.last_at,
            declared=declared,
        )

    return _edited(engine, schedule.name, change)


def list_schedules(engine: Engine) -> list[Schedule]:
    """All schedules, by name."""
    found = [_decode(view) for _, view in SCHEDULES.views(engine.ledger)]
    return [schedule for schedule in found if schedule is not None]


def get_schedule(engine: Engine, name: str) -> Schedule:
    return _known(engine, name, _decode(engine.ledger.note(SCHEDULES.key(name))))


def pause(engine: Engine, name: str) -> Schedule:
    return _edited(engine, name, lambda old: replace(_known(engine, name, old), paused=True))


def resume(engine: Engine, name: str) -> Schedule:
    """Resume from the next time on: fires during the pause were not missed."""

    def change(old: Schedule | None) -> Schedule:
        old = _known(engine, name, old)
        return replace(old, paused=False, next_at=next_fire(old, engine.clock.now())) if old.paused else old

    return _edited(engine, name, change)


def set_schedule(
    engine: Engine,
    name: str,
    *,
    cron: str | None = None,
    every: float | timedelta | None = None,
    tz: str | None = None,
    missed: str | None = None,
    args: Mapping[str, Any] | None = None,
) -> Schedule:
    """Change the given fields. The change stays until the code declares something new."""
    if cron is not None and every is not None:
        raise either_cron_or_every(f"schedule {name}", {"cron": cron, "every": every})
    changes: dict[str, Any] = {} if tz is None else {"tz": tz}
    if cron is not None or every is not None:
        changes |= {"cron": cron, "every": None if every is None else every_of(every)}
    if missed is not None:
        changes["missed"] = missed_of(missed)

    def change(old: Schedule | None) -> Schedule:
        old = _known(engine, name, old)
        spec = (
            old.spec
            if args is None
            else replace(old.spec, payload=_payload(args), content_type="application/json")
        )
        new = replace(old, spec=spec, **changes)
        return new if new.times == old.times else replace(new, next_at=next_fire(new, engine.clock.now()))

    return _edited(engine, name, change)


def remove(engine: Engine, name: str) -> None:
    """Delete a schedule. Code that still declares it stores it again at its next start: pause it instead."""

    if engine.ledger.note(SCHEDULES.key(name)) is None:
        _known(engine, name, None)
    _edit(engine, name, lambda old: None)


def trigger(engine: Engine, name: str, id: str | None = None) -> str:
    """Append one job now, regardless of the times; return its id."""
    schedule, id = get_schedule(engine, name), id or new_id()
    engine.committer.call(Append((_job(schedule, id, engine.clock.now()),)))
    return id


class Changes(TypedDict, total=False):
    """The fields of `Schedules.set`: `cron` or `every` (seconds), the time zone `tz`, the policy for `missed`
    fires, the arguments."""

    cron: str
    every: float | timedelta
    tz: str
    missed: Literal["skip", "once", "all"]
    args: Mapping[str, Any]


All = list[ScheduleStatus]
Arguments = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""The arguments of a kind of jobs as plain JSON. Raises InvalidInput if they do not fit."""


class Schedules:
    """The schedules in the ledger: `app.schedules`. Programs declare them, and a worker stores them when it
    starts; a change made here stays until the code declares something new. An unknown name raises
    `InvalidInput`."""

    def __init__(self, engine: Engine, arguments: Arguments) -> None:
        self._engine = engine
        self._arguments = arguments

    def get(self, name: str) -> ScheduleStatus:
        return schedule_status(get_schedule(self._engine, name))

    async def aget(self, name: str) -> ScheduleStatus:
        return await asyncio.to_thread(self.get, name)

    def list(self) -> All:
        """All schedules, by name."""
        return [schedule_status(each) for each in list_schedules(self._engine)]

    async def alist(self) -> All:
        return await asyncio.to_thread(self.list)

    def pause(self, name: str) -> ScheduleStatus:
        """Stop the fires until `resume`."""
        return schedule_status(pause(self._engine, name))

    async def apause(self, name: str) -> ScheduleStatus:
        return await asyncio.to_thread(self.pause, name)

    def resume(self, name: str) -> ScheduleStatus:
        """Resume from the next time on: fires during the pause were not missed."""
        return schedule_status(resume(self._engine, name))

    async def aresume(self, name: str) -> ScheduleStatus:
        return await asyncio.to_thread(self.resume, name)

    def set(self, name: str, **changes: Unpack[Changes]) -> ScheduleStatus:
        """Change the given fields. Arguments are checked if the task is known in this process."""
        if "args" in changes:
            changes["args"] = self._arguments(self.get(name).kind, by_name(changes["args"]))
        return schedule_status(set_schedule(self._engine, name, **changes))

    async def aset(self, name: str, **changes: Unpack[Changes]) -> ScheduleStatus:
        return await asyncio.to_thread(lambda: self.set(name, **changes))

    def remove(self, name: str) -> None:
        """Delete a schedule. Code that still declares it stores it again at its next start: pause it
        instead."""
        remove(self._engine, name)

    async def aremove(self, name: str) -> None:
        await asyncio.to_thread(self.remove, name)

    def trigger(self, name: str, id: str | None = None) -> str:
        """Append one job now, regardless of the times; return its id."""
        return trigger(self._engine, name, id)

    async def atrigger(self, name: str, id: str | None = None) -> str:
        return await asyncio.to_thread(self.trigger, name, id)


def _known(engine: Engine, name: str, schedule: Schedule | None) -> Schedule:
    if schedule is None:
        names = ", ".join(SCHEDULES.names(engine.ledger)[:20]) or "there is none"
        raise InvalidInput(field="schedule", value=name, expected=f"the name of a schedule ({names})")
    return schedule


def _edited(engine: Engine, name: str, change: Callable[[Schedule | None], Schedule]) -> Schedule:
    edited = _edit(engine, name, change)
    assert edited is not None
    return edited


def _edit(engine: Engine, name: str, change: Callable[[Schedule | None], Schedule | None]) -> Schedule | None:
    """Change the note by compare-and-set, repeated after a concurrent change."""
    checks.name("schedule", name)
    while True:
        view = engine.ledger.note(SCHEDULES.key(name))
        old = _decode(view)
        new = change(old)
        unchanged = view is None if new is None else new == old
        if unchanged or _written(engine, name, new, view):
            return new


def _written(engine: Engine, name: str, value: Schedule | None, seen: NoteView | None) -> bool:
    try:
        engine.committer.call(SCHEDULES.put(name, value, 0 if seen is None else seen.version))
    except NoteConflict:
        return False
    return True


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def by_name(args: object) -> Mapping[str, Any]:
    """The arguments as a mapping by name. Raises InvalidInput."""
    if isinstance(args, Mapping) and all(isinstance(each, str) for each in args):
        return args
    raise InvalidInput(field="args", value=args, expected="arguments by name, such as {'n': 1}")


def _payload(args: object) -> bytes:
    args = by_name(args)
    try:
        content = _encode(args)
    except Exception as error:
        raise InvalidInput(
            field="args", value=args, expected=f"something that can be stored as JSON: {error}"
        ) from None
    checks.finite("args", args, content)
    return content


def _decode(view: NoteView | None) -> Schedule | None:
    if view is None:
        return None
    try:
        return SCHEDULES.decode(view)
    except msgspec.MsgspecError as error:
        log.error("note %s cannot be decoded, its schedule does not fire: %s", view.key, error)
        return None


# Fire


class Scheduler:
    """Fires due schedules. A caretaker calls `due`; concurrent calls in several processes are safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ledger: Ledger | None = None
        self._seen: dict[str, tuple[int, int | None]] = {}
        """By name: the version of the note, and the time of the next fire."""
        self._listed_at = 0

    def due(self, now: int) -> int | None:
        """Fire the schedules that are due at `now`; return the time of the next call, or None if only an edit
        can make one due."""
        if self._ledger is not self._engine.ledger:
            # Versions of another ledger, which an App may have opened since, are not comparable.
            self._ledger, self._seen = self._engine.ledger, {}
        pause = len(self._seen) * LIST_PAUSE if len(self._seen) > MANY else 0
        first = self._first()
        if self._listed_at <= now < self._listed_at + pause and (first is None or first > now):
            return min(self._listed_at + pause, first or FOREVER)
        found = {}
        for name, view in SCHEDULES.views(self._ledger):
            version, time = self._seen.get(name, (0, 0))
            if version != view.version or (time is not None and time <= now):
                time = self._fire(name, view, now)
            found[name] = view.version, time
        self._seen, self._listed_at = found, now
        return self._first()

    def _first(self) -> int | None:
        return min((time for _, time in self._seen.values() if time is not None), default=None)

    def _fire(self, name: str, view: NoteView | None, now: int) -> int | None:
        """The time of the next fire, which may be due at once if many were missed."""
        while True:
            schedule = _decode(view)
            if schedule is None or schedule.paused:
                return None
            if schedule.next_at > now:
                return schedule.next_at
            times, following = plan(schedule, now)
            ids = self._append(schedule, times) if times else []
            moved = replace(schedule, next_at=following, last_at=times[-1] if times else schedule.last_at)
            if _written(self._engine, name, moved, view):
                # Other processes may have appended the same jobs; only one stores the next fire.
                self._publish(name, list(zip(ids, times, strict=False)))
                return following
            view = self._engine.ledger.note(SCHEDULES.key(name))

    def _publish(self, name: str, fired: list[tuple[str, int]]) -> None:
        bus = self._engine.committer.bus
        if fired and bus.wants(ScheduleFired):
            now = self._engine.clock.now()
            for id, time in fired:
                bus.publish(ScheduleFired(name, id, checks.utc(time), max(0, now - time) / SECOND))

    def fire_all(self, now: int, stopped: Callable[[], bool]) -> None:
        """Fire all schedules that are due at `now`, however many fires were missed."""
        while not stopped() and (due := self.due(now)) is not None and due <= now:
            pass

    def _append(self, schedule: Schedule, times: list[int]) -> list[str]:
        """The ids of the jobs, none if they were refused."""
        jobs = [_job(schedule, derived(SCHEDULES.key(schedule.name), str(time)), time) for time in times]
        try:
            answer = self._engine.committer.call(Append(tuple(jobs), inside=True), bounded=False)
        except Refused as refusal:
            log.error("schedule %s did not fire: %s", schedule.name, refusal)
            return []
        assert isinstance(answer, Appended)
        return [placed.id for placed in answer.jobs]


def _job(schedule: Schedule, id: str, time: int) -> Spec:
    at = checks.utc(time).isoformat()
    return replace(schedule.spec, id=id, headers={**schedule.spec.headers, SCHEDULED_AT: at})


P = ParamSpec("P")
R = TypeVar("R")

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._\-/:@]+")


class CronOptions(TypedDict, total=False):
    """`name` (default: the task's), the time zone `tz` (default: UTC), the policy for `missed` fires, and the
    arguments."""

    name: str
    tz: str
    missed: Literal["skip", "once", "all"]
    args: Mapping[str, Any]


class Scheduled(Protocol):
    """The decorator that `app.cron(...)` returns: a task stays as it is, a function becomes a task."""

    @overload
    def __call__(self, function: AsyncTask[P, R], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Task[P, R], /) -> Task[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]: ...


def make_schedule(
    task: Task[..., Any], options: CronOptions, *, cron: str | None = None, every: int | None = None
) -> Schedule:
    """The schedule of a task. Its arguments are checked now, not when it fires."""
    unknown = sorted(set(options) - set(CronOptions.__annotations__))
    if unknown:
        hint = {"timezone": "use tz", "kwargs": "use args"}.get(unknown[0], "")
        raise checks.unknown(
            "option", unknown[0], CronOptions.__annotations__, f"the schedule of {task.kind}", hint
        )
    name = options.get("name") or _NOT_IN_A_NAME.sub("-", task.kind)
    checks.name("name", name)
    # The id is never used; it must be the same each time the code declares the same.
    try:
        spec = task.of(**by_name(options.get("args", {}))).spec(id=f"schedule/{name}")
    except InvalidInput as error:
        if "args" in options or not error.field.endswith("()"):
            raise
        required = [each for each in task.codec.parameters.values() if each.default is each.empty]
        example = ", ".join(f"{each.name!r}: ..." for each in required)
        message = f"{error}. Give the schedule the arguments: args={{{example}}}"
        raise InvalidInput(field="args", value=None, expected=error.expected, message=message) from None
    missed = missed_of(options.get("missed", Missed.SKIP))
    return Schedule(name=name, spec=spec, cron=cron, every=every, tz=options.get("tz", "UTC"), missed=missed)


def from_settings(
    tasks: Mapping[str, Task[..., Any]], tables: Mapping[str, Mapping[str, Any]]
) -> dict[str, Schedule]:
    """The schedules of a settings file: the `task` by its name, `cron` or `every` (seconds), and the options
    of `@app.cron`."""
    found: dict[str, Schedule] = {}
    for name, table in tables.items():
        task = tasks.get(table.get("task", ""))
        if task is None:
            expected = f"the name of a task: {', '.join(sorted(tasks)) or 'there is none'}"
            raise InvalidInput(
                field=f"the task of schedule {name}", value=table.get("task"), expected=expected
            )
        if ("cron" in table) == ("every" in table):
            raise either_cron_or_every(f"schedule {name}", dict(table))
        every = every_of(table["every"]) if "every" in table else None
        options: Any = {key: value for key, value in table.items() if key in CronOptions.__annotations__} | {
            "name": name
        }
        found[name] = make_schedule(task, options, cron=table.get("cron"), every=every)
    return found


def store_schedules(engine: Engine, schedules: Mapping[str, Schedule]) -> None:
    """Store the declared schedules in the ledger."""
    for schedule in schedules.values():
        register(engine, schedule)
