"""Notes, and the settings of queues and parts."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from towpath.core.commands import Note, Noted, QueueSet, SetPart, SetQueue
from towpath.core.limits import reason_after
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.ledger.memory.book import Book

Plan = list[tuple[str, NoteView | None, Noted]]
"""For each note: its key, what will be there (None: nothing), the answer."""


def note(book: Book, command: Note, now: int) -> Noted:
    plan = plan_notes(book, (command,), now)
    write_notes(book, plan)
    for gate in command.gates:
        if isinstance(gate, SetQueue):
            set_queue(book, gate, now)
        else:
            set_part(book, gate, now)
    return plan[0][2]


def plan_notes(book: Book, notes: Iterable[Note], now: int) -> Plan:
    """What notes written one after the other would do; raises `NoteConflict`. Writes nothing."""
    plan: Plan = []
    ahead: dict[str, NoteView | None] = {}
    version = book.next_version
    for command in notes:
        key = command.key
        old = ahead[key] if key in ahead else book.notes.get(key)
        if old is not None and old.expires_at is not None and old.expires_at <= now:
            old = None
        found = old.version if old is not None else 0
        if command.expect is not None and command.expect != found:
            raise NoteConflict(key=key, version=found, expect=command.expect)
        if command.value is None:
            new, answer = None, Noted(key, found, old.fence if old is not None else 0)
        else:
            fence = old.fence if old is not None else version
            expires_at = None if command.ttl is None else now + command.ttl
            new, answer = NoteView(key, command.value, version, fence, expires_at), Noted(key, version, fence)
            version += 1
        ahead[key] = new
        plan.append((key, new, answer))
    return plan


def write_notes(book: Book, plan: Plan) -> None:
    for key, new, _ in plan:
        book.dirty = True
        if new is None:
            book.notes.pop(key, None)
            continue
        book.next_version = new.version + 1
        book.notes[key] = new
        if new.expires_at is not None:
            book.note_ends.push(new.expires_at, key)


def set_queue(book: Book, command: SetQueue, now: int) -> QueueSet:
    queue = book.queue(command.queue)
    book.dirty = True
    queue.why = reason_after(queue.why, queue.paused, command.paused, command.why)
    for field in ("paused", "capacity", "cap", "rate", "retention", "keep"):
        if (value := getattr(command, field)) is not UNSET:
            setattr(queue, field, value)
    if command.not_before is not UNSET:
        queue.next_at = command.not_before
    return QueueSet(command.queue)


def set_part(book: Book, command: SetPart, now: int) -> QueueSet:
    part = book.part(command.queue, command.part)
    book.dirty = True
    part.configured = True
    part.why = reason_after(part.why, part.paused, command.paused, command.why)
    for field in ("paused", "cap", "rate", "weight", "capacity", "append_rate"):
        if (value := getattr(command, field)) is not UNSET:
            setattr(part, field, value)
    if command.not_before is not UNSET:
        book.set_next(part, command.not_before)
    if (queue := book.queues.get(command.queue)) is not None:
        queue.rotation.offer(part)
    return QueueSet(command.queue, command.part)
