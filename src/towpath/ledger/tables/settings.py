"""Commands that open, seal and abort groups, set queues and parts, and write notes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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
from towpath.core.limits import period_of
from towpath.core.views import NotePlan, NoteView, given_settings, plan_notes
from towpath.errors import Refused, UnknownGroup
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
    finish.abort(tx, group, command.reason)
    return GroupSet(command.group)


def set_gate(tx: Transaction, command: SetQueue | SetPart) -> QueueSet:
    return set_queue(tx, command) if isinstance(command, SetQueue) else set_part(tx, command)


def set_queue(tx: Transaction, command: SetQueue) -> QueueSet:
    tx.wrote = True
    tx.hold_queues([command.queue])
    row = tx.change_queue(command.queue)
    _set(row, command)
    tx.db.run("delete_unused", (array([command.queue]),))
    return QueueSet(command.queue)


def set_part(tx: Transaction, command: SetPart) -> QueueSet:
    tx.wrote = True
    tx.hold_queues([command.queue])
    row = tx.change_part(command.queue, command.part)
    row.configured = 1
    _set(row, command)
    tx.quotas = True
    return QueueSet(command.queue, command.part)


def _set(row: QueueRow | PartRow, command: SetQueue | SetPart) -> None:
    for field, value in given_settings(row.why, bool(row.paused), command).items():
        if field in ("rate", "append_rate"):
            name = field.removesuffix("_rate")
            limits = (None,) * 3 if value is None else (value.count, period_of(value), value.burst)
            for part, limit in zip(("count", "period", "burst"), limits, strict=True):
                setattr(row, f"{name}_{part}", limit)
        else:
            setattr(row, field, value)
    row.paused = int(row.paused)


def note(tx: Transaction, command: Note) -> Noted:
    plan = decide(tx, [command])
    write(tx, plan)
    for gate in command.gates:
        set_gate(tx, gate)
    return plan[0][1]


def decide(tx: Transaction, commands: Sequence[Note]) -> NotePlan:
    """Decide a sequence of notes; each reads the results of the earlier ones. Raises `NoteConflict`; writes
    nothing."""
    tx.hold_relations()
    found = tx.db.rows("live_notes", (array({n.key for n in commands}), tx.now), tuple[str, int, int])
    live = {key: NoteView(key, b"", version, fence, None) for key, version, fence in found}
    return plan_notes(live, commands, tx.next_version, tx.now)


def write(tx: Transaction, plan: NotePlan) -> None:
    tx.wrote = True
    written = {answer.key: new for new, answer in plan}
    tx.next_version += sum([new is not None for new, _ in plan])
    if deleted := [key for key, new in written.items() if new is None]:
        tx.db.run("delete_notes", (array(deleted),))
    tx.db.put("note", [msgspec.structs.astuple(new) for new in written.values() if new is not None])
