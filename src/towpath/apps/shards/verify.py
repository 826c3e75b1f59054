"""Comparison of the rows of a shard on two nodes while writers go on.

Rows are compared in chunks by primary key: number of rows and sum of row hashes. A chunk that differs is read
row by row from the source, then, after the target has confirmed the position of that moment, from the target,
and from the source again. A row is wrong if the source had the same value both times and the target has
another: rows that a writer changed meanwhile are no difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from psycopg import sql

from towpath.apps.shards import replication
from towpath.apps.shards.session import NodeSession, compose
from towpath.errors import TowpathError

CHUNK = 250_000
"""Rows of a chunk."""
_TIMES = 4
"""Of the limit of a statement, for one chunk."""
Key = tuple[str, ...]
"""The values of the key columns, as text."""


class RowsDiffer(TowpathError):
    """The copy of a shard is not equal to its source."""

    sentence = "{table} differs on {source} and {target} in {count} rows, for example {keys}"


class KeyColumns(msgspec.Struct, frozen=True):
    """The columns of the primary key with their types."""

    names: tuple[str, ...]
    types: tuple[str, ...]

    def listed(self) -> sql.Composed:
        return sql.SQL(", ").join(map(sql.Identifier, self.names))

    def as_text(self) -> sql.Composed:
        return sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in self.names)

    def compared(self, operator: str, key: Key) -> sql.Composed:
        """A condition on rows before or after a key."""
        values = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(type))  # type: ignore[arg-type]
            for value, type in zip(key, self.types, strict=True)
        )
        return sql.SQL("({}) {} ({})").format(self.listed(), sql.SQL(operator), values)  # type: ignore[arg-type]


def key_columns(node: NodeSession, table: tuple[str, str]) -> KeyColumns:
    """The primary key of a table; without columns if it has none."""
    rows = node.run(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_index i"
        " CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number"
        " WHERE i.indrelid = to_regclass(%s) AND i.indisprimary ORDER BY k.place",
        [replication.qualified(table)],
    )
    return KeyColumns(tuple(row[0] for row in rows), tuple(row[1] for row in rows))


class Comparison:
    """Compares one table on two nodes. `slot` on the source has the position that the target confirmed."""

    def __init__(self, source: NodeSession, target: NodeSession, table: tuple[str, str], slot: str) -> None:
        self._source, self._target, self._table, self._slot = source, target, table, slot
        self._key = key_columns(source, table)

    def chunks(self, after: Key | None = None, chunk: int = CHUNK) -> Iterator[tuple[Key | None, int]]:
        """Compare chunk after chunk behind the key `after`; yield the last key of each, None for the last
        chunk, and its number of rows. Raises `RowsDiffer`."""
        while True:
            last = self._bound(after, chunk)
            within = self._range(after, last)
            yield last, self._compare(within)
            if last is None:
                return
            after = last

    def _bound(self, after: Key | None, chunk: int) -> Key | None:
        rows = self._source.run(
            compose(
                "SELECT {text} FROM {table} WHERE {within} ORDER BY {key} OFFSET {skipped} LIMIT 1",
                text=self._key.as_text(),
                table=self._table,
                within=self._range(after, None),
                key=self._key.listed(),
                skipped=chunk - 1,
            ),
            times=_TIMES,
        )
        return rows[0] if rows else None

    def _range(self, after: Key | None, last: Key | None) -> sql.Composable:
        conditions = [self._key.compared(">", after)] if after is not None else []
        conditions += [self._key.compared("<=", last)] if last is not None else []
        return sql.SQL(" AND ").join(conditions) if conditions else sql.SQL("true")

    def _compare(self, within: sql.Composable) -> int:
        statement = compose(
            "SELECT count(*), sum(hashtextextended(x::text, 0))::text FROM {table} AS x WHERE {within}",
            table=self._table,
            within=within,
        )
        with ThreadPoolExecutor(1) as other:
            copied = other.submit(self._target.run, statement, times=_TIMES)
            here = self._source.run(statement, times=_TIMES)
            if here != copied.result():
                self._compare_rows(within)
        count: int = here[0][0]
        return count

    def _compare_rows(self, within: sql.Composable, *, again: bool = False) -> None:
        """Raise `RowsDiffer` if rows are wrong twice: a row may be written and removed between two reads."""
        before = self._rows(self._source, within)
        lsn = replication.position(self._source)
        replication.await_position(self._source, [self._slot], lsn, self._source.limit)
        copied = self._rows(self._target, within)
        later = self._rows(self._source, within)
        wrong = [
            key
            for key in before.keys() | copied.keys() | later.keys()
            if before.get(key) == later.get(key) != copied.get(key)
        ]
        if wrong and not again:
            self._compare_rows(within, again=True)
        elif wrong:
            shown: Sequence[Key] = sorted(wrong)[:5]
            raise RowsDiffer(
                table=self._table[1],
                source=self._source.node,
                target=self._target.node,
                count=len(wrong),
                keys=", ".join("/".join(key) for key in shown),
            )

    def _rows(self, node: NodeSession, within: sql.Composable) -> dict[Key, int]:
        statement = compose(
            "SELECT hashtextextended(x::text, 0), {text} FROM {table} AS x WHERE {within}",
            text=self._key.as_text(),
            table=self._table,
            within=within,
        )
        return {row[1:]: row[0] for row in node.run(statement, times=_TIMES)}
