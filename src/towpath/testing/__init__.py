"""For tests of towpath and with towpath.

`ManualClock` needs nothing. The rest needs pytest or Hypothesis and is imported by its own name:
`towpath.testing.ledger_suite` (what a ledger must do) and `towpath.testing.histories` (two ledgers, one
random history).
"""

from __future__ import annotations

from towpath.testing.clock import START, ManualClock

__all__ = ["START", "ManualClock"]
