"""One statement by its name, past the driver, which takes as long for a statement as the server does: for the
append for which somebody waits."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import psycopg
from msgspec.structs import astuple, force_setattr
from psycopg import errors, generators
from psycopg.abc import Query as PgQuery
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.types.numeric import Int8BinaryDumper

from towpath.core.commands import Selector, Settle
from towpath.core.job import BODIES, Job, State
from towpath.core.lifecycle import RETENTION
from towpath.core.views import Query
from towpath.errors import Refused
from towpath.escapes import get_logger
from towpath.ledger.postgres import user_functions
from towpath.ledger.postgres.locks import NeedsLock, RowsTaken
from towpath.ledger.postgres.ready_scan import ScanPositions, Span
from towpath.ledger.postgres.statements import FEW, JOB, KEYS, SMALL, TYPES, WIDTH, Statements, new
from towpath.ledger.tables.database import (
    ERROR,
    HEADERS,
    PAYLOAD,
    Args,
    Body,
    Finished,
    FunctionUndone,
    array,
    plain_end,
)
from towpath.ledger.tables.reads import Conditions

_FORGOTTEN, _KNOWN = "26000", "42P05"
"""The driver forgets all statements now and then, ours too. And we may not have heard that it is there."""

SPIN_BELOW = 0.0008
"""Seconds: an answer that usually takes longer is waited for asleep. Where machines are short of CPU it does,
and to be awake would only take more from the server."""


class RawStatement:
    def __init__(self, connection: psycopg.Connection[Any], name: str, query: bytes, arguments: int) -> None:
        """All its arguments are text but the last, which is bytes; its answer is a row of integers, or
        none."""
        self._connection = connection
        self._name, self._query = name.encode(), query
        self._formats = [Format.TEXT] * (arguments - 1) + [Format.BINARY]
        self._is_there = False
        self._usual = SPIN_BELOW
        """Seconds until there is an answer."""
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        self._readable = poll.poll

    def row(self, args: Sequence[bytes | None]) -> tuple[int, ...] | None:
        found = self._ask(args)
        if found.status != ExecStatus.TUPLES_OK:
            found = self._once_more(found, args)
        if not found.ntuples:
            return None
        return tuple(
            [int.from_bytes(found.get_value(0, n) or b"", "big", signed=True) for n in range(found.nfields)]
        )

    def _once_more(self, found: PGresult, args: Sequence[bytes | None]) -> PGresult:
        if errors.error_from_result(found).sqlstate == _FORGOTTEN:
            self._is_there = False
            found = self._ask(args)
        if found.status != ExecStatus.TUPLES_OK:
            raise errors.error_from_result(found)
        return found

    def _ask(self, args: Sequence[bytes | None]) -> PGresult:
        pgconn = self._connection.pgconn
        if not self._is_there:
            pgconn.send_prepare(self._name, self._query)
            prepared = self._answer()
            if (
                prepared.status == ExecStatus.FATAL_ERROR
                and errors.error_from_result(prepared).sqlstate != _KNOWN
            ):
                return prepared
            self._is_there = True
        pgconn.send_query_prepared(self._name, args, self._formats, Format.BINARY)
        return self._answer()

    def _answer(self) -> PGresult:
        """Waits so that it can be interrupted, as the driver does, which takes twice as long for it. (Who is
        interrupted leaves an open statement behind: see `end_open`.)"""
        pgconn = self._connection.pgconn
        if pgconn.flush():
            found: list[PGresult] = self._connection.wait(generators.execute(pgconn))
            return found[-1]
        began = time.monotonic()
        if self._usual < SPIN_BELOW:
            self._watch(began)
        while pgconn.is_busy():
            self._readable()
            pgconn.consume_input()
        self._usual += (min(time.monotonic() - began, 2 * SPIN_BELOW) - self._usual) / 8
        last = pgconn.get_result()
        while (more := pgconn.get_result()) is not None:
            last = more
        assert last is not None
        return last

    def _watch(self, began: float) -> None:
        """Half of the usual time asleep, then awake for as long again: somebody waits, and to be woken takes
        a tenth of all the time."""
        time.sleep(self._usual / 2)
        pgconn = self._connection.pgconn
        while pgconn.is_busy() and time.monotonic() - began < self._usual:
            if self._readable(0):
                pgconn.consume_input()


log = get_logger("towpath.postgres")

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

_counts = msgspec.json.Decoder(list[tuple[str, str | None, int]]).decode
_ids = msgspec.json.Decoder(list[str]).decode
SAVEPOINTS_AFTER_FAILURE = 16
"""Transactions after a failed commit function in which each has its savepoint at once."""
SOURCES = {"edge": 0, "proxy": 3}
"""Rows of which table say that something depends on a job, and in which column it is."""
_OURS = (
    psycopg.IntegrityError,
    psycopg.ProgrammingError,
    psycopg.DataError,
    psycopg.InternalError,
    psycopg.NotSupportedError,
)


class Cursor(psycopg.RawCursor[tuple[Any, ...]]):
    """`$1` instead of `%s`: nothing is parsed on this side."""


def prepare(connection: Connection) -> None:
    """So that a statement has the same types of arguments every time, and stays prepared."""
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    connection.prepared_max = 500


class ReadyScan(NamedTuple):
    """What a claim asks for, where it begins to look, and when."""

    queue: str
    most: int
    single: bool
    spans: list[Span]
    began: float


class PostgresDb:
    """`tables.database.Db` on a connection."""

    __slots__ = ("_careful", "_cursor", "_statements", "append_new", "append_one", "connection", "positions")

    def __init__(self, connection: Connection, statements: Statements) -> None:
        self.connection = connection
        self._statements = statements
        self._cursor = Cursor(connection)
        self.positions = ScanPositions()
        self._careful = 0
        """For how many transactions commit functions are not called eagerly."""
        self.append_one: RawStatement | None = None
        self.append_new: RawStatement | None = None
        if connection.prepare_threshold is not None and hasattr(select, "poll"):
            self.append_one = RawStatement(
                connection, "towpath_append", statements.named["append_plain"][1], 9
            )
            self.append_new = RawStatement(connection, "towpath_append_new", statements.append_new, 9)

    def execute(self, query: bytes, args: Args = ()) -> Cursor:
        try:
            return self._cursor.execute(query, args, binary=True)
        except errors.LockNotAvailable as error:
            raise RowsTaken from error

    def _named(self, name: str, args: Args) -> Cursor:
        first, query = self._statements.named[name]
        if first is not None:
            self._named(first, args)
        return self.execute(query, args)

    def rows(self, name: str, args: Args, type: type[T]) -> list[T]:
        found = self._named(name, args).fetchall()
        if type is int or type is str:
            return [row[0] for row in found]
        return msgspec.convert(found, list[type])  # type: ignore[valid-type]

    def one(self, name: str, args: Args = ()) -> Any:
        return self._named(name, args).fetchone()

    def run(self, name: str, args: Args = ()) -> None:
        self._named(name, args)

    def count(self, name: str, args: Args) -> int:
        return self._named(name, args).rowcount

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        newest = {tuple(row[: KEYS[table]]): row for row in rows}
        if newest:
            columns = zip(TYPES[table], zip(*newest.values(), strict=True), strict=True)
            self.execute(
                self._statements.puts[table],
                [list(c) if kind == "bytea" else array(c) for kind, c in columns],
            )
            if table in ("edge", "proxy"):
                self.run("source", (array({row[SOURCES[table]] for row in newest.values()}),))

    def finish_plain(self, commands: Sequence[Settle], now: int) -> Finished:
        fences: dict[str, int | None] = {}
        results: dict[str, bytes] = {}
        plain = 0
        for command in commands:
            fences[command.id] = None
            if (done := plain_end(command)) is not None:
                fences[command.id] = command.fence
                plain += 1
                if done.result is not None:
                    results[command.id] = done.result
        if not plain or len(fences) < len(commands):
            return Finished()
        counts, found = self.one("finish_plain", (array(fences), array(fences.values()), now, RETENTION))
        ended = fences.keys() if found is None else set(_ids(found))
        if kept := {id: result for id, result in results.items() if id in ended}:
            self.run("put_results", (array(kept), list(kept.values())))
        return Finished(_counts(counts or b"[]"), ended)

    def take_best(self, args: Args) -> list[Job]:
        queue, most, *_, single = args
        look = ReadyScan(queue, most, single, self.positions.spans(queue), time.monotonic())
        rows = self._named("take_best", (*args, array(look.spans))).fetchall()
        if rows and rows[0][-1] != len(rows):
            # One of them came and went between the look at what is there and the lock on it.
            raise RowsTaken
        return received(self, rows, look)

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        rows = [astuple(job)[:WIDTH] for job in jobs]
        if len(rows) <= FEW:
            if rows:
                self.execute(
                    self._statements.insert_jobs[len(rows)], [value for row in rows for value in row]
                )
            self.put_bodies(bodies_of(jobs))
        else:
            if any(job.finished_at is not None for job in jobs):
                self._copy(self._statements.copy_jobs, rows)
                self._copy(self._statements.copy_bodies, bodies_of(jobs))
            else:
                self._copy(self._statements.copy_new_jobs, map(_with_payload, map(new, rows), jobs))
                self._copy(self._statements.copy_bodies, bodies_of(jobs, SMALL))
        if rows:
            self.run("enter", (jobs[0].seq, jobs[-1].seq))

    def _copy(self, query: bytes, rows: Iterable[Sequence[Any]]) -> None:
        rows = list(rows)
        if not rows:
            return
        with self._copying(query) as copy:
            for row in rows:
                copy.write_row(row)

    @contextmanager
    def _copying(self, query: bytes) -> Iterator[psycopg.Copy]:
        try:
            with self._cursor.copy(cast(PgQuery, query)) as copy:
                yield copy
        except errors.LockNotAvailable as error:
            raise RowsTaken from error

    def put_bodies(self, bodies: Iterable[Body]) -> None:
        self.put("body", bodies)

    def fill(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        wanted = {job.seq: job for job in jobs}
        query = self._statements.place(
            "SELECT seq, what, data FROM towpath.body_now WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint))"
        )
        for seq, what, data in self.execute(query, (array(wanted),)):
            force_setattr(wanted[seq], BODIES[what], _decoded(what, data))

    def matching(self, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        found = PostgresConditions()
        found.match(selector)
        found.states(tuple(states))
        if unasked:
            found.add("(j.state <> 'running' OR j.cancel_requested IS NULL)")
        return self._jobs(found, "towpath.job j", "j.seq", limit, "FOR UPDATE")

    def find(self, query: Query, limit: int) -> list[Job]:
        found = PostgresConditions()
        found.ask(query)
        table, seq = jobs_in(() if query.group or query.key or query.correlation_id else query.states)
        return self._jobs(found, table, seq if query.oldest_first else f"{seq} DESC", limit)

    def _jobs(
        self, found: PostgresConditions, table: str, order: str, limit: int, lock: str = ""
    ) -> list[Job]:
        text = f"SELECT {JOB} FROM {table} WHERE {found.sql} ORDER BY {order} LIMIT ${len(found.args) + 1} {lock}"
        rows = self.execute(self._statements.place(text), (*found.args, limit)).fetchall()
        return msgspec.convert(rows, list[Job])

    def save(self) -> None:
        self.execute(b"SAVEPOINT towpath_save")

    def undo(self) -> None:
        self.execute(b"ROLLBACK TO SAVEPOINT towpath_save")
        self.positions.forget()

    def keep(self) -> None:
        self.execute(b"RELEASE SAVEPOINT towpath_save")

    def call_all(self, functions: Sequence[tuple[str, Callable[[Any], object]]]) -> Mapping[str, Refused]:
        if not functions:
            return {}
        around = user_functions.GuardStatements(
            self._statements.before_functions, self._statements.after_functions
        )
        eager, self._careful = len(functions) > 1 and self._careful == 0, max(0, self._careful - 1)
        clean = False
        try:
            failed = user_functions.call_all(self.connection, around, functions, eager)
            clean = not failed
        finally:
            if not clean:
                self._careful = SAVEPOINTS_AFTER_FAILURE
        return failed

    def is_command_error(self, error: Exception) -> bool:
        if isinstance(error, NeedsLock | RowsTaken | FunctionUndone):
            return False
        return isinstance(error, _OURS) or not isinstance(error, psycopg.Error)


def take_seqs(db: PostgresDb, n: int) -> range:
    """So many numbers, one after the other."""
    while True:
        first, last = db.one("take_seqs", (n,))
        if last - first == n - 1:
            return range(first, last + 1)


def add_plain(db: PostgresDb, blocks: Iterable[bytes], bodies: Iterable[Body]) -> None:
    """Jobs in the binary form of COPY, by the columns of `PLAIN`, and what of them is not small."""
    with db._copying(db._statements.copy_plain) as copy:
        for block in blocks:
            copy.write(block)
    db._copy(db._statements.copy_bodies, bodies)


def received(db: PostgresDb, rows: Sequence[tuple[Any, ...]], look: ReadyScan) -> list[Job]:
    """Jobs that were just claimed, the best first."""
    try:
        found = msgspec.convert([row[:WIDTH] for row in rows], list[Job])
    except msgspec.ValidationError:
        return received(db, [row for row in rows if _is_valid(row)], look)
    fresh: list[tuple[int, int]] = []
    partial: list[Job] = []
    for job, row in zip(found, rows, strict=True):
        ripe, complete, payload = row[WIDTH : WIDTH + 3]
        if ripe == 1:
            fresh.append((job.priority, job.seq))
        if payload is not None:
            force_setattr(job, "payload", payload)
        # What an earlier attempt left (an error, a cursor) only those have that were claimed before.
        if not complete or job.fence > 1:
            partial.append(job)
    last = (found[-1].priority, found[-1].seq) if len(found) == look.most else None
    if found or look.single:  # otherwise one with a single attempt may have kept it from taking any
        db.positions.claimed(look.queue, fresh, last, look.spans, time.monotonic() - look.began)
    db.fill(partial)
    return found


def _is_valid(row: tuple[Any, ...]) -> bool:
    """A row that was tampered with must not take its neighbours along: it is claimed, and its lease runs
    out."""
    try:
        msgspec.convert(row[:WIDTH], Job)
    except msgspec.ValidationError as error:
        log.error("job %s holds what no ledger wrote, and is left to its lease: %s", row[0], error)
        return False
    return True


def _with_payload(row: tuple[Any, ...], job: Job) -> tuple[Any, ...]:
    size = len(job.payload)
    return *row, not job.headers and size <= SMALL, job.payload if 0 < size <= SMALL else None


def bodies_of(jobs: Iterable[Job], small: int = 0) -> Iterator[Body]:
    """What goes to a place of its own: headers, and payloads that are not small."""
    for job in jobs:
        if len(job.payload) > small:
            yield job.seq, PAYLOAD, job.payload
        if job.headers:
            yield job.seq, HEADERS, msgspec.json.encode(job.headers)


def _decoded(what: int, data: bytes) -> Any:
    if what == HEADERS:
        return msgspec.json.decode(data)
    return data.decode() if what == ERROR else data


def end_open(db: PostgresDb) -> None:
    """Undo what is open. Also before every transaction: an interrupt may have come before the last one was
    undone."""
    status = db.connection.pgconn.transaction_status
    if status == TransactionStatus.ACTIVE:
        # Interrupted in the middle of a statement: what comes next on this connection is the answer to that.
        db.connection.close()
        raise psycopg.OperationalError("the last statement was interrupted")
    if status != TransactionStatus.IDLE:
        db.execute(b"ROLLBACK")


def jobs_in(states: Sequence[State]) -> tuple[str, str]:
    """The table of jobs, or a way to them by one that has only those, few among many; and their number there.
    (OFFSET keeps the planner from walking the jobs to look each up in the other table.)"""
    wanted = set(states)
    if wanted and wanted <= {State.READY, State.SCHEDULED}:
        few = "towpath.turn"
    elif wanted == {State.FAILED}:
        few = "towpath.dead"
    elif wanted == {State.RUNNING}:
        few = "(SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease)"
    else:
        return "towpath.job j", "j.seq"
    return f"{few} x CROSS JOIN LATERAL (SELECT * FROM towpath.job WHERE seq = x.seq OFFSET 0) j", "x.seq"


class PostgresConditions(Conditions):
    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?::text', value)

    def ids(self, ids: tuple[str, ...]) -> None:
        self.add("j.id = ANY (ARRAY(SELECT json_array_elements_text(?::json)))", array(ids))

    def like(self, pattern: str) -> None:
        plain = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        self.add("j.queue LIKE ?::text", plain.replace("*", "%"))

    def header(self, name: str, value: str) -> None:
        headers = "(SELECT convert_from(data, 'UTF8')::json FROM towpath.body WHERE seq = j.seq AND what = ?)"
        self.add(f"{headers} ->> ?::text = ?::text", HEADERS, name, value)

    @property
    def sql(self) -> str:
        numbers = count(1)
        return re.sub(r"\?", lambda _: f"${next(numbers)}", super().sql)
