"""Upkeep: reap, expire, wake, purge, sweep, a bounded number of rows at a time; nothing is written when nothing is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from towpath.core.commands import KEEP, Upkeep, Upkept
from towpath.core.job import FINISHED, WAITING, Job, Reason, State
from towpath.core.lifecycle import RETENTION, Change, lose
from towpath.ledger.relational import bulk, claims, endings
from towpath.ledger.relational.batch import Batch, by_seq
from towpath.ledger.relational.db import array


def upkeep(batch: Batch, command: Upkeep) -> Upkept:
    batch.flush()
    left = command.limit
    reaped = _reap(batch, command.dead, left)
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


def _reap(batch: Batch, dead: Sequence[str], limit: int) -> int:
    """First the jobs of dead owners, then those whose lease is over."""
    reaped = _lose(batch, batch.db.rows("orphaned_jobs", (array(dead), limit), Job)) if dead else 0
    if reaped < limit:
        late = _late(batch, limit - reaped)
        if late and batch.outage():
            late = _late(batch, limit - reaped)
        reaped += _lose(batch, late)
    return reaped


def _late(batch: Batch, limit: int) -> list[Job]:
    return batch.db.rows("late_jobs", (batch.now, array(batch.jumps.recorded), limit), Job)


def _lose(batch: Batch, lost: Sequence[Job]) -> int:
    if not lost:
        return 0
    batch.wrote = True
    changes = [(job, lose(job, batch.now)) for job in lost]
    batch.db.run("count_losses", (array([job.seq for job in lost]),))
    back = [(job, change) for job, change in changes if change.state in WAITING]
    _give_back(batch, back)
    held = [(job, change) for job, change in back if endings.is_open(batch, job.group)]
    endings.hold(batch, [(job.seq, job.queue, job.part, change.state) for job, change in held])
    ends = [(state, _by_reason(changes, state)) for state in (State.FAILED, State.CANCELED)]
    endings.finish_sets(batch, [(seqs, state, reason) for state, found in ends for reason, seqs in found.items()])
    return len(lost)


def _by_reason(changes: Iterable[tuple[Job, Change]], state: State) -> dict[Reason, list[int]]:
    """Those that end in `state`. A canceled job keeps the reason it was asked for, so there may be several."""
    found: dict[Reason, list[int]] = {}
    for job, change in changes:
        if change.state is state:
            found.setdefault(change.reason, []).append(job.seq)
    return found


def _give_back(batch: Batch, back: list[tuple[Job, Change]]) -> None:
    if back:
        batch.db.run("give_back", (array([(job.seq, change.state, change.ready_at) for job, change in back]),))
        batch.move(Counter((job.queue, job.part, State.RUNNING, change.state) for job, change in back))


def _wake(batch: Batch, limit: int) -> int:
    batch.flush()
    woken = 0
    for queue in batch.db.rows("queues_with_due", (batch.now,), str):
        woken += claims.promote(batch, queue, limit - woken)
        if woken == limit:
            break
    return woken


def _purge(batch: Batch, limit: int) -> int:
    batch.flush()
    purged = 0
    for queue in batch.db.rows("queues_with_purgeable", (batch.now,), str):
        purged += _delete(batch, queue, batch.now, limit - purged)
        if purged == limit:
            return purged
    batch.flush()
    for queue, kept, keep in batch.db.rows("queues_too_full", (KEEP, KEEP), tuple[str, int, int]):
        purged += _delete(batch, queue, None, min(kept - keep, limit - purged))
        if purged == limit:
            break
    return purged


def _delete(batch: Batch, queue: str, until: int | None, limit: int) -> int:
    seqs = batch.db.rows("purgeable_jobs", (queue, until, until, limit), int)
    doomed = by_seq(batch, seqs)
    assert all(job.state in FINISHED for job in doomed)
    bulk.delete(batch, doomed)
    return len(doomed)


def _sweep(batch: Batch, limit: int) -> int:
    batch.flush()
    now, left = batch.now, limit
    for name in ("sweep_tombstones", "sweep_replies", "sweep_notes"):
        left -= _delete_rows(batch, name, now, left)
    left -= _close_windows(batch, left)
    left -= _delete_rows(batch, "sweep_parts", now, left)
    groups = _delete_rows(batch, "sweep_groups", now - RETENTION, left)
    if groups:
        for statement in ("sweep_thens", "sweep_gates", "sweep_proxies"):
            batch.db.run(statement)
    if left < limit or groups:
        batch.wrote = True
        batch.parts.clear()
        batch.groups.clear()
    return limit - left + groups


def _delete_rows(batch: Batch, statement: str, until: int, limit: int) -> int:
    return batch.db.count(statement, (until, limit)) if limit else 0


def _close_windows(batch: Batch, limit: int) -> int:
    """A key whose window is over is held by an unfinished job only."""
    over = batch.db.rows("closed_windows", (batch.now, limit), tuple[str, str, int]) if limit else []
    if over:
        batch.relate()
        over = batch.db.rows("closed_windows", (batch.now, limit), tuple[str, str, int])
    if kept := [(space, key) for space, key, held in over if held]:
        batch.db.run("close_windows", (array(kept),))
    if free := [(space, key) for space, key, held in over if not held]:
        batch.db.run("delete_keys", (array(free),))
    return len(over)


def _next_due(batch: Batch) -> int | None:
    jumps = batch.jumps.recorded
    lease: int | None = None
    if jumps:
        lease = batch.db.one("next_lease_after_jump", (batch.now, array(jumps)))[0]
    else:
        lease = batch.db.one("next_lease")[0]
    due: int | None = batch.db.one("next_due", (batch.now, KEEP))[0]
    return min((time for time in (lease, due) if time is not None), default=None)
