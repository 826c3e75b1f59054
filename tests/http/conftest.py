"""Servers for the tests of a module: starting one costs more than a test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shell import Shell
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


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """In an empty directory, without settings."""
    for name in [name for name in os.environ if name.startswith("TOWPATH_") and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)
