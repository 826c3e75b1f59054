"""`jobs` and `dead`: list, show, explain, retry, cancel and purge jobs by id or by selectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from towpath import Ledger, State, commands
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
from towpath.cli.debug import debug_job
from towpath.cli.decisions import mark_done, skip
from towpath.cli.messages import apply_one
from towpath.cli.output import (
    attempt_data,
    format_age,
    format_job,
    format_time,
    job_data,
    print_result,
    shown_id,
    table,
)
from towpath.cli.targets import find_job, find_jobs, known_group, known_job
from towpath.cli.values import Header, Moment, now
from towpath.commands import Job, Query, Selector
from towpath.fleet import explained

STATES = click.Choice([state.value for state in State])
GENERATION = click.IntRange(0, 2**31)
PARENT_HELP = "Id of the job that appended them."
NAMED = ("queue", "part", "kind", "group", "parent", "generation", "key")
"""The selectors that are shown before a change."""


class JobSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Ids or selectors from the command line. Without any it is a usage error; `--all` selects every job."""

    ids: tuple[str, ...] = ()
    queue: str | None = None
    part: str | None = None
    kind: str | None = None
    group: str | None = None
    parent: str | None = None
    generation: int | None = None
    key: str | None = None
    state: tuple[str, ...] = ()
    created_before: int | None = None
    finished_before: int | None = None
    everything: bool = False

    @property
    def by_id(self) -> bool:
        return bool(self.ids)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*NAMED, "created_before", "finished_before")}

    def check(self) -> None:
        by_field = any(value is not None for value in self._fields().values())
        if not (self.ids or self.everything or self.state or by_field):
            raise click.UsageError(
                "Select jobs: ids, or --queue, --kind and similar options, or --all.",
                click.get_current_context(),
            )
        if self.ids and (self.everything or by_field):
            raise click.UsageError("Use either ids or selectors, not both.", click.get_current_context())

    def resolved(self, ledger: Ledger) -> JobSelection:
        """The same with whole ids. Raises if a job or the queue does not exist."""
        require_queue(ledger, self.queue)
        return msgspec.structs.replace(with_whole_ids(ledger, self), ids=tuple(find_jobs(ledger, self.ids)))

    def selector(self, states: Sequence[State] = ()) -> Selector:
        chosen = tuple(State(state) for state in self.state) or tuple(states)
        return Selector(ids=self.ids, states=() if self.ids else chosen or tuple(State), **self._fields())

    def describe(self, which: str) -> str:
        """The selection as text; `which` names the states that the command is about."""
        of = [f"{name} {value}" for name in NAMED if (value := getattr(self, name)) not in (None, "")]
        return f"every {' or '.join(self.state) or which} job" + (f" of {', '.join(of)}" if of else "")


def selectors(states: bool = True) -> Callable[[F], F]:
    """The options that fill a `Where`."""
    chosen = [
        click.option("--queue", help="Queue, or pattern with *."),
        click.option("--part", help="Part of the queue."),
        click.option("--kind", help="Kind (task name)."),
        click.option("--group", help="Group id."),
        click.option("--parent", help=PARENT_HELP),
        click.option("--generation", type=GENERATION, help="Generation."),
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
            7,
            click.option("--state", type=STATES, multiple=True, help="State. Repeatable."),
        )
    return combine(*chosen, click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."))


T = TypeVar("T", "JobSelection", "JobListOptions")


def with_whole_ids(ledger: Ledger, given: T) -> T:
    """The same with the whole ids of the group and of the parent."""
    group = None if given.group is None else known_group(ledger, given.group)
    parent = None if given.parent is None else known_job(ledger, given.parent)
    return msgspec.structs.replace(given, group=group, parent=parent)


def require_queue(ledger: Ledger, queue: str | None) -> None:
    if queue is None or "*" in queue:
        return
    if ledger.queue(queue) is None:
        raise not_found(f"There is no queue {queue}.", f"Queues: {join_names(sorted(ledger.queues()))}")


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


paging_options = combine(
    click.option(
        "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of jobs."
    ),
    click.option("--page", help="Continue from here: `next` of an earlier result."),
)


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
    parent: str | None = None
    generation: int | None = None

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
@click.option("--parent", help=PARENT_HELP)
@click.option("--generation", type=GENERATION, help="Generation.")
@click.option("--key", help="Key.")
@click.option("--owner", help="Worker that holds the job.")
@click.option("--correlation-id", help="Correlation id.")
@click.option("--header", type=Header(), help="Header NAME=VALUE.")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option("--until", type=Moment(past=True), help="Created before a time, or longer ago than a span.")
@click.option("--oldest-first", is_flag=True, help="Oldest first. Default: newest first.")
@paging_options
@pass_session
def list_jobs(session: Session, /, **options: Any) -> int:
    """List jobs, newest first."""
    return run_list(session, JobListOptions(**options))


def run_list(
    session: Session,
    wanted: JobListOptions,
    data_of: Callable[[Job], dict[str, Any]] = job_data,
    table_of: Callable[[tuple[Job, ...]], object] | None = None,
) -> int:
    with session.ledger() as ledger:
        require_queue(ledger, wanted.queue)
        page = ledger.find(with_whole_ids(ledger, wanted).query(bodies=True))
    data = {"jobs": [data_of(job) for job in page.jobs], "next": page.next}
    print_result(session.json, data, lambda: (table_of or _table)(page.jobs) if page.jobs else None)
    if not page.jobs and not session.json:
        print_stderr(["No job matches."])
    if page.next is not None and not session.json:
        print_stderr([f"More jobs: add --page {page.next}"])
    return OK


def _table(found: tuple[Job, ...]) -> object:
    at = now()
    return table(COLUMNS, [_row(job, at) for job in found], numbers=("attempts", "age"))


def _row(job: Job, at: int) -> tuple[object, ...]:
    attempts, error = f"{job.attempts_used}/{job.max_attempts}", (job.error or "").partition("\n")[0][:60]
    return (
        shown_id(job),
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
        id = find_job(ledger, id).id
        job, why = ledger.get(id), explained(ledger, id, now()).sentence
        history = ledger.attempts(id)
    assert job is not None
    data = {**job_data(job), "explanation": why, "history": [attempt_data(end) for end in history]}
    print_result(session.json, data, lambda: format_job(job, why, history))
    return OK


@jobs.command("explain")
@click.argument("id")
@pass_session
def explain(session: Session, /, id: str) -> int:
    """Explain in one sentence why a job does not run."""
    with session.ledger() as ledger:
        found = explained(ledger, find_job(ledger, id).id, now())
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
    where.check()
    with session.ledger() as ledger:
        where = where.resolved(ledger)
        if not where.by_id:
            confirm(f"This retries {where.describe(' or '.join(states))}.", yes)
        data, code = revive_matching(ledger, where.selector(states))
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
    where.check()
    with session.ledger() as ledger:
        where = where.resolved(ledger)
        named = ledger.get_many(where.ids, bodies=False)
        over = [{"id": id, "state": named[id].state} for id in where.ids if named[id].state in FINISHED]
        if not where.by_id:
            confirm(f"This cancels {where.describe('unfinished')}.", yes)
        data = {**cancel_matching(ledger, where.selector(unfinished)), "finished": over}
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
    where.check()
    with session.ledger() as ledger:
        where = where.resolved(ledger)
        what = f"{len(where.ids)} jobs" if where.by_id else where.describe(" or ".join(states))
        confirm(f"This deletes {what} for good.", yes)
        data = purge_matching(ledger, where.selector(states))
        left = [id for id in where.ids if ledger.get(id) is not None]
    lines = [f"{data['purged']} deleted", *(f"{id} is not finished: cancel it first" for id in left)]
    print_result(session.json, {**data, "unfinished": left}, lines)
    return REFUSED if left else OK


for command in (mark_done, skip, debug_job):
    jobs.add_command(command)

FAILED = (State.FAILED,)


@click.group("dead", cls=CliGroup)
def dead() -> None:
    """List, retry and delete dead letters: jobs that failed for good. They are kept until retried or
    purged."""


@dead.command("list")
@click.option("--queue", help="Queue, or pattern with *.")
@click.option("--kind", help="Kind (task name).")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@paging_options
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
    where = JobSelection(ids=ids, **options)
    where.check()
    if where.by_id:
        with session.ledger() as ledger:
            for id, job in find_jobs(ledger, ids).items():
                if job.state is not State.FAILED:
                    raise bad_input(
                        f"Job {id} is {job.state}, not a dead letter.", f"See `towpath jobs show {id}`."
                    )
    return where
