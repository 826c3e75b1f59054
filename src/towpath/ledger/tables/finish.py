"""The end of jobs and its consequences for dependents, groups and keys. See "Finishing a set" in
docs/ledger-rules.md."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import astuple, replace

from towpath.core.commands import GroupState
from towpath.core.facts import Origin, namespace
from towpath.core.finish import joined_groups
from towpath.core.group_commands import STOP_REASONS, callbacks
from towpath.core.history import HISTORY, AttemptRecord, attempt_outcome
from towpath.core.job import FINISHED, Job, Reason, State
from towpath.core.lifecycle import (
    Change,
    awaken,
    counter_of,
    group_outcome,
    purge_time,
)
from towpath.ledger.tables import append
from towpath.ledger.tables.database import HeldRow, array
from towpath.ledger.tables.transaction import GroupRow, Transaction, by_seq, moved, recount

AttemptEnd = tuple[Job | HeldRow, Change, str | None]
"""A running job, its change, and the error of the attempt. The attempt did not end done."""


class Ending(NamedTuple):
    """Jobs that end alike, and the groups that are updated together with them."""

    seqs: Sequence[int]
    state: State
    reason: Reason
    groups: Mapping[str, bool] = {}


class Dependent(NamedTuple):
    """A blocked job, how many jobs and groups it waits for, and how many of them have ended."""

    seq: int
    queue: str
    part: str | None
    ready_at: int
    waits: int
    over: int


def finish(tx: Transaction, seqs: Iterable[int], state: State, reason: Reason) -> None:
    """End the unfinished ones of these jobs, and end or unblock the jobs that depend on them."""
    if todo := list(seqs):
        _run(tx, deque([Ending(todo, state, reason)]))


def finish_sets(tx: Transaction, sets: Iterable[Ending]) -> None:
    """End several sets of jobs in this order, before the consequences of any of them."""
    _run(tx, deque(sets))


def expire(tx: Transaction, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time to live. Returns how many."""
    if not tx.expired:
        return 0
    seqs = tx.db.rows("expired_jobs", (tx.now, limit), int)
    finish(tx, seqs, State.FAILED, Reason.EXPIRED)
    return len(seqs)


def update_groups(tx: Transaction, groups: Mapping[str, bool]) -> None:
    """Abort or close the groups for which this is due, with the consequences. The value of a group is whether
    one of its members has just failed."""
    work: deque[Ending] = deque()
    _update_groups(tx, groups, work)
    _run(tx, work)


def _run(tx: Transaction, work: deque[Ending]) -> None:
    if work:
        tx.hold_relations()
    while work:
        seqs, state, reason, joined = work.popleft()
        ended = [job for job in by_seq(tx, seqs) if job.state not in FINISHED]
        if not ended:
            _update_groups(tx, joined, work)
            continue
        _end(tx, ended, state, reason)
        if state is not State.DONE:
            doomed = by_seq(tx, _doomed(tx, ended))
            if doomed:
                _end(tx, doomed, state, Reason.DEPENDENCY)
                ended += doomed
        release(tx, [job.seq for job in ended])
        groups = {job.group for job in ended if job.group is not None} | _count_proxies(
            tx, ended, state, reason
        )
        failed = dict.fromkeys(groups, state is State.FAILED)
        _update_groups(
            tx, {id: joined.get(id, False) or failed.get(id, False) for id in {*joined, *failed}}, work
        )


class ProxyRow(NamedTuple):
    id: str
    group: str
    job: int
    counted: str


def _count_proxies(tx: Transaction, ended: Sequence[Job], state: State, reason: Reason) -> set[str]:
    """Count ended jobs in the groups in which they represent members. Returns these groups."""
    keyed = [job.seq for job in ended if job.key is not None]
    rows = (
        [row for row in tx.db.rows("proxies_of", (array(keyed),), ProxyRow) if row.counted == "unfinished"]
        if keyed
        else []
    )
    move_proxies(tx, rows, counter_of(state, reason))
    return {row.group for row in rows}


def move_proxies(tx: Transaction, rows: Sequence[ProxyRow], counter: str) -> None:
    """Count these proxies in another counter of their groups."""
    if rows:
        tx.wrote = True
        tx.db.run("count_proxies", (counter, array([row.id for row in rows])))
    for row in rows:
        recount(tx, row.group, row.counted, counter)


def _end(tx: Transaction, jobs: Sequence[Job], state: State, reason: Reason) -> None:
    by_time: dict[int | None, list[int]] = {}
    for job in jobs:
        by_time.setdefault(purge_of(tx, job, state), []).append(job.seq)
        if job.group is not None:
            tx.count_member(job.group, state, reason, False)
    for purge_at, seqs in by_time.items():
        tx.db.run("end_jobs", (state, reason, tx.now, purge_at, array(seqs)))
    tx.move(moved(jobs, state))
    free_keys(tx, jobs)


def end_attempts(tx: Transaction, ends: Sequence[AttemptEnd]) -> None:
    """Write these ends to the histories of the jobs, by the rule of `core.lifecycle.end_attempt`. The
    statement reads the rows of the jobs, so it runs before the statements that give the jobs back or end
    them."""
    if not ends:
        return
    rows = [
        (job.seq, int(change.attempts == job.attempts), attempt_outcome(job, change), error)
        for job, change, error in ends
    ]
    tx.db.run("end_attempts", (tx.now, array(rows)))
    if old := [(job.seq, job.attempts - HISTORY) for job, _, _ in ends if job.attempts > HISTORY]:
        tx.db.run("forget_attempts", (array(old),))


def keep_resolution(tx: Transaction, seq: int, record: AttemptRecord) -> None:
    tx.wrote = True
    tx.db.put("attempt", [(seq, *astuple(replace(record, counted=int(record.counted))))])
    tx.db.run("forget_attempts", (array([(seq, record.number - HISTORY)]),))


def purge_of(tx: Transaction, job: Job | HeldRow, state: State) -> int | None:
    return purge_time(state, tx.now, job.retention, tx.queue(job.queue).retention)


def free_keys(tx: Transaction, jobs: Iterable[Job | HeldRow]) -> None:
    held = [(namespace(job.queue), job.key, job.seq) for job in jobs if job.key is not None]
    if held:
        tx.hold_relations()
        tx.db.run("free_keys", (tx.now, array(held)))


def _doomed(tx: Transaction, ended: Sequence[Job]) -> list[int]:
    return tx.db.rows("doomed", (array([job.seq for job in ended]),), int)


def release(tx: Transaction, ended: Iterable[int]) -> None:
    """Lower the wait counts of the blocked jobs with an edge from one of these jobs."""
    tx.hold_relations()
    lower(tx, tx.db.rows("dependents", (array(ended),), Dependent))


def lower(tx: Transaction, dependents: Sequence[Dependent]) -> None:
    """Lower the wait counts; a job with count 0 becomes ready or scheduled."""
    if not dependents:
        return
    tx.wrote = True
    woken: dict[State, list[int]] = {}
    moves: Counter[tuple[str, str | None, State | None, State | None]] = Counter()
    still = []
    for seq, queue, part, ready_at, waits, over in dependents:
        if waits > over:
            still.append((seq, over))
            continue
        state = awaken(ready_at, 0, tx.now)
        woken.setdefault(state, []).append(seq)
        moves[queue, part, State.BLOCKED, state] += 1
    if still:
        tx.db.run("lower_waits", (array(still),))
    for state, seqs in woken.items():
        reason = Reason.DELAY if state is State.SCHEDULED else Reason.NONE
        tx.db.run("unblock", (state, reason, array(seqs)))
    tx.move(moves)


def _update_groups(tx: Transaction, groups: Mapping[str, bool], work: deque[Ending]) -> None:
    for id, failed in sorted(groups.items()):
        group = tx.group(id)
        if group is None:
            continue
        reason = STOP_REASONS.get(group.on_failure)
        if failed and reason is not None and group.state in (GroupState.OPEN, GroupState.SEALED):
            start_abort(tx, group, reason, work)
        if group.unfinished == 0 and group.state in (GroupState.SEALED, GroupState.ABORTING):
            _close(tx, group, work)


def abort(tx: Transaction, group: GroupRow, reason: Reason) -> None:
    if group.state is GroupState.ABORTING:
        asked = tx.db.count("ask_members_to_stop", (reason, group.id))
        tx.wrote = tx.wrote or asked > 0
    if group.state not in (GroupState.OPEN, GroupState.SEALED):
        return
    work: deque[Ending] = deque()
    start_abort(tx, group, reason, work)
    _update_groups(tx, {group.id: False}, work)
    _run(tx, work)


def start_abort(tx: Transaction, group: GroupRow, reason: Reason, work: deque[Ending]) -> None:
    tx.wrote = True
    row = tx.change_group(group.id)
    row.state, row.paused, row.why = GroupState.ABORTING, 0, None
    tx.db.run("ask_members_to_stop", (reason, group.id))
    # A job that represents a member does not belong to the group and is not canceled.
    proxies = tx.db.rows("proxies_in", (group.id,), ProxyRow)
    move_proxies(tx, [row for row in proxies if row.counted == "unfinished"], "canceled")
    if waiting := tx.db.rows("waiting_members", (group.id,), int):
        work.append(Ending(waiting, State.CANCELED, reason))


def _close(tx: Transaction, group: GroupRow, work: deque[Ending]) -> None:
    tx.change_group(group.id)
    outcome = group_outcome(group.failed, group.canceled, group.state is GroupState.ABORTING)
    group.state, group.outcome, group.closed_at = GroupState.CLOSED, outcome, tx.now
    tx.wrote = True
    _open_gates(tx, group.id, outcome, work)
    then = tx.db.one("then_of", (group.id,))
    thens = {} if then is None else append.decode_then(then[0])
    if specs := thens.pop(outcome, []):
        # Removed, so that a group that is reopened and ends again does not append the specs twice.
        tx.db.put("then", [(group.id, append.encode_then(thens))])
        follow = callbacks(group.id, outcome, specs)
        admission = append.insert_admitted(tx, append.decide(tx, follow, Origin(closes=True)))
        tx.db.put("gate", [(group.id, job.seq, False, outcome) for job in admission.jobs])
        # Superseded jobs end after the work that this group has already queued.
        superseded = admission.superseded, State.CANCELED, Reason.SUPERSEDED
        work.append(Ending(*superseded, joined_groups(admission)))


def _open_gates(tx: Transaction, group: str, outcome: State, work: deque[Ending]) -> None:
    met = tx.db.rows("gates_met", (outcome, group), Dependent)
    doomed = tx.db.rows("gates_shut", (outcome, group), int)
    lower(tx, met)
    if doomed:
        state = State.FAILED if outcome is State.FAILED else State.CANCELED
        work.append(Ending(doomed, state, Reason.DEPENDENCY))


def seal(tx: Transaction, group: GroupRow) -> None:
    tx.wrote = True
    row = tx.change_group(group.id)
    row.state, row.paused, row.why = GroupState.SEALED, 0, None
    lower(tx, tx.db.rows("sealed_members", (group.id,), Dependent))
    update_groups(tx, {group.id: False})


def unseal(tx: Transaction, group: GroupRow, why: str | None) -> None:
    tx.wrote = True
    row = tx.change_group(group.id)
    row.state, row.paused, row.why = GroupState.OPEN, 1, why
    tx.db.run("one_more_wait", (group.id,))
    hold(tx, tx.db.rows("members_that_could_run", (group.id,), tuple[int, str, str | None, State]))


def hold(tx: Transaction, members: Sequence[tuple[int, str, str | None, State]]) -> None:
    """Block these members (seq, queue, part, scheduled or ready) of an open group until its seal."""
    if members:
        tx.db.run("hold", (array([seq for seq, _, _, _ in members]),))
        tx.move(Counter((queue, part, state, State.BLOCKED) for _, queue, part, state in members))


def is_open(tx: Transaction, group: str | None) -> bool:
    row = None if group is None else tx.group(group)
    return row is not None and row.state is GroupState.OPEN
