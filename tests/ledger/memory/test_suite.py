"""The memory ledger passes the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from towpath.ledger import Ledger
from towpath.testing import ManualClock
from towpath.testing.ledger_suite import LedgerSuite, checked


class TestMemory(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock) -> Iterator[Ledger]:
        from towpath.ledger.memory.ledger import MemoryLedger

        with checked(MemoryLedger(clock)) as ledger:
            yield ledger
