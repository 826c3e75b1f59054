"""For tests of towpath and with towpath.

`ManualClock` has no dependencies. The other modules need pytest or Hypothesis and are imported by their
names: `towpath.testing.ledger_suite` (the tests that every ledger passes) and `towpath.testing.histories`
(one random history on two ledgers)."""

from __future__ import annotations

from towpath.testing.clock import START, ManualClock

__all__ = ["START", "ManualClock"]
