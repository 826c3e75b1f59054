"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from towpath.testing import ManualClock
from towpath.testing.postgres import Server, place

settings.register_profile("towpath", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("towpath")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# One PostgreSQL for a whole test run, however many processes run it. They inherit where it is; the first of them starts it, and
# the process that started them removes it.
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
