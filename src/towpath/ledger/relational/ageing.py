"""Hasten: what has waited long becomes urgent.

The index of ready jobs is by (priority, seq). Jobs are appended in the order of time, so that of each priority only those up to
the last one that is old enough are looked at: the cost is that of what is found, not of what waits.
"""

from __future__ import annotations

from towpath.core.checks import matches
from towpath.core.commands import Hasten, Hastened
from towpath.ledger.relational.batch import Batch
from towpath.ledger.relational.db import array


def hasten(batch: Batch, command: Hasten) -> Hastened:
    batch.flush()
    before = batch.now - command.waited
    last = _last_appended(batch, before)
    found: list[int] = []
    for queue in sorted(name for name in batch.db.rows("live_queues", (), str) if matches(command.queue, name)):
        for name in ("old_loose", "old_parted", "old_suspects"):
            if len(found) <= command.limit:
                limit = command.limit + 1 - len(found)
                found += batch.db.rows(name, (queue, command.priority, last, before, limit), int)
    more = len(found) > command.limit
    if found:
        batch.wrote = True
        seqs = array(found[: command.limit])
        batch.db.run("hasten", (command.priority, seqs))
    return Hastened(len(found) - more, more)


def _last_appended(batch: Batch, before: int) -> int:
    """The highest seq that was appended by then, or any after it without a job in between."""
    low, high = 0, batch.next_seq
    while low < high:
        middle = (low + high + 1) // 2
        row = batch.db.one("created_from", (middle,))
        if row is None or row[0] > before:
            high = middle - 1
        else:
            low = middle
    return low
