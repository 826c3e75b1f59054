"""The fast paths of the PostgreSQL ledger: plain appends, the ends and the next claim of a worker, a note,
and the claim and the upkeep of an idle fleet.

Each writes what the general path would write. These take the general path: a spec with a key, a dependency, a
group, a part or headers; an append to a queue with a capacity, or of a known id; an end that affects other
jobs; a claim from a queue with limits."""

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
    Settled,
    Upkeep,
    Upkept,
    Want,
    plain_end,
)
from towpath.core.facts import is_plain
from towpath.core.job import DONE, READY, SCHEDULED, ClaimedJob, Job, Reason, Spec, runs_of
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import RETENTION
from towpath.core.views import QUEUE_KEPT, NoteView
from towpath.errors import NoteConflict
from towpath.ledger import Answer
from towpath.ledger.postgres.connection import end, steps
from towpath.ledger.postgres.locks import RowsTaken
from towpath.ledger.postgres.rows import (
    PostgresDb,
    ReadyScan,
    add_plain,
    append_one,
    end_open,
    received,
    take_seqs,
)
from towpath.ledger.postgres.statements import PLAIN, SMALL
from towpath.ledger.tables.database import PAYLOAD, Args, Body, FastPathRefused, FastPaths, array

SKIPPED_AFTER_MISS = 16
"""After a refusal, skip the fast path for this many batches of the queue: each would run both paths."""
MOST_QUEUES = 10_000
MOST_BY_INSERT = 60
"""Specs that one INSERT appends; COPY is faster for more."""
# fmt: off
_FIELDS = (
    "id", "queue", "kind", "priority", "delay", "ready_at", "max_attempts", "max_losses", "timeout",
    "retention", "parent", "generation", "correlation_id", "content_type",
)
# fmt: on

Applied = tuple[int, list[Answer]]
"""The ledger's time, and the answers."""
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
    """Is the spec plain by the rule of `core`? Headers and a time to live are left to the general path: the
    statements of these paths do not write their columns."""
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
    payloads = [spec.payload for spec in specs]
    if db.raw_append is not None and len(specs) == 1 and len(payloads[0]) <= SMALL:
        rows = append_one(db.raw_append, _fields(specs[0]), now, payloads[0])
    else:
        texts = msgspec.json.encode([dict(zip(_FIELDS, _fields(spec), strict=True)) for spec in specs])
        rows = db.rows("append_plain", (texts.decode(), now, payloads), tuple)
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
    present, due = db.one("quiet_until", (KEEP, now, RETENTION, len(steps()), QUEUE_KEPT))
    if due is not None and due <= present:
        raise FastPathRefused("due")
    return present, [Upkept(next_due=due)]


def read_note(db: PostgresDb, key: str, now: int | None) -> NoteView | None:
    row = db.one("read_note", (key, now)) if storable(key) else None
    return None if row is None else NoteView(*row)


class FastWorker:
    """Plain ends and the next claim as one statement, which commits itself."""

    def __init__(self) -> None:
        self._skipped: dict[str, int] = {}
        """Batches to skip, by queue."""

    def apply(self, db: PostgresDb, commands: Sequence[Command], now: int | None) -> Applied:
        """The time, and the answers to all commands or to all but the claim."""
        last = commands[-1]
        claim, settles = (last, commands[:-1]) if type(last) is Claim else (None, commands)
        want = None if claim is None else _single_want(claim)
        ends = _plain_ends(settles)
        queue = "" if want is None else want.queue
        if self._is_skipped(queue):
            raise FastPathRefused("skipped")
        by = ("", 0) if claim is None or want is None else claim.terms(want)
        found = _settle_and_claim(db, want, by, (now, *ends))
        if found is None:
            if len(self._skipped) >= MOST_QUEUES:
                self._skipped.clear()
            self._skipped[queue] = SKIPPED_AFTER_MISS
            raise FastPathRefused("relations_or_limits")
        present, jobs = found
        answers: list[Answer] = [Settled(command.id, DONE) for command in settles if type(command) is Settle]
        if claim is not None and jobs is not None:
            answers.append(Claimed(tuple([ClaimedJob(job) for job in jobs])))
        if not answers:
            raise FastPathRefused("single_attempt")
        return present, answers

    def _is_skipped(self, queue: str) -> bool:
        left = self._skipped.pop(queue, 0)
        if left > 1:
            self._skipped[queue] = left - 1
        return left > 0


def _settle_and_claim(
    db: PostgresDb, want: Want | None, by: tuple[str, int], ended: Args
) -> tuple[int, list[Job] | None] | None:
    """Run the statement; `by`: owner and lease. The time and the claimed jobs, None for the jobs if the
    general path must choose them; None if the statement refuses."""
    queue, most, single = (
        ("", 0, False) if want is None else (want.queue, want.n, want.once is None or want.once >= want.n)
    )
    scan = ReadyScan(queue, most, single, db.positions.spans(queue), time.monotonic())
    suspects = want is not None and want.suspects != 0
    rows = db.rows(
        "settle_and_claim", (queue, most, *by, single, array(scan.spans), *ended, suspects, True), tuple
    )
    if not rows:
        return None
    now, oldest, following, picked = rows[0][-4:]
    db.positions.begin(oldest, following)
    if rows[0][0] is None:
        rows.clear()
    return now, None if want is None or (picked and not rows) else received(db, rows, scan)


def _single_want(claim: Claim) -> Want:
    """The want of a claim from one queue."""
    if claim.token or len(claim.wants) > 1 or claim.wants[0].without:
        raise FastPathRefused("not_plain")
    want = narrowed(claim, claim.wants[0], ())
    if want is None or "*" in want.queue or "," in want.queue:
        raise FastPathRefused("not_plain")
    return want


def _plain_ends(settles: Sequence[Command]) -> tuple[object, ...]:
    """Ids, fences, results if there are any, and the retention of plain ends."""
    fences: dict[str, int] = {}
    results: list[bytes | None] = []
    for command in settles:
        if type(command) is not Settle or (done := plain_end(command)) is None:
            raise FastPathRefused("not_plain")
        fences[command.id] = command.fence
        results.append(done.result)
    if len(fences) < len(settles):
        raise FastPathRefused("not_plain")
    if results.count(None) == len(results):
        results.clear()
    return array(fences), array(fences.values()), results, RETENTION


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
            _text(Reason.DELAY if waits else Reason.NONE), _bigint(due), _int(model.max_attempts),
            _int(model.max_losses), _bigint(model.timeout), _bigint(model.retention), _int(0),
            _text(model.parent), _bigint(model.generation), _text(model.correlation_id),
            _bigint(now), _text(model.content_type),
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
        # The first error is raised, not the error of a lost connection.
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
    # Generated ids grow, so an id in this range is rare; only then is each id looked up.
    if perhaps_known and db.one("any_known", (array(ids),))[0]:
        raise FastPathRefused("known_id")
    return int(present)


def _blocks(runs: Sequence[SpecRun], now: int) -> Iterator[bytes]:
    rows = (row for run in runs for row in run.rows(now))
    yield _SIGNATURE
    while block := b"".join(islice(rows, BLOCK)):
        yield block
    yield _TRAILER
