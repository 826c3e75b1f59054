from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import apsw
import pytest

from towpath.errors import (
    Damaged,
    DiskFull,
    InvalidInput,
    LedgerBusy,
    LedgerClosed,
    NotALedger,
    StoreFailed,
    TowpathError,
)
from towpath.ledger.sqlite.files import (
    SqliteOptions,
    connect,
    connect_reader,
    network_kind,
    open_beside,
    options_of,
    translate,
)
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.operations import maintenance

OPTIONS = SqliteOptions()
SPAWN = multiprocessing.get_context("spawn")
NOBODY = 65534

MOUNTS = r"""21 28 0:19 / /proc rw,nosuid shared:12 - proc proc rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 28 0:31 / /mnt/share rw,relatime shared:2 master:3 - nfs4 server:/export rw,vers=4.2
31 30 254:1 / /mnt/share/disk rw,relatime - xfs /dev/vdb rw
32 28 0:33 / /mnt/two\040words rw - cifs //server/share rw
33 28 0:34 / /mnt/ssh rw - fuse.sshfs me@host: rw
34 28 0:35 / /mnt/ntfs rw - fuse.ntfs-3g /dev/vdc rw
35 28 0:36 / /mnt/hidden rw - nfs server:/a rw
36 28 254:2 / /mnt/hidden rw - ext4 /dev/vdd rw
37 28 0:37 / /mnt/host rw - 9p host rw,trans=virtio
a line that is no mount
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are closed to them."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


CHILD = f"""
import os
import resource
import sys
from pathlib import Path
from towpath.errors import TowpathError
from towpath.ledger.sqlite import SqliteLedger
from towpath.ledger.sqlite.files import SqliteOptions, connect, connect_reader
from towpath.ledger.sqlite.process_turns import ProcessTurns
from towpath.ledger.sqlite.wakeups import WakeFile

OPTIONS = SqliteOptions(busy_timeout=0.2)
path = Path(sys.argv[1])
if os.geteuid() == 0:  # only now: others may not be able to read the interpreter
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
try:
    exec(sys.argv[2])
    print("fine")
except TowpathError as error:
    print(type(error).__name__, error.details)
"""


def as_somebody_else(path: Path, act: str) -> str:
    """The result of `act` in a process of a user with limited permissions (root has no limits)."""
    command = [sys.executable, "-c", CHILD, str(path), act]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def make(path: Path, rows: int = 0) -> None:
    connection = connect(path, OPTIONS)
    connection.execute("CREATE TABLE theirs (a)")
    with connection:
        connection.executemany("INSERT INTO theirs VALUES (zeroblob(3000))", [()] * rows)
    connection.close()


def pragma(connection: apsw.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").get


def test_the_writer_is_set_up_as_promised(tmp_path: Path) -> None:
    writer = connect(tmp_path / "new.db", SqliteOptions(cache_mb=3, busy_timeout=1.5, max_pages=5000))
    modes = {
        name: pragma(writer, name)
        for name in (
            "journal_mode",
            "synchronous",
            "wal_autocheckpoint",
            "cache_size",
            "foreign_keys",
            "temp_store",
        )
    }
    assert modes == {
        "journal_mode": "wal",
        "synchronous": 2,
        "wal_autocheckpoint": 0,
        "cache_size": -3072,
        "foreign_keys": 1,
        "temp_store": 2,
    }
    assert (pragma(writer, "busy_timeout"), pragma(writer, "max_page_count")) == (1500, 5000)
    writer.close()
    relaxed = connect(tmp_path / "new.db", SqliteOptions(synchronous="normal"))
    assert pragma(relaxed, "synchronous") == 1
    relaxed.close()


@pytest.mark.parametrize(
    "options",
    [
        {"synchronous": "off"},
        {"synchronous": "FULL"},
        {"busy_timeout": 0},
        {"busy_timeout": -1.0},
        {"busy_timeout": math.inf},
        {"busy_timeout": math.nan},
        {"busy_timeout": True},
        {"busy_timeout": "1"},
        {"cache_mb": 0},
        {"cache_mb": 1.5},
        {"max_pages": 0},
        {"max_pages": 2**32},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        SqliteOptions(**options)
    assert caught.value.details["field"] == next(iter(options))


def test_an_enormous_timeout_is_no_overflow(tmp_path: Path) -> None:
    connect(tmp_path / "a.db", SqliteOptions(busy_timeout=1e300)).close()


def test_the_tables_of_others_are_welcome(tmp_path: Path) -> None:
    theirs = apsw.Connection(str(tmp_path / "a.db"))
    theirs.execute("CREATE TABLE theirs (a); INSERT INTO theirs VALUES (1)")
    theirs.close()
    writer = connect(tmp_path / "a.db", OPTIONS)
    assert writer.execute("SELECT a FROM theirs").get == 1
    assert pragma(writer, "journal_mode") == "wal"
    writer.close()


@pytest.mark.parametrize(
    "name", ["with space.db", "per%cent?mode=memory", "file:x.db", ":memory:", "zażółć.db"]
)
def test_odd_names_are_files_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    connect(Path(name), OPTIONS).close()
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize("name", ["a\0b", "a\udc80"])
def test_names_sqlite_cannot_spell_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput):
        connect(tmp_path / name, OPTIONS)


def test_a_symbolic_link_leads_to_one_set_of_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "a.db")
    make(tmp_path / "link.db")
    os.close(open_beside(tmp_path / "link.db", "-turn", os.O_RDONLY))
    assert {file.name for file in (tmp_path / "real").iterdir()} == {"a.db", "a.db-turn"}


@pytest.mark.parametrize("content", [b"hello, world", b"hello, world" * 1000, b"\0" * 8192])
def test_not_a_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for way in (connect, connect_reader):
        with pytest.raises(NotALedger):
            way(path, OPTIONS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("keep", [50, 100, 1000, 4096, 5000, 40960])
def test_a_truncated_database_is_found_when_opened(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.db"
    make(path, rows=30)
    path.write_bytes(path.read_bytes()[:keep])
    for way in (connect, connect_reader):
        with pytest.raises(Damaged):
            way(path, OPTIONS)


def test_an_empty_file_becomes_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    connect(tmp_path / "a.db", OPTIONS).close()


def test_the_directory_is_missing(tmp_path: Path) -> None:
    for way in (connect, connect_reader):
        with pytest.raises(NotALedger, match="its directory does not exist"):
            way(tmp_path / "none" / "a.db", OPTIONS)
    (tmp_path / "file").touch()
    with pytest.raises(NotALedger, match="its directory does not exist"):
        connect(tmp_path / "file" / "a.db", OPTIONS)


def test_the_path_is_a_directory(tmp_path: Path) -> None:
    for way in (connect, connect_reader):
        with pytest.raises(NotALedger, match="it is a directory"):
            way(tmp_path, OPTIONS)


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotALedger, match="it does not exist"):
        connect_reader(tmp_path / "a.db", OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_reader_sees_commits_and_cannot_write(tmp_path: Path) -> None:
    writer = connect(tmp_path / "a.db", OPTIONS)
    reader = connect_reader(tmp_path / "a.db", OPTIONS)
    writer.execute("CREATE TABLE theirs (a); INSERT INTO theirs VALUES (7)")
    assert reader.execute("SELECT a FROM theirs").get == 7
    with pytest.raises(apsw.ReadOnlyError):
        reader.execute("INSERT INTO theirs VALUES (8)")
    reader.close()
    writer.close()


def test_a_read_only_file(open_directory: Path) -> None:
    path = open_directory / "a.db"
    make(path)
    path.chmod(0o444)
    assert as_somebody_else(path, "connect(path, OPTIONS)").startswith("ReadOnly")


def test_an_unreadable_file(open_directory: Path) -> None:
    path = open_directory / "a.db"
    make(path)
    path.chmod(0o000)
    for way in ("connect", "connect_reader"):
        assert as_somebody_else(path, f"{way}(path, OPTIONS)").startswith("ReadOnly")


def test_a_read_only_directory(open_directory: Path) -> None:
    old = open_directory / "old.db"
    make(old)
    old.chmod(0o666)
    open_directory.chmod(0o555)
    for path in (old, open_directory / "new.db"):
        assert as_somebody_else(path, "connect(path, OPTIONS)").startswith("ReadOnly")
    assert as_somebody_else(old, "ProcessTurns(path, 1.0)").startswith("ReadOnly")
    # Without the wake file the ledger is only slower.
    assert (
        as_somebody_else(old, "w = WakeFile(path); w.notify(); w.watch().__enter__().wait(0.01); w.close()")
        == "fine"
    )


def test_too_many_open_files_is_not_called_a_matter_of_permissions(open_directory: Path) -> None:
    act = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); connect(path, OPTIONS)"
    assert as_somebody_else(open_directory / "a.db", act).startswith("StoreFailed")


def test_files_beside_have_the_mode_of_the_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    make(path)
    for mode in (0o600, 0o664):
        path.chmod(mode)
        os.close(open_beside(path, f"-{mode}", os.O_RDWR))
        assert Path(f"{path}-{mode}").stat().st_mode & 0o777 == mode


BESIDE = ("", "-wal", "-shm", "-next", "-turn", "-wake")


@pytest.mark.parametrize(
    ("query", "umask", "mode"),
    [
        ("", 0o022, 0o600),
        ("", 0o000, 0o600),
        ("?mode=0660", 0o077, 0o660),
        ("?synchronous=normal&mode=644", 0o002, 0o644),
    ],
)
def test_the_mode_of_a_new_ledger(tmp_path: Path, query: str, umask: int, mode: int) -> None:
    act = f"""
import os, sys, towpath
os.umask({umask})
with towpath.App(sys.argv[1]) as app:
    app.queue("q").put("secret")
    os.kill(os.getpid(), 9)  # the -wal stays
"""
    subprocess.run([sys.executable, "-c", act, f"sqlite:///{tmp_path}/a.db{query}"], check=False)
    files = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert files == {f"a.db{suffix}": mode for suffix in BESIDE}


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    path.chmod(0o640)
    with closing(SqliteLedger(path, SqliteOptions(mode=0o666))):
        assert {Path(f"{path}{suffix}").stat().st_mode & 0o777 for suffix in BESIDE} == {0o640}


@pytest.mark.parametrize("mode", ["", "9", "0999", "07777", "0444", "0700", "0o660"])
def test_a_wrong_mode_is_refused(mode: str) -> None:
    with pytest.raises(InvalidInput, match="mode"):
        options_of(f"sqlite:///a.db?mode={mode}")


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory"])
def test_files_beside_must_be_regular(tmp_path: Path, kind: str) -> None:
    """In a directory that other users can write, a link may lead to any file, and a FIFO blocks the process
    that opens it."""
    path, beside, victim = tmp_path / "a.db", tmp_path / "a.db-next", tmp_path / "victim"
    make(path)
    if kind == "fifo":
        os.mkfifo(beside)
    elif kind == "directory":
        beside.mkdir()
    else:
        beside.symlink_to(victim)
    if kind == "link":
        victim.write_text("precious")
    with pytest.raises(OSError, match=r"regular file|symbolic link|directory"):
        open_beside(path, "-next", os.O_RDWR)
    with pytest.raises(StoreFailed, match=r"regular file|symbolic link|directory"):
        SqliteLedger(path)
    assert victim.exists() == (kind == "link")
    assert kind != "link" or victim.read_text() == "precious"


def test_the_lock_of_a_copy_follows_no_link(tmp_path: Path) -> None:
    SqliteLedger(tmp_path / "a.db").close()
    (tmp_path / "b.db-copy").symlink_to(tmp_path / "victim")
    with pytest.raises(TowpathError):
        maintenance.copy(f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", lambda *_: None)
    assert not (tmp_path / "victim").exists()


def test_the_allowed_size_is_full(tmp_path: Path) -> None:
    options = SqliteOptions(max_pages=8)
    writer = connect(tmp_path / "a.db", options)
    writer.execute("CREATE TABLE theirs (a)")
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(apsw.FullError) as caught:
        writer.executemany("INSERT INTO theirs VALUES (zeroblob(3000))", [()] * 20)
    assert translate(caught.value, tmp_path / "a.db", options) == DiskFull(path=str(tmp_path / "a.db"))
    # SQLite has rolled back already: a ROLLBACK of ours would fail and hide the reason.
    assert not writer.in_transaction
    assert writer.execute("SELECT count(*) FROM theirs").get == 0
    writer.close()


def test_a_disk_too_full_for_the_shared_memory(tmp_path: Path) -> None:
    """SQLite reports an I/O error, which otherwise means damage."""
    error = apsw.exception_for(apsw.SQLITE_IOERR_SHMSIZE)
    assert isinstance(error, apsw.IOError)
    assert isinstance(translate(error, tmp_path / "a.db", OPTIONS), DiskFull)


def test_locked_by_a_stranger(tmp_path: Path) -> None:
    options = SqliteOptions(busy_timeout=0.2)
    path = tmp_path / "a.db"
    writer = connect(path, options)
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(apsw.BusyError) as caught:
        writer.execute("BEGIN IMMEDIATE")
    assert 0.15 < time.monotonic() - started < 2
    assert translate(caught.value, path, options) == LedgerBusy(path=str(path), seconds=0.2)
    stranger.close()
    writer.close()


def test_a_stranger_keeps_the_database_from_becoming_wal(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    stranger = apsw.Connection(str(path))
    stranger.execute("CREATE TABLE theirs (a); BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(LedgerBusy):
        connect(path, SqliteOptions(busy_timeout=0.2))
    assert 0.15 < time.monotonic() - started < 2
    stranger.close()
    connect(path, OPTIONS).close()


def test_a_snapshot_too_old_to_write_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    make(path, rows=1)
    old, new = connect(path, OPTIONS), connect(path, OPTIONS)
    old.execute("BEGIN; SELECT * FROM theirs").fetchall()
    new.execute("INSERT INTO theirs VALUES (1)")
    with pytest.raises(apsw.BusyError) as caught:
        old.execute("INSERT INTO theirs VALUES (2)")
    assert isinstance(translate(caught.value, path, OPTIONS), LedgerBusy)
    old.close()
    new.close()


def test_errors_outside_of_the_ledger_keep_the_text_of_sqlite(tmp_path: Path) -> None:
    writer = connect(tmp_path / "a.db", OPTIONS)
    with pytest.raises(apsw.SQLError) as caught:
        writer.execute("SELECT * FROM nowhere")
    assert translate(caught.value, Path("a.db"), OPTIONS) == StoreFailed(
        path="a.db", error="no such table: nowhere"
    )
    writer.close()
    with pytest.raises(apsw.ConnectionClosedError) as closed:
        writer.execute("SELECT 1")
    assert isinstance(translate(closed.value, Path("a.db"), OPTIONS), LedgerClosed)


def test_without_shared_memory_there_is_no_wal(tmp_path: Path) -> None:
    with pytest.raises(NotALedger, match="journal mode stays"):
        connect(tmp_path / "a.db", SqliteOptions(vfs="memdb"))


def _create(path: Path, barrier: Barrier) -> None:
    barrier.wait(60)
    connection = connect(path, OPTIONS)
    connection.execute(
        "BEGIN IMMEDIATE; CREATE TABLE IF NOT EXISTS theirs (a); INSERT INTO theirs VALUES (1); COMMIT"
    )
    connection.close()


def _create_many(directory: Path, rounds: int, barrier: Barrier) -> None:
    for number in range(rounds):
        _create(directory / f"{number}.db", barrier)


def test_processes_may_create_one_file_at_once(tmp_path: Path) -> None:
    processes, rounds = 4, 25
    barrier = SPAWN.Barrier(processes)
    children = [
        SPAWN.Process(target=_create_many, args=(tmp_path, rounds, barrier), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0] * processes
    for number in range(rounds):
        reader = connect_reader(tmp_path / f"{number}.db", OPTIONS)
        assert reader.execute("SELECT count(*) FROM theirs").get == processes
        reader.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/a.db", None),
        ("/mnt/share/a.db", "nfs4"),
        ("/mnt/share/deep/er/a.db", "nfs4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/shareware/a.db", None),
        ("/mnt/share/disk/a.db", None),
        ("/mnt/two words/a.db", "cifs"),
        ("/mnt/ssh/a.db", "fuse.sshfs"),
        ("/mnt/ntfs/a.db", None),
        ("/mnt/hidden/a.db", None),
        ("/mnt/host/a.db", "9p"),
    ],
)
def test_network_mounts(path: str, kind: str | None) -> None:
    assert network_kind(Path(path), MOUNTS) == kind


def test_network_mounts_behind_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/mnt/share")
    assert network_kind(tmp_path / "link" / "a.db", MOUNTS) == "nfs4"
    assert network_kind(tmp_path / "a.db", "") is None


def test_this_machines_own_mounts_are_read(tmp_path: Path) -> None:
    assert network_kind(tmp_path / "a.db") is None
