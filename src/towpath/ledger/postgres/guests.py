"""The user's own function on our connection, in the same transaction as the settle it belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus

from towpath.errors import UserFunctionFailed

_XID = "SELECT pg_current_xact_id()::text"


class TransactionEnded(Exception):
    """The function ended our transaction with a statement of its own."""

    def __init__(self, answer: UserFunctionFailed) -> None:
        super().__init__(str(answer))
        self.answer = answer


class Way(NamedTuple):
    """Statements before and after: the first leaves something that no COMMIT passes, the second takes it away."""

    begin: bytes
    end: bytes


def call_within(connection: psycopg.Connection[Any], way: Way, id: str, function: Callable[[Any], object]) -> None:
    """`commit()` and `rollback()` of the connection are refused meanwhile. COMMIT as text fails, ROLLBACK is noticed."""
    before = connection.execute(_XID).fetchone()
    connection.execute(way.begin, prepare=False)
    process = os.getpid()
    try:
        with connection.transaction():
            function(connection)
    except psycopg.OperationalError:
        if connection.closed:
            raise
        _fail(connection, id, before)
    except Exception as error:
        _fail(connection, id, before, error)
    finally:
        if os.getpid() != process:
            # It forked, and this is the child: the transaction and the connection are its parent's.
            os._exit(1)
    if _is_over(connection, before):
        raise TransactionEnded(UserFunctionFailed(id=id, error="it ended the ledger's transaction"))
    connection.execute(way.end, prepare=False)


def _is_over(connection: psycopg.Connection[Any], before: object) -> bool:
    status = connection.info.transaction_status
    return status is not TransactionStatus.INTRANS or connection.execute(_XID).fetchone() != before


def _fail(connection: psycopg.Connection[Any], id: str, before: object, error: Exception | None = None) -> None:
    failed = UserFunctionFailed(id=id, error=f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    raise (TransactionEnded(failed) if _is_over(connection, before) else failed) from error
