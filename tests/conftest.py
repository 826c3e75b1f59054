"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine import BareEngine, Verbs
from towpath import App
from towpath.errors import LedgerClosed
from towpath.ledger import Ledger, open_ledger
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


# One PostgreSQL for a whole test run, however many processes run it. They inherit where it is; the first of
# them starts it, and the process that started them removes it.
PLACE = "TOWPATH_TEST_POSTGRES"
_at_the_end = pytest.StashKey[contextlib.ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        stack = config.stash[_at_the_end] = contextlib.ExitStack()
        os.environ[PLACE] = str(stack.enter_context(place()))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _at_the_end in config.stash:
        if shared_server().exists():
            Server.shared(shared_server()).close()
        config.stash[_at_the_end].close()


def shared_server() -> Path:
    return Path(os.environ[PLACE]) / "shared"


@pytest.fixture(scope="session")
def postgres_place() -> Path:
    """Where tests that stop and kill start servers of their own."""
    return Path(os.environ[PLACE])


@pytest.fixture(scope="session")
def postgres() -> Server:
    """A server for everyone: not to be stopped."""
    return Server.shared(shared_server())


@pytest.fixture
def postgres_url(postgres: Server) -> Iterator[str]:
    """A fresh, empty database."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def postgres_template(postgres: Server) -> str:
    """The name of a database with an empty ledger: a copy of it is ready in half the time."""
    url = postgres.create_database()
    open_ledger(url).close()
    return url.rpartition("/")[2]


LEDGERS = ("memory", "sqlite", "postgres")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `url`, `app`, `ledger` or `engine` runs on every ledger, or on those that its mark
    `ledgers` names."""
    if "url" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ledgers")
        metafunc.parametrize("url", LEDGERS if mark is None else mark.args, indirect=True)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'work.db'}"


@pytest.fixture
def url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    """The URL of an empty ledger."""
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres")
        copy = server.create_database(request.getfixturevalue("postgres_template"))
        yield copy
        server.drop_database(copy)
    else:
        yield {"memory": "memory://", "sqlite": sqlite_url}[request.param]


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
    """A ledger whose time is that of `clock`."""
    with contextlib.closing(open_ledger(url, clock)) as ledger:
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
