"""`queues` and `parts`: what they hold, and the gates in front of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from msgspec import UNSET

from towpath import Ledger, PartView, QueueView, Rate, commands
from towpath.cli.base import OK, REFUSED, CliGroup, Session, combine, join_names, not_found, pass_session
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
from towpath.commands import GroupState
from towpath.errors import UnknownGroup
from towpath.queues.queue import check_depth, warn_depths, write_depth


@click.group("queues", cls=CliGroup)
def queues() -> None:
    """List queues, pause them, set their limits."""


@click.group("parts", cls=CliGroup)
def parts() -> None:
    """Parts of a queue, each with limits of its own."""


_gate_options = combine(
    click.option(
        "--cap", type=Whole(optional=True), help="At most so many run at once, everywhere; none lifts it."
    ),
    click.option(
        "--rate",
        type=RateType(optional=True),
        help="At most so many start: 10/s, 100/m, 5/10s; none lifts it.",
    ),
    click.option(
        "--burst", type=click.IntRange(1, 1_000_000), help="With --rate: so many may start at once."
    ),
    click.option(
        "--not-before", type=Moment(past=False), help="Nothing starts before this time, or for this span."
    ),
)


def _given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """What was said, as SetQueue and SetPart take it: left out stays as it is, `none` lifts the limit."""
    burst = options.pop("burst", None)
    if burst is not None:
        if not isinstance(options.get("rate"), Rate):
            raise click.UsageError("--burst goes with --rate.", click.get_current_context())
        options["rate"] = Rate(options["rate"].count, options["rate"].period, burst)
    values = {
        name: UNSET if value is None else None if value == NONE else value for name, value in options.items()
    }
    if all(value is UNSET for value in values.values()):
        raise click.UsageError("Nothing to set.", click.get_current_context())
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
    return queue_data(ledger.queues()[queue], warn_depths(ledger).get(queue))


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
    """Every queue with what waits in it and its limits."""
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


@queues.command("pause")
@click.argument("queue")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@click.option("--new", is_flag=True, help="Also a queue that nobody has used yet.")
@pass_session
def pause_queue(session: Session, /, queue: str, why: str | None, new: bool) -> int:
    """Nothing new starts in this queue until `resume`; what runs goes on, what is put waits."""
    with session.ledger(make=new) as ledger:
        if not new:
            _known_queue(ledger, queue)
        apply_one(ledger, commands.SetQueue(queue=queue, paused=True, why=why))
        return _print_settings(session.json, _read_queue_data(ledger, queue), f"{queue} is paused")


@queues.command("resume")
@click.argument("queue")
@pass_session
def resume_queue(session: Session, /, queue: str) -> int:
    """Let a paused queue go on."""
    with session.ledger() as ledger:
        _known_queue(ledger, queue)
        apply_one(ledger, commands.SetQueue(queue=queue, paused=False, why=None))
        return _print_settings(session.json, _read_queue_data(ledger, queue), f"{queue} goes on")


@queues.command("set")
@click.argument("queue")
@click.option(
    "--capacity", type=Whole(optional=True), help="At most so many wait; more are refused. none lifts it."
)
@click.option(
    "--warn-depth", type=Whole(optional=True), help="When so many wait, the log says so, once. none lifts it."
)
@_gate_options
@click.option(
    "--retention", type=Span(optional=True), help="How long done and canceled jobs are kept; none: 7 days."
)
@click.option(
    "--keep",
    type=Whole(optional=True),
    help="At most so many done and canceled jobs are kept; none: a million.",
)
@click.option("--why", help="The reason, for whoever asks; none takes it away.")
@pass_session
def set_queue(session: Session, /, queue: str, **options: Any) -> int:
    """Set limits of a queue. What is left out stays as it is. A queue that is not there is made."""
    given = _given_settings(options)
    depth = given.pop("warn_depth")
    command = commands.SetQueue(queue=queue, **given)
    check_depth(None if depth is UNSET else depth, given["capacity"])
    with session.ledger(make=True) as ledger:
        new = queue not in ledger.queues()
        apply_one(ledger, command)
        if depth is not UNSET:
            write_depth(ledger.note, partial(apply_one, ledger), queue, depth)
        data = _read_queue_data(ledger, queue)
    limits = ", ".join(
        f"{name} {data[name]}"
        for name in ("capacity", "warn_depth", "cap", "rate", "retention", "keep", "not_before")
        if data[name] is not None
    )
    return _print_settings(session.json, data, f"{queue}{' (new)' * new}: {limits or 'no limits'}")


def _known_queue(ledger: Ledger, queue: str) -> None:
    commands.SetQueue(queue=queue)  # refuses what no queue can be called
    known = ledger.queues()
    if queue not in known:
        step = f"Queues: {join_names(sorted(known))}. `pause --new` and `set` make one before its first job."
        raise not_found(f"There is no queue {queue}.", step)


@parts.command("list")
@click.argument("queue")
@pass_session
def list_parts(session: Session, /, queue: str) -> int:
    """The parts of a queue that have jobs ready or running, or limits of their own."""
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

    def people() -> object:
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

    print_result(session.json, {"parts": [part_data(view) for _, view in views]}, people)
    return OK


@parts.command("pause")
@click.argument("queue")
@click.argument("part")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@pass_session
def pause_part(session: Session, /, queue: str, part: str, why: str | None) -> int:
    """Nothing new starts in this part until `resume`. A part that is not there is made."""
    return _set_part(session, commands.SetPart(queue=queue, part=part, paused=True, why=why), "is paused")


@parts.command("resume")
@click.argument("queue")
@click.argument("part")
@pass_session
def resume_part(session: Session, /, queue: str, part: str) -> int:
    """Let a paused part go on."""
    return _set_part(
        session, commands.SetPart(queue=queue, part=part, paused=False, why=None), "goes on", known=True
    )


@parts.command("set")
@click.argument("queue")
@click.argument("part")
@click.option(
    "--capacity",
    type=Whole(optional=True),
    help="At most so many of its jobs wait; more are refused. none lifts it.",
)
@click.option(
    "--append-rate",
    type=RateType(optional=True),
    help="At most so many are appended: 10/s, 10/s:20; none lifts it.",
)
@_gate_options
@click.option("--weight", type=click.IntRange(1, 1000), help="Its share of turns beside the other parts: 1.")
@click.option("--why", help="The reason, for whoever asks; none takes it away.")
@pass_session
def set_part(session: Session, /, queue: str, part: str, **options: Any) -> int:
    """Set limits of a part. What is left out stays as it is. A part that is not there is made."""
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


@click.group("groups", cls=CliGroup)
def groups() -> None:
    """Groups of jobs with one fate."""


@groups.command("pause")
@click.argument("id")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@pass_session
def pause_group(session: Session, /, id: str, why: str | None) -> int:
    """Start nothing of this group until `resume`. What runs goes on."""
    return _set_group_state(session, commands.Unseal(id, why), "is paused", (GroupState.OPEN,))


@groups.command("resume")
@click.argument("id")
@pass_session
def resume_group(session: Session, /, id: str) -> int:
    """Let a paused group go on."""
    return _set_group_state(session, commands.Seal(id), "goes on", (GroupState.SEALED, GroupState.CLOSED))


def _set_group_state(
    session: Session, command: commands.Unseal | commands.Seal, became: str, states: tuple[GroupState, ...]
) -> int:
    with session.ledger() as ledger:
        apply_one(ledger, command)
        view = ledger.group(command.group)
    assert view is not None
    well = view.state in states
    print_result(
        session.json,
        {"id": view.id, "state": view.state},
        f"group {view.id} {became if well else f'stays {view.state}'}",
    )
    return OK if well else REFUSED


@groups.command("show")
@click.argument("id")
@pass_session
def show_group(session: Session, /, id: str) -> int:
    """The state of a group and the counts of its members. `jobs list --group ID` lists them."""
    with session.ledger() as ledger:
        view = ledger.group(id)
    if view is None:
        raise UnknownGroup(group=id)
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    data |= {"created_at": format_time(view.created_at), "closed_at": format_time(view.closed_at)}
    print_result(
        session.json, data, format_pairs({name.replace("_", " "): value for name, value in data.items()})
    )
    return OK
