"""Connections to the server, the meaning of its errors, and the migration of the schema."""

from __future__ import annotations

import os
import socket
from typing import cast
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
import psycopg
from msgspec.structs import replace
from psycopg import conninfo, errors, sql
from psycopg.abc import Query as PgQuery
from psycopg.pq import ExecStatus

from towpath.core import checks
from towpath.errors import (
    DiskFull,
    InvalidInput,
    LedgerAway,
    LedgerError,
    NotALedger,
    ReadOnly,
    StoreFailed,
)
from towpath.escapes import get_logger
from towpath.ledger.postgres.rows import Connection, prepare
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.tables import database, transfer

log = get_logger("towpath.postgres")

SCHEMA = "towpath"
OLDEST_SERVER = 14
"""The oldest major version of PostgreSQL that has every feature the ledger uses."""
COMPARISONS = 25
"""Comparisons of two sessions that may be shared behind a pooler. With many clients, one comparison in four
does not detect it."""


TIMEOUTS = ("idle_timeout", "commit_timeout", "lock_timeout")
"""Options that the URL may have, in seconds."""


class PostgresOptions(msgspec.Struct, frozen=True):
    """`pooled`: the URL leads to a transaction pooler such as pgbouncer, so session state is not used: no
    prepared statements, and no LISTEN. (`connect_first` detects a pooler if the option is missing.)

    All times are seconds. `idle_timeout`: the server ends a session of this process with a transaction that
    has been idle for this time, because the process is frozen or lost; `commit_timeout`: the same while a
    commit function runs. `lock_timeout`: the time for which a batch waits for the lock on keys, groups,
    dependencies and notes before it fails and is retried."""

    schema: str = SCHEMA
    pooled: bool = False
    connect_timeout: int = 10
    idle_timeout: float = 10.0
    commit_timeout: float = 60.0
    lock_timeout: float = 15.0

    def __post_init__(self) -> None:
        checks.text("schema", self.schema, 63, least=1)
        if self.schema.startswith("pg_"):
            raise InvalidInput(
                field="schema", value=self.schema, expected="a name that does not start with pg_"
            )
        checks.whole("connect_timeout", self.connect_timeout, 1, 3600)
        for name in TIMEOUTS:
            checks.whole(name, checks.micros(getattr(self, name), name), checks.SECOND // 10, checks.DAY)


PLANS = """
SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
SET jit = off; SET plan_cache_mode = force_generic_plan; SET max_parallel_workers_per_gather = 0
"""
"""Every statement is written for its index. The statistics of a table that was empty yesterday mislead the
planner, and a plan with a full scan becomes very slow when the table has grown."""


KEEPALIVES = """
SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 30000
"""
"""The keepalives of the server; `connect` sets the client's keepalives. The server ends the session of a lost
machine and frees its locks."""


def options_of(url: str) -> tuple[str, PostgresOptions]:
    """The URL for libpq, and the options of the ledger that were in it."""
    # Without `urlunsplit`, which turns postgresql:///db into postgresql:/db; and libpq does not read + as a
    # space.
    head, _, query = url.partition("?")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    pooled, schema = asked.pop("pooled", "false"), asked.pop("schema", SCHEMA)
    timeouts = {name: _seconds(name, asked.pop(name)) for name in TIMEOUTS if name in asked}
    if pooled not in ("true", "false"):
        raise InvalidInput(field="pooled in the url", value=pooled, expected="true or false")
    theirs = (
        "postgresql" + head[head.index(":") :] + ("?" if asked else "") + urlencode(asked, quote_via=quote)
    )
    try:
        conninfo.conninfo_to_dict(theirs)
    except psycopg.Error as error:
        text = str(error).strip()
        raise InvalidInput(
            field="url", value=shown(theirs), expected=f"postgresql://user@host/database ({text})"
        ) from None
    return theirs, replace(PostgresOptions(schema=schema, pooled=pooled == "true"), **timeouts)


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(
            field=f"{name} in the url", value=text, expected="seconds, such as 10 or 2.5"
        ) from None


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def connect_first(url: str, options: PostgresOptions) -> tuple[Connection, PostgresOptions]:
    """The first connection, and the options for all others. If it leads to a transaction pooler and the URL
    has no `pooled=true`, the option is set: session state would leak into the sessions of other clients."""
    careful = replace(options, pooled=True)
    found = connect(url, careful)
    try:
        if options.pooled or _shares_sessions(found, url, careful):
            return found, careful
        _set_up_session(found)
    except BaseException as error:
        found.close()
        if isinstance(error, psycopg.Error):
            raise translate(error, shown(url)) from error
        raise
    return found, options


def connect(url: str, options: PostgresOptions) -> Connection:
    """A connection with autocommit: the ledger begins its transactions itself."""
    try:
        found = psycopg.connect(
            url,
            autocommit=True,
            client_encoding="utf8",
            connect_timeout=options.connect_timeout,
            application_name=conninfo.conninfo_to_dict(url).get("application_name")
            or f"towpath {socket.gethostname()}:{os.getpid()}",
            prepare_threshold=None,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=30_000,
        )
        prepare(found)
        if not options.pooled:
            _set_up_session(found)
    except psycopg.Error as error:
        raise translate(error, shown(url)) from error
    return found


def _set_up_session(connection: Connection) -> None:
    """Set the state of a session that belongs to this connection only."""
    connection.prepare_threshold = 2
    connection.execute(PLANS)
    connection.execute(KEEPALIVES)


def _shares_sessions(connection: Connection, url: str, options: PostgresOptions) -> bool:
    """Other clients get the server's session between two transactions of this connection."""
    if _backend(connection) == connection.info.backend_pid:
        return False  # The backend of the handshake replies: there is no pooler.
    with connect(url, options) as other:
        for _ in range(COMPARISONS):
            if _backend(connection) == _backend(other) or _backend(connection) != _backend(connection):
                _warn(shown(url))
                return True
    return False


def _backend(connection: Connection) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])


_warned: set[str] = set()


def _warn(place: str) -> None:
    """Log once per process, which opens many connections."""
    if place not in _warned:
        _warned.add(place)
        log.warning(
            "%s is behind a transaction pooler, so the ledger polls for commits of other processes; "
            "add ?pooled=true to the URL, or connect directly",
            place,
        )


def end(connection: Connection, wrote: bool = False, folded: bool = False) -> None:
    """End a transaction without errors. `folded`: it only folded tallies. A crash may undo that without a
    loss, so the commit does not wait for the disk."""
    if wrote:
        connection.execute("COMMIT")
    elif folded:
        connection.execute("SET LOCAL synchronous_commit = off; COMMIT")
    else:
        # Without the driver, which prepares all statements again after a ROLLBACK, although they are still
        # valid.
        done = connection.pgconn.exec_(b"ROLLBACK")
        if done.status != ExecStatus.COMMAND_OK:
            raise psycopg.OperationalError(done.error_message.decode(errors="replace"))


def shown(url: str) -> str:
    """The URL without its password."""
    try:
        found = conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        return "postgresql://..."
    user = f"{found['user']}@" if found.get("user") else ""
    port = f":{found['port']}" if found.get("port") else ""
    return f"postgresql://{user}{found.get('host') or ''}{port}/{found.get('dbname') or ''}"


def is_replayable(error: BaseException) -> bool:
    """Concurrent transactions caused the error: the same batch may succeed now."""
    return isinstance(error, errors.DeadlockDetected | errors.SerializationFailure | errors.UniqueViolation)


def is_gone(error: BaseException) -> bool:
    """The connection is lost, or the server accepts none now. Whether the transaction was committed is
    unknown."""
    # Class 08 is connection errors; pgbouncer uses it when it has lost the server.
    lost = isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08").startswith("08")
    away = (
        errors.AdminShutdown
        | errors.CrashShutdown
        | errors.CannotConnectNow
        | errors.IdleInTransactionSessionTimeout
    )
    return lost or isinstance(error, away | errors.TooManyConnections)


def translate(error: psycopg.Error, place: str) -> LedgerError:
    text = str(error).strip().partition("\n")[0].rpartition("FATAL:  ")[2]
    match error:
        case (
            errors.InvalidPassword()
            | errors.InvalidAuthorizationSpecification()
            | errors.InvalidCatalogName()
        ):
            return NotALedger(path=place, why=text)
        case errors.DiskFull() | errors.OutOfMemory():
            return DiskFull(path=place)
        case errors.ReadOnlySqlTransaction():
            return ReadOnly(path=place)
        case errors.InsufficientPrivilege():
            return NotALedger(path=place, why=f"{text}; see docs/deploy-postgres.md for the rights it needs")
        case (
            errors.QueryCanceled()
            | errors.LockNotAvailable()
            | errors.DeadlockDetected()
            | errors.SerializationFailure()
        ):
            return LedgerAway(path=place, why=text)
        case psycopg.OperationalError() if _is_permanent(text):
            return NotALedger(path=place, why=text)
        case _ if is_gone(error):
            return LedgerAway(path=place, why=text)
        case _:
            return StoreFailed(path=place, error=text)


_PERMANENT = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "could not translate host name",
    "no password supplied",
)


def _is_permanent(text: str) -> bool:
    """Errors before there is a connection have no SQLSTATE, so the text of libpq is compared."""
    return any(each in text for each in _PERMANENT)


def steps() -> tuple[str, ...]:
    return database.steps("postgres")


def migrate(connection: Connection, statements: Statements, place: str) -> int:
    """Migrate the schema to this version. Returns the version that it had before, 0 for none. Of several
    processes that call this at once, one migrates: the others wait for its lock. It needs the right to create
    the schema, or the tables in a schema that exists."""
    check_server(place, connection.info.server_version)
    done = _stored_version(connection, statements, place)
    if done >= len(steps()):
        return done
    with connection.transaction():
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext(%s))", (f"towpath migration of {statements.schema}",)
        )
        done = _stored_version(connection, statements, place)
        if done == 0 and not _has_schema(connection, statements):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(statements.schema)))
        for number, step in enumerate(steps()[done:], done + 1):
            connection.execute(cast(PgQuery, statements.place(step)))
            connection.execute(cast(PgQuery, statements.place(f"UPDATE towpath.meta SET schema = {number}")))
    return done


def check_server(place: str, version: int) -> None:
    if version < OLDEST_SERVER * 10_000:
        why = f"its server is PostgreSQL {version // 10_000}, and a ledger needs {OLDEST_SERVER} or newer"
        raise NotALedger(path=place, why=why)


def has_ledger(connection: Connection, statements: Statements) -> bool:
    return "meta" in table_names(connection, statements)


def table_names(connection: Connection, statements: Statements) -> set[str]:
    found = connection.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind = 'r'",
        (statements.schema,),
    ).fetchall()
    return {str(name) for (name,) in found}


def _has_schema(connection: Connection, statements: Statements) -> bool:
    return (
        connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (statements.schema,)).fetchone()
        is not None
    )


def _stored_version(connection: Connection, statements: Statements, place: str) -> int:
    names = table_names(connection, statements)
    if "meta" not in names:
        if names:
            raise NotALedger(
                path=place, why=f"its schema {statements.schema} has tables, but no meta among them"
            )
        return 0
    found = connection.execute(
        cast(PgQuery, statements.place("SELECT schema, min_schema FROM towpath.meta"))
    ).fetchone()
    assert found is not None
    schema, least = found
    check_schema(place, schema, least)
    return int(schema)


def check_schema(place: str, schema: int, min_schema: int) -> None:
    transfer.check_schema(place, schema, min_schema, len(steps()))
