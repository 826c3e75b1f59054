"""What can be said about the server and our place in it."""

from __future__ import annotations

import secrets
from typing import Any

import psycopg
from psycopg import sql

from towpath.clock import SystemClock
from towpath.errors import LedgerError
from towpath.ledger.postgres.connect import PostgresOptions, connect
from towpath.ledger.postgres.db import Connection
from towpath.ledger.postgres.statements import Statements

LONG = 300
"""Seconds after which a transaction counts as long: what died since it began cannot be swept."""
PATIENCE = 2.0
"""Seconds that a ring may take."""
_SETTINGS = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum", "track_counts")


def facts(connection: Connection, statements: Statements) -> dict[str, Any]:
    """Settings as the server words them; times in microseconds, spans in seconds. `ahead`: the server's clock before ours."""
    found: dict[str, Any] = {"server": connection.info.parameter_status("server_version")}
    found |= {name: _one(connection, b"SELECT current_setting(%s)", (name,)) for name in _SETTINGS}
    before = SystemClock().now()
    found["time"] = _one(connection, b"SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    found["ahead"] = (found["time"] - (before + SystemClock().now()) // 2) / 1_000_000
    found["schema"] = _one(connection, statements.place("SELECT schema FROM towpath.meta"))
    found["user"] = _one(connection, b"SELECT current_user::text")
    found["bytes"] = _one(connection, _SIZE.encode(), (statements.schema,))
    found["missing_rights"] = [str(row[0]) for row in connection.execute(_RIGHTS, {"schema": statements.schema})]
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
        for pid, user, application, host, state, seconds, waiting in connection.execute(statements.place(_HOLDERS))
    ]
    return found


_SIZE = """SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'"""
_RIGHTS = """SELECT 'USAGE on schema ' || quote_ident(%(schema)s) WHERE NOT has_schema_privilege(%(schema)s, 'USAGE')
    UNION ALL
    SELECT privilege || ' on ' || c.oid::regclass FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL unnest(CASE c.relkind WHEN 'r' THEN ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] ELSE ARRAY['SELECT'] END)
        AS privilege
    WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'v') AND NOT has_table_privilege(c.oid, privilege)
    UNION ALL
    SELECT 'UPDATE on ' || c.oid::regclass FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND CASE c.relkind WHEN 'S' THEN NOT has_sequence_privilege(c.oid, 'UPDATE') ELSE false END
    ORDER BY 1"""
_LONG = """SELECT pid, usename::text, application_name, state, extract(epoch FROM now() - xact_start)::bigint
    FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND xact_start < now() - make_interval(secs => %s) ORDER BY xact_start"""


_HOLDERS = """WITH locks AS MATERIALIZED (
    SELECT pid, granted FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND classid = 0 AND objid = 'towpath.meta'::regclass::oid
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT a.pid, a.usename::text, a.application_name, coalesce(host(a.client_addr), 'this machine'), coalesce(a.state, 'unknown'),
    coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8, (SELECT count(*) FROM locks WHERE NOT granted)
FROM locks JOIN pg_stat_activity a USING (pid) WHERE granted"""


def _one(connection: Connection, query: bytes, args: tuple[Any, ...] | None = None) -> Any:
    row = connection.execute(query, args).fetchone()
    assert row is not None
    return row[0]


def wakes(url: str, told: PostgresOptions, options: PostgresOptions) -> str:
    """Do wake-ups arrive? Empty if so, else why not. Tried out: there are things in between that accept LISTEN, and nothing comes.
    `told` is what the URL says, `options` what was found."""
    if told.pooled:
        return "the URL says pooled=true"
    if options.pooled:
        return "a transaction pooler is in between, and the URL does not say so"
    channel = sql.Identifier(f"towpath_doctor_{secrets.token_hex(8)}")
    try:
        with connect(url, options) as listener, connect(url, options) as ringer:
            listener.execute(sql.SQL("LISTEN {}").format(channel))
            ringer.execute(sql.SQL("NOTIFY {}").format(channel))
            heard = any(True for _ in listener.notifies(timeout=PATIENCE, stop_after=1))
    except (psycopg.Error, LedgerError) as error:
        return str(error).partition("\n")[0]
    return "" if heard else "a NOTIFY did not arrive"
