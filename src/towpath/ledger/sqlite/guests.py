"""The user's own data in the same transaction: their function on our connection, our append on theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw

from towpath.core.commands import Placed
from towpath.core.job import Spec
from towpath.core.jumps import Jumps
from towpath.errors import LedgerBusy, UserFunctionFailed, WrongConnection
from towpath.ledger.sqlite import appends
from towpath.ledger.sqlite.batch import Batch
from towpath.ledger.sqlite.migrations import check_schema

_CONTROL = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
}
_READING = {apsw.SQLITE_READ, apsw.SQLITE_SELECT, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}

_NOT_ITS_FAULT = (apsw.FullError, apsw.IOError, apsw.CorruptError, apsw.NoMemError, apsw.BusyError)
"""What ends a transaction without the function's doing."""


def _authorize(operation: int, one: str | None, two: str | None, database: str | None, trigger: str | None) -> int:
    """Deny what would end our transaction, and every write to our tables (also by a trigger of theirs)."""
    if operation in _CONTROL:
        return apsw.SQLITE_DENY
    tables = (one,) if operation == apsw.SQLITE_UPDATE else (one, two)  # the second name of an update is a column
    ours = any(name is not None and name.lower().startswith("towpath_") for name in tables)
    return apsw.SQLITE_DENY if ours and operation not in _READING else apsw.SQLITE_OK


class TransactionEnded(Exception):
    """The function rolled the whole batch back, with a conflict clause (`OR ROLLBACK`), which no authorizer sees."""

    def __init__(self, answer: UserFunctionFailed) -> None:
        super().__init__(str(answer))
        self.answer = answer


def call_within(db: apsw.Connection, id: str, function: Callable[[Any], object]) -> None:
    """Run the user's function of a settle. Setting an authorizer also expires cached statements, so it sees them all."""
    cursors: list[apsw.Cursor] = []

    def cursor(connection: apsw.Connection) -> apsw.Cursor:
        cursors.append(apsw.Cursor(connection))
        return cursors[-1]

    db.authorizer = _authorize
    db.set_commit_hook(_refuse_commit)  # a function that goes on after it lost the transaction writes nothing
    db.cursor_factory = cursor
    process = os.getpid()
    try:
        function(db)
    except Exception as error:
        if isinstance(error, _NOT_ITS_FAULT) and not db.in_transaction:
            raise
        failed = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        raise (failed if db.in_transaction else TransactionEnded(failed)) from error
    finally:
        if os.getpid() != process:
            # It forked, and this is the child: the transaction and the connection are its parent's.
            os._exit(1)
        db.cursor_factory = apsw.Cursor
        for each in cursors:
            # One that was left in the middle of a statement would keep our transaction from ending.
            each.close(True)
        db.authorizer = db.row_trace = db.exec_trace = None
        db.set_commit_hook(None)
    if not db.in_transaction:
        raise TransactionEnded(UserFunctionFailed(id=id, error="it rolled the ledger's transaction back"))


def _refuse_commit() -> bool:
    return True


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
    batch = Batch(connection, now, Jumps(), specs)
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
