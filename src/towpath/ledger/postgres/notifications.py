"""Notifications between processes, on a connection of their own: NOTIFY after a commit, LISTEN, and a poll in
case a notification is lost."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import errors, sql
from psycopg.pq import ExecStatus

from towpath.errors import TowpathError
from towpath.escapes import get_logger
from towpath.ledger.postgres.connection import PostgresOptions, connect
from towpath.ledger.postgres.owners import OwnerLocks
from towpath.ledger.postgres.rows import Connection

log = get_logger("towpath.postgres")

POLL = 1.0
"""Seconds between two polls without LISTEN: behind a pooler, or while the listener has no connection."""
SAFETY_POLL = 5.0
"""Seconds between two polls with LISTEN."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.02
"""Minimum seconds between two NOTIFY, which cover all commits in between. The pause doubles while every pause
ends with a new commit."""
FIRST = 1.0
"""Seconds that `start` waits for the first attempt to listen."""
RECONNECT = (0.0, 0.25, 0.5, 1.0)
"""Seconds between two attempts to connect; the last one repeats. The first attempt is immediate, because the
locks of this process's owners are free meanwhile."""
RELOCK = 0.25
"""Seconds between two attempts to take a lock that another session still holds."""


class Notifications:
    """`version` changes after every commit of this process and every notification of another."""

    def __init__(
        self, url: str, options: PostgresOptions, snapshot: Callable[[], str], locks: OwnerLocks
    ) -> None:
        self._url, self._options, self._snapshot, self._locks = url, options, snapshot, locks
        self.channel = f"{options.schema}_wake"
        self._changed = threading.Condition()
        self._version = self._waiting = 0
        self._last_snapshot = ""
        self._polled_at = 0.0
        self._tried = threading.Event()
        self._closed = False
        self.listening = False
        """Notifications of other processes are received; otherwise the ledger polls."""
        self._unpublished = False
        """This process has committed and has not sent a NOTIFY since."""
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="towpath-notifications", daemon=True)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)

    def start(self) -> None:
        self._thread.start()
        if not self._options.pooled:
            # Commits after the ledger was opened must be received, and the start of the listener must not
            # change the version later.
            self._tried.wait(FIRST)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._wake.send(b"!")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def wake(self) -> None:
        """Wake the listener: an owner lock must be taken, or a NOTIFY sent. Without effect after `close`:
        another thread may use the ledger while it is closed."""
        with self._changed:
            if not self._closed:
                self._wake.send(b"!")

    def publish(self) -> None:
        """Change the version after a commit of this process, and have the listener send a NOTIFY."""
        self._bump()
        if not self._unpublished:
            self._unpublished = True
            self.wake()

    def version(self) -> int:
        self._poll()
        return self._version

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while True:
            self._poll()
            with self._changed:
                left = deadline - time.monotonic()
                if self._version != seen or left <= 0 or self._closed:
                    return self._version
                self._waiting += 1
                try:
                    self._changed.wait(min(left, self._period))
                finally:
                    self._waiting -= 1

    @property
    def _period(self) -> float:
        return SAFETY_POLL if self.listening else POLL

    def _bump(self) -> None:
        with self._changed:
            self._version += 1
            if self._waiting:
                self._changed.notify_all()

    def _poll(self) -> None:
        """Change the version if the server's snapshot has changed. At most once in a period."""
        with self._changed:
            now = time.monotonic()
            if now - self._polled_at < self._period:
                return
            self._polled_at = now
        snapshot = self._snapshot()
        if snapshot != self._last_snapshot:
            self._last_snapshot = snapshot
            self._bump()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._listen()
            except (psycopg.Error, TowpathError) as error:
                log.debug("no connection for notifications: %s", error)
            self.listening = False
            self._bump()  # notifications may have been lost
            self._tried.set()
            with self._changed:
                if not self._closed:
                    self._changed.wait(RECONNECT[min(self._failures, len(RECONNECT) - 1)])
                    self._failures += 1

    def _listen(self) -> None:
        with connect(self._url, self._options) as connection, selectors.DefaultSelector() as selector:
            if not self._options.pooled:
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
                self.listening = True
            self._failures = 0
            self._locks.begin()
            self._bump()
            self._tried.set()
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            pause, next_notify, busy = SHORTEST_PAUSE, 0.0, False
            while not self._closed:
                early = next_notify - time.monotonic()
                if self._unpublished and early <= 0:
                    self._notify(connection)
                    pause = min(2 * pause, LONGEST_PAUSE) if busy else SHORTEST_PAUSE
                    next_notify, early = time.monotonic() + pause, pause
                busy = self._unpublished
                if self._locks.missing:
                    self._locks.take(connection)
                idle = RELOCK if self._locks.missing else SAFETY_POLL
                for key, _ in selector.select(early if busy else idle):
                    if key.fileobj is self._woken:
                        self._woken.recv(64)
                    else:
                        connection.pgconn.consume_input()
                self._receive(connection)
            self._locks.withdraw(connection)

    def _notify(self, connection: Connection) -> None:
        self._unpublished = False
        # Without a sync, because a NOTIFY need not survive a crash. Without the driver, because a NOTIFY
        # follows every series of commits.
        name = sql.Identifier(self.channel).as_bytes(connection)
        try:
            done = connection.pgconn.exec_(
                b"BEGIN; SET LOCAL synchronous_commit = off; NOTIFY " + name + b"; COMMIT"
            )
            if done.status != ExecStatus.COMMAND_OK:
                raise errors.error_from_result(done)
        except psycopg.Error:
            self._unpublished = True  # on the next connection
            raise

    def _receive(self, connection: Connection) -> None:
        """Change the version if a notification came from another connection than this one."""
        others = False
        while (notice := connection.pgconn.notifies()) is not None:
            others |= notice.be_pid != connection.pgconn.backend_pid
        if others:
            self._bump()
