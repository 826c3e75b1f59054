"""The psycopg connection under SQLAlchemy and Django: found without importing them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from towpath.core.commands import Upkeep
from towpath.errors import WrongConnection
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.testing.suite.harness import spec, unique


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE mine (a int)")
    yield ledger
    assert ledger.check() == []
    ledger.close()


def there(ledger: PostgresLedger) -> list[str]:
    ledger.apply([Upkeep()])
    return sorted(job.id for job in ledger.dump()["jobs"])


class Wrapper:
    """An object with a connection, as an attribute or returned by a method."""

    def __init__(self, **inside: Any) -> None:
        vars(self).update(inside)


def test_wrappers_are_known_by_what_they_offer(ledger: PostgresLedger, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as mine:
        fairy = Wrapper(driver_connection=mine)
        session = Wrapper(connection=lambda: Wrapper(connection=fairy))
        for n, wrapper in enumerate((fairy, session, Wrapper(connection=mine))):
            ledger.append_on(wrapper, [spec(f"j{n}")])
    assert there(ledger) == ["j0", "j1", "j2"]
    with pytest.raises(WrongConnection, match="other drivers"):
        ledger.append_on(Wrapper(connection=lambda: Wrapper(driver_connection=object())), [spec("x")])


def test_sessions_and_connections(ledger: PostgresLedger, postgres_url: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    insert = sqlalchemy.text("INSERT INTO mine VALUES (1)")
    with orm.Session(engine) as session:
        session.execute(insert)
        ledger.append_on(session, [spec("a")])
        ledger.append_on(session, [spec("b", key=unique("k"))])
        assert there(ledger) == []
        session.commit()
        ledger.append_on(session, [spec("not")])
        session.rollback()
    with orm.Session(engine) as session, session.begin():
        ledger.append_on(session, [spec("c")])
    with engine.connect() as connection:
        # No statement was executed on it yet, so its commit would do nothing.
        ledger.append_on(connection, [spec("d")])
        connection.commit()
        ledger.append_on(connection, [spec("not")])
        connection.rollback()
    with engine.begin() as connection:
        ledger.append_on(connection, [spec("e")])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        ledger.append_on(connection, [spec("f")])
    raw = engine.raw_connection()
    ledger.append_on(raw, [spec("g")])
    raw.commit()
    raw.close()
    engine.dispose()
    assert there(ledger) == ["a", "b", "c", "d", "e", "f", "g"]


def test_async_sessions_and_connections(ledger: PostgresLedger, postgres_url: str) -> None:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("greenlet")
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")

    async def go() -> None:
        engine = aio.create_async_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
        async with aio.AsyncSession(engine) as session:
            await ledger.aappend_on(session, [spec("a")])
            await session.commit()
            await ledger.aappend_on(session, [spec("not")])
            await session.rollback()
        async with engine.connect() as connection:
            await ledger.aappend_on(connection, [spec("b", key=unique("k"))])
            await connection.commit()
        async with engine.begin() as connection:
            await ledger.aappend_on(connection, [spec("c")])
        await engine.dispose()

    asyncio.run(go())
    assert there(ledger) == ["a", "b", "c"]
