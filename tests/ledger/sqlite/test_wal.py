"""The length of the write-ahead log beside several writing processes, and the findings of `doctor` if it is
long."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import apsw

from tests.support.shell import Shell
from tests.support.wal import BOUND, size, write_together
from towpath import new_id
from towpath.commands import Append, Spec
from towpath.ledger.sqlite.files import LOG_BYTES
from towpath.ledger.sqlite.ledger import SqliteLedger


def test_the_log_stays_short_beside_several_writers(tmp_path: Path) -> None:
    growth = write_together(tmp_path / "a.db", 120.0, jobs=20_000)
    assert growth.done >= 20_000
    assert LOG_BYTES // 4 < growth.largest < BOUND * 5 / 8, growth


def fill(ledger: SqliteLedger, megabytes: int) -> None:
    for _ in range(megabytes):
        ledger.apply([Append((Spec(id=new_id(), queue="q", payload=bytes(1024 * 1024)),))])


READER = """
import sys, apsw
reader = apsw.Connection(sys.argv[1])
reader.execute("BEGIN; SELECT count(*) FROM towpath_job").fetchall()
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_long_reader_is_named_and_the_log_is_short_again_after_it(tmp_path: Path) -> None:
    path, shell = tmp_path / "towpath.db", Shell(tmp_path)
    with closing(SqliteLedger(path)) as ledger:
        fill(ledger, 1)
        command = [sys.executable, "-c", READER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == "reading\n"
            fill(ledger, 70)
            assert size(path) > BOUND
            report = shell.run("doctor", "--json").json
            [finding] = [each for each in report["findings"] if "write-ahead log" in each["what"]]
            assert f"process {reader.pid} ({sys.executable} -c" in finding["advice"]
            assert [name.split()[1] for name in report["ledger"]["log_readers"]] == [str(reader.pid)]
            reader.communicate("")
        deadline = time.monotonic() + 60
        while size(path) > LOG_BYTES:
            assert time.monotonic() < deadline
            fill(ledger, 1)
        assert ledger.integrity() == []


def test_no_commit_waits_long_for_a_long_reader(tmp_path: Path) -> None:
    """Beside a reader all commits succeed; at most one per second tries to restart the log."""
    path = tmp_path / "a.db"
    with closing(SqliteLedger(path)) as ledger, closing(apsw.Connection(str(path))) as reader:
        fill(ledger, 1)
        reader.execute("BEGIN; SELECT count(*) FROM towpath_job").fetchall()
        fill(ledger, 30)
        assert size(path) > LOG_BYTES
        restarts = ledger._restart_due
        fill(ledger, 1)
        assert ledger._restart_due == restarts or ledger._restart_due >= restarts + 1.0
        # The wait for SQLite's own lock is as long as before.
        assert ledger._db.execute("PRAGMA busy_timeout").get == 10_000
