"""SQL statements of plans on a real PostgreSQL: results, timeouts, a server that hangs or dies, secrets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.actions import STEP, action_context
from tests.support.waiting import auntil, until
from towpath import Snooze
from towpath.errors import ActionFailed, ActionRefused, NodeAway, SecretUnavailable
from towpath.flows.actions import Answer, Sql
from towpath.operations.actions import sql
from towpath.operations.actions.sql import SqlExecutor, SqlResult, session_name
from towpath.testing.postgres import Server

executor = SqlExecutor()


def run(url: str, action: Sql, **more: Any) -> SqlResult:
    return asyncio.run(executor.run(action, "db1", action_context("db1", address=url, **more)))


def answer(url: str, statement: str, **more: Any) -> Answer:
    context = action_context("db1", address=url, **more)
    return asyncio.run(executor.answer(Sql(statement), "db1", context))


def active(postgres: Server, label: str = STEP) -> list[str]:
    statement = (
        "SELECT query FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle' "
        "AND wait_event_type IS DISTINCT FROM 'Client'"
    )
    return [row[0] for row in postgres.query(statement, [session_name(label)])]


def test_rows_and_parameters(empty_database: str) -> None:
    made = run(empty_database, Sql("CREATE TABLE t (id int, name text); INSERT INTO t VALUES (1, '100%')"))
    assert made == SqlResult(rows=1)
    result = run(empty_database, Sql("SELECT id, name FROM t WHERE id = %s", (1,)))
    assert result == SqlResult(rows=1, columns=("id", "name"), first=((1, "100%"),))
    assert run(empty_database, Sql("UPDATE t SET name = %s", (None,))) == SqlResult(rows=1)
    assert run(empty_database, Sql("SELECT name FROM t")).first == ((None,),)


def test_values_are_those_of_json(empty_database: str) -> None:
    statement = (
        "SELECT 1.5::float8, 'NaN'::float8, 10::numeric / 4, 9007199254740993::bigint, '\\x00ff'::bytea, "
        "true, DATE '2026-01-31', ARRAY[1, 2]"
    )
    [row] = run(empty_database, Sql(statement)).first
    assert row[:6] == (1.5, "nan", "2.5000000000000000", "9007199254740993", "00ff", True)
    assert row[6:] == ("2026-01-31", "[1, 2]")


def test_a_large_result_is_bounded(empty_database: str) -> None:
    result = run(empty_database, Sql("SELECT repeat('x', 5000) FROM generate_series(1, 1000)"))
    assert (result.rows, result.cut) == (1000, True)
    assert len(result.first) == sql.MAX_ROWS
    assert {len(row[0]) for row in result.first} == {sql.MAX_CELL + 3}
    small = run(empty_database, Sql("SELECT repeat('x', 100) FROM generate_series(1, 9)"), max_output=250)
    assert (small.rows, len(small.first), small.cut) == (9, 2, True)


def test_a_transaction_or_none(empty_database: str) -> None:
    both = "CREATE TABLE half (id int); SELECT 1 / 0"
    with pytest.raises(ActionRefused, match="division by zero"):
        run(empty_database, Sql(both))
    assert run(empty_database, Sql("SELECT to_regclass('half')")).first == ((None,),)
    with pytest.raises(ActionRefused, match="cannot run inside a transaction block"):
        run(empty_database, Sql("VACUUM"))
    assert run(empty_database, Sql("VACUUM", autocommit=True)).rows == 0


@pytest.mark.parametrize(
    "statement", ["SELEC 1", "SELECT * FROM missing", "SELECT %s::int AS a, %s", "DROP ROLE nobody_here"]
)
def test_a_wrong_statement_is_final(empty_database: str, statement: str) -> None:
    with pytest.raises(ActionRefused, match="node db1"):
        run(empty_database, Sql(statement, ("x",) if "%s" in statement else ()))


def test_a_role_without_the_right_is_final(postgres: Server, empty_database: str) -> None:
    postgres.query("CREATE ROLE towpath_weak LOGIN")
    try:
        weak = empty_database.replace("//postgres@", "//towpath_weak@")
        assert weak != empty_database
        with pytest.raises(ActionRefused, match="permission denied"):
            run(weak, Sql("CREATE TABLE public.t ()"))
    finally:
        postgres.query("DROP ROLE towpath_weak")


def test_a_missing_database_is_retried(postgres: Server) -> None:
    with pytest.raises(NodeAway, match="does not exist"):
        run(postgres.url("no_such_database"), Sql("SELECT 1"))


def test_a_server_that_is_not_there_is_retried() -> None:
    with pytest.raises(NodeAway) as caught:
        run("postgresql://127.0.0.1:1/db", Sql("SELECT 1"))
    assert (caught.value.retryable, caught.value.sent) == (True, False)


def test_a_node_without_an_address_is_retried() -> None:
    context = action_context("other", address="postgresql://127.0.0.1:1/db")
    with pytest.raises(ActionFailed, match=r"\[nodes.db1\] address"):
        asyncio.run(executor.run(Sql("SELECT 1"), "db1", context))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT true", Answer.APPLIED),
        ("SELECT count(*) FROM pg_class", Answer.APPLIED),
        ("SELECT false, true", Answer.NOT_APPLIED),
        ("SELECT 1 WHERE false", Answer.NOT_APPLIED),
        ("SELECT NULL", Answer.UNKNOWN),
        ("SELECT 'yes'", Answer.UNKNOWN),
    ],
)
def test_the_answer_is_the_first_column(postgres: Server, statement: str, expected: Answer) -> None:
    assert answer(postgres.url(), statement) is expected


def test_a_failed_check_raises(postgres: Server) -> None:
    with pytest.raises(ActionRefused, match="missing"):
        answer(postgres.url(), "SELECT * FROM missing")


def test_the_server_ends_a_statement_at_the_timeout(postgres: Server, empty_database: str) -> None:
    with pytest.raises(ActionFailed, match="statement timeout") as caught:
        run(empty_database, Sql("CREATE TABLE late (); SELECT pg_sleep(1000)"), step_timeout=0.5)
    assert caught.value.retryable
    assert active(postgres) == []
    assert answer(empty_database, "SELECT to_regclass('late') IS NOT NULL") is Answer.NOT_APPLIED


def test_a_lock_that_another_session_holds_is_retried(empty_database: str) -> None:
    run(empty_database, Sql("CREATE TABLE held ()"))
    with psycopg.connect(empty_database) as holder:
        holder.execute("LOCK TABLE held")
        with pytest.raises(ActionFailed, match="timeout"):
            run(empty_database, Sql("DROP TABLE held"), step_timeout=0.5)


def test_a_cancellation_ends_the_statement_on_the_server(postgres: Server, empty_database: str) -> None:
    async def canceled() -> None:
        context = action_context("db1", address=empty_database)
        task = asyncio.create_task(executor.run(Sql("SELECT pg_sleep(1000)"), "db1", context))
        await auntil(lambda: active(postgres))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(canceled())
    assert until(lambda: not active(postgres))


@pytest.mark.parametrize("undo", [False, True])
def test_a_statement_that_outlived_its_worker_is_found(postgres: Server, undo: bool) -> None:
    """Another session with the name of the step: that of a worker that was killed."""
    url, name = postgres.url(), session_name(STEP)
    with psycopg.connect(url, application_name=name, autocommit=True) as other:
        assert answer(url, "SELECT true", undo=undo) is Answer.APPLIED
        other.execute("BEGIN")  # idle in a transaction: it may still commit
        assert answer(url, "SELECT true", undo=undo) is Answer.RUNNING
        with pytest.raises(Snooze):
            run(url, Sql("SELECT 1"), undo=undo, attempt=2)
        other.execute("COMMIT")
        assert run(url, Sql("SELECT 1"), undo=undo, attempt=2).rows == 1


def test_long_and_foreign_labels_have_distinct_names() -> None:
    labels = ["plan/" + "a" * 90, "plan/" + "a" * 91, "ä/1", "ö/1", "p/\n", STEP]
    names = [session_name(label) for label in labels]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 and name.isascii() and name.isprintable() for name in names)
    assert names[-1] == f"towpath {STEP}"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_that_hangs(postgres_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "CANCEL_SECONDS", 0.3)
    with Server.start(postgres_place / f"hangs-{os.getpid()}") as server:
        context = action_context("db1", address=server.url(), step_timeout=1, connect_timeout=1)

        async def hanging() -> None:
            task = asyncio.create_task(
                executor.run(Sql("SELECT pg_sleep(1000)"), "db1", action_context("db1", address=server.url()))
            )
            found = await auntil(
                lambda: server.query(
                    "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND state = 'active' "
                    "AND query LIKE '%%pg_sleep%%'",
                    [session_name(STEP)],
                )
            )
            postmaster = int((server.directory / "data" / "postmaster.pid").read_text().split()[0])
            with stopped(found[0][0]), stopped(postmaster):
                # Neither the statement nor its cancellation gets a response.
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with pytest.raises(NodeAway, match="no connection"):
                    await executor.run(Sql("SELECT 1"), "db1", context)

        asyncio.run(hanging())


def test_a_server_that_dies_while_a_statement_runs(postgres_place: Path) -> None:
    with Server.start(postgres_place / f"dies-{os.getpid()}") as server:

        async def dying() -> None:
            context = action_context("db1", address=server.url())
            task = asyncio.create_task(executor.run(Sql("SELECT pg_sleep(1000)"), "db1", context))
            await auntil(lambda: active(server))
            await asyncio.to_thread(server.stop, "immediate")
            with pytest.raises(NodeAway) as caught:
                await task
            assert caught.value.sent

        asyncio.run(dying())


def test_a_password_reaches_the_server_and_nothing_else(
    postgres_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "geheim-%-und-@-lang"
    monkeypatch.setenv("DB1_PASSWORD", secret)
    with Server.start(postgres_place / f"secret-{os.getpid()}") as server:
        server.query(f"CREATE ROLE ada LOGIN PASSWORD '{secret.replace('%', '%%')}'")
        access = server.directory / "data" / "pg_hba.conf"
        access.write_text("host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        server.query("SELECT pg_reload_conf()")
        address = server.url(user="ada")
        with pytest.raises(ActionRefused, match="no password"):
            run(address, Sql("SELECT 1"))
        result = run(address, Sql("SELECT current_user, %s", (secret,)), password_env="DB1_PASSWORD")
        assert result.first == (("ada", "***"),)
        monkeypatch.setenv("DB1_PASSWORD", secret + "wrong")
        with pytest.raises(ActionRefused, match="password authentication failed") as caught:
            run(address, Sql("SELECT 1"), password_env="DB1_PASSWORD")
        assert secret not in str(caught.value)
        with pytest.raises(ActionRefused) as caught:
            run(f"host=127.0.0.1 nonsense={secret}wrong", Sql("SELECT 1"), password_env="DB1_PASSWORD")
        assert secret not in str(caught.value)
        monkeypatch.delenv("DB1_PASSWORD")
        with pytest.raises(SecretUnavailable):
            run(address, Sql("SELECT 1"), password_env="DB1_PASSWORD")


def test_the_timeout_of_the_node_is_the_default(empty_database: str) -> None:
    with pytest.raises(ActionFailed, match="statement timeout"):
        run(empty_database, Sql("SELECT pg_sleep(1000)"), timeout=0.5)
    assert run(empty_database, Sql("SELECT pg_sleep(0.1)"), timeout=0.01, step_timeout=60).rows == 1
