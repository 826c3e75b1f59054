"""`towpath shards` as a user runs it: in a directory with a towpath.toml, on three real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support.processes import WatchedProcess
from tests.support.shards import Fleet
from tests.support.shell import Shell
from towpath.testing.postgres import Server

COLUMNS = ("--columns", "id bigint, name text", "--key", "id")


@pytest.fixture
def shell(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A directory with the three nodes in its settings."""
    for name in [name for name in os.environ if name.startswith("TOWPATH_")]:
        monkeypatch.delenv(name)
    nodes = [f'[nodes.{node}]\naddress = "{url}"\n' for node, url in fleet.urls.items()]
    (tmp_path / "towpath.toml").write_text("\n".join(nodes))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


@contextmanager
def started(shell: Shell, *arguments: str, **env: str) -> Iterator[WatchedProcess]:
    with shell.start(*arguments, env=env) as process:
        watched = WatchedProcess(process)
        try:
            yield watched
        finally:
            process.kill()
            assert watched.silent()


@contextmanager
def blocked(fleet: Fleet, node: str, tag: str) -> Iterator[None]:
    """Let the statements with this command tag wait on a node, until the end of the block."""
    fleet.query(
        node,
        "CREATE FUNCTION wait_here() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(1); END $$",
    )
    fleet.query(
        node,
        f"CREATE EVENT TRIGGER w ON ddl_command_start WHEN TAG IN ('{tag}') EXECUTE FUNCTION wait_here()",
    )
    with psycopg.connect(fleet.urls[node], autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        yield
    fleet.query(node, "DROP EVENT TRIGGER w")


def test_the_life_of_a_table(shell: Shell, fleet: Fleet) -> None:
    assert [each["reasons"] for each in shell("shards", "nodes", "--json").json["nodes"]] == [[], [], []]
    assert "no sharded tables" in shell("shards", "status").out
    made = shell("shards", "create", "items", *COLUMNS, "--shards", "6")
    assert made.out == "Done: create table items: 6 shards, 1 copies each, 3 nodes.\n"
    assert "  done     tables-n1 on n1" in made.err
    fleet.query("n2", "INSERT INTO items SELECT x, x FROM generate_series(1, 600) x")
    assert fleet.query("n3", "SELECT count(*) FROM items") == [(600,)]
    copies = shell("shards", "status", "--json").json["copies"]
    assert [each["node"] for each in copies] == ["n1", "n2", "n3"] * 2
    assert {each["rf_status"] for each in copies} == {"ok"}
    assert shell("shards", "check").out == "The servers match the catalogue.\n"
    moved = shell("shards", "move", "items", "0", "n3", "--json").json["plans"]
    assert [each["state"] for each in moved] == ["done"]
    assert shell("shards", "rebalance", "--dry-run").out.count("plan rebalance") == 1
    shell("shards", "rebalance")
    assert shell("shards", "rebalance").out == "Nothing to do.\n"
    assert fleet.query("n1", "SELECT count(*), count(DISTINCT id) FROM items") == [(600, 600)]
    assert shell("shards", "check", "--json").json == {"differences": []}
    assert "Confirm with --yes" in shell("shards", "drop", "items", code=2).err
    shell("shards", "drop", "items", "--yes")
    assert shell("shards", "status", "items", code=3).out == ""
    assert shell("shards", "check").out == "The servers match the catalogue.\n"


def test_two_copies_survive_the_loss_of_a_server(
    shell: Shell, fleet: Fleet, shard_servers: dict[str, Server]
) -> None:
    shell("shards", "create", "items", *COLUMNS, "--shards", "3", "--rf", "2")
    fleet.query("n1", "INSERT INTO items SELECT x, x FROM generate_series(1, 300) x")
    assert "n3 answers" in shell("shards", "promote", "n3", code=1).err
    copies = shell("shards", "status", "items", "--json").json["copies"]
    assert {each["rf_status"] for each in copies} == {"ok"}
    with shard_servers["n3"].outage("immediate"):
        found = shell("shards", "status", "items", "--json").json["copies"]
        assert {each["state"] for each in found if each["node"] == "n3"} == {"away"}
        assert "broken" not in {each["rf_status"] for each in found}
        assert "n3: cannot be reached" in shell("shards", "drop", "items", "--yes", code=1).err
        shell("shards", "promote", "n3")
        shell("shards", "rebalance")
        found = shell("shards", "status", "items", "--json").json["copies"]
        assert [(each["state"], each["rf_status"]) for each in found] == [("ok", "ok")] * 6
        assert fleet.query("n2", "SELECT count(*) FROM items") == [(300,)]
        fleet.query("n2", "INSERT INTO items SELECT x, x FROM generate_series(301, 400) x")
        assert fleet.query("n1", "SELECT count(*) FROM items") == [(400,)]
    assert shell("shards", "check", code=1).out.count("n3: orphan") > 0
    assert shell("shards", "fence", "n3", "--json").json == {"tables": {"items": [1, 2]}}
    with pytest.raises(psycopg.errors.UndefinedTable):
        fleet.query("n3", "SELECT count(*) FROM items")
    shell("shards", "discard", "n3", "--yes")
    assert shell("shards", "check").out == "The servers match the catalogue.\n"
    shell("shards", "add-node", "n3")
    assert shell("shards", "check").out == "The servers match the catalogue.\n"
    assert fleet.query("n3", "SELECT count(*) FROM items") == [(400,)]


def test_wrong_input_changes_nothing(shell: Shell, fleet: Fleet) -> None:
    assert (
        "without sequences"
        in shell("shards", "create", "items", "--columns", "id serial", "--key", "id", code=2).err
    )
    assert "rf is 4" in shell("shards", "create", "items", *COLUMNS, "--rf", "4", code=2).err
    assert "table is" in shell("shards", "create", "Items!", *COLUMNS, code=2).err
    assert "n9" in shell("shards", "create", "items", *COLUMNS, "--node", "n9", code=2).err
    fleet.query("n2", "CREATE TABLE items (mine int)")
    error = shell("shards", "create", "items", *COLUMNS, "--json", code=1).error
    assert error["details"]["reasons"] == ['n2: relation "items" already exists']
    (shell.folder / "towpath.toml").write_text("")
    assert "The settings have no nodes with" in shell("shards", "nodes", code=2).err


def test_a_failed_step_rolls_everything_back(shell: Shell, fleet: Fleet) -> None:
    fleet.query(
        "n3",
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'no foreign tables here'; END $$",
    )
    fleet.query(
        "n3",
        "CREATE EVENT TRIGGER r ON ddl_command_start WHEN TAG IN ('CREATE FOREIGN TABLE')"
        " EXECUTE FUNCTION refuse()",
    )
    failed = shell("shards", "create", "items", *COLUMNS, code=1)
    assert "ended as rolled_back" in failed.err
    assert "no foreign tables here" in failed.err
    assert "  undone   tables-n1 on n1" in failed.err
    assert shell("shards", "check").out == "The servers match the catalogue.\n"
    fleet.query("n3", "DROP EVENT TRIGGER r")
    shell("shards", "create", "items", *COLUMNS)


def test_an_interrupt_before_the_point_of_no_return_rolls_back(shell: Shell, fleet: Fleet) -> None:
    with started(shell, "shards", "create", "items", *COLUMNS) as process:
        with blocked(fleet, "n2", "CREATE FOREIGN TABLE"):
            process.until("done     routes-n1")
            process.process.send_signal(signal.SIGINT)
            assert process.until("Interrupted") == (
                "Interrupted before the point of no return: rolling back."
            )
        process.until("ended as rolled_back")
        assert process.process.wait(30) == 1
    assert shell("shards", "check").out == "The servers match the catalogue.\n"
    assert "no sharded tables" in shell("shards", "status").out


def test_an_agent_continues_the_plan_of_a_killed_command(shell: Shell, fleet: Fleet) -> None:
    quick = {"TOWPATH_LEASE": "2"}
    with started(shell, "shards", "create", "items", *COLUMNS, **quick) as process:
        with blocked(fleet, "n2", "CREATE FOREIGN TABLE"):
            process.until("done     routes-n1")
            process.process.kill()
            process.process.wait()
    assert [each["pending"] for each in shell("shards", "status", "--json").json["copies"]] == ["create"] * 8
    with started(shell, "shards", "agent", **quick) as agent:
        agent.until("Running the steps of n1, n2, n3")
        with psycopg.connect(fleet.urls["n1"], autocommit=True) as connection:
            while shell("shards", "check", "--json").json["differences"] or _pending(shell):
                connection.execute("SELECT pg_sleep(0.1)")
        assert agent.end(signal.SIGINT) == 0
    fleet.query("n2", "INSERT INTO items SELECT generate_series(1, 10)")
    assert fleet.query("n1", "SELECT count(*) FROM items") == [(10,)]


def test_agents_run_submitted_plans(shell: Shell, fleet: Fleet) -> None:
    submitted = shell("shards", "create", "items", *COLUMNS, "--submit", "--json").json["plans"]
    assert [each["state"] for each in submitted] == ["running"]
    with started(shell, "shards", "agent", "--node", "n1") as one:
        with started(shell, "shards", "agent", "--node", "n2", "--node", "n3") as two:
            one.until("Running the steps of n1.")
            while not shell("shards", "status", "--json").json["copies"] or _pending(shell):
                fleet.query("n1", "SELECT pg_sleep(0.1)")
            assert two.end(signal.SIGINT) == 0
        assert one.end(signal.SIGINT) == 0
    assert shell("shards", "check", "--json").json == {"differences": []}


def test_a_role_with_a_password_and_without_superuser(
    shell: Shell, fleet: Fleet, shard_servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"shop_{os.getpid()}"
    secret = "hush-4711"
    for node, server in shard_servers.items():
        hba = server.directory / "data" / "pg_hba.conf"
        hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        database = fleet.urls[node].rpartition("/")[2]
        for statement in (
            "SELECT pg_reload_conf()",
            f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{secret}' IN ROLE pg_create_subscription",
            f"GRANT CREATE ON DATABASE {database} TO {role}",
            f"GRANT CREATE ON SCHEMA public TO {role}",
            f"GRANT EXECUTE ON FUNCTION pg_replication_origin_progress(text, boolean) TO {role}",
            "CREATE EXTENSION postgres_fdw",
            f"GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO {role}",
        ):
            fleet.query(node, statement)
    nodes = [
        f'[nodes.{node}]\naddress = "{url.replace("postgres@", f"{role}@")}"\npassword_env = "SHOP"\n'
        for node, url in fleet.urls.items()
    ]
    (shell.folder / "towpath.toml").write_text("\n".join(nodes))
    assert "SHOP" in shell("shards", "nodes", code=1).err
    monkeypatch.setenv("SHOP", secret)
    ran = [
        shell("shards", "nodes", "--json"),
        shell("shards", "create", "items", *COLUMNS, "--shards", "3", "--rf", "2", "--json"),
        shell("shards", "move", "items", "0", "n3"),
        shell("shards", "status", "--json"),
        shell("shards", "check"),
    ]
    url = fleet.urls["n1"].replace("postgres@", f"{role}:{secret}@")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO items SELECT x, x FROM generate_series(1, 30) x")
        assert connection.execute("SELECT count(*) FROM items").fetchone() == (30,)
    assert not any(secret in each.out + each.err for each in ran)
    assert not any(secret.encode() in each.read_bytes() for each in shell.folder.glob("towpath.db*"))
    shell("shards", "drop", "items", "--yes")
    for node in fleet.urls:
        fleet.query(node, f"DROP OWNED BY {role}")
        fleet.query(node, f"DROP ROLE {role}")


def _pending(shell: Shell) -> bool:
    return any(each["pending"] for each in shell("shards", "status", "--json").json["copies"])
