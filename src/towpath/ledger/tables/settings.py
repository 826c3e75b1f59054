"""Commands that open, seal and abort groups, set queues and parts, and write notes."""

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
from towpath.ledger.tables.append import encode_then
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import GroupRow, PartRow, QueueRow, Transaction


def open_group(tx: Transaction, command: Open) -> GroupSet:
    if tx.group(command.group) is None:
        tx.wrote = True
        tx.new_group(GroupRow(command.group, on_failure=command.on_failure, created_at=tx.now))
        if thens := {ending: list(specs) for ending, specs in command.then.items() if specs}:
            tx.db.put("then", [(command.group, encode_then(thens))])
    return GroupSet(command.group)


def seal(tx: Transaction, command: Seal) -> GroupSet | Refused:
    group = tx.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state is GroupState.OPEN:
        finish.seal(tx, group)
    return GroupSet(command.group)


def unseal(tx: Transaction, command: Unseal) -> GroupSet | Refused:
    group = tx.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state is GroupState.SEALED:
        finish.unseal(tx, group, command.why)
    elif group.paused and group.why != command.why:
        tx.wrote = True
        tx.change_group(group.id).why = command.why
    return GroupSet(command.group)


def abort(tx: Transaction, command: Abort) -> GroupSet | Refused:
    group = tx.group(command.group)
    if group is None:
        return UnknownGroup(group=command.group)
    if group.state in (GroupState.OPEN, GroupState.SEALED):
        finish.abort(tx, group)
    return GroupSet(command.group)


def set_gate(tx: Transaction, command: SetQueue | SetPart) -> QueueSet:
    return set_queue(tx, command) if isinstance(command, SetQueue) else set_part(tx, command)


def set_queue(tx: Transaction, command: SetQueue) -> QueueSet:
    tx.wrote = True
    tx.hold_queues([command.queue])
    row = tx.change_queue(command.queue)
    _set_gate(row, command)
    if command.capacity is not UNSET:
        row.capacity = command.capacity
    if command.retention is not UNSET:
        row.retention = command.retention
    if command.keep is not UNSET:
        row.keep = command.keep
    return QueueSet(command.queue)


def set_part(tx: Transaction, command: SetPart) -> QueueSet:
    tx.wrote = True
    tx.hold_queues([command.queue])
    row = tx.change_part(command.queue, command.part)
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
    tx.quotas = True
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


class NoteDecision(msgspec.Struct):
    answers: list[Noted]
    puts: dict[str, tuple[str, bytes, int, int, int | None]]
    drops: set[str]
    next_version: int


def note(tx: Transaction, command: Note) -> Noted:
    decided = decide(tx, [command])
    write(tx, decided)
    for gate in command.gates:
        set_gate(tx, gate)
    return decided.answers[0]


def decide(tx: Transaction, commands: Sequence[Note]) -> NoteDecision:
    """Decide a sequence of notes; each sees the ones before it. Raises `NoteConflict`; writes nothing."""
    tx.hold_relations()
    found = tx.db.rows("live_notes", (array({n.key for n in commands}), tx.now), tuple[str, int, int])
    live: dict[str, tuple[int, int]] = {key: (version, fence) for key, version, fence in found}
    decided = NoteDecision([], {}, set(), tx.next_version)
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
        expires = None if command.ttl is None else tx.now + command.ttl
        decided.puts[command.key] = command.key, command.value, version, fence, expires
        decided.drops.discard(command.key)
        decided.answers.append(Noted(command.key, version, fence))
    return decided


def write(tx: Transaction, decided: NoteDecision) -> None:
    tx.wrote = True
    tx.next_version = decided.next_version
    if decided.drops:
        tx.db.run("delete_notes", (array(decided.drops),))
    tx.db.put("note", decided.puts.values())
