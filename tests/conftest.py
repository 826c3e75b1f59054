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


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'work.db'}"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url) as app:
        yield app
        assert app.ledger.check() == []


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    """An App on each ledger with a database."""
    url = (
        f"sqlite:///{tmp_path}/work.db"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )
    with App(url) as app:
        yield app
        assert app.ledger.check() == []


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """The ledger of each kind. Modules with a `ledger` of their own use that."""
    ledger = open_ledger(url)
    yield ledger
    ledger.close()


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
