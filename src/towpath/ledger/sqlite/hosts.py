"""Our append on the user's own connection, in the same transaction as their data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import apsw

from towpath.core.commands import Placed
from towpath.core.job import Spec
from towpath.core.jumps import Jumps
from towpath.errors import LedgerBusy, WrongConnection
from towpath.ledger.relational import appends
from towpath.ledger.sqlite.ground import begin
from towpath.ledger.sqlite.migrations import check_schema


def append_on(connection: apsw.Connection, path: Path, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    """Append as part of the transaction that is open on the user's connection, or in one of its own if there is none."""
    check_connection(connection, path)
    traces = connection.row_trace, connection.exec_trace
    connection.row_trace = connection.exec_trace = None
    try:
        return _append_in_transaction(connection, specs, now)
    finally:
        connection.row_trace, connection.exec_trace = traces


def _append_in_transaction(connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    begun = connection.in_transaction
    connection.execute("SAVEPOINT towpath_append" if begun else "BEGIN IMMEDIATE")
    try:
        answers = _append(connection, specs, now)
        connection.execute("RELEASE towpath_append" if begun else "COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO towpath_append; RELEASE towpath_append" if begun else "ROLLBACK")
        if isinstance(error, apsw.BusyError) and begun:
            seconds = "its busy timeout (begin your transaction with BEGIN IMMEDIATE)"
            raise LedgerBusy(path=connection.filename, seconds=seconds) from error
        raise
    return answers


def _append(connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    # Take the write lock before the first read: what is read must still hold when it is written.
    connection.execute("UPDATE towpath_meta SET last = last")
    batch = begin(connection, now, Jumps(), specs)
    check_schema(Path(connection.filename), batch.schema, batch.min_schema)
    answers = appends.place(batch, specs).answers
    batch.finish()
    return answers


def check_connection(connection: object, path: Path) -> None:
    """By the file's name alone: a look inside would begin the transaction's snapshot before it has the write lock."""
    if isinstance(connection, apsw.Connection):
        name = connection.filename
        if not (os.path.exists(name) and os.path.samefile(name, path)):
            raise WrongConnection(
                why=f"this connection is to {name or 'a database in memory'}, not to the ledger's file {path}"
            )
        return
    if type(connection).__module__.partition(".")[0] in ("sqlite3", "_sqlite3"):
        why = (
            "this is a connection of the standard sqlite3 module, which brings a second SQLite library into the process; "
            "two of them on one file lose committed data when one closes. Open the file with apsw.Connection instead"
        )
        raise WrongConnection(why=why)
    raise WrongConnection(why=f"expected an apsw.Connection, not {type(connection).__name__}")
