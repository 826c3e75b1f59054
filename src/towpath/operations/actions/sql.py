"""SQL statements of plans, over psycopg, each in a session of its own.

The session's `application_name` names the step. A statement that outlives its worker is found again by it in
`pg_stat_activity`. `statement_timeout` and `lock_timeout` are set on the server, so that it ends a statement
even if the worker is lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from towpath.errors import ActionFailed, ActionRefused, NodeAway, NodeError, NotInstalled, TimedOut
from towpath.flows.actions import Answer, Sql
from towpath.flows.step import WAIT
from towpath.operations.actions.common import Credentials, Target, time_limit
from towpath.operations.executors import ActionContext
from towpath.tasks.outcomes import Snooze

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.AsyncConnection[tuple[Any, ...]]

T = TypeVar("T")
MAX_ROWS = 20
"""Rows of a result that are stored."""
MAX_CELL = 1000
"""Characters of a value that are stored."""
MAX_LABEL = 63
"""Bytes of an application name; PostgreSQL cuts longer ones."""
SERVER_SHARE = 0.95
"""The part of the timeout after which the server ends the statement, before the worker gives up."""
CANCEL_SECONDS = 5.0
"""Seconds for a statement to end after its cancellation. Then the connection is broken."""
_AGAIN = ("08", "40", "53", "57", "58", "XX")
"""Classes of SQLSTATE that another attempt may pass: connection, rollback, resources, operator, system."""
_AGAIN_CODES = ("55P03", "55006", "25006")
"""lock_not_available, object_in_use, and read_only_sql_transaction of a server that is not promoted yet."""
_KEEPALIVES = (
    "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = 30000; SET idle_in_transaction_session_timeout = 60000"
)
"""With these the server ends the session of a lost machine."""
_ACTIVE = """
SELECT count(*) FROM pg_catalog.pg_stat_activity
WHERE application_name = ANY(%s) AND pid <> pg_catalog.pg_backend_pid()
  AND backend_type = 'client backend' AND state IS DISTINCT FROM 'idle'
"""


class SqlResult(msgspec.Struct, frozen=True):
    """The end of a statement: the number of rows, and the first ones as JSON. `cut`: rows or characters were
    left out."""

    rows: int
    columns: tuple[str, ...] = ()
    first: tuple[tuple[Any, ...], ...] = ()
    cut: bool = False


class SqlExecutor:
    """SQL statements on the PostgreSQL server of the node's address."""

    async def run(self, action: Sql, node: str, context: ActionContext) -> SqlResult:
        """Run the statement in a transaction, or with `autocommit` outside of one. While an earlier attempt
        at the step is active on the server, the step waits."""
        target = Target.of(node, context)
        credentials = Credentials.of(target.node)
        async with _session(target, target.label, credentials) as connection:
            if target.repeated and await _is_active(connection, target):
                raise Snooze(WAIT)
            rows, result = await _executed(connection, action, target, credentials)
        return SqlResult(rows, *result)

    async def answer(self, action: Sql, node: str, context: ActionContext) -> Answer:
        """The first column of the first row: true: applied, false: not applied, null: unknown; without a row:
        not applied. While an attempt at the step is active on the server: running."""
        target = Target.of(node, context)
        credentials = Credentials.of(target.node)
        async with _session(target, f"{target.label}/check", credentials) as connection:
            if await _is_active(connection, target):
                return Answer.RUNNING
            _, (_, first, _) = await _executed(connection, action, target, credentials)
        return _answer_of(first)


_Rows = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...], bool]


def session_name(label: str) -> str:
    """The application name of a label: printable ASCII, and with a digest if the label is too long."""
    name = f"towpath {label}"
    if name.isascii() and name.isprintable() and len(name) <= MAX_LABEL:
        return name
    digest = hashlib.sha256(label.encode()).hexdigest()[:16]
    plain = "".join(each if each.isascii() and each.isprintable() else "?" for each in name)
    return f"{plain[: MAX_LABEL - 17]} {digest}"


def _answer_of(first: Sequence[tuple[Any, ...]]) -> Answer:
    if not first or not first[0]:
        return Answer.NOT_APPLIED
    value = first[0][0]
    if not isinstance(value, bool | int):  # null, or a value that is no answer
        return Answer.UNKNOWN
    return Answer.APPLIED if value else Answer.NOT_APPLIED


@contextlib.asynccontextmanager
async def _session(target: Target, label: str, credentials: Credentials) -> AsyncIterator[Connection]:
    """A session for the block. The connection is closed at the end, even if the server does not respond."""
    psycopg = _psycopg()
    try:
        async with time_limit(target.node.connect_timeout):
            connection = await _connected(target, label, credentials)
    except TimedOut as error:
        raise NodeAway(node=target.node.name, why=f"no connection: {error}", sent=False) from None
    except psycopg.Error as error:
        raise _translated(error, target, credentials, sent=False) from None
    try:
        yield connection
    except psycopg.Error as error:
        raise _translated(error, target, credentials) from None
    finally:
        connection.pgconn.finish()


async def _connected(target: Target, label: str, credentials: Credentials) -> Connection:
    psycopg = _psycopg()
    seconds = max(2, round(target.node.connect_timeout))
    more = {} if credentials.password is None else {"password": credentials.password}
    connection: Connection = await psycopg.AsyncConnection.connect(
        target.address(),
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=seconds,
        application_name=session_name(label),
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        **more,
    )
    return connection


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise NotInstalled(package="psycopg", why=str(error), extra="postgres") from None
    return psycopg


async def _is_active(connection: Connection, target: Target) -> bool:
    names = [session_name(label) for label in target.labels]
    cursor = await _bounded(connection, connection.execute(_ACTIVE, (names,)), target.node.connect_timeout)
    row = await cursor.fetchone()
    return row is not None and row[0] > 0


def _session_settings(seconds: float | None) -> str:
    limit = 0 if seconds is None else max(1, round(seconds * SERVER_SHARE * 1000))
    return f"{_KEEPALIVES}; SET statement_timeout = {limit}; SET lock_timeout = {limit}"


async def _executed(
    connection: Connection, action: Sql, target: Target, credentials: Credentials
) -> tuple[int, _Rows]:
    async def work() -> tuple[int, _Rows]:
        await connection.execute(_session_settings(target.seconds))
        # Without parameters a % has no meaning, and several statements are allowed.
        params = tuple(action.params) or None
        async with contextlib.AsyncExitStack() as stack:
            if not action.autocommit:
                await stack.enter_async_context(connection.transaction())
            cursor = await connection.execute(action.statement, params)
            while cursor.nextset():
                pass
            rows = max(0, cursor.rowcount)
            found = await cursor.fetchmany(MAX_ROWS) if cursor.description else []
            columns = tuple(each.name for each in cursor.description or ())
        first, cut = _bounded_rows(found, target.node.max_output, credentials)
        return rows, (columns, first, cut or rows > len(first) > 0)

    # The server ends the statement, and the worker the step; this is the net.
    limit = None if target.seconds is None else target.seconds + CANCEL_SECONDS
    return await _bounded(connection, work(), limit)


def _bounded_rows(
    rows: Sequence[tuple[Any, ...]], limit: int, credentials: Credentials
) -> tuple[tuple[tuple[Any, ...], ...], bool]:
    """The first rows as values of JSON, together at most `limit` bytes."""
    kept: list[tuple[Any, ...]] = []
    cut = False
    for row in rows:
        values = tuple(_plain(value, credentials) for value in row)
        limit -= len(msgspec.json.encode(values))
        if limit < 0:
            return tuple(kept), True
        cut = cut or any(isinstance(value, str) and len(value) > MAX_CELL for value in values)
        kept.append(values)
    return tuple(kept), cut


def _plain(value: Any, credentials: Credentials) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**53) <= value <= 2**53:
        return value
    if isinstance(value, float) and value - value == 0:  # finite
        return value
    text = value.hex() if isinstance(value, bytes) else str(value)
    text = credentials.hide(text)
    return text if len(text) <= MAX_CELL else text[:MAX_CELL] + "..."


async def _bounded(connection: Connection, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Await the work. At the timeout and after a cancellation the statement is canceled on the server. If
    the server does not respond to that, the connection is broken, so that no wait is endless."""
    task = asyncio.ensure_future(work)
    try:
        async with time_limit(seconds):
            return await asyncio.shield(task)
    except BaseException:
        if not task.done():
            # psycopg sends a cancellation to the server, and waits for the end of the statement.
            task.cancel()
            try:
                await asyncio.wait([task], timeout=CANCEL_SECONDS)
            finally:
                if not task.done():
                    _break(connection)
                    await asyncio.wait([task], timeout=CANCEL_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


def _break(connection: Connection) -> None:
    """Shut the socket down: what waits for it sees its end."""
    with contextlib.suppress(OSError, ValueError):
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def _translated(
    error: psycopg.Error, target: Target, credentials: Credentials, sent: bool = True
) -> NodeError:
    name, why, state = target.node.name, credentials.why(error), error.sqlstate
    psycopg = _psycopg()
    if state is None:
        # psycopg itself: the connection, or a wrong connection string or parameter.
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            denied = not sent and ("authentication failed" in why or "no password supplied" in why)
            return ActionRefused(node=name, why=why) if denied else NodeAway(node=name, why=why, sent=sent)
        return ActionRefused(node=name, why=why)
    again = state.startswith(_AGAIN) or state in _AGAIN_CODES
    if state.startswith("08") or state in ("57P01", "57P02", "57P03"):
        return NodeAway(node=name, why=why, sent=sent)
    return (ActionFailed if again else ActionRefused)(node=name, why=why, sqlstate=state)
