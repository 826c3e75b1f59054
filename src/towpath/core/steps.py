"""The notes of durable functions: the results of their steps, and the undos of a saga.

- `step/<job id>/<number>`: a step. Before the function of a step with an undo is called, the note has the
  undo and no result; the undo stays in it when the result is stored.
- `saga/<seq>`: the rollback of the job has begun. No undo is recorded while this note exists.
- A job of the kind `towpath.saga` waits for the end of a job with undos. It is appended before the first of
  its undos is stored, so that an undo is never without a job that runs it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, Raw, UnsetType

from towpath.core import checks
from towpath.core.commands import Note
from towpath.core.job import STATE_TTL, After, Spec
from towpath.core.lanes import FLOWS
from towpath.core.views import MAX_PAGE, NotePage, NoteQuery
from towpath.errors import Described, InvalidInput

SAGA = "towpath.saga"
"""The kind of the job that rolls back the steps of another job."""
_AGAIN = 1_000_000
"""A job of this kind is never given up: the undos would not run."""


class UndoRecord(msgspec.Struct, frozen=True, gc=False):
    """A call of a task that undoes a step, with the queue and the attempts of the task."""

    task: str
    args: Raw
    queue: str
    attempts: int


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The note of a step. `job` is the `seq` of its job: a later job with the same id has another one.
    `undo`: one call, or several if attempts had different ones."""

    job: int
    name: str
    result: Raw | UnsetType = UNSET
    undo: tuple[UndoRecord, ...] = ()


class SagaJob(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The payload of a job that rolls back: its job by id and `seq`. `number` is the fence of the attempt
    that appended it; `again` counts the jobs that followed it."""

    job: str
    seq: int
    number: int
    again: int = 0


_encode_step = msgspec.json.Encoder().encode
_decode_step = msgspec.json.Decoder(StepRecord).decode
decode_saga = msgspec.json.Decoder(SagaJob).decode


def step_key(id: str, number: int) -> str:
    return f"{_prefix(id)}{number:04}"


def _prefix(id: str) -> str:
    return f"step/{id}/"


def saga_key(seq: int) -> str:
    return f"saga/{seq}"


def read_steps(notes: Callable[[NoteQuery], NotePage], id: str, seq: int) -> dict[int, StepRecord]:
    """The recorded steps of a job, by their numbers. `notes` is the read of a ledger."""
    prefix, page = _prefix(id), None
    found: dict[int, StepRecord] = {}
    while True:
        read = notes(NoteQuery(prefix=prefix, limit=MAX_PAGE, page=page))
        for note in read.notes:
            number = note.key.removeprefix(prefix)
            # The id of another job may begin with this prefix.
            if number.isdecimal() and (record := _decode_step(note.value)).job == seq:
                found[int(number)] = record
        if (page := read.next) is None:
            return found


def step_note(id: str, number: int, record: StepRecord) -> Note:
    """The write of a record. An undo has no time to live: the rollback deletes it. Raises InvalidInput."""
    content = _encode_step(record)
    if len(content) > checks.MAX_NOTE:
        raise InvalidInput(
            field=f"the result of step {record.name}",
            value=Described(f"{len(content)} bytes"),
            expected=f"at most {checks.MAX_NOTE} bytes; store it elsewhere and return where it is",
        )
    return Note(key=step_key(id, number), value=content, ttl=None if record.undo else STATE_TTL)


def saga_spec(job: SagaJob) -> Spec:
    return Spec(
        id=f"saga/{job.seq}/{job.number}.{job.again}",
        queue=FLOWS,
        kind=SAGA,
        payload=msgspec.json.encode(job),
        priority=0,
        max_attempts=_AGAIN,
        max_losses=_AGAIN,
        after=(After(job.job, run_anyway=True),),
    )
