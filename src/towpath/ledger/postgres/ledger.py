"""The ledger for many machines: PostgreSQL 14 or newer, no extension, one schema.

A batch is one transaction of READ COMMITTED. Plain work of several processes runs side by side: claims skip
what others hold, counts are only inserted. Keys, groups, dependencies and notes are one process's at a time
(see `locks`). Leases are counted by the server's clock."""

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
from towpath.core.job import Job, Spec
from towpath.core.views import NoteView, Page, Query, QueueView
from towpath.errors import Damaged, Forked, LedgerAway, LedgerClosed, NestedCall, Refused, UserFunctionFailed
from towpath.ledger import Answer, Capabilities, LeasesOnly, Owners
from towpath.ledger.postgres import audit, fast_append, migrations, user_functions, user_transactions
from towpath.ledger.postgres.connection import (
    PLANS,
    PostgresOptions,
    connect,
    connect_first,
    end,
    is_gone,
    is_replayable,
    milliseconds,
    options_of,
    shown,
    translate,
)
from towpath.ledger.postgres.fast_worker import FastWorker
from towpath.ledger.postgres.locks import (
    PAUSES,
    BatchSlice,
    LockHeld,
    Locks,
    NeedsLock,
    RowsTaken,
    Survey,
    one_command_slices,
    slices_of,
)
from towpath.ledger.postgres.notifications import Notifications
from towpath.ledger.postgres.owners import OwnerLocks, PostgresOwners
from towpath.ledger.postgres.rows import Connection, PostgresDb, end_open
from towpath.ledger.postgres.server_clock import ServerClock
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.postgres.transaction import AttemptState, BeginRow, PostgresTransaction
from towpath.ledger.tables import reads
from towpath.ledger.tables.database import Db, FunctionBatchSize, FunctionUndone, array
from towpath.ledger.tables.executor import Executor, check_commands, execute, execute_one_by_one, first_specs
from towpath.ledger.tables.fast_path import FastPaths

__all__ = ["PostgresLedger", "PostgresOptions", "options_of"]

T = TypeVar("T")

REPLAYS = 5
"""How often a batch that met others at the wrong time is played again before it goes command by command."""
FUNCTIONS = 50
"""Commit functions of one transaction at most. Each is a subtransaction, of which the server has room for 64
in shared memory."""
TALLIES = 200
"""Rows of counts that this process leaves before it folds some."""


class _NeedsOwnTransactions(Exception):
    """Commit functions that share a transaction must be called in transactions of their own."""


class PostgresLedger(reads.GroupReads):
    capabilities = Capabilities(durable=True, shared=True, transactional=True, remote=True)

    def __init__(self, url: str, options: PostgresOptions | None = None, clock: Clock | None = None) -> None:
        """`clock` None is the server's own, which is what a fleet needs; a clock is for tests."""
        self._url, self.place = url, shown(url)
        first, self._options = connect_first(url, options or PostgresOptions())
        self._statements = Statements(self._options.schema)
        self._clock, self._server_clock, self._fast_worker = clock, ServerClock(), FastWorker()
        self._pid, self._closed = os.getpid(), False
        self._inside: int | None = None
        self._tallies, self._related = 0, False
        self._functions = FunctionBatchSize(FUNCTIONS)
        self.repeats, self.fast_paths = 0, FastPaths()
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._reader: PostgresDb | None = None
        self._writer: PostgresDb | None = PostgresDb(first, self._statements)
        with self._translated():
            try:
                self._set_idle_timeout(first)
                migrations.migrate(self._writer.connection, self._statements, self.place)
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
        """In one transaction; but see `slices_of`. If a later transaction fails, the whole batch may come
        again."""
        answers = self._fast_path(commands, now)
        if answers and len(answers) == len(commands):
            return answers
        left = commands[len(answers) :]
        slices = slices_of(left, self._functions.size)
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
            for present, some in fast_append.apply(db, self._fast_worker, self.fast_paths, commands, now):
                answers += some
                self._server_clock.begin(present, now is None)
        except psycopg.OperationalError as error:
            # The general path connects again, or reports it.
            self.repeats += is_gone(error)
        self._tallies += bool(answers)
        if answers and isinstance(answers[0], Appended | Settled):
            self._notifications.publish()
        return answers

    def _reconnecting(self, commands: Sequence[Command], found: Survey, now: int | None) -> list[Answer]:
        """A connection may have died while nobody used it, or with the answer to a COMMIT on it. No command
        minds being applied twice, so once more on a new one; if that dies too, the server is away."""
        spoiled: dict[str, Refused] = {}
        lost: str | None = None
        """The job whose function ran when the connection was lost."""
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
                # Play the batch again without that function.
                spoiled[undone.id] = undone.answer
            except psycopg.Error as error:
                if is_gone(error):
                    raise
                replays += 1
                if found.calls_user and len(commands) > 1:
                    # A deadlock, or a COMMIT that fails for what one of the functions wrote.
                    raise _NeedsOwnTransactions from error
                if found.calls_user and isinstance(error, psycopg.IntegrityError) and replays > 1:
                    spoiled[commands[0].id] = user_functions.failed_at_commit(commands[0].id, error)  # type: ignore[union-attr]
                    continue
                if not is_replayable(error) and (
                    run is execute_one_by_one or not self._db.is_command_error(error)
                ):
                    raise
                if replays > REPLAYS or not is_replayable(error):
                    if run is execute_one_by_one:
                        raise
                    run = execute_one_by_one
            except fast_append.DEFECTS as error:
                # A defect, or data that was tampered with. It must not take its neighbours along.
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
                # A function that loses the transaction may go on, but it can write nothing outside of it.
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
        migrations.check_schema(self.place, row.schema, row.min_schema)
        db.positions.begin(row.oldest, row.following)
        now = row.present if given is None else given
        batch = PostgresTransaction(db, now, self._server_clock.jumps, row.ground, first)
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
            batch.tidy(TALLIES // 4)
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
        """A frozen process must not hold what others wait for."""
        if not self._options.pooled:
            connection.execute(f"SET {_idle(self._options.idle_timeout)}".encode())

    def _drop_writer(self) -> None:
        if self._writer is not None:
            with suppress(psycopg.Error):
                self._writer.connection.close()
            self._writer = None

    def append_on(self, connection: Any, specs: Sequence[Spec], now: int | None = None) -> tuple[Placed, ...]:
        """Append in the transaction on the user's own `psycopg.Connection`, or the one under their SQLAlchemy
        session. Raises `Refused`. What has a key, a dependency or a group is played after the commit, so that
        its number here is 0."""
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
        if now is not None:
            checks.whole("now", now)
        time = self._now if now is None else lambda _: now
        return user_transactions.AppendContext(
            self.place, self._statements, self._notifications.channel, time, self._read, self._writer
        )

    # Reading

    def get(self, id: str) -> Job | None:
        return self._read(lambda db: reads.get(db, id))

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        return self._read(lambda db: reads.get_many(db, ids, bodies))

    def find(self, query: Query) -> Page:
        return self._read(lambda db: reads.find(db, query))

    def queues(self) -> dict[str, QueueView]:
        return self._read(reads.queues)

    def _reads(self, read: Callable[[Db], T]) -> T:
        return self._read(read)

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        if now is not None:
            checks.whole("now", now)
        elif self._clock is not None:
            now = self._clock.now()
        return self._read(lambda db: fast_append.read_note(db, key, now), alone=True)

    def explain(self, id: str, now: int | None = None) -> Explanation:
        return self._read(lambda db: reads.explain_job(db, id, self._time(db, now)))

    def last(self) -> int:
        """The time of the last batch that wrote. The ledger's time stands still there while the clock is
        behind it."""
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
        """Do wake-ups of other processes reach this one? Otherwise it looks once a second."""
        return self._notifications.listening

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._guard()
        with self._write_lock, self._read_lock:
            self._closed = True
            self._drop_writer()
            if self._reader is not None:
                self._reader.connection.close()
        self._notifications.close()

    def _snapshot(self) -> str:
        """Something that is different after every commit that wrote, whoever made it."""
        return self._read(lambda db: str(db.one("snapshot")[0]), alone=True)

    def _read(self, question: Callable[[PostgresDb], T], alone: bool = False) -> T:
        """One question on one snapshot, on a connection of its own: it never waits for a commit. `alone`: it
        is one statement."""
        self._guard()
        with self._read_lock, self._translated(), self._server_clock.tracking():
            self._guard()
            for attempt in range(2):
                if self._reader is None or self._reader.connection.closed:
                    self._reader = self._connect()
                try:
                    return question(self._reader) if alone else self._ask(self._reader, question)
                except psycopg.OperationalError as error:
                    self._reader.connection.close()
                    if attempt or not is_gone(error):
                        raise
        raise AssertionError("unreachable")

    def _read_apart(self, question: Callable[[PostgresDb], T]) -> T:
        """A long question: on a connection of its own, so that it keeps nobody waiting."""
        self._guard()
        with self._translated(), connect(self._url, self._options) as connection:
            return self._ask(PostgresDb(connection, self._statements), question)

    def _ask(self, db: PostgresDb, question: Callable[[PostgresDb], T]) -> T:
        try:
            end_open(db)
            db.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            answer = question(db)
            end(db.connection)
            return answer
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError) as error:
            raise Damaged(path=self.place, why=f"it holds what no ledger wrote: {error}") from error
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
        if os.getpid() != self._pid:  # the connections are its parent's
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
