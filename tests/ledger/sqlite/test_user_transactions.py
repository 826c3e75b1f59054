"""Appending inside the user's own transaction."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import apsw
import pytest

from towpath.core.commands import Placed, Settle, Upkeep
from towpath.core.job import Done
from towpath.errors import LedgerBusy, NestedCall, NewerSchema, UnknownDependency, WrongConnection
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock
from towpath.testing.suite.harness import Harness, replace, spec

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def ledger(path: Path, clock: ManualClock) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path, SqliteOptions(busy_timeout=0.2), clock)) as ledger:
        yield ledger
        assert ledger.integrity() == []


@pytest.fixture
def mine(ledger: SqliteLedger, path: Path) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE mine (a)")
        yield connection


def add_row(mine: apsw.Connection) -> None:
    mine.execute("INSERT INTO mine VALUES (1)")


def mine_rows(mine: apsw.Connection) -> Any:
    return mine.execute("SELECT count(*) FROM mine").get


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE", "BEGIN", "SAVEPOINT s"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_it_commits_and_rolls_back_with_the_users_data(
    ledger: SqliteLedger, mine: apsw.Connection, begin: str, end: str
) -> None:
    mine.execute(begin)
    assert ledger.append_on(mine, [spec("a"), spec("b", after=("a",))]) == (Placed("a", 1), Placed("b", 2))
    add_row(mine)
    assert ledger.append_on(mine, [spec("c")]) == (Placed("c", 3),)
    assert ledger.get("a") is None
    assert mine.in_transaction
    mine.execute(end)
    kept = end == "COMMIT"
    assert mine_rows(mine) == kept
    assert [ledger.get(id) is not None for id in "abc"] == [kept] * 3
    assert ledger.check() == []
    assert Harness(ledger).append(spec("next"))[0].seq == (4 if kept else 1)


def test_nothing_is_read_before_the_lock_is_held(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    """A deferred transaction that has read nothing has no snapshot that could be stale."""
    taken = []
    harness = Harness(ledger)

    def between(statement: str) -> None:
        taken.append(statement)
        if statement == "UPDATE towpath_meta SET last = last":
            harness.add("between")

    mine.execute("BEGIN")
    mine.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: between(event["sql"]))
    ledger.append_on(mine, [spec("a")])
    mine.trace_v2(0, None)
    mine.execute("COMMIT")
    assert [statement for statement in taken if "towpath" in statement][:2] == [
        "SAVEPOINT towpath_append",
        "UPDATE towpath_meta SET last = last",
    ]
    assert harness.found() == ["between", "a"]


def test_a_stale_snapshot_is_busy_with_advice(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    mine.execute("BEGIN")
    assert mine_rows(mine) == 0
    Harness(ledger).add("meanwhile")
    with pytest.raises(LedgerBusy, match="begin your transaction with BEGIN IMMEDIATE"):
        ledger.append_on(mine, [spec("a")])
    assert mine.in_transaction
    assert mine_rows(mine) == 0
    mine.execute("ROLLBACK; BEGIN IMMEDIATE")
    ledger.append_on(mine, [spec("a")])
    mine.execute("COMMIT")
    assert Harness(ledger).found() == ["meanwhile", "a"]


def test_without_a_transaction_it_makes_its_own(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    assert ledger.append_on(mine, [spec("a")]) == (Placed("a", 1),)
    assert not mine.in_transaction
    assert Harness(ledger).at("a") == "ready"


@pytest.mark.parametrize("begin", ["", "BEGIN", "BEGIN IMMEDIATE"])
def test_a_refusal_undoes_the_append_only(ledger: SqliteLedger, mine: apsw.Connection, begin: str) -> None:
    mine.execute(begin or "SELECT 1")
    add_row(mine)
    with pytest.raises(UnknownDependency):
        ledger.append_on(mine, [spec("a"), spec("b", after=("nobody",))])
    assert mine.in_transaction == bool(begin)
    ledger.append_on(mine, [spec("c")])
    add_row(mine)
    if begin:
        mine.execute("COMMIT")
    assert mine_rows(mine) == 2
    assert [(job.id, job.seq) for job in ledger.dump()["jobs"]] == [("c", 1)]


def test_keys_and_groups_work_on_it_too(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    harness = Harness(ledger)
    harness.open("g")
    harness.add("old", key=replace("k"))
    ledger.append_on(mine, [spec("new", key=replace("k"), group="g", part="p")], now=harness.now)
    assert harness.at("old", "new") == "canceled/superseded blocked"
    harness.seal("g")
    assert [claim.id for claim in harness.claim()] == ["new"]


def test_the_users_traces_are_kept_out_and_put_back(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    seen: list[str] = []

    def row_trace(cursor: apsw.Cursor, row: tuple[Any, ...]) -> Any:
        return dict(zip((name for name, _ in cursor.get_description()), row, strict=True))

    def exec_trace(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        seen.append(sql)
        return True

    mine.row_trace, mine.exec_trace = row_trace, exec_trace
    ledger.append_on(mine, [spec("a")])
    with pytest.raises(UnknownDependency):
        ledger.append_on(mine, [spec("b", after=("nobody",))])
    assert seen == []
    with locked(ledger.path), pytest.raises(LedgerBusy):
        ledger.append_on(mine, [spec("c")])
    with locked(ledger.path), mine, pytest.raises(LedgerBusy):
        ledger.append_on(mine, [spec("c")])
    assert (mine.row_trace, mine.exec_trace) == (row_trace, exec_trace)
    assert list(mine.execute("SELECT 1 AS one")) == [{"one": 1}]


class locked:  # noqa: N801
    """Another connection holds the write lock."""

    def __init__(self, path: Path) -> None:
        self._connection = apsw.Connection(str(path))

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def test_the_standard_modules_connection_is_refused(ledger: SqliteLedger) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(
            WrongConnection, match=r"second SQLite library.*Open the file with apsw\.Connection"
        ):
            ledger.append_on(connection, [spec("a")])  # type: ignore[arg-type]
    with pytest.raises(WrongConnection, match=r"expected an apsw\.Connection, not str"):
        ledger.append_on("a.db", [spec("a")])  # type: ignore[arg-type]


def test_a_connection_to_another_file_is_refused(
    ledger: SqliteLedger, tmp_path: Path, clock: ManualClock
) -> None:
    with closing(SqliteLedger(tmp_path / "other.db", SqliteOptions(), clock)) as other:
        for name in ("other.db", "plain.db", ":memory:", ""):
            with closing(
                apsw.Connection(str(tmp_path / name) if name.endswith(".db") else name)
            ) as connection:
                with pytest.raises(WrongConnection, match="not to the ledger's file"):
                    ledger.append_on(connection, [spec("a")])
        assert Harness(other).found() == []
    assert Harness(ledger).found() == []


def test_a_connection_by_another_name_of_the_file_is_not(
    ledger: SqliteLedger, mine: apsw.Connection, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(ledger.path)
    with closing(apsw.Connection(str(tmp_path / "link.db"))) as connection:
        ledger.append_on(connection, [spec("a")])
    with closing(
        apsw.Connection(f"file:{ledger.path}?cache=private", flags=apsw.SQLITE_OPEN_URI | 2)
    ) as connection:
        ledger.append_on(connection, [spec("b")])
    assert Harness(ledger).found() == ["a", "b"]


def test_a_newer_schema_is_not_written(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    mine.execute("UPDATE towpath_meta SET schema = 99, min_schema = 98")
    with pytest.raises(NewerSchema, match="has schema 99, which needs at least version 98"):
        ledger.append_on(mine, [spec("a")])
    assert not mine.in_transaction
    assert mine.execute("SELECT count(*) FROM towpath_job").get == 0


def test_the_ledgers_own_connection_is_not_the_users(ledger: SqliteLedger) -> None:
    kept: list[apsw.Connection] = []
    harness = Harness(ledger)
    held = harness.started("a")
    harness.ask(Settle("a", held.fence, Done(), within=kept.append))
    with pytest.raises(NestedCall):
        ledger.append_on(kept[0], [spec("b")])


def _wait(path: Path, pipe: Connection) -> None:
    with closing(SqliteLedger(path)) as ledger:
        seen = ledger.version()
        pipe.send("waiting")
        changed = ledger.wait(seen, 30.0) != seen
        pipe.send((changed, time.monotonic(), ledger.get("a") is not None))


def test_other_processes_notice_after_the_commit(
    ledger: SqliteLedger, mine: apsw.Connection, path: Path
) -> None:
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=_wait, args=(path, theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == "waiting"
    mine.execute("BEGIN IMMEDIATE")
    ledger.append_on(mine, [spec("a")])
    assert not ours.poll(0.6)
    mine.execute("COMMIT")
    committed = time.monotonic()
    assert ours.poll(60)
    changed, woke, there = ours.recv()
    child.join(60)
    assert (changed, there) == (True, True)
    assert woke - committed < 1


def test_threads_of_this_process_notice_too(ledger: SqliteLedger, mine: apsw.Connection) -> None:
    ledger.apply([Upkeep()])
    seen, woke = ledger.version(), list[float]()

    def wait() -> None:
        ledger.wait(seen, 30.0)
        woke.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    ledger.append_on(mine, [spec("a")])
    committed = time.monotonic()
    waiter.join(60)
    assert woke[0] - committed < 1
