"""A copy of the ledger while it works: complete as of one moment, one file, there in full or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import apsw

from towpath.errors import InvalidInput
from towpath.ledger.sqlite.files import SqliteOptions, translate, translate_os

_PAGES_PER_STEP: Final = 1000

Progress = Callable[[int, int], None]


def backup(source: apsw.Connection, target: Path, progress: Progress | None = None) -> None:
    """Copy the database of `source` to the new file `target`; `progress` gets the pages copied and the pages in all.

    `source` must be a connection that nobody else uses meanwhile (`connect_reader` makes one). It holds one read snapshot
    until the end: without it every commit of another process would start the copy anew, and a busy ledger could never be
    copied. Writers go on, only the WAL cannot be reset so long.
    """
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
        # Nobody else sees this file and a torn one is deleted: no locks (the target may be on a network), no journal, no sync.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=OFF", "synchronous=OFF"):
            copy.execute(f"PRAGMA {pragma}").fetchall()
        with _snapshot(source), copy.backup("main", source, "main") as steps:
            while not steps.done:
                steps.step(_PAGES_PER_STEP)
                if progress is not None:
                    progress(steps.page_count - steps.remaining, steps.page_count)
        # The copy's header still says WAL.
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
