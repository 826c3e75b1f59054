"""The PostgreSQL ledger keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from towpath.ledger import Ledger
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.testing import ManualClock
from towpath.testing.histories import factory, play
from towpath.testing.ledger_suite import LedgerSuite, checked
from towpath.testing.postgres import Server, empty


@pytest.fixture(scope="module")
def suite_url(postgres: Server) -> Iterator[str]:
    """A database that the tests of this module use one after the other."""
    url = postgres.create_database()
    PostgresLedger(url).close()
    yield url
    postgres.drop_database(url)


class TestPostgres(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, suite_url: str) -> Iterator[Ledger]:
        empty(suite_url)
        with checked(PostgresLedger(suite_url, PostgresOptions(), clock)) as ledger:
            yield ledger


@pytest.mark.parametrize("seed", range(1, 13))
def test_the_same_answers_as_the_memory_ledger(seed: int, suite_url: str, tmp_path: Path) -> None:
    play(seed, 80, factory("model", tmp_path), factory(suite_url, tmp_path))
