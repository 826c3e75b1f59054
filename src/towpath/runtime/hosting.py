"""An append in a transaction of the user's, on a connection of theirs to the ledger's own database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from towpath.core.commands import Appended
from towpath.core.job import Spec
from towpath.errors import Unsupported
from towpath.ledger import Ledger, Transactional


def append_on(ledger: Ledger, connection: Any, specs: Sequence[Spec]) -> Appended:
    """It is durable, and can be seen, when the user has committed."""
    return Appended(_transactional(ledger).append_on(connection, specs))


async def aappend_on(ledger: Ledger, connection: Any, specs: Sequence[Spec]) -> Appended:
    host = _transactional(ledger)
    # A connection to SQLite has no coroutines, and so neither has its ledger.
    append = getattr(host, "aappend_on", None)
    return Appended(host.append_on(connection, specs) if append is None else await append(connection, specs))


def begin_on(ledger: Ledger, connection: Any) -> bool:
    """On SQLite: begin a transaction with the write lock, in turn with the processes that use the ledger. False if one is open."""
    users = getattr(_transactional(ledger), "users", None)
    return users is not None and bool(users.begin(connection))


def _transactional(ledger: Ledger) -> Transactional:
    if not ledger.capabilities.transactional:
        raise Unsupported(what="an append in a transaction of yours; that needs a ledger on SQLite or PostgreSQL")
    return cast(Transactional, ledger)
