"""`stats`: the number of jobs by queue and state, once or continuously."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import click

from towpath import Ledger, State
from towpath.cli.base import OK, Session, command, join_names, not_found, pass_session
from towpath.cli.output import console, format_age, print_json, print_result, table, to_seconds
from towpath.cli.values import now
from towpath.commands import Job, Query, QueueView
from towpath.escapes import escape
from towpath.fleet import WorkerView, queues_matching, spell_lanes, workers_of

COLUMNS = ("queue", *State, "oldest", "note")
MAX_RUNNING_ROWS = 20
"""Maximum number of running jobs shown as rows."""
MIN_INTERVAL = 0.1
"""Minimum seconds between two reads, however often the ledger changes."""


@command("stats")
@click.argument("queue", nargs=-1)
@click.option(
    "--watch",
    is_flag=True,
    help="Repeat after every change, with running jobs and their progress, until Ctrl-C. "
    "With --json one document per line.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    help="With --watch: maximum seconds between two reads. Default: 1.",
)
@click.option("--count", type=click.IntRange(1), help="With --watch: end after this number of reads.")
@pass_session
def stats(
    session: Session, /, queue: tuple[str, ...], watch: bool, interval: float, count: int | None
) -> int:
    """Show the number of jobs by queue and state.

    Also the age of the oldest ready job, and pauses. QUEUE selects queues.
    """
    with session.ledger() as ledger:
        if watch:
            _watch(session, ledger, queue, interval, count)
        else:
            data = read_counts(ledger, queue)
            print_result(session.json, data, lambda: _table(data))
    return OK


def read_counts(ledger: Ledger, only: tuple[str, ...] = ()) -> dict[str, Any]:
    found = queues_matching(ledger, ",".join(sorted(only)) or "*")
    chosen, at = [view for view in found if not only or view.name in only], now()
    if missing := [name for name in only if name not in {view.name for view in chosen}]:
        known = join_names(sorted(ledger.queues()))
        raise not_found(f"There is no queue {', '.join(missing)}.", f"Queues: {known}")
    total = {state.value: sum(getattr(view.counts, state) for view in chosen) for state in State}
    return {"queues": [queue_counts(view, at) for view in chosen], "total": total}


def queue_counts(view: QueueView, at: int) -> dict[str, Any]:
    age = None if view.oldest_ready is None else max(0, at - view.oldest_ready)
    counts = {state.value: getattr(view.counts, state) for state in State}
    return {
        "queue": view.name,
        **counts,
        "oldest_ready_seconds": to_seconds(age),
        "paused": view.paused,
        "why": view.why,
    }


def _table(data: dict[str, Any]) -> object:
    if not data["queues"]:
        return "There are no queues yet. `towpath put QUEUE DATA` creates one."
    rows = []
    for entry in data["queues"]:
        age = entry["oldest_ready_seconds"]
        oldest = "-" if age is None else format_age(0, round(age * 1_000_000))
        note = "paused" + (f": {entry['why']}" if entry["why"] else "") if entry["paused"] else ""
        rows.append([entry["queue"], *(entry[state] for state in State), oldest, note])
    if len(rows) > 1:
        rows.append(["(all)", *(data["total"][state] for state in State), "", ""])
    # Omit the last column if it is empty: the others fit into 80 columns.
    shown = len(COLUMNS) if any(row[-1] for row in rows) else len(COLUMNS) - 1
    return table(COLUMNS[:shown], [row[:shown] for row in rows], numbers=(*State, "oldest"))


class RunningJobs:
    """Running jobs with their progress, and their speed since the previous read."""

    def __init__(self, ledger: Ledger, only: tuple[str, ...]) -> None:
        self._ledger, self._only = ledger, only
        self._before: dict[str, tuple[float, int]] = {}
        self._workers: dict[str, WorkerView] = {}

    def lanes(self, running: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
        """The number of running jobs per lane and kind, for the lanes of running workers."""
        lanes = sorted({lane.name for worker in self._workers.values() for lane in worker.lanes})
        return {name: Counter(entry["kind"] for entry in running if entry["lane"] == name) for name in lanes}

    def read(self, at: float) -> list[dict[str, Any]]:
        jobs = self._ledger.find(Query(states=(State.RUNNING,), bodies=False, limit=1000)).jobs
        mine = [job for job in jobs if not self._only or job.queue in self._only]
        self._workers = {worker.owner: worker for worker in workers_of(self._ledger)}
        found = [self._entry(job, at) for job in mine]
        self._before = {job.id: (at, job.progress_done) for job in mine if job.progress_done is not None}
        return found

    def _entry(self, job: Job, at: float) -> dict[str, Any]:
        done, speed = job.progress_done, None
        if done is not None and job.id in self._before:
            then, before = self._before[job.id]
            speed = round(max(0, done - before) / max(at - then, 0.001), 1)
        worker = self._workers.get(job.owner or "")
        lane = None if worker is None else worker.lane_of(job.queue)
        place = {"id": job.id, "kind": job.kind, "queue": job.queue, "owner": job.owner, "lane": lane}
        place["short_id"] = job.short_id
        return {**place, "done": done, "total": job.progress_total, "per_second": speed}


def _render(data: dict[str, Any]) -> object:
    """The table of queues, a row per running job with progress, and a summary of running jobs."""
    from rich.console import Group

    running, parts = data["running"], [_table(data)]
    if not running:
        return parts[0]
    rows, column = [], "short_id" if sys.stdout.isatty() else "id"
    for entry in sorted(
        (entry for entry in running if entry["done"] is not None), key=lambda entry: str(entry["id"])
    )[:MAX_RUNNING_ROWS]:
        share = f"{entry['done'] / entry['total']:.0%}" if entry["total"] else "-"
        rows.append([entry["kind"], entry[column], entry["done"], entry["total"], share, entry["per_second"]])
    if rows:
        parts.append(
            table(
                ("kind", "job", "done", "total", "%", "per second"),
                rows,
                ("done", "total", "%", "per second"),
            )
        )
    if data["lanes"]:
        parts.append(escape(spell_lanes(data["lanes"], {})))
    kinds = Counter(entry["kind"] or "(message)" for entry in running)
    waiting = sum(data["total"][state] for state in ("ready", "scheduled", "blocked"))
    parts.append(
        escape(
            ", ".join([*(f"{count} {kind}" for kind, count in sorted(kinds.items())), f"{waiting} waiting"])
        )
    )
    return Group(*parts)  # type: ignore[arg-type]


def _watch(
    session: Session, ledger: Ledger, only: tuple[str, ...], interval: float, count: int | None
) -> None:
    """Print again after each change, and after `interval`, because ages grow without a change."""
    reads, running_jobs = 0, RunningJobs(ledger, only)
    if session.json or not console().is_terminal:
        while count is None or reads < count:
            seen, data = ledger.version(), _read_live(ledger, only, running_jobs)
            if session.json:
                print_json(data)
            else:
                console().print(_render(data))
            reads += 1
            if reads != count:
                _wait_for_change(ledger, seen, interval)
        return
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while count is None or reads < count:
            seen, data = ledger.version(), _read_live(ledger, only, running_jobs)
            live.update(_render(data), refresh=True)  # type: ignore[arg-type]
            reads += 1
            if reads != count:
                _wait_for_change(ledger, seen, interval)


def _read_live(ledger: Ledger, only: tuple[str, ...], running_jobs: RunningJobs) -> dict[str, Any]:
    running = running_jobs.read(time.monotonic())
    return {**read_counts(ledger, only), "running": running, "lanes": running_jobs.lanes(running)}


def _wait_for_change(ledger: Ledger, seen: int, interval: float) -> None:
    ledger.wait(seen, interval)
    time.sleep(min(interval, MIN_INTERVAL))
