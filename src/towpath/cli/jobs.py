"""`jobs` and `dead`: list, show, explain, retry, cancel and purge jobs by id or by selectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from towpath import Job, Ledger, Query, Selector, State, commands
from towpath.cli.base import (
    OK,
    REFUSED,
    CliGroup,
    F,
    Session,
    bad_input,
    combine,
    confirm,
    join_names,
    not_found,
    pass_session,
    print_stderr,
)
from towpath.cli.messages import apply_one
from towpath.cli.output import (
    format_age,
    format_body,
    format_pairs,
    format_span,
    format_time,
    job_data,
    print_result,
    table,
)
from towpath.cli.values import Header, Moment, now
from towpath.errors import UnknownJob
from towpath.fleet import explained
from towpath.settings import resolve

STATES = click.Choice([state.value for state in State])


class JobSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Ids or selectors from the command line. Without any it is a usage error; `--all` selects every job."""

    ids: tuple[str, ...] = ()
    queue: str | None = None
    part: str | None = None
    kind: str | None = None
    group: str | None = None
    key: str | None = None
    state: tuple[str, ...] = ()
    created_before: int | None = None
    finished_before: int | None = None
    everything: bool = False

    @property
    def by_id(self) -> bool:
        return bool(self.ids)

    def selector(self, states: Sequence[State] = ()) -> Selector:
        given = {name: getattr(self, name) for name in ("queue", "part", "kind", "group", "key")}
        given |= {"created_before": self.created_before, "finished_before": self.finished_before}
        chosen = tuple(State(state) for state in self.state) or tuple(states)
        by_field = any(value is not None for value in given.values())
        if not (self.ids or self.everything or self.state or by_field):
            raise click.UsageError(
                "Select jobs: ids, or --queue, --kind and similar options, or --all.",
                click.get_current_context(),
            )
        if self.ids and (self.everything or by_field):
            raise click.UsageError("Use either ids or selectors, not both.", click.get_current_context())
        return Selector(ids=self.ids, states=() if self.ids else chosen or tuple(State), **given)

    def describe(self, which: str) -> str:
        """The selection as text; `which` names the states that the command is about."""
        of = [
            f"{name} {getattr(self, name)}"
            for name in ("queue", "part", "kind", "group", "key")
            if getattr(self, name)
        ]
        return f"every {' or '.join(self.state) or which} job" + (f" of {', '.join(of)}" if of else "")


def selectors(states: bool = True) -> Callable[[F], F]:
    """The options that fill a `Where`."""
    chosen = [
        click.option("--queue", help="Queue, or pattern with *."),
        click.option("--part", help="Part of the queue."),
        click.option("--kind", help="Kind (task name)."),
        click.option("--group", help="Group id."),
        click.option("--key", help="Key."),
        click.option(
            "--created-before",
            type=Moment(past=True),
            help="Created before a time, or longer ago than a span such as 7d.",
        ),
        click.option(
            "--finished-before",
            type=Moment(past=True),
            help="Finished before a time, or longer ago than a span.",
        ),
        click.option("--all", "everything", is_flag=True, help="All jobs of all queues."),
    ]
    if states:
        chosen.insert(
            5,
            click.option("--state", type=STATES, multiple=True, help="State. Repeatable."),
        )
    return combine(*chosen, click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."))


def require_jobs(ledger: Ledger, ids: Sequence[str]) -> None:
    """Raise before any change if an id is unknown, so that a mistyped id causes no partial change."""
    unknown = [id for id in ids if ledger.get(id) is None]
    if len(unknown) == 1:
        raise UnknownJob(id=unknown[0])
    if unknown:
        raise not_found(
            f"There are no jobs {join_names(unknown)}; nothing was changed.",
            "`towpath jobs list` lists the jobs.",
        )


def require_queue(ledger: Ledger, queue: str | None) -> None:
    if queue is None or "*" in queue:
        return
    known = ledger.queues()
    if queue not in known:
        raise not_found(f"There is no queue {queue}.", f"Queues: {join_names(sorted(known))}")


def revive_matching(ledger: Ledger, where: Selector) -> tuple[dict[str, Any], int]:
    """Retry all matching jobs in batches. Refused jobs match again, so stop when a batch revives none."""
    revived, refused = 0, dict[str, str]()
    while True:
        answer = apply_one(ledger, commands.Revive(where=where))
        assert isinstance(answer, commands.Revived)
        revived += answer.revived
        refused.update(answer.refused)
        if not answer.more or not answer.revived:
            break
    data = {
        "revived": revived,
        "refused": [{"id": id, "why": why} for id, why in refused.items()],
        "more": answer.more,
    }
    return data, REFUSED if refused or answer.more else OK


def cancel_matching(ledger: Ledger, where: Selector) -> dict[str, Any]:
    canceled = requested = 0
    while True:
        answer = apply_one(ledger, commands.Cancel(where=where))
        assert isinstance(answer, commands.Canceled)
        canceled, requested = canceled + answer.canceled, requested + answer.requested
        if not answer.more or not (answer.canceled or answer.requested):
            return {"canceled": canceled, "requested": requested}


def purge_matching(ledger: Ledger, where: Selector) -> dict[str, Any]:
    purged = 0
    while True:
        answer = apply_one(ledger, commands.Purge(where=where))
        assert isinstance(answer, commands.Purged)
        purged += answer.purged
        if not answer.more or not answer.purged:
            return {"purged": purged}


def describe_revived(data: dict[str, Any]) -> list[str]:
    lines = [f"{data['revived']} retried"] + [
        f"refused: {each['id']}: {each['why']}" for each in data["refused"][:20]
    ]
    if len(data["refused"]) > 20:
        lines.append(f"{len(data['refused']) - 20} more were refused; --json lists them")
    return lines


FINISHED = (State.DONE, State.FAILED, State.CANCELED)
COLUMNS = ("id", "queue", "kind", "state", "reason", "attempts", "age", "error")


@click.group("jobs", cls=CliGroup)
def jobs() -> None:
    """List, show, explain, retry, cancel and delete jobs."""


class JobListOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `jobs list`."""

    queue: str | None
    part: str | None
    state: tuple[str, ...]
    kind: str | None
    group: str | None
    key: str | None
    owner: str | None
    correlation_id: str | None
    header: tuple[str, str] | None
    since: int | None
    until: int | None
    oldest_first: bool
    limit: int
    page: str | None

    def query(self, bodies: bool) -> Query:
        # Every other field has the name that `Query` uses.
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("state", "since", "until"):
            del fields[name]
        states = tuple(State(state) for state in self.state)
        return Query(
            **fields, states=states, created_from=self.since, created_before=self.until, bodies=bodies
        )


@jobs.command("list")
@click.option("--queue", help="Queue, or pattern with *.")
@click.option("--part", help="Part of the queue.")
@click.option("--state", type=STATES, multiple=True, help="State. Repeatable.")
@click.option("--kind", help="Kind (task name).")
@click.option("--group", help="Group id.")
@click.option("--key", help="Key.")
@click.option("--owner", help="Worker that holds the job.")
@click.option("--correlation-id", help="Correlation id.")
@click.option("--header", type=Header(), help="Header NAME=VALUE.")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option("--until", type=Moment(past=True), help="Created before a time, or longer ago than a span.")
@click.option("--oldest-first", is_flag=True, help="Oldest first. Default: newest first.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of jobs."
)
@click.option("--page", help="Continue from here: `next` of an earlier result.")
@pass_session
def list_jobs(session: Session, /, **options: Any) -> int:
    """List jobs, newest first."""
    return run_list(session, JobListOptions(**options))


def run_list(session: Session, wanted: JobListOptions) -> int:
    with session.ledger() as ledger:
        require_queue(ledger, wanted.queue)
        page = ledger.find(wanted.query(bodies=True))
    data = {"jobs": [job_data(job) for job in page.jobs], "next": page.next}
    print_result(session.json, data, lambda: _table(page.jobs))
    if page.next is not None and not session.json:
        print_stderr([f"More jobs: add --page {page.next}"])
    return OK


def _table(found: tuple[Job, ...]) -> object:
    if not found:
        print_stderr(["No job matches."])
        return None
    at = now()
    return table(COLUMNS, [_row(job, at) for job in found], numbers=("attempts", "age"))


def _row(job: Job, at: int) -> tuple[object, ...]:
    attempts, error = f"{job.attempts}/{job.max_attempts}", (job.error or "").partition("\n")[0][:60]
    return (
        job.id,
        job.queue,
        job.kind or None,
        job.state,
        job.reason or None,
        attempts,
        format_age(job.created_at, at),
        error,
    )


@jobs.command("show")
@click.argument("id")
@pass_session
def show_job(session: Session, /, id: str) -> int:
    """Show everything that is stored about one job."""
    with session.ledger() as ledger:
        job = _get(ledger, id)
        why = explained(ledger, id, now()).sentence
    print_result(session.json, {**job_data(job), "explanation": why}, lambda: _format_job(job, why))
    return OK


def _get(ledger: Ledger, id: str) -> Job:
    job = ledger.get(id)
    if job is None:
        raise UnknownJob(id=id)
    return job


def _with_name(priority: int) -> str:
    aliases = [name for name, number in resolve().priorities.items() if number == priority]
    return f"{priority} ({', '.join(aliases)})" if aliases else str(priority)


def _format_job(job: Job, why: str) -> list[str]:
    values: dict[str, object] = {
        "id": job.id,
        "queue": job.queue + (f", part {job.part}" if job.part else ""),
        "kind": job.kind or None,
        "state": f"{job.state} ({job.reason})" if job.reason else job.state,
        "why": why.partition(": ")[2],
        "attempts": f"{job.attempts} of {job.max_attempts}, {job.failures} failed, {job.losses} lost",
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
        "payload": format_body(job.payload),
        "result": None if job.result is None else format_body(job.result),
        "error": job.error,
    }
    return format_pairs(values | {name: value for name, value in extra.items() if value is not None})


@jobs.command("explain")
@click.argument("id")
@pass_session
def explain(session: Session, /, id: str) -> int:
    """Explain in one sentence why a job does not run."""
    with session.ledger() as ledger:
        found = explained(ledger, id, now())
    data = {
        "id": found.id,
        "gate": found.gate,
        "sentence": found.sentence,
        "by": found.by,
        "count": found.count,
    }
    print_result(session.json, {**data, "until": format_time(found.until)}, found.sentence)
    return OK


@jobs.command("retry")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def retry(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Retry failed and canceled jobs.

    By id or by selectors. Jobs that failed because of one of these are retried too. Exit code 1 if any is
    refused."""
    return run_retry(session, JobSelection(ids=ids, **options), yes, (State.FAILED, State.CANCELED))


def run_retry(session: Session, where: JobSelection, yes: bool, states: tuple[State, ...]) -> int:
    selector = where.selector(states)
    with session.ledger() as ledger:
        if where.by_id:
            require_jobs(ledger, where.ids)
        else:
            require_queue(ledger, where.queue)
            confirm(f"This retries {where.describe(' or '.join(states))}.", yes)
        data, code = revive_matching(ledger, selector)
    print_result(session.json, data, describe_revived(data))
    return code


@jobs.command("cancel")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def cancel(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Cancel jobs by id or by selectors.

    Waiting jobs are canceled; running jobs receive a request to stop. Exit code 1 if a named job has already
    finished."""
    where = JobSelection(ids=ids, **options)
    unfinished = tuple(state for state in State if state not in FINISHED)
    selector = where.selector(unfinished)
    over: list[dict[str, Any]] = []
    with session.ledger() as ledger:
        if where.by_id:
            require_jobs(ledger, where.ids)
            states = {id: job.state for id in where.ids if (job := ledger.get(id)) is not None}
            over = [{"id": id, "state": state} for id, state in states.items() if state in FINISHED]
        else:
            require_queue(ledger, where.queue)
            confirm(f"This cancels {where.describe('unfinished')}.", yes)
        data = {**cancel_matching(ledger, selector), "finished": over}
    lines = [f"{data['canceled']} canceled, {data['requested']} running jobs requested to stop"]
    print_result(session.json, data, [*lines, *(f"{each['id']} is already {each['state']}" for each in over)])
    return REFUSED if any(each["state"] != State.CANCELED for each in over) else OK


@jobs.command("purge")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def purge(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Delete finished jobs for good.

    By id or by selectors. Unfinished jobs are not deleted.
    """
    return run_purge(session, JobSelection(ids=ids, **options), yes, FINISHED)


def run_purge(session: Session, where: JobSelection, yes: bool, states: tuple[State, ...]) -> int:
    selector = where.selector(states)
    left: list[str] = []
    with session.ledger() as ledger:
        if where.by_id:
            require_jobs(ledger, where.ids)
        else:
            require_queue(ledger, where.queue)
        what = f"{len(where.ids)} jobs" if where.by_id else where.describe(" or ".join(states))
        confirm(f"This deletes {what} for good.", yes)
        data = purge_matching(ledger, selector)
        left = [id for id in where.ids if ledger.get(id) is not None]
    lines = [f"{data['purged']} deleted", *(f"{id} is not finished: cancel it first" for id in left)]
    print_result(session.json, {**data, "unfinished": left}, lines)
    return REFUSED if left else OK


FAILED = (State.FAILED,)


@click.group("dead", cls=CliGroup)
def dead() -> None:
    """List, retry and delete dead letters: jobs that failed for good. They are kept until retried or
    purged."""


@dead.command("list")
@click.option("--queue", help="Queue, or pattern with *.")
@click.option("--kind", help="Kind (task name).")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of jobs."
)
@click.option("--page", help="Continue from here: `next` of an earlier result.")
@pass_session
def list_dead(session: Session, /, **options: Any) -> int:
    """List failed jobs with their errors, newest first."""
    rest: dict[str, Any] = dict.fromkeys(
        ("part", "group", "key", "owner", "correlation_id", "header", "until")
    )
    return run_list(session, JobListOptions(**options, **rest, state=("failed",), oldest_first=False))


@dead.command("retry")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors(states=False)
@pass_session
def retry_dead(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Retry failed jobs.

    By id, all of a queue or kind, or --all. Exit code 1 if any is refused.
    """
    return run_retry(session, _dead_selection(session, ids, options), yes, FAILED)


@dead.command("purge")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors(states=False)
@pass_session
def purge_dead(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Delete failed jobs for good.

    By id, all of a queue or kind, or --all.
    """
    return run_purge(session, _dead_selection(session, ids, options), yes, FAILED)


def _dead_selection(session: Session, ids: tuple[str, ...], options: dict[str, Any]) -> JobSelection:
    """The selection of `dead retry` and `dead purge`. An id that is not a dead letter is an error."""
    if ids:
        with session.ledger() as ledger:
            for id in ids:
                job = ledger.get(id)
                if job is not None and job.state is not State.FAILED:
                    raise bad_input(
                        f"Job {id} is {job.state}, not a dead letter.", f"See `towpath jobs show {id}`."
                    )
    return JobSelection(ids=ids, **options)
