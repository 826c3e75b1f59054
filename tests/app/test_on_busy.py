"""Enqueueing on a user's connection beside a busy worker: it waits like every other writer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from towpath import App
from towpath.errors import LedgerBusy, StaleTransaction
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing.suite.harness import Harness, spec

EACH = 75
"""Transactions of each pattern; there are four."""

WORKER = """
import sys
from towpath import App, current
from towpath.events import WorkerStarted

app = App(sys.argv[1])

@app.task(name="ship")
async def ship(order: int) -> int:
    return order

@app.task(name="load", queue="load")
async def load(n: int) -> None:
    # One writes the next: the worker commits without a break.
    current().spawn(load.of(n))

app.bus.subscribe(WorkerStarted, lambda event: print("ready", flush=True))
app.run(queues=("default", "load"), concurrency=32)
"""


def test_every_pattern_of_the_docs_beside_a_busy_worker(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with App(url) as app:

        @app.task(name="ship")
        async def ship(order: int) -> int:
            raise NotImplementedError

        load = app.task(name="load", queue="load")(lambda n: None)
        load.enqueue_many([load.of(n) for n in range(200)])
        with closing(apsw.Connection(str(tmp_path / "shop.db"))) as mine:
            mine.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")

            def insert(n: int) -> None:
                mine.execute("INSERT INTO orders VALUES (?)", (n,))

            def batch(n: int) -> None:
                with app.batch(on=mine):
                    insert(n)
                    ship.enqueue(n)

            def enqueue_first(n: int) -> None:
                with mine:
                    ship.options(on=mine).enqueue(n)
                    insert(n)

            def alone(n: int) -> None:
                ship.options(on=mine).enqueue(n)

            def immediate(n: int) -> None:
                mine.execute("BEGIN IMMEDIATE")
                insert(n)
                ship.options(on=mine).enqueue(n)
                mine.execute("COMMIT")

            patterns: list[Callable[[int], None]] = [batch, enqueue_first, alone, immediate]
            with subprocess.Popen(
                [sys.executable, "-c", WORKER, url], stdout=subprocess.PIPE, text=True
            ) as worker:
                try:
                    assert worker.stdout is not None
                    assert worker.stdout.readline() == "ready\n"
                    for each, pattern in enumerate(patterns):
                        # Only the last one has a first statement of the user's that must wait.
                        mine.set_busy_timeout(10_000 if pattern is immediate else 0)
                        for n in range(each * EACH, (each + 1) * EACH):
                            pattern(n)
                finally:
                    worker.terminate()
            assert mine.execute("SELECT count(*) FROM orders").get == 3 * EACH
            counts = app.ledger.queues()["default"].counts
            assert counts.done + counts.ready + counts.running == 4 * EACH
            assert app.ledger.check() == []


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(tmp_path / "a.db", SqliteOptions(busy_timeout=1.5))) as ledger:
        yield ledger
        assert ledger.integrity() == []


@pytest.fixture
def mine(ledger: SqliteLedger) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(ledger.path))) as connection:
        yield connection


@pytest.mark.parametrize("begin", ["", "BEGIN"])
def test_it_waits_for_the_busy_timeout_of_the_ledger_and_names_the_time(
    ledger: SqliteLedger, mine: apsw.Connection, begin: str
) -> None:
    with closing(apsw.Connection(str(ledger.path))) as other:
        other.execute("BEGIN IMMEDIATE")
        if begin:
            mine.execute(begin)
        began = time.monotonic()
        with pytest.raises(LedgerBusy) as caught:
            ledger.append_on(mine, [spec("a")])
        assert time.monotonic() - began >= 1.5
        assert 1.5 <= caught.value.details["seconds"] <= time.monotonic() - began + 0.1
        assert mine.in_transaction == bool(begin)


@pytest.mark.parametrize("begin", ["", "BEGIN"])
def test_it_goes_on_when_the_lock_is_free(ledger: SqliteLedger, mine: apsw.Connection, begin: str) -> None:
    with closing(apsw.Connection(str(ledger.path))) as other:
        other.execute("BEGIN IMMEDIATE")
        waits = threading.Thread(
            target=lambda: (begin and mine.execute(begin), ledger.append_on(mine, [spec("a")]))
        )
        waits.start()
        waits.join(0.1)
        assert waits.is_alive()
        other.execute("COMMIT")
        waits.join(30)
        if begin:
            mine.execute("COMMIT")
    assert Harness(ledger).at("a") == "ready"


def test_the_users_busy_handler_stays(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    asked: list[int] = []

    def handler(count: int) -> bool:
        asked.append(count)
        return False

    mine.set_busy_handler(handler)
    ledger.append_on(mine, [spec("a")])
    with closing(apsw.Connection(str(ledger.path))) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(apsw.BusyError):
            mine.execute("BEGIN IMMEDIATE")
    assert asked == [0]


def test_a_transaction_that_has_read_is_refused_at_once_with_the_way_out(
    ledger: SqliteLedger, mine: apsw.Connection
) -> None:
    mine.execute("BEGIN")
    assert mine.execute("SELECT count(*) FROM towpath_job").get == 0
    Harness(ledger).add("meanwhile")
    began = time.monotonic()
    with pytest.raises(StaleTransaction, match="BEGIN IMMEDIATE"):
        ledger.append_on(mine, [spec("a")])
    assert time.monotonic() - began < 1.5
    mine.execute("ROLLBACK")
    ledger.append_on(mine, [spec("a")])


def test_a_batch_is_the_transaction_if_none_is_open(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        ship = app.task(name="ship")(lambda order: order)
        app.ledger.queues()
        with closing(apsw.Connection(str(tmp_path / "shop.db"))) as mine:
            mine.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")

            def fail() -> None:
                with app.batch(on=mine):
                    mine.execute("INSERT INTO orders VALUES (1)")
                    ship.enqueue(1 // 0)

            with pytest.raises(ZeroDivisionError):
                fail()
            assert not mine.in_transaction
            assert mine.execute("SELECT count(*) FROM orders").get == 0
            with app.batch(on=mine):
                mine.execute("INSERT INTO orders VALUES (2)")
                ship.enqueue(2)
            assert not mine.in_transaction
            mine.execute("BEGIN")
            with app.batch(on=mine):
                ship.enqueue(3)
            assert mine.in_transaction, "it is the user's to commit"
            mine.execute("ROLLBACK")
            assert mine.execute("SELECT id FROM orders").get == 2
        assert app.ledger.queues()["default"].counts.ready == 1
