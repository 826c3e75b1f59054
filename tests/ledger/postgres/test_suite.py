"""The PostgreSQL ledger passes the suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from towpath.ledger import Ledger
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.testing import ManualClock
from towpath.testing.histories import factory, play
from towpath.testing.ledger_suite import LedgerSuite, checked
from towpath.testing.postgres import empty


class TestPostgres(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, module_url: str) -> Iterator[Ledger]:
        empty(module_url)
        with checked(PostgresLedger(module_url, PostgresOptions(), clock)) as ledger:
            yield ledger


@pytest.mark.parametrize("seed", range(1, 13))
def test_the_same_answers_as_the_memory_ledger(seed: int, module_url: str, tmp_path: Path) -> None:
    play(seed, 80, factory("model", tmp_path), factory(module_url, tmp_path))
