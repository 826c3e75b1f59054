"""The ledger of a server passes the suite and plays the histories, with any ledger behind the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger.remote.conftest import TestServer
from towpath.ledger import Ledger, open_ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock
from towpath.testing.histories import factory, play
from towpath.testing.ledger_suite import LedgerSuite, checked


class TestRemoteMemory(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, server: TestServer) -> Iterator[Ledger]:
        with checked(open_ledger(server.serve(MemoryLedger(clock)))) as ledger:
            yield ledger


class TestRemoteSqlite(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, server: TestServer, tmp_path: Path) -> Iterator[Ledger]:
        behind = SqliteLedger(tmp_path / "ledger.db", SqliteOptions(), clock)
        with checked(open_ledger(server.serve(behind))) as ledger:
            yield ledger


@pytest.mark.parametrize("behind", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_same_answers_as_the_model(seed: int, behind: str, server: TestServer, tmp_path: Path) -> None:
    make = factory(behind, tmp_path)
    play(seed, 80, factory("model", tmp_path), lambda: open_ledger(server.serve(make())))
