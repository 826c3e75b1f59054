"""`tables.database.Db` on SQLite, with few steps per statement.

Each `sqlite3_step` releases the interpreter lock. Beside a busy Python thread each release costs a switch
interval. So many rows are returned as one JSON row, and many rows are inserted by one statement of many
VALUES."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import apsw
import msgspec

from towpath.core.commands import Selector
from towpath.core.job import Job, State
from towpath.core.lifecycle import REASONS, Jumps
from towpath.core.views import Query
from towpath.errors import Refused
from towpath.ledger.sqlite import rows as jobs
from towpath.ledger.sqlite import user_functions
from towpath.ledger.sqlite.rows import SLOTS, as_json
from towpath.ledger.tables.database import (
    HEADERS,
    TABLES,
    Args,
    Body,
    FunctionUndone,
    HeldRow,
    array,
    script,
)
from towpath.ledger.tables.reads import Conditions
from towpath.ledger.tables.transaction import (
    GroupRow,
    PartRow,
    QueueRow,
    ReadAhead,
    StartFacts,
    Transaction,
)

T = TypeVar("T")

ROWS = 32
"""Rows per VALUES statement, a power of two: fast to bind, and short enough for apsw's statement cache."""
COMMAND_ERRORS = (apsw.ConstraintError, apsw.SQLError, apsw.MismatchError, apsw.TooBigError)
"""Errors of SQLite that a command or a defect causes. The others have their cause in the file or the
machine."""


def one(db: apsw.Connection, sql: str, args: Args = ()) -> Any:
    """The first row, or None. The statement is not stepped to its end."""
    for row in db.execute(sql, args):
        return row
    return None


def rows(db: apsw.Connection, sql: str, args: Args, type: type[T]) -> list[T]:
    """The rows of a statement that returns a single JSON array."""
    return msgspec.json.decode(one(db, sql, args)[0], type=list[type])  # type: ignore[valid-type]


class SqliteDb:
    """`tables.database.Db` on a connection."""

    __slots__ = ("connection",)
    takes_best = True

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection

    def rows(self, name: str, args: Args, type: type[T]) -> list[T]:
        return rows(self.connection, named(name), args, type)

    def one(self, name: str, args: Args = ()) -> Any:
        return one(self.connection, named(name), args)

    def run(self, name: str, args: Args = ()) -> None:
        self.connection.execute(named(name), args)

    def count(self, name: str, args: Args) -> int:
        before = self.connection.total_changes()
        self.connection.execute(named(name), args)
        return self.connection.total_changes() - before

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        insert(self.connection, _HEADS[table], rows)

    def take_best(self, args: Args) -> list[Job]:
        """Two statements: a step fewer than to read the jobs, to take them and to read their bodies."""
        queue, n, now, owner, until, lease, single = args
        most = min(jobs.BYTES_AT_ONCE // n, jobs.PIECE - 1)
        row = one(self.connection, named("offer_best"), (queue, n, now, owner, until, lease, most))
        found: list[Job] = msgspec.json.decode(row[0], type=list[Job])
        if not found or (not single and [job for job in found if job.max_attempts == 1]):
            return []
        jobs.fill_small(self.connection, found, most, row[1] or b"", row[2])
        self.run("take", (owner, until, lease, now, array([job.seq for job in found])))
        return found

    def add_jobs(self, new: Sequence[Job]) -> None:
        insert(self.connection, jobs.INSERT_JOB, [jobs.columns_of(job) for job in new])
        insert(self.connection, jobs.INSERT_BODY, list(jobs.new_bodies(new)))

    def put_bodies(self, bodies: Iterable[Body]) -> None:
        insert(self.connection, jobs.REPLACE_BODY, [piece for body in bodies for piece in jobs.pieces(*body)])

    def fill(self, found: Sequence[Job]) -> None:
        jobs.fill(self.connection, found)

    def matching(self, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        return matching(self.connection, selector, states, unasked, limit)

    def find(self, query: Query, limit: int) -> list[Job]:
        return find(self.connection, query, limit)

    def save(self) -> None:
        self.connection.execute("SAVEPOINT towpath_save")

    def undo(self) -> None:
        self.connection.execute("ROLLBACK TO towpath_save")

    def keep(self) -> None:
        self.connection.execute("RELEASE towpath_save")

    def call_all(self, functions: Sequence[tuple[str, Callable[[Any], object]]]) -> Mapping[str, Refused]:
        return user_functions.call_all(self.connection, functions)

    def is_command_error(self, error: Exception) -> bool:
        if isinstance(error, FunctionUndone):
            return False
        return isinstance(error, COMMAND_ERRORS) or not isinstance(error, apsw.Error)


def insert(
    db: apsw.Connection,
    head: str,
    tuples: Iterable[Sequence[Any]],
    made: str = "*",
) -> None:
    """Insert the tuples by statements of `ROWS` rows. `head` is `INSERT INTO t (a, b)`. The last statement
    has the next power of two of rows, filled up with NULL, which no first column is: so there are few
    different statements, and they stay in the statement cache. `made` is the SQL for the values of a row,
    from column1, column2, ... of the tuple."""
    rows = tuples if isinstance(tuples, list) else list(tuples)
    if len(rows) == 1:
        db.execute(one_row(head, len(rows[0]), made), rows[0])
        return
    for start in range(0, len(rows), ROWS):
        chunk = rows[start : start + ROWS]
        flat: list[Any] = []
        for each in chunk:
            flat += each
        width, height = len(chunk[0]), 1 << (len(chunk) - 1).bit_length()
        missing = height - len(chunk)
        flat += [None] * (missing * width)
        db.execute(_values(head, width, height, missing > 0, made), flat)


@cache
def one_row(head: str, width: int, made: str = "*") -> str:
    """The statement of `insert` for one row. It has no subquery, because a lone enqueue waits for it."""
    values = ",".join("?" * width) if made == "*" else re.sub(r"column(\d+)", r"?\1", made)
    return f"{head} VALUES ({values})"


@cache
def _values(head: str, width: int, height: int, filled_up: bool, made: str) -> str:
    row = "(" + ",".join("?" * width) + ")"
    values = f"VALUES {','.join([row] * height)}"
    if not filled_up and made == "*":
        return f"{head} {values}"
    return f"{head} SELECT {made} FROM ({values}){' WHERE column1 IS NOT NULL' if filled_up else ''}"


_COUNTERS = {"queue": QueueRow, "part": PartRow, "group": GroupRow}
_HEADS: Mapping[str, str] = {
    table: f"INSERT OR REPLACE INTO towpath_{table} ({', '.join(columns)})"
    for table, columns in {
        **TABLES,
        **{name: row.__struct_fields__ for name, row in _COUNTERS.items()},
    }.items()
}


@cache
def named(name: str) -> str:
    """A statement of queries.sql."""
    return _queries()[name]


@cache
def _queries() -> dict[str, str]:
    text = script("sqlite", "queries.sql")
    found = dict(re.findall(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", text, re.MULTILINE | re.DOTALL))
    plain = {
        name: " ".join(re.sub(r"--[^\n]*", "", body).split()).rstrip("; ") for name, body in found.items()
    }
    return {name: _filled(body) for name, body in plain.items()}


def _filled(body: str) -> str:
    for placeholder, text in _PLACEHOLDERS.items():
        body = body.replace(placeholder, text)
    return body


_OLDEST = """(SELECT min(at) FROM (
    SELECT min(ready_at) AS at FROM towpath_job WHERE queue = q.name AND state = 'ready' AND part IS NULL
        AND losses < 2
    UNION ALL
    SELECT min(ready_at) FROM towpath_job WHERE queue = q.name AND state = 'ready' AND part IS NOT NULL
        AND losses < 2
    UNION ALL
    SELECT min(ready_at) FROM towpath_job WHERE queue = q.name AND state = 'ready' AND losses >= 2))"""
_PLACEHOLDERS: Mapping[str, str] = {
    "{job}": jobs.as_json(),
    "{taken}": jobs.as_json(
        {
            "state": "'running'",
            "reason": "''",
            "attempts": "j.attempts + 1",
            "fence": "j.fence + 1",
            "owner": "?4",
            "lease_until": "?5",
            "lease_len": "?6",
            "started_at": "?3",
        }
    ),
    "{held}": "json_array("
    + ", ".join([f'j."{name}"' for name in HeldRow.__struct_fields__ if name != "edges"])
    + ", EXISTS (SELECT 1 FROM towpath_edge e WHERE e.src = j.seq)"
    " OR (j.key IS NOT NULL AND EXISTS (SELECT 1 FROM towpath_proxy p WHERE p.job = j.seq)))",
    "{queue}": f"json_array({', '.join(QueueRow.__struct_fields__)})",
    "{queue_shown}": f"json_array({', '.join(QueueRow.__struct_fields__)}, iif(ready > 0, {_OLDEST}, NULL))",
    "{unused}": """q.blocked + q.scheduled + q.ready + q.running + q.done + q.failed + q.canceled = 0
        AND q.paused = 0 AND q.why IS NULL AND q.capacity IS NULL AND q.cap IS NULL AND q.rate_count IS NULL
        AND q.retention IS NULL AND q.keep IS NULL
        AND NOT EXISTS (SELECT 1 FROM towpath_part p WHERE p.queue = q.name)""",
    "{part}": f"json_array({', '.join(PartRow.__struct_fields__)})",
    "{group}": f"json_array({', '.join(f'g.{name}' for name in GroupRow.__struct_fields__)})",
    # Edges between jobs and gates of groups, with the columns of `core.edges.EdgePosition`.
    "{edge}": "json_array(dst, of_group, seq, src, id, json(iif(run_anyway, 'true', 'false')))",
    "{edges}": """SELECT e.dst, 0 AS of_group, e.src AS seq, '' AS name, s.id AS src, d.id AS id, e.run_anyway
        FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src JOIN towpath_job d ON d.seq = e.dst WHERE""",
    "{gates}": "UNION ALL {gate_rows}",
    "{gate_rows}": """SELECT g.dst, 1 AS of_group, 0 AS seq, g.src AS name, g.src AS src, d.id AS id,
        g.run_anyway FROM towpath_gate g JOIN towpath_job d ON d.seq = g.dst WHERE""",
    "{behind}": "(dst, of_group, seq, name) > (?2, ?3, ?4, ?5)",
    "{kept}": ", ".join(f"'{reason}'" for reason in sorted(REASONS[State.READY] & REASONS[State.SCHEDULED])),
}


class SqliteConditions(Conditions):
    def ids(self, ids: tuple[str, ...]) -> None:
        self.add("j.id IN (SELECT value FROM json_each(?))", array(ids))

    def like(self, pattern: str) -> None:
        # Queue names have no other wildcards of GLOB.
        self.add("j.queue GLOB ?", pattern)

    def header(self, name: str, value: str) -> None:
        headers = "(SELECT CAST(data AS TEXT) FROM towpath_body WHERE slot = j.seq * ? + ?)"
        # The name is compared as a value: in a JSON path it would have to be quoted.
        term = f"EXISTS (SELECT 1 FROM json_each({headers}) h WHERE h.key = ? AND h.atom = ?)"
        self.add(term, SLOTS, HEADERS * 1024, name, value)


def matching(
    db: apsw.Connection, selector: Selector, states: Iterable[State], unasked: bool, limit: int
) -> list[Job]:
    where = SqliteConditions()
    where.match(selector)
    where.states(tuple(states))
    if unasked:
        where.add("(j.state <> 'running' OR coalesce(j.cancel_requested, 'stopped') = 'stopped')")
    return _jobs(db, "towpath_job j", where, "ASC", limit)


def find(db: apsw.Connection, query: Query, limit: int) -> list[Job]:
    where = SqliteConditions()
    where.ask(query)
    return _jobs(db, "towpath_job j " + _index(query), where, "ASC" if query.oldest_first else "DESC", limit)


def _index(query: Query) -> str:
    """The index for failed or running jobs, which are few among many. Without it SQLite scans the whole table
    in the order of the result. An index on a group, parent, key or correlation id is smaller."""
    if query.group or query.parent or query.key or query.correlation_id:
        return ""
    if query.states == (State.FAILED,):
        return "INDEXED BY towpath_job_failed"
    return "INDEXED BY towpath_job_leased" if query.states == (State.RUNNING,) else ""


def _jobs(db: apsw.Connection, table: str, where: Conditions, order: str, limit: int) -> list[Job]:
    found_rows = f"SELECT * FROM {table} WHERE {where.sql} ORDER BY j.seq {order} LIMIT ?"
    sql = f"SELECT json_group_array({as_json()}) FROM ({found_rows}) j"
    ((found,),) = db.execute(sql, (*where.args, limit))
    return msgspec.json.decode(found, type=list[Job])


_queue_rows = msgspec.json.Decoder(list[QueueRow]).decode
_held_rows = msgspec.json.Decoder(list[HeldRow]).decode


def begin(connection: apsw.Connection, now: int, jumps: Jumps, ahead: ReadAhead) -> Transaction:
    """Read the facts of a new transaction, and those for the parts of its batch in `ahead`, by one
    statement."""
    queues = {spec.queue for spec in ahead.specs}.union(ahead.queues)
    args = (array(queues), array([spec.id for spec in ahead.specs]), array(ahead.settled), now)
    start = one(connection, named("begin_batch"), args)
    schema, least, seq, version, last, found, known, held, expired, suspects = start
    start_facts = StartFacts(
        *(schema, least, seq, version, last, _queue_rows(found) if queues else [], bool(known)),
        expired=bool(expired),
        suspects=bool(suspects),
        settled=ahead.settled,
        held=_held_rows(held) if ahead.settled else [],
    )
    return Transaction(SqliteDb(connection), now, jumps, start_facts, ahead.specs)
