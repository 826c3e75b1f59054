"""Settle, renew and progress: every write after a claim, each guarded by the fence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from towpath.core.admission import Origin
from towpath.core.commands import GroupState, Progress, Progressed, Renew, Renewed, Settle, Settled
from towpath.core.job import (
    DONE,
    FINISHED,
    RUNNING,
    Done,
    Fail,
    Job,
    Outcome,
    Reason,
    Refuse,
    Release,
    Retry,
    State,
    Stop,
)
from towpath.core.lifecycle import Change, settle
from towpath.core.limits import spend
from towpath.errors import LostClaim, Refused
from towpath.ledger.tables import append, finish, settings
from towpath.ledger.tables.database import CURSOR, ERROR, RESULT, Body, Held, array, settle_with_functions
from towpath.ledger.tables.transaction import Batch, PartRow, QueueRow, by_id, flush_queues

Settling = Job | Held


class _Gathered(msgspec.Struct):
    """A stretch of settles that can be written together because none of them has consequences for the
    others."""

    done: list[Settling] = []
    over: list[tuple[Settling, Change]] = []
    """Failed or canceled, with nobody who waits for them and no group."""
    again: list[tuple[Settling, Change]] = []
    bodies: list[Body] = []
    with_edges: list[int] = []


def settle_run(batch: Batch, commands: Sequence[Settle]) -> list[Settled | Refused]:
    """A run of settles. Their commit functions are called first."""
    if any(command.within is not None for command in commands):
        return settle_with_functions(batch, commands, _settle_run)
    return _settle_run(batch, commands)


def _settle_run(batch: Batch, commands: Sequence[Settle]) -> list[Settled | Refused]:
    """Settles without dependents, groups or keys are applied first, as one statement; no other settle depends
    on them."""
    if not commands:
        return []
    flush_queues(batch)
    counts, done = batch.db.finish_plain(commands, batch.now)
    if not done:
        return _settle_rest(batch, commands)
    batch.move(Counter({(queue, part, RUNNING, DONE): n for queue, part, n in counts}))
    if len(done) == len(commands):
        return [Settled(command.id, DONE) for command in commands]
    rest = iter(_settle_rest(batch, [command for command in commands if command.id not in done]))
    return [Settled(command.id, DONE) if command.id in done else next(rest) for command in commands]


def _settle_rest(batch: Batch, commands: Sequence[Settle]) -> list[Settled | Refused]:
    """Plain ones are gathered; one with consequences ends the stretch and is done by itself."""
    answers: list[Settled | Refused] = []
    ahead = len(commands)
    while (done := len(answers)) < len(commands):
        stretch, closing = _stretch(batch, commands[done : done + ahead], answers)
        _write(batch, stretch)
        # Where stretches are short, reading all the rest for each of them would cost the square of it.
        ahead = 2 * (len(answers) - done) + 8
        if closing is not None:
            finish.look_after(batch, {closing: False})
        elif len(answers) < len(commands):
            answers.append(_settle_alone(batch, commands[len(answers)]))
    return answers


def _stretch(
    batch: Batch, commands: Sequence[Settle], answers: list[Settled | Refused]
) -> tuple[_Gathered, str | None]:
    """Gather from the start as far as possible. Also the group that the last one leaves without unfinished
    members."""
    gathered = _Gathered([], [], [], [], [])
    plain: list[Settle] = []
    for command in commands:
        if command.spawn or command.notes:
            break
        plain.append(command)
    if not plain:
        return gathered, None
    held = {job.id: job for job in batch.db.rows("held", (array([c.id for c in plain]),), Held)}
    proxied = _proxied(batch, held.values())
    settled: dict[tuple[str, int], State] = {}
    for command in plain:
        job = held.get(command.id)
        if (command.id, command.fence) in settled:
            answers.append(Settled(command.id, settled[command.id, command.fence]))
            continue
        if job is None or job.state is not RUNNING or job.fence != command.fence:
            over = job is not None and (job.id, job.fence) in settled
            answers.append(
                LostClaim(id=command.id, fence=command.fence) if over else _not_held(batch, job, command)
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
            change = settle(job, command.outcome, batch.now)
            state = change.state
            if state in FINISHED and (job.edges or job.group is not None):
                break
            _gather(batch, gathered, job, change, command.outcome)
        settled[job.id, job.fence] = state
        answers.append(Settled(job.id, state))
        if state is DONE:
            if job.edges:
                gathered.with_edges.append(job.seq)
            if job.group is not None and _is_last(batch, job.group):
                return gathered, job.group
    return gathered, None


def _proxied(batch: Batch, jobs: Iterable[Held]) -> set[int]:
    """Those that represent members of groups: their ends are followed one by one."""
    keyed = [job.seq for job in jobs if job.edges and job.key is not None]
    return (
        {row.job for row in batch.db.rows("proxies_of", (array(keyed),), finish.ProxyRow)} if keyed else set()
    )


def _gather(batch: Batch, gathered: _Gathered, job: Settling, change: Change, outcome: Outcome) -> None:
    if change.state is DONE:
        gathered.done.append(job)
    else:
        (gathered.over if change.state in FINISHED else gathered.again).append((job, change))
        if type(outcome) is Release or type(outcome) is Refuse:
            _refund(batch, job)
    gathered.bodies += _bodies(job, outcome)


def _is_last(batch: Batch, group: str) -> bool:
    batch.count_member(group, State.DONE, Reason.NONE, False)
    row = batch.group(group)
    return row is not None and row.unfinished == 0 and row.state in (GroupState.SEALED, GroupState.ABORTING)


def _bodies(job: Settling, outcome: Outcome) -> list[Body]:
    if type(outcome) is Done:
        return [] if outcome.result is None else [(job.seq, RESULT, outcome.result)]
    if isinstance(outcome, Retry | Refuse | Fail | Stop) and outcome.error is not None:
        return [(job.seq, ERROR, outcome.error.encode())]
    return []


def _refund(batch: Batch, job: Settling) -> None:
    """An attempt that did not begin gives its permit back."""
    row: QueueRow | PartRow = batch.queue(job.queue)
    if row.rate_count is not None:
        batch.gate([job.queue])
        row = batch.change_queue(job.queue)
        row.next_at = spend(row.next_at, row.rate, batch.now, -1)
    if job.part is not None and batch.part(job.queue, job.part).rate_count is not None:
        batch.gate([job.queue])
        row = batch.change_part(job.queue, job.part)
        row.next_at = spend(row.next_at, row.rate, batch.now, -1)


def _not_held(batch: Batch, job: Settling | None, command: Settle) -> Settled | Refused:
    if job is not None:
        fence, state = job.settled_fence, job.settled_as
    else:
        fence, state = batch.db.one("tombstone", (command.id,)) or (0, None)
    if state is not None and fence == command.fence:
        return Settled(command.id, State(state))
    return LostClaim(id=command.id, fence=command.fence)


def _write(batch: Batch, gathered: _Gathered) -> None:
    moves: Counter[tuple[str, str | None, State | None, State | None]] = Counter()
    alike: dict[tuple[str, str | None, int | None], list[Settling]] = {}
    for job in gathered.done:
        alike.setdefault((job.queue, job.part, job.retention), []).append(job)
    by_time: dict[int | None, list[int]] = {}
    for (queue, part, _), jobs in alike.items():
        by_time.setdefault(finish.purge_of(batch, jobs[0], DONE), []).extend([job.seq for job in jobs])
        moves[queue, part, RUNNING, DONE] += len(jobs)
    for purge_at, seqs in by_time.items():
        batch.db.run("settle_done", (batch.now, purge_at, array(seqs)))
    if gathered.over:
        _write_over(batch, gathered.over)
        moves.update((job.queue, job.part, State.RUNNING, change.state) for job, change in gathered.over)
    if gathered.again:
        changes = [
            (job.seq, c.state, c.reason, c.attempts, c.failures, c.ready_at) for job, c in gathered.again
        ]
        batch.db.run("settle_again", (array(changes),))
        moves.update((job.queue, job.part, State.RUNNING, change.state) for job, change in gathered.again)
    batch.db.put_bodies(gathered.bodies)
    if moves:
        batch.move(moves)
    held = [
        (job.seq, job.queue, job.part, c.state)
        for job, c in gathered.again
        if finish.is_open(batch, job.group)
    ]
    finish.hold(batch, held)
    finish.free_keys(batch, gathered.done)
    finish.free_keys(batch, [job for job, _ in gathered.over])
    if gathered.with_edges:
        finish.release(batch, gathered.with_edges)


def _write_over(batch: Batch, over: Sequence[tuple[Settling, Change]]) -> None:
    ends = [
        (job.seq, c.state, c.reason, c.attempts, c.failures, finish.purge_of(batch, job, c.state))
        for job, c in over
    ]
    batch.db.run("settle_over", (batch.now, array(ends)))


def _settle_alone(batch: Batch, command: Settle) -> Settled | Refused:
    job = by_id(batch, [command.id]).get(command.id)
    if job is None or job.state is not State.RUNNING or job.fence != command.fence:
        return _not_held(batch, job, command)
    try:
        return _settle_with_care(batch, job, command)
    except Refused as refusal:
        return refusal


def _settle_with_care(batch: Batch, job: Job, command: Settle) -> Settled:
    """Decide all of it first: a refusal leaves nothing behind."""
    decision = None
    if command.spawn:
        origin = Origin(parent=job.id, group=job.group, correlation_id=job.correlation_id)
        decision = append.decide(batch, command.spawn, origin)
    written = settings.decide(batch, command.notes) if command.notes else None
    if decision is not None:
        append.write(batch, decision)
    if written is not None:
        settings.write(batch, written)
    return _change(batch, job, command)


def _change(batch: Batch, job: Job, command: Settle) -> Settled:
    # Children may have asked this very job to stop, so what it becomes is decided last.
    job = by_id(batch, [job.id])[job.id]
    change = settle(job, command.outcome, batch.now)
    batch.wrote = True
    batch.db.put_bodies(_bodies(job, command.outcome))
    if change.state in FINISHED:
        batch.db.run("settle_end", (change.attempts, change.failures, change.state, job.seq))
        if type(command.outcome) is Release or type(command.outcome) is Refuse:
            _refund(batch, job)
        finish.finish(batch, [job.seq], change.state, change.reason)
    else:
        gathered = _Gathered([], [], [], [], [])
        _gather(batch, gathered, job, change, command.outcome)
        gathered.bodies = []
        _write(batch, gathered)
    return Settled(job.id, change.state)


def renew(batch: Batch, command: Renew) -> Renewed:
    until = batch.now + command.lease
    pairs = array(command.held)
    held = batch.db.rows("held_pairs", (pairs,), tuple[int, str, int, Reason | None])
    if held:
        batch.wrote = True
        batch.db.run("renew", (until, command.lease, array([seq for seq, _, _, _ in held])))
    asked = {(id, fence): reason for _, id, fence, reason in held}
    lost = tuple([id for id, fence in command.held if (id, fence) not in asked])
    cancel = tuple(
        [(id, reason) for id, fence in command.held if (reason := asked.get((id, fence))) is not None]
    )
    return Renewed(until, lost, cancel)


def progress(batch: Batch, command: Progress) -> Progressed | Refused:
    row: Any = batch.db.one("held_job", (command.id, command.fence))
    if row is None:
        return LostClaim(id=command.id, fence=command.fence)
    seq, asked = row
    batch.wrote = True
    batch.db.run("progress", (command.done, command.total, seq))
    if command.cursor is not None:
        batch.db.put_bodies([(seq, CURSOR, command.cursor)])
    return Progressed(None if asked is None else Reason(asked))
