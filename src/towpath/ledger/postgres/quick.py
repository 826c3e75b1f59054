"""The commonest batches of all, in one statement each: one plain spec, for which a user waits, and what an idle fleet asks all day.
Many plain specs take a few (see `many`).

Whatever is not plain (a key, a dependency, a group, a part, headers, a queue with a capacity, an id that is known) is left to the
general way. What this writes is what that would have written; the suite runs over both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import msgspec

from towpath.core.checks import storable
from towpath.core.commands import KEEP, Append, Appended, Claim, Claimed, Command, Note, Noted, Placed, Settle, Upkeep, Upkept
from towpath.core.ids import is_new
from towpath.core.job import MAX_LOSSES, Spec, runs_of
from towpath.core.lifecycle import RETENTION
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.ledger import Answer
from towpath.ledger.postgres import many
from towpath.ledger.postgres.db import PostgresDb
from towpath.ledger.postgres.direct import Direct
from towpath.ledger.postgres.migrations import steps
from towpath.ledger.postgres.statements import SMALL
from towpath.ledger.postgres.stride import Step, Strides
from towpath.ledger.tables.database import array

SOME = 60
"""Specs that go in one statement; COPY is faster for more."""
# fmt: off
_FIELDS = (
    "id", "queue", "kind", "priority", "delay", "ready_at", "max_attempts", "max_losses", "timeout", "retention", "parent",
    "generation", "correlation_id", "content_type",
)
# fmt: on

Answered = tuple[int, Answer]
"""The ledger's time, and the answer."""
Numbered = tuple[int, Sequence[int]]
"""The ledger's time, and the numbers of the specs."""


def answers(db: PostgresDb, strides: Strides, commands: Sequence[Command], now: int | None) -> Iterable[Step]:
    """The first of the commands, as far as they can be done in one step, or each in one. (An append and the claim of those who wait
    for it share a commit.)"""
    first = type(commands[0]) if commands else None
    if first is Append:
        return _append(db, commands, now)
    return strides.answers(db, commands, now) if first is Settle else _one_by_one(db, strides, commands, now)


def _one_by_one(db: PostgresDb, strides: Strides, commands: Sequence[Command], now: int | None) -> Iterator[Step]:
    for done, command in enumerate(commands if len(commands) <= 2 else ()):
        found = _answer(db, command, now)
        if found is None:
            if type(command) is Claim:
                yield from strides.answers(db, commands[done:], now)
            return
        present, answer = found
        yield present, [answer]


def _answer(db: PostgresDb, command: Command, now: int | None) -> Answered | None:
    """The answer to a command that is alone in its batch, if it can be had in one step."""
    match command:
        case Note() if command.value is not None and not command.gates and not command.token:
            return _note(db, command, now)
        case Claim() if not command.token:
            return _claim(db, command, now)
        case Upkeep() if not command.dead:
            return _upkeep(db, now)
    return None


def _is_plain(spec: Spec) -> bool:
    related = spec.after or spec.group is not None or spec.key is not None
    return not (related or spec.part is not None or spec.headers or spec.ttl is not None)


def _append(db: PostgresDb, commands: Sequence[Command], now: int | None) -> list[Step]:
    first = commands[0].specs  # type: ignore[union-attr]
    if len(commands) == len(first) == 1 and now is None and _is_bare(first[0]):
        one = db.append_new if is_new(first[0].id) else db.append_one
        if one is not None:
            return _append_one(one, first[0])
    appends = [command for command in commands if type(command) is Append]
    if len(appends) < len(commands):
        return []
    specs = first if len(appends) == 1 else [spec for append in appends for spec in append.specs]
    found = _append_some(db, specs, now) if len(specs) <= SOME else _append_many(db, specs, now)
    if found is None:
        return []
    present, seqs = found
    placed = [Placed(spec.id, seq) for spec, seq in zip(specs, seqs, strict=True)]
    ends = accumulate([len(append.specs) for append in appends])
    return [(present, [Appended(tuple(placed[end - len(each.specs) : end])) for each, end in zip(appends, ends, strict=True)])]


def _append_one(statement: Direct, spec: Spec) -> list[Step]:
    common = _common(spec.queue, spec.kind, spec.priority, spec.max_attempts, spec.timeout, spec.retention, spec.content_type)
    row = statement.row((spec.id.encode(), *common, spec.payload))
    return [] if row is None else [(row[0], [Appended((Placed(spec.id, row[1]),))])]


@lru_cache(1000)
def _common(*values: str | int | None) -> tuple[bytes | None, ...]:
    """The arguments that the specs of a task share."""
    return tuple([None if value is None else str(value).encode() for value in values])


def _append_some(db: PostgresDb, specs: Sequence[Spec], now: int | None) -> Numbered | None:
    if not all(map(_is_plain, specs)) or len({spec.id for spec in specs}) < len(specs):
        return None
    rows = array([{name: getattr(spec, name) for name in _FIELDS} for spec in specs])
    row = db.one("append_some", (rows, [spec.payload for spec in specs], len(steps()), now))
    return None if row is None else (row[0], msgspec.json.decode(row[1], type=list[int]))


def _append_many(db: PostgresDb, specs: Sequence[Spec], now: int | None) -> Numbered | None:
    runs = [many.Run(run) for run in runs_of(specs)]
    if not all(_is_plain(run.model) for run in runs):
        return None
    return many.append(db, runs, now)


def _is_bare(spec: Spec) -> bool:
    """Nothing but what most specs have."""
    told = spec.parent is not None or spec.correlation_id is not None or spec.generation
    if len(spec.payload) > SMALL:
        return False
    return not (told or spec.delay or spec.ready_at is not None or spec.max_losses != MAX_LOSSES) and _is_plain(spec)


def _note(db: PostgresDb, note: Note, now: int | None) -> Answered | None:
    present, version, fence, written = db.one("put_note", (note.key, note.value, note.expect, note.ttl, len(steps()), now))
    if written is None:
        return None
    if not written:
        return present, NoteConflict(key=note.key, version=version, expect=note.expect)
    return present, Noted(note.key, version, fence)


def _claim(db: PostgresDb, command: Claim, now: int | None) -> Answered | None:
    """Is there anything at all? A fleet that waits asks this, and nothing else."""
    names = ",".join([want.queue for want in command.wants])
    if "*" in names:
        return None
    queues, began = [(name, db.marks.spans(name)) for name in set(names.split(","))], time.monotonic()
    suspects = command.suspects != 0 and any(want.suspects != 0 for want in command.wants)
    present, anything = db.one("anything", (array(queues), len(steps()), now, suspects))
    if anything:
        return None
    for name, spans in queues:
        db.marks.claimed(name, (), None, spans, time.monotonic() - began)
    return present, Claimed(())


def _upkeep(db: PostgresDb, now: int | None) -> Answered | None:
    present, due = db.one("quiet_until", (KEEP, now, RETENTION, len(steps())))
    return None if due is not None and due <= present else (present, Upkept(next_due=due))


def read_note(db: PostgresDb, key: str, now: int | None) -> NoteView | None:
    row = db.one("read_note", (key, now)) if storable(key) else None
    return None if row is None else NoteView(*row)
