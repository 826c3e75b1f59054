"""Upkeep (reap, expire, promote, purge, sweep: a bounded number of rows, no write if nothing is due) and the
bulk commands cancel, purge, revive and hasten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from towpath.core.checks import matches
from towpath.core.commands import (
    KEEP,
    MAX_SPECS,
    TOMBSTONE,
    Cancel,
    Canceled,
    GroupState,
    Hasten,
    Hastened,
    Purge,
    Purged,
    Resolve,
    Resolved,
    Revive,
    Revived,
    Upkeep,
    Upkept,
)
from towpath.core.facts import namespace, node
from towpath.core.finish import GroupGate
from towpath.core.history import may_have_history, resolution
from towpath.core.job import FINISHED, WAITING, Job, KeyPolicy, Reason, State
from towpath.core.lifecycle import (
    RETENTION,
    Change,
    awaken,
    counter_of,
    lose,
)
from towpath.core.revival import DEAD, prepare_resolve, revive_all, shut_gates
from towpath.core.views import QUEUE_KEPT
from towpath.ledger.tables import claim, finish
from towpath.ledger.tables.append import downstream
from towpath.ledger.tables.blobs import sweep_blobs
from towpath.ledger.tables.database import RESULT, array
from towpath.ledger.tables.transaction import GroupRow, Transaction, by_id, by_seq, forget_queues, recount


def upkeep(tx: Transaction, command: Upkeep) -> Upkept:
    tx.flush()
    left = command.limit
    reaped, failed = _reap(tx, command.dead, left)
    left -= reaped
    expired = finish.expire(tx, left) if left else 0
    left -= expired
    woken = _promote(tx, left) if left else 0
    left -= woken
    purged = _purge(tx, left) if left else 0
    left -= purged
    swept = _sweep(tx, left) if left else 0
    left -= swept
    tx.flush()
    return Upkept(reaped, expired, woken, purged, swept, left == 0, _next_due(tx), failed)


def _reap(tx: Transaction, dead: Sequence[str], limit: int) -> tuple[int, tuple[str, ...]]:
    """Reap the jobs of dead owners first, then the jobs with an ended lease. Returns how many, and the ids
    of the jobs that have failed."""
    orphans = tx.db.rows("orphaned_jobs", (array(dead), limit), Job) if dead else []
    failed, left = _lose(tx, orphans), limit - len(orphans)
    late = _late(tx, left) if left else []
    if late and tx.outage():
        late = _late(tx, left)
    failed += _lose(tx, late)
    return len(orphans) + len(late), tuple(sorted(failed))


def _late(tx: Transaction, limit: int) -> list[Job]:
    return tx.db.rows("late_jobs", (tx.now, array(tx.jumps.recorded), limit), Job)


def _lose(tx: Transaction, lost: Sequence[Job]) -> list[str]:
    """Take back these jobs; return the ids of the jobs that have failed."""
    if not lost:
        return []
    tx.wrote = True
    changes = [(job, lose(job, tx.now)) for job in lost]
    finish.end_attempts(tx, [(job, change, None) for job, change in changes])
    tx.db.run("count_losses", (array([job.seq for job in lost]),))
    back = [(job, change) for job, change in changes if change.state in WAITING]
    _give_back(tx, back)
    held = [(job, change) for job, change in back if finish.is_open(tx, job.group)]
    finish.hold(tx, [(job.seq, job.queue, job.part, change.state) for job, change in held])
    ends = [(state, _by_reason(changes, state)) for state in (State.FAILED, State.CANCELED)]
    sets = [finish.Ending(seqs, state, reason) for state, found in ends for reason, seqs in found.items()]
    finish.finish_sets(tx, sets)
    return [job.id for job, change in changes if change.state is State.FAILED]


def _by_reason(changes: Iterable[tuple[Job, Change]], state: State) -> dict[Reason, list[int]]:
    """The jobs that end in `state`, by reason: a canceled job has the reason of its stop request."""
    found: dict[Reason, list[int]] = {}
    for job, change in changes:
        if change.state is state:
            found.setdefault(change.reason, []).append(job.seq)
    return found


def _give_back(tx: Transaction, back: list[tuple[Job, Change]]) -> None:
    if back:
        tx.db.run("give_back", (array([(job.seq, change.state, change.ready_at) for job, change in back]),))
        tx.move(Counter((job.queue, job.part, State.RUNNING, change.state) for job, change in back))


def _promote(tx: Transaction, limit: int) -> int:
    tx.flush()
    woken = 0
    for queue in tx.db.rows("queues_with_due", (tx.now,), str):
        woken += claim.promote(tx, queue, limit - woken)
        if woken == limit:
            break
    return woken


def _purge(tx: Transaction, limit: int) -> int:
    tx.flush()
    purged = 0
    for queue in tx.db.rows("queues_with_purgeable", (tx.now,), str):
        purged += _delete(tx, queue, tx.now, limit - purged)
        if purged == limit:
            return purged
    tx.flush()
    for queue, kept, keep in tx.db.rows("queues_too_full", (KEEP, KEEP), tuple[str, int, int]):
        purged += _delete(tx, queue, None, min(kept - keep, limit - purged))
        if purged == limit:
            break
    return purged


def _delete(tx: Transaction, queue: str, until: int | None, limit: int) -> int:
    seqs = tx.db.rows("purgeable_jobs", (queue, until, until, limit), int)
    doomed = by_seq(tx, seqs)
    assert all(job.state in FINISHED for job in doomed)
    delete(tx, doomed)
    return len(doomed)


def _sweep(tx: Transaction, limit: int) -> int:
    tx.flush()
    now, left = tx.now, limit
    for name in ("sweep_tombstones", "sweep_replies", "sweep_notes"):
        left -= _delete_rows(tx, name, now, left)
    left -= _close_windows(tx, left)
    left -= _delete_rows(tx, "sweep_parts", now, left)
    left -= _sweep_queues(tx, left)
    groups = _delete_rows(tx, "sweep_groups", now - RETENTION, left)
    if groups:
        for statement in ("sweep_thens", "sweep_gates", "sweep_proxies"):
            tx.db.run(statement)
    if left < limit or groups:
        tx.wrote = True
        tx.parts.clear()
        tx.groups.clear()
    return limit - left + groups + sweep_blobs(tx, left - groups)


def _sweep_queues(tx: Transaction, limit: int) -> int:
    """Delete queues that have been unused for long, and note the time for queues that are unused now."""
    if not limit:
        return 0
    over = tx.db.rows("unused_queues", (tx.now - QUEUE_KEPT, tx.now, limit), str)
    if over:
        tx.db.run("delete_queues", (array(over),))
        tx.db.run("delete_unused", (array(over),))
        forget_queues(tx, over)
    if tx.db.count("note_unused", (tx.now,)):
        tx.wrote = True
    return len(over)


def _delete_rows(tx: Transaction, statement: str, until: int, limit: int) -> int:
    return tx.db.count(statement, (until, limit)) if limit else 0


def _close_windows(tx: Transaction, limit: int) -> int:
    """End the uniqueness windows that are over. An unfinished job keeps its key. Returns how many."""
    over = tx.db.rows("closed_windows", (tx.now, limit), tuple[str, str, int]) if limit else []
    if over:
        tx.hold_relations()
        over = tx.db.rows("closed_windows", (tx.now, limit), tuple[str, str, int])
    if kept := [(space, key) for space, key, held in over if held]:
        tx.db.run("close_windows", (array(kept),))
    if free := [(space, key) for space, key, held in over if not held]:
        tx.db.run("delete_keys", (array(free),))
    return len(over)


def _next_due(tx: Transaction) -> int | None:
    jumps = tx.jumps.recorded
    lease: int | None = None
    if jumps:
        lease = tx.db.one("next_lease_after_jump", (tx.now, array(jumps)))[0]
    else:
        lease = tx.db.one("next_lease")[0]
    due: int | None = tx.db.one("next_due", (tx.now, KEEP))[0]
    return min((time for time in (lease, due) if time is not None), default=None)


def hasten(tx: Transaction, command: Hasten) -> Hastened:
    tx.flush()
    before = tx.now - command.waited
    last = _last_appended(tx, before)
    found: list[int] = []
    for queue in sorted(name for name in tx.db.rows("live_queues", (), str) if matches(command.queue, name)):
        for name in ("old_loose", "old_parted", "old_suspects"):
            if len(found) <= command.limit:
                limit = command.limit + 1 - len(found)
                found += tx.db.rows(name, (queue, command.priority, last, before, limit), int)
    more = len(found) > command.limit
    if found:
        tx.wrote = True
        seqs = array(found[: command.limit])
        tx.db.run("hasten", (command.priority, seqs))
    return Hastened(len(found) - more, more)


def _last_appended(tx: Transaction, before: int) -> int:
    """The highest seq appended by `before`, or a higher one if no job lies between."""
    low, high = 0, tx.next_seq
    while low < high:
        middle = (low + high + 1) // 2
        row = tx.db.one("created_from", (middle,))
        if row is None or row[0] > before:
            high = middle - 1
        else:
            low = middle
    return low


UNFINISHED = tuple(sorted(set(State) - FINISHED))


def _matching(
    tx: Transaction, command: Cancel | Revive | Purge, states: Iterable[State]
) -> tuple[list[Job], bool]:
    tx.hold_relations()
    found = tx.db.matching(command.where, states, isinstance(command, Cancel), command.limit + 1)
    return found[: command.limit], len(found) > command.limit


def cancel(tx: Transaction, command: Cancel) -> Canceled:
    found, more = _matching(tx, command, UNFINISHED)
    asked = [job.seq for job in found if job.state is State.RUNNING]
    waiting = [job.seq for job in found if job.state in WAITING]
    if asked:
        tx.wrote = True
        tx.db.run("ask_to_stop", (Reason.REQUESTED, array(asked)))
    finish.finish(tx, waiting, State.CANCELED, Reason.REQUESTED)
    return Canceled(len(waiting), len(asked), more)


def purge(tx: Transaction, command: Purge) -> Purged:
    found, more = _matching(tx, command, FINISHED)
    delete(tx, found)
    return Purged(len(found), more)


def delete(tx: Transaction, jobs: Sequence[Job]) -> None:
    """Delete finished jobs and write their tombstones."""
    if not jobs:
        return
    until = tx.now + TOMBSTONE
    tombstones = [(job.id, job.seq, job.state, job.settled_fence, None, until) for job in jobs]
    tx.db.put("tombstone", tombstones)
    if claimed := [job.seq for job in jobs if may_have_history(job)]:
        tx.db.run("delete_attempts", (array(claimed),))
    seqs = array([job.seq for job in jobs])
    for statement in (
        "delete_out_edges",
        "delete_in_edges",
        "delete_gates_of",
        "delete_names",
        "delete_bodies",
        "delete_jobs",
    ):
        tx.db.run(statement, (seqs,))
    tx.db.run("free_blobs", (tx.now, seqs))
    tx.db.run("delete_unused", (array({job.queue for job in jobs}),))
    tx.move(Counter((job.queue, job.part, job.state, None) for job in jobs))


def revive(tx: Transaction, command: Revive) -> Revived:
    found, more = _matching(tx, command, () if command.where.ids else DEAD)
    return Revived(*revive_all(found, TableRevivals(tx)), more)


def resolve(tx: Transaction, command: Resolve) -> Resolved:
    tx.hold_relations()
    job = prepare_resolve(by_id(tx, [command.id]).get(command.id), command, TableRevivals(tx))
    if job is not None:
        finish.keep_resolution(tx, job.seq, resolution(job, command, tx.now))
        if command.result is not None:
            tx.db.put_bodies([(job.seq, RESULT, command.result)])
        finish.finish(tx, [job.seq], State.DONE, Reason(command.outcome))
    return Resolved(command.id, State.DONE)


class GateRow(NamedTuple):
    group: str
    run_anyway: int
    outcome: State | None


class TableRevivals:
    """The revivals of `core.revival` in a transaction."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def other_holder(self, job: Job) -> str | None:
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return None
        row = self._tx.db.one("live_holder", (namespace(job.queue), job.key, job.seq))
        return None if row is None else str(row[0])

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        row = _group(self._tx, group)
        return row.state, row.outcome

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        row = self._tx.db.one("bad_dependency", (job.seq,))
        return None if row is None else (row[0], State(row[1]))

    def gates(self, job: Job) -> list[tuple[str, GroupGate]]:
        found = self._tx.db.rows("gates_of", (job.seq,), GateRow)
        self._tx.load_groups([row.group for row in found])
        return [(row.group, GroupGate(bool(row.run_anyway), row.outcome)) for row in found]

    def dead_member(self, group: str) -> str | None:
        row = self._tx.db.one("dead_member", (group,))
        return None if row is None else str(row[0])

    def open_dependencies(self, job: Job) -> set[str]:
        return set(self._tx.db.rows("open_dependencies", (job.seq, MAX_SPECS), str))

    def counted_in(self, job: Job) -> set[str]:
        found = {row.group for row in _proxies(self._tx, job)}
        return found if job.group is None else found | {job.group}

    def downstream(self, name: str) -> frozenset[str]:
        return downstream(self._tx, {name}).get(name, frozenset())

    def by_seq(self, seqs: Sequence[int]) -> list[Job]:
        return by_seq(self._tx, seqs)

    def revive(self, job: Job, *, runs: bool = True) -> set[int]:
        return _revive_one(self._tx, job, runs)


def _group(tx: Transaction, id: str) -> GroupRow:
    row = tx.group(id)
    assert row is not None, f"a gate of an unknown group {id}"
    return row


def _proxies(tx: Transaction, job: Job) -> list[finish.ProxyRow]:
    """The members that the job represents, in groups that are not aborting."""
    found = [] if job.key is None else tx.db.rows("proxies_of", (array([job.seq]),), finish.ProxyRow)
    return [row for row in found if _group(tx, row.group).state is not GroupState.ABORTING]


def _revive_one(tx: Transaction, job: Job, runs: bool) -> set[int]:
    """Revive one job. Returns the jobs that may have ended only because of it."""
    tx.db.run("drop_met_edges", (job.seq,))
    reads = TableRevivals(tx)
    if runs and (shut := shut_gates(job, reads)):
        # The failed members of the group are deleted: no member is left to wait for.
        tx.db.run("delete_gates", (array([(group, job.seq) for group, _, _ in shut]),))
    waits = tx.db.one("open_waits", (job.seq,))[0] + finish.is_open(tx, job.group)
    waits += sum(reads.group_state(group)[1] is None for group, _ in reads.gates(job))
    state = awaken(job.ready_at, waits, tx.now)
    tx.db.run("revive", (state, Reason.REVIVED, waits, tx.now, job.seq))
    tx.move(Counter([(job.queue, job.part, job.state, state)]))
    if job.group is not None:
        recount(tx, job.group, job.state.value, "unfinished")
    if runs and job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        key = (namespace(job.queue), job.key, job.id, job.seq, 0, None)
        tx.db.put("key", [key])
    needing = set(tx.db.rows("revivable_dependents", (array([job.seq]),), int))
    finish.move_proxies(tx, [row for row in _proxies(tx, job) if row.counted != "unfinished"], "unfinished")
    for group in sorted(reads.counted_in(job)):
        if _group(tx, group).state is GroupState.CLOSED:
            needing |= _reopen(tx, tx.change_group(group))
    return needing


def _reopen(tx: Transaction, group: GroupRow) -> set[int]:
    """Reopen a closed group as sealed. Jobs that it unblocked and that have not started wait for it again.
    Returns the jobs that may have ended only because of its outcome."""
    group.state, group.outcome, group.closed_at = GroupState.SEALED, None, None
    _follow_winners(tx, group)
    gates = dict(tx.db.rows("gates_to", (group.id,), tuple[int, int]))
    waiters = by_seq(tx, gates)
    if blocked := [job.seq for job in waiters if job.state is State.BLOCKED]:
        tx.db.run("lower_waits", (array([(seq, -1) for seq in blocked]),))
    finish.hold(
        tx,
        [
            (job.seq, job.queue, job.part, job.state)
            for job in waiters
            if job.state in (State.SCHEDULED, State.READY)
        ],
    )
    if begun := [(group.id, job.seq) for job in waiters if job.state is State.RUNNING]:
        tx.db.run("delete_gates", (array(begun),))
    return {
        job.seq
        for job in waiters
        if job.state in DEAD and job.reason is Reason.DEPENDENCY and not gates[job.seq]
    }


def _follow_winners(tx: Transaction, group: GroupRow) -> None:
    """Count the represented members by the current states of the jobs that represent them: an abort may have
    counted them as canceled."""
    proxies = tx.db.rows("proxies_in", (group.id,), finish.ProxyRow)
    winners = {job.seq: job for job in by_seq(tx, {row.job for row in proxies})} if proxies else {}
    for row in proxies:
        winner = winners.get(row.job)
        counted = row.counted if winner is None else counter_of(winner.state, winner.reason)
        if winner is None or counted == row.counted:
            continue
        if winner.id not in downstream(tx, {node(group.id)}).get(node(group.id), ()):
            finish.move_proxies(tx, [row], counted)
