"""Both dialects have every statement that the rules use, and no unused ones. Statements stay prepared."""

from __future__ import annotations

import ast
from pathlib import Path

import psycopg

import towpath.ledger.postgres
from towpath.commands import Append, Claim, Query, Spec, Upkeep, Want
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.rows import PostgresConditions, PostgresDb
from towpath.ledger.postgres.statements import queries as _queries
from towpath.ledger.sqlite.statements import _queries as _sqlite_queries

LEDGER = Path(str(towpath.ledger.postgres.__file__)).parent.parent


def texts(room: str) -> set[str]:
    trees = [ast.parse(path.read_text("utf-8")) for path in (LEDGER / room).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_statement_is_left_over() -> None:
    before = {first for first, _ in _queries().values() if first is not None}
    assert set(_queries()) <= texts("postgres") | texts("tables") | before
    assert before <= set(_queries())


def test_the_rules_find_their_statements_in_both() -> None:
    asked = texts("tables") & (set(_queries()) | set(_sqlite_queries()))
    assert len(asked) > 80
    # The counters of PostgreSQL are sequences: its batches end with other statements.
    assert asked - {"write_meta"} <= set(_queries())
    assert asked <= set(_sqlite_queries())


def prepared(db: PostgresDb | None) -> set[str]:
    assert db is not None
    return {name for (name,) in db.connection.execute("SELECT name FROM pg_prepared_statements")}


def test_what_was_prepared_stays_so_when_nothing_came_of_it(postgres_url: str) -> None:
    """The driver drops all prepared statements after a ROLLBACK, and planning takes longer than execution."""
    ledger = PostgresLedger(postgres_url)
    for n in range(9):
        ledger.apply([Append((Spec(queue="q", kind="k", id=f"a{n}"), Spec(queue="q", kind="k", id=f"b{n}")))])
        ledger.note("none")
        before = prepared(ledger._writer), ledger._read(prepared, alone=True)
        if n % 3 == 2:
            assert all(before)
            ledger.apply([Claim(owner="ada", wants=(Want("none*"),), lease=1_000_000)])
            ledger.find(Query())
            assert before[0] <= prepared(ledger._writer)
            assert before[1] <= ledger._read(prepared, alone=True)
    ledger.close()


def test_upkeep_folds_counts_though_nothing_is_due(postgres_url: str) -> None:
    ledger = PostgresLedger(postgres_url)
    ledger.apply([Append((Spec(queue="q", kind="k", id="a"),))])
    ledger.apply([Upkeep()])
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM towpath.tally").fetchone() == (0,)
    assert ledger.queues()["q"].counts.ready == 1
    assert ledger.check() == []
    ledger.close()


def test_a_lookup_reads_a_range_of_an_index(postgres_url: str) -> None:
    PostgresLedger(postgres_url).close()
    with psycopg.connect(postgres_url) as connection:
        # The table is empty, so the planner prefers a full scan.
        connection.execute("SET enable_seqscan = off")
        plans = "".join(
            row[0]
            for name, arguments in (("read_by_prefix", "'0199aa', '0199ab', 10"), ("read_by_seq", "7"))
            for row in _explain(connection, _queries()[name][1], arguments)
        )
    assert "Index Cond: ((id >= $1) AND (id < $2))" in plans
    assert "Index Cond: (seq = $1)" in plans
    assert "Sort" not in plans


def test_the_jobs_of_a_parent_are_a_range_of_an_index(postgres_url: str) -> None:
    PostgresLedger(postgres_url).close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET enable_seqscan = off")
        for given, arguments, condition in (
            (Query(parent="p"), "'p'", "Index Cond: (parent = $1)"),
            (Query(parent="p", generation=1), "'p', 1", "Index Cond: ((parent = $1) AND (generation = $2))"),
        ):
            found = PostgresConditions()
            found.ask(given)
            for order in ("ASC", "DESC"):
                text = f"SELECT * FROM towpath.job j WHERE {found.sql} ORDER BY j.seq {order} LIMIT 10"
                plan = "".join(row[0] for row in _explain(connection, text, arguments))
                assert "job_parent" in plan
                assert condition in plan
                assert "Sort" not in plan


def _explain(connection: psycopg.Connection[tuple[str]], text: str, arguments: str) -> list[tuple[str]]:
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute("DEALLOCATE ALL")
    connection.execute(f"PREPARE lookup AS {text}".encode())
    return connection.execute(f"EXPLAIN EXECUTE lookup ({arguments})".encode()).fetchall()
