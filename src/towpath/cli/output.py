"""Output of commands: JSON for programs, tables and sentences for people. rich is imported only for
tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from towpath import Rate
from towpath.commands import AttemptOutcome, AttemptRecord, Job, utc
from towpath.escapes import escape, escape_json
from towpath.queues.payloads import decode_body as decode_body
from towpath.settings import resolve

if TYPE_CHECKING:
    from rich.console import Console

MAX_NAME = 40
"""Characters of a name in `format_pairs`. A longer name is not cut; its value moves to the right."""
_SPANS = ("timeout", "retention", "lease_len")
_BODIES = ("payload", "result", "cursor")


def print_json(data: object) -> None:
    """Print one JSON document on one line."""
    click.echo(escape_json(msgspec.json.encode(data).decode()))
    sys.stdout.flush()


def print_result(as_json: bool, data: object, text: str | list[str] | Callable[[], object]) -> None:
    """Print `data` as JSON, or else `text`: a line, a list of lines, or a function that returns these or a
    rich object. Line breaks inside a line are escaped."""
    if as_json:
        print_json(data)
        return
    shown = text() if callable(text) else text
    if isinstance(shown, str | list):
        lines = map(escape, [shown] if isinstance(shown, str) else shown)
        click.echo("\n".join(map(_coloured, lines) if has_colours() else lines))
    elif shown is not None:
        console().print(shown)


def has_colours() -> bool:
    """True on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _coloured(line: str) -> str:
    """A line of `format_pairs` with the name `state`: the state in its colour."""
    found = re.match(r"(state +)(\w+)", line)
    style = STYLES.get(found[2]) if found else None
    if found is None or style is None:
        return line
    words = style.split()
    colour = next((word for word in words if word not in ("bold", "dim")), None)
    state = click.style(found[2], fg=colour, bold="bold" in words or None, dim="dim" in words or None)
    return found[1] + state + line[found.end() :]


def console() -> Console:
    """A rich console. In a pipe lines are not wrapped; rich itself drops colours there and with NO_COLOR."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> object:
    """A rich table on a terminal; in a pipe plain columns, for grep and awk."""
    from rich.table import Table
    from rich.text import Text

    if not sys.stdout.isatty():
        return Text(_plain_columns(columns, rows, numbers))
    made = Table(box=None, header_style="bold", pad_edge=False)
    lines = [
        [(_cell(value), _style(column, value)) for column, value in zip(columns, row, strict=True)]
        for row in rows
    ]
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if column in numbers else "left"
        is_whole = column in WHOLE and all(len(line[number][0]) <= MAX_NAME for line in lines)
        made.add_column(column, justify=side, overflow="fold", no_wrap=is_whole)
    cut = [{"no_wrap": True, "overflow": "ellipsis"} if column in CUT else {} for column in columns]
    for line in lines:
        made.add_row(
            *[Text(text, style=style, **how) for (text, style), how in zip(line, cut, strict=True)]  # type: ignore[arg-type]
        )
    return made


CUT = ("error",)
"""Columns that are cut at the edge of the terminal, so that a row is one line; `jobs show` has the text."""
WHOLE = ("id", "job", "state")
"""Columns of unbroken cells, unless one is longer than `MAX_NAME`."""
STYLES: Mapping[str, str] = {
    "done": "green",
    "failed": "bold red",
    "canceled": "dim",
    "running": "cyan",
    "scheduled": "yellow",
    "blocked": "magenta",
    "paused": "yellow",
    "draining": "yellow",
    "aborting": "yellow",
    "open": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "rolling_back": "yellow",
    "rolled_back": "magenta",
    "rollback_failed": "bold red",
    "parked": "bold red",
}
"""The style of a state. The other states have none."""


def _style(column: str, value: object) -> str:
    """In the column `state` the style of the state. A column with the name of a state has numbers of jobs;
    numbers above 0 have its style."""
    name = str(value) if column == "state" else column if isinstance(value, int) and value else ""
    return STYLES.get(name, "")


def shown_id(job: Job) -> str:
    """The id in a table: the short id on a terminal, and the whole id in a pipe, for other programs."""
    return job.short_id if sys.stdout.isatty() else job.id


def _plain_columns(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str]) -> str:
    lines = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    sides = [str.rjust if column in numbers else str.ljust for column in columns]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )


def format_pairs(values: Mapping[str, object]) -> list[str]:
    """Lines with names and values. Further lines of a value are indented, so that none looks like a name."""
    shown = [(escape(name), _text(value).split("\n")) for name, value in values.items()]
    width = min(max((len(name) for name, _ in shown), default=0), MAX_NAME)
    lines = [
        f"{'' if number else name:{width}}  {line}"
        for name, each in shown
        for number, line in enumerate(each)
    ]
    return [line.rstrip() for line in lines]


def _cell(value: object) -> str:
    return escape(_text(value))


def _text(value: object) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def format_time(at: int | datetime | None) -> str | None:
    """A time as ISO 8601."""
    if at is None:
        return None
    moment = at if isinstance(at, datetime) else utc(at)
    return moment.isoformat().replace("+00:00", "Z")


def to_seconds(span: int | None) -> float | None:
    return None if span is None else span / 1_000_000


def format_span(span: int | None) -> str:
    """A span as text: `350ms`, `2.5s`, `12m`, `3h`, `5d`."""
    if span is None:
        return "-"
    size = span / 1_000_000
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if size >= 2 * unit:
            return f"{size / unit:.0f}{name}"
    return f"{size:.3g}s" if size >= 1 or span == 0 else f"{size * 1000:.0f}ms"


def format_age(at: int | None, now: int) -> str:
    return "-" if at is None else format_span(max(0, now - at))


def format_rate(value: Rate | None) -> str | None:
    """A rate in the form that `--rate` accepts."""
    return None if value is None else str(value)


def format_body(data: bytes | None) -> str:
    """A body as text; bytes that are not UTF-8 as their size and the first 32 in hex."""
    if data is None:
        return "-"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{len(data)} bytes: {data[:32].hex(' ')}{' ...' if len(data) > 32 else ''}"


def job_data(job: Job, bodies: bool = True) -> dict[str, Any]:
    """A job as JSON data: times as ISO 8601, spans in seconds, each body with its `<name>_encoding`."""
    data: dict[str, Any] = {}
    for name in job.__struct_fields__:
        value = getattr(job, name)
        if name in _BODIES:
            if bodies:
                data[name], data[f"{name}_encoding"] = decode_body(
                    value, job.content_type if name == "payload" else "application/json"
                )
        elif name.endswith("_at") or name == "lease_until":
            data[name] = format_time(value)
        elif name in _SPANS:
            data[name] = to_seconds(value)
        elif bodies or name not in ("headers", "error"):
            data[name] = value
    data["short_id"] = job.short_id
    return data


def _with_name(priority: int) -> str:
    aliases = [name for name, number in resolve().priorities.items() if number == priority]
    return f"{priority} ({', '.join(aliases)})" if aliases else str(priority)


def _format_attempts(job: Job) -> str:
    runs = f"; started {job.attempts} times" if job.attempts > job.attempts_used else ""
    used = f"{job.attempts_used} of {job.max_attempts}"
    return f"{used}, {job.failures} failed, {job.losses} lost{runs}"


def attempt_data(end: AttemptRecord) -> dict[str, Any]:
    """An attempt of a job's history as JSON data."""
    return {
        "number": end.number,
        "counted": end.counted,
        "outcome": end.outcome,
        "started_at": format_time(end.started_at),
        "ended_at": format_time(end.ended_at),
        "worker": end.owner,
        "error": end.error,
    }


def _format_history(history: Sequence[AttemptRecord]) -> str | None:
    rows = [
        (
            end.number if end.counted else None,
            end.outcome,
            format_time(end.started_at),
            format_span(end.ended_at - end.started_at),
            end.owner,
            (end.error or "").partition("\n")[0][:60] or None,
        )
        for end in history
    ]
    columns = ("attempt", "outcome", "started", "took", "worker", "error")
    return _plain_columns(columns, rows, ("attempt", "took")) if rows else None


DECISIONS = (AttemptOutcome.MARKED, AttemptOutcome.SKIPPED)


def _format_decision(history: Sequence[AttemptRecord]) -> str | None:
    """The decision of a person by which the job is done."""
    found = [end for end in history if end.outcome in DECISIONS]
    return f"{found[-1].outcome} by {found[-1].owner}: {found[-1].error}" if found else None


def format_job(job: Job, why: str, history: Sequence[AttemptRecord]) -> list[str]:
    """Everything about a job for people, one line per field and per attempt."""
    values: dict[str, object] = {
        "id": job.id if job.short_id == job.id else f"{job.id} ({job.short_id})",
        "queue": job.queue + (f", part {job.part}" if job.part else ""),
        "kind": job.kind or None,
        "state": f"{job.state} ({job.reason})" if job.reason else job.state,
        "why": why.partition(": ")[2],
        "attempts": _format_attempts(job),
        "priority": _with_name(job.priority),
        "created": format_time(job.created_at),
        "ready": format_time(job.ready_at),
        "started": format_time(job.started_at),
        "finished": format_time(job.finished_at),
        "fence": job.fence,
    }
    took = job.finished_at - job.started_at if job.finished_at and job.started_at else None
    extra: dict[str, object] = {
        "took": None if took is None else format_span(took),
        "owner": job.owner,
        "lease until": format_time(job.lease_until),
        "expires": format_time(job.expires_at),
        "deleted": format_time(job.purge_at),
        "group": job.group,
        "parent": job.parent,
        "key": None if job.key is None else f"{job.key} ({job.key_policy})",
        "correlation": job.correlation_id,
        "progress": None
        if job.progress_done is None
        else f"{job.progress_done} of {job.progress_total or '?'}",
        "headers": ", ".join(f"{name}={value}" for name, value in job.headers.items()) or None,
        "payload": format_body(job.payload) if len(job.payload) == job.size else f"{job.size} bytes",
        "result": None if job.result is None else format_body(job.result),
        "error": job.error,
        "decision": _format_decision(history),
        "history": _format_history([end for end in history if end.outcome not in DECISIONS]),
    }
    return format_pairs(values | {name: value for name, value in extra.items() if value is not None})
