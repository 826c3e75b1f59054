"""Reading and writing job rows: the small columns as one JSON row, the bodies as one BLOB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apsw
import msgspec
from msgspec.structs import astuple, force_setattr

from towpath.core.admission import new_job
from towpath.core.job import COLUMNS, Job, Spec
from towpath.ledger.tables.database import HEADERS, PAYLOAD, array, set_body

PIECE = 1024 * 1024
SLOTS = 8192
"""Slots per job: up to 1024 pieces of each of the bodies."""
BYTES_AT_ONCE = 8 * 1024 * 1024

_WIDTH = len(COLUMNS)
_whole = msgspec.json.Decoder(list[int]).decode
INSERT_JOB = "INSERT INTO towpath_job (" + ", ".join(f'"{name}"' for name in COLUMNS) + ")"
INSERT_BODY = "INSERT INTO towpath_body (slot, data)"
REPLACE_BODY = "INSERT OR REPLACE INTO towpath_body (slot, data)"


def as_json(changes: Mapping[str, str] | None = None) -> str:
    """The columns of a job j as an SQL expression for one JSON array; `changes` replaces columns by other
    expressions."""
    return "json_array(" + ", ".join((changes or {}).get(name, f'j."{name}"') for name in COLUMNS) + ")"


_BODIES = """
SELECT json_group_array(slot), json_group_array(length(data)), CAST(group_concat(data, '') AS BLOB)
FROM (SELECT b.slot, b.data FROM json_each(?) v
      CROSS JOIN towpath_body b ON b.slot BETWEEN v.value * 8192 AND v.value * 8192 + 8191 ORDER BY b.slot)
"""

_SIZES = """
SELECT json_group_array((SELECT coalesce(sum(length(b.data)), 0) FROM towpath_body b
    WHERE b.slot BETWEEN v.value * 8192 AND v.value * 8192 + 8191)) FROM json_each(?) v
"""


_READY_COLUMNS = (
    *("id", "seq", "queue", "kind", "priority", "ready_at", "expires_at", "max_attempts", "max_losses"),
    *("timeout", "retention", "parent", "generation", "correlation_id", "created_at", "size", "content_type"),
)
"""The columns in which plain jobs that are ready at once differ. The others have the same value in all."""


def is_ready_at_once(spec: Spec) -> bool:
    """Whether the spec has a payload of one piece, no headers and no delay."""
    return 0 < len(spec.payload) <= PIECE and not (spec.headers or spec.delay or spec.ready_at is not None)


def ready_columns(spec: Spec, seq: int, now: int) -> tuple[Any, ...]:
    expires_at = None if spec.ttl is None else now + spec.ttl
    # fmt: off
    return (
        spec.id, seq, spec.queue, spec.kind, spec.priority, now, expires_at, spec.max_attempts,
        spec.max_losses, spec.timeout, spec.retention, spec.parent, spec.generation, spec.correlation_id,
        now, len(spec.payload), spec.content_type,
    )
    # fmt: on


def columns_of(job: Job) -> tuple[Any, ...]:
    return astuple(job)[:_WIDTH]


def _ready_job() -> str:
    """All columns of such a job as SQL: from a row of `_READY_COLUMNS`, otherwise as the literal that
    `new_job` gives."""
    model = dict(zip(COLUMNS, columns_of(new_job(Spec(id="model", queue="q"), 1, 0)), strict=True))
    given = {name: f"column{n}" for n, name in enumerate(_READY_COLUMNS, 1)}
    return ", ".join([given.get(name) or _literal(model[name]) for name in COLUMNS])


def _literal(value: str | int | None) -> str:
    return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


READY_JOB = _ready_job()


def new_bodies(jobs: Iterable[Job]) -> Iterator[tuple[int, bytes]]:
    for job in jobs:
        if payload := job.payload:
            if len(payload) <= PIECE:
                yield job.seq * SLOTS, payload
            else:
                yield from pieces(job.seq, PAYLOAD, payload)
        if job.headers:
            yield job.seq * SLOTS + HEADERS * 1024, msgspec.json.encode(job.headers)


def pieces(seq: int, what: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    for n in range(0, len(data) or 1, PIECE):
        yield seq * SLOTS + what * 1024 + n // PIECE, data[n : n + PIECE]


def fill(db: apsw.Connection, jobs: Sequence[Job]) -> None:
    """Read the bodies of these jobs into them, some megabytes at a time. The jobs must be freshly read:
    frozen structs are changed."""
    if not jobs:
        return
    start, sizes = 0, _sizes(db, jobs)
    if sum(sizes) <= BYTES_AT_ONCE:
        _fill(db, jobs)
        return
    while start < len(jobs):
        end, size = start, 0
        while end < len(jobs) and (end == start or size + sizes[end] <= BYTES_AT_ONCE):
            size += sizes[end]
            end += 1
        _fill(db, jobs[start:end])
        start = end


def fill_small(db: apsw.Connection, jobs: Sequence[Job], most: int, payloads: bytes, more: str) -> None:
    """Set the payloads of at most `most` bytes, which `payloads` has one after the other, and read all bodies
    of the jobs that have `more`."""
    small = [job for job in jobs if 0 < job.size <= most]
    if sum([job.size for job in small]) != len(payloads):
        # A row is missing in a damaged file: find the job by the slots.
        fill(db, jobs)
        return
    at = 0
    for job in small:
        force_setattr(job, "payload", payloads[at : at + job.size])
        at += job.size
    fill(db, [job for job, has_more in zip(jobs, _whole(more), strict=True) if has_more])


def _sizes(db: apsw.Connection, jobs: Sequence[Job]) -> list[int]:
    """The length of each job's bodies. A finished job may have a result as large as a payload; for the others
    the payload's length is enough."""
    if not [job for job in jobs if job.finished_at]:
        return [job.size for job in jobs]
    ((sizes,),) = db.execute(_SIZES, (array([job.seq for job in jobs]),))
    return _whole(sizes)


def _fill(db: apsw.Connection, jobs: Sequence[Job]) -> None:
    ((slots, lengths, blob),) = db.execute(_BODIES, (array([job.seq for job in jobs]),))
    if blob is None:
        return
    wanted = {job.seq: job for job in jobs}
    at, found = 0, dict[tuple[int, int], list[bytes]]()
    for slot, length in zip(_whole(slots), _whole(lengths), strict=True):
        seq, rest = divmod(slot, SLOTS)
        piece = blob[at : at + length]
        at += length
        if rest == 0 and length < PIECE:
            force_setattr(wanted[seq], "payload", piece)
        else:
            found.setdefault((seq, rest // 1024), []).append(piece)
    for (seq, what), pieces in found.items():
        set_body(wanted[seq], what, b"".join(pieces))
