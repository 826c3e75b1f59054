"""Maintenance of a ledger as a whole: schema, vacuum, health, copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from towpath.clock import SystemClock
from towpath.core.fleet import REPORTS, WorkerView
from towpath.core.job import State
from towpath.core.views import Query
from towpath.errors import InvalidInput
from towpath.escapes import without_password
from towpath.ledger import check_installed, open_ledger
from towpath.ledger.tables import transfer
from towpath.ledger.tables.transfer import Copied, Progress, Store

__all__ = ["Copied", "Progress", "active_users", "copy", "health", "is_there", "migrate", "vacuum"]


@contextmanager
def _store(url: str) -> Iterator[Store]:
    scheme = urlsplit(url).scheme
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise InvalidInput(
            field="url",
            value=without_password(url),
            expected="sqlite:///file.db or postgresql://user@host/database; for the ledger of a server, give "
            "the URL that `towpath serve` opens",
        )
    store = _open_sqlite(url) if scheme == "sqlite" else _open_postgres(url)
    try:
        yield store
    finally:
        store.close()


def _open_sqlite(url: str) -> Store:
    from towpath.ledger.sqlite.ledger import options_of
    from towpath.ledger.sqlite.maintenance import SqliteStore

    return SqliteStore(*options_of(url))


def _open_postgres(url: str) -> Store:
    check_installed("psycopg", "postgres")
    from towpath.ledger.postgres.ledger import options_of
    from towpath.ledger.postgres.maintenance import PostgresStore

    return PostgresStore(*options_of(url))


def is_there(url: str) -> bool:
    """True if the URL names a ledger. Do not call it for a file that does not exist: the file would be
    created."""
    with _store(url) as store:
        return store.read_meta() is not None


def migrate(url: str) -> tuple[int, int]:
    """Migrate the schema to this version, or create it; return the old and the new number."""
    with _store(url) as store:
        return store.migrate(), store.known


def vacuum(url: str) -> dict[str, int]:
    open_ledger(url).close()  # Deletes only a ledger with a known schema.
    with _store(url) as store:
        return store.vacuum()


def health(url: str) -> dict[str, Any]:
    """The state of the store below the ledger: of a PostgreSQL server, or of the write-ahead log of a
    file."""
    with _store(url) as store:
        return store.health()


def active_users(url: str) -> list[str]:
    """The known users of the ledger: workers, and jobs with a valid lease."""
    now = SystemClock().now()
    ledger = open_ledger(url)
    try:
        running = ledger.find(
            Query(states=(State.RUNNING,), oldest_first=True, bodies=False, limit=1000)
        ).jobs
    finally:
        ledger.close()
    with _store(url) as store:
        found = [f"worker {_worker(value)}" for value in _reports(store, now)]
    leased = [job for job in running if job.lease_until is not None and job.lease_until > now]
    return found + [f"job {job.id}, which {job.owner} holds" for job in leased]


def _reports(store: Store, now: int) -> Iterator[bytes]:
    for key, value, _, _, expires_at in store.stream(transfer.NOTE, (REPORTS.prefix,)):
        if not key.startswith(REPORTS.prefix):
            return
        if expires_at is not None and expires_at > now:
            yield value


def _worker(value: bytes) -> str:
    view = msgspec.json.decode(value, type=WorkerView)
    return f"{view.name} on {view.host}"


def copy(source: str, target: str, progress: Progress) -> Copied:
    """Copy an unused ledger into an empty one, or continue an interrupted copy. Until the copy is complete
    and verified, the target cannot be opened."""
    open_ledger(source).close()  # Checks that it is a complete ledger with a known schema.
    with ExitStack() as stack:
        one, other = stack.enter_context(_store(source)), stack.enter_context(_store(target))
        if one.place == other.place:
            raise InvalidInput(field="target", value=target, expected="another ledger than the source")
        return transfer.copy(one, other, progress)
