"""Commit functions of the user on the ledger's connection.

The connection keeps one authorizer, because setting an authorizer makes SQLite prepare every statement of the
connection again. SQLite calls the authorizer when it prepares a statement. It denies only while functions
run. A cached statement was authorized earlier, so functions get cursors that mark their statements: apsw's
cache keeps marked and unmarked statements apart."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import apsw

from towpath.errors import Refused, UserFunctionFailed
from towpath.ledger.tables.database import FunctionUndone

_CONTROL = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
}
_READING = {apsw.SQLITE_READ, apsw.SQLITE_SELECT, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}

_STORE_ERRORS = (apsw.FullError, apsw.IOError, apsw.CorruptError, apsw.NoMemError, apsw.BusyError)
"""Errors that end a transaction and that the function did not cause."""

# Random, so that no function uses it by accident.
_NAME = f"towpath_{secrets.token_hex(8)}"
_SAVE, _UNDO, _RELEASE = f"SAVEPOINT {_NAME}", f"ROLLBACK TO {_NAME}", f"RELEASE {_NAME}"

_MARK = apsw.SQLITE_PREPARE_PERSISTENT
"""A flag of `sqlite3_prepare_v3` that the ledger's own statements do not have."""


class FunctionAuthorizer:
    """The authorizer of a connection. While functions run it denies what would end the transaction, and every
    write to the ledger's tables (also by a trigger of theirs)."""

    def __init__(self) -> None:
        self.active = False

    def __call__(
        self, operation: int, one: str | None, two: str | None, database: str | None, trigger: str | None
    ) -> int:
        if not self.active:
            return apsw.SQLITE_OK
        if operation in _CONTROL:
            return apsw.SQLITE_OK if operation == apsw.SQLITE_SAVEPOINT and two == _NAME else apsw.SQLITE_DENY
        # The second name of an update is a column.
        tables = (one,) if operation == apsw.SQLITE_UPDATE else (one, two)
        ours = any(name is not None and name.lower().startswith("towpath_") for name in tables)
        return apsw.SQLITE_DENY if ours and operation not in _READING else apsw.SQLITE_OK


class _MarkedCursor(apsw.Cursor):
    """The cursor of a function."""

    def execute(self, statements: str, bindings: Any = None, **options: Any) -> Any:
        return super().execute(
            statements, bindings, **{**options, "prepare_flags": options.get("prepare_flags", 0) | _MARK}
        )

    def executemany(self, statements: str, sequenceofbindings: Any, **options: Any) -> Any:
        flags = options.get("prepare_flags", 0) | _MARK
        return super().executemany(statements, sequenceofbindings, **{**options, "prepare_flags": flags})


def call_all(
    db: apsw.Connection, functions: Sequence[tuple[str, Callable[[Any], object]]]
) -> dict[str, UserFunctionFailed]:
    """Call the functions, each in a savepoint. Returns the failures by job id."""
    if not isinstance(guard := db.authorizer, FunctionAuthorizer):
        db.authorizer = guard = FunctionAuthorizer()
    cursors: list[apsw.Cursor] = []

    def cursor(connection: apsw.Connection) -> apsw.Cursor:
        cursors.append(_MarkedCursor(connection))
        return cursors[-1]

    own, failed, process = apsw.Cursor(db), dict[str, UserFunctionFailed](), os.getpid()
    guard.active = True
    db.cursor_factory = cursor
    # A function that continues after it ended the transaction must not commit on its own.
    db.set_commit_hook(_refuse_commit)
    try:
        for id, function in functions:
            own.execute(_SAVE)
            if (failure := _call(db, id, function, cursors)) is not None:
                failed[id] = failure
                own.execute(_UNDO)
            own.execute(_RELEASE)
    finally:
        if os.getpid() != process:
            # A function forked and this is the child: the transaction and the connection belong to the
            # parent.
            os._exit(1)
        guard.active = False
        with suppress(apsw.ConnectionClosedError):
            db.cursor_factory = apsw.Cursor
            db.set_commit_hook(None)
            if db.authorizer is not guard:
                db.authorizer = guard
    return failed


def rehearse(db: apsw.Connection, function: Callable[[Any], object]) -> None:
    """Call a function in a transaction that is rolled back. Raises its failure."""
    db.execute("BEGIN IMMEDIATE")
    try:
        failed: Mapping[str, Refused] = call_all(db, [("", function)])
    except FunctionUndone as undone:
        failed = {"": undone.answer}
    finally:
        if in_transaction(db):
            db.execute("ROLLBACK")
    if failed:
        raise failed[""]


def _call(
    db: apsw.Connection, id: str, function: Callable[[Any], object], cursors: list[apsw.Cursor]
) -> UserFunctionFailed | None:
    failure: UserFunctionFailed | None = None
    try:
        function(db)
    except Exception as error:
        if isinstance(error, _STORE_ERRORS) and not in_transaction(db):
            raise
        failure = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    finally:
        for each in cursors:
            # A cursor with a running statement would keep the transaction from ending.
            each.close(True)
        cursors.clear()
    if is_closed(db):
        raise FunctionUndone(id, UserFunctionFailed(id=id, error="it closed the ledger's connection"))
    db.row_trace = db.exec_trace = None
    if not db.in_transaction:
        raise FunctionUndone(
            id, failure or UserFunctionFailed(id=id, error="it rolled the ledger's transaction back")
        )
    if failure is None and db.status(apsw.SQLITE_DBSTATUS_DEFERRED_FKS)[0]:
        # COMMIT would fail, and every other settle of the transaction with it.
        failure = UserFunctionFailed(id=id, error="it leaves a row that violates a deferred foreign key")
    return failure


def is_closed(db: apsw.Connection) -> bool:
    try:
        return db.in_transaction is None
    except apsw.ConnectionClosedError:
        return True


def in_transaction(db: apsw.Connection) -> bool:
    return not is_closed(db) and db.in_transaction


def _refuse_commit() -> bool:
    return True
