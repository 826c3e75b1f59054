"""backup, check, doctor, bench: maintenance commands."""

from __future__ import annotations

from pathlib import Path

import apsw

import towpath
from tests.support.shell import Shell
from towpath import commands
from towpath.clock import SystemClock
from towpath.commands import Spec, micros

HOUR = micros(3600)


def test_backup(shell: Shell) -> None:
    id = shell.put()
    data = shell.run("backup", "copy.db", "--json").json
    assert data["bytes"] == Path("copy.db").stat().st_size
    assert data["pages"] > 0
    assert shell("jobs", "show", id, "--url", "sqlite:///copy.db", "--json").json["id"] == id
    assert "does not exist yet" in shell("backup", "copy.db", code=2).err
    assert "directory that exists" in shell("backup", "no/where.db", code=2).err
    assert "other.db: " in shell("backup", "other.db").out


def test_check(shell: Shell) -> None:
    shell.put()
    assert shell.run("check", "--json").json == {"ok": True, "problems": []}
    assert shell("check").out == "No problems found.\n"
    _tamper()
    data = shell("check", "--json", code=1).json
    assert not data["ok"]
    assert data["problems"]
    assert "restore a backup" in shell("check", code=1).out


def _tamper() -> None:
    connection = apsw.Connection("towpath.db")
    connection.execute("UPDATE towpath_queue SET ready = ready + 1")
    connection.close()


def _advice(shell: Shell, code: int) -> str:
    data = shell("doctor", "--json", code=code).json
    assert data["ok"] == (code == 0)
    return "\n".join(f"{each['what']} {each['advice']} {each['grave']}" for each in data["findings"])


def test_doctor_before_the_first_job(shell: Shell) -> None:
    data = shell.run("doctor", "--json").json
    assert data["settings"]["url"] == {"value": "sqlite:///towpath.db", "from": "the default"}
    assert data["ledger"] == {"state": "not there yet", "file": str(shell.folder / "towpath.db")}
    assert {"towpath", "python", "apsw", "sqlite", "msgspec"} <= data["versions"].keys()
    assert not Path("towpath.db").exists()
    assert f"There is no ledger at {shell.folder / 'towpath.db'}." in shell("doctor").out


def test_doctor_is_content(shell: Shell) -> None:
    shell.put()
    out = shell.run("doctor").out
    assert "No problems found." in out
    assert "recounted    no problems\n" in out
    assert str(shell.folder / "towpath.db") in out
    assert "sqlite:///towpath.db  (the default)" in out
    assert "lanes          none  (the default)" in out
    assert "priorities     high 0, normal 5, low 10  (the default)" in out


def test_doctor_prints_the_origins_of_settings(shell: Shell) -> None:
    (shell.folder / "towpath.toml").write_text('url = "sqlite:///a.db"\nconcurrency = 4\n')
    data = shell.run("doctor", "--json", env={"TOWPATH_GRACE": "5"}).json["settings"]
    assert data["url"]["from"] == data["concurrency"]["from"] == str(shell.folder / "towpath.toml")
    assert data["grace"] == {"value": 5.0, "from": "the environment variable TOWPATH_GRACE"}
    assert shell("doctor", "--url", "sqlite:///b.db", "--json").json["settings"]["url"]["from"] == "--url"


def test_doctor_misses_a_worker(shell: Shell) -> None:
    now = SystemClock().now()
    ledger = shell.ledger()
    ledger.apply([commands.Append((Spec(id="old", queue="orders"),))], now - HOUR)
    ledger.close()
    assert (
        "1 ready, the oldest for 60m, and no worker claims them. Start a worker: towpath worker"
        in _advice(shell, 1)
    )
    ledger = shell.ledger()
    ledger.apply([commands.Note(key="towpath/caretaker", value=b"x", ttl=HOUR)])
    ledger.close()
    assert "A worker is running, but does not consume this queue" in _advice(shell, 1)


def test_doctor_misses_the_upkeep(shell: Shell) -> None:
    now = SystemClock().now()
    ledger = shell.ledger()
    claim = commands.Claim(owner="gone", wants=(commands.Want("orders"),), lease=1000)
    ledger.apply([commands.Append((Spec(id="old", queue="orders"),)), claim], now - HOUR)
    ledger.close()
    assert "1 leases expired" in _advice(shell, 1)


def test_doctor_finds_dead_letters_pauses_and_full_queues(shell: Shell) -> None:
    shell.dead()
    shell("queues", "pause", "ordres", "--new")
    shell("queues", "set", "small", "--capacity", "1")
    assert "1 dead letter in orders" in _advice(shell, 0)
    assert "It never had a job; check the name." in _advice(shell, 0)
    shell.put("small")
    assert "Queue small is full: 1 of 1" in _advice(shell, 1)
    assert "! Queue small is full" in shell("doctor", code=1).out


def test_doctor_finds_a_clock_that_went_back(shell: Shell) -> None:
    ledger = shell.ledger()
    ledger.apply([commands.Append((Spec(id="today", queue="orders"),))])
    assert _advice(shell, 0) == ""
    # A commit that changes no job.
    ledger.apply([commands.Note(key="anything", value=b"x")], SystemClock().now() + HOUR)
    ledger.close()
    assert "The ledger's time is 60m ahead of the clock." in _advice(shell, 0)


def test_doctor_finds_damage(shell: Shell) -> None:
    shell.put()
    _tamper()
    assert "restore a backup. True" in _advice(shell, 1)


def test_doctor_of_what_is_no_ledger(shell: Shell) -> None:
    Path("text.db").write_text("not a database " * 100)
    data = shell("doctor", "--url", "sqlite:///text.db", "--json", code=4).json
    assert data["ledger"] == {"state": "unavailable"}
    assert "not an SQLite database" in data["findings"][0]["what"]
    assert shell("doctor", "--url", "memory://", "--json").json["ledger"] == {"state": "in memory"}
    assert "slashes" in shell("doctor", "--url", "sqlite:text.db", code=2).err


def test_bench(shell: Shell) -> None:
    data = shell.run("bench", "--seconds", "0.5", "--dir", ".", "--json").json
    assert data["fsyncs_per_second"] > 0
    assert sorted(data["jobs_per_second"]) == ["append", "append_bulk", "claim_settle", "claim_settle_batch"]
    assert min(data["jobs_per_second"].values()) > 0
    assert list(shell.folder.iterdir()) == []
    assert "raw: write and fsync 4 KiB" in shell("bench", "--seconds", "0.5").out


def test_memory_and_files_are_distinguished() -> None:
    ledger = towpath.open_ledger("memory://")
    assert not hasattr(ledger, "backup")
    ledger.close()
