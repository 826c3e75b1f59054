"""Notes: compare-and-set records whose versions, and so fences, come from one counter that only grows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from towpath.core.commands import Note, Noted
from towpath.errors import NoteConflict
from towpath.ledger.relational import settings
from towpath.ledger.relational.batch import Batch
from towpath.ledger.relational.db import array


class Decided(msgspec.Struct):
    answers: list[Noted]
    puts: dict[str, tuple[str, bytes, int, int, int | None]]
    drops: set[str]
    next_version: int


def note(batch: Batch, command: Note) -> Noted:
    decided = decide(batch, [command])
    write(batch, decided)
    for gate in command.gates:
        settings.set_gate(batch, gate)
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
