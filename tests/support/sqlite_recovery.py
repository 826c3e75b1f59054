"""The check of a SQLite ledger after a crash."""

from __future__ import annotations

from pathlib import Path

from tests.support.sqlite_workload import script
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock


def prove(path: Path, acknowledged: int, big: bool) -> int:
    """Assert that the file has all acknowledged batches and no partial one, and that the rest of the history
    ends as expected. Return the number of its batches."""
    history = script(big)
    ledger = SqliteLedger(path, SqliteOptions(synchronous="normal"), ManualClock())
    try:
        assert ledger.integrity() == []
        found = ledger.dump()
        held = [
            number
            for number in (acknowledged, acknowledged + 1)
            if found in history.dumps[number : number + 1]
        ]
        assert held, f"neither the state after {acknowledged} batches nor after one more"
        # The batch without an answer may have been applied: the caller repeats it.
        for number, (commands, now) in enumerate(history.batches[acknowledged:], acknowledged):
            answers = ledger.apply(commands, now)
            assert number == acknowledged or answers == history.answers[number]
        assert ledger.dump() == history.dumps[-1]
        assert ledger.integrity() == []
    finally:
        ledger.close()
    return held[-1]
