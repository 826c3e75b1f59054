"""The operations of people on a plan.

A batch of commands is one transaction, but a refused command does not undo its neighbours. So an operation
has two batches: the first writes it as the intent of the record, compared with the version that was read; the
second applies its effects. Nothing is applied for an operation that lost the comparison. If the process dies
in between, a job applies the effects; every effect may be applied twice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import (
    MAX_BULK,
    Abort,
    Append,
    Cancel,
    Note,
    Noted,
    Purge,
    Purged,
    Resolve,
    Result,
    Revive,
    Revived,
    Seal,
    Selector,
    Unseal,
)
from towpath.core.job import CANCELED, DONE, FAILED, FINISHED, RUNNING, Job, Spec, State
from towpath.core.results import Resolution
from towpath.core.views import NoteQuery
from towpath.errors import InvalidInput, NoteConflict, PlanRefused, TowpathError
from towpath.flows.kinds import (
    GATE,
    AdvanceJob,
    AuditEntry,
    FlowDoor,
    Intent,
    Operation,
    PlanRecord,
    PlanState,
    Stage,
    advance_id,
    advance_spec,
    answered,
    audit_prefix,
    encode,
    find_record,
    first_advance,
    group_of,
    read_record,
    record_key,
    record_note,
    refusals,
    step_id,
    undo_id,
)
from towpath.flows.step import Effect, effect_of

GUARD = 10 * SECOND
"""After this time a job applies the effects of an operation if its process has died."""
CONFLICTS = 20
"""How often an operation is tried again after another process changed the record."""


# Operations


class Accepted(msgspec.Struct, frozen=True):
    """The result of an operation. `rolls_back`: for an abort, whether the plan is rolled back; None if that
    depends on the pivot, which runs; False if the plan is completed."""

    record: PlanRecord
    rolls_back: bool | None = True


_STEPPED = frozenset({Operation.SKIP, Operation.MARK_DONE, Operation.APPROVE, Operation.REJECT})
_REASONED = frozenset({Operation.SKIP, Operation.MARK_DONE, Operation.REJECT})
_ACTIVE = (PlanState.RUNNING, PlanState.PAUSED)
_ALLOWED = {
    Operation.RETRY: (PlanState.PARKED, PlanState.ROLLBACK_FAILED),
    Operation.SKIP: (*_ACTIVE, PlanState.PARKED, PlanState.ROLLBACK_FAILED),
    Operation.MARK_DONE: (*_ACTIVE, PlanState.PARKED, PlanState.ROLLBACK_FAILED),
    Operation.APPROVE: _ACTIVE,
    Operation.REJECT: _ACTIVE,
    Operation.PAUSE: (PlanState.RUNNING, PlanState.ROLLING_BACK, PlanState.CLEANING_UP),
    Operation.RESUME: (PlanState.PAUSED,),
    Operation.ABORT: (*_ACTIVE, PlanState.PARKED),
}
"""The states in which an operation is possible."""


def operate(
    door: FlowDoor, plan: str, operation: Operation, by: str, step: str | None = None, why: str | None = None
) -> Accepted:
    """Apply an operation. Raises `PlanRefused` if the state of the plan or of the step does not allow it."""
    checks.text("by", by, least=1)
    _check_arguments(operation, step, why)
    for _ in range(CONFLICTS):
        record, version = find_record(door, plan)
        if record.intent is not None:
            complete(door, record, version)
            continue
        rolls_back = _check(door, record, operation, step)
        if operation is Operation.ABORT and rolls_back is False:
            _audit_only(door, record, operation, by, why)
            return Accepted(record, rolls_back)
        number = record.operations + 1
        intent = Intent(number, operation, by, door.now(), step, why)
        begun = replace(
            record,
            intent=intent,
            operations=number,
            round=record.round + (record.state.is_final and operation is not Operation.PAUSE),
        )
        replies = door.apply([record_note(begun, version), Append((_guard(plan, number),), inside=True)])
        if isinstance(replies[0], NoteConflict):
            continue
        (noted,) = answered(replies[:1])
        assert isinstance(noted, Noted)
        return Accepted(complete(door, begun, noted.version, raises=True), rolls_back)
    raise PlanRefused(id=plan, state=record.state, why="other processes change it all the time; try again")


def _check_arguments(operation: Operation, step: str | None, why: str | None) -> None:
    if operation in _STEPPED and not step:
        raise InvalidInput(field="step", value=step, expected=f"the name of the step to {operation}")
    if operation in _REASONED and not why:
        raise InvalidInput(field="why", value=why, expected="a reason, which is kept in the audit")
    if why is not None:
        checks.text("why", why, 1000, least=1)


def _guard(plan: str, number: int) -> Spec:
    """The job that applies the effects of an operation, unless the operator has done so."""
    spec = advance_spec(plan, 0, delay=GUARD)
    payload = encode(AdvanceJob(plan, -1))
    return replace(spec, id=guard_id(plan, number), payload=payload)


def guard_id(plan: str, number: int) -> str:
    return f"{record_key(plan)}//act/{number}"


def _check(door: FlowDoor, record: PlanRecord, operation: Operation, step: str | None) -> bool | None:
    """Refuse what the state does not allow. For an abort: whether the plan is rolled back."""
    if record.building:
        raise PlanRefused(id=record.id, state=record.state, why="its rollback is being prepared; try again")
    if record.state not in _ALLOWED[operation]:
        allowed = ", ".join(_ALLOWED[operation])
        why = f"{operation} is possible while it is {allowed}"
        raise PlanRefused(id=record.id, state=record.state, why=why)
    if operation is Operation.ABORT:
        return _rolls_back(door, record)
    if step is not None:
        _check_step(door, record, operation, step)
    return True


def _rolls_back(door: FlowDoor, record: PlanRecord) -> bool | None:
    if record.stage is not Stage.STEPS:
        raise PlanRefused(id=record.id, state=record.state, why="its steps have ended; nothing to abort")
    pivot = None if record.pivot is None else door.reads.get(step_id(record.id, record.pivot))
    if pivot is None or (pivot.state is not RUNNING and effect_of(pivot) is Effect.NONE):
        return True
    if record.state is PlanState.PARKED:
        why = (
            f"the pivot {record.pivot} took effect, or may have: retry, skip or mark the steps that are left"
        )
        raise PlanRefused(id=record.id, state=record.state, why=why)
    return False if pivot.state is DONE else None


def job_of(record: PlanRecord, step: str) -> str:
    """The id of the job that an operation on a step is about: that of its undo after a failed rollback."""
    if record.state is PlanState.ROLLBACK_FAILED and record.stage is not Stage.STEPS:
        return undo_id(record.id, step)
    return step_id(record.id, step)


def _check_step(door: FlowDoor, record: PlanRecord, operation: Operation, step: str) -> None:
    job = door.reads.get(job_of(record, step))
    if job is None:
        raise InvalidInput(field="step", value=step, expected=f"the name of a step of plan {record.id}")
    gated = operation in (Operation.APPROVE, Operation.REJECT)
    if gated != (job.kind == GATE) and operation is not Operation.RETRY:
        expected = "a gate" if gated else "a step, not a gate: approve or reject it"
        raise InvalidInput(field="step", value=step, expected=expected)
    obstacle = _obstacle(job, operation)
    if obstacle is not None:
        raise PlanRefused(id=record.id, state=record.state, why=f"step {step} is {obstacle}")


def _obstacle(job: Job, operation: Operation) -> str | None:
    if operation is Operation.RETRY:
        return None if job.state in (FAILED, CANCELED) else str(job.state)
    if job.state is RUNNING or job.state is DONE:
        return str(job.state)
    if operation is Operation.APPROVE and job.state in FINISHED:
        return f"{job.state} ({job.reason})"
    return None


def _audit_only(door: FlowDoor, record: PlanRecord, operation: Operation, by: str, why: str | None) -> None:
    entry = AuditEntry(door.now(), by, operation, None, why)
    answered(door.apply([_audit(record, entry, record.operations)]))


def _audit(record: PlanRecord, entry: AuditEntry, number: int) -> Note:
    key = f"{audit_prefix(record.id)}{entry.at:016d}-{number}"
    return Note(key=key, value=encode(entry))


# Effects


def complete(door: FlowDoor, record: PlanRecord, version: int, raises: bool = False) -> PlanRecord:
    """Apply the effects of the intent of a record, and write the record after it. Safe to repeat, in several
    processes. `raises`: raise the refusal of an effect, after the record was written."""
    intent = record.intent
    assert intent is not None
    found = read_record(door, record.id)
    if found is None or found[0].intent != intent:
        # Another process has applied it, while this one was slow.
        return record if found is None else found[0]
    ended = replace(record, intent=None)
    audit = _audit(
        record, AuditEntry(intent.at, intent.by, intent.operation, intent.step, intent.why), intent.number
    )
    answered(door.apply([audit]))
    refused = _effects(door, record, intent)
    if not refused:
        ended = replace(ended, **_after(record, intent.operation))
    reply = door.apply([record_note(ended, version)])[0]
    if isinstance(reply, TowpathError) and not isinstance(reply, NoteConflict):
        raise reply
    if refused and raises:
        raise refused
    return ended


def _effects(door: FlowDoor, record: PlanRecord, intent: Intent) -> TowpathError | None:
    plan, stage = record.id, record.stage
    if record.state is PlanState.ROLLBACK_FAILED:
        stage = Stage.UNDO
    group = group_of(plan, stage)
    token = f"{record_key(plan)}/{intent.number}"
    id = "" if intent.step is None else job_of(record, intent.step)
    match intent.operation:
        case Operation.RETRY:
            where = Selector(ids=(id,)) if id else None
            refused = revive(door, group, (FAILED, CANCELED), token, where)
        case Operation.SKIP | Operation.MARK_DONE | Operation.APPROVE:
            outcome = Resolution.SKIPPED if intent.operation is Operation.SKIP else Resolution.MARKED
            refused = _first(
                door.apply([Resolve(id, outcome, intent.why or str(intent.operation), intent.by)])
            )
        case Operation.REJECT:
            cancel = Cancel(where=Selector(ids=(id,)), token=token)
            refused = _first(door.apply([cancel, Abort(group, stop=True)]))
        case Operation.PAUSE:
            refused = _first(door.apply([Unseal(group, intent.why)]))
        case Operation.RESUME:
            refused = _first(door.apply([Seal(group)]))
        case Operation.ABORT:
            closed = record.state is PlanState.PARKED
            refused = None if closed else _first(door.apply([Abort(group, stop=True)]))
    if refused is not None or not record.state.is_final:
        return refused
    if intent.operation in (Operation.SKIP, Operation.MARK_DONE) or (
        intent.operation is Operation.RETRY and id
    ):
        # Stopped steps go on; failed steps stay failed.
        revive(door, group, (CANCELED,), f"{token}/rest")
    return _first(door.apply([Append((first_advance(plan, record.round, stage),), inside=True)]))


def _after(record: PlanRecord, operation: Operation) -> dict[str, object]:
    """The fields of the record after the effects."""
    running = {
        Stage.STEPS: PlanState.RUNNING,
        Stage.UNDO: PlanState.ROLLING_BACK,
        Stage.CLEANUP: PlanState.CLEANING_UP,
    }
    if operation is Operation.PAUSE:
        return {"state": PlanState.PAUSED}
    if operation is Operation.RESUME:
        return {"state": running[record.stage]}
    changed: dict[str, object] = {}
    if operation is Operation.ABORT or operation is Operation.REJECT:
        changed = {"aborting": operation is Operation.ABORT or record.aborting, "state": PlanState.RUNNING}
    if not record.state.is_final:
        return changed
    stage = Stage.UNDO if record.state is PlanState.ROLLBACK_FAILED else record.stage
    state = running[stage]
    return changed | {
        "state": state,
        "stage": stage,
        "left": (),
        "left_count": 0,
        "why": None,
        "finished_at": None,
    }


def _first(replies: Sequence[Result | TowpathError]) -> TowpathError | None:
    return next(iter(refusals(replies)), None)


def revive(
    door: FlowDoor, group: str, states: tuple[State, ...], token: str, where: Selector | None = None
) -> TowpathError | None:
    """Revive the members of a group in these states, in batches. The token of each makes a repeat safe."""
    for number in range(1_000_000):
        selector = where or Selector(group=group, states=states)
        (reply,) = door.apply([Revive(where=selector, token=f"{token}/{number}")])
        if isinstance(reply, TowpathError):
            return reply
        assert isinstance(reply, Revived)
        if not reply.more or reply.revived == 0:
            break
    return None


# The end


def purge(door: FlowDoor, plan: str) -> int:
    """Delete the jobs, notes and locks of a plan that has ended; return the number of deleted jobs."""
    from towpath.flows.coordinator import unlock

    record, version = find_record(door, plan)
    if not record.state.is_final or record.intent is not None:
        raise PlanRefused(id=plan, state=record.state, why="only a plan that has ended can be purged")
    gone = [Note(key=record_key(plan), value=None, expect=version)]
    answered(door.apply(gone))
    answered(door.apply([*unlock(door, record)]) if record.locks else [])
    coordinators = [advance_id(plan, number) for number in range(record.round + 1)]
    guards = [guard_id(plan, number) for number in range(1, record.operations + 1)]
    own = [*coordinators, *guards][-MAX_BULK:]
    purged = sum(_purge_jobs(door, Selector(group=group_of(plan, stage))) for stage in Stage)
    purged += _purge_jobs(door, Selector(ids=tuple(own)))
    _purge_notes(door, plan)
    return purged


def _purge_jobs(door: FlowDoor, where: Selector) -> int:
    purged = 0
    while True:
        (reply,) = answered(door.apply([Purge(where=where)]))
        assert isinstance(reply, Purged)
        purged += reply.purged
        if not reply.more:
            return purged


def _purge_notes(door: FlowDoor, plan: str) -> None:
    while True:
        notes = door.reads.notes(NoteQuery(prefix=audit_prefix(plan), limit=1000)).notes
        if not notes:
            return
        answered(door.apply([Note(key=note.key, value=None, expect=note.version) for note in notes]))
