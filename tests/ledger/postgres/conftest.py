"""A ledger on a PostgreSQL of its own, which adds up in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from towpath.ledger.postgres.ledger import PostgresLedger


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[PostgresLedger]:
    with closing(PostgresLedger(postgres_url)) as ledger:
        yield ledger
        assert ledger.check() == []
