"""Enqueue in a transaction of the user's: `task.options(on=connection)`, `app.batch(on=connection)`,
`queue.put(..., on=connection)`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from towpath import App
from towpath.errors import InvalidInput, Unsupported, WrongConnection

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


def connect(app: App) -> Any:
    return (
        apsw.Connection(app.engine.url.removeprefix("sqlite:///"))
        if app.engine.url.startswith("sqlite")
        else psycopg.connect(app.engine.url)
    )


@pytest.mark.parametrize("kept", [True, False])
def test_everything_in_one_transaction(app: App, kept: bool) -> None:
    @app.task
    def ship(order: int) -> int:
        return order

    app.ledger.queues()
    with closing(connect(app)) as mine:
        mine.execute("BEGIN") if app.engine.url.startswith("sqlite") else None
        mine.execute("CREATE TABLE orders (id INTEGER)")
        one = ship.options(on=mine, delay=0).enqueue(1)
        two = ship.options(on=mine, after=one).enqueue(2)
        many = ship.options(on=mine).enqueue_many([ship.of(3), ship.of(4)])
        with app.batch(on=mine) as batch:
            five = ship.enqueue(5)
            six = batch.add(ship.options(key="six").of(6))
        message = app.queue("inbox").put({"n": 7}, on=mine)
        messages = app.queue("inbox").put_many([8, 9], on=mine)
        assert app.queue("default").stats().counts.waiting == 0
        mine.execute("COMMIT" if kept else "ROLLBACK")
    app.run(burst=True)
    ids = [one.id, two.id, *(each.id for each in many), five.id, six.id, message, *messages]
    assert [app.ledger.get(id) is not None for id in ids] == [kept] * 9
    if kept:
        assert [each.result(0) for each in (one, two, *many, five, six)] == [1, 2, 3, 4, 5, 6]
        assert app.queue("inbox").stats().counts.ready == 3


def test_a_batch_that_raises_leaves_the_transaction_alone(app: App) -> None:
    @app.task
    def ship(order: int) -> None: ...

    app.ledger.queues()
    with closing(connect(app)) as mine:
        mine.execute("BEGIN") if app.engine.url.startswith("sqlite") else None
        with pytest.raises(ZeroDivisionError), app.batch(on=mine):
            ship.enqueue(1 // 0)
        ship.options(on=mine).enqueue(2)
        mine.execute("COMMIT")
    assert app.queue("default").stats().counts.ready == 1


def test_on_overrides_the_open_batch(app: App) -> None:
    @app.task
    def ship(order: int) -> None: ...

    app.ledger.queues()
    with closing(connect(app)) as mine:
        mine.execute("BEGIN") if app.engine.url.startswith("sqlite") else None
        with app.batch():
            ship.options(on=mine).enqueue(1)
        mine.execute("ROLLBACK")
    assert app.queue("default").stats().counts.waiting == 0


def test_a_call_alone_is_not_written_down(app: App) -> None:
    @app.task
    def ship(order: int) -> None: ...

    with pytest.raises(InvalidInput, match=r"takes no connection: .*app\.batch\(on="):
        ship.options(on=object()).of(1)


def test_a_connection_that_is_none(app: App) -> None:
    @app.task
    def ship(order: int) -> None: ...

    for enqueue in (lambda: ship.options(on="here").enqueue(1), lambda: app.queue("q").put(1, on="here")):
        with pytest.raises(WrongConnection, match="expected a"):
            enqueue()


def test_the_memory_ledger_has_no_transactions() -> None:
    with App("memory://") as app:

        @app.task
        def ship(order: int) -> None: ...

        async def go() -> None:
            await ship.options(on=object()).aenqueue(1)

        with pytest.raises(Unsupported, match="needs a ledger on SQLite or PostgreSQL"):
            ship.options(on=object()).enqueue(1)
        with pytest.raises(Unsupported):
            asyncio.run(go())


def test_coroutines_on_postgresql(postgres_url: str) -> None:
    with App(postgres_url) as app:

        @app.task
        async def ship(order: int) -> int:
            return order

        async def go() -> list[Any]:
            async with await psycopg.AsyncConnection.connect(app.engine.url) as mine:
                one = await ship.options(on=mine).aenqueue(1)
                more = await ship.options(on=mine).aenqueue_many([ship.of(2)])
                async with app.batch(on=mine):
                    three = await ship.options(after=one).aenqueue(3)
                await app.queue("inbox").aput(4, on=mine)
                await app.queue("inbox").aput_many([5], on=mine)
                assert app.queue("inbox").stats().counts.ready == 0
            await app.arun(burst=True)
            return [await each.aresult(0) for each in (one, *more, three)]

        assert asyncio.run(go()) == [1, 2, 3]
        assert app.queue("inbox").stats().counts.ready == 2


def test_coroutines_on_sqlite(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path / 'a.db'}") as app:

        @app.task
        async def ship(order: int) -> None: ...

        app.ledger.queues()

        async def go() -> None:
            with closing(apsw.Connection(str(tmp_path / "a.db"))) as mine, mine:
                await ship.options(on=mine).aenqueue(1)

        asyncio.run(go())
        assert app.queue("default").stats().counts.ready == 1
