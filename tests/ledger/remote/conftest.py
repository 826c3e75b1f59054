"""A server for the tests of ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.wire import Remote, serving
from towpath import App
from towpath.ledger import Ledger
from towpath.ledger.memory.ledger import MemoryLedger


class Replaceable:
    """A ledger that can be replaced by an empty one: starting a server costs more than a test."""

    def __init__(self) -> None:
        self.ledger: Ledger = MemoryLedger()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)


class TestServer:
    """A server that accepts times and has no caretaker, which would change the ledger beside a test."""

    __test__ = False

    def __init__(self, remote: Remote, behind: Replaceable) -> None:
        self.address = remote.address
        self._behind = behind

    def serve(self, ledger: Ledger) -> str:
        """The URL of this ledger, which replaces the ledger of the server."""
        self._behind.ledger.close()
        self._behind.ledger = ledger
        return self.address


@contextmanager
def test_server() -> Iterator[TestServer]:
    behind = Replaceable()
    with App(ledger=behind) as app:
        app.engine.start_caretaker = lambda: None  # type: ignore[method-assign]
        with serving(app, for_tests=True) as remote:
            yield TestServer(remote, behind)
    behind.ledger.close()


test_server.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    with test_server() as server:
        yield server
