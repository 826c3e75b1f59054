"""The locks of owners beside the file: the holder of a lock is alive, whatever else happens to the
process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.ledger.sqlite.owners import SLOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases only")

PROGRAM = """
import os, sys
from towpath.ledger.sqlite import SqliteLedger
ledger = SqliteLedger(sys.argv[1])
ledger.owners.announce(sys.argv[2])
if "fork" in sys.argv and os.fork() == 0:
    print("child", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
if "fork" not in sys.argv:
    print("ready", flush=True)
sys.stdin.read()
ledger.close()
"""


@contextmanager
def process(path: Path, owner: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), owner, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline()
            yield started
        finally:
            started.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path)) as ledger:
        yield ledger


def test_dead_when_killed_until_it_is_forgotten(ledger: SqliteLedger) -> None:
    with process(ledger.path, "a#1") as a, process(ledger.path, "b#1"):
        assert ledger.owners.dead() == ()
        a.kill()
        a.wait()
        assert ledger.owners.dead() == ("a#1",)
        ledger.owners.forget(["b#1", "nobody"])
        assert ledger.owners.dead() == ("a#1",)
        ledger.owners.forget(["a#1"])
        assert ledger.owners.dead() == ()
    assert ledger.owners.dead() == ("b#1",)


def test_a_slot_is_used_again(ledger: SqliteLedger) -> None:
    for number in range(3):
        with process(ledger.path, f"a#{number}") as each:
            each.kill()
            each.wait()
        ledger.owners.forget(ledger.owners.dead())
    assert ledger.path.with_name("work.db-live").stat().st_size == SLOT


def test_an_orderly_close_withdraws(ledger: SqliteLedger) -> None:
    with process(ledger.path, "a#1") as each:
        each.communicate()
    assert each.returncode == 0
    assert ledger.owners.dead() == ()


def test_a_frozen_process_is_alive(ledger: SqliteLedger) -> None:
    with process(ledger.path, "a#1") as each:
        os.kill(each.pid, signal.SIGSTOP)
        assert ledger.owners.dead() == ()


def test_a_child_does_not_keep_the_lock_of_its_parent(ledger: SqliteLedger) -> None:
    with process(ledger.path, "a#1", "fork") as each, ExitStack() as stack:
        assert each.stdin is not None
        stack.callback(each.stdin.close)
        each.kill()
        assert each.wait() == -signal.SIGKILL
        assert ledger.owners.dead() == ("a#1",)


def test_several_ledgers_of_one_process(ledger: SqliteLedger, path: Path) -> None:
    """The locks of one are not freed when another one is closed."""
    ledger.owners.announce("a#1")
    with closing(SqliteLedger(path)) as other:
        other.owners.announce("b#1")
        assert (ledger.owners.dead(), other.owners.dead()) == ((), ())
    with closing(SqliteLedger(path)) as third:
        assert third.owners.dead() == ()


def test_the_file_is_deleted(ledger: SqliteLedger, path: Path) -> None:
    ledger.owners.announce("a#1")
    path.with_name("work.db-live").unlink()
    assert ledger.owners.dead() == ()
    with process(path, "b#1") as each:
        each.kill()
        each.wait()
    assert ledger.owners.dead() == ("b#1",)
    with closing(SqliteLedger(path)) as other:
        assert other.owners.dead() == ("b#1",)


def test_without_the_file_leases_decide(
    ledger: SqliteLedger, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.with_name("work.db-live").symlink_to(path.with_name("elsewhere"))
    with caplog.at_level(logging.WARNING):
        ledger.owners.announce("a#1")
        assert ledger.owners.dead() == ()
        ledger.owners.forget(["a#1"])
    assert len(caplog.messages) == 1
    assert "lease" in caplog.text
    assert not path.with_name("elsewhere").exists()


def test_the_mode_of_the_file_is_that_of_the_database(ledger: SqliteLedger, path: Path) -> None:
    ledger.owners.announce("a#1")
    assert path.with_name("work.db-live").stat().st_mode & 0o777 == path.stat().st_mode & 0o777
