"""Units of the public surface: times are datetimes, durations are seconds. The test walks from every public
name and event to the types of fields, properties, parameters and results, and on to the members of these."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import towpath
import towpath.events
from towpath import App, Breaker
from towpath.operations import flows, plans, progress
from towpath.operations.breakers import declare
from towpath.queues import message
from towpath.tasks import context, handles, task
from towpath.testing import app as bench

LEDGER_LEVEL = {"Ledger", "SqliteLedger", "SqliteOptions", "Engine", "Registry", "Clock"}
"""Types of the ledger and the engine, which use microseconds."""
RECORDS = {"JobHandle.record", "JobHandle.arecord", "Running.record", "Message.record"}
"""The ways to the record of a job, as the ledger stores it."""
INTERNAL = {
    *("Call.spec", "Batch.collect", "Batch.placed", "QueueSettings.setting"),
    *("Task.spec_for", "Task.decode", "Running.outcome_extras", "Running.on_reply"),
}
"""Members for the worker and for the language of ledgers (`towpath.commands`)."""
BY_USERS = {
    *(towpath.App, towpath.Bandwidth, towpath.Hooks, towpath.Lane, towpath.Rate),
    *(towpath.BreakerOpen, towpath.Retry, towpath.Snooze, towpath.Throttled),
}
"""Classes with an `__init__` that users call; the fields of the others are their parameters."""
A_TIME = re.compile(
    r"(.*_(at|us|micros|seconds)|at|until|since|due|delay|timeout|ttl|window|retention|lease|period|wait|max_hold"
    r"|interval|cooldown|every|base|for_|age|eta|duration|waited|late|grace|ageing|span|oldest_ready)"
)

_LATE = {
    name: value
    for module in (progress, message, bench, handles, context, task, plans, flows)
    for name, value in vars(module).items()
    if inspect.isclass(value)
}
"""Classes that a module imports for type checkers only."""


@dataclass(frozen=True)
class Member:
    """A value in the interface of a class: `path` leads to it from a public name."""

    owner: type
    member: str
    name: str
    hint: Any
    path: str

    @property
    def is_microseconds(self) -> bool:
        """True if a value of this name and type could be a time or duration in microseconds."""
        kinds = {self.hint, *typing.get_args(self.hint)} if _hashable(self.hint) else set()
        whole = int in kinds and float not in kinds
        return self.name.endswith(("_us", "micros")) or (whole and A_TIME.fullmatch(self.name) is not None)


def _hashable(hint: object) -> bool:
    try:
        hash((hint, typing.get_args(hint)))
    except TypeError:
        return False
    return True


def _hints(thing: Any) -> dict[str, Any]:
    names = {**_LATE, **vars(sys.modules[thing.__module__])}
    return typing.get_type_hints(thing, globalns=names)


def _members(kind: type, path: str) -> Iterator[Member]:
    for base in kind.__mro__:
        if base.__module__.startswith("towpath") and getattr(base, "__annotations__", None):
            for name, hint in _hints(base).items():
                if not name.startswith("_"):
                    yield Member(kind, name, name, hint, path)
    for name, member in inspect.getmembers_static(kind):
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") and (name != "__init__" or kind not in BY_USERS):
            continue
        if not inspect.isfunction(found) or not found.__module__.startswith("towpath"):
            continue
        for parameter, hint in _hints(found).items():
            yield Member(kind, name, name if parameter == "return" else parameter, hint, path)


def _classes(hint: Any) -> Iterator[type]:
    for each in (hint, typing.get_origin(hint)):
        if inspect.isclass(each) and each.__module__.startswith("towpath"):
            yield each
    for each in hint if isinstance(hint, list | tuple) else typing.get_args(hint):
        yield from _classes(each)


def _surface() -> Iterator[tuple[type, str]]:
    for name in towpath.__all__:
        thing = getattr(towpath, name)
        if inspect.isclass(thing):
            yield thing, name
        elif inspect.isfunction(thing):
            yield from ((each, f"{name}()") for each in _classes(_hints(thing).get("return")))
    yield from ((kind, f"events.{kind.__name__}") for kind in towpath.events.KINDS)


def walk() -> dict[type, list[Member]]:
    """The reachable classes with their members."""
    todo, found = list(_surface()), dict[type, list[Member]]()
    while todo:
        kind, path = todo.pop()
        if kind in found or kind.__name__ in LEDGER_LEVEL:
            continue
        found[kind] = [
            each
            for each in _members(kind, path)
            if f"{kind.__name__}.{each.member}" not in RECORDS | INTERNAL
        ]
        for each in found[kind]:
            todo += [(other, f"{path}.{each.member}") for other in _classes(each.hint)]
    return found


WALKED = walk()


def test_the_walk_reaches_the_views() -> None:
    names = {kind.__name__ for kind in WALKED}
    assert {
        "JobStatus",
        "BreakerStatus",
        "WorkerStatus",
        "LimitStatus",
        "ScheduleStatus",
        "RunningJob",
    } <= names
    assert {"LaneView", "AttemptView", "QueueStatus", "PartStatus", "Settings", "TaskOptions"} <= names
    assert not {"Job", "Record", "Status", "LimitView", "WorkerView", "QueueView"} & names


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in WALKED}))
def test_no_microseconds(name: str) -> None:
    for kind, members in WALKED.items():
        if kind.__name__ == name:
            assert [each for each in members if each.is_microseconds] == []
            texts = {name: kind.__doc__, **{each.member: _doc(kind, each.member) for each in members}}
            assert [each for each, text in texts.items() if "microsecond" in (text or "")] == []


def _doc(kind: type, member: str) -> str | None:
    text: str | None = inspect.getattr_static(kind, member, None).__doc__
    return text


@pytest.mark.parametrize(
    "name", [name for name in towpath.__all__ if inspect.isfunction(getattr(towpath, name))]
)
def test_no_microseconds_in_functions(name: str) -> None:
    assert "microsecond" not in (getattr(towpath, name).__doc__ or "")


@pytest.mark.parametrize(
    ("name", "hint", "expected"),
    [
        ("until", int | None, True),
        ("delay_us", float, True),
        ("timeout", float | None, False),
        ("count", int, False),
    ],
)
def test_a_microsecond_is_noticed(name: str, hint: object, expected: bool) -> None:
    assert Member(object, name, name, hint, name).is_microseconds is expected


def test_breakers_have_datetimes(app: App) -> None:
    app.task(name="fetch", queue="orders", breaker=Breaker("x", failures=3))(print)
    declare(app._registry)
    [closed] = app.breakers.list()
    assert (closed.state, closed.since, closed.until, closed.trips) == ("closed", None, None, 0)
    opened = app.breakers.open("x", "a migration", for_=60)
    assert opened.since is not None
    assert opened.until is not None
    assert 59.9 < (opened.until - opened.since).total_seconds() < 60.1
    assert app.breakers.list() == [opened]
    plain = opened.as_dict()
    assert (plain["state"], plain["why"], plain["until"][:2]) == ("open", "by hand: a migration", "20")
    forever = app.breakers.open("x")
    assert (forever.until, forever.trips, forever.gates[0].queue) == (None, 2, "orders")


def test_a_running_job_is_readable(app: App) -> None:
    seen: list[towpath.Running] = []

    @app.task(name="look", timeout=5)
    def look(order: int) -> None:
        running = towpath.current()
        assert (running.kind, running.queue, running.headers) == ("look", "default", {})
        seen.append(running)

    look.enqueue(order=7)
    app.run(burst=True)
    [running] = seen
    job = running.job
    assert (job.id, job.kind, job.arguments, job.timeout) == (running.id, "look", {"order": 7}, 5.0)
    assert job.started_at is not None
    assert running.record.started_at == int(job.started_at.timestamp() * 1_000_000 + 0.5)


def test_a_message_is_readable(app: App) -> None:
    app.queue("mail").put("not JSON: towpath-after", ttl=60)
    with app.queue("mail").get(wait=None) as found:
        job = found.job
        assert (job.id, job.state, job.arguments, job.after) == (found.id, "running", None, ())
        assert job.expires_at is not None
        assert (job.expires_at - job.created_at).total_seconds() == 60
        assert found.record.payload == found.payload
        found.ack()
