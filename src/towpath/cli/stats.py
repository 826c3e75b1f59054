"""`stats`: what every queue holds, once or live."""

from __future__ import annotations

import time
from typing import Any

import click

from towpath import Ledger, QueueView, State
from towpath.cli.base import Session, command, names, pass_session
from towpath.cli.failures import OK, nothing
from towpath.cli.output import ago, console, emit, seconds, show, table
from towpath.cli.values import now

COLUMNS = ("queue", *State, "oldest", "note")
BREATH = 0.1
"""Seconds between two looks at least, however busy the ledger is."""


@command("stats")
@click.argument("queue", nargs=-1)
@click.option("--watch", is_flag=True, help="Again after every change, until Ctrl-C. With --json one document per line.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, help="With --watch: at least this often, in seconds."
)
@click.option("--count", type=click.IntRange(1), help="With --watch: end after so many looks.")
@pass_session
def stats(session: Session, /, queue: tuple[str, ...], watch: bool, interval: float, count: int | None) -> int:
    """What every queue holds.

    Jobs by state, the age of the oldest ready job, and what is paused. QUEUE: only these.
    """
    with session.ledger() as ledger:
        if watch:
            _watch(session, ledger, queue, interval, count)
        else:
            data = look(ledger, queue)
            show(session.json, data, lambda: _table(data))
    return OK


def look(ledger: Ledger, only: tuple[str, ...] = ()) -> dict[str, Any]:
    views, at = ledger.queues(), now()
    if missing := [name for name in only if name not in views]:
        raise nothing(f"There is no queue {', '.join(missing)}.", f"Queues: {names(sorted(views))}")
    chosen = [views[name] for name in sorted(views) if not only or name in only]
    total = {state.value: sum(getattr(view.counts, state) for view in chosen) for state in State}
    return {"queues": [queue_counts(view, at) for view in chosen], "total": total}


def queue_counts(view: QueueView, at: int) -> dict[str, Any]:
    age = None if view.oldest_ready is None else max(0, at - view.oldest_ready)
    counts = {state.value: getattr(view.counts, state) for state in State}
    return {"queue": view.name, **counts, "oldest_ready_seconds": seconds(age), "paused": view.paused, "why": view.why}


def _table(data: dict[str, Any]) -> object:
    if not data["queues"]:
        return "There are no queues yet. `towpath put QUEUE DATA` makes one."
    rows = []
    for entry in data["queues"]:
        age = entry["oldest_ready_seconds"]
        oldest = "-" if age is None else ago(0, round(age * 1_000_000))
        note = "paused" + (f": {entry['why']}" if entry["why"] else "") if entry["paused"] else ""
        rows.append([entry["queue"], *(entry[state] for state in State), oldest, note])
    if len(rows) > 1:
        rows.append(["(all)", *(data["total"][state] for state in State), "", ""])
    # The last column only if there is something in it: the rest fits a terminal of 80.
    shown = len(COLUMNS) if any(row[-1] for row in rows) else len(COLUMNS) - 1
    return table(COLUMNS[:shown], [row[:shown] for row in rows], numbers=(*State, "oldest"))


def _watch(session: Session, ledger: Ledger, only: tuple[str, ...], interval: float, count: int | None) -> None:
    """A change wakes it; ages grow without one, so it also looks by the clock."""
    looks = 0
    if session.json or not console().is_terminal:
        while count is None or looks < count:
            seen, data = ledger.version(), look(ledger, only)
            if session.json:
                emit(data)
            else:
                console().print(_table(data))
            looks += 1
            if looks != count:
                _rest(ledger, seen, interval)
        return
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while count is None or looks < count:
            seen = ledger.version()
            live.update(_table(look(ledger, only)), refresh=True)  # type: ignore[arg-type]
            looks += 1
            if looks != count:
                _rest(ledger, seen, interval)


def _rest(ledger: Ledger, seen: int, interval: float) -> None:
    ledger.wait(seen, interval)
    time.sleep(min(interval, BREATH))
