"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine import BareEngine, Verbs
from towpath import App
from towpath.errors import LedgerClosed
from towpath.ledger import Ledger, open_ledger
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.queues.message import Queue
from towpath.testing import ManualClock
from towpath.testing.postgres import Server, place

settings.register_profile(
    "towpath", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("towpath")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# One PostgreSQL server for a whole test run, whatever the number of processes. They inherit its directory;
# the first one starts it, and the parent process removes it.
PLACE = "TOWPATH_TEST_POSTGRES"
_at_the_end = pytest.StashKey[contextlib.ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background of a shell ignores SIGINT, and so would every process that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        stack = config.stash[_at_the_end] = contextlib.ExitStack()
        os.environ[PLACE] = str(stack.enter_context(place()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The processes of `-n auto`: up to twice as many as cores, since tests wait as much as they compute."""
    cores = os.cpu_count() or 1
    return cores + min(cores, 4)


def pytest_collection_finish() -> None:
    """Stop writing bytecode: a module that a test writes twice within one second would be read from it."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _at_the_end in config.stash:
        if shared_server().exists():
            Server.shared(shared_server()).close()
        config.stash[_at_the_end].close()


def shared_server() -> Path:
    return Path(os.environ[PLACE]) / "shared"


@pytest.fixture(scope="session")
def postgres_place() -> Path:
    """A directory for the servers of tests that stop and kill servers."""
    return Path(os.environ[PLACE])


@pytest.fixture(scope="session")
def postgres() -> Server:
    """A server that all tests share; it must not be stopped."""
    return Server.shared(shared_server())


@pytest.fixture
def empty_database(postgres: Server) -> Iterator[str]:
    """The URL of a database without tables."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def postgres_template(postgres: Server) -> str:
    """The name of a database with an empty ledger: a copy needs no migration."""
    url = postgres.create_database()
    open_ledger(url).close()
    return url.rpartition("/")[2]


def _empty_ledger(postgres: Server, postgres_template: str) -> Iterator[str]:
    """The URL of a database with an empty ledger."""
    url = postgres.create_database(postgres_template)
    yield url
    postgres.drop_database(url)


postgres_url = pytest.fixture(_empty_ledger, name="postgres_url")
# Of its own, since a test may use two databases.
_postgres_of_url = pytest.fixture(_empty_ledger, name="_postgres_of_url")


LEDGERS = ("memory", "sqlite", "postgres")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `url`, `app`, `ledger` or `engine` runs on every ledger, or on the ledgers that its
    mark `ledgers` names."""
    if "url" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ledgers")
        metafunc.parametrize("url", LEDGERS if mark is None else mark.args, indirect=True)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'work.db'}"


@pytest.fixture
def url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    """The URL of an empty ledger."""
    if request.param == "postgres":
        copy: str = request.getfixturevalue("_postgres_of_url")
        return copy
    return {"memory": "memory://", "sqlite": sqlite_url}[request.param]


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url) as app:
        yield app
        assert app.ledger.check() == []


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with contextlib.closing(open_ledger(url)) as ledger:
        yield ledger
        with contextlib.suppress(LedgerClosed):
            assert ledger.check() == []


@pytest.fixture
def manual_ledger(url: str, clock: ManualClock) -> Iterator[Ledger]:
    """A ledger with the time of `clock`. A PostgreSQL ledger that is opened by its URL has the time of the
    server."""
    remote = url.startswith("postgresql:")
    with contextlib.closing(
        PostgresLedger(url, clock=clock) if remote else open_ledger(url, clock)
    ) as ledger:
        yield ledger
        with contextlib.suppress(LedgerClosed):
            assert ledger.check() == []


@pytest.fixture
def engine(ledger: Ledger) -> Iterator[BareEngine]:
    with BareEngine(ledger) as engine:
        yield engine


@pytest.fixture
def queue(engine: BareEngine) -> Queue:
    return Queue(engine, "orders")


@pytest.fixture(params=["sync", "async"])
def verbs(request: pytest.FixtureRequest) -> Verbs:
    return Verbs(request.param == "async")
