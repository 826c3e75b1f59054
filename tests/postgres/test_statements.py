"""Both dialects know every statement that the rules ask for, and PostgreSQL's has none that nobody asks for."""

from __future__ import annotations

import ast
from pathlib import Path

import towpath.ledger.postgres
from towpath.ledger.postgres.db import _queries
from towpath.ledger.sqlite.db import _queries as _sqlite_queries

LEDGER = Path(str(towpath.ledger.postgres.__file__)).parent.parent


def texts(room: str) -> set[str]:
    trees = [ast.parse(path.read_text("utf-8")) for path in (LEDGER / room).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_statement_is_left_over() -> None:
    before = {first for first, _ in _queries().values() if first is not None}
    assert set(_queries()) <= texts("postgres") | texts("relational") | before
    assert before <= set(_queries())


def test_the_rules_find_their_statements_in_both() -> None:
    asked = texts("relational") & (set(_queries()) | set(_sqlite_queries()))
    assert len(asked) > 80
    # The counters of PostgreSQL are sequences: its batch ends in a way of its own.
    assert asked - {"write_meta"} <= set(_queries())
    assert asked <= set(_sqlite_queries())
