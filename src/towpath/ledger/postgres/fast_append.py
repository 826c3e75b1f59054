"""The fast paths of the PostgreSQL ledger: plain appends, a note, and the claim and the upkeep of an idle
fleet.

Each writes what the general path would write. A spec with a key, a dependency, a group, a part or headers, a
queue with a capacity and a known id take the general path."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, islice
from operator import attrgetter
from typing import TypeVar

import msgspec
import psycopg
from psycopg import errors

from towpath.core.checks import storable
from towpath.core.commands import (
    KEEP,
    Append,
    Appended,
    Claim,
    Claimed,
    Command,
    Note,
    Noted,
    Placed,
    Settle,
    Upkeep,
    Upkept,
)
from towpath.core.facts import is_plain
from towpath.core.job import READY, SCHEDULED, Reason, Spec, runs_of
from towpath.core.lifecycle import RETENTION
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.ledger.postgres.connection import end
from towpath.ledger.postgres.fast_worker import Applied, FastWorker
from towpath.ledger.postgres.locks import RowsTaken
from towpath.ledger.postgres.migrations import steps
from towpath.ledger.postgres.rows import PostgresDb, add_plain, append_plain, end_open, take_seqs
from towpath.ledger.postgres.statements import PLAIN, SMALL
from towpath.ledger.tables.database import PAYLOAD, Body, array
from towpath.ledger.tables.fast_path import FastPathRefused, FastPaths

MOST_BY_INSERT = 60
"""Specs that one INSERT appends; COPY is faster for more."""
# fmt: off
_FIELDS = (
    "id", "queue", "kind", "priority", "delay", "ready_at", "max_attempts", "max_losses", "timeout", "retention", "parent",
    "generation", "correlation_id", "content_type",
)
# fmt: on

Numbered = tuple[int, Sequence[int]]
"""The ledger's time, and the numbers of the specs."""
DEFECTS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, AttributeError)
CONCURRENT = (
    RowsTaken,
    errors.DeadlockDetected,
    errors.DivisionByZero,
    errors.SerializationFailure,
    errors.UniqueViolation,
)
"""Another transaction changed the same rows. (`settle_and_claim` divides by zero then.)"""
SERVER = (psycopg.OperationalError, errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction)
"""The server refuses any statement; the general path reports it."""
T = TypeVar("T")


def apply(
    db: PostgresDb, fast_worker: FastWorker, paths: FastPaths, commands: Sequence[Command], now: int | None
) -> Iterator[Applied]:
    """Apply the first commands by fast paths, each of which commits: the time and the answers of each.
    Commands without an answer are left to the general path. Raises `psycopg.OperationalError`."""
    first = type(commands[0]) if commands else None
    if first is Append:
        found = _attempt(paths, "append", lambda: _append(db, commands, now))
    elif first is Settle:
        found = _attempt(paths, "worker", lambda: fast_worker.apply(db, commands, now))
    else:
        yield from _apply_each(db, fast_worker, paths, commands, now)
        return
    if found is not None:
        yield found


def _apply_each(
    db: PostgresDb, fast_worker: FastWorker, paths: FastPaths, commands: Sequence[Command], now: int | None
) -> Iterator[Applied]:
    for done, command in enumerate(commands if len(commands) <= 2 else ()):
        found: Applied | None = None
        if type(command) is Note:
            found = _attempt(paths, "note", partial(_note, db, command, now))
        elif type(command) is Upkeep:
            found = _attempt(paths, "upkeep", partial(_upkeep, db, command, now))
        elif type(command) is Claim:
            found = _attempt(paths, "empty_claim", partial(_claim, db, command, now))
            if found is None:
                rest = commands[done:]
                found = _attempt(paths, "worker", partial(fast_worker.apply, db, rest, now))
                if found is not None:
                    yield found
                return
        if found is None:
            return
        yield found


def _attempt(paths: FastPaths, path: str, run: Callable[[], T]) -> T | None:
    """The result of a fast path; None where a rule refused it or a defect ended it. Each is counted."""
    try:
        found = run()
    except FastPathRefused as refused:
        paths.refuse(path, refused.reason)
    except CONCURRENT:
        paths.refuse(path, "concurrent")
    except SERVER as error:
        paths.refuse(path, "server")
        if isinstance(error, psycopg.OperationalError):
            raise
    except (psycopg.Error, *DEFECTS) as error:
        paths.fail(path, error)
    else:
        paths.take(path)
        return found
    return None


def _is_plain(spec: Spec) -> bool:
    return is_plain(spec) and not spec.headers and spec.ttl is None


def _append(db: PostgresDb, commands: Sequence[Command], now: int | None) -> Applied:
    appends = [command for command in commands if type(command) is Append]
    if len(appends) < len(commands):
        raise FastPathRefused("other_commands")
    specs = appends[0].specs if len(appends) == 1 else [spec for each in appends for spec in each.specs]
    append = _append_few if len(specs) <= MOST_BY_INSERT else _append_many
    present, seqs = append(db, specs, now)
    placed = [Placed(spec.id, seq) for spec, seq in zip(specs, seqs, strict=True)]
    ends = accumulate([len(append.specs) for append in appends])
    return present, [
        Appended(tuple(placed[end - len(each.specs) : end])) for each, end in zip(appends, ends, strict=True)
    ]


def _append_few(db: PostgresDb, specs: Sequence[Spec], now: int | None) -> Numbered:
    if not all(map(_is_plain, specs)):
        raise FastPathRefused("not_plain")
    if len({spec.id for spec in specs}) < len(specs):
        raise FastPathRefused("known_id")
    fields = msgspec.json.encode([dict(zip(_FIELDS, _fields(spec), strict=True)) for spec in specs])
    rows = append_plain(db, fields, now, [spec.payload for spec in specs])
    if not rows:
        raise FastPathRefused("known_id_or_capacity")
    return rows[0][0], [seq for _, seq in rows]


_fields = attrgetter(*_FIELDS)


def _append_many(db: PostgresDb, specs: Sequence[Spec], now: int | None) -> Numbered:
    runs = [SpecRun(run) for run in runs_of(specs)]
    if not all(_is_plain(run.model) for run in runs):
        raise FastPathRefused("not_plain")
    return append(db, runs, now)


def _note(db: PostgresDb, note: Note, now: int | None) -> Applied:
    if note.value is None or note.gates or note.token:
        raise FastPathRefused("not_plain")
    present, version, fence, written = db.one(
        "put_note", (note.key, note.value, note.expect, note.ttl, len(steps()), now)
    )
    if written is None:
        raise FastPathRefused("schema")
    if not written:
        return present, [NoteConflict(key=note.key, version=version, expect=note.expect)]
    return present, [Noted(note.key, version, fence)]


def _claim(db: PostgresDb, command: Claim, now: int | None) -> Applied:
    """The claim of a waiting fleet, which finds nothing."""
    names = ",".join([want.queue for want in command.wants])
    if command.token or "*" in names:
        raise FastPathRefused("not_plain")
    queues, began = [(name, db.positions.spans(name)) for name in set(names.split(","))], time.monotonic()
    suspects = command.suspects != 0 and any(want.suspects != 0 for want in command.wants)
    present, anything = db.one("anything", (array(queues), len(steps()), now, suspects))
    if anything:
        raise FastPathRefused("not_empty")
    for name, spans in queues:
        db.positions.claimed(name, (), None, spans, time.monotonic() - began)
    return present, [Claimed(())]


def _upkeep(db: PostgresDb, command: Upkeep, now: int | None) -> Applied:
    if command.dead:
        raise FastPathRefused("not_plain")
    present, due = db.one("quiet_until", (KEEP, now, RETENTION, len(steps())))
    if due is not None and due <= present:
        raise FastPathRefused("due")
    return present, [Upkept(next_due=due)]


def read_note(db: PostgresDb, key: str, now: int | None) -> NoteView | None:
    row = db.one("read_note", (key, now)) if storable(key) else None
    return None if row is None else NoteView(*row)


BLOCK = 64
"""Rows per message: the server inserts them while the next are encoded."""
_start = struct.Struct(">hiqiqi?i").pack
_length = struct.Struct(">i").pack
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_NULL = _length(-1)


class SpecRun:
    """Specs that differ only in id and payload. `first` is the number of the first job."""

    __slots__ = ("first", "model", "specs")

    def __init__(self, specs: list[Spec]) -> None:
        self.model, self.specs, self.first = specs[0], specs, 0

    def due(self, now: int) -> int:
        return now + self.model.delay if self.model.ready_at is None else self.model.ready_at

    def span(self, now: int) -> tuple[int, int, str, int | str, int, int]:
        """The row of `enter_many`."""
        due = self.due(now)
        return (
            self.first,
            self.first + len(self.specs) - 1,
            self.model.queue,
            self.model.priority,
            due,
            int(due <= now),
        )

    def rows(self, now: int) -> Iterator[bytes]:
        """The rows of a binary COPY with the columns of `PLAIN`."""
        rest = self._rest(now)
        for seq, spec in enumerate(self.specs, self.first):
            id, payload = spec.id.encode(), spec.payload
            size = len(payload)
            kept = _length(size) + payload if 0 < size <= SMALL else _NULL
            yield b"".join((_start(len(PLAIN), 8, seq, 8, size, 1, size <= SMALL, len(id)), id, kept, rest))

    def _rest(self, now: int) -> bytes:
        """The columns that all rows share."""
        model, due = self.model, self.due(now)
        waits = due > now
        # fmt: off
        return b"".join([
            _text(model.queue), _text(model.kind), _int(model.priority), _text(SCHEDULED if waits else READY),
            _text(Reason.DELAY if waits else Reason.NONE), _bigint(due), _int(model.max_attempts), _int(model.max_losses),
            _bigint(model.timeout), _bigint(model.retention), _int(0), _text(model.parent), _bigint(model.generation),
            _text(model.correlation_id), _bigint(now), _text(model.content_type),
        ])
        # fmt: on

    def bodies(self) -> Iterator[Body]:
        for seq, spec in enumerate(self.specs, self.first):
            if len(spec.payload) > SMALL:
                yield seq, PAYLOAD, spec.payload


def _text(value: str | None) -> bytes:
    if value is None:
        return _NULL
    data = value.encode()
    return _length(len(data)) + data


def _int(value: int | str) -> bytes:
    return struct.pack(">ii", 4, value)


def _bigint(value: int | None) -> bytes:
    return _NULL if value is None else struct.pack(">iq", 8, value)


def append(db: PostgresDb, runs: Sequence[SpecRun], now: int | None) -> tuple[int, range]:
    """Append plain specs: the ledger's time, and their numbers."""
    ids = [spec.id for run in runs for spec in run.specs]
    if len(set(ids)) < len(ids):
        raise FastPathRefused("known_id")
    try:
        db.execute(b"BEGIN READ WRITE")
        present = _time(db, ids, {run.model.queue for run in runs}, now)
        numbers = take_seqs(db, len(ids))
        for run, first in zip(
            runs, accumulate([len(run.specs) for run in runs], initial=numbers.start), strict=False
        ):
            run.first = first
        add_plain(db, _blocks(runs, present), [body for run in runs for body in run.bodies()])
        db.run("enter_many", (array([run.span(present) for run in runs]), present))
        end(db.connection, wrote=True)
    except FastPathRefused:
        end(db.connection)
        raise
    except BaseException:
        # The first error is raised, not that of a lost connection.
        with suppress(psycopg.OperationalError):
            end_open(db)
        raise
    return present, numbers


def _time(db: PostgresDb, ids: Sequence[str], queues: set[str], now: int | None) -> int:
    """The ledger's time. Refuses known ids, queues with a capacity, and a schema that is too new."""
    row = db.one("begin_many", (array(queues), min(ids), max(ids), len(steps()), now))
    if row is None:
        raise FastPathRefused("capacity")
    present, perhaps_known = row
    # Generated ids are greater than those before them: seldom is one in this range, and each is looked up.
    if perhaps_known and db.one("any_known", (array(ids),))[0]:
        raise FastPathRefused("known_id")
    return int(present)


def _blocks(runs: Sequence[SpecRun], now: int) -> Iterator[bytes]:
    rows = (row for run in runs for row in run.rows(now))
    yield _SIGNATURE
    while block := b"".join(islice(rows, BLOCK)):
        yield block
    yield _TRAILER
