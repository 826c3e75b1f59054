"""Append in the user's own transaction: committed or rolled back with the user's rows, and it blocks no
process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.numeric import IntLoader
from psycopg.types.string import StrBinaryDumper, TextLoader

from tests.support.waiting import until
from towpath.core.commands import Append, Placed, Settle, Upkeep
from towpath.core.job import Done
from towpath.errors import (
    DependencyCycle,
    GroupClosed,
    InvalidInput,
    LedgerClosed,
    NestedCall,
    NewerSchema,
    QueueFull,
    UnknownDependency,
    UnknownGroup,
    WrongConnection,
)
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.testing import ManualClock
from towpath.testing.postgres import Server
from towpath.testing.suite.harness import Harness, replace, serial, spec, unique, whole_group

Mine = psycopg.Connection[Any]


@pytest.fixture
def ledger(postgres_url: str, clock: ManualClock) -> Iterator[PostgresLedger]:
    with closing(PostgresLedger(postgres_url, PostgresOptions(), clock)) as ledger:
        yield ledger
        assert ledger.check() == []


@pytest.fixture
def harness(ledger: PostgresLedger) -> Harness:
    return Harness(ledger)


@pytest.fixture
def mine(ledger: PostgresLedger, postgres_url: str) -> Iterator[Mine]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE mine (a int)")
    with closing(psycopg.connect(postgres_url)) as connection:
        yield connection


def add_row(mine: Mine) -> None:
    mine.execute("INSERT INTO mine VALUES (1)")


def rows(mine: Mine) -> int:
    (count,) = mine.execute("SELECT count(*) FROM mine").fetchone() or (0,)
    return int(count)


LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kept", [True, False])
def test_it_commits_and_rolls_back_with_the_users_rows(
    harness: Harness, mine: Mine, level: str, kept: bool
) -> None:
    ledger = harness.ledger
    assert isinstance(ledger, PostgresLedger)
    mine.execute(sql.SQL("SET TRANSACTION ISOLATION LEVEL {}").format(sql.SQL(level)))
    assert (
        ledger.append_on(mine, [spec("a", payload=b"1", headers={"h": "ü"}), spec("p", part="x")])[0].id
        == "a"
    )
    add_row(mine)
    assert ledger.append_on(mine, [spec("b", after=("a",)), spec("c", key=unique("k"))]) == (
        Placed("b", 0),
        Placed("c", 0),
    )
    ledger.append_on(mine, [spec("d", after=("b",), delay=5)])
    assert ledger.get("a") is None
    (mine.commit if kept else mine.rollback)()
    assert rows(mine) == kept
    harness.ask(Upkeep())
    assert [ledger.get(id) is not None for id in "apbcd"] == [kept] * 5
    if kept:
        assert harness.at("a", "p", "b", "c", "d") == "ready ready blocked ready blocked"
        assert (harness.job("a").payload, harness.job("a").headers) == (b"1", {"h": "ü"})
        assert harness.counts().ready == 3
        assert harness.part("x").ready == 1


def test_many_at_once(harness: Harness, ledger: PostgresLedger, mine: Mine) -> None:
    placed = ledger.append_on(
        mine, [spec(f"j{n}", payload=b"%d" % n, part=f"p{n % 3}" if n % 2 else None) for n in range(500)]
    )
    mine.commit()
    assert [each.seq for each in placed] == list(range(placed[0].seq, placed[0].seq + 500))
    assert harness.counts().ready == 500
    assert harness.job("j499").payload == b"499"
    assert len(harness.claim(n=1000)) == 500


@pytest.mark.parametrize("autocommit", [True, False])
def test_without_a_transaction(
    harness: Harness, ledger: PostgresLedger, mine: Mine, autocommit: bool
) -> None:
    """With autocommit the append has a transaction of its own; otherwise it begins the user's transaction."""
    mine.autocommit = autocommit
    ledger.append_on(mine, [spec("a")])
    ledger.append_on(mine, [spec("b", after=("a",))])
    with pytest.raises(UnknownDependency):
        ledger.append_on(mine, [spec("c", after=("nobody",))])
    harness.ask(Upkeep())
    assert [ledger.get(id) is not None for id in "abc"] == [autocommit, autocommit, False]
    mine.commit()
    harness.ask(Upkeep())
    assert [ledger.get(id) is not None for id in "abc"] == [True, True, False]


def test_inside_blocks_of_the_driver(harness: Harness, ledger: PostgresLedger, mine: Mine) -> None:
    mine.autocommit = True
    with mine.transaction():
        ledger.append_on(mine, [spec("a")])
        with mine.transaction():
            ledger.append_on(mine, [spec("b")])
            raise psycopg.Rollback
    with mine.pipeline(), mine.transaction():
        ledger.append_on(mine, [spec("c")])
    assert harness.found() == ["a", "c"]
    assert harness.counts().ready == 2


REFUSED = [
    ([spec("x"), spec("y", after=("nobody",))], UnknownDependency),
    ([spec("y", after=(whole_group("nobody"),))], UnknownDependency),
    ([spec("x", group="nobody")], UnknownGroup),
    ([spec("x", group="closed")], GroupClosed),
    ([spec("x", after=("y",)), spec("y", after=("x",))], DependencyCycle),
    ([spec("x", "small"), spec("y", "small")], QueueFull),
    ([spec("x", "small", key=unique("k")), spec("y", "small")], QueueFull),
]


@pytest.mark.parametrize(("specs", "error"), REFUSED)
def test_what_is_plainly_wrong_is_refused_and_undone_alone(
    harness: Harness, ledger: PostgresLedger, mine: Mine, specs: list[Any], error: type[Exception]
) -> None:
    harness.open("closed")
    harness.seal("closed")
    harness.set_queue("small", capacity=2)
    harness.add("full", "small")
    add_row(mine)
    with pytest.raises(error):
        ledger.append_on(mine, specs)
    add_row(mine)
    ledger.append_on(mine, [spec("fine")])
    mine.commit()
    harness.ask(Upkeep())
    assert rows(mine) == 2
    assert harness.found() == ["full", "fine"]


def test_the_transaction_counts_what_it_has_put_into_a_full_queue_itself(
    ledger: PostgresLedger, harness: Harness, mine: Mine
) -> None:
    harness.set_queue("small", capacity=2)
    for id in "ab":
        ledger.append_on(mine, [spec(id, "small")])
    with pytest.raises(QueueFull):
        ledger.append_on(mine, [spec("c", "small")])
    mine.commit()
    assert harness.counts("small").ready == 2


def test_a_key_that_is_held_takes_no_room(ledger: PostgresLedger, harness: Harness, mine: Mine) -> None:
    harness.set_queue("small", capacity=1)
    harness.add("holder", "small", key=unique("k"))
    ledger.append_on(mine, [spec("a", "small", key=unique("k"))])
    mine.commit()
    harness.ask(Upkeep())
    assert harness.found() == ["holder"]


def test_a_repeated_append_is_the_same(ledger: PostgresLedger, harness: Harness, mine: Mine) -> None:
    (first,) = ledger.append_on(mine, [spec("a")])
    assert ledger.append_on(mine, [spec("a"), spec("b")])[0] == first
    with pytest.raises(InvalidInput, match=r"a.*used once"):
        ledger.append_on(mine, [spec("a"), spec("a")])
    mine.commit()
    assert ledger.append_on(mine, [spec("a")]) == (first,)
    ledger.append_on(mine, [spec("c", after=("a",))])
    ledger.append_on(mine, [spec("c", after=("a",)), spec("b", key=unique("late"))])
    assert ledger.append_on(mine, [spec("a"), spec("b")])[1].seq > first.seq
    mine.commit()
    harness.ask(Upkeep())
    assert ledger.append_on(mine, [spec("c", after=("a",))]) == (Placed("c", harness.job("c").seq),)
    mine.commit()
    assert harness.counts().ready == 2
    assert harness.counts().blocked == 1
    harness.done(harness.take())
    harness.purge("a")
    assert ledger.append_on(mine, [spec("a")]) == (first,)
    mine.commit()
    harness.ask(Upkeep())
    assert ledger.get("a") is None


def test_keys_groups_and_parts(ledger: PostgresLedger, harness: Harness, mine: Mine) -> None:
    harness.open("g")
    harness.add("old", key=replace("k"))
    ledger.append_on(
        mine, [spec("new", key=replace("k"), group="g", part="p"), spec("s", "other", key=serial("z"))]
    )
    ledger.append_on(mine, [spec("t", "other", key=serial("z"))])
    mine.commit()
    harness.ask(Upkeep())
    assert harness.at("old", "new") == "canceled/superseded blocked"
    harness.seal("g")
    assert [claim.id for claim in harness.claim()] == ["new"]
    assert len(harness.claim("other", n=5)) == 1


def test_the_next_batch_of_any_process_applies_it(
    ledger: PostgresLedger, harness: Harness, mine: Mine, postgres_url: str
) -> None:
    """Appended, and claimed in the same commit."""
    with closing(PostgresLedger(postgres_url, PostgresOptions(), ManualClock())) as other:
        ledger.append_on(mine, [spec("a", key=unique("k"))])
        assert Harness(other).claim() == []
        mine.commit()
        assert [claim.id for claim in Harness(other).claim()] == ["a"]


def test_two_transactions_with_one_key(
    harness: Harness, ledger: PostgresLedger, mine: Mine, postgres_url: str
) -> None:
    with closing(psycopg.connect(postgres_url)) as theirs:
        ledger.append_on(mine, [spec("a", key=unique("k"))])
        ledger.append_on(theirs, [spec("b", key=unique("k"))])
        ledger.append_on(theirs, [spec("after", after=("b",))])
        harness.add("c", key=unique("free"))
        theirs.commit()
        assert harness.at("c") == "ready"
        mine.commit()
        harness.ask(Upkeep())
    # In the order of their append, without the missing ones.
    assert [ledger.get(id) is not None for id in "ab"] == [True, False]
    assert harness.at("after") == "blocked"
    harness.done(next(claim for claim in harness.claim(n=2) if claim.id == "a"))
    assert harness.at("after") == "ready"


def test_what_is_refused_after_the_commit_is_a_dead_letter(
    harness: Harness, ledger: PostgresLedger, mine: Mine
) -> None:
    harness.open("g")
    ledger.append_on(mine, [spec("a", group="g", part="p", payload=b"x"), spec("b", key=unique("k"))])
    harness.seal("g")
    mine.commit()
    harness.ask(Upkeep())
    assert harness.at("a", "b") == "failed/fatal failed/fatal"
    assert harness.job("a").error == "group g is closed; only a running member may add to it after the seal"
    assert harness.job("a").payload == b"x"
    assert harness.counts().failed == 2
    harness.revive("a", "b")
    assert harness.at("a", "b") == "ready/revived ready/revived"


def test_a_full_queue_refuses_nothing_after_the_commit(
    harness: Harness, ledger: PostgresLedger, mine: Mine
) -> None:
    harness.set_queue(capacity=1)
    ledger.append_on(mine, [spec("a", key=unique("k"))])
    harness.add("b")
    mine.commit()
    harness.ask(Upkeep())
    assert harness.at("a", "b") == "ready ready"


def test_an_append_that_cannot_be_decoded_affects_no_other(
    ledger: PostgresLedger, harness: Harness, mine: Mine
) -> None:
    ledger.append_on(mine, [spec("a", key=unique("k"))])
    mine.execute("UPDATE towpath.inbox SET specs = 'nonsense'")
    ledger.append_on(mine, [spec("b", key=unique("l"))])
    mine.commit()
    harness.upkeep()
    harness.add("c")
    assert harness.found() == ["b", "c"]
    (found,) = ledger.check()
    assert found.startswith("append 1 of the inbox cannot be applied: DecodeError")
    mine.execute("DELETE FROM towpath.inbox")
    mine.commit()


def test_the_connections_settings_do_not_matter(
    harness: Harness, ledger: PostgresLedger, postgres_url: str
) -> None:
    class Odd(TextLoader):
        def load(self, data: Any) -> Any:
            raise AssertionError("the user's loader was asked")

    class OddNumbers(IntLoader):
        def load(self, data: Any) -> Any:
            raise AssertionError("the user's loader was asked")

    class OddDumper(StrBinaryDumper):
        def dump(self, obj: Any) -> Any:
            raise AssertionError("the user's dumper was asked")

    options = (
        "-c search_path=nowhere -c DateStyle=German -c client_encoding=latin1 -c"
        " standard_conforming_strings=off"
    )
    with closing(
        psycopg.connect(postgres_url, row_factory=dict_row, prepare_threshold=0, options=options)
    ) as mine:
        for kind in ("text", "int8", "int4", "json"):
            mine.adapters.register_loader(kind, Odd if kind == "text" else OddNumbers)
        for python in (str, bytes, int, list):
            mine.adapters.register_dumper(python, OddDumper)
        ledger.append_on(mine, [spec("a€", payload="€".encode(), headers={"a": "€"})])
        ledger.append_on(mine, [spec("b€", after=("a€",))])
        ledger.append_on(mine, [spec("a€")])
        mine.commit()
    harness.ask(Upkeep())
    assert harness.found() == ["a€", "b€"]
    assert harness.job("a€").payload == "€".encode()


def test_serializable_transactions_do_not_stop_each_other(
    ledger: PostgresLedger, harness: Harness, postgres_url: str
) -> None:
    harness.add("seen")
    connections = [psycopg.connect(postgres_url) for _ in range(3)]
    for connection in connections:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        connection.execute("SELECT 1")
    for turn in range(2):
        for n, connection in enumerate(connections):
            ledger.append_on(connection, [spec(f"j{turn}{n}")])
            ledger.append_on(connection, [spec(f"k{turn}{n}", after=("seen",))])
    for connection in connections:
        connection.commit()
        connection.close()
    harness.ask(Upkeep())
    assert len(harness.found()) == 13


def test_an_old_snapshot_does_not_hide_a_dependency(
    ledger: PostgresLedger, harness: Harness, mine: Mine
) -> None:
    mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    mine.execute("SELECT 1")
    harness.add("later")
    harness.open("late")
    ledger.append_on(mine, [spec("a", after=("later",), group="late")])
    mine.commit()
    harness.ask(Upkeep())
    assert harness.at("a") == "blocked"


def test_connections_that_are_not_right(
    ledger: PostgresLedger, postgres: Server, mine: Mine, postgres_url: str
) -> None:
    for wrong in ("a", None, threading.Lock()):
        with pytest.raises(WrongConnection, match=r"expected a psycopg\.Connection"):
            ledger.append_on(wrong, [spec("a")])
    other = postgres.create_database()
    with closing(psycopg.connect(other)) as empty:
        with pytest.raises(WrongConnection, match="without the ledger"):
            ledger.append_on(empty, [spec("a")])
        assert empty.execute("SELECT 1").fetchone() == (1,)
    with closing(PostgresLedger(other)), closing(psycopg.connect(other)) as foreign:
        with pytest.raises(WrongConnection, match="another server or database"):
            ledger.append_on(foreign, [spec("a")])
    postgres.drop_database(other)
    with pytest.raises(psycopg.Error):
        mine.execute("nonsense")
    with pytest.raises(WrongConnection, match="has failed"):
        ledger.append_on(mine, [spec("a")])
    mine.rollback()
    mine.read_only = True
    with pytest.raises(WrongConnection, match="read only"):
        ledger.append_on(mine, [spec("a")])
    mine.execute("SELECT 1")
    mine.rollback()
    mine.read_only = None
    mine.execute("CREATE ROLE stranger_to_ledgers")
    mine.execute("SET ROLE stranger_to_ledgers")
    with pytest.raises(WrongConnection, match="lacks rights"):
        ledger.append_on(mine, [spec("a")])
    mine.rollback()
    with pytest.raises(InvalidInput):
        ledger.append_on(mine, [])


def test_other_drivers_are_refused(ledger: PostgresLedger, postgres_url: str) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def go() -> None:
        connection = await asyncpg.connect(postgres_url)
        with pytest.raises(WrongConnection, match=r"not asyncpg\.connection\.Connection"):
            await ledger.aappend_on(connection, [spec("a")])
        await connection.close()

    asyncio.run(go())


def test_a_newer_schema_is_not_written(ledger: PostgresLedger, mine: Mine) -> None:
    mine.execute("UPDATE towpath.meta SET schema = 99, min_schema = 98")
    with pytest.raises(NewerSchema):
        ledger.append_on(mine, [spec("a")])
    assert mine.execute("SELECT count(*) FROM towpath.job").fetchone() == (0,)
    mine.rollback()


def test_not_inside_a_ledger_call_and_not_on_a_closed_ledger(
    harness: Harness, ledger: PostgresLedger, mine: Mine, postgres_url: str
) -> None:
    kept: list[Any] = []
    held = harness.started("a")

    def within(connection: Any) -> None:
        kept.append(connection)
        for each in (connection, mine):
            with pytest.raises(NestedCall):
                ledger.append_on(each, [spec("b")])

    harness.ask(Settle("a", held.fence, Done(), within=within))
    with pytest.raises(NestedCall):
        ledger.append_on(kept[0], [spec("b")])
    other = PostgresLedger(postgres_url)
    other.close()
    with pytest.raises(LedgerClosed):
        other.append_on(mine, [spec("b")])


def test_async_connections(harness: Harness, ledger: PostgresLedger, mine: Mine, postgres_url: str) -> None:
    async def go() -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as theirs:
            await theirs.execute("INSERT INTO mine VALUES (1)")
            (placed,) = await ledger.aappend_on(theirs, [spec("a")])
            assert placed.seq > 0
            await ledger.aappend_on(theirs, [spec("b", after=("a",), key=unique("k"))])
            with pytest.raises(UnknownDependency):
                await ledger.aappend_on(theirs, [spec("c", after=("nobody",))])
            with pytest.raises(WrongConnection, match="use aenqueue"):
                ledger.append_on(theirs, [spec("c")])
            assert harness.found() == []
        with pytest.raises(WrongConnection, match="block the event loop"):
            await ledger.aappend_on(mine, [spec("c")])
        async with await psycopg.AsyncConnection.connect(postgres_url) as theirs:
            await ledger.aappend_on(theirs, [spec("d")])
            await theirs.rollback()

    asyncio.run(go())
    harness.ask(Upkeep())
    assert harness.found() == ["a", "b"]
    assert rows(mine) == 1


def test_workers_hear_of_it_at_the_commit(ledger: PostgresLedger, mine: Mine, postgres_url: str) -> None:
    with closing(PostgresLedger(postgres_url)) as other:
        assert other.wait(-1, 0) is not None
        until(other.listens)
        ledger.append_on(mine, [spec("a")])
        seen = other.version()
        woken = threading.Event()

        def wait() -> None:
            other.wait(seen, 60)
            woken.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not woken.wait(0.2)
        mine.commit()
        assert woken.wait(4.0)  # a poll would come after five seconds
        waiter.join()


def test_append_after_commit_by_an_ordinary_batch_sees_it(
    harness: Harness, ledger: PostgresLedger, mine: Mine
) -> None:
    ledger.append_on(mine, [spec("a", key=unique("k"))])
    mine.commit()
    harness.ask(Append((spec("b", after=("a",)),)))
    assert harness.at("a", "b") == "ready blocked"
