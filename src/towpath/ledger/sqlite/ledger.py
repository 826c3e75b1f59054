"""The embedded ledger: one SQLite file, any number of processes.

A batch is one transaction. `ProcessTurns` orders the writing processes, a lock orders the threads of one
process; the holder of both uses the writing connection. Reads have connections of their own. After COMMIT
the wake file is touched, which notifies the waiters of all processes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.commands import Append, Command, Placed, PutChunk, Settle
from towpath.core.explain import Explanation
from towpath.core.job import Done, Spec
from towpath.core.lifecycle import Jumps
from towpath.core.views import NotePage, NoteQuery, NoteView
from towpath.errors import Damaged, Forked, LedgerClosed, LedgerError, NestedCall, Refused, StoreFailed
from towpath.ledger import Answer, Capabilities
from towpath.ledger.sqlite import audit, fast_append, files, user_functions, user_transactions
from towpath.ledger.sqlite.files import (
    LOG_BYTES,
    SqliteOptions,
    connect,
    connect_reader,
    options_of,
    set_busy_timeout,
    translate,
)
from towpath.ledger.sqlite.maintenance import backup, check_schema, migrate, steps
from towpath.ledger.sqlite.owners import owners_of
from towpath.ledger.sqlite.presence import Presence
from towpath.ledger.sqlite.process_turns import ProcessTurns
from towpath.ledger.sqlite.statements import COMMAND_ERRORS, SqliteDb, begin, one
from towpath.ledger.sqlite.wakeups import WakeFile
from towpath.ledger.tables import reads
from towpath.ledger.tables.database import (
    Db,
    FastPathRefused,
    FastPaths,
    FunctionBatchSize,
    FunctionUndone,
    has_function,
    slices,
)
from towpath.ledger.tables.executor import Executor, check_commands, execute, execute_one_by_one, read_ahead
from towpath.ledger.tables.transaction import ReadAhead

__all__ = ["FAULT_POINTS", "SqliteLedger", "SqliteOptions", "options_of"]

T = TypeVar("T")

CHECKPOINT_BYTES = 8 * 1024 * 1024
"""Length of the commits in the write-ahead log that are not in the database file yet, from which on a
checkpoint copies them."""
RESTART_TIMEOUT = 0.05
"""Seconds for which a restart of a long log waits, inside the turn, for transactions that read from it."""
RESTART_PAUSE = 1.0
"""Seconds between a restart that failed for such a transaction and the next one."""
CHECK_EVERY = 200
"""Jobs and commands between two checks of the length of the write-ahead log."""
FUNCTIONS = 256
"""Commit functions per transaction, at most."""
FAULT_POINTS = ("begun", "applied", "written", "committed", "notified", "checkpointed")
"""Where `SqliteOptions.fault` is called, in the order of a batch. Tests kill a process at each of them."""
POLL_INTERVAL = 0.25
"""Seconds after which a waiter checks again without a notification."""


class SqliteLedger(reads.SharedReads):
    """The ledger in one SQLite file, for any number of processes of one machine."""

    capabilities = Capabilities(durable=True, shared=True, transactional=True)
    repeats = 0

    def __init__(
        self, path: str | Path, options: SqliteOptions | None = None, clock: Clock | None = None
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._options = options or SqliteOptions()
        self._clock = clock or SystemClock()
        self._fault = self._options.fault or _no_fault
        self._pid = os.getpid()
        self._forked = False
        self._jumps = Jumps()
        self._closed = False
        self._unchecked = 0
        self._restart_due = 0.0
        self._inside: int | None = None
        self.fast_paths = FastPaths()
        self._functions = FunctionBatchSize(FUNCTIONS)
        self._write_lock, self._watch_lock = threading.Lock(), threading.Lock()
        self._readers: reads.ReadPool[apsw.Connection] = reads.ReadPool(
            str(self.path), self._options.busy_timeout
        )
        with ExitStack() as stack:
            self._db = self._connect()
            stack.callback(self._close_writer)
            with self._translated(self._db):
                migrate(self._db, self.path)
                self._page_size = int(one(self._db, "PRAGMA page_size")[0])
            self._known_schema = len(steps())
            self._watcher = connect_reader(self.path, self._options)
            stack.callback(self._watcher.close)
            self._turns = ProcessTurns(self.path, self._options.busy_timeout)
            stack.callback(self._turns.close)
            self._wake = WakeFile(self.path)
            stack.callback(self._wake.close)
            self._presence = Presence(self.path)
            stack.callback(self._presence.close)
            self.owners = owners_of(self.path)
            stack.callback(self.owners.close)
            self.users = user_transactions.UserConnections(self.path, self._options.busy_timeout)
            """Appends on connections of the user."""
            stack.callback(self.users.close)
            stack.callback(self._readers.close, apsw.Connection.close)
            self._opened = stack.pop_all()
        files.open_here.add(self)

    def _connect(self) -> apsw.Connection:
        connection = connect(self.path, self._options)
        connection.authorizer = user_functions.FunctionAuthorizer()
        return connection

    def _close_writer(self) -> None:
        self._db.close()

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        self._check_open()
        now = self._now(now)
        path = fast_append.path_of(commands)
        if not path:
            check_commands(commands)
        with self._write_lock:
            self._check_open()
            self._inside = threading.get_ident()
            try:
                if path or not any(map(has_function, commands)):
                    return self._apply(commands, path, now)
                runs = list(slices(commands, self._functions.size))
                return [answer for run in runs for answer in self._apply(run, "", now)]
            except apsw.Error as error:
                raise translate(error, self.path, self._options, self._db) from error
            except BaseException:
                self._turns.leave()  # an interrupt may have come inside `__exit__`
                raise
            finally:
                self._inside = None

    def _apply(self, commands: Sequence[Command], path: str, now: int) -> list[Answer]:
        """Apply the commands in one transaction, by the fast path if `path` names one."""
        with self._turns:
            answers = self._apply_fast(path, commands, now) if path else None
            wrote = answers is not None
            if answers is None:
                answers, wrote = self._transact(commands, now)
        # After the commit: a batch in a deleted file must not be acknowledged.
        self._presence.check_file()
        self._fault("committed")
        if wrote:
            self._wake.notify()
            self._fault("notified")
            self._checkpoint(commands)
        return answers

    def _apply_fast(self, path: str, commands: Sequence[Command], now: int) -> list[Answer] | None:
        """Apply a batch by a fast path. None if a rule refuses it or a defect ends it: the general path then
        applies the batch."""
        db = self._db
        try:
            specs = fast_append.plain_specs(path, commands)
            self._undo(db)
            db.execute("BEGIN IMMEDIATE")
            self._fault("begun")
            answers = fast_append.RUN[path](db, commands, specs, now, self._check_start)
            self._fault("applied")
            self._fault("written")
            db.execute("COMMIT")
        except FastPathRefused as refused:
            self._undo(db)
            self.fast_paths.refuse(path, refused.reason)
            return None
        except (*COMMAND_ERRORS, *_DEFECTS) as error:
            self._undo(db)
            self.fast_paths.fail(path, error)
            return None
        except BaseException:
            self._undo(db)
            raise
        self.fast_paths.take(path)
        return answers

    def _transact(self, commands: Sequence[Command], now: int) -> tuple[list[Answer], bool]:
        failed_functions: dict[str, Refused] = {}
        while True:
            try:
                return self._apply_general(commands, now, failed_functions)
            except FunctionUndone as undone:
                # Apply the batch again without that function.
                failed_functions[undone.id] = undone.answer
                if user_functions.is_closed(self._db):
                    self._db = self._connect()

    def _apply_general(
        self, commands: Sequence[Command], now: int, failed_functions: dict[str, Refused]
    ) -> tuple[list[Answer], bool]:
        try:
            return self._attempt(commands, now, failed_functions, execute)
        except apsw.Error as error:
            if not isinstance(translate(error, self.path, self._options), StoreFailed):
                raise
        except _DEFECTS:
            # A defect or damaged data. It must fail only its own command: apply them one by one.
            pass
        try:
            return self._attempt(commands, now, failed_functions, execute_one_by_one)
        except _DEFECTS as error:
            raise Damaged(path=str(self.path), why=f"{type(error).__name__}: {error}") from error

    def _attempt(
        self, commands: Sequence[Command], now: int, failed_functions: dict[str, Refused], run: Executor
    ) -> tuple[list[Answer], bool]:
        db = self._db
        answers: list[Answer]
        try:
            self._undo(db)
            # Inside the try: an interrupt is raised after the statement has begun the transaction.
            db.execute("BEGIN IMMEDIATE")
            self._fault("begun")
            answers, wrote = self._run_commands(commands, now, failed_functions, run)
            self._fault("written")
            db.execute("COMMIT" if wrote else "ROLLBACK")
        except BaseException:
            self._undo(db)
            raise
        return answers, wrote

    @staticmethod
    def _undo(db: apsw.Connection) -> None:
        """Roll back an open transaction. Also called before each transaction: a second interrupt may have
        prevented the rollback after the first."""
        if user_functions.in_transaction(db):
            db.execute("ROLLBACK")

    def _run_commands(
        self, commands: Sequence[Command], now: int, failed_functions: dict[str, Refused], run: Executor
    ) -> tuple[list[Answer], bool]:
        # One by one: a damaged row must fail only the command that reads it.
        ahead = read_ahead(commands) if run is execute else ReadAhead()
        tx = begin(self._db, now, self._jumps, ahead)
        tx.failed_functions = failed_functions
        check_schema(self.path, tx.schema, tx.min_schema)
        self._jumps.note(tx.now)
        answers = run(tx, commands)
        self._functions.took(*tx.called)
        self._fault("applied")
        tx.finish()
        return answers, tx.wrote

    def _check_start(self, schema: int, min_schema: int, now: int) -> None:
        if min_schema > self._known_schema:
            check_schema(self.path, schema, min_schema)
        self._jumps.note(now)

    def _checkpoint(self, commands: Sequence[Command]) -> None:
        """Checkpoint a long log: between batches and outside the turn, so that other processes can write. An
        error (another process checkpoints, the disk is full) is ignored: the batch is committed, and a later
        batch tries again. The length is read every `CHECK_EVERY` jobs, because SQLite's WAL hook would cost
        each commit a call into Python.

        SQLite reuses the log from its start only if all of it is copied and no transaction reads from it.
        Beside other writers that does not happen, so a log that is too long is restarted inside the turn."""
        self._unchecked += _weight(commands)
        if self._unchecked < CHECK_EVERY:
            return
        with suppress(apsw.Error, LedgerError):
            pages, copied = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if (pages - copied) * self._page_size >= CHECKPOINT_BYTES:
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                self._fault("checkpointed")
            self._unchecked = 0
            if pages * self._page_size > LOG_BYTES and time.monotonic() >= self._restart_due:
                self._restart_log()

    def _restart_log(self) -> None:
        self._restart_due = time.monotonic() + RESTART_PAUSE
        with self._turns:
            self._db.set_busy_timeout(math.ceil(RESTART_TIMEOUT * 1000))
            try:
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
            finally:
                set_busy_timeout(self._db, self._options)
        self._restart_due = 0.0
        self._fault("checkpointed")

    def append_on(
        self, connection: apsw.Connection, specs: Sequence[Spec], now: int | None = None
    ) -> tuple[Placed, ...]:
        """Append inside the transaction that is open on the user's own `apsw.Connection` to this file. The
        jobs commit or roll back with the user's data. Raises `Refused`. Waiters see the jobs within
        `POLL_INTERVAL` seconds after the commit."""
        self._check_open()
        if connection is self._db:
            raise NestedCall(path=str(self.path))
        self._presence.check_file()
        with self._translated():
            return self.users.append(connection, Append(tuple(specs)).specs, self._now(now))

    def rehearse(self, function: Callable[[Any], object]) -> None:
        self._check_open()
        with self._translated(), closing(self._connect()) as db:
            user_functions.rehearse(db, function)

    def _reads(self, read: Callable[[Db], T]) -> T:
        return self._read(lambda db: read(SqliteDb(db)))

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        return self._read(lambda db: reads.note(SqliteDb(db), key, self._time(db, now)))

    def notes(self, query: NoteQuery, now: int | None = None) -> NotePage:
        return self._read(lambda db: reads.notes(SqliteDb(db), query, self._time(db, now)))

    def explain(self, id: str, now: int | None = None) -> Explanation:
        return self._read(lambda db: reads.explain_job(SqliteDb(db), id, self._time(db, now)))

    def check(self) -> list[str]:
        return self._read_apart(audit.check)

    def dump(self) -> dict[str, Any]:
        return self._read_apart(audit.dump)

    def integrity(self) -> list[str]:
        """The findings of SQLite's integrity check and of `check`; empty if the ledger is intact."""
        damage = self._read_apart(lambda db: [str(row[0]) for row in db.execute("PRAGMA integrity_check")])
        return [line for line in damage if line != "ok"] + self.check()

    def backup(self, path: str | Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy the ledger as of now to a new file. Other processes and threads can keep writing."""
        self._check_open()
        self._presence.check()
        source = connect_reader(self.path, self._options)
        try:
            with self._translated():
                backup(source, Path(path), progress)
        finally:
            source.close()

    def last(self) -> int:
        """The time of the last batch that wrote. While the clock is behind it, this is the ledger's time."""
        return self._read(lambda db: self._time(db, 0))

    def version(self) -> int:
        self._check_open()
        with self._watch_lock, self._translated():
            self._check_open()
            self._presence.check()
            return int(one(self._watcher, "PRAGMA data_version")[0])

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        with self._wake.watch() as watch:
            while (version := self.version()) == seen and (left := deadline - time.monotonic()) > 0:
                watch.wait(min(left, POLL_INTERVAL))
        return version

    def close(self) -> None:
        if self._closed or self._forked:
            return
        self._check_open()
        with self._write_lock, self._watch_lock:
            self._closed = True
            self._opened.close()

    def _inside_locks(self) -> Iterable[threading.Lock]:
        if self._inside != threading.get_ident():
            yield self._write_lock
        yield self._watch_lock
        yield from self._readers.locks()

    def _left_to_parent(self) -> None:
        self._forked = True
        # An open descriptor in the child would keep the turn of a killed parent.
        self._turns.close()
        self.users.left_to_parent()
        self.owners.left_to_parent()

    def _read(self, read: Callable[[apsw.Connection], T]) -> T:
        """Run `read` on one snapshot, on a connection of the pool."""
        self._check_open()
        answer: T = self._readers.run(self._read_on, read)
        return answer

    def _read_on(self, reader: reads.Reader[apsw.Connection], read: Callable[[apsw.Connection], T]) -> T:
        self._check_open()
        self._presence.check()
        try:
            if reader.connection is None:
                reader.connection = self._connect_reader()
            return self._read_snapshot(reader.connection, read)
        except apsw.Error as error:
            raise translate(error, self.path, self._options) from error

    def _connect_reader(self) -> apsw.Connection:
        try:
            connection = connect_reader(self.path, self._options)
        except (LedgerError, apsw.Error):
            self._presence.check_now()
            raise
        try:
            # Another file may have replaced the ledger's since the last check.
            self._presence.check_now()
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_apart(self, read: Callable[[apsw.Connection], T]) -> T:
        """Run a long read on a connection of its own, so that other reads do not wait."""
        self._check_open()
        self._presence.check()
        with self._translated():
            connection = self._connect_reader()
            try:
                return self._read_snapshot(connection, read)
            finally:
                connection.close()

    def _read_snapshot(self, db: apsw.Connection, read: Callable[[apsw.Connection], T]) -> T:
        try:
            self._undo(db)
            db.execute("BEGIN")
            return read(db)
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, apsw.SQLError) as error:
            raise Damaged(path=str(self.path), why=f"it has values that no ledger writes: {error}") from error
        finally:
            self._undo(db)

    def _time(self, db: apsw.Connection, now: int | None) -> int:
        last: int = one(db, "SELECT last FROM towpath_meta")[0]
        return max(self._now(now), last)

    def _now(self, now: int | None) -> int:
        if now is None:
            return self._clock.now()
        checks.whole("now", now)
        return now

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerClosed(path=str(self.path))
        if self._forked:
            raise Forked(path=str(self.path), opener=self._pid)
        if self._inside == threading.get_ident():
            raise NestedCall(path=str(self.path))

    @contextmanager
    def _translated(self, db: apsw.Connection | None = None) -> Iterator[None]:
        try:
            yield
        except apsw.Error as error:
            raise translate(error, self.path, self._options, db) from error


def _weight(commands: Sequence[Command]) -> int:
    """A lower estimate of the pages that the commands write."""
    pages, size = len(commands), 0
    for command in commands:
        if type(command) is Settle:
            if type(command.outcome) is Done and command.outcome.result is not None:
                size += len(command.outcome.result)
        elif type(command) is Append:
            specs = command.specs
            if len(specs) == 1:
                size += len(specs[0].payload)
            else:
                pages += len(specs) - 1
                size += sum([len(spec.payload) for spec in specs])
        elif type(command) is PutChunk:
            size += len(command.data)
    return pages + size // 4096


_DEFECTS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, AttributeError)


def _no_fault(point: str) -> None:
    """The default of `SqliteOptions.fault`."""
