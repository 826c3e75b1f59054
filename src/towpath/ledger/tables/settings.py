"""Groups, queues and parts: opened, sealed, aborted, set."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from towpath.core.commands import (
    Abort,
    GroupSet,
    GroupState,
    Note,
    Noted,
    Open,
    QueueSet,
    Seal,
    SetPart,
    SetQueue,
    Unseal,
)
from towpath.core.limits import reason_after
from towpath.errors import NoteConflict, Refused, UnknownGroup
from towpath.ledger.tables import finish
from towpath.ledger.tables.append import text_of
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import Batch, GroupRow, PartRow, QueueRow


def open_group(batch: Batch, command: Open) -> GroupSet:
    if batch.group(command.group) is None:
        batch.wrote = True
        batch.new_group(GroupRow(command.group, on_failure=command.on_failure, created_at=batch.now))
        if thens := {ending: list(specs) for ending, specs in command.then.items() if specs}:
            batch.db.put("then", [(command.group, text_of(thens))])
    return GroupSet(command.group)


def seal(batch: Batch, command: Seal) -> GroupSet | Refused:
    group = batch.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state is GroupState.OPEN:
        finish.seal(batch, group)
    return GroupSet(command.group)


def unseal(batch: Batch, command: Unseal) -> GroupSet | Refused:
    group = batch.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state is GroupState.SEALED:
        finish.unseal(batch, group, command.why)
    elif group.paused and group.why != command.why:
        batch.wrote = True
        batch.change_group(group.id).why = command.why
    return GroupSet(command.group)


def abort(batch: Batch, command: Abort) -> GroupSet | Refused:
    group = batch.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state in (GroupState.OPEN, GroupState.SEALED):
        finish.abort(batch, group)
    return GroupSet(command.group)


def set_gate(batch: Batch, command: SetQueue | SetPart) -> QueueSet:
    return set_queue(batch, command) if isinstance(command, SetQueue) else set_part(batch, command)


def set_queue(batch: Batch, command: SetQueue) -> QueueSet:
    batch.wrote = True
    batch.gate([command.queue])
    row = batch.change_queue(command.queue)
    _set_gate(row, command)
    if command.capacity is not UNSET:
        row.capacity = command.capacity
    if command.retention is not UNSET:
        row.retention = command.retention
    if command.keep is not UNSET:
        row.keep = command.keep
    return QueueSet(command.queue)


def set_part(batch: Batch, command: SetPart) -> QueueSet:
    batch.wrote = True
    batch.gate([command.queue])
    row = batch.change_part(command.queue, command.part)
    row.configured = 1
    _set_gate(row, command)
    if command.weight is not UNSET:
        row.weight = command.weight
    if command.capacity is not UNSET:
        row.capacity = command.capacity
    if command.append_rate is not UNSET:
        rate = command.append_rate
        limits = (None,) * 3 if rate is None else (rate.count, rate.period, rate.burst)
        row.append_count, row.append_period, row.append_burst = limits
    batch.quotas = True
    return QueueSet(command.queue, command.part)


def _set_gate(row: QueueRow | PartRow, command: SetQueue | SetPart) -> None:
    row.why = reason_after(row.why, bool(row.paused), command.paused, command.why)
    if command.paused is not UNSET:
        row.paused = int(command.paused)
    if command.cap is not UNSET:
        row.cap = command.cap
    if command.rate is not UNSET:
        rate = command.rate
        row.rate_count, row.rate_period, row.rate_burst = (
            (None,) * 3 if rate is None else (rate.count, rate.period, rate.burst)
        )
    if command.not_before is not UNSET:
        row.next_at = command.not_before


class Decided(msgspec.Struct):
    answers: list[Noted]
    puts: dict[str, tuple[str, bytes, int, int, int | None]]
    drops: set[str]
    next_version: int


def note(batch: Batch, command: Note) -> Noted:
    decided = decide(batch, [command])
    write(batch, decided)
    for gate in command.gates:
        set_gate(batch, gate)
    return decided.answers[0]


def decide(batch: Batch, commands: Sequence[Note]) -> Decided:
    """What the notes come to, each seeing the ones before it; raises NoteConflict and writes nothing."""
    batch.relate()
    found = batch.db.rows("live_notes", (array({n.key for n in commands}), batch.now), tuple[str, int, int])
    live: dict[str, tuple[int, int]] = {key: (version, fence) for key, version, fence in found}
    decided = Decided([], {}, set(), batch.next_version)
    for command in commands:
        version, fence = live.get(command.key, (0, 0))
        if command.expect is not None and command.expect != version:
            raise NoteConflict(key=command.key, version=version, expect=command.expect)
        if command.value is None:
            live.pop(command.key, None)
            decided.puts.pop(command.key, None)
            decided.drops.add(command.key)
            decided.answers.append(Noted(command.key, version, fence))
            continue
        version = decided.next_version
        decided.next_version += 1
        fence = fence or version
        live[command.key] = version, fence
        expires = None if command.ttl is None else batch.now + command.ttl
        decided.puts[command.key] = command.key, command.value, version, fence, expires
        decided.drops.discard(command.key)
        decided.answers.append(Noted(command.key, version, fence))
    return decided


def write(batch: Batch, decided: Decided) -> None:
    batch.wrote = True
    batch.next_version = decided.next_version
    if decided.drops:
        batch.db.run("delete_notes", (array(decided.drops),))
    batch.db.put("note", decided.puts.values())
