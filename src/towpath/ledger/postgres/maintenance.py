"""The tables of the schema as `tables.transfer.Store` for copying, checks and VACUUM; the health of the
server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import psycopg
from psycopg import sql
from psycopg.abc import Query as PgQuery

from towpath.clock import SystemClock
from towpath.core.commands import Upkeep
from towpath.errors import InvalidInput, LedgerError
from towpath.ledger.postgres import audit
from towpath.ledger.postgres.connection import (
    PostgresOptions,
    connect,
    connect_first,
    has_ledger,
    migrate,
    shown,
    steps,
    table_names,
    translate,
)
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.rows import Connection, PostgresDb
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transfer import (
    TABLES,
    UNFINISHED,
    MetaRow,
    Row,
    Table,
    check_schema,
    occupied,
    refuse_content,
)

_VIEWS: Mapping[str, str] = {"queue": "queue_now", "part": "part_now", "body": "body_now"}
"""Views to read from: counts that include tallies, bodies that are stored in two tables."""
_READ: Mapping[str, str] = {"run_anyway": "run_anyway::int"}


class PostgresStore:
    def __init__(self, url: str, options: PostgresOptions) -> None:
        self.place = f"{shown(url)} (schema {options.schema})"
        self.known = len(steps())
        self._url, self._given = url, options
        self._statements = Statements(options.schema)
        self._connection, self._options = connect_first(url, options)
        self._db = PostgresDb(self._connection, self._statements)

    def read_meta(self) -> MetaRow | None:
        with self._translated():
            if not has_ledger(self._connection, self._statements):
                return None
            text = """SELECT m.schema, m.min_schema, s.last_value + s.is_called::int,
                    v.last_value + v.is_called::int, t.last_value
                FROM towpath.meta m, towpath.job_seq s, towpath.version_seq v, towpath.last_time t"""
            return MetaRow(*self._ask(text)[0])

    def migrate(self) -> int:
        with self._translated():
            return migrate(self._connection, self._statements, self.place)

    def count(self, table: Table) -> int:
        with self._translated():
            return int(self._ask(f"SELECT count(*) FROM {_source(table)}")[0][0])

    def stream(self, table: Table, after: Row | None = None) -> Iterator[Row]:
        columns = ", ".join(_READ.get(name, f'"{name}"') for name in table.columns)
        keys = _names(table.key)
        text = f"SELECT {columns} FROM {_source(table)}"
        with self._translated():
            types = self._types(text)
            query = self._statements.place(f"COPY ({text}")
            if after is not None:
                query += f" WHERE ({keys}) > ({', '.join(map(self._literal, after))})".encode()
            query += f" ORDER BY {keys}) TO STDOUT (FORMAT BINARY)".encode()
            with self._connection.cursor().copy(cast(PgQuery, query)) as rows:
                rows.set_types(types)
                yield from rows.rows()

    def last_key(self, table: Table) -> Row | None:
        order = ", ".join(f'"{name}" DESC' for name in table.key)
        with self._translated():
            found = self._ask(f"SELECT {_names(table.key)} FROM {_source(table)} ORDER BY {order} LIMIT 1")
            return found[0] if found else None

    def add(self, table: Table, rows: Sequence[Row]) -> None:
        with self._translated(), self._connection.transaction():
            place = f"towpath.{_quoted(table.name)}"
            types = self._types(f"SELECT {_names(table.columns)} FROM {place}")
            query = self._statements.place(
                f"COPY {place} ({_names(table.columns)}) FROM STDIN (FORMAT BINARY)"
            )
            with self._connection.cursor().copy(cast(PgQuery, query)) as copy:
                copy.set_types(types)
                for row in rows:
                    copy.write_row(row)
            if table.name == "queue":
                self._run("UPDATE towpath.queue SET listed = true WHERE NOT listed")
            elif table.name == "part":
                # A batch locks the row of the queue while it counts a part. Such a row is not `listed`.
                self._run(
                    """INSERT INTO towpath.queue (name) SELECT DISTINCT queue FROM towpath.part
                       ON CONFLICT DO NOTHING"""
                )

    def apply_user_appends(self) -> int:
        with self._translated():
            if waiting := self._in_inbox():
                with closing(PostgresLedger(self._url, self._options)) as ledger:
                    while self._in_inbox():
                        ledger.apply([Upkeep()])
            spoiled = self._ask(
                "SELECT seq, failure FROM towpath.inbox WHERE failure IS NOT NULL ORDER BY seq LIMIT 1"
            )
        for seq, failure in spoiled:
            expected = (
                f"no append that cannot be applied; number {seq} in the table inbox is one ({failure}): "
                "delete its row, or correct its specs and set its failure to NULL"
            )
            raise InvalidInput(field="source", value=self.place, expected=expected)
        return waiting

    def _in_inbox(self) -> int:
        return int(self._ask("SELECT count(*) FROM towpath.inbox WHERE failure IS NULL")[0][0])

    @contextmanager
    def reserved(self) -> Iterator[None]:
        # The lock belongs to a transaction that stays open: behind a pooler the session may be shared.
        with self._translated(), connect(self._url, self._options) as lock, lock.transaction():
            lock.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            asked = lock.execute(
                "SELECT pg_try_advisory_xact_lock(hashtext(%s))",
                (f"towpath copy into {self._statements.schema}",),
            )
            if asked.fetchone() != (True,):
                raise occupied(self)
            yield

    def begin(self, meta: MetaRow) -> None:
        with self._translated(), self._connection.transaction():
            # Every batch reads this row first: running batches are waited for, and later ones are refused.
            self._run("LOCK TABLE towpath.meta IN ACCESS EXCLUSIVE MODE")
            found = self.read_meta()
            assert found is not None, "migrate it first"
            if found.is_unfinished:
                names = [*(table.name for table in TABLES), "tally", *audit.SIDE]
                self._run(f"TRUNCATE {', '.join(f'towpath.{_quoted(name)}' for name in names)}")
            else:
                check_schema(self.place, found.schema, found.min_schema, self.known)
                refuse_content(self)
                if self._ask("SELECT 1 FROM towpath.inbox LIMIT 1"):
                    expected = "an empty ledger to copy into; this one has appends in its inbox"
                    raise InvalidInput(field="target", value=self.place, expected=expected)
                self._run("TRUNCATE towpath.queue")
            least = found.min_schema if found.is_unfinished else UNFINISHED + found.min_schema
            self._run(f"UPDATE towpath.meta SET min_schema = {least}")
            for name, value in (("job_seq", meta.next_seq), ("version_seq", meta.next_version)):
                self._run(f"SELECT setval('towpath.{name}', {value}, false)")
            self._run(f"SELECT setval('towpath.last_time', {meta.last})")

    def finish(self, min_schema: int) -> None:
        with self._translated():
            with self._connection.transaction():
                audit.derive(self._connection, self._statements)
                self._run(f"UPDATE towpath.meta SET min_schema = {min_schema}")
            for name in self._tables():
                self._run(f"ANALYZE towpath.{_quoted(name)}")

    def vacuum(self) -> dict[str, int]:
        """Fold the tallies of finished transactions, then VACUUM each table."""
        with self._translated():
            found = self._ask("SELECT DISTINCT queue FROM towpath.tally")
            before = self._tallies()
            with self._connection.transaction():
                queues = array([queue for (queue,) in found])
                self._db.run("make_queues", (queues,))
                self._db.run("lock_queues", (queues,))
                self._db.run("fold", (queues, self._db.one("horizon")[0]))
            names = self._tables()
            for name in names:
                self._run(f"VACUUM (ANALYZE) towpath.{_quoted(name)}")
            return {"tallies_folded": before - self._tallies(), "tables": len(names)}

    def health(self) -> dict[str, Any]:
        with self._translated():
            found = facts(self._connection, self._statements)
            return {**found, "wakes": wakes(self._url, self._given, self._options)}

    def close(self) -> None:
        self._connection.close()

    def _types(self, select: str) -> list[int]:
        return [column.type_code for column in self._run(f"{select} LIMIT 0").description or ()]

    def _literal(self, value: object) -> str:
        return sql.Literal(value).as_string(self._connection)

    def _tallies(self) -> int:
        return int(self._ask("SELECT count(*) FROM towpath.tally")[0][0])

    def _tables(self) -> list[str]:
        return sorted(table_names(self._connection, self._statements))

    def _ask(self, text: str) -> list[Row]:
        return self._run(text).fetchall()

    def _run(self, text: str) -> psycopg.Cursor[Row]:
        return self._connection.execute(cast(PgQuery, self._statements.place(text)))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self.place) from error


def _source(table: Table) -> str:
    return f"towpath.{_quoted(_VIEWS.get(table.name, table.name))}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _names(columns: Sequence[str]) -> str:
    return ", ".join(map(_quoted, columns))


LONG = 300
"""Seconds after which a transaction counts as long: rows that were deleted since it began cannot be
vacuumed."""
NOTIFY_TIMEOUT = 2.0
"""Seconds that a notification may take."""
_SETTINGS = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum", "track_counts")


def facts(connection: Connection, statements: Statements) -> dict[str, Any]:
    """Settings as texts of the server; times in microseconds, spans in seconds. `ahead`: the advance of the
    server's clock over the local one."""
    found: dict[str, Any] = {"server": connection.info.parameter_status("server_version")}
    found |= {name: _one(connection, b"SELECT current_setting(%s)", (name,)) for name in _SETTINGS}
    before = SystemClock().now()
    found["time"] = _one(connection, b"SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    found["ahead"] = (found["time"] - (before + SystemClock().now()) // 2) / 1_000_000
    found["schema"] = _one(connection, statements.place("SELECT schema FROM towpath.meta"))
    found["user"] = _one(connection, b"SELECT current_user::text")
    found["bytes"] = _one(connection, _SIZE.encode(), (statements.schema,))
    found["missing_rights"] = [
        str(row[0]) for row in connection.execute(_RIGHTS, {"schema": statements.schema})
    ]
    tallies = statements.place("SELECT count(*) FROM towpath.tally")
    found["tallies"] = 0 if found["missing_rights"] else _one(connection, tallies)
    found["long_transactions"] = [
        {"pid": pid, "user": user, "application": application, "state": state, "seconds": seconds}
        for pid, user, application, state, seconds in connection.execute(_LONG, (LONG,))
    ]
    found["lock_holders"] = [
        {
            "pid": pid,
            "user": user,
            "application": application,
            "host": host,
            "state": state,
            "seconds": seconds,
            "waiting": waiting,
        }
        for pid, user, application, host, state, seconds, waiting in connection.execute(
            statements.place(_HOLDERS)
        )
    ]
    return found


_SIZE = """SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'"""
_RIGHTS = """SELECT 'USAGE on schema ' || quote_ident(%(schema)s)
    WHERE NOT has_schema_privilege(%(schema)s, 'USAGE')
    UNION ALL
    SELECT privilege || ' on ' || c.oid::regclass FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL unnest(CASE c.relkind
        WHEN 'r' THEN ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] ELSE ARRAY['SELECT'] END) AS privilege
    WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'v') AND NOT has_table_privilege(c.oid, privilege)
    UNION ALL
    SELECT 'UPDATE on ' || c.oid::regclass FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND CASE c.relkind
        WHEN 'S' THEN NOT has_sequence_privilege(c.oid, 'UPDATE') ELSE false END
    ORDER BY 1"""
_LONG = """SELECT pid, usename::text, application_name, state, extract(epoch FROM now() - xact_start)::bigint
    FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND xact_start < now() - make_interval(secs => %s)
    ORDER BY xact_start"""


_HOLDERS = """WITH locks AS MATERIALIZED (
    SELECT pid, granted FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND classid = 0 AND objid = 'towpath.meta'::regclass::oid
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT a.pid, a.usename::text, a.application_name, coalesce(host(a.client_addr), 'this machine'),
    coalesce(a.state, 'unknown'), coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8,
    (SELECT count(*) FROM locks WHERE NOT granted)
FROM locks JOIN pg_stat_activity a USING (pid) WHERE granted"""


def _one(connection: Connection, query: bytes, args: tuple[Any, ...] | None = None) -> Any:
    row = connection.execute(query, args).fetchone()
    assert row is not None
    return row[0]


def wakes(url: str, given: PostgresOptions, options: PostgresOptions) -> str:
    """An empty text if notifications arrive, else the reason why not. It sends one, because some proxies
    accept LISTEN and deliver nothing. `given` are the options of the URL, `options` the options in use."""
    if given.pooled:
        return "the URL has pooled=true"
    if options.pooled:
        return "the URL leads to a transaction pooler and has no pooled=true"
    channel = sql.Identifier(f"towpath_doctor_{secrets.token_hex(8)}")
    try:
        with connect(url, options) as listener, connect(url, options) as sender:
            listener.execute(sql.SQL("LISTEN {}").format(channel))
            sender.execute(sql.SQL("NOTIFY {}").format(channel))
            arrived = any(True for _ in listener.notifies(timeout=NOTIFY_TIMEOUT, stop_after=1))
    except (psycopg.Error, LedgerError) as error:
        return str(error).partition("\n")[0]
    return "" if arrived else "a NOTIFY did not arrive"
