"""Connections, and what the server's errors mean."""

from __future__ import annotations

import os
import socket
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
import psycopg
from msgspec.structs import replace
from psycopg import conninfo, errors
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

log = get_logger("towpath.postgres")

SCHEMA = "towpath"
COMPARISONS = 25
"""How often two sessions are compared that may be one. Of two that many clients share, a look misses one time
in four."""


TIMEOUTS = ("idle_timeout", "commit_timeout", "lock_timeout")
"""Options that the URL may have, in seconds."""


class PostgresOptions(msgspec.Struct, frozen=True):
    """`pooled`: there is a transaction pooler such as pgbouncer in between, so that nothing may outlive a
    transaction: no prepared statements, and no LISTEN. (`connect_first` notices one that was not told.)

    All times are seconds. `idle_timeout`: the server ends a session of ours whose transaction has been idle
    for so long, because the process is frozen or lost; `commit_timeout`: the same while a commit function
    runs. `lock_timeout`: how long a batch waits for the lock on keys, groups, dependencies and notes, before
    it fails and is tried again."""

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
SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off;
SET plan_cache_mode = force_generic_plan; SET max_parallel_workers_per_gather = 0
"""
"""Every statement is written for its index. What the planner makes of a table that was empty yesterday is no
better guess, and a plan that walks the whole table is a disaster when it has grown."""


KEEPALIVES = """
SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = 30000
"""
"""The server's side of what `connect` asks of ours: the session of a machine that is lost ends, and with it
what the session holds."""


def options_of(url: str) -> tuple[str, PostgresOptions]:
    """What of the URL is PostgreSQL's, and what is ours."""
    # By hand: `urlunsplit` makes postgresql:/db of postgresql:///db, and a + is no space for PostgreSQL.
    head, _, query = url.partition("?")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    pooled, schema = asked.pop("pooled", "false"), asked.pop("schema", SCHEMA)
    timeouts = {name: _seconds(name, asked.pop(name)) for name in TIMEOUTS if name in asked}
    if pooled not in ("true", "false"):
        raise InvalidInput(field="url pooled", value=pooled, expected="true or false")
    theirs = (
        "postgresql" + head[head.index(":") :] + ("?" if asked else "") + urlencode(asked, quote_via=quote)
    )
    try:
        conninfo.conninfo_to_dict(theirs)
    except psycopg.Error as error:
        said = str(error).strip()
        raise InvalidInput(
            field="url", value=shown(theirs), expected=f"postgresql://user@host/database ({said})"
        ) from None
    return theirs, replace(PostgresOptions(schema=schema, pooled=pooled == "true"), **timeouts)


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(field=f"url {name}", value=text, expected="seconds, such as 10 or 2.5") from None


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def connect_first(url: str, options: PostgresOptions) -> tuple[Connection, PostgresOptions]:
    """A connection that looks where it leads, and the options for all others. If it is a transaction pooler
    and nobody said so, what is kept in a session would be found in those of others: so we go on as if the URL
    had said `pooled=true`."""
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
    """Every transaction is begun by us, so the driver begins none."""
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
    """The session is ours alone until we close it."""
    connection.prepare_threshold = 2
    connection.execute(PLANS)
    connection.execute(KEEPALIVES)


def _shares_sessions(connection: Connection, url: str, options: PostgresOptions) -> bool:
    """Is the server's session another's as soon as our transaction is over?"""
    if _backend(connection) == connection.info.backend_pid:
        return False  # whom we greeted is who answers: nobody is in between
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
    """Once in a process: it opens many connections."""
    if place not in _warned:
        _warned.add(place)
        log.warning(
            "%s is behind a transaction pooler: wake-ups are by polling; say so with ?pooled=true, or connect directly",
            place,
        )


def end(connection: Connection, wrote: bool = False, folded: bool = False) -> None:
    """End a transaction in which nothing went wrong. `folded`: what it changed, if anything, says the same in
    fewer rows; to lose that in a crash is no loss, so it need not wait for the disk."""
    if wrote:
        connection.execute("COMMIT")
    elif folded:
        connection.execute("SET LOCAL synchronous_commit = off; COMMIT")
    else:
        # Past the driver, which after a ROLLBACK has all statements prepared anew, though none of them is any
        # worse for it.
        done = connection.pgconn.exec_(b"ROLLBACK")
        if done.status != ExecStatus.COMMAND_OK:
            raise psycopg.OperationalError(done.error_message.decode(errors="replace"))


def shown(url: str) -> str:
    """The address without its password."""
    try:
        found = conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        return "postgresql://..."
    user = f"{found['user']}@" if found.get("user") else ""
    port = f":{found['port']}" if found.get("port") else ""
    return f"postgresql://{user}{found.get('host') or ''}{port}/{found.get('dbname') or ''}"


def is_replayable(error: BaseException) -> bool:
    """It came of others at the same time: the same batch may well pass now."""
    return isinstance(error, errors.DeadlockDetected | errors.SerializationFailure | errors.UniqueViolation)


def is_gone(error: BaseException) -> bool:
    """The connection is lost, or the server will not have us now. Whether the transaction was committed is
    unknown."""
    # 08 is all about connections, and what pgbouncer says when it has lost the server.
    lost = isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08").startswith("08")
    away = (
        errors.AdminShutdown
        | errors.CrashShutdown
        | errors.CannotConnectNow
        | errors.IdleInTransactionSessionTimeout
    )
    return lost or isinstance(error, away | errors.TooManyConnections)


def translate(error: psycopg.Error, place: str) -> LedgerError:
    said = str(error).strip().partition("\n")[0].rpartition("FATAL:  ")[2]
    match error:
        case (
            errors.InvalidPassword()
            | errors.InvalidAuthorizationSpecification()
            | errors.InvalidCatalogName()
        ):
            return NotALedger(path=place, why=said)
        case errors.DiskFull() | errors.OutOfMemory():
            return DiskFull(path=place)
        case errors.ReadOnlySqlTransaction():
            return ReadOnly(path=place)
        case errors.InsufficientPrivilege():
            return NotALedger(path=place, why=f"{said}; see docs/deploy-postgres.md for the rights it needs")
        case (
            errors.QueryCanceled()
            | errors.LockNotAvailable()
            | errors.DeadlockDetected()
            | errors.SerializationFailure()
        ):
            return LedgerAway(path=place, why=said)
        case psycopg.OperationalError() if _is_permanent(said):
            return NotALedger(path=place, why=said)
        case _ if is_gone(error):
            return LedgerAway(path=place, why=said)
        case _:
            return StoreFailed(path=place, error=said)


_PERMANENT = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "could not translate host name",
    "no password supplied",
)


def _is_permanent(said: str) -> bool:
    """libpq has no code for what happens before there is a connection."""
    return any(words in said for words in _PERMANENT)
