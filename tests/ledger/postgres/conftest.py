"""A ledger on a database of its own, checked at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.testing.postgres import Server


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[PostgresLedger]:
    with closing(PostgresLedger(postgres_url)) as ledger:
        yield ledger
        assert ledger.check() == []


@pytest.fixture(scope="module")
def module_url(postgres: Server) -> Iterator[str]:
    """A database that the tests of a module use one after the other."""
    url = postgres.create_database()
    PostgresLedger(url).close()
    yield url
    postgres.drop_database(url)
