"""Wake-ups between processes: NOTIFY after the commit, LISTEN on a connection of its own, a look now and then as the net."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import sql

from towpath.errors import TowpathError
from towpath.ledger.postgres.connect import PostgresOptions, connect
from towpath.ledger.postgres.db import Connection

log = logging.getLogger("towpath.postgres")

LOOK = 1.0
"""Seconds between two looks where nobody rings: behind a pooler, or while the listener has no connection."""
NET = 5.0
"""The same while somebody listens."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.02
"""Seconds between two rings at least: what happens meanwhile is told by one. Longer and longer while there is always something."""
FIRST = 1.0
"""Seconds that whoever opens a ledger waits for the first attempt to listen."""
AGAIN = 1.0
"""Seconds between two attempts to listen."""


class Ringing:
    """`version` is different after every commit that this process made or heard of."""

    def __init__(self, url: str, options: PostgresOptions, peek: Callable[[], str]) -> None:
        self._url, self._options, self._peek = url, options, peek
        self.channel = f"{options.schema}_wake"
        self._changed = threading.Condition()
        self._version = self._waiting = 0
        self._peeked = ""
        self._looked = 0.0
        self._ring, self._tried = threading.Event(), threading.Event()
        self._closed = False
        self.listening = False
        """Does a ring of another process reach us? Otherwise we look."""
        self._ringer = 0
        """The server's number for our ringing connection: what comes from there we know already."""
        self._threads: list[threading.Thread] = []
        self._stop, self._stopped = socket.socketpair()

    def start(self) -> None:
        work = [self._run_ringer] if self._options.pooled else [self._run_ringer, self._run_listener]
        self._threads = [threading.Thread(target=each, name="towpath-ringing", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()
        if not self._options.pooled:
            # Who has opened the ledger hears of everything after it; that the listener has begun is no news later.
            self._tried.wait(FIRST)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ring.set()
        self._stop.send(b"!")
        for thread in self._threads:
            thread.join()
        self._stop.close()
        self._stopped.close()

    def ring(self) -> None:
        """This process has committed."""
        self._bump()
        if not self._ring.is_set():
            self._ring.set()

    def version(self) -> int:
        self._look()
        return self._version

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while True:
            self._look()
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
        return NET if self.listening else LOOK

    def _bump(self) -> None:
        with self._changed:
            self._version += 1
            if self._waiting:
                self._changed.notify_all()

    def _look(self) -> None:
        """Ask the server whether somebody committed, if it was long ago that we knew."""
        with self._changed:
            now = time.monotonic()
            if now - self._looked < self._period:
                return
            self._looked = now
        peeked = self._peek()
        if peeked != self._peeked:
            self._peeked = peeked
            self._bump()

    def _run_ringer(self) -> None:
        connection: Connection | None = None
        pause = SHORTEST_PAUSE
        while True:
            self._ring.wait()
            if self._closed:
                break
            self._ring.clear()
            try:
                if connection is None or connection.closed:
                    connection = connect(self._url, self._options)
                    self._ringer = connection.info.backend_pid
                # It need not survive a crash, so it need not wait for the disk.
                connection.execute("SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')", (self.channel,))
            except (psycopg.Error, TowpathError) as error:
                # The others look by themselves after a while, and the next commit rings again.
                log.debug("could not ring: %s", error)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if self._ring.is_set() else SHORTEST_PAUSE
        if connection is not None:
            connection.close()

    def _run_listener(self) -> None:
        while not self._closed:
            try:
                self._listen()
            except (psycopg.Error, TowpathError) as error:
                log.debug("not listening: %s", error)
            self.listening = False
            self._bump()  # whatever was told meanwhile, nobody heard
            self._tried.set()
            with self._changed:
                if not self._closed:
                    self._changed.wait(AGAIN)

    def _listen(self) -> None:
        connection = connect(self._url, self._options)
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
            self.listening = True
            self._bump()
            self._tried.set()
            while not self._closed:
                select.select([connection.fileno(), self._stopped.fileno()], [], [], NET)
                senders = {notice.pid for notice in connection.notifies(timeout=0)}
                if senders - {self._ringer}:
                    self._bump()
        finally:
            connection.close()
