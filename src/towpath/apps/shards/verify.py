"""Comparison of the rows of a shard on two nodes while writers go on.

Writers wait for a moment: the shard is locked on the source, the target confirms the last position, and both
nodes open a snapshot. The snapshots have the same rows. They are then compared without a lock, in chunks by
primary key: number of rows and sum of row hashes. Any difference is an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from psycopg import sql

from towpath.apps.shards import replication
from towpath.apps.shards.session import NodeSession, compose
from towpath.errors import TowpathError

CHUNK = 2_000_000
"""Rows of a chunk."""
SMALL = 1024 * 1024 * 1024
"""Bytes of a table that is compared as one chunk, by one scan on each node."""
SHOWN = 5
"""Keys of wrong rows in the error."""
LOCK = "300ms"
CONFIRM = 1.0
"""Seconds, with the lock held, for the target to confirm the last position."""
IDLE = "2s"
"""A transaction that holds a lock ends after this time without a statement, and writers continue."""
_TIMES = 20
"""Of the limit of a statement, for one chunk."""
_HASHABLE = """
SELECT NOT EXISTS (
  SELECT 1 FROM pg_catalog.pg_attribute a WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0
  AND NOT a.attisdropped AND NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_opclass o JOIN pg_catalog.pg_am m ON m.oid = o.opcmethod
    WHERE m.amname = 'hash' AND o.opcdefault AND o.opcintype = a.atttypid))
"""
"""Whether all columns have a type with a hash function of its own, which is faster than the hash of the text.
Types that are only coerced to such a type count as not hashable."""
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
        """The columns of the table `x`. An unqualified name would be that of the result, which is text."""
        return sql.SQL(", ").join(sql.Identifier("x", name) for name in self.names)

    def as_text(self) -> sql.Composed:
        return sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in self.names)

    def compared(self, operator: str, key: Key) -> sql.Composed:
        """A condition on rows before or after a key."""
        values = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(type))
            for value, type in zip(key, self.types, strict=True)
        )
        return sql.SQL("({}) {} ({})").format(self.listed(), sql.SQL(operator), values)


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
        hashable = source.value(_HASHABLE, [replication.qualified(table)])
        self._hash = "hash_record_extended(x, 0)" if hashable else "hashtextextended(x::text, 0)"

    def synchronise(self, holder: NodeSession) -> float:
        """Open snapshots with the same rows on both nodes; return the seconds for which writers waited.
        `holder` is another session on the source."""
        with holder.transaction(idle_in_transaction_session_timeout=IDLE, lock_timeout=LOCK):
            begun = time.monotonic()
            holder.run(compose("LOCK TABLE {table} IN SHARE MODE", table=self._table))
            last = replication.position(holder)
            replication.await_position(holder, [self._slot], last, CONFIRM)
            for node in (self._source, self._target):
                node.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                node.run("SELECT pg_catalog.pg_current_snapshot()")
        return time.monotonic() - begun

    def chunks(self, after: Key | None = None, chunk: int | None = None) -> Iterator[tuple[Key | None, int]]:
        """Compare chunk after chunk behind the key `after`; yield the last key of each, None for the last
        chunk, and its number of rows. Raises `RowsDiffer`. `chunk`: rows of a chunk, by default by size."""
        if chunk is None and not self._is_small():
            chunk = CHUNK
        while True:
            last = None if chunk is None else self._bound(after, chunk)
            yield last, self._compare(self._range(after, last))
            if last is None:
                return
            after = last

    def _is_small(self) -> bool:
        statement = "SELECT pg_relation_size(to_regclass(%s)) <= %s"
        return bool(self._source.value(statement, [replication.qualified(self._table), SMALL]))

    def _bound(self, after: Key | None, chunk: int) -> Key | None:
        rows = self._source.run(
            compose(
                "SELECT {text} FROM {table} AS x WHERE {within} ORDER BY {key} OFFSET {skipped} LIMIT 1",
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
        here, there = self._both(
            "SELECT count(*), sum({hash})::text FROM {table} AS x WHERE {within}", within
        )
        if here != there:
            self._compare_rows(within)
        count: int = here[0][0]
        return count

    def _compare_rows(self, within: sql.Composable) -> None:
        """Find the rows that differ, as text: servers of different versions may hash equal rows
        differently."""
        here, there = self._both(
            "SELECT {text}, hashtextextended(x::text, 0) FROM {table} AS x WHERE {within}", within
        )
        wrong = sorted({row[:-1] for row in {*here} ^ {*there}})
        if wrong:
            raise RowsDiffer(
                table=self._table[1],
                source=self._source.node,
                target=self._target.node,
                count=len(wrong),
                keys=", ".join("/".join(key) for key in wrong[:SHOWN]),
            )

    def _both(self, template: str, within: sql.Composable) -> list[list[tuple[Any, ...]]]:
        """The rows of a query on the source and on the target."""
        statement = compose(
            template,
            hash=sql.SQL(self._hash),
            text=self._key.as_text(),
            table=self._table,
            within=within,
        )
        with ThreadPoolExecutor(2) as threads:
            run = [threads.submit(node.run, statement, times=_TIMES) for node in (self._source, self._target)]
            return [each.result() for each in run]
