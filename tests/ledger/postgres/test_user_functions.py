"""Commit functions: the user's rows are committed with the settle, and a function cannot harm its batch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psycopg
import pytest

import towpath
from towpath import App
from towpath.core.commands import Append, Appended, Command, Note, Settle, Settled, Upkeep
from towpath.core.job import Done, State
from towpath.core.views import Query
from towpath.errors import NestedCall, NoteConflict, UserFunctionFailed
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.testing import ManualClock
from towpath.testing.suite.harness import Harness, spec, unique

SPAWN = multiprocessing.get_context("spawn")
Connection = psycopg.Connection[Any]
Function = Callable[[Connection], object]


@pytest.fixture
def ledger(postgres_url: str, clock: ManualClock) -> Iterator[PostgresLedger]:
    with closing(PostgresLedger(postgres_url, PostgresOptions(), clock)) as ledger:
        yield ledger
        assert ledger.check() == []


@pytest.fixture
def theirs(postgres_url: str) -> Iterator[Connection]:
    with closing(psycopg.connect(postgres_url, autocommit=True)) as connection:
        connection.execute("CREATE TABLE theirs (a int UNIQUE)")
        yield connection


@pytest.fixture
def harness(ledger: PostgresLedger, theirs: Connection) -> Harness:
    return Harness(ledger)


def rows(connection: Connection) -> list[int]:
    return [a for (a,) in connection.execute("SELECT a FROM theirs ORDER BY a")]


def adding(*values: int) -> Function:
    def add(db: Connection) -> None:
        for value in values:
            db.execute("INSERT INTO theirs (a) VALUES (%s)", (value,))

    return add


def settle(harness: Harness, within: Function, id: str = "a") -> Command:
    """A job on lease, and a settle with children, notes and a function."""
    held = harness.started(id, f"queue-of-{id}")
    spawn = (spec(f"child-of-{id}"), spec(f"keyed-of-{id}", key=unique(f"key-of-{id}")))
    return Settle(held.id, held.fence, Done(b"r"), spawn, (Note(key=f"note-of-{id}", value=b"v"),), within)


def failure(harness: Harness, within: Function, id: str = "a") -> str:
    """The error of the function. Its settle has written nothing; the other settles are stored."""
    command = settle(harness, within, id)
    before, answer, after = harness.ask(
        Append((spec(f"{id}-before"),)), command, Append((spec(f"{id}-after"),))
    )
    assert isinstance(before, Appended)
    assert isinstance(after, Appended)
    assert isinstance(answer, UserFunctionFailed), answer
    assert harness.at(id, f"{id}-before", f"{id}-after") == "running ready ready"
    assert harness.ledger.get(f"child-of-{id}") is None
    assert harness.ledger.note(f"note-of-{id}") is None
    assert answer.details["id"] == id
    return str(answer.details["error"])


def test_rows_commit_with_the_settle(harness: Harness, theirs: Connection) -> None:
    def within(db: Connection) -> None:
        adding(1, 2)(db)
        assert rows(theirs) == []  # nothing is visible before the commit

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert rows(theirs) == [1, 2]
    assert harness.at("a", "child-of-a", "keyed-of-a") == "done ready ready"


def test_a_function_that_raises_fails_its_settle_only(harness: Harness, theirs: Connection) -> None:
    def within(db: Connection) -> None:
        adding(1)(db)
        raise ValueError("no")

    assert failure(harness, within) == "ValueError: no"
    assert failure(harness, adding(2, 2), "b").startswith("UniqueViolation")
    assert rows(theirs) == []


def test_a_refusal_undoes_what_the_function_wrote(harness: Harness, theirs: Connection) -> None:
    held = harness.started("a")
    answer = harness.ask(
        Settle("a", held.fence, Done(), (), (Note(key="n", value=b"", expect=9),), adding(1))
    )
    assert isinstance(answer[0], NoteConflict)
    assert rows(theirs) == []
    assert harness.at("a") == "running"


def test_functions_side_by_side(harness: Harness, theirs: Connection) -> None:
    commands = [
        settle(harness, adding(1), "a"),
        settle(harness, adding(2, 2), "b"),
        settle(harness, adding(3), "c"),
    ]
    first, second, third = harness.ask(*commands)
    assert (first, third) == (Settled("a", State.DONE), Settled("c", State.DONE))
    assert isinstance(second, UserFunctionFailed)
    assert rows(theirs) == [1, 3]
    assert harness.at("a", "b", "c") == "done running done"


def test_the_function_is_not_called_for_a_lost_or_settled_claim(harness: Harness, theirs: Connection) -> None:
    command = settle(harness, adding(1))
    harness.ask(command)
    assert harness.ask(command) == [Settled("a", State.DONE)]
    assert rows(theirs) == [1]


@pytest.mark.parametrize("name", ["commit", "rollback"])
def test_the_transaction_is_not_the_functions(harness: Harness, theirs: Connection, name: str) -> None:
    def within(db: Connection) -> None:
        adding(1)(db)
        getattr(db, name)()

    assert failure(harness, within).startswith("ProgrammingError")
    assert rows(theirs) == []


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "END",
        "COMMIT AND CHAIN",
        "ROLLBACK",
        "ABORT",
        "ROLLBACK AND CHAIN",
        "PREPARE TRANSACTION 'x'",
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_also_not_by_a_statement(harness: Harness, theirs: Connection, statement: str, hidden: bool) -> None:
    def within(db: Connection) -> None:
        adding(1)(db)
        try:
            db.execute(statement)
        except psycopg.Error:
            if not hidden:
                raise

    failure(harness, within)
    assert rows(theirs) == []
    assert harness.ask(settle(harness, adding(9), "again")) == [Settled("again", State.DONE)]
    assert rows(theirs) == [9]


def test_what_it_writes_after_it_lost_the_transaction_is_not_written(
    harness: Harness, theirs: Connection
) -> None:
    def within(db: Connection) -> None:
        db.execute("ROLLBACK")
        adding(1)(db)

    assert "ReadOnlySqlTransaction" in failure(harness, within)
    assert rows(theirs) == []


def test_savepoints_and_tables_are_allowed(harness: Harness, theirs: Connection) -> None:
    def within(db: Connection) -> None:
        db.execute("CREATE TABLE more (b int)")
        with db.transaction():
            adding(1)(db)
        with db.transaction() as inner:
            adding(2)(db)
            raise psycopg.Rollback(inner)

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert rows(theirs) == [1]
    assert theirs.execute("SELECT count(*) FROM more").fetchone() == (0,)


def test_its_statements_are_planned_as_usual(harness: Harness, theirs: Connection) -> None:
    names = ("enable_seqscan", "enable_hashjoin", "jit", "plan_cache_mode", "lock_timeout")
    usual = [theirs.execute(f"SHOW {name}").fetchone() for name in names]
    seen: list[Any] = []

    def within(db: Connection) -> None:
        seen.extend(db.execute(f"SHOW {name}").fetchone() for name in names)

    harness.ask(settle(harness, within))
    assert seen == usual


def test_a_function_that_ends_its_own_backend_may_be_called_again(
    harness: Harness, theirs: Connection
) -> None:
    """A function must allow this: its first transaction is rolled back with all its writes."""
    calls = []

    def within(db: Connection) -> None:
        calls.append(db.info.backend_pid)
        adding(1)(db)
        if len(calls) == 1:
            db.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert len(set(calls)) == 2
    assert rows(theirs) == [1]


def test_ledger_calls_inside_raise(harness: Harness, ledger: PostgresLedger, theirs: Connection) -> None:
    calls: list[Callable[[], object]] = [
        lambda: ledger.apply([Upkeep()]),
        lambda: ledger.get("a"),
        lambda: ledger.find(Query()),
        ledger.version,
        lambda: ledger.append_on(theirs, [spec("x")]),
        ledger.close,
    ]

    def within(db: Connection) -> None:
        for call in calls:
            with pytest.raises(NestedCall):
                call()

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]


def test_an_interrupt_leaves_nothing(harness: Harness, theirs: Connection) -> None:
    def within(db: Connection) -> None:
        adding(1)(db)
        raise KeyboardInterrupt

    command = settle(harness, within)
    with harness.unchanged(), pytest.raises(KeyboardInterrupt):
        harness.ask(command)
    assert rows(theirs) == []
    assert harness.ask(Settle("a", harness.job("a").fence, Done(), within=adding(2))) == [
        Settled("a", State.DONE)
    ]


def _work(url: str, pipe: Pipe, deadly: bool) -> None:
    """A worker. With `deadly` the function reports its start and waits for the kill."""
    with App(url) as app:

        @app.task(name="count")
        def count(n: int) -> None:
            def within(db: Connection) -> None:
                db.execute("INSERT INTO theirs (a) VALUES (%s)", (n,))
                if deadly:
                    pipe.send(os.getpid())
                    pipe.recv()

            towpath.current().commit(within)

        app.run(burst=True, lease=1.0)
        pipe.send("over")


def test_exactly_once_though_a_worker_is_killed_in_the_middle(postgres_url: str, theirs: Connection) -> None:
    with App(postgres_url) as app:

        @app.task(name="count")
        def count(n: int) -> None: ...

        job = count.enqueue(1)
        ours, pipe = SPAWN.Pipe()
        first = SPAWN.Process(target=_work, args=(postgres_url, pipe, True))
        first.start()
        assert ours.poll(60)
        os.kill(ours.recv(), signal.SIGKILL)
        first.join(60)
        assert rows(theirs) == []
        assert app.ledger.check() == []
        ours, pipe = SPAWN.Pipe()
        second = SPAWN.Process(target=_run_until_done, args=(postgres_url, pipe))
        second.start()
        assert job.finished(60).state is State.DONE
        ours.send("enough")
        second.join(60)
        assert rows(theirs) == [1]
        assert job.status().losses == 1
        assert app.ledger.check() == []


def _run_until_done(url: str, pipe: Pipe) -> None:
    """Workers, one burst after the other: the job runs again when its lease has ended."""
    while not pipe.poll(0.05):
        _work(url, SPAWN.Pipe()[1], False)


def test_a_rehearsal_is_rolled_back(ledger: PostgresLedger, theirs: Connection) -> None:
    def insert(connection: Connection) -> None:
        connection.execute("INSERT INTO theirs VALUES (1)")
        assert connection.execute("SELECT a FROM theirs").fetchall() == [(1,)]

    ledger.rehearse(insert)
    assert theirs.execute("SELECT a FROM theirs").fetchall() == []


def test_a_rehearsal_fails_as_the_commit_would(ledger: PostgresLedger, theirs: Connection) -> None:
    functions: list[Function] = [
        lambda connection: connection.execute("INSERT INTO nowhere VALUES (1)"),
        lambda connection: connection.execute("COMMIT"),
        lambda connection: connection.commit(),
        lambda connection: connection.close(),
    ]
    for function in functions:
        with pytest.raises(UserFunctionFailed):
            ledger.rehearse(function)
