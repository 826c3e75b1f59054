"""How jobs end and what follows: dependents, groups, keys. See "Finishing a set" in docs/ledger-rules.md."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from towpath.core.admission import Origin, namespace
from towpath.core.commands import GroupState, OnFailure
from towpath.core.ids import derived
from towpath.core.job import FINISHED, Job, Reason, State
from towpath.core.lifecycle import awaken, counter_of, purge_time
from towpath.ledger.tables import append
from towpath.ledger.tables.database import Held, array
from towpath.ledger.tables.transaction import Batch, GroupRow, by_seq, moved, recount

Ending = tuple[list[int], State, Reason]


class Dependent(NamedTuple):
    """A blocked job, and how many of the things it waits for are over."""

    seq: int
    queue: str
    part: str | None
    ready_at: int
    waits: int
    over: int


def finish(batch: Batch, seqs: Iterable[int], state: State, reason: Reason) -> None:
    """End these jobs (those not finished yet), and all that must end or wake because of it."""
    if todo := list(seqs):
        _run(batch, deque([(todo, state, reason)]))


def finish_sets(batch: Batch, sets: Iterable[Ending]) -> None:
    """End several sets of jobs in this order, before what follows from any of them."""
    _run(batch, deque(sets))


def expire(batch: Batch, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time; how many there were."""
    if not batch.expired:
        return 0
    seqs = batch.db.rows("expired_jobs", (batch.now, limit), int)
    finish(batch, seqs, State.FAILED, Reason.EXPIRED)
    return len(seqs)


def look_after(batch: Batch, groups: Mapping[str, bool]) -> None:
    """Abort or close the groups that are due for it, and what follows. True: a member of the group has just
    failed."""
    work: deque[Ending] = deque()
    _look_after(batch, groups, work)
    _run(batch, work)


def _run(batch: Batch, work: deque[Ending]) -> None:
    if work:
        batch.relate()
    while work:
        seqs, state, reason = work.popleft()
        ended = [job for job in by_seq(batch, seqs) if job.state not in FINISHED]
        if not ended:
            continue
        _end(batch, ended, state, reason)
        if state is not State.DONE:
            doomed = by_seq(batch, _doomed(batch, ended))
            if doomed:
                _end(batch, doomed, state, Reason.DEPENDENCY)
                ended += doomed
        release(batch, [job.seq for job in ended])
        groups = {job.group for job in ended if job.group is not None} | _count_proxies(
            batch, ended, state, reason
        )
        _look_after(batch, dict.fromkeys(groups, state is State.FAILED), work)


class ProxyRow(NamedTuple):
    id: str
    group: str
    job: int
    counted: str


def _count_proxies(batch: Batch, ended: Sequence[Job], state: State, reason: Reason) -> set[str]:
    """Count jobs that ended in the groups that wait for them because they represent members; which they
    are."""
    keyed = [job.seq for job in ended if job.key is not None]
    rows = (
        [row for row in batch.db.rows("proxies_of", (array(keyed),), ProxyRow) if row.counted == "unfinished"]
        if keyed
        else []
    )
    move_proxies(batch, rows, counter_of(state, reason))
    return {row.group for row in rows}


def move_proxies(batch: Batch, rows: Sequence[ProxyRow], counter: str) -> None:
    """These proxies are counted in another counter of their groups."""
    if rows:
        batch.wrote = True
        batch.db.run("count_proxies", (counter, array([row.id for row in rows])))
    for row in rows:
        recount(batch, row.group, row.counted, counter)


def _end(batch: Batch, jobs: Sequence[Job], state: State, reason: Reason) -> None:
    by_time: dict[int | None, list[int]] = {}
    for job in jobs:
        by_time.setdefault(purge_of(batch, job, state), []).append(job.seq)
        if job.group is not None:
            batch.count_member(job.group, state, reason, False)
    for purge_at, seqs in by_time.items():
        batch.db.run("end_jobs", (state, reason, batch.now, purge_at, array(seqs)))
    batch.move(moved(jobs, state))
    free_keys(batch, jobs)


def purge_of(batch: Batch, job: Job | Held, state: State) -> int | None:
    return purge_time(state, batch.now, job.retention, batch.queue(job.queue).retention)


def free_keys(batch: Batch, jobs: Iterable[Job | Held]) -> None:
    held = [(namespace(job.queue), job.key, job.seq) for job in jobs if job.key is not None]
    if held:
        batch.relate()
        batch.db.run("free_keys", (batch.now, array(held)))


def _doomed(batch: Batch, ended: Sequence[Job]) -> list[int]:
    return batch.db.rows("doomed", (array([job.seq for job in ended]),), int)


def release(batch: Batch, ended: Iterable[int]) -> None:
    """Lower the waits of the blocked jobs with an edge from something that ended."""
    batch.relate()
    lower(batch, batch.db.rows("dependents", (array(ended),), Dependent))


def lower(batch: Batch, dependents: Sequence[Dependent]) -> None:
    """Wake those that wait for nothing more."""
    if not dependents:
        return
    batch.wrote = True
    woken: dict[State, list[int]] = {}
    moves: Counter[tuple[str, str | None, State | None, State | None]] = Counter()
    still = []
    for seq, queue, part, ready_at, waits, over in dependents:
        if waits > over:
            still.append((seq, over))
            continue
        state = awaken(ready_at, 0, batch.now)
        woken.setdefault(state, []).append(seq)
        moves[queue, part, State.BLOCKED, state] += 1
    if still:
        batch.db.run("lower_waits", (array(still),))
    for state, seqs in woken.items():
        reason = Reason.DELAY if state is State.SCHEDULED else Reason.NONE
        batch.db.run("unblock", (state, reason, array(seqs)))
    batch.move(moves)


def _look_after(batch: Batch, groups: Mapping[str, bool], work: deque[Ending]) -> None:
    for id, failed in sorted(groups.items()):
        group = batch.group(id)
        if group is None:
            continue
        if (
            failed
            and group.on_failure is OnFailure.ABORT
            and group.state in (GroupState.OPEN, GroupState.SEALED)
        ):
            start_abort(batch, group, work)
        if group.unfinished == 0 and group.state in (GroupState.SEALED, GroupState.ABORTING):
            _close(batch, group, work)


def abort(batch: Batch, group: GroupRow) -> None:
    work: deque[Ending] = deque()
    start_abort(batch, group, work)
    _look_after(batch, {group.id: False}, work)
    _run(batch, work)


def start_abort(batch: Batch, group: GroupRow, work: deque[Ending]) -> None:
    batch.wrote = True
    row = batch.change_group(group.id)
    row.state, row.paused, row.why = GroupState.ABORTING, 0, None
    batch.db.run("ask_members_to_stop", (Reason.ABORTED, group.id))
    # The jobs that represent members are not the group's to cancel.
    proxies = batch.db.rows("proxies_in", (group.id,), ProxyRow)
    move_proxies(batch, [row for row in proxies if row.counted == "unfinished"], "canceled")
    if waiting := batch.db.rows("waiting_members", (group.id,), int):
        work.append((waiting, State.CANCELED, Reason.ABORTED))


def _close(batch: Batch, group: GroupRow, work: deque[Ending]) -> None:
    batch.change_group(group.id)
    if group.failed:
        outcome = State.FAILED
    elif group.canceled or group.state is GroupState.ABORTING:
        outcome = State.CANCELED
    else:
        outcome = State.DONE
    group.state, group.outcome, group.closed_at = GroupState.CLOSED, outcome, batch.now
    batch.wrote = True
    _open_gates(batch, group.id, outcome, work)
    then = batch.db.one("then_of", (group.id,))
    thens = {} if then is None else append.specs_of(then[0])
    if specs := thens.pop(outcome, []):
        # Once: a group that is reopened may end in the same way again.
        batch.db.put("then", [(group.id, append.text_of(thens))])
        follow = [replace(spec, id=derived(group.id, f"then:{outcome}", n)) for n, spec in enumerate(specs)]
        admission = append.insert_admitted(batch, append.decide(batch, follow, Origin()))
        batch.db.put("gate", [(group.id, job.seq, False, outcome) for job in admission.jobs])
        # What it supersedes ends after what this group had already put on the list.
        work.append((admission.superseded, State.CANCELED, Reason.SUPERSEDED))


def _open_gates(batch: Batch, group: str, outcome: State, work: deque[Ending]) -> None:
    met = batch.db.rows("gates_met", (outcome, group), Dependent)
    doomed = batch.db.rows("gates_shut", (outcome, group), int)
    lower(batch, met)
    if doomed:
        state = State.FAILED if outcome is State.FAILED else State.CANCELED
        work.append((doomed, state, Reason.DEPENDENCY))


def seal(batch: Batch, group: GroupRow) -> None:
    batch.wrote = True
    row = batch.change_group(group.id)
    row.state, row.paused, row.why = GroupState.SEALED, 0, None
    lower(batch, batch.db.rows("sealed_members", (group.id,), Dependent))
    look_after(batch, {group.id: False})


def unseal(batch: Batch, group: GroupRow, why: str | None) -> None:
    batch.wrote = True
    row = batch.change_group(group.id)
    row.state, row.paused, row.why = GroupState.OPEN, 1, why
    batch.db.run("one_more_wait", (group.id,))
    hold(batch, batch.db.rows("members_that_could_run", (group.id,), tuple[int, str, str | None, State]))


def hold(batch: Batch, members: Sequence[tuple[int, str, str | None, State]]) -> None:
    """These (seq, queue, part, scheduled or ready) belong to an open group: they wait for its seal."""
    if members:
        batch.db.run("hold", (array([seq for seq, _, _, _ in members]),))
        batch.move(Counter((queue, part, state, State.BLOCKED) for _, queue, part, state in members))


def is_open(batch: Batch, group: str | None) -> bool:
    row = None if group is None else batch.group(group)
    return row is not None and row.state is GroupState.OPEN
