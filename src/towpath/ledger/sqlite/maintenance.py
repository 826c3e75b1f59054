"""The database as a whole: migrations of the schema, backup of a ledger in use, and its tables as
`tables.transfer.Store` for copying, checks and VACUUM."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import apsw

from towpath.errors import InvalidInput, NotALedger
from towpath.ledger.sqlite import rows as jobs
from towpath.ledger.sqlite.files import LOG_BYTES, SqliteOptions, connect, translate, translate_os
from towpath.ledger.sqlite.presence import long_readers
from towpath.ledger.sqlite.statements import insert, one
from towpath.ledger.tables import database, transfer
from towpath.ledger.tables.transfer import (
    TABLES,
    UNFINISHED,
    MetaRow,
    Row,
    Table,
    occupied,
    refuse_content,
)

_PAGES_PER_STEP: Final = 1000

Progress = Callable[[int, int], None]


def backup(source: apsw.Connection, target: Path, progress: Progress | None = None) -> None:
    """Copy the database of `source` to the new file `target`: as of one moment, in full or not at all.
    `progress` is called with the pages copied and the total.

    `source` must be a connection without other users (`connect_reader` opens one). It holds one read snapshot
    until the end: without it each commit of another process would restart the copy, and the copy of a busy
    ledger would never end. Writers continue, but the WAL cannot be reset meanwhile."""
    _check_target(target)
    with _temporary_beside(target) as temporary:
        try:
            _copy(source, temporary, progress)
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise translate(error, Path(source.filename), SqliteOptions()) from error
        except apsw.Error as error:
            raise translate(error, target, SqliteOptions()) from error
        _publish(temporary, target, os.stat(source.filename).st_mode & 0o777)


def _publish(temporary: Path, target: Path, mode: int) -> None:
    try:
        os.chmod(temporary, mode)
        _flush(temporary)
        _check_target(target)
        os.rename(temporary, target)
        _flush(target.parent)
    except OSError as error:
        raise translate_os(error, target) from error


def _check_target(target: Path) -> None:
    if os.path.lexists(target):
        raise InvalidInput(field="path", value=str(target), expected="a file that does not exist yet")
    if not target.parent.is_dir():
        raise InvalidInput(field="path", value=str(target), expected="a file in a directory that exists")


@contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    try:
        fd, name = tempfile.mkstemp(prefix=".backup-", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise translate_os(error, target) from error
    os.close(fd)
    try:
        yield Path(name)
    except BaseException:
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(name + suffix).unlink(missing_ok=True)
        raise


def _copy(source: apsw.Connection, temporary: Path, progress: Progress | None) -> None:
    copy = apsw.Connection(str(temporary), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        # No other process sees this file, and a partial one is deleted: no locks (the target may be on a
        # network file system), no journal, no sync.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=OFF", "synchronous=OFF"):
            copy.execute(f"PRAGMA {pragma}").fetchall()
        with _snapshot(source), copy.backup("main", source, "main") as steps:
            while not steps.done:
                steps.step(_PAGES_PER_STEP)
                if progress is not None:
                    progress(steps.page_count - steps.remaining, steps.page_count)
        # The header was copied and has journal mode WAL.
        copy.execute("PRAGMA journal_mode=DELETE").fetchall()
    finally:
        copy.close()


@contextmanager
def _snapshot(source: apsw.Connection) -> Iterator[None]:
    source.execute("BEGIN")
    try:
        source.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        yield
    finally:
        source.execute("ROLLBACK")


def _flush(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SqliteStore:
    def __init__(self, path: str, options: SqliteOptions) -> None:
        self._path = Path(os.path.realpath(path))
        self._options = options
        self.place = str(self._path)
        self.known = len(steps())
        self._db = connect(self._path, options)
        # A ledger checkpoints between batches; this connection has no batches.
        self._db.execute("PRAGMA wal_autocheckpoint=1000")

    def read_meta(self) -> MetaRow | None:
        if one(self._db, "SELECT 1 FROM sqlite_schema WHERE name = 'towpath_meta'") is None:
            return None
        with self._translated():
            return MetaRow(
                *one(self._db, "SELECT schema, min_schema, next_seq, next_version, last FROM towpath_meta")
            )

    def migrate(self) -> int:
        with self._translated():
            return migrate(self._db, self._path)

    def count(self, table: Table) -> int:
        with self._translated():
            if table.name == "body":
                return int(one(self._db, "SELECT count(DISTINCT slot / 1024) FROM towpath_body")[0])
            return int(one(self._db, f"SELECT count(*) FROM towpath_{table.name}")[0])

    def stream(self, table: Table, after: Row | None = None) -> Iterator[Row]:
        with self._translated():
            if table.name == "body":
                yield from self._bodies(after)
                return
            keys = _names(table.key)
            where = f"WHERE ({keys}) > ({', '.join('?' * len(table.key))})" if after is not None else ""
            yield from self._db.execute(
                f"SELECT {_names(table.columns)} FROM towpath_{table.name} {where} ORDER BY {keys}",
                after or (),
            )

    def _bodies(self, after: Row | None) -> Iterator[Row]:
        """Bodies joined from the pieces in which they are stored."""
        first = 0 if after is None else after[0] * jobs.SLOTS + (after[1] + 1) * 1024
        pieces = self._db.execute(
            "SELECT slot / 1024, data FROM towpath_body WHERE slot >= ? ORDER BY slot", (first,)
        )
        for body, found in groupby(pieces, lambda piece: int(piece[0])):
            yield *divmod(body, jobs.SLOTS // 1024), b"".join(data for _, data in found)

    def last_key(self, table: Table) -> Row | None:
        with self._translated():
            if table.name == "body":
                top = one(self._db, "SELECT max(slot) / 1024 FROM towpath_body")[0]
                return None if top is None else divmod(top, jobs.SLOTS // 1024)
            order = ", ".join(f'"{name}" DESC' for name in table.key)
            last = f"SELECT {_names(table.key)} FROM towpath_{table.name} ORDER BY {order} LIMIT 1"
            return one(self._db, last)  # type: ignore[no-any-return]

    def add(self, table: Table, rows: Sequence[Row]) -> None:
        with self._translated(), self._transaction():
            if table.name == "body":
                insert(self._db, jobs.INSERT_BODY, [piece for row in rows for piece in jobs.pieces(*row)])
            else:
                insert(self._db, f"INSERT INTO towpath_{table.name} ({_names(table.columns)})", rows)

    def apply_user_appends(self) -> int:
        return 0  # user transactions insert the jobs themselves

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Holds the lock of an empty database beside the ledger, which is released when the process ends."""
        beside = Path(f"{self._path}-copy")
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_NOFOLLOW
        with self._translated(), closing(apsw.Connection(str(beside), flags=flags)) as lock:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except apsw.BusyError:
                raise occupied(self) from None
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)

    def begin(self, meta: MetaRow) -> None:
        with self._translated(), self._transaction():
            found = self.read_meta()
            assert found is not None, "migrate it first"
            if found.is_unfinished:
                for table in TABLES:
                    self._db.execute(f"DELETE FROM towpath_{table.name}")
            else:
                transfer.check_schema(self.place, found.schema, found.min_schema, self.known)
                refuse_content(self)
            least = found.min_schema if found.is_unfinished else UNFINISHED + found.min_schema
            self._db.execute(
                "UPDATE towpath_meta SET min_schema = ?, next_seq = ?, next_version = ?, last = ?",
                (least, meta.next_seq, meta.next_version, meta.last),
            )

    def finish(self, min_schema: int) -> None:
        with self._translated():
            self._db.execute("UPDATE towpath_meta SET min_schema = ?", (min_schema,))
            self._db.execute("PRAGMA optimize")

    def vacuum(self) -> dict[str, int]:
        with self._translated():
            before = self._size()
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA optimize")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return {"bytes_before": before, "bytes": self._size()}

    def health(self) -> dict[str, Any]:
        log = Path(f"{self._path}-wal")
        length = log.stat().st_size if log.exists() else 0
        return {"wal_bytes": length, "log_readers": long_readers(self._path) if length > LOG_BYTES else []}

    def _size(self) -> int:
        return int(one(self._db, "PRAGMA page_count")[0]) * int(one(self._db, "PRAGMA page_size")[0])

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as error:
            raise translate(error, self._path, self._options, self._db) from error


def _names(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def steps() -> tuple[str, ...]:
    return database.steps("sqlite")


def migrate(db: apsw.Connection, path: Path) -> int:
    """Migrate the file to this version's schema. Returns the version that it had before, 0 for none. Of
    several processes that call this at once, one migrates. A step and its record are one transaction. There
    is no downgrade: restore a backup instead."""
    done = _stored_version(db, path)
    if done >= len(steps()):
        return done
    try:
        db.execute("BEGIN IMMEDIATE")
        done = _stored_version(db, path)
        for number, step in enumerate(steps()[done:], done + 1):
            db.execute(step)
            db.execute("UPDATE towpath_meta SET schema = ?", (number,))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return done


def _stored_version(db: apsw.Connection, path: Path) -> int:
    if one(db, "SELECT 1 FROM sqlite_schema WHERE name = 'towpath_meta'") is None:
        if one(db, "SELECT 1 FROM sqlite_schema WHERE name LIKE 'towpath\\_%' ESCAPE '\\'") is not None:
            raise NotALedger(path=str(path), why="it has towpath_ tables but no towpath_meta")
        return 0
    schema, min_schema = one(db, "SELECT schema, min_schema FROM towpath_meta")
    check_schema(path, schema, min_schema)
    return int(schema)


def check_schema(path: Path, schema: int, min_schema: int) -> None:
    transfer.check_schema(str(path), schema, min_schema, len(steps()))
