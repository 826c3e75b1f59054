"""The PostgreSQL ledger keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from towpath.ledger import Ledger
from towpath.ledger.postgres import PostgresLedger, PostgresOptions
from towpath.testing import ManualClock
from towpath.testing.ledger_suite import LedgerSuite, checked
from towpath.testing.postgres import Server


@pytest.fixture(scope="module")
def url(postgres: Server) -> Iterator[str]:
    """A database that the tests of this module use one after the other."""
    url = postgres.create_database()
    PostgresLedger(url).close()
    yield url
    postgres.drop_database(url)


EMPTY = """
TRUNCATE towpath.job, towpath.body, towpath.edge, towpath.gate, towpath."group", towpath."then", towpath.key, towpath.queue,
    towpath.part, towpath.tally, towpath.note, towpath.tombstone, towpath.reply;
ALTER SEQUENCE towpath.job_seq RESTART; ALTER SEQUENCE towpath.version_seq RESTART; ALTER SEQUENCE towpath.last_time RESTART;
"""


class TestPostgres(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, url: str) -> Iterator[Ledger]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(EMPTY)
        with checked(PostgresLedger(url, PostgresOptions(), clock)) as ledger:
            yield ledger
