"""The command line on a PostgreSQL ledger, as a new user calls it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import towpath
from tests.support.shell import Shell
from tests.support.waiting import until
from towpath import commands
from towpath.clock import SystemClock
from towpath.commands import Spec
from towpath.errors import NotInstalled
from towpath.escapes import without_password
from towpath.ledger.tables.database import steps
from towpath.testing.postgres import Server

PROGRAM = """
import towpath
app = towpath.App()

@app.task(name="add", queue="sums")
def add(a: int, b: int) -> int:
    return a + b

@app.every(3600)
def tick() -> None: ...
"""


class ServerShell(Shell):
    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self.url = url

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "TOWPATH_URL": self.url}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: str) -> ServerShell:
    for name in [
        name for name in os.environ if name.startswith("TOWPATH_") and name != "TOWPATH_TEST_POSTGRES"
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TOWPATH_URL", empty_database)
    monkeypatch.chdir(tmp_path)
    return ServerShell(tmp_path, empty_database)


def test_looking_makes_nothing(shell: ServerShell) -> None:
    output = shell("stats", code=4).err
    assert "There is no ledger in postgresql://" in output
    assert "towpath ledger migrate" in output
    assert shell("doctor", "--json").json["ledger"] == {"state": "not there yet"}
    for words in (
        ("jobs", "list"),
        ("workers", "list"),
        ("schedules", "list"),
        ("ledger", "vacuum"),
        ("check",),
    ):
        shell(*words, code=4)
    with psycopg.connect(shell.url) as connection:
        assert connection.execute(
            "SELECT count(*) FROM pg_namespace WHERE nspname = 'towpath'"
        ).fetchone() == (0,)


def test_migrate(shell: ServerShell) -> None:
    here, there = len(steps("postgres")), len(steps("sqlite"))
    assert shell.run("ledger", "migrate").out.endswith(f"migrated from schema 0 to {here}\n")
    assert shell("ledger", "migrate", "--json").json == {"from": here, "to": here}
    assert shell("ledger", "migrate").out.endswith(f"already has schema {here}\n")
    assert shell("ledger", "migrate", "--url", "sqlite:///new.db", "--json").json == {"from": 0, "to": there}
    assert (
        f"migrated from schema 0 to {there}" in shell("ledger", "migrate", "--url", "sqlite:///other.db").out
    )


def test_a_day_of_work(shell: ServerShell) -> None:
    (shell.folder / "shop.py").write_text(PROGRAM)
    id = shell.run("enqueue", "add", "--app", "shop:app", "--args", '{"a": 1, "b": 2}').out.strip()
    output = shell.run("worker", "shop:app", "--burst").err
    assert f"Ledger: {shell.url}" in output
    assert shell("jobs", "show", id, "--json").json["result"] == 3
    assert "add" in shell("jobs", "list").out
    assert "nothing" not in shell("jobs", "explain", id).out
    assert "every 60m" in shell("schedules", "list").out
    [schedule] = shell("schedules", "list", "--json").json["schedules"]
    for word in ("pause", "resume", "trigger"):
        shell("schedules", word, schedule["name"])
    shell("breakers", "list")
    assert "No worker is running." in shell("workers", "list").out


def test_messages_queues_and_parts(shell: ServerShell) -> None:
    shell.put("orders", "--part", "ada")
    receipt = shell("get", "orders", "--json").json["receipt"]
    shell("extend", receipt, "60")
    shell("ack", receipt)
    dead = shell.dead("orders")
    assert dead in shell("dead", "list").out
    shell("dead", "retry", dead)
    shell("queues", "set", "orders", "--cap", "3", "--rate", "10/s")
    shell("parts", "set", "orders", "ada", "--cap", "1")
    assert "ada" in shell("parts", "list", "orders").out
    shell("queues", "pause", "orders")
    shell("get", "orders", code=3)
    shell("queues", "resume", "orders")
    shell("jobs", "cancel", dead)
    shell("jobs", "purge", "--queue", "orders", "--yes")
    assert "orders" in shell("stats").out
    for words in (("check",), ("ledger", "check")):
        assert shell(*words, "--json").json == {"ok": True, "problems": []}


def test_check_finds_what_does_not_add_up(shell: ServerShell) -> None:
    shell.put()
    with psycopg.connect(shell.url) as connection:
        connection.execute("UPDATE towpath.tally SET ready = ready + 1")
    assert "counts 2 ready but has 1" in shell("ledger", "check", code=1).out


def test_a_backup_is_the_servers_business(shell: ServerShell) -> None:
    shell.put()
    output = shell("backup", "copy.db", code=1).err
    assert "pg_dump" in output
    assert not Path("copy.db").exists()


def test_vacuum(shell: ServerShell) -> None:
    for _ in range(3):
        shell.put()
    document = shell.run("ledger", "vacuum", "--json").json
    assert document["tallies_folded"] > 0
    assert document["tables"] > 10
    assert "tallies folded 0" in shell("ledger", "vacuum").out
    assert shell("ledger", "check", "--json").json["ok"]
    with psycopg.connect(shell.url) as connection:
        assert connection.execute("SELECT count(*) FROM towpath.tally").fetchone() == (0,)
        assert connection.execute("SELECT ready FROM towpath.queue WHERE name = 'orders'").fetchone() == (3,)


def test_vacuum_of_a_file_gives_back_room(shell: ServerShell) -> None:
    url = "sqlite:///work.db"
    ledger = towpath.open_ledger(url)
    ids = [f"j{n}" for n in range(200)]
    ledger.apply([commands.Append(tuple(Spec(id=id, queue="q", payload=b"x" * 20_000) for id in ids))])
    ledger.apply([commands.Cancel(where=commands.Selector(queue="q"))])
    ledger.apply([commands.Purge(where=commands.Selector(queue="q"))])
    ledger.close()
    document = shell.run("ledger", "vacuum", "--url", url, "--json").json
    assert document["bytes"] < document["bytes_before"] / 5
    assert Path("work.db").stat().st_size == document["bytes"]
    assert shell("check", "--url", url, "--json").json["ok"]


def test_copy(shell: ServerShell) -> None:
    id = shell.put()
    document = shell.run("ledger", "copy", shell.url, "sqlite:///copy.db", "--json").json
    assert document["rows"]["job"] == 1
    assert len(document["sha256"]) == 64
    assert not document["resumed"]
    assert shell("jobs", "show", id, "--url", "sqlite:///copy.db", "--json").json["id"] == id
    assert "1 jobs" in shell("ledger", "copy", "sqlite:///copy.db", "sqlite:///again.db").out
    assert "1 rows in job" in shell("ledger", "copy", "sqlite:///copy.db", shell.url, code=2).err
    assert (
        "none.db (sqlite:///none.db, from --url)"
        in shell("ledger", "copy", "sqlite:///none.db", shell.url, code=4).err
    )
    assert not Path("none.db").exists()


def test_copy_of_a_ledger_in_use(shell: ServerShell) -> None:
    shell.put()
    id = shell("get", "orders", "--json").json["id"]
    output = shell("ledger", "copy", shell.url, "sqlite:///copy.db", code=1).err
    assert f"is in use: job {id}, which" in output
    assert not Path("copy.db").exists()
    shell("ledger", "copy", shell.url, "sqlite:///copy.db", "--force")
    ledger = towpath.open_ledger("sqlite:///copy.db")
    job = ledger.get(id)
    ledger.close()
    assert job is not None
    assert job.state == "running"


def test_copy_while_a_worker_is_alive(shell: ServerShell) -> None:
    (shell.folder / "shop.py").write_text(PROGRAM)
    worker = shell.start("worker", "shop:app", "--name", "ada")
    assert worker.stderr is not None
    assert "Worker" in worker.stderr.readline()
    until(lambda: shell("workers", "list", "--json").json["workers"])
    output = shell("ledger", "copy", shell.url, "sqlite:///copy.db", code=1).err
    assert "is in use: worker ada on " in output
    worker.terminate()
    worker.communicate(timeout=60)
    shell("ledger", "copy", shell.url, "sqlite:///copy.db")


def findings(shell: ServerShell, *more: str, code: int = 0) -> str:
    document = shell("doctor", "--json", *more, code=code).json
    return "\n".join(f"{each['what']} {each['advice']}" for each in document["findings"])


def test_doctor(shell: ServerShell) -> None:
    shell.put()
    document = shell.run("doctor", "--json").json
    health = document["ledger"]
    assert health["state"] == "open"
    assert health["schema"] == len(steps("postgres"))
    assert health["ready"] == 1
    assert health["wake_ups"] == "by LISTEN and NOTIFY"
    assert health["missing_rights"] == health["long_transactions"] == []
    assert abs(health["ahead"]) < 1
    assert health["tallies"] > 0
    assert {"server", "autovacuum", "user", "bytes"} <= health.keys()
    assert "psycopg" in document["versions"]
    output = findings(shell)
    assert "fsync is off" in output
    assert "synchronous_commit" not in output
    assert re.search(r"^recounted +no problems$", shell("doctor").out, re.MULTILINE)


def test_doctor_on_settings_of_the_database(shell: ServerShell) -> None:
    shell.put()
    with psycopg.connect(shell.url, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {shell.url.rpartition('/')[2]} SET synchronous_commit = off".encode()
        )
    assert "synchronous_commit is off: a crash can lose the last acknowledged jobs" in findings(shell)
    assert "Wake-ups are by polling: the URL has pooled=true" in findings(
        shell, "--url", f"{shell.url}?pooled=true"
    )


def test_doctor_on_the_state_of_things(shell: ServerShell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.put()
    monkeypatch.setattr("towpath.ledger.postgres.maintenance.LONG", -1)
    monkeypatch.setattr(
        psycopg.Connection, "notifies", lambda connection, **how: iter(())
    )  # as behind a pooler
    monkeypatch.setattr("towpath.cli.doctor.MANY_TALLIES", 0)
    real = SystemClock.now
    monkeypatch.setattr(SystemClock, "now", lambda clock: real(clock) - 60_000_000)
    with psycopg.connect(shell.url, application_name="report") as connection:
        connection.execute("SELECT 1")
        output = findings(shell)
    assert "A transaction of report (postgres, process " in output
    assert "idle in transaction" in output
    assert "rows of counts are not merged yet" in output
    assert "The server's clock is 60s ahead of this machine's." in output
    assert "?pooled=true" in output


def test_doctor_on_autovacuum_and_rights(shell: ServerShell, postgres_place: Path) -> None:
    folder = postgres_place / f"doctor-{os.getpid()}"
    with Server.start(folder, settings={"autovacuum": "off"}) as server:
        url = server.create_database()
        shell("put", "orders", "{}", "--url", url)
        assert "autovacuum is off" in findings(shell, "--url", url, code=1)
        name = url.rpartition("/")[2]
        for statement in (
            "CREATE ROLE guest LOGIN",
            "GRANT USAGE ON SCHEMA towpath TO guest",
            "GRANT SELECT ON ALL TABLES IN SCHEMA towpath TO guest",
            "GRANT SELECT ON ALL SEQUENCES IN SCHEMA towpath TO guest",
        ):
            server.query(statement, database=name)
        output = findings(shell, "--url", server.url(name, user="guest"), code=1)
        assert "The role guest lacks DELETE on towpath." in output


@pytest.fixture
def locked(postgres_place: Path) -> Iterator[Server]:
    """A server that requires a password of the role `ada`."""
    with Server.start(postgres_place / f"locked-{os.getpid()}") as server:
        rules = server.directory / "data" / "pg_hba.conf"
        rules.write_text("host all ada 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        server.query("CREATE ROLE ada LOGIN PASSWORD 'right'")
        server.query("SELECT pg_reload_conf()")
        yield server


def test_errors_of_the_server(shell: ServerShell, locked: Server) -> None:
    url = locked.url(user="ada")
    wrong = url.replace("ada@", "ada:wrong@")
    for words in (
        ("stats",),
        ("put", "q", "{}"),
        ("doctor",),
        ("ledger", "migrate"),
        ("ledger", "copy", wrong, "sqlite:///x.db"),
    ):
        ran = shell.run(*words, "--url", wrong, code=4)
        assert 'password authentication failed for user "ada"' in ran.err + ran.out
        assert "wrong" not in ran.err + ran.out
    assert "no password supplied" in shell.run("stats", "--url", url, code=4).err
    right = url.replace("ada@", "ada:right@")
    assert "permission denied for database postgres" in shell("put", "q", "{}", "--url", right, code=4).err
    assert "There is no ledger in" in shell("stats", "--url", right, code=4).err
    assert 'database "none" does not exist' in shell("stats", "--url", locked.url("none"), code=4).err
    with locked.outage():
        output = shell.run("stats", "--url", right, code=4).err
        assert "Connection refused" in output
        assert "Check that the server is running" in output
    assert "failed to resolve host" in shell("stats", "--url", "postgresql://x@nowhere.invalid/y", code=4).err
    assert "pooled in the url is 'maybe'" in shell("stats", "--url", f"{url}?pooled=maybe", code=2).err


def test_without_the_driver(shell: ServerShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(NotInstalled, match="towpath\\[postgres\\]"):
        towpath.open_ledger(shell.url)
    for words in (("stats",), ("put", "q", "{}"), ("ledger", "migrate"), ("workers", "list")):
        assert "pip install 'towpath[postgres]'" in shell(*words, code=4).err
    assert "pip install 'towpath[postgres]'" in shell("doctor", code=4).out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://ada:secret@host/db?schema=x", "postgresql://ada:***@host/db?schema=x"),
        ("postgresql://ada@host/db?password=secret&a=1", "postgresql://ada@host/db?password=***&a=1"),
        ("postgresql:///db?a=1&sslpassword=secret", "postgresql:///db?a=1&sslpassword=***"),
        ("postgres://host/db", "postgres://host/db"),
        ("postgresql://ada:se/c#re@t@host/db", "postgresql://ada:***@host/db"),
        ("sqlite:////a:b@c.db", "sqlite:////a:b@c.db"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
    ],
)
def test_a_password_is_never_shown(given: str, expected: str) -> None:
    assert without_password(given) == expected
