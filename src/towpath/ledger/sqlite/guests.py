"""The user's own data in the same transaction: their function on our connection, our append on theirs."""

from __future__ import annotations

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
from towpath.ledger.sqlite.db import one
from towpath.ledger.sqlite.migrations import check_schema

_CONTROL = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
}
_READING = {apsw.SQLITE_READ, apsw.SQLITE_SELECT, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}


def _authorize(operation: int, one: str | None, two: str | None, database: str | None, trigger: str | None) -> int:
    """Deny what would end our transaction, and every write to our tables (also by a trigger of theirs)."""
    if operation in _CONTROL:
        return apsw.SQLITE_DENY
    ours = any(name is not None and name.lower().startswith("towpath_") for name in (one, two))
    return apsw.SQLITE_DENY if ours and operation not in _READING else apsw.SQLITE_OK


def call_within(db: apsw.Connection, id: str, function: Callable[[Any], object]) -> None:
    """Run the user's function of a settle. Setting an authorizer also expires cached statements, so it sees them all."""
    db.authorizer = _authorize
    try:
        function(db)
    except Exception as error:
        raise UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}") from error
    finally:
        db.authorizer = None


def append_on(connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    """Append as part of the transaction that is open on the user's connection, or in one of its own if there is none."""
    check_connection(connection)
    traces = connection.row_trace, connection.exec_trace
    connection.row_trace = connection.exec_trace = None
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
    finally:
        connection.row_trace, connection.exec_trace = traces
    return answers


def _append(connection: apsw.Connection, specs: Sequence[Spec], now: int) -> tuple[Placed, ...]:
    # Take the write lock before the first read: what is read must still hold when it is written.
    connection.execute("UPDATE towpath_meta SET last = last")
    schema, min_schema = one(connection, "SELECT schema, min_schema FROM towpath_meta")
    check_schema(Path(connection.filename), schema, min_schema)
    batch = Batch(connection, now, Jumps())
    answers = appends.place(batch, specs).answers
    batch.finish()
    return answers


def check_connection(connection: object) -> None:
    if isinstance(connection, apsw.Connection):
        if one(connection, "SELECT 1 FROM sqlite_schema WHERE name = 'towpath_meta'") is None:
            raise WrongConnection(why=f"{connection.filename} has no ledger in it: open it once with open_ledger")
        return
    if type(connection).__module__.partition(".")[0] in ("sqlite3", "_sqlite3"):
        why = (
            "this is a connection of the standard sqlite3 module, which brings a second SQLite library into the process; "
            "two of them on one file lose committed data when one closes. Open the file with apsw.Connection instead"
        )
        raise WrongConnection(why=why)
    raise WrongConnection(why=f"expected an apsw.Connection, not {type(connection).__name__}")
