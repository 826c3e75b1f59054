"""The user's own function on our connection, in the same transaction as the settle it belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import apsw

from towpath.errors import UserFunctionFailed

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
