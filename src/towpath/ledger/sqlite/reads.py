"""Reads: on a connection of their own, so that they never wait for a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from towpath.core.checks import storable
from towpath.core.explain import SHOWN, Explanation, Facts, explain
from towpath.core.job import Job, Reason, State
from towpath.core.views import Counts, GroupView, NoteView, Page, PartView, Query, QueueView, page_token
from towpath.errors import UnknownJob
from towpath.ledger.sqlite import jobs
from towpath.ledger.sqlite.batch import GroupRow, PartRow, QueueRow
from towpath.ledger.sqlite.db import array, named, one, rows
from towpath.ledger.sqlite.jobs import AS_JSON
from towpath.ledger.sqlite.where import of_query

AHEAD = 1000
"""How many jobs in front of one are counted at most."""


def get(db: apsw.Connection, id: str) -> Job | None:
    return get_many(db, [id], True).get(id)


def get_many(db: apsw.Connection, ids: Sequence[str], bodies: bool) -> dict[str, Job]:
    found = jobs.by_id(db, filter(storable, ids))
    if bodies:
        jobs.fill(db, list(found.values()))
    return found


def find(db: apsw.Connection, query: Query) -> Page:
    where = of_query(query)
    order = "ASC" if query.oldest_first else "DESC"
    table = "towpath_job j " + _index(query)
    sql = f"SELECT json_group_array({AS_JSON}) FROM (SELECT * FROM {table} WHERE {where.sql} ORDER BY j.seq {order} LIMIT ?) j"
    found = rows(db, sql, (*where.args, query.limit + 1), Job)
    page = found[: query.limit]
    if query.bodies:
        jobs.fill(db, page)
    return Page(tuple(page), page_token(page[-1].seq) if len(found) > query.limit else None)


def _index(query: Query) -> str:
    """Dead letters and running jobs are few among many; left alone, SQLite walks the whole table in the order asked for."""
    if query.states == (State.FAILED,):
        return "INDEXED BY towpath_job_failed"
    return "INDEXED BY towpath_job_leased" if query.states == (State.RUNNING,) else ""


def queues(db: apsw.Connection) -> dict[str, QueueView]:
    return {row.name: queue_view(row, _oldest_ready(db, row)) for row in rows(db, named("all_queues"), (), QueueRow)}


def queue_view(row: QueueRow, oldest_ready: int | None) -> QueueView:
    counts = Counts(row.blocked, row.scheduled, row.ready, row.running, row.done, row.failed, row.canceled)
    return QueueView(
        name=row.name,
        counts=counts,
        oldest_ready=oldest_ready,
        paused=bool(row.paused),
        why=row.why,
        capacity=row.capacity,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        retention=row.retention,
        keep=row.keep,
    )


def _oldest_ready(db: apsw.Connection, row: QueueRow) -> int | None:
    if not row.ready:
        return None
    return one(db, named("oldest_ready"), (row.name,))[0]  # type: ignore[no-any-return]


def parts(db: apsw.Connection, queue: str) -> dict[str, PartView]:
    found = rows(db, named("parts_of_queue"), (queue,), PartRow) if storable(queue) else []
    return {row.name: part_view(row) for row in found}


def part_view(row: PartRow) -> PartView:
    return PartView(
        queue=row.queue,
        name=row.name,
        ready=row.ready,
        running=row.running,
        paused=bool(row.paused),
        why=row.why,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        weight=row.weight,
        served=row.served,
    )


def group(db: apsw.Connection, id: str) -> GroupView | None:
    found = rows(db, named("groups_by_id"), (array(filter(storable, [id])),), GroupRow)
    return group_view(found[0]) if found else None


def group_view(row: GroupRow) -> GroupView:
    fields = {field: getattr(row, field) for field in GroupView.__struct_fields__}
    return GroupView(**{**fields, "paused": bool(row.paused)})


def note(db: apsw.Connection, key: str, now: int) -> NoteView | None:
    row = one(db, named("read_note"), (key, now)) if storable(key) else None
    return None if row is None else NoteView(*row)


def explain_job(db: apsw.Connection, id: str, now: int) -> Explanation:
    found = jobs.by_id(db, filter(storable, [id]))
    if id not in found:
        raise UnknownJob(id=id)
    job = found[id]
    if job.reason is Reason.REFUSED:
        jobs.fill(db, [job])
    (queue,) = rows(db, named("queues_by_name"), (array([job.queue]),), QueueRow)
    facts = Facts(job=job, queue=queue_view(queue, None))
    if job.state is State.BLOCKED:
        facts.open_jobs = tuple(rows(db, named("open_dependencies"), (job.seq, SHOWN), str))
        facts.open_groups = tuple(rows(db, named("open_groups"), (job.seq, SHOWN), str))
        facts.group = None if job.group is None else group(db, job.group)
    elif job.state in (State.READY, State.SCHEDULED):
        _add_gates(db, facts, job, queue)
    return explain(facts, now)


def _add_gates(db: apsw.Connection, facts: Facts, job: Job, queue: QueueRow) -> None:
    part = None
    if job.part is not None:
        part = next(iter(rows(db, named("parts_by_name"), (array([(job.queue, job.part)]),), PartRow)), None)
    if part is not None:
        facts.part = part_view(part)
    part_full = part is not None and part.cap is not None and part.running >= part.cap
    queue_full = queue.cap is not None and queue.running >= queue.cap
    if queue_full or part_full:
        args: dict[str, Any] = {"queue": job.queue, "part": None if queue_full else job.part, "shown": SHOWN}
        facts.holders = tuple(rows(db, named("running_jobs"), args, str))
    if job.part is None:
        where: tuple[Any, ...] = (job.queue, job.priority, job.seq, AHEAD)
        facts.ahead = one(db, named("ahead_loose"), where)[0]
    else:
        facts.ahead = one(db, named("ahead_parted"), (job.queue, job.part, job.priority, job.seq, AHEAD))[0]
