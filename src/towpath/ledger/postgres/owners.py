"""Detects dead owners, the processes that claim jobs. Each owner holds a session advisory lock, which the
server frees with the session.

A session may end while its process is alive: it was terminated, or the server was restarted. The process then
takes the lock again on its next connection. So an owner counts as dead only if its lock was free for `FREE`
seconds in which the server answered every check, and not shortly after the server was unreachable or
restarted, when processes may still be connecting."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from psycopg import errors

from towpath.escapes import get_logger
from towpath.ledger.postgres.rows import Connection, Cursor, PostgresDb
from towpath.ledger.postgres.statements import Statements

log = get_logger("towpath.postgres")

FREE: Final = 2.0
"""Seconds that the lock of a dead owner must have been free."""
GAP: Final = 2.0
"""If two checks are this many seconds apart, the time before the second does not count: the server may have
been unreachable."""
GRACE: Final = 5.0
"""Seconds after a failed check in which no owner counts as dead. Seconds after a start of the server, which
frees all locks, in which no owner with a lock from before the start counts as dead."""
ANNOUNCED: Final = 1.0
"""Seconds that `announce` waits for the lock."""

Rows = list[tuple[str]]
Read = Callable[[Callable[[PostgresDb], Rows]], Rows]


class OwnerLocks:
    """The locks of this process, on the connection of the listener. Only the thread of the listener calls
    methods other than `add` and `wait`."""

    def __init__(self, statements: Statements) -> None:
        self._schema = statements.schema
        self._insert = statements.place(_TAKEN)
        self._delete = statements.place("DELETE FROM towpath.owner WHERE name = $1")
        self._announced: dict[str, int] = {}
        self._held: set[str] = set()
        self._changed = threading.Condition()

    def add(self, owner: str) -> None:
        with self._changed:
            self._announced[owner] = lock_of(self._schema, owner)

    def wait(self, owner: str, seconds: float) -> None:
        """Wait until the lock of the owner is held, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: owner in self._held, seconds)

    @property
    def missing(self) -> bool:
        return len(self._held) < len(self._announced)

    def begin(self) -> None:
        """Start on a new connection, which holds no lock."""
        self._held.clear()

    def take(self, connection: Connection) -> None:
        """Try to take the missing locks. The session of a lost connection may still hold one; the next call
        tries again."""
        with self._changed:
            missing = [(owner, lock) for owner, lock in self._announced.items() if owner not in self._held]
        for owner, lock in missing:
            row = _run(connection, b"SELECT pg_try_advisory_lock($1)", lock)
            if row is None or not row[0]:
                continue
            # After the lock, so that no process sees the row without the lock.
            try:
                _run(connection, self._insert, owner, lock)
            except errors.InsufficientPrivilege as error:
                log.warning(
                    "this role may not write the table owner; if this process is killed, its jobs run again "
                    "only after their leases expire: %s",
                    error,
                )
            with self._changed:
                self._held.add(owner)
                self._changed.notify_all()

    def withdraw(self, connection: Connection) -> None:
        for owner in self._held:
            _run(connection, self._delete, owner)


class PostgresOwners:
    """`read` runs a read on the ledger's connection for reads. `wake` makes the listener take the announced
    locks."""

    def __init__(
        self,
        locks: OwnerLocks,
        statements: Statements,
        read: Read,
        wake: Callable[[], None],
    ) -> None:
        self._locks = locks
        self._read = read
        self._wake = wake
        self._query = statements.place(_FREE)
        self._delete = statements.place(_FORGET)
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        """Owners with a free lock, and the time of the first check that found it free."""
        self._checked_at = 0.0
        self._none_dead_until = 0.0

    @property
    def uncertain(self) -> bool:
        return bool(self._since)

    def announce(self, owner: str) -> None:
        self._locks.add(owner)
        self._wake()
        self._locks.wait(owner, ANNOUNCED)

    def dead(self) -> tuple[str, ...]:
        with self._lock:
            try:
                found = self._read(lambda db: cast(Rows, db.execute(self._query, (GRACE,)).fetchall()))
            except BaseException:
                self._since.clear()
                self._none_dead_until = time.monotonic() + GRACE
                raise
            before, now = self._checked_at, time.monotonic()
            self._checked_at = now
            if now - before > GAP or now < self._none_dead_until:
                self._since.clear()
            self._since = {owner: self._since.get(owner, now) for (owner,) in found}
            if now < self._none_dead_until:
                return ()
            return tuple([owner for owner, at in self._since.items() if now - at >= FREE])

    def forget(self, owners: Sequence[str]) -> None:
        with self._lock:
            self._read(lambda db: cast(Rows, db.execute(self._delete, (list(owners),)).fetchall()))
            for owner in owners:
                self._since.pop(owner, None)

    def close(self) -> None:
        """The listener deletes the rows before it closes its connection."""

    def left_to_parent(self) -> None:
        """The connections belong to the parent process; the child sends nothing on them."""


def lock_of(schema: str, owner: str) -> int:
    digest = hashlib.blake2b(f"{schema}\0{owner}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


_HELD = """WITH held AS MATERIALIZED (
    SELECT classid::bigint << 32 | objid::bigint AS lock FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
"""
_FREE = f"""{_HELD}SELECT name FROM towpath.owner WHERE lock NOT IN (SELECT lock FROM held)
AND (taken_at > pg_postmaster_start_time()
    OR clock_timestamp() >= pg_postmaster_start_time() + make_interval(secs => $1::float8))
ORDER BY name"""
_TAKEN = """INSERT INTO towpath.owner (name, lock) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET taken_at = clock_timestamp()"""
_FORGET = f"""{_HELD}DELETE FROM towpath.owner
WHERE name = ANY ($1::text[]) AND lock NOT IN (SELECT lock FROM held) RETURNING name"""


def _run(connection: Connection, query: bytes, *args: object) -> tuple[object, ...] | None:
    cursor = Cursor(connection)
    cursor.execute(query, args)
    return cursor.fetchone() if cursor.description else None
