"""`history`: finished jobs with their times and errors."""

from __future__ import annotations

from typing import Any

import click

from towpath import State
from towpath.cli.base import Session, command, pass_session
from towpath.cli.jobs import FINISHED, JobListOptions, paging_options, run_list
from towpath.cli.output import format_age, format_span, job_data, shown_id, table, to_seconds
from towpath.cli.values import Moment, now
from towpath.commands import Job

COLUMNS = ("id", "kind", "state", "finished", "took", "attempts", "error")


@command("history")
@click.argument("queue", required=False)
@click.option("--kind", help="Kind (task name).")
@click.option(
    "--state",
    type=click.Choice([state.value for state in FINISHED]),
    multiple=True,
    help="State. Repeatable.",
)
@click.option("--group", help="Group id.")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option("--until", type=Moment(past=True), help="Created before a time, or longer ago than a span.")
@paging_options
@pass_session
def history(session: Session, /, **options: Any) -> int:
    """List finished jobs, newest first.

    With the time of their end, the duration of the last attempt, and the error. QUEUE may be a pattern with
    *. The order is by the time of the enqueue, not of the end."""
    unused: dict[str, Any] = dict.fromkeys(("part", "key", "owner", "correlation_id", "header"))
    options["state"] = options["state"] or tuple(state.value for state in FINISHED)
    wanted = JobListOptions(**options, **unused, oldest_first=False)
    return run_list(session, wanted, _data, _table)


def _took(job: Job) -> int | None:
    """Microseconds of the last attempt."""
    return job.finished_at - job.started_at if job.finished_at and job.started_at else None


def _data(job: Job) -> dict[str, Any]:
    return {**job_data(job), "duration": to_seconds(_took(job))}


def _table(found: tuple[Job, ...]) -> object:
    at = now()
    rows = [
        (
            shown_id(job),
            job.kind or f"message of {job.queue}",
            job.state,
            f"{format_age(job.finished_at, at)} ago",
            format_span(_took(job)),
            f"{job.attempts_used}/{job.max_attempts}",
            "" if job.state is State.DONE else (job.error or job.reason or "").partition("\n")[0][:60],
        )
        for job in found
    ]
    return table(COLUMNS, rows, numbers=("finished", "took", "attempts"))
