from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import apsw
import pytest

from towpath.errors import Damaged, InvalidInput, StoreFailed
from towpath.ledger.sqlite.files import SqliteOptions, connect, connect_reader
from towpath.ledger.sqlite.maintenance import backup

OPTIONS = SqliteOptions()
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[apsw.Connection]:
    writer = connect(tmp_path / "a.db", OPTIONS)
    writer.execute("CREATE TABLE theirs (a INTEGER PRIMARY KEY, b)")
    with writer:
        writer.executemany("INSERT INTO theirs (b) VALUES (zeroblob(?))", [(3000,)] * 5000)
    reader = connect_reader(tmp_path / "a.db", OPTIONS)
    yield reader
    reader.close()
    writer.close()


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def count(path: Path) -> int:
    copy = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    assert copy.execute("PRAGMA integrity_check").get == "ok"
    assert copy.execute("PRAGMA journal_mode").get == "delete"
    rows = copy.execute("SELECT count(*) FROM theirs").get
    copy.close()
    assert isinstance(rows, int)
    return rows


def test_a_copy_is_one_whole_file(tmp_path: Path, source: apsw.Connection) -> None:
    (tmp_path / "a.db").chmod(0o640)
    target = tmp_path / "copies" / "b.db"
    target.parent.mkdir()
    steps: list[tuple[int, int]] = []
    backup(source, target, lambda *step: steps.append(step))
    assert names(target.parent) == {"b.db"}
    assert count(target) == 5000
    assert target.stat().st_mode & 0o777 == 0o640
    assert len(steps) > 2
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] == target.stat().st_size // 4096


def test_a_copy_can_be_opened_and_go_on(tmp_path: Path, source: apsw.Connection) -> None:
    backup(source, tmp_path / "b.db")
    writer = connect(tmp_path / "b.db", OPTIONS)
    writer.execute("INSERT INTO theirs (b) VALUES (1)")
    assert writer.execute("SELECT count(*) FROM theirs").get == 5001
    writer.close()


def _write(path: Path, pipe: Connection) -> None:
    """Two rows in each transaction, until the stop event."""
    writer = connect(path, OPTIONS)
    for number in itertools.count():
        writer.execute(
            "BEGIN IMMEDIATE; INSERT INTO theirs (b) VALUES (1); INSERT INTO theirs (b) VALUES (2); COMMIT"
        )
        if number == 10:
            pipe.send("writing")
        if pipe.poll():
            break
    pipe.send(number + 1)
    writer.close()


def test_a_copy_beside_a_busy_writer_is_of_one_moment(tmp_path: Path, source: apsw.Connection) -> None:
    ours, theirs = SPAWN.Pipe()
    writer = SPAWN.Process(target=_write, args=(tmp_path / "a.db", theirs), daemon=True)
    writer.start()
    assert ours.poll(60)
    assert ours.recv() == "writing"
    steps: list[tuple[int, int]] = []
    backup(source, tmp_path / "b.db", lambda *step: steps.append(step))
    ours.send("stop")
    written = ours.recv()
    writer.join(60)
    assert steps == sorted(steps), "the copy started anew"
    copied = count(tmp_path / "b.db")
    assert copied % 2 == 0
    assert 5000 + 20 <= copied <= 5000 + 2 * written


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_an_existing_target_is_refused(tmp_path: Path, source: apsw.Connection, kind: str) -> None:
    target = tmp_path / "b.db"
    match kind:
        case "file":
            target.write_text("precious")
        case "directory":
            target.mkdir()
        case _:
            target.symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        backup(source, target)
    assert caught.value.details["field"] == "path"
    assert names(tmp_path) == before
    assert kind != "file" or target.read_text() == "precious"


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path, source: apsw.Connection) -> None:
    target = tmp_path / "b.db"

    def appear(done: int, total: int) -> None:
        target.write_text("precious")

    with pytest.raises(InvalidInput):
        backup(source, target, appear)
    assert target.read_text() == "precious"
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_a_target_without_a_directory_is_refused(tmp_path: Path, source: apsw.Connection) -> None:
    with pytest.raises(InvalidInput):
        backup(source, tmp_path / "none" / "b.db")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, source: apsw.Connection) -> None:
    before = names(tmp_path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(source, tmp_path / "b.db", stop)
    assert names(tmp_path) == before
    assert not source.in_transaction
    backup(source, tmp_path / "b.db")


def test_a_source_in_a_transaction_is_refused(tmp_path: Path, source: apsw.Connection) -> None:
    before = names(tmp_path)
    source.execute("BEGIN")
    with pytest.raises(StoreFailed, match="within a transaction"):
        backup(source, tmp_path / "b.db")
    assert source.in_transaction
    assert names(tmp_path) == before
    source.execute("ROLLBACK")


def test_a_damaged_source_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    writer = connect(path, OPTIONS)
    writer.execute("CREATE TABLE theirs (a)")
    writer.close()
    path.write_bytes(path.read_bytes()[:4000])
    damaged = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    with pytest.raises(Damaged) as caught:
        backup(damaged, tmp_path / "b.db")
    assert caught.value.details["path"] == str(path)
    assert "b.db" not in names(tmp_path)
    damaged.close()
