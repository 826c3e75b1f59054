"""Commit functions share transactions, and each fails alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import apsw
import psycopg
import pytest

from towpath import App, State, commands, current
from towpath.commands import Claimed, Want
from towpath.core.job import Done
from towpath.errors import TowpathError, UserFunctionFailed
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.ledger.tables.database import FIRST, FunctionBatchSize, slices

pytestmark = pytest.mark.ledgers("sqlite", "postgres")

TABLE = (
    "CREATE TABLE paid (n bigint PRIMARY KEY, account bigint REFERENCES account (id) DEFERRABLE INITIALLY"
    " DEFERRED)"
)
ACCOUNTS = "CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL)"


@pytest.fixture
def app(app: App) -> App:
    """With tables of the user."""
    ask(app, ACCOUNTS)
    ask(app, TABLE)
    ask(app, "INSERT INTO account VALUES (1, 0), (2, 0)")
    return app


def ask(app: App, statement: str) -> list[Any]:
    """On a connection of the user's."""
    if isinstance(ledger := app.ledger, SqliteLedger):
        with closing(apsw.Connection(str(ledger.path))) as mine:
            mine.set_busy_timeout(10_000)
            return list(mine.execute(statement))
    with psycopg.connect(app.engine.url, autocommit=True) as theirs:
        found = theirs.execute(statement)
        return found.fetchall() if found.description else []


def execute(connection: Any, statement: str, *values: object) -> Any:
    """With the placeholders of the dialect."""
    return connection.execute(
        statement.replace("?", "%s") if isinstance(connection, psycopg.Connection) else statement, values
    )


def pay(connection: Any, n: int) -> None:
    execute(connection, "INSERT INTO paid (n, account) VALUES (?, 1)", n)


def rolled_back(connection: Any, n: int) -> None:
    pay(connection, n)
    execute(connection, "ROLLBACK")


def chained(connection: Any, n: int) -> None:
    """The function is always in a transaction, but not in the transaction of the settle."""
    pay(connection, n)
    execute(connection, "ROLLBACK AND CHAIN" if isinstance(connection, psycopg.Connection) else "ROLLBACK")


def committed(connection: Any, n: int) -> None:
    pay(connection, n)
    execute(connection, "COMMIT")


def begun(connection: Any, n: int) -> None:
    pay(connection, n)
    execute(
        connection, "BEGIN IMMEDIATE" if isinstance(connection, apsw.Connection) else "BEGIN; COMMIT; BEGIN"
    )


def closed(connection: Any, n: int) -> None:
    pay(connection, n)
    connection.close()


def raised(connection: Any, n: int) -> None:
    pay(connection, n)
    raise ValueError("no")


def hidden(connection: Any, n: int) -> None:
    """The error of a statement is swallowed and nothing was written."""
    try:
        execute(connection, "INSERT INTO nowhere VALUES (1)")
    except (apsw.Error, psycopg.Error):
        if isinstance(connection, apsw.Connection):
            raise


def dangling(connection: Any, n: int) -> None:
    """COMMIT would fail."""
    execute(connection, "INSERT INTO paid (n, account) VALUES (?, 7)", n)


WAYS: dict[str, Callable[[Any, int], None]] = {
    each.__name__: each for each in (raised, rolled_back, chained, committed, begun, closed, hidden, dangling)
}


@pytest.mark.parametrize("how", WAYS)
def test_a_function_that_fails_fails_alone(app: App, how: str) -> None:
    @app.task(max_attempts=1)
    async def work(n: int) -> None:
        current().commit(lambda db: WAYS[how](db, n) if n % 20 == 7 else pay(db, n))

    handles = work.enqueue_many([work.of(n) for n in range(100)])
    app.run(burst=True, concurrency=8)
    states = [handle.status().state for handle in handles]
    assert [n for n, state in enumerate(states) if state is not State.DONE] == [7, 27, 47, 67, 87]
    assert [n for (n,) in ask(app, "SELECT n FROM paid ORDER BY n")] == [n for n in range(100) if n % 20 != 7]
    assert handles[7].status().error


def test_functions_share_transactions_and_are_called_once(app: App) -> None:
    calls: Counter[int] = Counter()
    transactions: set[Any] = set()

    @app.task
    async def work(n: int) -> None:
        def function(db: Any) -> None:
            calls[n] += 1
            if isinstance(db, psycopg.Connection):
                transactions.update(db.execute("SELECT txid_current()").fetchall())
            else:
                transactions.add(app.engine.committer._batches)
            pay(db, n)

        current().commit(function)

    handles = work.enqueue_many([work.of(n) for n in range(300)])
    app.run(burst=True, concurrency=16)
    assert {handle.status().state for handle in handles} == {State.DONE}
    assert set(calls.values()) == {1}
    assert len(calls) == 300
    assert len(transactions) <= 100
    assert ask(app, "SELECT count(*) FROM paid") == [(300,)]


def held(app: App, count: int) -> list[commands.Settle]:
    """Claimed jobs, as settles that lack their function."""
    ids = [app.queue("q").put("x") for _ in range(count)]
    answer = app.engine.call(commands.Claim(owner="me", wants=(Want("q", count),), lease=60_000_000))
    assert isinstance(answer, Claimed)
    assert [claim.id for claim in answer.claims] == ids
    return [commands.Settle(claim.id, claim.fence, Done()) for claim in answer.claims]


def with_function(settle: commands.Settle, function: Callable[[Any], object], **more: Any) -> commands.Settle:
    return commands.Settle(settle.id, settle.fence, settle.outcome, within=function, **more)


def test_a_settle_that_is_refused_after_its_function_is_undone_alone(app: App) -> None:
    first, second, third = held(app, 3)
    conflict = (commands.Note(key="k", value=b"", expect=9),)
    answers = app.ledger.apply(
        [
            with_function(first, lambda db: pay(db, 1)),
            with_function(second, lambda db: pay(db, 2), notes=conflict),
            with_function(third, lambda db: pay(db, 3)),
        ]
    )
    assert [isinstance(answer, TowpathError) for answer in answers] == [False, True, False]
    assert ask(app, "SELECT n FROM paid ORDER BY n") == [(1,), (3,)]


def test_progress_before_a_settle_stays_before_it(app: App) -> None:
    first, second, third = held(app, 3)
    batch: list[commands.Command] = [
        commands.Progress(first.id, first.fence, 1, 2),
        with_function(first, lambda db: pay(db, 1)),
        second,
        commands.Progress(third.id, third.fence, 2, 2),
        with_function(third, lambda db: pay(db, 3)),
    ]
    answers = app.ledger.apply(batch)
    assert [type(answer).__name__ for answer in answers] == [
        "Progressed",
        "Settled",
        "Settled",
        "Progressed",
        "Settled",
    ]
    assert ask(app, "SELECT n FROM paid ORDER BY n") == [(1,), (3,)]


def test_functions_that_wait_for_each_other_in_a_circle(postgres_url: str) -> None:
    """Two processes, each with two functions in one transaction that lock the same rows in opposite order."""
    with App(postgres_url) as app:
        ask(app, ACCOUNTS)
        ask(app, "INSERT INTO account VALUES (1, 0), (2, 0)")
        settles = held(app, 4)
        meet = threading.Barrier(2, timeout=1)

        def adding(account: int, waits: bool) -> Callable[[Any], object]:
            def add(db: Any) -> None:
                db.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (account,))
                if waits:
                    try:
                        meet.wait()
                    except threading.BrokenBarrierError:
                        return

            return add

        batches = [
            [with_function(settles[0], adding(1, True)), with_function(settles[1], adding(2, False))],
            [with_function(settles[2], adding(2, True)), with_function(settles[3], adding(1, False))],
        ]
        answers: list[Any] = []

        def apply(batch: list[commands.Settle]) -> None:
            with closing(PostgresLedger(postgres_url)) as ledger:
                answers.extend(ledger.apply(batch))

        threads = [threading.Thread(target=apply, args=(batch,)) for batch in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [answer.state for answer in answers] == [State.DONE] * 4
        assert ask(app, "SELECT balance FROM account") == [(2,), (2,)]
        assert app.ledger.check() == []


def test_a_function_that_always_loses_the_connection_fails_alone(postgres_url: str) -> None:
    with App(postgres_url) as app:
        ask(app, ACCOUNTS)
        ask(app, TABLE)
        ask(app, "INSERT INTO account VALUES (1, 0)")
        first, second, third = held(app, 3)

        def fatal(db: Any) -> None:
            db.execute("SELECT pg_terminate_backend(pg_backend_pid())")

        batch = [with_function(first, lambda db: pay(db, 1)), with_function(second, fatal)]
        answers = app.ledger.apply([*batch, with_function(third, lambda db: pay(db, 3))])
        assert isinstance(answers[1], UserFunctionFailed)
        assert "the connection was lost twice while it ran" in str(answers[1])
        assert ask(app, "SELECT n FROM paid ORDER BY n") == [(1,), (3,)]


def test_slow_functions_have_smaller_transactions() -> None:
    pace = FunctionBatchSize(50)
    assert pace.size == FIRST
    for _ in range(5):
        pace.took(pace.size, pace.size * 0.0001)
    assert pace.size == 50
    pace.took(50, 5.0)
    assert pace.size == 1
    pace.took(1, 0.001)
    assert pace.size == 2, "it grows by steps: the next one may be slow again"
    settles = [commands.Settle(str(n), 1, Done(), within=print if n % 2 else None) for n in range(7)]
    sliced = [[each.id for each in part if isinstance(each, commands.Settle)] for part in slices(settles, 2)]
    assert sliced == [["0", "1", "2", "3", "4"], ["5", "6"]]
