"""Copies a ledger from one store to another, as rows that have the same form in every dialect.

The copy is made in chunks, in the order of each table's key. So a copy that was killed continues after the
last row of the target. Until the copy is verified, `min_schema` of the target is raised by `UNFINISHED`, and
every ledger refuses to open it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from towpath.core.job import COLUMNS
from towpath.errors import InvalidInput, NewerSchema, NotALedger, StoreFailed
from towpath.ledger.tables import database
from towpath.ledger.tables.transaction import GroupRow, PartRow, QueueRow

ROWS = 2000
BYTES = 4 * 1024 * 1024
"""The limits of a chunk, which is held in memory and written in one transaction."""
UNFINISHED = 1_000_000
"""Added to `min_schema` during a copy: no version of Towpath, old or new, supports such a schema."""

Row = tuple[Any, ...]
Progress = Callable[[str, int, int], None]
"""Called with the current step, its finished rows, and its total."""


class Table(msgspec.Struct, frozen=True):
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    """The primary key, which orders the rows."""

    def key_of(self, row: Row) -> Row:
        return tuple(row[self.columns.index(name)] for name in self.key)


_KEYS: Mapping[str, int] = {
    "attempt": 3,
    "then": 1,
    "edge": 2,
    "gate": 2,
    "proxy": 1,
    "name": 2,
    "key": 2,
    "note": 1,
    "tombstone": 1,
    "unused": 1,
    "reply": 1,
    "blob": 1,
    "chunk": 2,
}
TABLES: tuple[Table, ...] = (
    Table("job", COLUMNS, ("seq",)),
    Table("body", ("seq", "what", "data"), ("seq", "what")),
    Table("group", GroupRow.__struct_fields__, ("id",)),
    Table("queue", QueueRow.__struct_fields__, ("name",)),
    Table("part", PartRow.__struct_fields__, ("queue", "name")),
    *(Table(name, database.TABLES[name], database.TABLES[name][:width]) for name, width in _KEYS.items()),
)
NOTE = next(table for table in TABLES if table.name == "note")


class MetaRow(msgspec.Struct, frozen=True):
    """The counters and schema numbers of a ledger; `towpath_meta` on SQLite, sequences on PostgreSQL."""

    schema: int
    min_schema: int
    next_seq: int
    next_version: int
    last: int

    @property
    def is_unfinished(self) -> bool:
        return self.min_schema >= UNFINISHED


class Store(Protocol):
    """The tables of one ledger, for maintenance commands. A store can be opened where `Ledger` refuses."""

    @property
    def place(self) -> str: ...

    @property
    def known(self) -> int:
        """The schema of this version of Towpath."""
        ...

    def read_meta(self) -> MetaRow | None:
        """None if there is no ledger yet."""
        ...

    def migrate(self) -> int:
        """Migrate the schema to this version. Returns the schema before, 0 for none."""
        ...

    def count(self, table: Table) -> int: ...

    def stream(self, table: Table, after: Row | None = None) -> Iterator[Row]:
        """The rows after the key `after`, in order, few in memory at a time. Values are int, str, bytes and
        None."""
        ...

    def last_key(self, table: Table) -> Row | None: ...

    def add(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert the rows in one transaction."""
        ...

    def apply_user_appends(self) -> int:
        """Turn the stored appends of user transactions into jobs, as the next batch would. Returns their
        number. Raises `InvalidInput` if one of them cannot be applied."""
        ...

    def health(self) -> dict[str, Any]:
        """Facts about the server or the file, for `towpath doctor`."""
        ...

    def reserved(self) -> AbstractContextManager[None]:
        """Exclude other copies into this store. Raises the error of `occupied` if one is running."""
        ...

    def begin(self, meta: MetaRow) -> None:
        """Set these counters, in a transaction that excludes other writers. The content of an unfinished copy
        is deleted; other content is refused by `refuse_content`."""
        ...

    def finish(self, min_schema: int) -> None: ...

    def vacuum(self) -> dict[str, int]:
        """Free unused space. Returns figures about it, such as the bytes before and after."""
        ...

    def close(self) -> None: ...


class Copied(msgspec.Struct, frozen=True):
    """`rows` by table, and the hash over all rows, which is the same on both sides."""

    rows: dict[str, int]
    sha256: str
    resumed: bool


def check_schema(place: str, schema: int, min_schema: int, known: int) -> None:
    """Raise an error if this version of Towpath cannot use the ledger."""
    if min_schema >= UNFINISHED:
        why = (
            "a copy into it is not finished; "
            "`towpath ledger copy` with the same source and target finishes it"
        )
        raise NotALedger(path=place, why=why)
    if min_schema > known:
        raise NewerSchema(path=place, schema=schema, min_schema=min_schema, known=known)


def refuse_content(store: Store) -> None:
    found = [f"{count} rows in {table.name}" for table in TABLES if (count := store.count(table))]
    if found:
        expected = f"an empty ledger to copy into; this one has {', '.join(found)}"
        raise InvalidInput(field="target", value=store.place, expected=expected)


def occupied(store: Store) -> InvalidInput:
    expected = "a ledger into which no other copy is being made; wait until that one has ended"
    return InvalidInput(field="target", value=store.place, expected=expected)


def copy(source: Store, target: Store, progress: Progress) -> Copied:
    """Copy and verify. Raises `StoreFailed` if `source` was written to meanwhile."""
    with target.reserved():
        source.apply_user_appends()
        return _copy(source, target, progress)


def _copy(source: Store, target: Store, progress: Progress) -> Copied:
    meta = source.read_meta()
    assert meta is not None, "the source was opened as a ledger before"
    resumed = _begin(target, meta)
    for table in TABLES:
        _copy_table(source, target, table, progress)
    ours, theirs = digest(source, progress), digest(target, progress)
    if source.apply_user_appends() or ours != theirs or source.read_meta() != meta:
        target.begin(meta)  # deletes the copy: the next attempt starts from the beginning
        raise StoreFailed(path=source.place, error=_mismatch(ours, theirs))
    target.finish(_min_schema(target))
    return Copied(*ours, resumed)


def _begin(target: Store, meta: MetaRow) -> bool:
    """Prepare the target. Returns whether an unfinished copy of the same source continues."""
    found = target.read_meta()
    if found is None or not found.is_unfinished:
        target.migrate()
    elif found.schema != target.known:
        expected = "a copy that was begun by this version of Towpath; delete it and copy again"
        raise InvalidInput(field="target", value=target.place, expected=expected)
    elif _counters(found) == _counters(meta):
        return True
    target.begin(meta)
    return False


def _counters(meta: MetaRow) -> tuple[int, int, int]:
    return meta.next_seq, meta.next_version, meta.last


def _min_schema(target: Store) -> int:
    meta = target.read_meta()
    assert meta is not None
    return meta.min_schema - UNFINISHED


def _copy_table(source: Store, target: Store, table: Table, progress: Progress) -> None:
    total, done = source.count(table), target.count(table)
    for chunk in _chunks(source.stream(table, target.last_key(table))):
        target.add(table, chunk)
        done += len(chunk)
        progress(f"copying {table.name}", done, total)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row if isinstance(value, bytes | str))
        if len(chunk) == ROWS or size >= BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def digest(store: Store, progress: Progress) -> tuple[dict[str, int], str]:
    """Rows by table, and a hash over all of them in the order of their keys."""
    encoder, found, whole = msgspec.msgpack.Encoder(), dict[str, int](), hashlib.sha256()
    for table in TABLES:
        whole.update(f"{table.name} {' '.join(table.columns)}\n".encode())
        total, count = store.count(table), 0
        for row in store.stream(table):
            whole.update(encoder.encode(row))
            count += 1
            if count % ROWS == 0 or count == total:
                progress(f"verifying {table.name} of {store.place}", count, total)
        found[table.name] = count
    meta = store.read_meta()
    assert meta is not None
    whole.update(encoder.encode(_counters(meta)))
    return found, whole.hexdigest()


def _mismatch(ours: tuple[dict[str, int], str], theirs: tuple[dict[str, int], str]) -> str:
    differing = [
        f"{ours[0][name]} and {theirs[0][name]} rows in {name}"
        for name in ours[0]
        if ours[0][name] != theirs[0][name]
    ]
    what = ", ".join(differing) or "the same number of rows with other content"
    return f"it was written to while it was copied ({what}); stop every process that uses it and copy again"
