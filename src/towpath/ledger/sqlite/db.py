"""Statements in few steps.

Every `sqlite3_step` lets go of the interpreter lock, and beside a busy Python thread each one costs a switch interval.
So many rows come back as one JSON row, and many rows go in as one statement of many VALUES.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import apsw
import msgspec

T = TypeVar("T")
Args = Sequence[Any] | Mapping[str, Any]

ROWS = 32
"""Rows per VALUES statement: fast to bind, and short enough for apsw's statement cache."""


def one(db: apsw.Connection, sql: str, args: Args = ()) -> Any:
    """The first row or None; the statement is not stepped to its end."""
    for row in db.execute(sql, args):
        return row
    return None


def rows(db: apsw.Connection, sql: str, args: Args, type: type[T]) -> list[T]:
    """The rows of a statement that answers a single JSON array."""
    return msgspec.json.decode(one(db, sql, args)[0], type=list[type])  # type: ignore[valid-type]


def array(values: Iterable[Any]) -> str:
    """An argument for json_each."""
    return msgspec.json.encode(list(values)).decode()


def insert(db: apsw.Connection, head: str, tuples: Iterable[Sequence[Any]], tail: str = "") -> None:
    """`INSERT INTO t (a, b)` with all tuples, in statements of `ROWS` rows and then of what is left."""
    rows = tuples if isinstance(tuples, list) else list(tuples)
    if len(rows) == 1:
        db.execute(_values(head, len(rows[0]), 1, tail), rows[0])
        return
    for start in range(0, len(rows), ROWS):
        chunk = rows[start : start + ROWS]
        flat: list[Any] = []
        for each in chunk:
            flat += each
        db.execute(_values(head, len(chunk[0]), len(chunk), tail), flat)


@cache
def _values(head: str, width: int, height: int, tail: str) -> str:
    row = "(" + ",".join("?" * width) + ")"
    return f"{head} VALUES {','.join([row] * height)} {tail}"


@cache
def named(name: str) -> str:
    """A statement of queries.sql."""
    return _queries()[name]


@cache
def _queries() -> dict[str, str]:
    text = (files("towpath.ledger") / "sql" / "sqlite" / "queries.sql").read_text("utf-8")
    found = dict(re.findall(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", text, re.MULTILINE | re.DOTALL))
    return {name: " ".join(re.sub(r"--[^\n]*", "", body).split()).rstrip("; ") for name, body in found.items()}
