"""`schedules`: list, pause, change and trigger the schedules of repeated jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import OK, CliGroup, Session, join_names, not_found, pass_session
from towpath.cli.output import decode_body, format_span, format_time, print_result, table, to_seconds
from towpath.cli.targets import existing_url
from towpath.cli.values import Json, Span, now

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.operations.schedules import Schedule


@click.group("schedules", cls=CliGroup)
def schedules() -> None:
    """List, change and trigger schedules of repeated jobs. Programs declare them; a change here needs no
    restart."""


@contextmanager
def _open_app(session: Session, name: str | None = None) -> Iterator[App]:
    """Open an App. Raises if `name` is given and no such schedule exists."""
    from towpath.app import App
    from towpath.operations import schedules as library

    with App(existing_url(session.url)) as app:
        if name is not None:
            known = [schedule.name for schedule in library.list_schedules(app.engine)]
            if name not in known:
                raise not_found(f"There is no schedule {name}.", f"Schedules: {join_names(known)}")
        yield app


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    value, encoding = decode_body(schedule.spec.payload, schedule.spec.content_type)
    return {
        "name": schedule.name,
        "cron": schedule.cron,
        "every": to_seconds(schedule.every),
        "tz": schedule.tz,
        "missed": schedule.missed,
        "paused": schedule.paused,
        "next_at": None if schedule.paused else format_time(schedule.next_at),
        "last_at": format_time(schedule.last_at),
        "queue": schedule.spec.queue,
        "kind": schedule.spec.kind,
        "payload": value,
        "payload_encoding": encoding,
    }


@schedules.command("list")
@pass_session
def list_all(session: Session, /) -> int:
    """List schedules with their times and the next run."""
    from towpath.operations import schedules as library

    with _open_app(session) as app:
        found = library.list_schedules(app.engine)
        workers = len(app.workers.list())
    data = {"schedules": [schedule_data(schedule) for schedule in found]}
    print_result(session.json, data, lambda: _table(found, workers))
    return OK


def _table(found: list[Schedule], workers: int) -> object:
    if not found:
        return "There are no schedules. Programs declare them with @app.cron and @app.every."
    at, rows = now(), []
    for each in found:
        times = f"{each.cron} {each.tz}" if each.cron is not None else f"every {format_span(each.every)}"
        due = "paused" if each.paused else f"in {format_span(each.next_at - at)}"
        if not each.paused and each.next_at <= at:
            due = "due" if workers else "due, but no worker runs"
        rows.append(
            (each.name, times, due, format_time(each.last_at), each.spec.queue, each.spec.kind or None)
        )
    return table(("name", "times", "next", "last", "queue", "kind"), rows)


@schedules.command("pause")
@click.argument("name")
@pass_session
def pause(session: Session, /, name: str) -> int:
    """Enqueue no job of this schedule until `resume`."""
    from towpath.operations import schedules as library

    with _open_app(session, name) as app:
        return _print_schedule(session, library.pause(app.engine, name), f"{name} is paused")


@schedules.command("resume")
@click.argument("name")
@pass_session
def resume(session: Session, /, name: str) -> int:
    """Resume a schedule at its next time. Times during the pause do not count as missed."""
    from towpath.operations import schedules as library

    with _open_app(session, name) as app:
        changed = library.resume(app.engine, name)
        return _print_schedule(session, changed, f"{name} is resumed, next at {format_time(changed.next_at)}")


@schedules.command("set")
@click.argument("name")
@click.option("--cron", help="Cron expression with five fields, such as '*/5 * * * *'.")
@click.option("--every", type=Span(), help="Fixed interval instead of --cron.")
@click.option("--tz", help="Time zone of --cron, such as Europe/Berlin.")
@click.option(
    "--missed",
    type=click.Choice(["skip", "once", "all"]),
    help="Handling of times at which no worker was running.",
)
@click.option(
    "--args", "arguments", type=Json(object_only=True), help="Arguments of its jobs as a JSON object."
)
@pass_session
def set_times(
    session: Session, /, name: str, arguments: bytes | None, every: int | None, **options: Any
) -> int:
    """Change a schedule. The change stays until the program declares other values."""
    from towpath.operations import schedules as library

    changes = {
        **options,
        "every": to_seconds(every),
        "args": None if arguments is None else decode_body(arguments)[0],
    }
    if all(value is None for value in changes.values()):
        raise click.UsageError("Nothing to set. Add at least one option.", click.get_current_context())
    with _open_app(session, name) as app:
        changed = library.set_schedule(app.engine, name, **changes)
        return _print_schedule(session, changed, f"{name}: next at {format_time(changed.next_at)}")


@schedules.command("remove")
@click.argument("name")
@pass_session
def remove(session: Session, /, name: str) -> int:
    """Delete a schedule. A program that still declares it creates it again at its next start; pause it
    instead."""
    from towpath.operations import schedules as library

    with _open_app(session, name) as app:
        library.remove(app.engine, name)
    print_result(session.json, {"name": name, "removed": True}, f"{name} is deleted")
    return OK


@schedules.command("trigger")
@click.argument("name")
@pass_session
def trigger(session: Session, /, name: str) -> int:
    """Enqueue one job of a schedule now, and print its id."""
    from towpath.operations import schedules as library

    with _open_app(session, name) as app:
        id = library.trigger(app.engine, name)
    print_result(session.json, {"name": name, "id": id}, id)
    return OK


def _print_schedule(session: Session, schedule: Schedule, sentence: str) -> int:
    print_result(session.json, schedule_data(schedule), sentence)
    return OK
