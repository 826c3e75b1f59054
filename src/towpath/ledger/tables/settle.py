"""Settle, renew and progress: every write after a claim, each guarded by the fence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from towpath.core.commands import GroupState, Progress, Progressed, Renew, Renewed, Settle, Settled
from towpath.core.facts import Origin
from towpath.core.job import (
    DONE,
    FINISHED,
    RUNNING,
    Done,
    Job,
    Outcome,
    Reason,
    Refuse,
    Release,
    State,
)
from towpath.core.lifecycle import Change, settle
from towpath.core.limits import spend
from towpath.errors import LostClaim, Refused
from towpath.ledger.tables import append, finish, settings
from towpath.ledger.tables.database import CURSOR, ERROR, RESULT, Body, HeldRow, array, settle_with_functions
from towpath.ledger.tables.finish import AttemptEnd
from towpath.ledger.tables.transaction import PartRow, QueueRow, Transaction, by_id, flush_queues

Settling = Job | HeldRow


class _Gathered(msgspec.Struct):
    """Settles that can be written together because none has consequences for another."""

    done: list[Settling] = []
    over: list[tuple[Settling, Change]] = []
    """Failed or canceled jobs without dependents and without a group."""
    again: list[tuple[Settling, Change]] = []
    ends: list[AttemptEnd] = []
    bodies: list[Body] = []
    with_edges: list[int] = []


def settle_run(tx: Transaction, commands: Sequence[Settle]) -> list[Settled | Refused]:
    """Apply a run of settles. Their commit functions are called first."""
    if any(command.within is not None for command in commands):
        return settle_with_functions(tx, commands, _settle_run)
    return _settle_run(tx, commands)


def _settle_run(tx: Transaction, commands: Sequence[Settle]) -> list[Settled | Refused]:
    """Apply settles in groups that are written together. A settle with consequences ends a group and is
    applied alone."""
    if not commands:
        return []
    flush_queues(tx)
    answers: list[Settled | Refused] = []
    ahead = len(commands)
    while (done := len(answers)) < len(commands):
        gathered, closing = _gather_run(tx, commands[done : done + ahead], answers)
        _write(tx, gathered)
        # Reading all remaining jobs for each short group would make the cost quadratic.
        ahead = 2 * (len(answers) - done) + 8
        if closing is not None:
            finish.update_groups(tx, {closing: False})
        elif len(answers) < len(commands):
            answers.append(_settle_alone(tx, commands[len(answers)]))
    return answers


def _gather_run(
    tx: Transaction, commands: Sequence[Settle], answers: list[Settled | Refused]
) -> tuple[_Gathered, str | None]:
    """Gather settles from the start as far as they can be written together. Returns also the job group, if
    any, that the last settle leaves without unfinished members."""
    gathered = _Gathered([], [], [], [], [], [])
    plain: list[Settle] = []
    for command in commands:
        if command.spawn or command.notes:
            break
        plain.append(command)
    if not plain:
        return gathered, None
    held = {job.id: job for job in _held(tx, [command.id for command in plain])}
    proxied = _proxied(tx, held.values())
    settled: dict[tuple[str, int], State] = {}
    for command in plain:
        job = held.get(command.id)
        if (command.id, command.fence) in settled:
            answers.append(Settled(command.id, settled[command.id, command.fence]))
            continue
        if job is None or job.state is not RUNNING or job.fence != command.fence:
            over = job is not None and (job.id, job.fence) in settled
            answers.append(
                LostClaim(id=command.id, fence=command.fence) if over else _not_held(tx, job, command)
            )
            continue
        state = DONE
        if job.seq in proxied:
            break
        if type(command.outcome) is Done:
            gathered.done.append(job)
            if command.outcome.result is not None:
                gathered.bodies.append((job.seq, RESULT, command.outcome.result))
        else:
            change = settle(job, command.outcome, tx.now)
            state = change.state
            if state in FINISHED and (job.edges or job.group is not None):
                break
            _gather(tx, gathered, job, change, command.outcome)
        settled[job.id, job.fence] = state
        answers.append(Settled(job.id, state))
        if state is DONE:
            if job.edges:
                gathered.with_edges.append(job.seq)
            if job.group is not None and _is_last(tx, job.group):
                return gathered, job.group
    return gathered, None


def _held(tx: Transaction, ids: Sequence[str]) -> Sequence[HeldRow]:
    if not tx.wrote and tx.settled == ids:
        return tx.held
    return tx.db.rows("held", (array(ids),), HeldRow)


def _proxied(tx: Transaction, jobs: Iterable[HeldRow]) -> set[int]:
    """The jobs that represent members of groups: each of them is settled alone."""
    keyed = [job.seq for job in jobs if job.edges and job.key is not None]
    return {row.job for row in tx.db.rows("proxies_of", (array(keyed),), finish.ProxyRow)} if keyed else set()


def _gather(tx: Transaction, gathered: _Gathered, job: Settling, change: Change, outcome: Outcome) -> None:
    if change.state is DONE:
        gathered.done.append(job)
    else:
        (gathered.over if change.state in FINISHED else gathered.again).append((job, change))
        gathered.ends.append((job, change, _error(outcome)))
        if type(outcome) is Release or type(outcome) is Refuse:
            _refund(tx, job)
    gathered.bodies += _bodies(job, outcome)


def _error(outcome: Outcome) -> str | None:
    error: str | None = getattr(outcome, "error", None)
    return error


def _is_last(tx: Transaction, group: str) -> bool:
    tx.count_member(group, State.DONE, Reason.NONE, False)
    row = tx.group(group)
    return row is not None and row.unfinished == 0 and row.state in (GroupState.SEALED, GroupState.ABORTING)


def _bodies(job: Settling, outcome: Outcome) -> list[Body]:
    if type(outcome) is Done:
        return [] if outcome.result is None else [(job.seq, RESULT, outcome.result)]
    error = _error(outcome)
    return [] if error is None else [(job.seq, ERROR, error.encode())]


def _refund(tx: Transaction, job: Settling) -> None:
    """Return the rate permits of an attempt that did not begin."""
    row: QueueRow | PartRow = tx.queue(job.queue)
    if row.rate_count is not None:
        tx.hold_queues([job.queue])
        row = tx.change_queue(job.queue)
        row.next_at = spend(row.next_at, row.rate, tx.now, -1)
    if job.part is not None and tx.part(job.queue, job.part).rate_count is not None:
        tx.hold_queues([job.queue])
        row = tx.change_part(job.queue, job.part)
        row.next_at = spend(row.next_at, row.rate, tx.now, -1)


def _not_held(tx: Transaction, job: Settling | None, command: Settle) -> Settled | Refused:
    if job is not None:
        fence, state = job.settled_fence, job.settled_as
    else:
        fence, state = tx.db.one("tombstone", (command.id,)) or (0, None)
    if state is not None and fence == command.fence:
        return Settled(command.id, State(state))
    return LostClaim(id=command.id, fence=command.fence)


def _write(tx: Transaction, gathered: _Gathered) -> None:
    finish.end_attempts(tx, gathered.ends)
    moves: Counter[tuple[str, str | None, State | None, State | None]] = Counter()
    alike: dict[tuple[str, str | None, int | None], list[Settling]] = {}
    for job in gathered.done:
        alike.setdefault((job.queue, job.part, job.retention), []).append(job)
    by_time: dict[int | None, list[int]] = {}
    # One read for the queues of all ended jobs.
    tx.load_queues({queue for queue, _, _ in alike})
    for (queue, part, _), jobs in alike.items():
        by_time.setdefault(finish.purge_of(tx, jobs[0], DONE), []).extend([job.seq for job in jobs])
        moves[queue, part, RUNNING, DONE] += len(jobs)
    for purge_at, seqs in by_time.items():
        tx.db.run("settle_done", (tx.now, purge_at, array(seqs)))
    if gathered.over:
        _write_over(tx, gathered.over)
        moves.update((job.queue, job.part, State.RUNNING, change.state) for job, change in gathered.over)
    if gathered.again:
        changes = [
            (job.seq, c.state, c.reason, c.attempts, c.failures, c.ready_at) for job, c in gathered.again
        ]
        tx.db.run("settle_again", (array(changes),))
        moves.update((job.queue, job.part, State.RUNNING, change.state) for job, change in gathered.again)
    tx.db.put_bodies(gathered.bodies)
    if moves:
        tx.move(moves)
    held = [
        (job.seq, job.queue, job.part, c.state) for job, c in gathered.again if finish.is_open(tx, job.group)
    ]
    finish.hold(tx, held)
    finish.free_keys(tx, gathered.done)
    finish.free_keys(tx, [job for job, _ in gathered.over])
    if gathered.with_edges:
        finish.release(tx, gathered.with_edges)


def _write_over(tx: Transaction, over: Sequence[tuple[Settling, Change]]) -> None:
    ends = [
        (job.seq, c.state, c.reason, c.attempts, c.failures, finish.purge_of(tx, job, c.state))
        for job, c in over
    ]
    tx.db.run("settle_over", (tx.now, array(ends)))


def _settle_alone(tx: Transaction, command: Settle) -> Settled | Refused:
    job = by_id(tx, [command.id]).get(command.id)
    if job is None or job.state is not State.RUNNING or job.fence != command.fence:
        return _not_held(tx, job, command)
    try:
        return _settle_decided(tx, job, command)
    except Refused as refusal:
        return refusal


def _settle_decided(tx: Transaction, job: Job, command: Settle) -> Settled:
    """Decide everything before the first write, so that a refusal changes nothing."""
    decision = None
    if command.spawn:
        origin = Origin(parent=job.id, group=job.group, correlation_id=job.correlation_id)
        decision = append.decide(tx, command.spawn, origin)
    written = settings.decide(tx, command.notes) if command.notes else None
    if decision is not None:
        append.write(tx, decision)
    if written is not None:
        settings.write(tx, written)
    return _change(tx, job, command)


def _change(tx: Transaction, job: Job, command: Settle) -> Settled:
    # A spawned job may have requested the stop of this one, so its new state is decided last.
    job = by_id(tx, [job.id])[job.id]
    change = settle(job, command.outcome, tx.now)
    tx.wrote = True
    tx.db.put_bodies(_bodies(job, command.outcome))
    if change.state in FINISHED:
        if change.state is not DONE:
            finish.end_attempts(tx, [(job, change, _error(command.outcome))])
        tx.db.run("settle_end", (change.attempts, change.failures, change.state, job.seq))
        if type(command.outcome) is Release or type(command.outcome) is Refuse:
            _refund(tx, job)
        finish.finish(tx, [job.seq], change.state, change.reason)
    else:
        gathered = _Gathered([], [], [], [], [], [])
        _gather(tx, gathered, job, change, command.outcome)
        gathered.bodies = []
        _write(tx, gathered)
    return Settled(job.id, change.state)


def renew(tx: Transaction, command: Renew) -> Renewed:
    until = tx.now + command.lease
    pairs = array(command.held)
    held = tx.db.rows("held_pairs", (pairs,), tuple[int, str, int, Reason | None])
    if held:
        tx.wrote = True
        tx.db.run("renew", (until, command.lease, array([seq for seq, _, _, _ in held])))
    asked = {(id, fence): reason for _, id, fence, reason in held}
    lost = tuple([id for id, fence in command.held if (id, fence) not in asked])
    cancel = tuple(
        [(id, reason) for id, fence in command.held if (reason := asked.get((id, fence))) is not None]
    )
    return Renewed(until, lost, cancel)


def progress(tx: Transaction, command: Progress) -> Progressed | Refused:
    row: Any = tx.db.one("held_job", (command.id, command.fence))
    if row is None:
        return LostClaim(id=command.id, fence=command.fence)
    seq, asked = row
    if command.notes:
        settings.write(tx, settings.decide(tx, command.notes))
    tx.wrote = True
    if command.done is not None or command.total is not None:
        tx.db.run("progress", (command.done, command.total, seq))
    if command.cursor is not None:
        tx.db.put_bodies([(seq, CURSOR, command.cursor)])
    return Progressed(None if asked is None else Reason(asked))
