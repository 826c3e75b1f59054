"""Append on a connection of the user, in the same transaction as the user's data."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import apsw

from towpath.core.commands import Placed
from towpath.core.job import Spec
from towpath.core.lifecycle import Jumps
from towpath.errors import LedgerBusy, StaleTransaction, WrongConnection
from towpath.ledger.sqlite.maintenance import check_schema
from towpath.ledger.sqlite.process_turns import ProcessTurns
from towpath.ledger.sqlite.statements import begin
from towpath.ledger.tables import append as appends
from towpath.ledger.tables.transaction import ReadAhead

_LOCK = "UPDATE towpath_meta SET last = last"
"""Takes the write lock inside a transaction without a read before it."""


class UserConnections:
    """Writes on connections of the user. The busy handler of such a connection is not changed. Instead, this
    class waits for the write lock in a loop, for up to `timeout` seconds, in turn with the processes that use
    the ledger."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._turns: ProcessTurns | None = None

    def append(self, connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
        """Append as part of the transaction that is open on the connection, or in one of its own if there is
        none."""
        check_connection(connection, self._path)
        traces = connection.row_trace, connection.exec_trace
        connection.row_trace = connection.exec_trace = None
        try:
            return self._append(connection, specs, now)
        finally:
            connection.row_trace, connection.exec_trace = traces

    def begin(self, connection: apsw.Connection) -> bool:
        """Begin a transaction that has the write lock. False if one is open already."""
        check_connection(connection, self._path)
        if connection.in_transaction:
            return False
        self._wait(connection, "BEGIN IMMEDIATE")
        return True

    def close(self) -> None:
        with self._lock:
            self.left_to_parent()

    def left_to_parent(self) -> None:
        """For a forked child. Takes no lock: its holder may be a thread that exists only in the parent."""
        if self._turns is not None:
            self._turns.close()
            self._turns = None

    def _append(self, connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
        begun = connection.in_transaction
        if begun:
            connection.execute("SAVEPOINT towpath_append")
        else:
            self._wait(connection, "BEGIN IMMEDIATE")
        try:
            if begun:
                # Before the first read, so that the rows cannot change between read and write.
                self._wait(connection, _LOCK)
            answers = _place(connection, specs, now)
            connection.execute("RELEASE towpath_append" if begun else "COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute(
                    "ROLLBACK TO towpath_append; RELEASE towpath_append" if begun else "ROLLBACK"
                )
            raise
        return answers

    def _wait(self, connection: apsw.Connection, statement: str) -> None:
        """Execute the statement that takes the write lock. If another connection has the lock, wait in
        turn."""
        if self._take(connection, statement):
            return
        began = time.monotonic()
        with self._lock:
            if self._turns is None:
                self._turns = ProcessTurns(self._path, self._timeout)
            with self._turns:
                # No ledger process is ahead now, but a connection of a user may hold the lock.
                while not self._take(connection, statement):
                    waited = time.monotonic() - began
                    if waited >= self._timeout:
                        raise LedgerBusy(path=str(self._path), seconds=round(waited, 1))
                    time.sleep(min(max(waited / 8, 0.0005), 0.005))

    def _take(self, connection: apsw.Connection, statement: str) -> bool:
        try:
            connection.execute(statement)
        except apsw.BusyError as error:
            if getattr(error, "extendedresult", 0) == apsw.SQLITE_BUSY_SNAPSHOT:
                raise StaleTransaction(path=str(self._path)) from error
            return False
        return True


def _place(connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    tx = begin(connection, now, Jumps(), ReadAhead(specs))
    check_schema(Path(connection.filename), tx.schema, tx.min_schema)
    answers = appends.place(tx, specs).answers
    tx.finish()
    return answers


def check_connection(connection: object, path: Path) -> None:
    """Checks only the file's name: a read would begin the transaction's snapshot before it has the write
    lock."""
    if isinstance(connection, apsw.Connection):
        name = connection.filename
        if not (os.path.exists(name) and os.path.samefile(name, path)):
            raise WrongConnection(
                why=f"this connection is to {name or 'a database in memory'}, not to the ledger's file {path}"
            )
        return
    if type(connection).__module__.partition(".")[0] in ("sqlite3", "_sqlite3"):
        why = (
            "this is a connection of the standard sqlite3 module, which loads a second SQLite library into "
            "the process; two libraries on one file lose committed data when one closes its connection. "
            "Open the file with apsw.Connection instead"
        )
        raise WrongConnection(why=why)
    raise WrongConnection(why=f"expected an apsw.Connection, not {type(connection).__name__}")
