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
    """Call the functions, each in a savepoint. The failures, by job.

    A savepoint is a round trip for each function, as many as most functions have themselves. With `eager`
    they are called without; if one fails, all are undone and called again in savepoints.

    `begin` leaves a row that no COMMIT passes, `end` removes it: COMMIT as text fails. ROLLBACK ends the
    savepoint, whose name a function does not know. `commit()` and `rollback()` of the connection are refused
    by its `transaction()`."""
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
        # Leaving `transaction()` may raise once more, for want of a transaction.
        if calls.ended is not None:
            raise calls.ended from None
        raise
    finally:
        if os.getpid() != process:
            # A function forked, and this is the child: the transaction and the connection are its parent's.
            os._exit(1)
    return calls.failed


class _Calls:
    def __init__(self, connection: psycopg.Connection[Any], name: bytes) -> None:
        self._connection = connection
        self._again = b"RELEASE SAVEPOINT " + name + b"; SAVEPOINT " + name
        self._undo = b"ROLLBACK TO SAVEPOINT " + name
        self.failed: dict[str, UserFunctionFailed] = {}
        self.ended: Exception | None = None
        """Why the transaction is over, if it is."""

    def call_eagerly(self, functions: Sequence[tuple[str, Function]]) -> bool:
        """False if one failed. Nothing is left of any of them then."""
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
            said = self._execute(self._again)
            if said is None:
                return
            error = psycopg.ProgrammingError(said)
        self.failed[id] = self._undo_failed(id, error)

    def _error_of(self, function: Function) -> Exception | None:
        try:
            function(self._connection)
        except Exception as error:
            return error
        return None

    def _undo_failed(self, id: str, error: Exception) -> UserFunctionFailed:
        """Back to the savepoint. Raises if the transaction is over."""
        failure = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        if isinstance(error, errors.DeadlockDetected | errors.SerializationFailure):
            # It came of others at the same time: the function is not to blame.
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
        """Statements of ours that cannot fail unless the connection or, by a function that was called
        eagerly, the transaction is lost."""
        if (said := self._execute(statements)) is not None:
            lost = self._connection.closed
            self.ended = psycopg.OperationalError(said) if lost else psycopg.ProgrammingError(said)
            raise self.ended

    def _execute(self, statements: bytes) -> str | None:
        """What the server has to complain of. Past the driver: it takes a third of the time."""
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
