"""The SQLite ledger passes the suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from towpath.ledger import Ledger
from towpath.testing import ManualClock
from towpath.testing.ledger_suite import LedgerSuite, checked


class TestSqlite(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock, tmp_path: Path) -> Iterator[Ledger]:
        from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions

        with checked(SqliteLedger(tmp_path / "ledger.db", SqliteOptions(), clock)) as ledger:
            yield ledger
