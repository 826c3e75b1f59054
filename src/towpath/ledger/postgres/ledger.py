"""The ledger for many machines: PostgreSQL 14 or newer, no extension, one schema.

A batch is one transaction of READ COMMITTED. Plain work of several processes runs side by side: claims skip
locked jobs, counts are only inserted. Keys, groups, dependencies and notes are changed by one process at a
time (see `locks`). Leases are counted by the server's clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import psycopg

from towpath.clock import Clock
from towpath.core import checks
from towpath.core.commands import Appended, Command, Placed, Settled
from towpath.core.explain import Explanation
from towpath.core.job import Spec
from towpath.core.views import NotePage, NoteQuery, NoteView, QueueView
from towpath.errors import Damaged, Forked, LedgerAway, LedgerClosed, NestedCall, Refused, UserFunctionFailed
from towpath.ledger import Answer, Capabilities, LeasesOnly, Owners
from towpath.ledger.postgres import audit, fast_paths, user_functions, user_transactions
from towpath.ledger.postgres.connection import (
    PLANS,
    PostgresOptions,
    check_schema,
    connect,
    connect_first,
    end,
    is_gone,
    is_replayable,
    migrate,
    milliseconds,
    options_of,
    shown,
    translate,
)
from towpath.ledger.postgres.fast_paths import FastWorker
from towpath.ledger.postgres.locks import (
    PAUSES,
    BatchSlice,
    LockHeld,
    Locks,
    NeedsLock,
    RowsTaken,
    Survey,
    is_setting,
    one_command_slices,
    slices_of,
)
from towpath.ledger.postgres.notifications import Notifications
from towpath.ledger.postgres.owners import OwnerLocks, PostgresOwners
from towpath.ledger.postgres.rows import Connection, PostgresDb, end_open
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.postgres.transaction import AttemptState, BeginRow, PostgresTransaction, ServerClock
from towpath.ledger.tables import reads
from towpath.ledger.tables.database import Db, FastPaths, FunctionBatchSize, FunctionUndone, array
from towpath.ledger.tables.executor import Executor, check_commands, execute, execute_one_by_one, first_specs

__all__ = ["PostgresLedger", "PostgresOptions", "options_of"]

T = TypeVar("T")

REPLAYS = 5
"""Attempts of a batch that fail because of concurrent transactions, before its commands are applied one by
one."""
FUNCTIONS, SAVEPOINTS = 128, 50
"""Commit functions of one transaction, at most; fewer while each has a savepoint, because the server has room
for 64 subtransactions of a session in shared memory."""
TALLIES = 200
"""Tally rows that this process writes before it folds some."""


class _NeedsOwnTransactions(Exception):
    """Commit functions that share a transaction must be called in transactions of their own."""


class PostgresLedger(reads.SharedReads):
    capabilities = Capabilities(durable=True, shared=True, transactional=True, remote=True)

    def __init__(self, url: str, options: PostgresOptions | None = None, clock: Clock | None = None) -> None:
        """With `clock` None the ledger uses the server's clock, which a fleet needs. A clock is for tests."""
        self._url, self.place = url, shown(url)
        first, self._options = connect_first(url, options or PostgresOptions())
        self._statements = Statements(self._options.schema)
        self._clock, self._server_clock, self._fast_worker = clock, ServerClock(), FastWorker()
        self._pid, self._closed = os.getpid(), False
        self._inside: int | None = None
        self._tallies, self._related = 0, False
        self._functions = FunctionBatchSize(FUNCTIONS)
        self.repeats, self.fast_paths = 0, FastPaths()
        self._write_lock = threading.Lock()
        self._readers: reads.ReadPool[PostgresDb] = reads.ReadPool(self.place, self._options.lock_timeout)
        self._writer: PostgresDb | None = PostgresDb(first, self._statements)
        with self._translated():
            try:
                self._set_idle_timeout(first)
                migrate(self._writer.connection, self._statements, self.place)
            except BaseException:
                self._drop_writer()
                raise
        locks = OwnerLocks(self._statements)
        self._notifications = Notifications(url, self._options, self._snapshot, locks)
        self._notifications.start()
        self.owners: Owners = LeasesOnly()
        if not self._options.pooled:
            self.owners = PostgresOwners(
                locks, self._statements, lambda ask: self._read(ask, alone=True), self._notifications.wake
            )

    # Writing

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        self._guard()
        if now is not None:
            checks.whole("now", now)
        check_commands(commands)
        with self._write_lock:
            self._guard()
            self._inside = threading.get_ident()
            try:
                answers = self._apply(commands, now)
            except BaseException as error:
                self._server_clock.fail()
                if isinstance(error, psycopg.Error):
                    raise translate(error, self.place) from error
                if isinstance(error, LockHeld):
                    raise LedgerAway(path=self.place, why=str(error)) from error
                raise
            finally:
                self._inside = None
            self._server_clock.succeed(commands)
        return answers

    def _apply(self, commands: Sequence[Command], now: int | None) -> list[Answer]:
        """Apply in one transaction, or in one per slice of `slices_of`. If a later one fails, the caller may
        repeat the whole batch."""
        answers = self._fast_path(commands, now)
        if answers and len(answers) == len(commands):
            return answers
        left = commands[len(answers) :]
        most = SAVEPOINTS if self._writer is not None and self._writer.careful else FUNCTIONS
        slices = slices_of(left, min(self._functions.size, most))
        if len(slices) == 1 and not slices[0].survey.calls_user:
            return answers + self._reconnecting(left, slices[0].survey, now)
        found: dict[int, Answer] = {}
        for each in slices:
            found.update(zip(each.places, self._apply_slice(each, now), strict=True))
        return answers + [found[place] for place in range(len(left))]

    def _apply_slice(self, slice: BatchSlice, now: int | None) -> list[Answer]:
        done = self._fast_path(slice.commands, now)
        if done and len(done) == len(slice.commands):
            return done
        try:
            return done + self._reconnecting(slice.commands[len(done) :], slice.survey, now)
        except _NeedsOwnTransactions:
            self._functions.contended()
            return [
                answer
                for each in one_command_slices(slice)
                for answer in self._reconnecting(each.commands, each.survey, now)
            ]

    def _fast_path(self, commands: Sequence[Command], now: int | None) -> list[Answer]:
        """Answers to the commands at the beginning that a fast path has applied and committed."""
        if now is None and self._clock is not None:
            now = self._clock.now()
        answers: list[Answer] = []
        try:
            end_open(db := self._db)
            for present, some in fast_paths.apply(db, self._fast_worker, self.fast_paths, commands, now):
                answers += some
                self._server_clock.begin(present, now is None)
        except psycopg.OperationalError as error:
            # The general path connects again, or reports it.
            self.repeats += is_gone(error)
        self._tallies += bool(answers)
        if answers and (
            isinstance(answers[0], Appended | Settled) or any(map(is_setting, commands[: len(answers)]))
        ):
            self._notifications.publish()
        return answers

    def _reconnecting(self, commands: Sequence[Command], found: Survey, now: int | None) -> list[Answer]:
        """Apply, and once more on a new connection if the connection was lost: while it was idle, or before
        the result of a COMMIT arrived. Every command may be applied twice. If the new connection is lost too,
        the server is unreachable."""
        spoiled: dict[str, Refused] = {}
        lost: str | None = None
        """The job with the function that ran when the connection was lost."""
        for attempt in range(3):
            try:
                return self._transact(commands, found, now, spoiled)
            except psycopg.Error as error:
                gone = is_gone(error)
                if gone or attempt:
                    self._drop_writer()
                during = error.id if isinstance(error, user_functions.LostDuring) else None
                if not gone or (attempt and (during is None or during != lost)):
                    raise
                if attempt and during is not None:
                    spoiled[during] = UserFunctionFailed(
                        id=during, error=f"the connection was lost twice while it ran: {error}"
                    )
                lost = during
                self.repeats += 1
            except BaseException:
                if attempt:
                    self._drop_writer()
                raise
        raise AssertionError("unreachable")

    def _transact(
        self, commands: Sequence[Command], found: Survey, now: int | None, spoiled: dict[str, Refused]
    ) -> list[Answer]:
        locks, run = Locks() if found.calls_user else found.locks | Locks(self._related), execute
        replays = conflicts = 0
        while True:
            try:
                return self._attempt(commands, now, AttemptState(found, spoiled, locks, conflicts), run)
            except NeedsLock as needed:
                locks |= needed.locks
            except RowsTaken:
                time.sleep(PAUSES[min(conflicts, len(PAUSES) - 1)])
                conflicts += 1
            except FunctionUndone as undone:
                # Apply the batch again without that function.
                spoiled[undone.id] = undone.answer
            except psycopg.Error as error:
                if is_gone(error):
                    raise
                replays += 1
                if found.calls_user and len(commands) > 1:
                    # A deadlock, or a COMMIT that fails because of a row that one of the functions wrote.
                    raise _NeedsOwnTransactions from error
                if found.calls_user and isinstance(error, psycopg.IntegrityError) and replays > 1:
                    id: str = commands[0].id  # type: ignore[union-attr]
                    spoiled[id] = user_functions.failed_at_commit(id, error)
                    continue
                if not is_replayable(error) and (
                    run is execute_one_by_one or not self._db.is_command_error(error)
                ):
                    raise
                if replays > REPLAYS or not is_replayable(error):
                    if run is execute_one_by_one:
                        raise
                    run = execute_one_by_one
            except fast_paths.DEFECTS as error:
                # A defect, or damaged data. The other commands of the batch must still be applied.
                if run is execute_one_by_one:
                    raise Damaged(path=self.place, why=f"{type(error).__name__}: {error}") from error
                run = execute_one_by_one

    def _attempt(
        self, commands: Sequence[Command], now: int | None, before: AttemptState, run: Executor
    ) -> list[Answer]:
        db = self._db
        shut = before.survey.calls_user and not self._options.pooled
        try:
            end_open(db)
            if shut:
                # A function that ends the transaction may continue, but it cannot write outside of it.
                db.execute(b"SET default_transaction_read_only = on")
            db.execute(b"BEGIN READ WRITE")
            if self._options.pooled:
                db.connection.execute(PLANS.replace("SET ", "SET LOCAL "))
                db.connection.execute(f"SET LOCAL {_idle(self._options.idle_timeout)}".encode())
            if before.survey.calls_user:
                db.connection.execute(f"SET LOCAL {_idle(self._options.commit_timeout)}".encode())
            batch = self._begin(db, commands, now, before)
            answers = run(batch, commands)
            batch.finish()
            end(db.connection, wrote=batch.wrote or batch.tallies > 0, folded=before.survey.has_upkeep)
        except BaseException:
            db.positions.forget()
            with suppress(psycopg.Error):
                end_open(db)
            raise
        finally:
            with suppress(psycopg.Error):
                if shut:
                    db.execute(b"RESET default_transaction_read_only")
        self._functions.took(*batch.called)
        self._related = batch.relates and not (before.survey.locks.relations or batch.calls_user)
        self._tallies += batch.tallies
        if batch.notifies:
            self._notifications.publish()
        return answers

    def _begin(
        self, db: PostgresDb, commands: Sequence[Command], now: int | None, before: AttemptState
    ) -> PostgresTransaction:
        first = first_specs(commands)
        given = self._clock.now() if now is None and self._clock is not None else now
        row = BeginRow(
            *db.one("begin_batch", (array([spec.id for spec in first]), array(before.survey.queues), given))
        )
        check_schema(self.place, row.schema, row.min_schema)
        db.positions.begin(row.oldest, row.following)
        now = row.present if given is None else given
        batch = PostgresTransaction(db, now, self._server_clock.jumps, row.start_facts, first)
        batch.failed_functions, batch.conflicts = before.spoiled, before.conflicts
        batch.calls_user, batch.notifies = before.survey.calls_user, before.survey.notifies
        batch.lock_timeout = f"{milliseconds(self._options.lock_timeout)}ms"
        batch.stalled = self._server_clock.stall
        self._server_clock.begin(batch.now, given is None)
        has_inbox = row.inbox and not batch.calls_user
        batch.lock(before.locks | Locks(relations=has_inbox), before.survey.queues)
        if has_inbox:
            batch.apply_inbox()
        if before.survey.has_upkeep:
            self._server_clock.begin_upkeep(batch.now, given is None)
            batch.keep_up()
        elif self._tallies >= TALLIES:
            batch.fold_queues(TALLIES // 4)
            self._tallies = 0
        return batch

    def _now(self, present: int) -> int:
        return present if self._clock is None else self._clock.now()

    @property
    def _db(self) -> PostgresDb:
        if self._writer is None or self._writer.connection.closed:
            self._writer = self._connect()
        return self._writer

    def _connect(self) -> PostgresDb:
        connection = connect(self._url, self._options)
        self._set_idle_timeout(connection)
        return PostgresDb(connection, self._statements)

    def _set_idle_timeout(self, connection: Connection) -> None:
        """The server ends the transaction of a frozen process, because others wait for its locks."""
        if not self._options.pooled:
            connection.execute(f"SET {_idle(self._options.idle_timeout)}".encode())

    def _drop_writer(self) -> None:
        if self._writer is not None:
            with suppress(psycopg.Error):
                self._writer.connection.close()
            self._writer = None

    def append_on(self, connection: Any, specs: Sequence[Spec], now: int | None = None) -> tuple[Placed, ...]:
        """On the user's own `psycopg.Connection`, or on the one under a SQLAlchemy session. Specs with a key,
        a dependency or a group are applied after the commit, so their number is 0 here."""
        self._guard()
        with self._translated():
            return user_transactions.append_on(self._append_context(now), connection, specs)

    async def aappend_on(
        self, connection: Any, specs: Sequence[Spec], now: int | None = None
    ) -> tuple[Placed, ...]:
        self._guard()
        with self._translated():
            return await user_transactions.aappend_on(self._append_context(now), connection, specs)

    def _append_context(self, now: int | None) -> user_transactions.AppendContext:
        checks.optional_whole("now", now)
        time = self._now if now is None else lambda _: now
        return user_transactions.AppendContext(
            self.place, self._statements, self._notifications.channel, time, self._read, self._writer
        )

    # Reading

    def rehearse(self, function: Callable[[Any], object]) -> None:
        self._guard()
        with self._translated(), self._connect().connection as connection:
            PostgresDb(connection, self._statements).rehearse(function)

    def _reads(self, read: Callable[[Db], T]) -> T:
        return self._read(read)

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        return self._read(lambda db: fast_paths.read_note(db, key, self._given_time(now)), alone=True)

    def queue(self, name: str) -> QueueView | None:
        return self._read(lambda db: reads.queue(db, name), alone=True)

    def notes(self, query: NoteQuery, now: int | None = None) -> NotePage:
        at = self._given_time(now)
        return self._read(lambda db: reads.notes(db, query, at), alone=True)

    def _given_time(self, now: int | None) -> int | None:
        """None: the statement reads the clock of the server."""
        checks.optional_whole("now", now)
        return self._clock.now() if now is None and self._clock is not None else now

    def explain(self, id: str, now: int | None = None) -> Explanation:
        return self._read(lambda db: reads.explain_job(db, id, self._time(db, now)))

    def last(self) -> int:
        """The time of the last batch that wrote; ledger time is never less."""
        return self._read(lambda db: int(db.one("last")[0]))

    def check(self) -> list[str]:
        return self._read_apart(lambda db: audit.check(db.connection, self._statements))

    def dump(self) -> dict[str, Any]:
        return self._read_apart(lambda db: audit.dump(db, self._statements))

    def version(self) -> int:
        self._guard()
        return self._notifications.version()

    def wait(self, seen: int, timeout: float) -> int:
        self._guard()
        version = self._notifications.wait(seen, timeout)
        self._guard()
        return version

    def listens(self) -> bool:
        """Notifications of other processes are received; otherwise the ledger polls once a second."""
        return self._notifications.listening

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._guard()
        with self._write_lock:
            self._closed = True
            self._drop_writer()
        self._readers.close(lambda db: db.connection.close())
        self._notifications.close()

    def _snapshot(self) -> str:
        """A text that differs after every commit of any process that wrote."""
        return self._read(lambda db: str(db.one("snapshot")[0]), alone=True)

    def _read(self, read: Callable[[PostgresDb], T], alone: bool = False) -> T:
        """Run a read on one snapshot, on a connection of the pool. `alone`: the read is a single
        statement."""
        self._guard()
        answer: T = self._readers.run(self._read_on, read, alone)
        return answer

    def _read_on(self, reader: reads.Reader[PostgresDb], read: Callable[[PostgresDb], T], alone: bool) -> T:
        with self._translated(), self._server_clock.tracking():
            self._guard()
            for attempt in range(2):
                if (db := reader.connection) is None or db.connection.closed:
                    db = reader.connection = self._connect()
                try:
                    return read(db) if alone else self._ask(db, read)
                except psycopg.OperationalError as error:
                    db.connection.close()
                    if attempt or not is_gone(error):
                        raise
        raise AssertionError("unreachable")

    def _read_apart(self, read: Callable[[PostgresDb], T]) -> T:
        """Run a long read on a connection of its own, so that no other read waits for it."""
        self._guard()
        with self._translated(), connect(self._url, self._options) as connection:
            return self._ask(PostgresDb(connection, self._statements), read)

    def _ask(self, db: PostgresDb, read: Callable[[PostgresDb], T]) -> T:
        try:
            end_open(db)
            db.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            answer = read(db)
            end(db.connection)
            return answer
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError) as error:
            raise Damaged(path=self.place, why=f"it has rows that no ledger wrote: {error}") from error
        finally:
            with suppress(psycopg.Error):
                end_open(db)

    def _time(self, db: PostgresDb, now: int | None) -> int:
        last, present = db.one("last")
        if now is not None:
            checks.whole("now", now)
        return max(int(last), self._now(present) if now is None else now)

    def _guard(self) -> None:
        if self._closed:
            raise LedgerClosed(path=self.place)
        if os.getpid() != self._pid:  # the connections belong to the parent
            raise Forked(path=self.place, opener=self._pid)
        if self._inside == threading.get_ident():
            raise NestedCall(path=self.place)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self.place) from error


def _idle(seconds: float) -> str:
    return f"idle_in_transaction_session_timeout = {milliseconds(seconds)}"
