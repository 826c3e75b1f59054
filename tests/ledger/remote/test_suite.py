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
from towpath.testing.suite.append import AppendSuite
from towpath.testing.suite.batches import BatchSuite, RepeatSuite
from towpath.testing.suite.claim import ClaimSuite
from towpath.testing.suite.reads import ExplainSuite, ReadSuite
from towpath.testing.suite.records import RecordSuite
from towpath.testing.suite.settle import SettleSuite


class TestRemoteMemory(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, server: TestServer) -> Iterator[Ledger]:
        with checked(open_ledger(server.serve(MemoryLedger(clock)))) as ledger:
            yield ledger


class TestRemoteSqlite(
    BatchSuite, RepeatSuite, AppendSuite, ClaimSuite, SettleSuite, ReadSuite, ExplainSuite, RecordSuite
):
    """The values that a table ledger returns. The rules are those of the ledger, which passes the suite."""

    @pytest.fixture
    def ledger(self, clock: ManualClock, server: TestServer, tmp_path: Path) -> Iterator[Ledger]:
        behind = SqliteLedger(tmp_path / "ledger.db", SqliteOptions(), clock)
        with checked(open_ledger(server.serve(behind))) as ledger:
            yield ledger


@pytest.mark.parametrize("behind", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", range(1, 7))
def test_the_same_answers_as_the_model(seed: int, behind: str, server: TestServer, tmp_path: Path) -> None:
    make = factory(behind, tmp_path)
    play(seed, 80, factory("model", tmp_path), lambda: open_ledger(server.serve(make())))


@pytest.mark.parametrize("seed", [1])
def test_postgres_behind_the_server(seed: int, server: TestServer, postgres_url: str, tmp_path: Path) -> None:
    make = factory(postgres_url, tmp_path)
    play(seed, 60, factory("model", tmp_path), lambda: open_ledger(server.serve(make())))
