"""The schema: created once, by a role with no other rights, under any name, beside others; and refused if it
is too new."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import conninfo, sql

from towpath import App, open_ledger
from towpath.core.commands import Append, Claim, Claimed, Note, SetPart, Upkeep, Want
from towpath.core.depths import DEPTHS
from towpath.core.job import RetryOutcome, Spec
from towpath.core.views import NoteQuery
from towpath.errors import NewerSchema, NotALedger
from towpath.ledger.postgres import connection as migrations
from towpath.ledger.postgres.connection import connect
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions, options_of
from towpath.ledger.postgres.statements import Statements
from towpath.operations import maintenance
from towpath.testing.ledger_suite import Harness
from towpath.testing.postgres import Server

ODD = 'My "schema"'


def do(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


STARTED = """
import sys
from towpath.operations import maintenance
print("here", flush=True)
sys.stdin.readline()
print(*maintenance.migrate(sys.argv[1]))
"""


def test_many_processes_start_at_once_and_one_migrates(empty_database: str) -> None:
    command = [sys.executable, "-c", STARTED, empty_database]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    processes = [subprocess.Popen(command, **pipes) for _ in range(6)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    ended = [process.communicate("go\n") for process in processes]
    known = len(migrations.steps())
    assert [output for _, output in ended] == [""] * 6
    assert sorted(out.split()[0] for out, _ in ended) == ["0"] + [str(known)] * 5
    assert do(empty_database, "SELECT schema, min_schema FROM towpath.meta") == [(known, 12)]


def test_many_threads_open_it_at_once(empty_database: str) -> None:
    barrier, opened = threading.Barrier(8), list[PostgresLedger]()

    def start() -> None:
        barrier.wait()
        opened.append(PostgresLedger(empty_database))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 8
    for n, ledger in enumerate(opened):
        ledger.apply([Append((Spec(id=f"j{n}", queue="q"),))])
    assert opened[0].queues()["q"].counts.ready == 8
    for ledger in opened:
        ledger.close()


@pytest.fixture
def narrow_url(postgres: Server, empty_database: str) -> str:
    """The URL of a role that owns one schema and has no other rights in the database."""
    name = empty_database.rpartition("/")[2]
    for statement in (
        f"CREATE ROLE {name} LOGIN",
        f"REVOKE ALL ON DATABASE {name} FROM PUBLIC",
        f"GRANT CONNECT ON DATABASE {name} TO {name}",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        f"CREATE SCHEMA narrow AUTHORIZATION {name}",
    ):
        do(empty_database, statement)
    return postgres.url(name, user=name)


def test_a_role_that_owns_its_schema_and_nothing_else(narrow_url: str, empty_database: str) -> None:
    url = f"{narrow_url}?schema=narrow"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        do(narrow_url, "CREATE SCHEMA another")
    ledger = open_ledger(url)
    ledger.apply(
        [
            Append(tuple(Spec(id=f"j{n}", queue="q", part="p") for n in range(20))),
            SetPart(queue="q", part="p", cap=3),
            Note(key="n", value=b"1"),
        ]
    )
    [claimed] = ledger.apply([Claim(owner="me", wants=(Want("*", 9),), lease=1_000_000)])
    assert isinstance(claimed, Claimed)
    assert len(claimed.claims) == 3
    ledger.apply([Upkeep(limit=100)])
    assert ledger.check() == []
    ledger.close()
    assert maintenance.health(url)["missing_rights"] == []
    assert maintenance.vacuum(url)["tables"] > 10
    assert do(empty_database, "SELECT count(*) FROM narrow.job") == [(20,)]


def test_a_role_without_rights_gets_an_error(narrow_url: str, empty_database: str) -> None:
    with pytest.raises(NotALedger, match="permission denied for database"):
        open_ledger(narrow_url)
    open_ledger(empty_database).close()
    with pytest.raises(NotALedger, match="permission denied for schema towpath"):
        open_ledger(narrow_url)
    do(empty_database, f"GRANT USAGE ON SCHEMA towpath TO {narrow_url.rpartition('/')[2]}")
    with pytest.raises(NotALedger, match="permission denied for table meta"):
        open_ledger(narrow_url)


def test_two_schemas_of_one_database_do_not_disturb_each_other(empty_database: str) -> None:
    one, other = PostgresLedger(empty_database), PostgresLedger(empty_database, PostgresOptions(schema=ODD))
    spec = Spec(id="same", queue="q", part="p")
    one.apply([Append((spec,)), Note(key="n", value=b"1")], 1)
    assert other.get("same") is None
    assert other.note("n") is None
    assert other.queues() == {}
    # A batch of one ledger holds the lock of relations and of the queue; a batch of the other one needs both,
    # and does not wait.
    with psycopg.connect(empty_database) as holder:
        holder.execute("SELECT pg_advisory_xact_lock('towpath.meta'::regclass::oid::bigint)")
        holder.execute("SELECT pg_advisory_xact_lock(hashtext('towpath migration of towpath'))")
        holder.execute("LOCK TABLE towpath.queue IN ACCESS EXCLUSIVE MODE")
        name = empty_database.rpartition("/")[2]
        do(empty_database, f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET lock_timeout = '5s'")
        third = PostgresLedger(empty_database, PostgresOptions(schema="third"))
        for ledger in (other, third):
            ledger.apply([Append((spec,)), SetPart(queue="q", part="p", cap=1), Note(key="n", value=b"2")], 1)
            assert ledger.check() == []
        third.close()
    note = one.note("n")
    assert note is not None
    assert note.value == b"1"
    for ledger in (one, other):
        ledger.close()


def test_a_notification_is_received_in_its_own_schema_only(empty_database: str) -> None:
    one, odd = PostgresLedger(empty_database), PostgresLedger(empty_database, PostgresOptions(schema=ODD))
    with psycopg.connect(empty_database, autocommit=True) as ear:
        ear.execute(sql.SQL("LISTEN {}").format(sql.Identifier("towpath_wake")))
        ear.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"{ODD}_wake")))
        odd.apply([Append((Spec(id="a", queue="q"),))])
        assert [notice.channel for notice in ear.notifies(timeout=30, stop_after=1)] == [f"{ODD}_wake"]
        one.apply([Append((Spec(id="a", queue="q"),))])
        assert [notice.channel for notice in ear.notifies(timeout=30, stop_after=1)] == ["towpath_wake"]
    one.close()
    odd.close()


@pytest.mark.parametrize("schema", [ODD, "it's", "tow.path", "towpath.", "Ü 木", "$1", "%s", "a" * 63])
def test_any_name_of_a_schema(schema: str, empty_database: str) -> None:
    ledger = open_ledger(f"{empty_database}?schema={quote(schema)}")
    ledger.apply(
        [Append(tuple(Spec(id=f"j{n}", queue="q", part="p") for n in range(20))), Note(key="n", value=b"1")]
    )
    [claimed] = ledger.apply([Claim(owner="me", wants=(Want("*", 9),), lease=1_000_000)])
    assert isinstance(claimed, Claimed)
    assert len(claimed.claims) == 9
    ledger.apply([Upkeep(limit=10)])
    assert ledger.check() == []
    assert len(ledger.dump()["jobs"]) == 20
    ledger.close()
    with psycopg.connect(empty_database) as connection:
        query = (
            "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relname ="
            " 'tally'"
        )
        assert connection.execute(query).fetchall() == [(schema,)]


def test_what_of_a_url_is_ours(postgres: Server, empty_database: str) -> None:
    url, options = options_of("postgres:///db?schema=x&pooled=true&options=-c%20search_path%3Dy&host=%2Ftmp")
    assert (options.schema, options.pooled) == ("x", True)
    assert conninfo.conninfo_to_dict(url) == {"dbname": "db", "options": "-c search_path=y", "host": "/tmp"}
    name = empty_database.rpartition("/")[2]
    local = (
        postgres.url(name, socket=True).replace("postgres@", "")
        + "&user=postgres&options=-c%20work_mem%3D7MB"
    )
    ledger = open_ledger(local)
    ledger.apply([Append((Spec(id="a", queue="q"),))])
    ledger.close()


def test_a_schema_with_other_tables_is_refused(empty_database: str) -> None:
    do(empty_database, "CREATE SCHEMA theirs")
    do(empty_database, "CREATE TABLE theirs.invoices (n int)")
    with pytest.raises(NotALedger, match="its schema theirs has tables, but no meta among them"):
        open_ledger(f"{empty_database}?schema=theirs")


def test_a_server_that_is_too_old() -> None:
    migrations.check_server("postgresql://x", 140_000)
    with pytest.raises(NotALedger, match="its server is PostgreSQL 13, and a ledger needs 14 or newer"):
        migrations.check_server("postgresql://x", 130_022)


def test_a_step_that_fails_leaves_nothing(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = migrations.steps()
    monkeypatch.setattr(
        migrations, "steps", lambda: (*steps, "CREATE TABLE towpath.more (n int); SELECT 1 / 0")
    )
    connection = connect(empty_database, PostgresOptions())
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrations.migrate(connection, Statements("towpath"), "here")
    assert not migrations.has_ledger(connection, Statements("towpath"))
    monkeypatch.setattr(migrations, "steps", lambda: steps)
    assert migrations.migrate(connection, Statements("towpath"), "here") == 0
    monkeypatch.setattr(migrations, "steps", lambda: (*steps, "CREATE TABLE towpath.more (n int)"))
    assert migrations.migrate(connection, Statements("towpath"), "here") == len(steps)
    assert migrations.migrate(connection, Statements("towpath"), "here") == len(steps) + 1
    connection.close()


def test_lists_in_notes_become_one_note_for_each_record(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = migrations.steps()
    monkeypatch.setattr(migrations, "steps", lambda: steps[:10])
    with closing(connect(empty_database, PostgresOptions())) as connection:
        migrations.migrate(connection, Statements("towpath"), "here")
    monkeypatch.setattr(migrations, "steps", lambda: steps)
    for key, value in (
        ("towpath/warn-depths", '{"mail": 5, "a/é": 70}'),
        ("towpath/schedules", '["daily"]'),
        ("towpath/breakers", '["x"]'),
        ("breaker/x", "{}"),
    ):
        do(empty_database, f"INSERT INTO towpath.note VALUES ('{key}', convert_to('{value}', 'UTF8'), 7, 3)")
    with closing(PostgresLedger(empty_database)) as ledger:
        assert DEPTHS.all(ledger) == {"a/é": 70, "mail": 5}
        assert [note.key for note in ledger.notes(NoteQuery()).notes] == [
            "breaker/x",
            "warn-depth/a/é",
            "warn-depth/mail",
        ]
        assert ledger.check() == []


def test_a_ledger_of_schema_6_keeps_attempts_after_the_upgrade(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = migrations.steps()
    monkeypatch.setattr(migrations, "steps", lambda: steps[:6])
    with closing(connect(empty_database, PostgresOptions())) as connection:
        migrations.migrate(connection, Statements("towpath"), "here")
    monkeypatch.setattr(migrations, "steps", lambda: steps)
    assert do(empty_database, "SELECT schema, min_schema FROM towpath.meta") == [(6, 4)]
    with closing(PostgresLedger(empty_database)) as ledger:
        assert do(empty_database, "SELECT schema, min_schema FROM towpath.meta") == [(len(steps), 12)]
        harness = Harness(ledger)
        harness.settle(harness.started("a"), RetryOutcome(error="busy"))
        assert [(end.number, end.error) for end in ledger.attempts("a")] == [(1, "busy")]
        assert ledger.check() == []
        do(empty_database, "UPDATE towpath.attempt SET number = 2")
        assert ledger.check() == ["attempt 2 of job a is none of the last of 1"]
        do(empty_database, "UPDATE towpath.attempt SET seq = 99")
        assert ledger.check() == ["attempt 2 is left of job number 99"]


def test_a_schema_that_is_too_new(empty_database: str) -> None:
    ledger = PostgresLedger(empty_database)
    do(empty_database, "UPDATE towpath.meta SET schema = 99, min_schema = 99")
    with pytest.raises(NewerSchema, match="needs at least version 99"):
        ledger.apply([Append((Spec(id="a", queue="q"),))])
    assert ledger.queues() == {}
    ledger.close()
    with pytest.raises(NewerSchema, match="upgrade it"):
        PostgresLedger(empty_database)


async def _raise_it_while_a_job_runs(url: str) -> list[str]:
    app, began, ended = App(url), asyncio.Event(), list[str]()

    @app.task
    async def work() -> None:
        began.set()
        await asyncio.to_thread(do, url, "UPDATE towpath.meta SET schema = 99, min_schema = 99")
        ended.append("the job")

    await work.aenqueue()
    running = asyncio.create_task(app.arun(grace=5.0))
    await began.wait()
    try:
        await running
    except NewerSchema as error:
        ended.append(str(error))
    finally:
        app.close()
    return ended


def test_a_worker_that_became_too_old_drains_and_ends(empty_database: str) -> None:
    ended = asyncio.run(asyncio.wait_for(_raise_it_while_a_job_runs(empty_database), 60))
    assert ended[0] == "the job"
    assert "has schema 99, which needs at least version 99" in ended[1]
    assert do(empty_database, "SELECT state FROM towpath.job") == [
        ("running",)
    ]  # and is ready again when its lease has ended


def test_the_command_ends_with_a_clear_message(empty_database: str, tmp_path: Path) -> None:
    program = "import towpath\napp = towpath.App()\n@app.task\ndef work() -> None: ...\n"
    (tmp_path / "old.py").write_text(program)
    open_ledger(empty_database).close()
    command = [sys.executable, "-m", "towpath", "worker", "old:app", "--url", empty_database]
    worker = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert worker.stderr is not None
    assert "Worker" in worker.stderr.readline()
    do(empty_database, "UPDATE towpath.meta SET schema = 99, min_schema = 99")
    output = worker.communicate(timeout=60)[1]
    assert worker.returncode == 4
    assert "has schema 99, which needs at least version 99" in output
    assert "Upgrade Towpath: pip install --upgrade towpath" in output
    assert "Traceback" not in output
