"""Upkeep: reap, expire, wake, purge, sweep, a bounded number of rows at a time; nothing is written when nothing is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from towpath.core.commands import KEEP, Upkeep, Upkept
from towpath.core.job import FINISHED, Job, Reason, State
from towpath.core.lifecycle import RETENTION, Change, lose
from towpath.ledger.sqlite import bulk, claims, endings
from towpath.ledger.sqlite.batch import Batch
from towpath.ledger.sqlite.db import array, named, one, rows
from towpath.ledger.sqlite.jobs import AS_JSON, by_seq

_LATE = f"""
SELECT json_group_array({AS_JSON}) FROM (
    SELECT * FROM towpath_job WHERE state = 'running' AND lease_until < :now
    AND NOT EXISTS (SELECT 1 FROM json_each(:jumps) g
        WHERE :now < (g.value ->> 0) + lease_len AND 2 * (g.value ->> 1) > lease_len
        AND lease_until > (g.value ->> 0) - (g.value ->> 1))
    ORDER BY lease_until, seq LIMIT :limit) j
"""


def upkeep(batch: Batch, command: Upkeep) -> Upkept:
    batch.flush()
    left = command.limit
    reaped = _reap(batch, left)
    left -= reaped
    expired = endings.expire(batch, left) if left else 0
    left -= expired
    woken = _wake(batch, left) if left else 0
    left -= woken
    purged = _purge(batch, left) if left else 0
    left -= purged
    swept = _sweep(batch, left) if left else 0
    left -= swept
    batch.flush()
    return Upkept(reaped, expired, woken, purged, swept, left == 0, _next_due(batch))


def _reap(batch: Batch, limit: int) -> int:
    jumps = array(batch.jumps.recorded)
    late = rows(batch.db, _LATE, {"now": batch.now, "limit": limit, "jumps": jumps}, Job)
    if not late:
        return 0
    batch.wrote = True
    changes = [(job, lose(job)) for job in late]
    batch.db.execute(named("count_losses"), (array([job.seq for job in late]),))
    back = [job for job, change in changes if change.state is State.READY]
    _give_back(batch, back)
    endings.hold(batch, [(job.seq, job.queue, job.part, State.READY) for job in back if endings.is_open(batch, job.group)])
    for state in (State.FAILED, State.CANCELED):
        for reason, seqs in _by_reason(changes, state).items():
            endings.finish(batch, seqs, state, reason)
    return len(late)


def _by_reason(changes: Iterable[tuple[Job, Change]], state: State) -> dict[Reason, list[int]]:
    """Those that end in `state`. A canceled job keeps the reason it was asked for, so there may be several."""
    found: dict[Reason, list[int]] = {}
    for job, change in changes:
        if change.state is state:
            found.setdefault(change.reason, []).append(job.seq)
    return found


def _give_back(batch: Batch, jobs: list[Job]) -> None:
    if jobs:
        batch.db.execute(named("give_back"), (array([job.seq for job in jobs]),))
        batch.move(Counter((job.queue, job.part, State.RUNNING, State.READY) for job in jobs))


def _wake(batch: Batch, limit: int) -> int:
    batch.flush()
    woken = 0
    for queue in rows(batch.db, named("queues_with_due"), (batch.now,), str):
        woken += claims.promote(batch, queue, limit - woken)
        if woken == limit:
            break
    return woken


def _purge(batch: Batch, limit: int) -> int:
    batch.flush()
    purged = 0
    for queue in rows(batch.db, named("queues_with_purgeable"), (batch.now,), str):
        purged += _delete(batch, queue, batch.now, limit - purged)
        if purged == limit:
            return purged
    batch.flush()
    for queue, kept, keep in rows(batch.db, named("queues_too_full"), (KEEP, KEEP), tuple[str, int, int]):
        purged += _delete(batch, queue, None, min(kept - keep, limit - purged))
        if purged == limit:
            break
    return purged


def _delete(batch: Batch, queue: str, until: int | None, limit: int) -> int:
    seqs = rows(batch.db, named("purgeable_jobs"), (queue, until, until, limit), int)
    doomed = by_seq(batch.db, seqs)
    assert all(job.state in FINISHED for job in doomed)
    bulk.delete(batch, doomed)
    return len(doomed)


def _sweep(batch: Batch, limit: int) -> int:
    batch.flush()
    now, left = batch.now, limit
    for name in ("sweep_tombstones", "sweep_replies", "sweep_notes"):
        left -= _delete_rows(batch, named(name), now, left)
    left -= _close_windows(batch, left)
    left -= _delete_rows(batch, named("sweep_parts"), now, left)
    groups = _delete_rows(batch, named("sweep_groups"), now - RETENTION, left)
    if groups:
        batch.db.execute(named("sweep_thens"))
    if left < limit or groups:
        batch.wrote = True
        batch.parts.clear()
        batch.groups.clear()
    return limit - left + groups


def _delete_rows(batch: Batch, sql: str, until: int, limit: int) -> int:
    if not limit:
        return 0
    before = batch.db.total_changes()
    batch.db.execute(sql, (until, limit))
    return batch.db.total_changes() - before


def _close_windows(batch: Batch, limit: int) -> int:
    """A key whose window is over is held by an unfinished job only."""
    over = rows(batch.db, named("closed_windows"), (batch.now, limit), tuple[str, str, int]) if limit else []
    if kept := [(space, key) for space, key, held in over if held]:
        batch.db.execute(named("close_windows"), (array(kept),))
    if free := [(space, key) for space, key, held in over if not held]:
        batch.db.execute(named("delete_keys"), (array(free),))
    return len(over)


def _next_due(batch: Batch) -> int | None:
    jumps = batch.jumps.recorded
    lease: int | None = None
    if jumps:
        args = {"now": batch.now, "jumps": array(jumps)}
        lease = one(batch.db, named("next_lease_after_jump"), args)[0]
    else:
        lease = one(batch.db, named("next_lease"))[0]
    due: int | None = one(batch.db, named("next_due"), {"now": batch.now, "keep": KEEP})[0]
    return min((time for time in (lease, due) if time is not None), default=None)
