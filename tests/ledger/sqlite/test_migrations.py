"""Migrations: old files are upgraded, newer ones are refused."""

from __future__ import annotations

import ast
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import apsw
import apsw.ext
import pytest

import towpath.ledger.sqlite
from towpath.core.commands import Append, Purge, Selector, Settle, Upkeep
from towpath.core.depths import DEPTHS
from towpath.core.job import COLUMNS, Done, Job, Reason, RetryOutcome, State
from towpath.core.lifecycle import REASONS
from towpath.core.views import NoteQuery
from towpath.errors import NewerSchema, NotALedger
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.ledger.sqlite.maintenance import steps
from towpath.ledger.sqlite.statements import _queries, named
from towpath.testing import START, ManualClock
from towpath.testing.suite.harness import Harness, spec

SPAWN = multiprocessing.get_context("spawn")
VERSION_1 = Path(__file__).with_name("version1.sql")
NEWEST = len(steps())
ROWS = "SELECT * FROM {} ORDER BY 1, 2"
KNOWN_TO_1 = ("job", "body", "edge", "gate", "group", "key", "queue", "part", "note", "tombstone")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def ledger(path: Path, clock: ManualClock) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path, SqliteOptions(), clock)) as ledger:
        yield ledger


def execute(path: Path, sql: str) -> list[Any]:
    with closing(apsw.Connection(str(path))) as connection:
        return connection.execute(sql).fetchall()


def make_version_1(path: Path) -> None:
    execute(path, steps()[0] + VERSION_1.read_text("utf-8"))


def schema(path: Path) -> dict[str, str]:
    return dict(execute(path, "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


LATER: dict[str, list[Any]] = {"group": [0, None], "gate": [None], "part": [None, None, None, None, 0]}
"""The values that later steps add to the rows of version 1."""


def content(path: Path) -> dict[str, list[Any]]:
    return {table: execute(path, ROWS.format(f"towpath_{table}")) for table in KNOWN_TO_1}


def test_the_schema_is_the_sum_of_its_steps(ledger: SqliteLedger, tmp_path: Path) -> None:
    execute(tmp_path / "sum.db", "".join(steps()))
    assert schema(ledger.path) == schema(tmp_path / "sum.db")
    assert execute(ledger.path, "SELECT schema, min_schema FROM towpath_meta") == [(NEWEST, 12)]


def test_every_table_of_version_1_has_rows(path: Path) -> None:
    make_version_1(path)
    assert all(content(path).values())
    assert {name for name in schema(path) if name.startswith("towpath_")} < {
        name for step in steps() for name in step.replace("(", " ").split() if name.startswith("towpath_")
    }


def test_version_1_is_upgraded_with_its_data(path: Path, clock: ManualClock, tmp_path: Path) -> None:
    make_version_1(path)
    before = content(path)
    with closing(SqliteLedger(path, SqliteOptions(), clock)) as ledger:
        execute(tmp_path / "sum.db", "".join(steps()))
        assert schema(path) == schema(tmp_path / "sum.db")
        assert content(path) == {
            table: [(*row, *LATER.get(table, ())) for row in rows] for table, rows in before.items()
        }
        assert execute(path, "SELECT schema FROM towpath_meta") == [(NEWEST,)]
        assert ledger.integrity() == []


def test_an_upgraded_ledger_works(path: Path) -> None:
    make_version_1(path)
    with closing(SqliteLedger(path, SqliteOptions(), ManualClock(START + 2_000_000))) as ledger:
        harness = Harness(ledger, START + 2_000_000)
        held = harness.job("held")
        assert (held.payload, held.cursor, held.progress_done, held.fence) == (b"work", b"cursor", 3, 1)
        assert (harness.job("done").result, harness.job("failed").error) == (b"result", "broken")
        harness.ask(Settle("held", held.fence, Done(), spawn=(spec("child"),)))
        assert harness.at("blocked", "also") == "ready blocked"
        for member in harness.claim("members", n=2, token="t"):
            harness.done(member)
        assert harness.at("gated", "gated-anyway") == "ready ready"
        assert (harness.group("sealed").outcome, harness.counts("callbacks").ready) == (State.DONE, 1)
        assert harness.append(spec("refused"), spec("gone")) == harness.append(spec("refused"), spec("gone"))
        assert harness.ask(Purge(where=Selector(queue="q"), token="p"), Upkeep())
        assert harness.append(spec("new"))[0].seq > 26
        assert ledger.integrity() == []


def test_an_upgraded_ledger_keeps_attempts_from_now_on(path: Path) -> None:
    """The error of an attempt before the upgrade is on the job; its history begins with the next end."""
    make_version_1(path)
    with closing(SqliteLedger(path, SqliteOptions(), ManualClock(START + 2_000_000))) as ledger:
        harness = Harness(ledger, START + 2_000_000)
        assert (ledger.attempts("failed"), harness.job("failed").error) == ([], "broken")
        held = harness.job("held")
        harness.ask(Settle("held", held.fence, RetryOutcome(error="busy")))
        [end] = ledger.attempts("held")
        assert (end.number, end.started_at, end.owner, end.error) == (1, held.started_at, held.owner, "busy")
        assert ledger.integrity() == []


def test_lists_in_notes_become_one_note_for_each_record(path: Path, clock: ManualClock) -> None:
    execute(path, "".join(steps()[:10]) + "UPDATE towpath_meta SET schema = 10")
    for key, value in (
        ("towpath/warn-depths", '{"mail": 5, "a/é": 70}'),
        ("towpath/schedules", '["daily"]'),
        ("towpath/breakers", '["x"]'),
        ("breaker/x", "{}"),
    ):
        execute(path, f"INSERT INTO towpath_note VALUES ('{key}', CAST('{value}' AS BLOB), 7, 3, NULL)")
    with closing(SqliteLedger(path, SqliteOptions(), clock)) as ledger:
        assert DEPTHS.all(ledger) == {"a/é": 70, "mail": 5}
        assert [note.key for note in ledger.notes(NoteQuery()).notes] == [
            "breaker/x",
            "warn-depth/a/é",
            "warn-depth/mail",
        ]
        assert ledger.integrity() == []


def test_the_check_finds_attempts_that_no_job_has(ledger: SqliteLedger) -> None:
    harness = Harness(ledger)
    harness.settle(harness.started("a"), RetryOutcome())
    seq = harness.job("a").seq
    execute(ledger.path, "UPDATE towpath_attempt SET number = 2")
    assert ledger.check() == ["attempt 2 of job a is none of the last of 1"]
    execute(ledger.path, "UPDATE towpath_attempt SET seq = 99")
    assert ledger.check() == ["attempt 2 is left of job number 99"]
    execute(ledger.path, f"UPDATE towpath_attempt SET seq = {seq}, number = 1")
    assert ledger.check() == []


def _open(path: Path, barrier: Barrier, pipe: Connection) -> None:
    for number in range(4):
        barrier.wait(60)
        with closing(SqliteLedger(path.with_name(f"{number}.db"))) as ledger:
            ledger.apply([Append((spec(f"by-{multiprocessing.current_process().name}"),))])
    pipe.send("fine")


def test_processes_that_open_an_old_file_at_once_migrate_it_once(tmp_path: Path) -> None:
    for number in range(4):
        if number % 2:  # the even ones are new: these are made at once
            make_version_1(tmp_path / f"{number}.db")
    barrier, pipes = SPAWN.Barrier(4), [SPAWN.Pipe() for _ in range(4)]
    children = [SPAWN.Process(target=_open, args=(tmp_path / "x.db", barrier, theirs)) for _, theirs in pipes]
    for child in children:
        child.start()
    assert [ours.recv() if ours.poll(60) else "silence" for ours, _ in pipes] == ["fine"] * 4
    for child in children:
        child.join(60)
    for number in range(4):
        with closing(SqliteLedger(tmp_path / f"{number}.db")) as ledger:
            assert ledger.integrity() == []
            assert len([id for id in Harness(ledger).found() if id.startswith("by-")]) == 4
            assert execute(ledger.path, "SELECT schema FROM towpath_meta") == [(NEWEST,)]


def test_a_newer_schema_that_is_compatible_works(ledger: SqliteLedger, clock: ManualClock) -> None:
    execute(
        ledger.path,
        f"UPDATE towpath_meta SET schema = 99, min_schema = {NEWEST}; ALTER TABLE towpath_note ADD COLUMN"
        " more TEXT",
    )
    Harness(ledger).add("a")
    with closing(SqliteLedger(ledger.path, SqliteOptions(), clock)) as another:
        Harness(another).add("b")
        assert another.integrity() == []
    assert execute(ledger.path, "SELECT schema, min_schema FROM towpath_meta") == [(99, NEWEST)]


def test_a_newer_schema_that_is_not_is_refused_when_opened(ledger: SqliteLedger, clock: ManualClock) -> None:
    Harness(ledger).add("a")
    execute(ledger.path, f"UPDATE towpath_meta SET schema = 99, min_schema = {NEWEST + 1}")
    before = content(ledger.path)
    with pytest.raises(
        NewerSchema, match=f"schema 99, which needs at least version {NEWEST + 1}; .* supports {NEWEST}"
    ):
        SqliteLedger(ledger.path, SqliteOptions(), clock)
    assert content(ledger.path) == before


def test_also_when_it_becomes_so_in_the_middle_of_life(ledger: SqliteLedger) -> None:
    harness = Harness(ledger)
    harness.add("a")
    execute(ledger.path, f"UPDATE towpath_meta SET schema = 99, min_schema = {NEWEST + 1}")
    before = content(ledger.path)
    for _ in range(2):
        with pytest.raises(
            NewerSchema, match=f"schema 99, which needs at least version {NEWEST + 1}; .* supports {NEWEST}"
        ):
            harness.add("b")
    assert content(ledger.path) == before
    execute(ledger.path, f"UPDATE towpath_meta SET schema = {NEWEST}, min_schema = 1")
    harness.add("b")


def test_half_a_ledger_is_none(path: Path) -> None:
    execute(path, "CREATE TABLE towpath_job (a)")
    with pytest.raises(NotALedger, match="no towpath_meta"):
        SqliteLedger(path)
    assert schema(path) == {"towpath_job": "CREATE TABLE towpath_job (a)"}


def test_a_step_that_fails_leaves_the_old_file(path: Path) -> None:
    make_version_1(path)
    execute(path, "CREATE TABLE towpath_reply (in_the_way)")
    before = content(path)
    for _ in range(2):
        with pytest.raises(towpath.errors.LedgerError, match="already exists"):
            SqliteLedger(path)
    assert content(path) == before
    execute(path, "DROP TABLE towpath_reply")
    SqliteLedger(path).close()


def test_the_columns_of_a_job_are_the_records(ledger: SqliteLedger) -> None:
    columns = execute(ledger.path, "SELECT name FROM pragma_table_info('towpath_job') ORDER BY cid")
    assert tuple(name for (name,) in columns) == COLUMNS
    assert Job.__struct_fields__[: len(COLUMNS)] == COLUMNS


def test_the_schema_admits_exactly_the_reasons_of_the_core(ledger: SqliteLedger) -> None:
    Harness(ledger).add("a")
    admitted = set()
    with closing(apsw.Connection(str(ledger.path))) as connection:
        for state in [*State, "unknown"]:
            for reason in [*Reason, "unknown"]:
                connection.execute("BEGIN")
                try:
                    connection.execute(
                        """UPDATE towpath_job SET state = :state, reason = :reason,
                            waits = :state = 'blocked',
                           finished_at = iif(:state IN ('done', 'failed', 'canceled'), 1, NULL),
                           owner = iif(:state = 'running', 'me', NULL),
                               lease_until = iif(:state = 'running', 1, NULL)""",
                        {"state": str(state), "reason": str(reason)},
                    )
                    admitted.add((state, reason))
                except apsw.ConstraintError:
                    pass
                connection.execute("ROLLBACK")
    assert admitted == {(state, reason) for state, reasons in REASONS.items() for reason in reasons}


FOLDER = Path(str(towpath.ledger.sqlite.__file__)).parent
SOURCES = [
    ast.parse(path.read_text("utf-8"))
    for room in ("sqlite", "tables")
    for path in FOLDER.parent.glob(f"{room}/*.py")
]
NODES = [node for tree in SOURCES for node in ast.walk(tree)]


def asked_names() -> set[str]:
    """The arguments of `named(...)` and of the methods of a `Db` that are literals."""
    calls = [
        node
        for node in NODES
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    ]
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    asked = [
        call.args[0]
        for call, name in zip(calls, names, strict=True)
        if name in ("named", "rows", "one", "run", "count")
    ]
    return {each.value for each in asked if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def test_every_statement_is_used_and_every_name_exists() -> None:
    texts = {node.value for node in NODES if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert asked_names() <= set(_queries()) <= texts
    assert len(asked_names()) > 80


@pytest.mark.parametrize("name", sorted(_queries()))
def test_every_statement_is_sound(ledger: SqliteLedger, name: str) -> None:
    with closing(apsw.Connection(str(ledger.path))) as connection:
        left: str | None = named(name)
        while left:
            info = apsw.ext.query_info(connection, left)
            assert not info.is_explain
            left = info.query_remaining
