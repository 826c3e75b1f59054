"""The two stores of the experiments: a SQLite file, and a PostgreSQL server of this program."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import apsw
import psycopg

from tests.chaos.actor import CREATE, TABLE
from towpath import open_ledger
from towpath.testing.postgres import Server, ServerFailed, bin_directory, place

MB = 1024 * 1024


class NotPermitted(Exception):
    """The experiment cannot be run here; the message has the reason."""


class Store(Protocol):
    """Where a ledger is. `folder` is for the records of the processes, outside of the store."""

    url: str
    folder: Path

    def applied(self) -> dict[str, int]:
        """The rows of the commit functions, counted by job."""
        ...


class SqliteStore:
    def __init__(self, folder: Path, where: Path | None = None) -> None:
        self.folder = folder
        self.path = (where or folder) / "work.db"
        self.url = f"sqlite:///{self.path}"
        open_ledger(self.url).close()
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            db.execute(CREATE)

    def applied(self) -> dict[str, int]:
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            rows: Any = db.execute(f"SELECT id, count(*) FROM {TABLE} GROUP BY id").fetchall()
            return dict(rows)


class PostgresStore:
    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self.url = server.create_database()
        open_ledger(self.url).close()
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(CREATE)

    def applied(self) -> dict[str, int]:
        with psycopg.connect(self.url, autocommit=True) as db:
            return dict(db.execute(f"SELECT id, count(*) FROM {TABLE} GROUP BY id").fetchall())


@contextlib.contextmanager
def sqlite_store() -> Iterator[SqliteStore]:
    with tempfile.TemporaryDirectory(prefix="towpath-chaos-") as folder:
        yield SqliteStore(Path(folder))


@contextlib.contextmanager
def postgres_store(checksums: bool = False, parent: Path | None = None) -> Iterator[PostgresStore]:
    """`fsync` is on: acknowledged commits are on the disk."""
    with (
        tempfile.TemporaryDirectory(prefix="towpath-chaos-") as folder,
        place(parent) as where,
        Server.start(where / "server", fsync=True) as server,
    ):
        if checksums:
            with server.outage():
                _enable_checksums(server)
        yield PostgresStore(Path(folder), server)


def _enable_checksums(server: Server) -> None:
    if not (bin_directory() / "pg_checksums").exists():
        raise NotPermitted("there is no pg_checksums")
    try:
        server._tools.run(
            str(server._tools._bin() / "pg_checksums"), "--enable", "-D", str(server.directory / "data")
        )
    except ServerFailed as error:
        if "already enabled" not in str(error):
            raise NotPermitted(str(error)) from None


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    folder = Path(tempfile.mkdtemp(prefix="towpath-chaos-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "towpath-chaos", str(folder)]
    try:
        if (
            os.geteuid() != 0
            or shutil.which("mount") is None
            or subprocess.run(command, check=False).returncode
        ):
            raise NotPermitted("mounting a small tmpfs needs root")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    finally:
        folder.rmdir()


@contextlib.contextmanager
def filled(disk: Path, left: int) -> Iterator[None]:
    """A file that takes all but about `left` bytes of a file system while the block lasts."""
    ballast = disk / "ballast"
    try:
        with ballast.open("wb") as file:
            free = os.statvfs(disk)
            for missing in range(16):
                # Other processes use space in the meantime.
                with contextlib.suppress(OSError):
                    os.posix_fallocate(
                        file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left - missing * MB)
                    )
                    break
        yield
    finally:
        ballast.unlink()
