"""Output of commands: JSON for programs, tables and sentences for people. rich is imported only for
tables."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath import Job, Rate
from towpath.escapes import escape, escape_json

if TYPE_CHECKING:
    from rich.console import Console

MAX_NAME = 40
"""Width of the names in `format_pairs`. A longer name is not cut; its value moves to the right."""
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
        click.echo("\n".join(map(escape, [shown] if isinstance(shown, str) else shown)))
    elif shown is not None:
        console().print(shown)


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
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_cell(value)) for value in row))
    return made


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


def format_time(at: int | None) -> str | None:
    """A ledger time as ISO 8601."""
    if at is None:
        return None
    return (
        datetime.fromtimestamp(at // 1_000_000, UTC)
        .replace(microsecond=at % 1_000_000)
        .isoformat()
        .replace("+00:00", "Z")
    )


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


def decode_body(data: bytes | None, content_type: str = "application/json") -> tuple[Any, str]:
    """(value, encoding): JSON decoded, other UTF-8 as text, everything else as base64."""
    if data is None:
        return None, "none"
    if content_type == "application/json":
        try:
            return msgspec.json.decode(data), "json"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    try:
        return data.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


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
    return data
