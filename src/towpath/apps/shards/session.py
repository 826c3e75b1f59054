"""A session of a step on a node: every statement has a limit on the server and on this side, so that neither
a lock, a long statement nor a dead connection holds a step for ever.

A step that is delivered again may have a predecessor with statements that still run on the server. `session`
ends the sessions of the predecessor first: sessions of the same table, shard and step node have the same
application name."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from towpath.apps.shards.nodes import NodeAway
from towpath.apps.shards.routines import Cluster, Work

if TYPE_CHECKING:
    from psycopg import Connection

MARGIN = 3.0
"""Seconds that this side waits longer than the server: the server ends a statement first, so that no
statement takes effect after this side has given up."""
_END_PREDECESSORS = """
SELECT set_config('application_name', %s, false),
       (SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
        WHERE application_name = %s AND pid <> pg_backend_pid())
"""
_IS_ACTIVE = "SELECT 1 FROM pg_catalog.pg_stat_activity WHERE pid = %s AND state = 'active'"
_COMPARABLE = {
    "datestyle": "ISO",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
}
"""Settings that the text of a row depends on."""


class NodeSession:
    """An open connection in autocommit mode. A statement is text with parameters, or composed by
    `psycopg.sql`. `limit`: seconds of an ordinary statement. `is_active` asks the server, by another
    connection, whether the backend with this number runs a statement."""

    def __init__(
        self, node: str, connection: Connection[Any], limit: float, is_active: Callable[[int], bool]
    ) -> None:
        self.node, self.limit = node, limit
        self._connection = connection
        self._is_active = is_active
        self._timeout: float | None = limit
        """The limit that the server has now; None if it is not certain."""

    @property
    def connection(self) -> Connection[Any]:
        """For functions that run statements of their own; to be used in a block of `bounded`."""
        return self._connection

    @property
    def version(self) -> int:
        return self._connection.info.server_version

    def run(
        self,
        statement: str | sql.Composable,
        params: Sequence[object] = (),
        *,
        times: float = 1.0,
        endless: bool = False,
    ) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. After the limit, multiplied by `times`, the server cancels it.
        An `endless` statement runs as long as the server is at work on it."""
        limit = self.limit * times
        timeout = 0.0 if endless else limit
        if timeout != self._timeout:
            self._bounded("SELECT set_config('statement_timeout', %s, false)", [f"{timeout * 1000:.0f}"])
            self._timeout = timeout
        return self._bounded(statement, params, limit, endless)

    def value(
        self, statement: str | sql.Composable, params: Sequence[object] = (), *, times: float = 1.0
    ) -> Any:
        """The first column of the first row; None without a row."""
        rows = self.run(statement, params, times=times)
        return rows[0][0] if rows else None

    @contextmanager
    def transaction(self, **settings: str) -> Iterator[None]:
        """A transaction with settings of its own, such as `lock_timeout="1s"`."""
        self.run("BEGIN")
        try:
            for name, value in settings.items():
                self.run("SELECT set_config(%s, %s, true)", [name, value])
            yield
            self.run("COMMIT")
        except BaseException:
            self._timeout = None
            if not self._connection.closed:
                with suppress(psycopg.Error, NodeAway):
                    self._bounded("ROLLBACK", ())
            raise

    def end_predecessors(self, name: str) -> None:
        """Take this application name, and end the other sessions that have it."""
        self._bounded(_END_PREDECESSORS, [name, name])

    def _bounded(
        self,
        statement: str | sql.Composable,
        params: Sequence[object],
        limit: float | None = None,
        endless: bool = False,
    ) -> list[tuple[Any, ...]]:
        with self.bounded(limit, endless):
            query = statement if isinstance(statement, sql.Composable) else sql.SQL(statement)
            cursor = self._connection.execute(query.as_bytes(self._connection), params or None)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def bounded(self, limit: float | None = None, endless: bool = False) -> Iterator[None]:
        """End the connection if the block takes longer than the limit and a margin; an `endless` block only
        if the server is not at work on it. Raises `NodeAway` if the connection is lost in the block."""
        over = threading.Event()
        seconds = (self.limit if limit is None else limit) + min(MARGIN, self.limit)
        watch = threading.Thread(target=self._watch, args=(over, seconds, endless), daemon=True)
        watch.start()
        try:
            yield
        except psycopg.OperationalError as error:
            if not self._connection.broken:
                raise
            raise NodeAway(node=self.node, why=str(error).strip()) from None
        finally:
            over.set()
            watch.join()

    def _watch(self, over: threading.Event, seconds: float, endless: bool) -> None:
        """Cut the connection from another thread: the statement that waits then fails at once."""
        while not over.wait(seconds):
            if endless and self._is_active(self._connection.info.backend_pid):
                continue
            with suppress(OSError, psycopg.Error):
                with socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
                    connected.shutdown(socket.SHUT_RDWR)
            return


@contextmanager
def session(cluster: Cluster, work: Work, node: str | None = None, part: str = "") -> Iterator[NodeSession]:
    """Open a session of a step on a node, by default its own node, and end those of earlier deliveries. A
    second session of a step on one node has another `part`."""
    target = work.node if node is None else node

    def is_active(pid: int) -> bool:
        try:
            with cluster.nodes.connect(target, statement_timeout="5s") as asked:
                return asked.execute(_IS_ACTIVE, [pid]).fetchone() is not None
        except (NodeAway, psycopg.Error):
            return False

    settings = {
        "client_connection_check_interval": "1s",
        "statement_timeout": f"{cluster.limit * 1000:.0f}",
        **_COMPARABLE,
    }
    with cluster.nodes.connect(target, autocommit=True, **settings) as connection:
        connection.prepare_threshold = None
        opened = NodeSession(target, connection, cluster.limit, is_active)
        try:
            opened.end_predecessors(_application_name(work, target, part))
            yield opened
        finally:
            # At the end of its block psycopg would send COMMIT or ROLLBACK, and wait for the answer for ever.
            connection.close()


def _application_name(work: Work, node: str, part: str) -> str:
    """At most 63 bytes, and equal only for the same table, shard, step node, connected node and part."""
    full = f"{work.table}/{work.shard}/{work.node}/{node}/{part}"
    return f"towpath shards {hashlib.sha256(full.encode()).hexdigest()[:16]}"


def compose(template: str, **parts: object) -> sql.Composed:
    """A statement with placeholders `{name}`: text is an identifier, a tuple a qualified name, a list a list
    of identifiers, a composable itself, any other value a literal."""
    return sql.SQL(template).format(**{name: _part(value) for name, value in parts.items()})


def _part(value: object) -> sql.Composable:
    if isinstance(value, sql.Composable):
        return value
    if isinstance(value, str):
        return sql.Identifier(value)
    if isinstance(value, tuple):
        return sql.Identifier(*value)
    if isinstance(value, list):
        return sql.SQL(", ").join(map(sql.Identifier, value))
    return sql.Literal(value)
