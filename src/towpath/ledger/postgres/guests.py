"""Commit functions of the user on the ledger's connection."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import ExecStatus

from towpath.errors import UserFunctionFailed
from towpath.ledger.relational.functions import Undone

Function = Callable[[Any], object]


class LostDuring(psycopg.OperationalError):
    """The connection was lost while the function of this job ran."""

    def __init__(self, id: str, error: BaseException | None) -> None:
        super().__init__(str(error or "the connection was lost"))
        self.id = id


def call_all(
    connection: psycopg.Connection[Any], begin: bytes, end: bytes, functions: Sequence[tuple[str, Function]]
) -> dict[str, UserFunctionFailed]:
    """Call the functions, each in a savepoint; one round trip of ours for each. The failures, by job.

    `begin` leaves a row that no COMMIT passes, `end` removes it: COMMIT as text fails. ROLLBACK ends the savepoint, whose name a
    function does not know. `commit()` and `rollback()` of the connection are refused by its `transaction()`.
    """
    name = f"towpath_{secrets.token_hex(8)}".encode()
    calls = _Calls(connection, name)
    process = os.getpid()
    try:
        with connection.transaction():
            calls.must(begin + b"; SAVEPOINT " + name)
            for id, function in functions:
                calls.call(id, function)
            calls.must(b"RELEASE SAVEPOINT " + name + b"; " + end)
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

    def call(self, id: str, function: Function) -> None:
        error: Exception | None = None
        try:
            function(self._connection)
        except Exception as raised:
            error = raised
        if error is None:
            said = self._execute(self._again)
            if said is None:
                return
            error = psycopg.ProgrammingError(said)
        failure = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        if isinstance(error, errors.DeadlockDetected | errors.SerializationFailure):
            # It came of others at the same time: the function is not to blame.
            self.ended = error
        elif self._connection.broken:
            self.ended = LostDuring(id, error)
        elif self._connection.closed:
            self.ended = Undone(id, UserFunctionFailed(id=id, error="it closed the ledger's connection"))
        elif self._execute(self._undo) is not None:
            self.ended = Undone(id, failure)
        if self.ended is not None:
            raise self.ended
        self.failed[id] = failure

    def must(self, statements: bytes) -> None:
        """Statements of ours that cannot fail unless the transaction is over."""
        if (said := self._execute(statements)) is not None:
            raise psycopg.OperationalError(said)

    def _execute(self, statements: bytes) -> str | None:
        """What the server has to complain of. Past the driver: it takes a third of the time."""
        if self._connection.closed:
            return "the connection is closed"
        done = self._connection.pgconn.exec_(statements)
        return None if done.status == ExecStatus.COMMAND_OK else done.error_message.decode(errors="replace").strip()
