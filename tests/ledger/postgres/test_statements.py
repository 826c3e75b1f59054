"""Both dialects know every statement that the rules ask for, and PostgreSQL's has none that nobody asks for.
They stay prepared."""

from __future__ import annotations

import ast
from pathlib import Path

import psycopg

import towpath.ledger.postgres
from towpath import Query, Spec
from towpath.commands import Append, Claim, Upkeep, Want
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.rows import PostgresDb
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
    # The counters of PostgreSQL are sequences: its batch ends in a way of its own.
    assert asked - {"write_meta"} <= set(_queries())
    assert asked <= set(_sqlite_queries())


def prepared(db: PostgresDb | None) -> set[str]:
    assert db is not None
    return {name for (name,) in db.connection.execute("SELECT name FROM pg_prepared_statements")}


def test_what_was_prepared_stays_so_when_nothing_came_of_it(postgres_url: str) -> None:
    """The driver forgets all that it prepared when it sees a ROLLBACK, and planning takes longer than all the
    rest."""
    ledger = PostgresLedger(postgres_url)
    for n in range(9):
        ledger.apply([Append((Spec(queue="q", kind="k", id=f"a{n}"), Spec(queue="q", kind="k", id=f"b{n}")))])
        ledger.note("none")
        before = prepared(ledger._writer), prepared(ledger._reader)
        if n % 3 == 2:
            assert all(before)
            ledger.apply([Claim(owner="ada", wants=(Want("none*"),), lease=1_000_000)])
            ledger.find(Query())
            assert before[0] <= prepared(ledger._writer)
            assert before[1] <= prepared(ledger._reader)
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
