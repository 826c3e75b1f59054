"""Reading and writing job rows: the small columns as one JSON row, the bodies as one BLOB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apsw
import msgspec
from msgspec.structs import astuple, force_setattr

from towpath.core.job import BODIES, COLUMNS, Job, Reason, State
from towpath.ledger.sqlite.db import array, insert, one, rows

PART = 1024 * 1024
SLOTS = 8192
"""Slots per job: up to 1024 parts of each of the bodies."""
PAYLOAD, HEADERS, RESULT, ERROR, CURSOR = range(5)
BYTES_AT_ONCE = 8 * 1024 * 1024

_WIDTH = len(COLUMNS)
_INSERT_JOB = "INSERT INTO towpath_job (" + ", ".join(f'"{name}"' for name in COLUMNS) + ")"
_INSERT_BODY = "INSERT INTO towpath_body (slot, data)"
_ONE_JOB = f"{_INSERT_JOB} VALUES ({', '.join('?' * _WIDTH)})"
_ONE_BODY = f"{_INSERT_BODY} VALUES (?, ?)"
_REPLACE_BODY = "INSERT OR REPLACE INTO towpath_body (slot, data)"


def as_json(changes: Mapping[str, str] | None = None, table: str = "j") -> str:
    """The columns of a job as an SQL expression that makes one JSON array, some of them replaced by other expressions."""
    return "json_array(" + ", ".join((changes or {}).get(name, f'{table}."{name}"') for name in COLUMNS) + ")"


AS_JSON = as_json()
BY_ID = f"SELECT json_group_array({AS_JSON}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.id = v.value"
BY_SEQ = f"SELECT json_group_array({AS_JSON}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.seq = v.value"
HELD = """
SELECT json_group_array(json_array(j.id, j.seq, j.queue, j.part, j.state, j.attempts, j.failures, j.losses, j.max_attempts, j.fence,
    j.settled_fence, j.settled_as, j.cancel_requested, j.retention, j."group", j.key,
    EXISTS (SELECT 1 FROM towpath_edge e WHERE e.src = j.seq)))
FROM json_each(?) v CROSS JOIN towpath_job j ON j.id = v.value
"""
_BODIES = """
SELECT json_group_array(json_array(slot, length(data))), CAST(group_concat(data, '') AS BLOB)
FROM (SELECT b.slot, b.data FROM json_each(?) v
      CROSS JOIN towpath_body b ON b.slot BETWEEN v.value * 8192 AND v.value * 8192 + 8191 ORDER BY b.slot)
"""

_SIZES = """
SELECT json_group_array((SELECT coalesce(sum(length(b.data)), 0) FROM towpath_body b
    WHERE b.slot BETWEEN v.value * 8192 AND v.value * 8192 + 8191)) FROM json_each(?) v
"""


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a settle needs of a job: reading all of it costs four times as much. `edges`: does anything depend on it?"""

    id: str
    seq: int
    queue: str
    part: str | None
    state: State
    attempts: int
    failures: int
    losses: int
    max_attempts: int
    fence: int
    settled_fence: int
    settled_as: State | None
    cancel_requested: Reason | None
    retention: int | None
    group: str | None
    key: str | None
    edges: int


def by_seq(db: apsw.Connection, seqs: Iterable[int]) -> list[Job]:
    """The jobs (without bodies), in the order of seq."""
    return rows(db, BY_SEQ, (array(sorted(seqs)),), Job)


def by_id(db: apsw.Connection, ids: Iterable[str]) -> dict[str, Job]:
    return {job.id: job for job in rows(db, BY_ID, (array(ids),), Job)}


def insert_job(db: apsw.Connection, job: Job) -> None:
    """One job; most have a payload and nothing else."""
    if job.headers or not 0 < len(job.payload) <= PART:
        insert_jobs(db, [job])
        return
    db.execute(_ONE_JOB, astuple(job)[:_WIDTH])
    db.execute(_ONE_BODY, (job.seq * SLOTS, job.payload))


def insert_jobs(db: apsw.Connection, jobs: Sequence[Job]) -> None:
    insert(db, _INSERT_JOB, [astuple(job)[:_WIDTH] for job in jobs])
    insert(db, _INSERT_BODY, list(_new_bodies(jobs)))


def _new_bodies(jobs: Iterable[Job]) -> Iterator[tuple[int, bytes]]:
    for job in jobs:
        if job.payload:
            if len(job.payload) <= PART:
                yield job.seq * SLOTS, job.payload
            else:
                yield from parts(job.seq, PAYLOAD, job.payload)
        if job.headers:
            yield job.seq * SLOTS + HEADERS * 1024, msgspec.json.encode(job.headers)


def parts(seq: int, what: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    for n in range(0, len(data) or 1, PART):
        yield seq * SLOTS + what * 1024 + n // PART, data[n : n + PART]


def put_bodies(db: apsw.Connection, bodies: Iterable[tuple[int, bytes]]) -> None:
    insert(db, _REPLACE_BODY, bodies)


def fill(db: apsw.Connection, jobs: Sequence[Job]) -> None:
    """Give freshly read jobs their bodies, some megabytes at a time. (They are nobody else's yet, so this may write them.)"""
    start, sizes = 0, _sizes(db, jobs)
    while start < len(jobs):
        end, size = start, 0
        while end < len(jobs) and (end == start or size + sizes[end] <= BYTES_AT_ONCE):
            size += sizes[end]
            end += 1
        _fill(db, jobs[start:end])
        start = end


def _sizes(db: apsw.Connection, jobs: Sequence[Job]) -> list[int]:
    """How much each brings. Only a finished job has a result, which may be as large as a payload."""
    if not any(job.finished_at for job in jobs):
        return [job.size for job in jobs]
    return rows(db, _SIZES, (array([job.seq for job in jobs]),), int)


def _fill(db: apsw.Connection, jobs: Sequence[Job]) -> None:
    index, blob = one(db, _BODIES, (array([job.seq for job in jobs]),))
    if blob is None:
        return
    wanted = {job.seq: job for job in jobs}
    at, found = 0, dict[tuple[int, int], list[bytes]]()
    for slot, length in msgspec.json.decode(index, type=list[tuple[int, int]]):
        seq, rest = divmod(slot, SLOTS)
        piece = blob[at : at + length]
        at += length
        if rest == 0 and length < PART:
            force_setattr(wanted[seq], "payload", piece)
        else:
            found.setdefault((seq, rest // 1024), []).append(piece)
    for (seq, what), pieces in found.items():
        force_setattr(wanted[seq], BODIES[what], _decoded(what, b"".join(pieces)))


def _decoded(what: int, data: bytes) -> Any:
    if what == HEADERS:
        return msgspec.json.decode(data)
    return data.decode() if what == ERROR else data
