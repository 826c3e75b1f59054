"""Servers for the tests of a module: starting one costs more than a test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.wire import Remote, serving
from towpath import App
from towpath.testing import ManualClock
from towpath.testing.postgres import Server

_numbers = itertools.count(1)


@pytest.fixture
def queue() -> str:
    """The name of a queue that no other test uses."""
    return f"orders-{next(_numbers)}"


@pytest.fixture(scope="module", params=["memory", "sqlite", "postgres"])
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A server on each ledger."""
    url = "memory://"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('http') / 'work.db'}"
    elif request.param == "postgres":
        server: Server = request.getfixturevalue("postgres")
        url = server.create_database(request.getfixturevalue("postgres_template"))
    with App(url) as app, serving(app) as remote:
        yield remote
        assert app.ledger.check() == []
    if request.param == "postgres":
        server.drop_database(url)


@pytest.fixture(scope="module")
def local() -> Iterator[Remote]:
    """A server in memory, for tests of the protocol alone."""
    with App("memory://") as app, serving(app) as remote:
        yield remote
        assert app.ledger.check() == []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(clock: ManualClock) -> Iterator[Remote]:
    """A server in memory whose time is that of `clock`."""
    with App("memory://", clock=clock) as app, serving(app) as remote:
        yield remote
        assert app.ledger.check() == []
