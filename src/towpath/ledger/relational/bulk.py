"""Cancel, revive, purge: many jobs by a selector, in the order of seq, a bounded number at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from towpath.core.admission import namespace
from towpath.core.commands import TOMBSTONE, Cancel, Canceled, GroupState, Purge, Purged, Revive, Revived
from towpath.core.job import FINISHED, WAITING, Job, KeyPolicy, Reason, State
from towpath.core.lifecycle import awaken
from towpath.ledger.relational import endings
from towpath.ledger.relational.batch import Batch, by_seq
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
    for statement in ("delete_out_edges", "delete_in_edges", "delete_gates_of", "delete_bodies", "delete_jobs"):
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
        return f"its dependency {bad[0]} is {bad[1]}"
    return None


def _other_holder(batch: Batch, job: Job) -> str | None:
    if job.key is None or job.key_policy is KeyPolicy.SERIAL:
        return None
    row = batch.db.one("live_holder", (namespace(job.queue), job.key, job.seq))
    return None if row is None else str(row[0])


def _revive_with_dependents(batch: Batch, job: Job) -> set[int]:
    revived: set[int] = set()
    level = [job]
    while level:
        revived.update(each.seq for each in level)
        for each in level:
            _revive_one(batch, each)
        seqs = batch.db.rows("revivable_dependents", (array([each.seq for each in level]),), int)
        level = [each for each in by_seq(batch, seqs) if _obstacle(batch, each) is None]
    return revived


def _revive_one(batch: Batch, job: Job) -> None:
    batch.db.run("drop_met_edges", (job.seq,))
    group = None if job.group is None else batch.group(job.group)
    unsealed = group is not None and group.state is GroupState.OPEN
    waits = batch.db.one("open_waits", (job.seq,))[0] + unsealed
    state = awaken(job.ready_at, waits, batch.now)
    batch.db.run("revive", (state, Reason.REVIVED, waits, batch.now, job.seq))
    batch.move(Counter([(job.queue, job.part, job.state, state)]))
    if group is not None:
        row = batch.change_group(group.id)
        row.unfinished += 1
        if job.state is State.FAILED:
            row.failed -= 1
        else:
            row.canceled -= 1
    if job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        key = (namespace(job.queue), job.key, job.id, job.seq, 0, None)
        batch.db.put("key", [key])
