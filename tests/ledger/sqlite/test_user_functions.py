"""Commit functions: the user's rows are committed with the settle, and a function cannot harm its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from towpath.core.commands import Append, Appended, Command, Note, Settle, Settled, Upkeep
from towpath.core.job import Done, State
from towpath.core.views import Query
from towpath.errors import DiskFull, NestedCall, UserFunctionFailed
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock
from towpath.testing.suite.harness import Harness, spec

Function = Callable[[apsw.Connection], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def ledger(path: Path, clock: ManualClock) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path, SqliteOptions(), clock)) as ledger:
        yield ledger
        assert ledger.integrity() == []


@pytest.fixture
def theirs(ledger: SqliteLedger, path: Path) -> Iterator[apsw.Connection]:
    """A connection of the user's, with a table."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE theirs (a UNIQUE, towpath_ref)")
        yield connection


@pytest.fixture
def harness(ledger: SqliteLedger, theirs: apsw.Connection) -> Harness:
    return Harness(ledger)


def rows(connection: apsw.Connection) -> list[Any]:
    return [a for (a,) in connection.execute("SELECT a FROM theirs ORDER BY a")]


def adding(*values: object) -> Function:
    def add(db: apsw.Connection) -> None:
        for value in values:
            db.execute("INSERT INTO theirs (a) VALUES (?)", (value,))

    return add


def executing(*statements: str) -> Function:
    def execute(db: apsw.Connection) -> None:
        for statement in statements:
            db.execute(statement).fetchall()

    return execute


def settle(harness: Harness, within: Function, id: str = "a") -> Command:
    """A job on lease, and a settle with children, notes and a function."""
    held = harness.started(id, f"queue-of-{id}")
    return Settle(
        held.id,
        held.fence,
        Done(b"r"),
        (spec(f"child-of-{id}"),),
        (Note(key=f"note-of-{id}", value=b"v"),),
        within,
    )


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


def test_rows_commit_with_the_settle(harness: Harness, theirs: apsw.Connection) -> None:
    def within(db: apsw.Connection) -> None:
        adding(1, 2)(db)
        assert rows(theirs) == []  # nothing is visible before the commit

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert rows(theirs) == [1, 2]
    assert harness.at("a", "child-of-a") == "done ready"


def test_a_function_that_raises_fails_its_settle_only(harness: Harness, theirs: apsw.Connection) -> None:
    def within(db: apsw.Connection) -> None:
        adding(1)(db)
        raise ValueError("no")

    assert failure(harness, within) == "ValueError: no"
    assert rows(theirs) == []


def test_functions_side_by_side(harness: Harness, theirs: apsw.Connection) -> None:
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


def test_the_function_is_not_called_for_a_lost_claim(harness: Harness, theirs: apsw.Connection) -> None:
    command = settle(harness, adding(1))
    harness.ask(command)
    assert harness.ask(command) == [Settled("a", State.DONE)]
    assert rows(theirs) == [1]


CONTROL = (
    "COMMIT",
    "END",
    "ROLLBACK",
    "BEGIN",
    "SAVEPOINT theirs",
    "SAVEPOINT towpath_within",
    "RELEASE towpath_within",
    "ROLLBACK TO towpath_within",
    "RELEASE towpath_command",
    "ATTACH ':memory:' AS more",
    "DETACH main",
    "PRAGMA journal_mode=DELETE",
    "PRAGMA user_version",
    "PRAGMA writable_schema=1",
)


@pytest.mark.parametrize("statement", CONTROL)
def test_the_transaction_is_not_the_functions(
    harness: Harness, theirs: apsw.Connection, statement: str
) -> None:
    assert failure(harness, executing("INSERT INTO theirs (a) VALUES (1)", statement)).startswith("AuthError")
    assert rows(theirs) == []


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "BEGIN IMMEDIATE", "SAVEPOINT towpath_within"])
def test_also_not_by_a_statement_in_the_cache(harness: Harness, statement: str) -> None:
    """The ledger itself has executed the same texts on this connection."""
    harness.ask(settle(harness, adding(1), "warm"))
    harness.ask(Upkeep())  # nothing is due: ends with ROLLBACK
    for id in ("a", "b"):  # the second time the cache has the statement of the function
        assert failure(harness, executing(statement), id).startswith("AuthError")


OURS = (
    "DELETE FROM towpath_job",
    "DELETE FROM TOWPATH_JOB",
    "UPDATE towpath_meta SET last = 0",
    "UPDATE main.towpath_queue SET ready = 7",
    "INSERT INTO towpath_note VALUES ('k', x'00', 1, 1, NULL)",
    "REPLACE INTO towpath_reply VALUES ('t', '{}', 1)",
    "DROP TABLE towpath_body",
    "DROP INDEX towpath_job_ready",
    "ALTER TABLE towpath_job ADD COLUMN more",
    "CREATE TABLE towpath_more (a)",
    "CREATE TRIGGER mine AFTER UPDATE ON towpath_job BEGIN SELECT 1; END",
    "CREATE TEMP TRIGGER mine AFTER UPDATE ON towpath_job BEGIN SELECT 1; END",
    "CREATE INDEX mine ON towpath_job (kind)",
    "WITH t AS (SELECT 1) UPDATE towpath_job SET priority = 1",
)


@pytest.mark.parametrize("statement", OURS)
def test_the_ledgers_tables_are_not_the_functions(harness: Harness, statement: str) -> None:
    assert failure(harness, executing(statement)).startswith("AuthError")


def test_also_not_through_a_trigger(harness: Harness, theirs: apsw.Connection) -> None:
    theirs.execute("CREATE TRIGGER sly AFTER INSERT ON theirs BEGIN DELETE FROM towpath_note; END")
    harness.write("kept")
    assert failure(harness, adding(1)).startswith("AuthError")
    assert harness.ledger.note("kept") is not None
    theirs.execute("DROP TRIGGER sly; CREATE VIEW seen AS SELECT a FROM theirs")
    theirs.execute("CREATE TRIGGER slyer INSTEAD OF DELETE ON seen BEGIN DELETE FROM towpath_note; END")
    assert failure(harness, executing("DELETE FROM seen"), "b").startswith("AuthError")


def test_reading_the_ledgers_tables_is_allowed(harness: Harness, theirs: apsw.Connection) -> None:
    def within(db: apsw.Connection) -> None:
        db.execute("INSERT INTO theirs (a) SELECT id FROM towpath_job WHERE state = 'running'")
        db.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 3) SELECT count(*) FROM n"
        ).fetchall()

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert rows(theirs) == ["a"]


def test_a_column_of_theirs_may_have_any_name(harness: Harness, theirs: apsw.Connection) -> None:
    within = executing(
        "INSERT INTO theirs (a, towpath_ref) VALUES (1, 'x')", "UPDATE theirs SET towpath_ref = 'y'"
    )
    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert theirs.execute("SELECT towpath_ref FROM theirs").get == "y"


def test_tables_may_be_made_within(harness: Harness, theirs: apsw.Connection) -> None:
    within = executing(
        "CREATE TABLE more (b)", "CREATE INDEX more_b ON more (b)", "INSERT INTO more VALUES (1)"
    )
    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert theirs.execute("SELECT b FROM more").get == 1


ENDING = (
    "INSERT OR ROLLBACK INTO theirs (a) VALUES (1)",
    "INSERT INTO fragile VALUES (1)",
    "UPDATE theirs SET towpath_ref = 'boom'",
)


@pytest.fixture
def fragile(theirs: apsw.Connection) -> None:
    """Ways to end a transaction that are not passed to the authorizer."""
    theirs.execute("CREATE TABLE fragile (a UNIQUE ON CONFLICT ROLLBACK); INSERT INTO fragile VALUES (1)")
    theirs.execute("CREATE TRIGGER boom BEFORE UPDATE ON theirs BEGIN SELECT raise(ROLLBACK, 'boom'); END")
    theirs.execute("INSERT INTO theirs (a) VALUES (1)")


@pytest.mark.usefixtures("fragile")
@pytest.mark.parametrize("statement", ENDING)
def test_a_conflict_that_rolls_back_fails_its_settle_only(
    harness: Harness, theirs: apsw.Connection, statement: str
) -> None:
    assert failure(harness, executing("INSERT INTO theirs (a) VALUES (2)", statement)).startswith(
        "ConstraintError"
    )
    assert rows(theirs) == [1]


@pytest.mark.usefixtures("fragile")
@pytest.mark.parametrize("statement", ENDING)
def test_also_if_the_function_hides_it(harness: Harness, theirs: apsw.Connection, statement: str) -> None:
    def within(db: apsw.Connection) -> None:
        adding(2)(db)
        with pytest.raises(apsw.ConstraintError):
            db.execute(statement)
        with pytest.raises(apsw.Error):  # outside the transaction of the batch nothing can be written
            adding(3)(db)

    assert "transaction" in failure(harness, within)
    assert rows(theirs) == [1]
    assert harness.ask(settle(harness, adding(9), "again")) == [Settled("again", State.DONE)]
    assert rows(theirs) == [1, 9]


def test_a_full_disk_within_is_a_full_disk(path: Path, clock: ManualClock) -> None:
    """The function did not cause the error; nothing of the batch is written, and it may be repeated."""
    with closing(SqliteLedger(path, SqliteOptions(max_pages=200), clock)) as ledger:
        harness = Harness(ledger)
        with closing(apsw.Connection(str(path))) as theirs:
            theirs.execute("CREATE TABLE theirs (a)")
        command = settle(harness, executing("INSERT INTO theirs VALUES (zeroblob(4000000))"))
        with harness.unchanged(), pytest.raises(DiskFull):
            harness.ask(Append((spec("before"),)), command, Append((spec("after"),)))
        assert ledger.integrity() == []
        harness.add("b")


def test_traces_and_open_cursors_of_the_function_end_with_it(
    harness: Harness, theirs: apsw.Connection
) -> None:
    kept = []

    def within(db: apsw.Connection) -> None:
        adding(1, 2, 3)(db)
        cursor = db.execute("SELECT a FROM theirs")
        next(cursor)
        kept.append(cursor)
        db.row_trace = lambda cursor, row: ("traced",)
        db.exec_trace = lambda cursor, sql, bindings: False

    assert harness.ask(settle(harness, within), Append((spec("after"),)))[0] == Settled("a", State.DONE)
    assert rows(theirs) == [1, 2, 3]
    harness.add("b")


def test_ledger_calls_inside_raise(
    harness: Harness, ledger: SqliteLedger, path: Path, tmp_path: Path, theirs: apsw.Connection
) -> None:
    calls: list[Callable[[apsw.Connection], object]] = [
        lambda db: ledger.apply([Upkeep()]),
        lambda db: ledger.get("a"),
        lambda db: ledger.find(Query()),
        lambda db: ledger.queues(),
        lambda db: ledger.dump(),
        lambda db: ledger.version(),
        lambda db: ledger.wait(0, 0.1),
        lambda db: ledger.backup(tmp_path / "copy.db"),
        lambda db: ledger.append_on(db, [spec("x")]),
        lambda db: ledger.append_on(theirs, [spec("x")]),
        lambda db: ledger.close(),
    ]

    def within(db: apsw.Connection) -> None:
        for call in calls:
            with pytest.raises(NestedCall):
                call(db)

    assert harness.ask(settle(harness, within)) == [Settled("a", State.DONE)]
    assert failure(harness, lambda db: ledger.get("a"), "b").startswith("NestedCall")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_rolls_the_batch_back(
    harness: Harness, theirs: apsw.Connection, kind: type[BaseException]
) -> None:
    def within(db: apsw.Connection) -> None:
        adding(1)(db)
        raise kind

    command = settle(harness, within)
    with harness.unchanged(), pytest.raises(kind):
        harness.ask(Append((spec("before"),)), command, Append((spec("after"),)))
    assert rows(theirs) == []
    held = harness.job("a")
    assert harness.ask(Settle("a", held.fence, Done(), within=adding(2)), Append((spec("before"),)))[
        0
    ] == Settled("a", State.DONE)
    assert rows(theirs) == [2]


def test_a_rehearsal_is_rolled_back(ledger: SqliteLedger, theirs: apsw.Connection) -> None:
    def insert(connection: apsw.Connection) -> None:
        connection.execute("INSERT INTO theirs VALUES (1, 2)")
        assert list(connection.execute("SELECT a FROM theirs")) == [(1,)]

    ledger.rehearse(insert)
    assert list(theirs.execute("SELECT * FROM theirs")) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda connection: connection.execute("INSERT INTO nowhere VALUES (1)"),
        lambda connection: connection.execute("COMMIT"),
        lambda connection: connection.execute("DELETE FROM towpath_job"),
        lambda connection: connection.close(),
    ],
)
def test_a_rehearsal_fails_as_the_commit_would(
    ledger: SqliteLedger, harness: Harness, function: Function
) -> None:
    harness.add("a")
    with pytest.raises(UserFunctionFailed):
        ledger.rehearse(function)
    assert ledger.get("a") is not None
