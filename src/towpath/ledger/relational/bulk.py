"""Cancel, revive, purge: many jobs by a selector, in the order of seq, a bounded number at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from towpath.core.admission import namespace, node
from towpath.core.commands import MAX_SPECS, TOMBSTONE, Cancel, Canceled, GroupState, Purge, Purged, Revive, Revived
from towpath.core.job import FINISHED, WAITING, Job, KeyPolicy, Reason, State
from towpath.core.lifecycle import awaken, counter_of, dead_dependency, dead_group, other_outcome, waits_in_a_circle
from towpath.ledger.relational import endings
from towpath.ledger.relational.appends import downstream
from towpath.ledger.relational.batch import Batch, GroupRow, by_seq, recount
from towpath.ledger.relational.db import array

UNFINISHED = tuple(sorted(set(State) - FINISHED))
DEAD = (State.FAILED, State.CANCELED)


def _matching(batch: Batch, command: Cancel | Revive | Purge, states: Iterable[State]) -> tuple[list[Job], bool]:
    batch.relate()
    found = batch.db.matching(command.where, states, isinstance(command, Cancel), command.limit + 1)
    return found[: command.limit], len(found) > command.limit


def cancel(batch: Batch, command: Cancel) -> Canceled:
    found, more = _matching(batch, command, UNFINISHED)
    asked = [job.seq for job in found if job.state is State.RUNNING]
    waiting = [job.seq for job in found if job.state in WAITING]
    if asked:
        batch.wrote = True
        batch.db.run("ask_to_stop", (Reason.REQUESTED, array(asked)))
    endings.finish(batch, waiting, State.CANCELED, Reason.REQUESTED)
    return Canceled(len(waiting), len(asked), more)


def purge(batch: Batch, command: Purge) -> Purged:
    found, more = _matching(batch, command, FINISHED)
    delete(batch, found)
    return Purged(len(found), more)


def delete(batch: Batch, jobs: Sequence[Job]) -> None:
    """Finished jobs go, and leave tombstones."""
    if not jobs:
        return
    until = batch.now + TOMBSTONE
    tombs = [(job.id, job.seq, job.state, job.settled_fence, None, until) for job in jobs]
    batch.db.put("tombstone", tombs)
    seqs = array([job.seq for job in jobs])
    for statement in ("delete_out_edges", "delete_in_edges", "delete_gates_of", "delete_names", "delete_bodies", "delete_jobs"):
        batch.db.run(statement, (seqs,))
    batch.move(Counter((job.queue, job.part, job.state, None) for job in jobs))


def revive(batch: Batch, command: Revive) -> Revived:
    found, more = _matching(batch, command, () if command.where.ids else DEAD)
    revived: set[int] = set()
    refused: dict[int, tuple[str, str]] = {}
    for job in sorted(found, key=lambda job: (job.reason is Reason.DEPENDENCY, job.seq)):
        if job.seq in revived:
            continue
        if why := _obstacle(batch, job):
            refused[job.seq] = job.id, why
        else:
            revived |= _revive_with_dependents(batch, job)
    return Revived(len(revived), tuple(refused[seq] for seq in sorted(refused)), more)


class GateRow(NamedTuple):
    """A group that a job waits for: for its success, for any end, or (a callback) for one outcome."""

    group: str
    run_anyway: int
    outcome: State | None

    def met(self, outcome: State) -> bool:
        return bool(self.run_anyway) or outcome is (self.outcome or State.DONE)


def _obstacle(batch: Batch, job: Job) -> str | None:
    """Why the job cannot come back, in a few words."""
    if job.state not in DEAD:
        return f"it is {job.state}"
    if job.reason is Reason.SUPERSEDED:
        return "superseded"
    if (holder := _other_holder(batch, job)) is not None:
        return f"its key is held by {holder}"
    if job.group is not None and (group := batch.group(job.group)) is not None and group.state is GroupState.ABORTING:
        return f"group {job.group} is aborting"
    if (bad := batch.db.one("bad_dependency", (job.seq,))) is not None:
        return dead_dependency(bad[0], State(bad[1]))
    for gate in _shut_gates(batch, job):
        outcome = _group(batch, gate.group).outcome
        assert outcome is not None
        if gate.outcome is not None:
            return other_outcome(gate.group, outcome, gate.outcome)
        if (first := batch.db.one("dead_member", (gate.group,))) is not None:
            return dead_group(gate.group, outcome, first[0])
    return _cycle(batch, job)


def _group(batch: Batch, id: str) -> GroupRow:
    row = batch.group(id)
    assert row is not None, f"a gate of an unknown group {id}"
    return row


def _gates(batch: Batch, job: Job) -> list[GateRow]:
    found = batch.db.rows("gates_of", (job.seq,), GateRow)
    batch.load_groups([gate.group for gate in found])
    return found


def _shut_gates(batch: Batch, job: Job) -> list[GateRow]:
    """The groups that ended otherwise than the job needs."""
    found = [(gate, _group(batch, gate.group).outcome) for gate in _gates(batch, job)]
    return [gate for gate, outcome in found if outcome is not None and not gate.met(outcome)]


def _cycle(batch: Batch, job: Job) -> str | None:
    """Would the job wait for something that waits for one of its groups?"""
    gates = _gates(batch, job)
    waited = set(batch.db.rows("open_dependencies", (job.seq, MAX_SPECS), str))
    if not (gates or waited):
        return None
    groups = _groups_of(batch, job)
    waited |= {node(gate.group) for gate in gates if gate.group in groups or _group(batch, gate.group).outcome is None}
    for group in sorted(groups if waited else ()):
        reached = downstream(batch, {node(group)}).get(node(group), frozenset())
        if both := waited & {*reached, node(group)}:
            return waits_in_a_circle(min(both), group)
    return None


def _groups_of(batch: Batch, job: Job) -> set[str]:
    """The groups that a revived job is counted in."""
    found = {row.group for row in _proxies(batch, job)}
    return found if job.group is None else found | {job.group}


def _proxies(batch: Batch, job: Job) -> list[endings.ProxyRow]:
    """The members that the job represents, in groups that are not aborting."""
    found = [] if job.key is None else batch.db.rows("proxies_of", (array([job.seq]),), endings.ProxyRow)
    return [row for row in found if _group(batch, row.group).state is not GroupState.ABORTING]


def _other_holder(batch: Batch, job: Job) -> str | None:
    if job.key is None or job.key_policy is KeyPolicy.SERIAL:
        return None
    row = batch.db.one("live_holder", (namespace(job.queue), job.key, job.seq))
    return None if row is None else str(row[0])


def _revive_with_dependents(batch: Batch, job: Job) -> set[int]:
    """Revive a job and, level by level, what ended only because of it."""
    revived = {job.seq}
    needing = _revive_one(batch, job)
    while needing:
        level, needing = sorted(needing), set()
        for dependent in by_seq(batch, level):
            if dependent.state in DEAD and dependent.reason is Reason.DEPENDENCY and _obstacle(batch, dependent) is None:
                needing |= _revive_one(batch, dependent)
                revived.add(dependent.seq)
    return revived


def _revive_one(batch: Batch, job: Job) -> set[int]:
    """The jobs that may have ended only because of it."""
    batch.db.run("drop_met_edges", (job.seq,))
    if shut := _shut_gates(batch, job):
        # All because of which the group ended badly is deleted.
        batch.db.run("delete_gates", (array([(gate.group, job.seq) for gate in shut]),))
    waits = batch.db.one("open_waits", (job.seq,))[0] + endings.is_open(batch, job.group)
    waits += sum(_group(batch, gate.group).outcome is None for gate in _gates(batch, job))
    state = awaken(job.ready_at, waits, batch.now)
    batch.db.run("revive", (state, Reason.REVIVED, waits, batch.now, job.seq))
    batch.move(Counter([(job.queue, job.part, job.state, state)]))
    if job.group is not None:
        recount(batch, job.group, job.state.value, "unfinished")
    if job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        key = (namespace(job.queue), job.key, job.id, job.seq, 0, None)
        batch.db.put("key", [key])
    needing = set(batch.db.rows("revivable_dependents", (array([job.seq]),), int))
    endings.move_proxies(batch, [row for row in _proxies(batch, job) if row.counted != "unfinished"], "unfinished")
    for group in sorted(_groups_of(batch, job)):
        if _group(batch, group).state is GroupState.CLOSED:
            needing |= _reopen(batch, batch.change_group(group))
    return needing


def _reopen(batch: Batch, group: GroupRow) -> set[int]:
    """A group that has ended waits again. What it woke and what has not begun waits again too; the jobs that may have ended only
    because of its outcome."""
    group.state, group.outcome, group.closed_at = GroupState.SEALED, None, None
    _follow_winners(batch, group)
    gates = dict(batch.db.rows("gates_to", (group.id,), tuple[int, int]))
    waiters = by_seq(batch, gates)
    if blocked := [job.seq for job in waiters if job.state is State.BLOCKED]:
        batch.db.run("lower_waits", (array([(seq, -1) for seq in blocked]),))
    endings.hold(
        batch, [(job.seq, job.queue, job.part, job.state) for job in waiters if job.state in (State.SCHEDULED, State.READY)]
    )
    if begun := [(group.id, job.seq) for job in waiters if job.state is State.RUNNING]:
        batch.db.run("delete_gates", (array(begun),))
    return {job.seq for job in waiters if job.state in DEAD and job.reason is Reason.DEPENDENCY and not gates[job.seq]}


def _follow_winners(batch: Batch, group: GroupRow) -> None:
    """The members that others represent, which an abort may have counted as canceled, are counted as those are now."""
    proxies = batch.db.rows("proxies_in", (group.id,), endings.ProxyRow)
    winners = {job.seq: job for job in by_seq(batch, {row.job for row in proxies})} if proxies else {}
    for row in proxies:
        winner = winners.get(row.job)
        counted = row.counted if winner is None else counter_of(winner.state, winner.reason)
        if winner is None or counted == row.counted:
            continue
        if winner.id not in downstream(batch, {node(group.id)}).get(node(group.id), ()):
            endings.move_proxies(batch, [row], counted)
