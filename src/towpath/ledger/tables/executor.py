"""Applies a batch of commands in order: runs of the same command together, answers stored by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from towpath.core.commands import (
    TOMBSTONE,
    Abort,
    Append,
    Cancel,
    Canceled,
    Claim,
    Claimed,
    Command,
    Hasten,
    Note,
    Noted,
    Open,
    Progress,
    Purge,
    Purged,
    PutChunk,
    Renew,
    Resolve,
    Revive,
    Revived,
    Seal,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
    Upkeep,
    token_of,
)
from towpath.core.job import ClaimedJob, Spec, State
from towpath.core.lanes import named_queues
from towpath.errors import CommandFailed, InvalidInput, Refused
from towpath.ledger import Answer
from towpath.ledger.tables import append, blobs, settings, settle, upkeep
from towpath.ledger.tables import claim as claims
from towpath.ledger.tables.transaction import ReadAhead, Transaction, by_id

READ_AHEAD = 5000
Executor = Callable[[Transaction, Sequence[Command]], list[Answer]]

_SINGLE: Mapping[type, Callable[[Transaction, Any], Answer]] = {
    Claim: claims.claim,
    Renew: settle.renew,
    Progress: settle.progress,
    Cancel: upkeep.cancel,
    Revive: upkeep.revive,
    Resolve: upkeep.resolve,
    Purge: upkeep.purge,
    Hasten: upkeep.hasten,
    Open: settings.open_group,
    Seal: settings.seal,
    Unseal: settings.unseal,
    Abort: settings.abort,
    SetQueue: settings.set_queue,
    SetPart: settings.set_part,
    Note: settings.note,
    PutChunk: blobs.put_chunk,
    Upkeep: upkeep.upkeep,
}


def execute(tx: Transaction, commands: Sequence[Command]) -> list[Answer]:
    answers: list[Answer] = []
    for kind, group in groupby(commands, type):
        run: list[Any] = list(group)
        if kind is Append:
            answers += append.append(tx, run)
        elif kind is Settle:
            answers += settle.settle_run(tx, run)
        else:
            answers += [_single(tx, command) for command in run]
    return answers


def execute_one_by_one(tx: Transaction, commands: Sequence[Command]) -> list[Answer]:
    """Apply each command in a savepoint of its own, so that an error rolls back only its command."""
    answers: list[Answer] = []
    for command in commands:
        mark = tx.snapshot()
        tx.db.save()
        try:
            applied = execute(tx, [command])
            tx.flush()
            answers += applied
        except Exception as error:
            if not tx.db.is_command_error(error):
                raise
            tx.db.undo()
            tx.restore(mark)
            answers.append(
                CommandFailed(command=type(command).__name__, error=f"{type(error).__name__}: {error}")
            )
        tx.db.keep()
    return answers


def first_specs(commands: Sequence[Command]) -> list[Spec]:
    """The specs of the appends at the start of a batch, at most `READ_AHEAD`: their facts are read with the
    first statement."""
    found: list[Spec] = []
    for command in commands:
        if type(command) is not Append or len(found) + len(command.specs) > READ_AHEAD:
            break
        found += command.specs
    return found


def read_ahead(commands: Sequence[Command]) -> ReadAhead:
    settled: list[str] = []
    for command in commands:
        if type(command) is not Settle or command.spawn or command.notes:
            break
        settled.append(command.id)
    claims = [command for command in commands if type(command) is Claim]
    return ReadAhead(first_specs(commands), settled, [name for each in claims for name in named_queues(each)])


def check_commands(commands: Sequence[Command]) -> None:
    """Raise `InvalidInput` for a value that is not a command, before the transaction begins."""
    for command in commands:
        if type(command) not in _SINGLE and type(command) is not Append and type(command) is not Settle:
            raise InvalidInput(field="command", value=command, expected="a command of towpath.core.commands")


def _single(tx: Transaction, command: Any) -> Answer:
    token = token_of(command)
    if token and (kept := _read_answer(tx, token)) is not None:
        return kept
    try:
        answer = _SINGLE[type(command)](tx, command)
    except Refused as refusal:
        return refusal
    if token and (text := _stored_answer(answer)):
        tx.wrote = True
        tx.db.run("write_reply", (token, text, tx.now + TOMBSTONE))
    return answer


def _stored_answer(answer: Answer) -> str:
    """The answer as it is stored, or "" if the command changed nothing. A claim is stored as (id, fence)
    pairs."""
    match answer:
        case Claimed() if answer.claims:
            return msgspec.json.encode([(claim.id, claim.fence) for claim in answer.claims]).decode()
        case Canceled() if answer.canceled or answer.requested:
            return msgspec.json.encode(answer).decode()
        case Revived() if answer.revived:
            return msgspec.json.encode(answer).decode()
        case Purged() if answer.purged:
            return msgspec.json.encode(answer).decode()
        case Noted():
            return msgspec.json.encode(answer).decode()
    return ""


def _read_answer(tx: Transaction, token: str) -> Answer | None:
    row = tx.db.one("read_reply", (token,))
    if row is None:
        return None
    if not row[0].startswith("["):
        return msgspec.json.decode(row[0], type=Canceled | Revived | Purged | Noted)
    pairs = msgspec.json.decode(row[0], type=list[tuple[str, int]])
    found = by_id(tx, [id for id, _ in pairs])
    held = [
        job
        for id, fence in pairs
        if (job := found.get(id)) is not None and job.state is State.RUNNING and job.fence == fence
    ]
    tx.db.fill(held)
    return Claimed(tuple([ClaimedJob(job) for job in held]))
