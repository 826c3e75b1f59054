"""`jobs`: list, show, explain, retry, cancel, purge."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from towpath import Job, Ledger, Query, State
from towpath.cli import bulk
from towpath.cli.base import Branch, Session, confirm, pass_session
from towpath.cli.bulk import STATES, Where, selectors
from towpath.cli.failures import OK, REFUSED, say
from towpath.cli.output import ago, job_data, moment, pairs, show, shown_body, spell, table
from towpath.cli.values import Header, Moment, now
from towpath.errors import UnknownJob
from towpath.fleet import explained
from towpath.settings import resolve

FINISHED = (State.DONE, State.FAILED, State.CANCELED)
COLUMNS = ("id", "queue", "kind", "state", "reason", "attempts", "age", "error")


@click.group("jobs", cls=Branch)
def jobs() -> None:
    """Look at jobs, and bring them back, stop or delete them."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `list`, named as `Query` names them."""

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
        same = ("queue", "part", "kind", "group", "key", "owner", "correlation_id", "header", "oldest_first", "limit", "page")
        fields = {name: getattr(self, name) for name in same}
        states = tuple(State(state) for state in self.state)
        return Query(**fields, states=states, created_from=self.since, created_before=self.until, bodies=bodies)


@jobs.command("list")
@click.option("--queue", help="Of this queue, or pattern with *.")
@click.option("--part", help="Of this part.")
@click.option("--state", type=STATES, multiple=True, help="In this state; as often as you like.")
@click.option("--kind", help="Of this kind (task name).")
@click.option("--group", help="Of this group.")
@click.option("--key", help="With this key.")
@click.option("--owner", help="Held by this worker.")
@click.option("--correlation-id", help="With this correlation id.")
@click.option("--header", type=Header(), help="With this header: NAME=VALUE.")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option("--until", type=Moment(past=True), help="Created before a time, or longer ago than a span.")
@click.option("--oldest-first", is_flag=True, help="In the order they came; else the newest first.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="At most so many.")
@click.option("--page", help="Go on from here: the `next` of an earlier answer.")
@pass_session
def list_jobs(session: Session, /, **options: Any) -> int:
    """Jobs, newest first."""
    return listed(session, Filter(**options))


def listed(session: Session, wanted: Filter) -> int:
    with session.ledger() as ledger:
        bulk.queue_must_exist(ledger, wanted.queue)
        page = ledger.find(wanted.query(bodies=True))
    data = {"jobs": [job_data(job) for job in page.jobs], "next": page.next}
    show(session.json, data, lambda: _table(page.jobs))
    if page.next is not None and not session.json:
        say([f"There are more: add --page {page.next}"])
    return OK


def _table(found: tuple[Job, ...]) -> object:
    if not found:
        say(["No job matches."])
        return None
    at = now()
    return table(COLUMNS, [_row(job, at) for job in found], numbers=("attempts", "age"))


def _row(job: Job, at: int) -> tuple[object, ...]:
    attempts, error = f"{job.attempts}/{job.max_attempts}", (job.error or "").partition("\n")[0][:60]
    return job.id, job.queue, job.kind or None, job.state, job.reason or None, attempts, ago(job.created_at, at), error


@jobs.command("show")
@click.argument("id")
@pass_session
def show_job(session: Session, /, id: str) -> int:
    """Everything the ledger knows about one job."""
    with session.ledger() as ledger:
        job = _get(ledger, id)
        why = explained(ledger, id, now()).sentence
    show(session.json, {**job_data(job), "explanation": why}, lambda: _described(job, why))
    return OK


def _get(ledger: Ledger, id: str) -> Job:
    job = ledger.get(id)
    if job is None:
        raise UnknownJob(id=id)
    return job


def _with_name(priority: int) -> str:
    names = [name for name, number in resolve().priorities.items() if number == priority]
    return f"{priority} ({', '.join(names)})" if names else str(priority)


def _described(job: Job, why: str) -> list[str]:
    values: dict[str, object] = {
        "id": job.id,
        "queue": job.queue + (f", part {job.part}" if job.part else ""),
        "kind": job.kind or None,
        "state": f"{job.state} ({job.reason})" if job.reason else job.state,
        "why": why.partition(": ")[2],
        "attempts": f"{job.attempts} of {job.max_attempts}, {job.failures} failed, {job.losses} lost",
        "priority": _with_name(job.priority),
        "created": moment(job.created_at),
        "ready": moment(job.ready_at),
        "started": moment(job.started_at),
        "finished": moment(job.finished_at),
        "fence": job.fence,
    }
    took = job.finished_at - job.started_at if job.finished_at and job.started_at else None
    extra: dict[str, object] = {
        "took": None if took is None else spell(took),
        "owner": job.owner,
        "lease until": moment(job.lease_until),
        "expires": moment(job.expires_at),
        "deleted": moment(job.purge_at),
        "group": job.group,
        "parent": job.parent,
        "key": None if job.key is None else f"{job.key} ({job.key_policy})",
        "correlation": job.correlation_id,
        "progress": None if job.progress_done is None else f"{job.progress_done} of {job.progress_total or '?'}",
        "headers": ", ".join(f"{name}={value}" for name, value in job.headers.items()) or None,
        "payload": shown_body(job.payload),
        "result": None if job.result is None else shown_body(job.result),
        "error": job.error,
    }
    return pairs(values | {name: value for name, value in extra.items() if value is not None})


@jobs.command("explain")
@click.argument("id")
@pass_session
def explain(session: Session, /, id: str) -> int:
    """Why a job does not run, in one sentence."""
    with session.ledger() as ledger:
        found = explained(ledger, id, now())
    data = {"id": found.id, "gate": found.gate, "sentence": found.sentence, "by": found.by, "count": found.count}
    show(session.json, {**data, "until": moment(found.until)}, found.sentence)
    return OK


@jobs.command("retry")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def retry(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Bring failed and canceled jobs back.

    By id or by selectors. Jobs that failed because one of these did come back too. Exit code 1 if any is refused.
    """
    return revived(session, Where(ids=ids, **options), yes, (State.FAILED, State.CANCELED))


def revived(session: Session, where: Where, yes: bool, states: tuple[State, ...]) -> int:
    selector = where.selector(states)
    with session.ledger() as ledger:
        if where.by_id:
            bulk.must_exist(ledger, where.ids)
        else:
            bulk.queue_must_exist(ledger, where.queue)
            confirm(f"This brings back {where.words(' or '.join(states))}.", yes)
        data, code = bulk.revive(ledger, selector)
    show(session.json, data, bulk.told_revived(data))
    return code


@jobs.command("cancel")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def cancel(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Cancel jobs by id or by selectors.

    Those that wait are canceled, those that run are asked to stop. Exit code 1 if one of the ids has finished already.
    """
    where = Where(ids=ids, **options)
    unfinished = tuple(state for state in State if state not in FINISHED)
    selector = where.selector(unfinished)
    over: list[dict[str, Any]] = []
    with session.ledger() as ledger:
        if where.by_id:
            bulk.must_exist(ledger, where.ids)
            states = {id: job.state for id in where.ids if (job := ledger.get(id)) is not None}
            over = [{"id": id, "state": state} for id, state in states.items() if state in FINISHED]
        else:
            bulk.queue_must_exist(ledger, where.queue)
            confirm(f"This cancels {where.words('unfinished')}.", yes)
        data = {**bulk.cancel(ledger, selector), "finished": over}
    lines = [f"{data['canceled']} canceled, {data['requested']} asked to stop"]
    show(session.json, data, [*lines, *(f"{each['id']} is {each['state']} already" for each in over)])
    return REFUSED if any(each["state"] != State.CANCELED for each in over) else OK


@jobs.command("purge")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors()
@pass_session
def purge(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Delete finished jobs for good.

    By id or by selectors. Unfinished ones are left alone.
    """
    return purged(session, Where(ids=ids, **options), yes, FINISHED)


def purged(session: Session, where: Where, yes: bool, states: tuple[State, ...]) -> int:
    selector = where.selector(states)
    left: list[str] = []
    with session.ledger() as ledger:
        if where.by_id:
            bulk.must_exist(ledger, where.ids)
        else:
            bulk.queue_must_exist(ledger, where.queue)
        what = f"{len(where.ids)} jobs" if where.by_id else where.words(" or ".join(states))
        confirm(f"This deletes {what} for good.", yes)
        data = bulk.purge(ledger, selector)
        left = [id for id in where.ids if ledger.get(id) is not None]
    lines = [f"{data['purged']} deleted", *(f"{id} is not finished: cancel it first" for id in left)]
    show(session.json, {**data, "unfinished": left}, lines)
    return REFUSED if left else OK
