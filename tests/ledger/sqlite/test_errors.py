"""Errors below the ledger: the right error class, no partial write, and later batches are applied where
possible."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from towpath.core.commands import Append, Appended, Claim, Note, Noted, Settle, Settled, Upkeep, Want
from towpath.core.edges import EdgeQuery
from towpath.core.job import Done, RetryOutcome, State
from towpath.core.views import GroupQuery, NoteQuery, Query
from towpath.errors import (
    CommandFailed,
    Damaged,
    DiskFull,
    LedgerBusy,
    LedgerClosed,
)
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock
from towpath.testing.suite.harness import LEASE, Harness, spec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def ledger(path: Path, clock: ManualClock) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path, SqliteOptions(busy_timeout=0.2), clock)) as ledger:
        yield ledger


@pytest.fixture
def harness(ledger: SqliteLedger) -> Harness:
    return Harness(ledger)


def execute(path: Path, sql: str) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(sql)


# The disk is full


def test_a_full_disk_in_the_middle_of_life(path: Path, clock: ManualClock) -> None:
    large = Append(tuple(spec(f"{n}", payload=bytes(50_000)) for n in range(20)))
    with closing(SqliteLedger(path, SqliteOptions(max_pages=150), clock)) as ledger:
        harness = Harness(ledger)
        harness.add("a", payload=bytes(50_000))
        for _ in range(2):
            with harness.unchanged(), pytest.raises(DiskFull):
                harness.ask(Note(key="k", value=b"v"), large, Append((spec("b"),)))
        assert ledger.integrity() == []
        harness.add("small")
        harness.done(harness.take())
    with closing(SqliteLedger(path, SqliteOptions(max_pages=1500), clock)) as ledger:
        harness = Harness(ledger)
        assert harness.at("a", "small") == "done ready"
        assert isinstance(harness.ask(large)[0], Appended)
        assert ledger.integrity() == []


def test_a_full_disk_is_cured_by_deleting(path: Path, clock: ManualClock) -> None:
    with closing(SqliteLedger(path, SqliteOptions(max_pages=150), clock)) as ledger:
        harness = Harness(ledger)
        harness.append(*(spec(f"{n}", payload=bytes(80_000)) for n in range(4)))
        more = Append(tuple(spec(f"more-{n}", payload=bytes(80_000)) for n in range(4)))
        with harness.unchanged(), pytest.raises(DiskFull):
            harness.ask(more)
        harness.cancel("0", "1", "2", "3")
        harness.purge("0", "1", "2", "3")
        assert isinstance(harness.ask(more)[0], Appended)
        assert ledger.integrity() == []


class FullVfs(apsw.VFS):
    """A disk with room for the log but not for the database."""

    def __init__(self) -> None:
        super().__init__("full", "")
        self.full = False

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return FullFile(name, flags, self)


class FullFile(apsw.VFSFile):
    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], vfs: FullVfs) -> None:
        super().__init__("", name, flags)
        self._is_database = bool(flags[1] & apsw.SQLITE_OPEN_MAIN_DB)
        self._vfs = vfs

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self._is_database and self._vfs.full:
            raise apsw.exception_for(apsw.SQLITE_FULL)
        super().xWrite(data, offset)

    def excepthook(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """It is expected."""
        return True


def test_a_checkpoint_that_fails_does_not_deny_the_commit(path: Path, clock: ManualClock) -> None:
    vfs = FullVfs()
    points: list[str] = []
    with closing(SqliteLedger(path, SqliteOptions(vfs="full", fault=points.append), clock)) as ledger:
        harness = Harness(ledger)
        vfs.full = True
        harness.add("a", payload=bytes(10_000_000))
        harness.add("b")
        vfs.full = False
        harness.add("c")
        assert harness.at("a", "b", "c") == "ready ready ready"
        assert points[-1] == "checkpointed"
        assert ledger.integrity() == []
    vfs.unregister()


def test_a_checkpoint_of_another_connection_does_not_fail_the_commit(path: Path, clock: ManualClock) -> None:
    """Two connections cannot checkpoint at once: the second gets BUSY, after its COMMIT."""
    inside, leave = threading.Event(), threading.Event()
    vfs = SlowVfs(inside, leave)
    first = SqliteLedger(path, SqliteOptions(vfs="slow"), clock)
    second = SqliteLedger(path, SqliteOptions(), clock)
    vfs.slow = True
    thread = threading.Thread(target=first.apply, args=([Append((spec("a", payload=bytes(10_000_000)),))],))
    thread.start()
    assert inside.wait(60)
    answers = second.apply([Append((spec("b", payload=bytes(10_000_000)),))])
    leave.set()
    thread.join(60)
    assert isinstance(answers[0], Appended)
    assert Harness(second).at("a", "b") == "ready ready"
    assert second.integrity() == []
    first.close()
    second.close()
    vfs.unregister()


class SlowVfs(apsw.VFS):
    """Blocks the first write to the database until the test continues it."""

    def __init__(self, inside: threading.Event, leave: threading.Event) -> None:
        super().__init__("slow", "")
        self.slow, self.inside, self.leave = False, inside, leave

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return SlowFile(name, flags, self)


class SlowFile(apsw.VFSFile):
    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], vfs: SlowVfs) -> None:
        super().__init__("", name, flags)
        self._is_database = bool(flags[1] & apsw.SQLITE_OPEN_MAIN_DB)
        self._vfs = vfs

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self._is_database and self._vfs.slow:
            self._vfs.inside.set()
            assert self._vfs.leave.wait(60)
        super().xWrite(data, offset)


# Another connection holds the lock


def test_a_stranger_holds_the_lock_too_long(harness: Harness, ledger: SqliteLedger, path: Path) -> None:
    harness.add("a")
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN IMMEDIATE; UPDATE towpath_meta SET last = last")
    for _ in range(2):
        with (
            harness.unchanged(),
            pytest.raises(LedgerBusy, match=r"locked by another connection for more than 0\.2 s"),
        ):
            harness.add("b")
    assert harness.found() == ["a"]
    stranger.execute("ROLLBACK")
    harness.add("b")
    stranger.close()
    assert ledger.integrity() == []


# Closed and forked


def test_a_closed_ledger_raises(ledger: SqliteLedger, tmp_path: Path) -> None:
    ledger.close()
    ledger.close()
    with closing(apsw.Connection(str(ledger.path))) as mine:
        calls: dict[str, Callable[[], object]] = {
            "append_on": lambda: ledger.append_on(mine, [spec("a")]),
            "apply": lambda: ledger.apply([Upkeep()]),
            "backup": lambda: ledger.backup(tmp_path / "copy.db"),
            "check": ledger.check,
            "chunk": lambda: ledger.chunk("b", 0),
            "dump": ledger.dump,
            "attempts": lambda: ledger.attempts("a"),
            "edges": lambda: ledger.edges(EdgeQuery(into="a")),
            "explain": lambda: ledger.explain("a"),
            "find": lambda: ledger.find(Query()),
            "get": lambda: ledger.get("a"),
            "get_many": lambda: ledger.get_many(["a"]),
            "group": lambda: ledger.group("g"),
            "groups": lambda: ledger.groups(GroupQuery()),
            "integrity": ledger.integrity,
            "last": ledger.last,
            "lookup": lambda: ledger.lookup("a"),
            "rehearse": lambda: ledger.rehearse(lambda connection: None),
            "note": lambda: ledger.note("k"),
            "notes": lambda: ledger.notes(NoteQuery()),
            "parts": lambda: ledger.parts("q"),
            "queue": lambda: ledger.queue("q"),
            "queues": ledger.queues,
            "version": ledger.version,
            "wait": lambda: ledger.wait(0, 5.0),
            "winners": lambda: ledger.winners(group="g"),
        }
        public = {name for name in dir(SqliteLedger) if not name.startswith("_")}
        assert public - {"capabilities", "close", "repeats"} == calls.keys()
        for call in calls.values():
            with pytest.raises(LedgerClosed):
                call()
    assert not (tmp_path / "copy.db").exists()


def test_a_waiter_gets_the_error_of_the_close(ledger: SqliteLedger) -> None:
    waiting, errors = threading.Event(), list[type[BaseException]]()
    seen = ledger.version()

    def wait() -> None:
        waiting.set()
        try:
            ledger.wait(seen, 60.0)
        except LedgerClosed as error:
            errors.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    ledger.close()
    thread.join(5)
    assert errors == [LedgerClosed]


FORKS = """
import os, sys
from pathlib import Path
from towpath.commands import Append, Upkeep
from towpath.core.job import Spec
from towpath.core.views import Query
from towpath.errors import Forked
from towpath.ledger.sqlite import SqliteLedger

ledger = SqliteLedger(sys.argv[1])
ledger.apply([Append((Spec(id="a", queue="q"),))])
calls = {
    "apply": lambda: ledger.apply([Upkeep()]), "get": lambda: ledger.get("a"),
    "get_many": lambda: ledger.get_many(["a"]), "find": lambda: ledger.find(Query()),
    "lookup": lambda: ledger.lookup("a"),
    "queues": ledger.queues, "check": ledger.check, "dump": ledger.dump, "integrity": ledger.integrity,
    "last": ledger.last,
    "version": ledger.version, "wait": lambda: ledger.wait(0, 5.0),
    "backup": lambda: ledger.backup(sys.argv[1] + ".copy"),
    "note": lambda: ledger.note("k"), "explain": lambda: ledger.explain("a"),
    "parts": lambda: ledger.parts("q"),
    "group": lambda: ledger.group("g"), "append_on": lambda: ledger.append_on(None, []),
}
child = os.fork()
if child == 0:
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(name)
        except Forked as error:
            assert str(os.getppid()) in str(error)
    ledger.close()
    own = SqliteLedger(sys.argv[1])
    own.apply([Append((Spec(id="b", queue="q"),))])
    own.close()
    print("child", wrong, flush=True)
    os._exit(0)
os.waitpid(child, 0)
ledger.apply([Append((Spec(id="c", queue="q"),))])
print("parent", len(ledger.find(Query()).jobs), ledger.integrity())
ledger.close()
"""


def test_a_forked_child_gets_an_error(path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.splitlines() == ["child []", "parent 3 []"], ran.stderr


BUSY_FORKS = """
import os, signal, sys, threading, warnings
from towpath.commands import Append
from towpath.core.job import Spec
from towpath.core.views import Query
from towpath.ledger.sqlite import SqliteLedger

warnings.simplefilter("ignore")
ledger = SqliteLedger(sys.argv[1])
ledger.apply([Append(tuple(Spec(id=f"{n}", queue="q") for n in range(500)))])
over = threading.Event()

def read():
    while not over.is_set():
        ledger.find(Query(limit=500))

threads = [threading.Thread(target=read), threading.Thread(target=read)]
for thread in threads:
    thread.start()
ended = []
for n in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        own = SqliteLedger(sys.argv[1])
        own.queues()
        os._exit(0)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if any(ended):
        break
over.set()
for thread in threads:
    thread.join()
print(ended.count(0), flush=True)
"""


def test_a_fork_beside_busy_threads_leaves_the_child_no_locked_library(path: Path) -> None:
    """SQLite's own mutexes are copied as they are: one that another thread held would be locked in the child
    for ever."""
    ran = subprocess.run(
        [sys.executable, "-c", BUSY_FORKS, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout == "60\n", ran.stderr


# A defect in one command


def test_a_defect_in_one_command_spares_the_other_commands(harness: Harness, path: Path) -> None:
    hurt, well = harness.started("hurt", "hurt"), harness.started("well", "well")
    harness.add("wanted", "well")
    execute(path, "UPDATE towpath_queue SET running = 0 WHERE name = 'hurt'")
    answers = harness.ask(
        Append((spec("before"),)),
        Settle("hurt", hurt.fence, Done(), spawn=(spec("child"),), notes=(Note(key="n", value=b"v"),)),
        Settle("well", well.fence, Done(b"r")),
        Note(key="k", value=b"v"),
        Claim(owner="me", wants=(Want("well"),), lease=LEASE),
    )
    before, failed, settled, noted, claimed = answers
    assert isinstance(before, Appended)
    assert isinstance(failed, CommandFailed)
    assert failed.details["command"] == "Settle"
    assert "CHECK constraint failed" in failed.details["error"]
    assert (settled, noted) == (Settled("well", State.DONE), Noted("k", 1, 1))
    assert "wanted" in str(claimed)
    assert harness.at("before", "hurt", "well", "wanted") == "ready running done running"
    assert harness.ledger.get("child") is None
    assert harness.ledger.note("n") is None
    execute(path, "UPDATE towpath_queue SET running = 1 WHERE name = 'hurt'")
    assert harness.ledger.check() == []
    assert harness.ask(Settle("hurt", hurt.fence, RetryOutcome())) == [Settled("hurt", State.READY)]
    assert harness.ledger.check() == []


@pytest.mark.parametrize("column", ["reason", "kind"])
def test_a_settle_does_not_mind_what_it_need_not_know(harness: Harness, path: Path, column: str) -> None:
    """The handler has ended, and its settle is stored. A read of the damaged row still raises."""
    held, well = harness.started("hurt", "hurt"), harness.started("well", "well")
    value = "'nonsense'" if column == "reason" else "x'ff'"
    execute(
        path,
        f"PRAGMA ignore_check_constraints=1; UPDATE towpath_job SET {column} = CAST({value} AS TEXT) WHERE id"
        " = 'hurt'",
    )
    with pytest.raises(Damaged):
        harness.job("hurt")
    both = harness.ask(Settle("hurt", held.fence, Done()), Settle("well", well.fence, Done()))
    assert both == [Settled("hurt", State.DONE), Settled("well", State.DONE)]
    if column == "kind":
        with pytest.raises(Damaged):
            harness.job("hurt")


@pytest.mark.parametrize("column", ["cancel_requested", "key"])
def test_a_row_that_makes_no_sense_spares_the_others(harness: Harness, path: Path, column: str) -> None:
    """Changed with constraints off."""
    held, well = harness.started("hurt", "hurt"), harness.started("well", "well")
    value = "'nonsense'" if column != "key" else "x'ff'"
    execute(
        path,
        f"PRAGMA ignore_check_constraints=1; UPDATE towpath_job SET {column} = CAST({value} AS TEXT) WHERE id"
        " = 'hurt'",
    )
    failed, settled = harness.ask(Settle("hurt", held.fence, Done()), Settle("well", well.fence, Done()))
    assert isinstance(failed, CommandFailed)
    assert settled == Settled("well", State.DONE)
    with pytest.raises(Damaged):
        harness.job("hurt")
    assert harness.at("well") == "done"
