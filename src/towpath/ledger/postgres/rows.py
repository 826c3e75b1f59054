"""The ledger's connection as the shared rules use it: named statements, rows in and out, jobs and bodies."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import psycopg
from msgspec.structs import asdict, force_setattr
from psycopg import errors
from psycopg.abc import Query as PgQuery
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper

from towpath.core.commands import Selector
from towpath.core.job import COLUMNS, Job, State
from towpath.core.lifecycle import RETENTION
from towpath.core.views import Query
from towpath.errors import Refused
from towpath.escapes import get_logger
from towpath.ledger.postgres import user_functions
from towpath.ledger.postgres.locks import NeedsLock, RowsTaken
from towpath.ledger.postgres.ready_scan import ScanPositions, Span
from towpath.ledger.postgres.statements import (
    JOB,
    KEYS,
    SMALL,
    TYPES,
    WIDTH,
    RawStatement,
    Statements,
    bytea_array,
)
from towpath.ledger.tables.database import (
    HEADERS,
    PAYLOAD,
    Args,
    Body,
    FunctionUndone,
    array,
    set_body,
)
from towpath.ledger.tables.reads import Conditions

log = get_logger("towpath.postgres")

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

SAVEPOINTS_AFTER_FAILURE = 16
"""Transactions after a failed commit function in which every function is called in a savepoint."""
SOURCES = {"edge": 0, "proxy": 3}
"""Tables with rows that depend on a job, and the column of that job."""
_OURS = (
    psycopg.IntegrityError,
    psycopg.ProgrammingError,
    psycopg.DataError,
    psycopg.InternalError,
    psycopg.NotSupportedError,
)


class Cursor(psycopg.RawCursor[tuple[Any, ...]]):
    """A cursor with `$1` instead of `%s`: the driver does not parse the statements."""


def prepare(connection: Connection) -> None:
    """Make statements stay prepared: integers always have the same type."""
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    connection.prepared_max = 500


class ReadyScan(NamedTuple):
    """The scan of a claim: queue, number of jobs, where and when it starts."""

    queue: str
    most: int
    single: bool
    spans: list[Span]
    began: float


class PostgresDb:
    """`tables.database.Db` on a connection."""

    __slots__ = ("_cursor", "_statements", "careful", "connection", "positions", "raw_append")
    takes_best = True

    def __init__(self, connection: Connection, statements: Statements) -> None:
        self.connection = connection
        self._statements = statements
        self._cursor = Cursor(connection)
        self.positions = ScanPositions()
        self.careful = 0
        """The number of transactions in which commit functions are not called eagerly."""
        self.raw_append: RawStatement | None = None
        if connection.prepare_threshold is not None and hasattr(select, "poll"):
            text = statements.named["append_plain"][1]
            self.raw_append = RawStatement(connection, "towpath_append", text, 3)

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

    def take_best(self, args: Args) -> list[Job]:
        queue, most, now, owner, _, lease, single = args
        scan = ReadyScan(queue, most, single, self.positions.spans(queue), time.monotonic())
        # No settles, suspects are taken by `offer_suspects`, and the transaction counts what is returned.
        rest: Args = (now, "[]", "[]", [], RETENTION, False, False)
        try:
            rows = self._named(
                "settle_and_claim", (queue, most, owner, lease, single, array(scan.spans), *rest)
            ).fetchall()
        except errors.DivisionByZero as error:
            raise RowsTaken from error
        if not rows or rows[0][0] is None:
            return []
        return received(self, rows, scan)

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        if jobs and self.count("insert_jobs", insert_args(jobs, count=False)) < len(jobs):
            raise errors.UniqueViolation("another transaction has appended one of the ids")

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
            "SELECT seq, what, data FROM towpath.body_now "
            "WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint))"
        )
        for seq, what, data in self.execute(query, (array(wanted),)):
            set_body(wanted[seq], what, data)

    def matching(self, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        found = PostgresConditions()
        found.match(selector)
        found.states(tuple(states))
        if unasked:
            found.add("(j.state <> 'running' OR coalesce(j.cancel_requested, 'stopped') = 'stopped')")
        return self._jobs(found, "towpath.job j", "j.seq", limit, "FOR UPDATE")

    def find(self, query: Query, limit: int) -> list[Job]:
        found = PostgresConditions()
        found.ask(query)
        table, seq = jobs_in(() if query.group or query.key or query.correlation_id else query.states)
        return self._jobs(found, table, seq if query.oldest_first else f"{seq} DESC", limit)

    def _jobs(
        self, found: PostgresConditions, table: str, order: str, limit: int, lock: str = ""
    ) -> list[Job]:
        bound = f"LIMIT ${len(found.args) + 1} {lock}"
        text = f"SELECT {JOB} FROM {table} WHERE {found.sql} ORDER BY {order} {bound}"
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
        eager, self.careful = len(functions) > 1 and self.careful == 0, max(0, self.careful - 1)
        clean = False
        try:
            failed = user_functions.call_all(self.connection, around, functions, eager)
            clean = not failed
        finally:
            if not clean:
                self.careful = SAVEPOINTS_AFTER_FAILURE
        return failed

    def rehearse(self, function: Callable[[Any], object]) -> None:
        """Call a function in a transaction that is rolled back. Raises its failure."""
        self.execute(b"BEGIN READ WRITE")
        failed: Mapping[str, Refused]
        try:
            failed = self.call_all([("", function)])
        except FunctionUndone as undone:
            failed = {"": undone.answer}
        finally:
            with suppress(psycopg.Error):
                self.connection.rollback()
        if failed:
            raise failed[""]

    def is_command_error(self, error: Exception) -> bool:
        if isinstance(error, NeedsLock | RowsTaken | FunctionUndone):
            return False
        return isinstance(error, _OURS) or not isinstance(error, psycopg.Error)


def append_plain(
    db: PostgresDb, specs: bytes, now: int | None, payloads: Sequence[bytes]
) -> list[tuple[int, ...]]:
    """The ledger time and the number of each spec (JSON); no rows if the statement refuses."""
    if db.raw_append is None:
        return db.rows("append_plain", (specs.decode(), now, list(payloads)), tuple)
    try:
        return db.raw_append.rows((specs, None if now is None else b"%d" % now, bytea_array(payloads)))
    except errors.LockNotAvailable as error:
        raise RowsTaken from error


def take_seqs(db: PostgresDb, n: int) -> range:
    """Take `n` consecutive numbers."""
    while True:
        first, last = db.one("take_seqs", (n,))
        if last - first == n - 1:
            return range(first, last + 1)


def add_plain(db: PostgresDb, blocks: Iterable[bytes], bodies: Iterable[Body]) -> None:
    """Insert jobs in the binary format of COPY, with the columns of `PLAIN`, and the bodies that are not
    small."""
    with db._copying(db._statements.copy_plain) as copy:
        for block in blocks:
            copy.write(block)
    db._copy(db._statements.copy_bodies, bodies)


def received(db: PostgresDb, rows: Sequence[tuple[Any, ...]], scan: ReadyScan) -> list[Job]:
    """The jobs of the rows of a claim, in order. Moves the scan positions and reads missing bodies."""
    try:
        found = msgspec.convert([row[:WIDTH] for row in rows], list[Job])
    except msgspec.ValidationError:
        return received(db, [row for row in rows if _is_valid(row)], scan)
    fresh: list[tuple[int, int]] = []
    partial: list[Job] = []
    for job, row in zip(found, rows, strict=True):
        ripe, complete, payload = row[WIDTH : WIDTH + 3]
        if ripe == 1:
            fresh.append((job.priority, job.seq))
        if payload is not None:
            force_setattr(job, "payload", payload)
        # Only a job that was claimed before has an error or a cursor of an earlier attempt.
        if not complete or job.fence > 1:
            partial.append(job)
    last = (found[-1].priority, found[-1].seq) if len(found) == scan.most else None
    if found or scan.single:  # otherwise a job with a single attempt may have ended the scan
        db.positions.claimed(scan.queue, fresh, last, scan.spans, time.monotonic() - scan.began)
    db.fill(partial)
    return found


def _is_valid(row: tuple[Any, ...]) -> bool:
    """False for a damaged row, which must not fail the whole claim: the job stays claimed until its lease
    expires."""
    try:
        msgspec.convert(row[:WIDTH], Job)
    except msgspec.ValidationError as error:
        log.error(
            "job %s has values that no ledger wrote; it stays claimed until its lease expires: %s",
            row[0],
            error,
        )
        return False
    return True


_COLUMNS = frozenset(COLUMNS)


def insert_args(jobs: Sequence[Job], count: bool) -> Args:
    """The arguments of `insert_jobs`. `count`: the statement also writes the tally."""
    rows = [
        {name: value for name, value in asdict(job).items() if value is not None and name in _COLUMNS}
        | _small_payload(job)
        for job in jobs
    ]
    bodies = list(bodies_of(jobs, SMALL))
    places, data = [(seq, what) for seq, what, _ in bodies], [each for _, _, each in bodies]
    encode = msgspec.json.encode
    return encode(rows), encode(places), data, b"t" if count else b"f"


def _small_payload(job: Job) -> dict[str, object]:
    """A small payload is stored in the row of its job; `complete` jobs have no bodies elsewhere."""
    size = len(job.payload)
    small: dict[str, object] = {"complete": not job.headers and job.error is None and size <= SMALL}
    return small | {"payload": "\\x" + job.payload.hex()} if 0 < size <= SMALL else small


def bodies_of(jobs: Iterable[Job], small: int = 0) -> Iterator[Body]:
    """The bodies that are stored beside the job: headers, and payloads that are not small."""
    for job in jobs:
        if len(job.payload) > small:
            yield job.seq, PAYLOAD, job.payload
        if job.headers:
            yield job.seq, HEADERS, msgspec.json.encode(job.headers)


def end_open(db: PostgresDb) -> None:
    """Roll back an open transaction. Also called before every transaction, because an interrupt may have kept
    the last one open."""
    status = db.connection.pgconn.transaction_status
    if status == TransactionStatus.ACTIVE:
        # Interrupted during a statement: the next result on this connection would belong to the old
        # statement.
        db.connection.close()
        raise psycopg.OperationalError("the last statement was interrupted")
    if status != TransactionStatus.IDLE:
        db.execute(b"ROLLBACK")


def jobs_in(states: Sequence[State]) -> tuple[str, str]:
    """The FROM clause for jobs in these states, and the column of their number. If a small table has exactly
    these jobs, the clause starts from it. (OFFSET keeps the planner from scanning all jobs first.)"""
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
