"""The model passes the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from towpath.ledger import Ledger
from towpath.testing import ManualClock
from towpath.testing.ledger_suite import LedgerSuite, checked


class TestModel(LedgerSuite):
    @pytest.fixture
    def ledger(self, clock: ManualClock) -> Iterator[Ledger]:
        from towpath.ledger.model_ledger import ModelLedger

        with checked(ModelLedger(clock)) as ledger:
            yield ledger
