"""Hasten: what has waited long becomes urgent.

The index of ready jobs is by (priority, seq). Jobs are appended in the order of time, so that of each priority only those up to
the last one that is old enough are looked at: the cost is that of what is found, not of what waits.
"""

from __future__ import annotations

from towpath.core.checks import matches
from towpath.core.commands import Hasten, Hastened
from towpath.ledger.sqlite.batch import Batch
from towpath.ledger.sqlite.db import array, named, one, rows

_READY = "FROM towpath_job WHERE queue = :queue AND state = 'ready' AND part IS NULL"
_PARTED = "FROM towpath_job WHERE queue = :queue AND state = 'ready' AND part IS NOT NULL AND part = level.part"
_LOOSE_LEVELS = f"""
WITH RECURSIVE level(p) AS (
    SELECT (SELECT min(priority) {_READY} AND priority > :priority)
    UNION ALL SELECT (SELECT min(priority) {_READY} AND priority > level.p) FROM level WHERE level.p IS NOT NULL)
SELECT json_group_array(seq) FROM (
    SELECT j.seq FROM level CROSS JOIN towpath_job j
    WHERE j.queue = :queue AND j.state = 'ready' AND j.part IS NULL AND j.priority = level.p AND j.seq <= :last
    AND j.ready_at <= :before ORDER BY j.priority, j.seq LIMIT :limit)
"""
_PARTED_LEVELS = f"""
WITH RECURSIVE level(part, p) AS (
    SELECT level.part, (SELECT min(priority) {_PARTED} AND priority > :priority)
    FROM (SELECT name AS part FROM towpath_part WHERE queue = :queue AND ready > 0) level
    UNION ALL
    SELECT level.part, (SELECT min(priority) {_PARTED} AND priority > level.p) FROM level WHERE level.p IS NOT NULL)
SELECT json_group_array(seq) FROM (
    SELECT j.seq FROM level CROSS JOIN towpath_job j
    WHERE j.queue = :queue AND j.state = 'ready' AND j.part IS NOT NULL AND j.part = level.part AND j.priority = level.p
    AND j.seq <= :last AND j.ready_at <= :before ORDER BY j.part, j.priority, j.seq LIMIT :limit)
"""


def hasten(batch: Batch, command: Hasten) -> Hastened:
    batch.flush()
    before = batch.now - command.waited
    last = _last_appended(batch, before)
    found: list[int] = []
    for queue in sorted(name for name in rows(batch.db, named("live_queues"), (), str) if matches(command.queue, name)):
        for sql in (_LOOSE_LEVELS, _PARTED_LEVELS):
            if len(found) <= command.limit:
                limit = command.limit + 1 - len(found)
                args = {"queue": queue, "priority": command.priority, "last": last, "before": before, "limit": limit}
                found += rows(batch.db, sql, args, int)
    more = len(found) > command.limit
    if found:
        batch.wrote = True
        seqs = array(found[: command.limit])
        batch.db.execute(
            "UPDATE towpath_job SET priority = ? WHERE seq IN (SELECT value FROM json_each(?))", (command.priority, seqs)
        )
    return Hastened(len(found) - more, more)


def _last_appended(batch: Batch, before: int) -> int:
    """The highest seq that was appended by then, or any after it without a job in between."""
    low, high = 0, batch.next_seq
    while low < high:
        middle = (low + high + 1) // 2
        row = one(batch.db, "SELECT created_at FROM towpath_job WHERE seq >= ? ORDER BY seq LIMIT 1", (middle,))
        if row is None or row[0] > before:
            high = middle - 1
        else:
            low = middle
    return low
