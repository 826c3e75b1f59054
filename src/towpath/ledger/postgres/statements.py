"""The texts of the statements: the statements of `queries.sql` with their placeholders filled in, and
statements that are generated for a table."""

from __future__ import annotations

import re
import select
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import psycopg
from psycopg import errors, generators, sql
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from towpath.core.job import COLUMNS, SUSPECT, State
from towpath.core.lifecycle import REASONS
from towpath.ledger.tables.database import TABLES, script, steps
from towpath.ledger.tables.transaction import GroupRow

SMALL = 256
"""Largest payload, in bytes, that is stored in the row of its job."""
WIDTH = len(COLUMNS)
# fmt: off
PLAIN = (
    "seq", "size", "complete", "id", "payload", "queue", "kind", "priority", "state", "reason", "ready_at",
    "max_attempts", "max_losses", "timeout", "retention", "waits", "parent", "generation", "correlation_id",
    "created_at", "content_type",
)
# fmt: on
"""The columns that a plain spec sets: first the columns that differ for each spec, then the columns that a
run of specs shares."""

TYPES: Mapping[str, Sequence[str]] = {
    "attempt": ("bigint", "bigint", "smallint", "bigint", "bigint", "text", "text", "text"),
    "body": ("bigint", "smallint", "bytea"),
    "edge": ("bigint", "bigint", "boolean"),
    "gate": ("text", "bigint", "boolean", "text"),
    "proxy": ("text", "bigint", "text", "bigint", "text"),
    "name": ("bigint", "text", "bigint"),
    "key": ("text", "text", "text", "bigint", "bigint", "bigint"),
    "tombstone": ("text", "bigint", "text", "bigint", "text", "bigint"),
    "note": ("text", "bytea", "bigint", "bigint", "bigint"),
    "then": ("text", "text"),
    "blob": ("text", "bigint", "bigint"),
    "chunk": ("text", "bigint", "bytea"),
    "group": ("text", "text", "text", "text", *("bigint",) * 8, "smallint", "text"),
}
# fmt: off
KEYS: Mapping[str, int] = {
    "body": 2, "edge": 2, "gate": 2, "proxy": 1, "name": 2, "key": 2, "tombstone": 1, "note": 1, "then": 1,
    "group": 1, "blob": 1, "chunk": 2, "attempt": 3,
}
# fmt: on
"""The number of leading columns that are the primary key."""
_COLUMNS = {**TABLES, "body": ("seq", "what", "data"), "group": GroupRow.__struct_fields__}


class Statements:
    """The statements of one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._quoted = sql.Identifier(schema).as_string() + "."
        self.named = {name: (first, self.place(body)) for name, (first, body) in queries().items()}
        self.puts = {table: self.place(_put(table)) for table in TYPES}
        self.copy_plain = self.place(f"COPY towpath.job ({_columns(PLAIN)}) FROM STDIN (FORMAT binary)")
        self.copy_bodies = self.place("COPY towpath.body (seq, what, data) FROM STDIN")
        self.before_functions = self.place("INSERT INTO towpath.guest VALUES (0);" + _settings("DEFAULT"))
        self.after_functions = self.place("DELETE FROM towpath.guest;" + _settings("off"))

    def place(self, text: str) -> bytes:
        """The text with the name of the schema in it."""
        # In one pass: the name itself may contain `towpath.` or a quote.
        inside = "'" + self._quoted.replace("'", "''")
        return re.sub(
            r"'?towpath\.", lambda found: inside if found[0][0] == "'" else self._quoted, text
        ).encode()


_UNKNOWN_STATEMENT, _KNOWN = "26000", "42P05"
"""SQLSTATE of a prepared statement that does not exist (the driver deallocates all statements now and then),
and of one that exists already."""


class RawStatement:
    """A prepared statement that is sent without the driver, which costs as much CPU for a statement as the
    server.

    All arguments are text but the last, which is binary. The rows are integers."""

    def __init__(self, connection: psycopg.Connection[Any], name: str, query: bytes, arguments: int) -> None:
        self._connection = connection
        self._name, self._query = name.encode(), query
        self._formats = [Format.TEXT] * (arguments - 1) + [Format.BINARY]
        self._is_prepared = False
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        self._readable = poll.poll

    def rows(self, args: Sequence[bytes | None]) -> list[tuple[int, ...]]:
        found = self._send(args)
        if found.status != ExecStatus.TUPLES_OK:
            found = self._send_again(found, args)
        return [
            tuple(
                [
                    int.from_bytes(found.get_value(row, column) or b"", "big", signed=True)
                    for column in range(found.nfields)
                ]
            )
            for row in range(found.ntuples)
        ]

    def _send_again(self, found: PGresult, args: Sequence[bytes | None]) -> PGresult:
        if errors.error_from_result(found).sqlstate == _UNKNOWN_STATEMENT:
            self._is_prepared = False
            found = self._send(args)
        if found.status != ExecStatus.TUPLES_OK:
            raise errors.error_from_result(found)
        return found

    def _send(self, args: Sequence[bytes | None]) -> PGresult:
        pgconn = self._connection.pgconn
        if not self._is_prepared:
            pgconn.send_prepare(self._name, self._query)
            prepared = self._receive()
            if (
                prepared.status == ExecStatus.FATAL_ERROR
                and errors.error_from_result(prepared).sqlstate != _KNOWN
            ):
                return prepared
            self._is_prepared = True
        pgconn.send_query_prepared(self._name, args, self._formats, Format.BINARY)
        return self._receive()

    def _receive(self) -> PGresult:
        """The result. The wait can be interrupted; an interrupt leaves the statement open, and `end_open`
        closes the connection."""
        pgconn = self._connection.pgconn
        if pgconn.flush():
            found: list[PGresult] = self._connection.wait(generators.execute(pgconn))
            return found[-1]
        while pgconn.is_busy():
            self._readable()
            pgconn.consume_input()
        last = pgconn.get_result()
        while (more := pgconn.get_result()) is not None:
            last = more
        assert last is not None
        return last


def _settings(value: str) -> str:
    """The planner settings of `begin_batch`, set to `value`. Statements of the user run with the defaults."""
    names = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit")
    ours = value == "off"
    texts = [f"SET LOCAL {name} TO {value}" for name in names]
    texts.append(f"SET LOCAL plan_cache_mode TO {'force_generic_plan' if ours else value}")
    texts.append(f"SET LOCAL max_parallel_workers_per_gather TO {0 if ours else value}")
    return "; ".join(texts)


def _columns(names: Iterable[str] = COLUMNS) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _put(table: str) -> str:
    columns, key = _COLUMNS[table], KEYS[table]
    arrays = ", ".join(_array(n, kind) for n, kind in enumerate(TYPES[table], 1))
    sets = ", ".join(f'"{name}" = excluded."{name}"' for name in columns[key:])
    names = ", ".join(f'"{name}"' for name in columns)
    keys = ", ".join(f'"{name}"' for name in columns[:key])
    insert = f'INSERT INTO towpath."{table}" ({names}) SELECT * FROM unnest({arrays})'
    return f"{insert} ON CONFLICT ({keys}) DO UPDATE SET {sets}"


def _array(n: int, kind: str) -> str:
    # The driver chooses the type of an array by its values, and would prepare a statement for each type.
    return (
        f"${n}::bytea[]" if kind == "bytea" else f"ARRAY(SELECT json_array_elements_text(${n}::json)::{kind})"
    )


@cache
def queries() -> dict[str, tuple[str | None, str]]:
    """By name: the statement to run before it, if any, and its text."""
    found = re.findall(
        r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)",
        script("postgres", "queries.sql"),
        re.MULTILINE | re.DOTALL,
    )
    texts = {name: " ".join(re.sub(r"--[^\n]*", "", body).split()).rstrip("; ") for name, body in found}
    firsts = {name: _first(body) for name, body in found}
    waiting = texts["insert_jobs"]
    for word in _FINISHED_WORDS:
        waiting = waiting.replace(word, "")
    texts["insert_waiting_jobs"] = waiting
    return {name: (firsts.get(name), _filled(text)) for name, text in texts.items()}


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
AGAIN = f"CASE WHEN state <> 'ready' THEN 0 WHEN losses < {SUSPECT} THEN 2 ELSE 3 END"
"""The column `ripe` of a job that was not inserted just now."""
JOB = ", ".join(f'j."{name}"' for name in COLUMNS)
_FINISHED_WORDS: Mapping[str, str] = {
    "{finished_column}": ", purge_at",
    "{finished_rows}": """, dead AS (
        INSERT INTO towpath.dead (queue, seq) SELECT queue, seq FROM new WHERE state = 'failed'
    ), past AS (
        INSERT INTO towpath.past (queue, purge_at, seqs)
        SELECT queue, purge_at, array_agg(seq) FROM {some_of} new WHERE purge_at IS NOT NULL) s
        GROUP BY queue, purge_at, chunk
    )""",
}
"""The placeholders of `insert_jobs` that only finished jobs need. They contain other placeholders, so they
are filled first."""
_WORDS: Mapping[str, str] = {
    **_FINISHED_WORDS,
    "{job}": JOB,
    "{columns}": ", ".join(f'"{name}"' for name in COLUMNS),
    "{taken}": ", ".join(
        f'{_TAKEN.get(name, f"j.{chr(34)}{name}{chr(34)}")} AS "{name}"' for name in COLUMNS
    ),
    "{queue_counts}": """q.name, q.blocked + t.blocked, q.scheduled + t.scheduled, q.ready + t.ready,
        q.running + t.running, q.done + t.done, q.failed + t.failed, q.canceled + t.canceled,
        q.loose + t.loose, q.paused, q.why, q.capacity, q.cap,
        q.rate_count, q.rate_period, q.rate_burst, q.next_at, q.retention, q.keep, q.served, q.clock""",
    "{queue_shown}": """q.name, q.blocked, q.scheduled, q.ready, q.running, q.done, q.failed, q.canceled,
        q.loose, q.paused, q.why, q.capacity, q.cap, q.rate_count, q.rate_period, q.rate_burst, q.next_at,
        q.retention, q.keep, q.served, q.clock, CASE WHEN q.ready > 0 THEN (SELECT min(t.ready_at)
            FROM towpath.turn t WHERE t.queue = q.name AND t.ripe > 0) END""",
    "{unused}": """q.listed
        AND q.blocked + q.scheduled + q.ready + q.running + q.done + q.failed + q.canceled = 0
        AND q.paused = 0 AND q.why IS NULL AND q.capacity IS NULL AND q.cap IS NULL AND q.rate_count IS NULL
        AND q.retention IS NULL AND q.keep IS NULL
        AND NOT EXISTS (SELECT 1 FROM towpath.part p WHERE p.queue = q.name)""",
    "{counted}": """
        CROSS JOIN LATERAL (
            SELECT * FROM towpath.queue WHERE name = v
            UNION ALL
            SELECT v, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, 0, 0,
                false
            WHERE NOT EXISTS (SELECT 1 FROM towpath.queue WHERE name = v)) q
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(a.blocked), 0)::bigint AS blocked,
                coalesce(sum(a.scheduled), 0)::bigint AS scheduled,
                coalesce(sum(a.ready), 0)::bigint AS ready, coalesce(sum(a.running), 0)::bigint AS running,
                coalesce(sum(a.done), 0)::bigint AS done, coalesce(sum(a.failed), 0)::bigint AS failed,
                coalesce(sum(a.canceled), 0)::bigint AS canceled,
                coalesce(sum(a.ready) FILTER (WHERE a.part IS NULL), 0)::bigint AS loose
            FROM towpath.tally a WHERE a.queue = v AND a.xid >= q.folded) t""",
    # The ready jobs of a queue without a part, in order, that no other transaction has locked.
    "{loose}": """towpath.turn t JOIN towpath.job j ON j.seq = t.seq WHERE t.queue = $1::text AND t.part = ''
        AND j.state = 'ready' AND""",
    "{live}": "(t.expires_at IS NULL OR t.expires_at > $3::bigint) AND",
    "{other}": "j.kind <> ALL (ARRAY(SELECT json_array_elements_text($7::json)))",
    "{best}": "ORDER BY t.priority, t.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED",
    "{running}": """(SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease) l JOIN towpath.job j USING (seq)
        WHERE j.state = 'running'""",
    # Further writes: {over} if the jobs of u have ended, {turns} if the jobs of u wait (again),
    # {no_more_over} if the jobs of o are no longer finished.
    "{over}": """
        e AS (DELETE FROM towpath.expiry e USING u
            WHERE u.expires_at IS NOT NULL AND e.at = u.expires_at AND e.seq = u.seq),
        f AS (INSERT INTO towpath.dead (queue, seq) SELECT queue, seq FROM u WHERE state = 'failed'),
        p AS (INSERT INTO towpath.past (queue, purge_at, seqs)
            SELECT queue, purge_at, array_agg(seq) FROM {some_of} u WHERE purge_at IS NOT NULL) s
            GROUP BY queue, purge_at, chunk)""",
    # Few enough per row that it is not compressed and moved to TOAST.
    "{some_of}": "(SELECT *, row_number() OVER () / 200 AS chunk FROM",
    "{turns}": """INSERT INTO towpath.turn (seq, queue, part, priority, ready_at, expires_at, ripe)
        SELECT seq, queue, coalesce(part, ''), priority, ready_at, expires_at, {again} FROM u""",
    "{again}": AGAIN,
    "{no_more_over}": """
        f AS (DELETE FROM towpath.dead d USING o WHERE d.queue = o.queue AND d.seq = o.seq),
        p AS MATERIALIZED (
            SELECT p.queue, p.purge_at, p.n,
                ARRAY(SELECT s FROM unnest(p.seqs) s WHERE s NOT IN (SELECT seq FROM o)) AS seqs
            FROM (SELECT DISTINCT queue, purge_at FROM o) k
            JOIN towpath.past p ON p.queue = k.queue AND p.purge_at = k.purge_at
            ORDER BY p.queue, p.purge_at, p.n FOR UPDATE OF p),
        fewer AS (UPDATE towpath.past d SET seqs = p.seqs FROM p
            WHERE d.queue = p.queue AND d.purge_at = p.purge_at AND d.n = p.n AND p.seqs <> '{}'),
        none AS (DELETE FROM towpath.past d USING p
            WHERE d.queue = p.queue AND d.purge_at = p.purge_at AND d.n = p.n AND p.seqs = '{}')""",
    "{expiring}": """(SELECT e.at FROM towpath.expiry e JOIN towpath.job j ON j.seq = e.seq
        WHERE j.state <> 'running' ORDER BY e.at LIMIT 1)""",
    "{ripe}": "CASE WHEN state <> 'ready' THEN 0 WHEN part IS NULL THEN 1 ELSE 2 END",
    # The transaction gets its id before it numbers a job: see `ready_scan`.
    "{number}": "CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('towpath.job_seq') END",
    # The rows of plain specs: the two statements that append them differ in how they read the specs.
    "{plain_rows}": """j AS (
        INSERT INTO towpath.job (id, seq, queue, kind, priority, state, reason, ready_at, max_attempts,
            max_losses, timeout, retention, waits, parent, generation, correlation_id, created_at, size,
            content_type, complete, payload)
        SELECT id, seq, queue, kind, priority, CASE WHEN due > now THEN 'scheduled' ELSE 'ready' END,
            CASE WHEN due > now THEN 'delay' ELSE '' END, due, max_attempts, max_losses, timeout, retention,
            0, parent, generation, correlation_id, now, length(payload), content_type,
            length(payload) <= {small}, CASE WHEN length(payload) BETWEEN 1 AND {small} THEN payload END
        FROM s
    ), w AS (
        INSERT INTO towpath.turn (seq, queue, part, priority, ready_at, ripe)
            SELECT seq, queue, '', priority, due, (due <= now)::int FROM s
    )""",
    "{known}": str(len(steps("postgres"))),
    "{suspect}": str(SUSPECT),
    "{small}": str(SMALL),
    "{clock}": "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
    # Edges between jobs and gates of groups, with the columns of `core.edges.EdgePosition`.
    "{edges}": """SELECT e.dst, 0 AS of_group, e.src AS seq, '' COLLATE "C" AS name, s.id AS src, d.id AS id,
        e.run_anyway FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src
        JOIN towpath.job d ON d.seq = e.dst WHERE""",
    "{gates}": "UNION ALL {gate_rows}",
    "{gate_rows}": """SELECT g.dst, 1 AS of_group, 0::bigint AS seq, g.src AS name, g.src AS src, d.id AS id,
        g.run_anyway FROM towpath.gate g JOIN towpath.job d ON d.seq = g.dst WHERE""",
    "{behind}": "(dst, of_group, seq, name) > ($2::bigint, $3::int, $4::bigint, $5::text)",
    "{kept}": ", ".join(f"'{reason}'" for reason in sorted(REASONS[State.READY] & REASONS[State.SCHEDULED])),
}
