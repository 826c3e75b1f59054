"""Connections, and what the server's errors mean."""

from __future__ import annotations

import os
import socket
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
import psycopg
from psycopg import conninfo, errors

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
from towpath.ledger.postgres.db import Connection, prepare

SCHEMA = "towpath"


class PostgresOptions(msgspec.Struct, frozen=True):
    """`pooled`: there is a transaction pooler such as pgbouncer in between, so that nothing may outlive a transaction: no
    prepared statements, and no LISTEN. `connect_timeout` in seconds."""

    schema: str = SCHEMA
    pooled: bool = False
    connect_timeout: int = 10

    def __post_init__(self) -> None:
        checks.text("schema", self.schema, 63, least=1)
        if self.schema.startswith("pg_"):
            raise InvalidInput(field="schema", value=self.schema, expected="a name that does not start with pg_")
        checks.whole("connect_timeout", self.connect_timeout, 1, 3600)


PLANS = """
SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off;
SET plan_cache_mode = force_generic_plan
"""
"""Every statement is written for its index. What the planner makes of a table that was empty yesterday is no better guess, and
a plan that walks the whole table is a disaster when it has grown."""


def options_of(url: str) -> tuple[str, PostgresOptions]:
    """What of the URL is PostgreSQL's, and what is ours."""
    # By hand: `urlunsplit` makes postgresql:/db of postgresql:///db, and a + is no space for PostgreSQL.
    head, _, query = url.partition("?")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    pooled, schema = asked.pop("pooled", "false"), asked.pop("schema", SCHEMA)
    if pooled not in ("true", "false"):
        raise InvalidInput(field="url pooled", value=pooled, expected="true or false")
    theirs = "postgresql" + head[head.index(":") :] + ("?" if asked else "") + urlencode(asked, quote_via=quote)
    try:
        conninfo.conninfo_to_dict(theirs)
    except psycopg.Error as error:
        said = str(error).strip()
        raise InvalidInput(field="url", value=shown(theirs), expected=f"postgresql://user@host/database ({said})") from None
    return theirs, PostgresOptions(schema=schema, pooled=pooled == "true")


def connect(url: str, options: PostgresOptions) -> Connection:
    """Every transaction is begun by us, so the driver begins none."""
    try:
        found = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=options.connect_timeout,
            application_name=conninfo.conninfo_to_dict(url).get("application_name")
            or f"towpath {socket.gethostname()}:{os.getpid()}",
            prepare_threshold=None if options.pooled else 2,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=30_000,
        )
    except psycopg.Error as error:
        raise translate(error, shown(url)) from error
    prepare(found)
    if not options.pooled:
        found.execute(PLANS)
    return found


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
    """The connection is lost, or the server will not have us now. Whether the transaction was committed is unknown."""
    lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
    away = errors.AdminShutdown | errors.CrashShutdown | errors.CannotConnectNow | errors.IdleInTransactionSessionTimeout
    return lost or isinstance(error, away | errors.TooManyConnections | errors.ConnectionException)


def translate(error: psycopg.Error, place: str) -> LedgerError:
    said = str(error).strip().partition("\n")[0].rpartition("FATAL:  ")[2]
    match error:
        case errors.InvalidPassword() | errors.InvalidAuthorizationSpecification() | errors.InvalidCatalogName():
            return NotALedger(path=place, why=said)
        case errors.DiskFull() | errors.OutOfMemory():
            return DiskFull(path=place)
        case errors.ReadOnlySqlTransaction():
            return ReadOnly(path=place)
        case errors.InsufficientPrivilege():
            return NotALedger(path=place, why=f"{said}; see docs/deploy-postgres.md for the rights it needs")
        case errors.QueryCanceled() | errors.LockNotAvailable() | errors.DeadlockDetected() | errors.SerializationFailure():
            return LedgerAway(path=place, why=said)
        case psycopg.OperationalError() if _never(said):
            return NotALedger(path=place, why=said)
        case _ if is_gone(error):
            return LedgerAway(path=place, why=said)
        case _:
            return StoreFailed(path=place, error=said)


_NEVER = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "could not translate host name",
    "no password supplied",
)


def _never(said: str) -> bool:
    """libpq has no code for what happens before there is a connection."""
    return any(words in said for words in _NEVER)
