"""Commit functions of the user on the ledger's connection."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import errors
from psycopg.pq import ExecStatus, TransactionStatus

from towpath.errors import UserFunctionFailed
from towpath.ledger.tables.database import FunctionUndone

Function = Callable[[Any], object]


class LostDuring(psycopg.OperationalError):
    """The connection was lost while the function of this job ran."""

    def __init__(self, id: str, error: BaseException | None) -> None:
        super().__init__(str(error or "the connection was lost"))
        self.id = id


class GuardStatements(NamedTuple):
    """Statements before and after the functions."""

    begin: bytes
    end: bytes


def call_all(
    connection: psycopg.Connection[Any],
    around: GuardStatements,
    functions: Sequence[tuple[str, Function]],
    eager: bool,
) -> dict[str, UserFunctionFailed]:
    """Call the functions, each in a savepoint. Returns the failures by job id.

    A savepoint costs a round trip per function, as much as most functions themselves. With `eager` the
    functions are called without savepoints; if one fails, all are undone and called again in savepoints.

    `begin` inserts a row with which COMMIT fails, and `end` deletes it: a COMMIT as text inside a function
    fails. A ROLLBACK as text is detected, because it removes the savepoint, which has a random name.
    `commit()` and `rollback()` of the connection are refused by its `transaction()`."""
    name = f"towpath_{secrets.token_hex(8)}".encode()
    calls = _Calls(connection, name)
    process = os.getpid()
    try:
        with connection.transaction():
            calls.must(around.begin + b"; SAVEPOINT " + name)
            if not (eager and calls.call_eagerly(functions)):
                for id, function in functions:
                    calls.call(id, function)
            calls.must(b"RELEASE SAVEPOINT " + name + b"; " + around.end)
    except Exception:
        # The exit of `transaction()` may raise another error, because there is no transaction.
        if calls.ended is not None:
            raise calls.ended from None
        raise
    finally:
        if os.getpid() != process:
            # A function forked, and this is the child: the transaction and the connection belong to the
            # parent.
            os._exit(1)
    return calls.failed


class _Calls:
    def __init__(self, connection: psycopg.Connection[Any], name: bytes) -> None:
        self._connection = connection
        self._again = b"RELEASE SAVEPOINT " + name + b"; SAVEPOINT " + name
        self._undo = b"ROLLBACK TO SAVEPOINT " + name
        self.failed: dict[str, UserFunctionFailed] = {}
        self.ended: Exception | None = None
        """The error that ended the transaction."""

    def call_eagerly(self, functions: Sequence[tuple[str, Function]]) -> bool:
        """Call all functions without savepoints. False if one failed: then all are undone."""
        for id, function in functions:
            error = self._error_of(function)
            if error is None and self._connection.pgconn.transaction_status != TransactionStatus.INTRANS:
                error = psycopg.ProgrammingError("it left a failed transaction, or none")
            if error is not None:
                self._undo_failed(id, error)
                return False
        return True

    def call(self, id: str, function: Function) -> None:
        error = self._error_of(function)
        if error is None:
            failure = self._execute(self._again)
            if failure is None:
                return
            error = psycopg.ProgrammingError(failure)
        self.failed[id] = self._undo_failed(id, error)

    def _error_of(self, function: Function) -> Exception | None:
        try:
            function(self._connection)
        except Exception as error:
            return error
        return None

    def _undo_failed(self, id: str, error: Exception) -> UserFunctionFailed:
        """Roll back to the savepoint. Raises if the transaction has ended."""
        failure = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        if isinstance(error, errors.DeadlockDetected | errors.SerializationFailure):
            # Concurrent transactions caused it, not the function.
            self.ended = error
        elif self._connection.broken:
            self.ended = LostDuring(id, error)
        elif self._connection.closed:
            self.ended = FunctionUndone(
                id, UserFunctionFailed(id=id, error="it closed the ledger's connection")
            )
        elif self._execute(self._undo) is not None:
            self.ended = FunctionUndone(id, failure)
        if self.ended is not None:
            raise self.ended
        return failure

    def must(self, statements: bytes) -> None:
        """Execute statements that fail only if the connection is lost, or if an eagerly called function has
        ended the transaction."""
        if (failure := self._execute(statements)) is not None:
            lost = self._connection.closed
            self.ended = psycopg.OperationalError(failure) if lost else psycopg.ProgrammingError(failure)
            raise self.ended

    def _execute(self, statements: bytes) -> str | None:
        """Execute without the driver, in a third of the time. Returns the error text, or None."""
        if self._connection.closed:
            return "the connection is closed"
        done = self._connection.pgconn.exec_(statements)
        return (
            None
            if done.status == ExecStatus.COMMAND_OK
            else done.error_message.decode(errors="replace").strip()
        )


def failed_at_commit(id: str, error: psycopg.Error) -> UserFunctionFailed:
    failed = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
