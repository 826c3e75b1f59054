"""Named statements on a psycopg connection: lists go in as JSON or COPY, rows come back in binary."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar, cast

import msgspec
import psycopg
from msgspec.structs import astuple, force_setattr
from psycopg import errors, sql
from psycopg.abc import Query as PgQuery
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper

from towpath.core.commands import Selector, Settle
from towpath.core.job import BODIES, COLUMNS, Done, Job, State
from towpath.core.lifecycle import REASONS, RETENTION
from towpath.core.views import Query
from towpath.ledger.postgres import guests
from towpath.ledger.postgres.locks import NeedsLock, RowsTaken
from towpath.ledger.postgres.marks import Marks
from towpath.ledger.postgres.where import PostgresWhere, jobs_in
from towpath.ledger.relational.batch import GroupRow
from towpath.ledger.relational.db import ERROR, HEADERS, PAYLOAD, TABLES, Args, Body, Finished, array, script

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

FEW = 8
"""Rows that go in by INSERT; more go by COPY, or as arrays where some may be there already."""
_WIDTH = len(COLUMNS)
# fmt: off
_UNTOUCHED = frozenset({
    "attempts", "failures", "losses", "fence", "owner", "lease_until", "lease_len", "settled_fence", "settled_as",
    "cancel_requested", "purge_at", "progress_done", "progress_total", "started_at", "finished_at",
})
# fmt: on
"""What a new job has by default, if it has not ended as soon as it was there."""
_NEW = tuple(name for name in COLUMNS if name not in _UNTOUCHED)
_new = itemgetter(*[COLUMNS.index(name) for name in _NEW])
_counts = msgspec.json.Decoder(list[tuple[str, str | None, int]]).decode
_ids = msgspec.json.Decoder(list[str]).decode
_OURS = (psycopg.IntegrityError, psycopg.ProgrammingError, psycopg.DataError, psycopg.InternalError, psycopg.NotSupportedError)

_TYPES: Mapping[str, Sequence[str]] = {
    "body": ("bigint", "smallint", "bytea"),
    "edge": ("bigint", "bigint", "boolean"),
    "gate": ("text", "bigint", "boolean"),
    "key": ("text", "text", "text", "bigint", "bigint", "bigint"),
    "tombstone": ("text", "bigint", "text", "bigint", "text", "bigint"),
    "note": ("text", "bytea", "bigint", "bigint", "bigint"),
    "then": ("text", "text"),
    "group": ("text", "text", "text", "text", *("bigint",) * 8, "smallint", "text"),
}
_KEYS: Mapping[str, int] = {"body": 2, "edge": 2, "gate": 2, "key": 2, "tombstone": 1, "note": 1, "then": 1, "group": 1}
"""How many columns, from the left, are the primary key."""
_COLUMNS = {**TABLES, "body": ("seq", "what", "data"), "group": GroupRow.__struct_fields__}


class Statements:
    """The statements of one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._quoted = sql.Identifier(schema).as_string() + "."
        self.named = {name: (first, self.place(body)) for name, (first, body) in _queries().items()}
        self.puts = {table: self.place(_put(table)) for table in _TYPES}
        self.copy_jobs = self.place(f"COPY towpath.job ({_columns()}) FROM STDIN")
        self.copy_new_jobs = self.place(f"COPY towpath.job ({_columns(_NEW)}) FROM STDIN")
        self.copy_bodies = self.place("COPY towpath.body (seq, what, data) FROM STDIN")
        self.guests_in = self.place("INSERT INTO towpath.guest VALUES (0);" + _settings("DEFAULT"))
        self.guests_out = self.place("DELETE FROM towpath.guest;" + _settings("off"))
        self.insert_jobs = [
            self.place(f"INSERT INTO towpath.job ({_columns()}) VALUES {_values(_WIDTH, n)}") for n in range(FEW + 1)
        ]

    def place(self, text: str) -> bytes:
        """The text with the schema's own name in it."""
        # In one go: the name itself may be `towpath.`, or have a quote in it.
        inside = "'" + self._quoted.replace("'", "''")
        return re.sub(r"'?towpath\.", lambda found: inside if found[0][0] == "'" else self._quoted, text).encode()


def _settings(value: str) -> str:
    """What `begin_batch` sets for our statements is not for the user's."""
    names = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit")
    plans = "force_generic_plan" if value == "off" else value
    return "; ".join(f"SET LOCAL {name} TO {value}" for name in names) + f"; SET LOCAL plan_cache_mode TO {plans}"


def _columns(names: Iterable[str] = COLUMNS) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _values(width: int, rows: int) -> str:
    return ", ".join("(" + ", ".join(f"${row * width + n + 1}" for n in range(width)) + ")" for row in range(rows))


def _put(table: str) -> str:
    columns, key = _COLUMNS[table], _KEYS[table]
    arrays = ", ".join(_array(n, kind) for n, kind in enumerate(_TYPES[table], 1))
    sets = ", ".join(f'"{name}" = excluded."{name}"' for name in columns[key:])
    names = ", ".join(f'"{name}"' for name in columns)
    keys = ", ".join(f'"{name}"' for name in columns[:key])
    return f'INSERT INTO towpath."{table}" ({names}) SELECT * FROM unnest({arrays}) ON CONFLICT ({keys}) DO UPDATE SET {sets}'


def _array(n: int, kind: str) -> str:
    # The driver would choose the type of an array by its numbers, and prepare a statement for each.
    return f"${n}::bytea[]" if kind == "bytea" else f"ARRAY(SELECT json_array_elements_text(${n}::json)::{kind})"


@cache
def _queries() -> dict[str, tuple[str | None, str]]:
    """(statement to run before, text) by name."""
    found = re.findall(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", script("postgres", "queries.sql"), re.MULTILINE | re.DOTALL)
    return {name: (_first(body), _filled(" ".join(re.sub(r"--[^\n]*", "", body).split()).rstrip("; "))) for name, body in found}


def _first(body: str) -> str | None:
    found = re.search(r"^-- first: (\w+)$", body, re.MULTILINE)
    return found[1] if found else None


def _filled(body: str) -> str:
    for word, text in _WORDS.items():
        body = body.replace(word, text)
    return body


_TAKEN = {
    "state": "'running'",
    "reason": "''",
    "attempts": "j.attempts + 1",
    "fence": "j.fence + 1",
    "owner": "$4::text",
    "lease_until": "$5::bigint",
    "lease_len": "$6::bigint",
    "started_at": "$3::bigint",
}
JOB = ", ".join(f'j."{name}"' for name in COLUMNS)
_WORDS: Mapping[str, str] = {
    "{job}": JOB,
    "{columns}": ", ".join(f'"{name}"' for name in COLUMNS),
    "{taken}": ", ".join(f'{_TAKEN.get(name, f"j.{chr(34)}{name}{chr(34)}")} AS "{name}"' for name in COLUMNS),
    "{queue_counts}": """q.name, q.blocked + t.blocked, q.scheduled + t.scheduled, q.ready + t.ready, q.running + t.running,
        q.done + t.done, q.failed + t.failed, q.canceled + t.canceled, q.loose + t.loose, q.paused, q.why, q.capacity, q.cap,
        q.rate_count, q.rate_period, q.rate_burst, q.next_at, q.retention, q.keep, q.served, q.clock""",
    "{counted}": """
        CROSS JOIN LATERAL (
            SELECT * FROM towpath.queue WHERE name = v
            UNION ALL
            SELECT v, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0, 0, false
            WHERE NOT EXISTS (SELECT 1 FROM towpath.queue WHERE name = v)) q
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(a.blocked), 0)::bigint AS blocked, coalesce(sum(a.scheduled), 0)::bigint AS scheduled,
                coalesce(sum(a.ready), 0)::bigint AS ready, coalesce(sum(a.running), 0)::bigint AS running,
                coalesce(sum(a.done), 0)::bigint AS done, coalesce(sum(a.failed), 0)::bigint AS failed,
                coalesce(sum(a.canceled), 0)::bigint AS canceled,
                coalesce(sum(a.ready) FILTER (WHERE a.part IS NULL), 0)::bigint AS loose
            FROM towpath.tally a WHERE a.queue = v AND a.xid >= q.folded) t""",
    # Ready jobs of a queue without a part, the best first, as far as nobody else is at them.
    "{loose}": """towpath.turn t JOIN towpath.job j ON j.seq = t.seq WHERE t.queue = $1::text AND t.part = ''
        AND (t.expires_at IS NULL OR t.expires_at > $3::bigint) AND j.state = 'ready' AND""",
    "{best}": "ORDER BY t.priority, t.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED",
    "{running}": """(SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease) l JOIN towpath.job j USING (seq)
        WHERE j.state = 'running'""",
    # What else it means that the jobs of u are over, that those of u wait (again), that those of o are not over any more.
    "{over}": """
        e AS (DELETE FROM towpath.expiry e USING u WHERE u.expires_at IS NOT NULL AND e.at = u.expires_at AND e.seq = u.seq),
        f AS (INSERT INTO towpath.dead (queue, seq) SELECT queue, seq FROM u WHERE state = 'failed'),
        p AS (INSERT INTO towpath.past (queue, purge_at, seqs)
            SELECT queue, purge_at, array_agg(seq) FROM {some_of} u WHERE purge_at IS NOT NULL) s
            GROUP BY queue, purge_at, chunk)""",
    # Not so many in a row that it is compressed and put elsewhere.
    "{some_of}": "(SELECT *, row_number() OVER () / 200 AS chunk FROM",
    "{turns}": """INSERT INTO towpath.turn (seq, queue, part, priority, ready_at, expires_at, ripe)
        SELECT seq, queue, coalesce(part, ''), priority, ready_at, expires_at, CASE state WHEN 'ready' THEN 2 ELSE 0 END FROM u""",
    "{no_more_over}": """
        f AS (DELETE FROM towpath.dead d USING o WHERE d.queue = o.queue AND d.seq = o.seq),
        p AS MATERIALIZED (
            SELECT p.queue, p.purge_at, p.n, ARRAY(SELECT s FROM unnest(p.seqs) s WHERE s NOT IN (SELECT seq FROM o)) AS seqs
            FROM (SELECT DISTINCT queue, purge_at FROM o) k JOIN towpath.past p ON p.queue = k.queue AND p.purge_at = k.purge_at
            ORDER BY p.queue, p.purge_at, p.n FOR UPDATE OF p),
        fewer AS (UPDATE towpath.past d SET seqs = p.seqs FROM p
            WHERE d.queue = p.queue AND d.purge_at = p.purge_at AND d.n = p.n AND p.seqs <> '{}'),
        none AS (DELETE FROM towpath.past d USING p
            WHERE d.queue = p.queue AND d.purge_at = p.purge_at AND d.n = p.n AND p.seqs = '{}')""",
    "{expiring}": """(SELECT e.at FROM towpath.expiry e JOIN towpath.job j ON j.seq = e.seq
        WHERE j.state <> 'running' ORDER BY e.at LIMIT 1)""",
    "{ripe}": "CASE WHEN state <> 'ready' THEN 0 WHEN part IS NULL THEN 1 ELSE 2 END",
    # The transaction has a number of its own before it numbers a job: see `marks`.
    "{number}": "CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('towpath.job_seq') END",
    "{clock}": "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
    "{kept}": ", ".join(f"'{reason}'" for reason in sorted(REASONS[State.READY] & REASONS[State.SCHEDULED])),
}


class Cursor(psycopg.RawCursor[tuple[Any, ...]]):
    """`$1` instead of `%s`: nothing is parsed on this side."""


def prepare(connection: Connection) -> None:
    """So that a statement has the same types of arguments every time, and stays prepared."""
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    connection.prepared_max = 500


class PostgresDb:
    """`relational.db.Db` on a connection."""

    __slots__ = ("_cursor", "_statements", "connection", "marks")

    def __init__(self, connection: Connection, statements: Statements) -> None:
        self.connection = connection
        self._statements = statements
        self._cursor = Cursor(connection)
        self.marks = Marks()

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
        newest = {tuple(row[: _KEYS[table]]): row for row in rows}
        if newest:
            columns = zip(_TYPES[table], zip(*newest.values(), strict=True), strict=True)
            self.execute(self._statements.puts[table], [list(c) if kind == "bytea" else array(c) for kind, c in columns])
            if table == "edge":
                self.run("source", (array({row[0] for row in newest.values()}),))

    def finish_plain(self, commands: Sequence[Settle], now: int) -> Finished:
        ends = {command.id: command for command in commands if _is_plain(command)}
        if not ends or len({command.id for command in commands}) < len(commands):
            return Finished()
        fences = array([command.fence for command in ends.values()])
        counts, found = self.one("finish_plain", (array(ends), fences, now, RETENTION))
        done = ends.keys() if found is None else set(_ids(found))
        results = {id: result for id in done if (result := _result(ends[id])) is not None}
        if results:
            self.run("put_results", (array(results), list(results.values())))
        return Finished(_counts(counts or b"[]"), done)

    def take_best(self, args: Args) -> list[Job]:
        queue, most, *_ = args
        spans, began = self.marks.spans(queue), time.monotonic()
        rows = self._named("take_best", (*args, array(spans))).fetchall()
        found: list[Job] = []
        fresh: list[tuple[int, int]] = []
        for job, row in zip(msgspec.convert([row[:_WIDTH] for row in rows], list[Job]), rows, strict=True):
            ripe, gone, what, data = row[_WIDTH:]
            # One that has headers comes twice.
            if not found or found[-1].seq != job.seq:
                found.append(job)
                if ripe == 1:
                    fresh.append((job.priority, job.seq))
            if what is not None:
                force_setattr(found[-1], BODIES[what], _decoded(what, data))
        if found and gone != len(found):
            # One of them came and went between the look at what is there and the lock on it.
            raise RowsTaken
        last = (found[-1].priority, found[-1].seq) if len(found) == most else None
        self.marks.claimed(queue, fresh, last, spans, time.monotonic() - began)
        # What an earlier attempt left (an error, a cursor) only those have that were claimed before.
        self.fill([job for job in found if job.fence > 1])
        return found

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        rows = [astuple(job)[:_WIDTH] for job in jobs]
        if len(rows) <= FEW:
            if rows:
                self.execute(self._statements.insert_jobs[len(rows)], [value for row in rows for value in row])
            self.put_bodies(bodies_of(jobs))
        else:
            if any(job.finished_at is not None for job in jobs):
                self._copy(self._statements.copy_jobs, rows)
            else:
                self._copy(self._statements.copy_new_jobs, map(_new, rows))
            self._copy(self._statements.copy_bodies, bodies_of(jobs))
        if rows:
            self.run("enter", (jobs[0].seq, jobs[-1].seq))

    def _copy(self, query: bytes, rows: Iterable[Sequence[Any]]) -> None:
        try:
            with self._cursor.copy(cast(PgQuery, query)) as copy:
                for row in rows:
                    copy.write_row(row)
        except errors.LockNotAvailable as error:
            raise RowsTaken from error

    def put_bodies(self, bodies: Iterable[Body]) -> None:
        self.put("body", bodies)

    def fill(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        wanted = {job.seq: job for job in jobs}
        query = self._statements.place(
            "SELECT seq, what, data FROM towpath.body WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint))"
        )
        for seq, what, data in self.execute(query, (array(wanted),)):
            force_setattr(wanted[seq], BODIES[what], _decoded(what, data))

    def matching(self, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        found = PostgresWhere()
        found.match(selector)
        found.states(tuple(states))
        if unasked:
            found.add("(j.state <> 'running' OR j.cancel_requested IS NULL)")
        return self._jobs(found, "ASC", limit, "FOR UPDATE")

    def find(self, query: Query, limit: int) -> list[Job]:
        found = PostgresWhere()
        found.ask(query)
        return self._jobs(found, "ASC" if query.oldest_first else "DESC", limit, table=jobs_in(query.states))

    def _jobs(self, found: PostgresWhere, order: str, limit: int, lock: str = "", table: str = "towpath.job j") -> list[Job]:
        text = f"SELECT {JOB} FROM {table} WHERE {found.sql} ORDER BY seq {order} LIMIT ${len(found.args) + 1} {lock}"
        rows = self.execute(self._statements.place(text), (*found.args, limit)).fetchall()
        return msgspec.convert(rows, list[Job])

    def save(self) -> None:
        self.execute(b"SAVEPOINT towpath_save")

    def undo(self) -> None:
        self.execute(b"ROLLBACK TO SAVEPOINT towpath_save")

    def keep(self) -> None:
        self.execute(b"RELEASE SAVEPOINT towpath_save")

    def call(self, id: str, function: Callable[[Any], object]) -> None:
        way = guests.Way(self._statements.guests_in, self._statements.guests_out)
        guests.call_within(self.connection, way, id, function)

    def is_ours(self, error: Exception) -> bool:
        if isinstance(error, NeedsLock | RowsTaken | guests.TransactionEnded):
            return False
        return isinstance(error, _OURS) or not isinstance(error, psycopg.Error)


def _is_plain(command: Settle) -> bool:
    return type(command.outcome) is Done and not (command.spawn or command.notes or command.within is not None)


def _result(command: Settle) -> bytes | None:
    return command.outcome.result if isinstance(command.outcome, Done) else None


def bodies_of(jobs: Iterable[Job]) -> Iterator[Body]:
    for job in jobs:
        if job.payload:
            yield job.seq, PAYLOAD, job.payload
        if job.headers:
            yield job.seq, HEADERS, msgspec.json.encode(job.headers)


def _decoded(what: int, data: bytes) -> Any:
    if what == HEADERS:
        return msgspec.json.decode(data)
    return data.decode() if what == ERROR else data


def end_open(db: PostgresDb) -> None:
    """Undo what is open. Also before every transaction: an interrupt may have come before the last one was undone."""
    status = db.connection.info.transaction_status
    if status is TransactionStatus.ACTIVE:
        # Interrupted in the middle of a statement: what comes next on this connection is the answer to that.
        db.connection.close()
        raise psycopg.OperationalError("the last statement was interrupted")
    if status is not TransactionStatus.IDLE:
        db.execute(b"ROLLBACK")
