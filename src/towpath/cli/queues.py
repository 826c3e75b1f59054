"""`queues` and `parts`: list them, pause and resume them, set their limits."""

from __future__ import annotations

from typing import Any

import click
from msgspec import UNSET

from towpath import Ledger, Rate, commands
from towpath.cli.base import (
    OK,
    CliGroup,
    Session,
    combine,
    join_names,
    not_found,
    pass_session,
)
from towpath.cli.jobs import require_queue
from towpath.cli.messages import apply_one
from towpath.cli.output import (
    format_pairs,
    format_rate,
    format_span,
    format_time,
    print_result,
    table,
    to_seconds,
)
from towpath.cli.stats import queue_counts
from towpath.cli.values import NONE, Moment, RateType, Span, Whole, now
from towpath.commands import PartView, QueueView, micros
from towpath.queues.queue import check_depth, depth_note, warn_depth, warn_depths


@click.group("queues", cls=CliGroup)
def queues() -> None:
    """List queues, pause them, set their limits."""


@click.group("parts", cls=CliGroup)
def parts() -> None:
    """List parts of a queue, pause them, set their limits."""


_gate_options = combine(
    click.option(
        "--cap",
        type=Whole(optional=True),
        help="Maximum number of running jobs, over all workers; none removes the limit.",
    ),
    click.option(
        "--rate",
        type=RateType(optional=True),
        help="Maximum rate of starts: 10/s, 100/m, 5/10s; none removes the limit.",
    ),
    click.option(
        "--burst",
        type=click.IntRange(1, 1_000_000),
        help="With --rate: number of jobs that may start at once.",
    ),
    click.option(
        "--not-before", type=Moment(past=False), help="Start no job before this time, or for this span."
    ),
)


def _given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The given options as fields of SetQueue and SetPart: omitted is UNSET, `none` is None."""
    burst = options.pop("burst", None)
    if burst is not None:
        if not isinstance(options.get("rate"), Rate):
            raise click.UsageError("--burst needs --rate.", click.get_current_context())
        options["rate"] = Rate(options["rate"].count, options["rate"].period, burst)
    values = {
        name: UNSET if value is None else None if value == NONE else value for name, value in options.items()
    }
    if all(value is UNSET for value in values.values()):
        raise click.UsageError("Nothing to set. Add at least one option.", click.get_current_context())
    return values


def queue_data(view: QueueView, depth: int | None) -> dict[str, Any]:
    at = now()
    limits = {
        "capacity": view.capacity,
        "warn_depth": depth,
        "cap": view.cap,
        "rate": format_rate(view.rate),
        "keep": view.keep,
    }
    return {
        **queue_counts(view, at),
        **limits,
        "retention": to_seconds(view.retention),
        "not_before": _not_before(view),
    }


def _read_queue_data(ledger: Ledger, queue: str) -> dict[str, Any]:
    view = ledger.queue(queue)
    if view is None:
        raise not_found(f"There is no queue {queue}.", "`towpath queues list` has the queues.")
    return queue_data(view, warn_depth(ledger, queue))


def part_data(view: PartView) -> dict[str, Any]:
    fields = ("queue", "ready", "running", "paused", "why", "cap", "weight", "capacity")
    settings = {
        "rate": format_rate(view.rate),
        "append_rate": format_rate(view.append_rate),
        "not_before": _not_before(view),
    }
    return {"part": view.name, **{name: getattr(view, name) for name in fields}, **settings}


def _not_before(view: QueueView | PartView) -> str | None:
    return format_time(view.next_at) if view.next_at > now() else None


def _print_settings(as_json: bool, data: dict[str, Any], sentence: str) -> int:
    print_result(as_json, data, sentence)
    return OK


@queues.command("list")
@pass_session
def list_queues(session: Session, /) -> int:
    """List queues with waiting and running jobs and their limits."""
    with session.ledger() as ledger:
        views, depths = sorted(ledger.queues().items()), warn_depths(ledger)
    data = [queue_data(view, depths.get(name)) for name, view in views]
    print_result(session.json, {"queues": data}, lambda: _queue_table([view for _, view in views], depths))
    return OK


def _queue_table(views: list[QueueView], depths: dict[str, int]) -> object:
    if not views:
        return "There are no queues yet."
    columns = (
        "queue",
        "waiting",
        "running",
        "paused",
        "capacity",
        "warn at",
        "cap",
        "rate",
        "retention",
        "keep",
        "why",
    )
    rows = []
    for view in views:
        limits = (
            view.capacity,
            depths.get(view.name),
            view.cap,
            format_rate(view.rate),
            format_span(view.retention),
            view.keep,
        )
        rows.append((view.name, view.counts.waiting, view.counts.running, view.paused, *limits, view.why))
    return table(columns, rows, numbers=("waiting", "running", "capacity", "warn at", "cap", "keep"))


@queues.command("show")
@click.argument("queue")
@pass_session
def show_queue(session: Session, /, queue: str) -> int:
    """Show the counts, limits and parts of a queue.

    Also the age of the oldest ready job and the reason of a pause. Parts with ready or running jobs, or with
    their own limits."""
    with session.ledger() as ledger:
        _known_queue(ledger, queue)
        data = _read_queue_data(ledger, queue)
        views = sorted(ledger.parts(queue).items())

    def text() -> object:
        facts = {**data, "retention": _span(data["retention"])}
        age = _span(facts.pop("oldest_ready_seconds"))
        facts["oldest_ready"] = age and f"{age} ago"
        shown = {name.replace("_", " "): value for name, value in facts.items() if value is not None}
        lines = list(format_pairs(shown))
        lines += [f"part {view.name}: {_part_line(view)}" for _, view in views[:MAX_PARTS]]
        more = len(views) - MAX_PARTS
        return [*lines, f"{more} more parts: `towpath parts list {queue}`"] if more > 0 else lines

    print_result(session.json, {**data, "parts": [part_data(view) for _, view in views]}, text)
    return OK


MAX_PARTS = 20
"""Parts that `queues show` prints."""


def _span(seconds: float | None) -> str | None:
    return None if seconds is None else format_span(micros(seconds))


def _part_line(view: PartView) -> str:
    data = part_data(view)
    limits = [f"{name.replace('_', ' ')} {data[name]}" for name in _PART_LIMITS if data[name] is not None]
    paused = ["paused" + (f" ({view.why})" if view.why else "")] if view.paused else []
    return ", ".join([f"{view.ready} ready", f"{view.running} running", *paused, *limits])


_PART_LIMITS = ("capacity", "append_rate", "cap", "rate", "weight", "not_before")


@queues.command("pause")
@click.argument("queue")
@click.option("--why", help="Reason, shown by `explain`.")
@click.option("--new", is_flag=True, help="Create the queue if it does not exist.")
@pass_session
def pause_queue(session: Session, /, queue: str, why: str | None, new: bool) -> int:
    """Start no job of this queue until `resume`. Running jobs continue; new jobs are accepted and wait."""
    with session.ledger(make=new) as ledger:
        if not new:
            _known_queue(ledger, queue)
        apply_one(ledger, commands.SetQueue(queue=queue, paused=True, why=why))
        return _print_settings(session.json, _read_queue_data(ledger, queue), f"{queue} is paused")


@queues.command("resume")
@click.argument("queue")
@pass_session
def resume_queue(session: Session, /, queue: str) -> int:
    """Resume a paused queue."""
    with session.ledger() as ledger:
        _known_queue(ledger, queue)
        apply_one(ledger, commands.SetQueue(queue=queue, paused=False, why=None))
        return _print_settings(session.json, _read_queue_data(ledger, queue), f"{queue} is resumed")


@queues.command("set")
@click.argument("queue")
@click.option(
    "--capacity",
    type=Whole(optional=True),
    help="Maximum number of waiting jobs; more are refused. none removes the limit.",
)
@click.option(
    "--warn-depth",
    type=Whole(optional=True),
    help="Number of waiting jobs at which a warning is logged once. none removes it.",
)
@_gate_options
@click.option(
    "--retention",
    type=Span(optional=True),
    help="Time for which done and canceled jobs are kept. none restores the default, 7 days.",
)
@click.option(
    "--keep",
    type=Whole(optional=True),
    help="Maximum number of done and canceled jobs kept. none restores the default, a million.",
)
@click.option("--why", help="Reason, shown by `explain`; none removes it.")
@pass_session
def set_queue(session: Session, /, queue: str, **options: Any) -> int:
    """Set limits of a queue. Omitted options keep their values. The queue is created if it does not exist."""
    given = _given_settings(options)
    depth = given.pop("warn_depth")
    command = commands.SetQueue(queue=queue, **given)
    check_depth(None if depth is UNSET else depth, given["capacity"])
    with session.ledger(make=True) as ledger:
        new = ledger.queue(queue) is None
        apply_one(ledger, command)
        if depth is not UNSET:
            apply_one(ledger, depth_note(queue, depth))
        data = _read_queue_data(ledger, queue)
    limits = ", ".join(
        f"{name} {data[name]}"
        for name in ("capacity", "warn_depth", "cap", "rate", "retention", "keep", "not_before")
        if data[name] is not None
    )
    return _print_settings(session.json, data, f"{queue}{' (new)' * new}: {limits or 'no limits'}")


def _known_queue(ledger: Ledger, queue: str) -> None:
    commands.SetQueue(queue=queue)  # raises InvalidInput for an invalid name
    if ledger.queue(queue) is None:
        known = join_names(sorted(ledger.queues()))
        step = f"Queues: {known}. `queues pause --new` and `queues set` create one."
        raise not_found(f"There is no queue {queue}.", step)


@parts.command("list")
@click.argument("queue")
@pass_session
def list_parts(session: Session, /, queue: str) -> int:
    """List parts of a queue.

    Parts with ready or running jobs, or with their own limits.
    """
    with session.ledger() as ledger:
        require_queue(ledger, queue)
        views = sorted(ledger.parts(queue).items())
    columns = (
        "part",
        "ready",
        "running",
        "paused",
        "capacity",
        "append rate",
        "cap",
        "rate",
        "weight",
        "not before",
        "why",
    )

    def text() -> object:
        rows = []
        for _, view in views:
            limits = (
                view.capacity,
                format_rate(view.append_rate),
                view.cap,
                format_rate(view.rate),
                view.weight,
                _not_before(view),
            )
            rows.append((view.name, view.ready, view.running, view.paused, *limits, view.why))
        numbers = ("ready", "running", "capacity", "cap", "weight")
        return table(columns, rows, numbers=numbers) if rows else f"{queue} has no parts."

    print_result(session.json, {"parts": [part_data(view) for _, view in views]}, text)
    return OK


@parts.command("pause")
@click.argument("queue")
@click.argument("part")
@click.option("--why", help="Reason, shown by `explain`.")
@pass_session
def pause_part(session: Session, /, queue: str, part: str, why: str | None) -> int:
    """Start no job of this part until `resume`. The part is created if it does not exist."""
    return _set_part(session, commands.SetPart(queue=queue, part=part, paused=True, why=why), "is paused")


@parts.command("resume")
@click.argument("queue")
@click.argument("part")
@pass_session
def resume_part(session: Session, /, queue: str, part: str) -> int:
    """Resume a paused part."""
    return _set_part(
        session, commands.SetPart(queue=queue, part=part, paused=False, why=None), "is resumed", known=True
    )


@parts.command("set")
@click.argument("queue")
@click.argument("part")
@click.option(
    "--capacity",
    type=Whole(optional=True),
    help="Maximum number of waiting jobs; more are refused. none removes the limit.",
)
@click.option(
    "--append-rate",
    type=RateType(optional=True),
    help="Maximum rate of appends: 10/s, 10/s:20; none removes the limit.",
)
@_gate_options
@click.option(
    "--weight", type=click.IntRange(1, 1000), help="Share of starts relative to other parts. Default: 1."
)
@click.option("--why", help="Reason, shown by `explain`; none removes it.")
@pass_session
def set_part(session: Session, /, queue: str, part: str, **options: Any) -> int:
    """Set limits of a part. Omitted options keep their values. The part is created if it does not exist."""
    return _set_part(session, commands.SetPart(queue=queue, part=part, **_given_settings(options)), "is set")


def _set_part(session: Session, command: commands.SetPart, became: str, known: bool = False) -> int:
    with session.ledger() as ledger:
        require_queue(ledger, command.queue)
        there = ledger.parts(command.queue)
        if known and command.part not in there:
            raise not_found(
                f"There is no part {command.part} of {command.queue}.", f"Parts: {join_names(sorted(there))}"
            )
        apply_one(ledger, command)
        data = part_data(ledger.parts(command.queue)[command.part])
    return _print_settings(session.json, data, f"part {command.part} of {command.queue} {became}")
