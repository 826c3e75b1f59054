"""Store a plan: its record, its steps, its cleanup and its first coordinator, in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from towpath.core import checks
from towpath.core.commands import (
    Append,
    Command,
    GroupState,
    Note,
    Noted,
    OnFailure,
    Open,
    Result,
    Seal,
    SetQueue,
)
from towpath.core.job import After, Spec
from towpath.errors import NoteConflict, PlanRefused, TowpathError
from towpath.flows.kinds import (
    FLOWS,
    GATE,
    GATES,
    LOCKS,
    NEVER,
    RETENTION,
    STEP,
    FlowDoor,
    LocksJob,
    PlanRecord,
    Stage,
    StepJob,
    check_id,
    encode,
    find_record,
    first_advance,
    group_of,
    locks_id,
    node_queue,
    read_record,
    record_key,
    refusals,
    step_id,
)
from towpath.flows.plan import Plan, Step, StepKind
from towpath.flows.step import max_attempts

MAX_LOSSES = 20
"""Deliveries of a step that may be lost with their process."""


def submit(
    door: FlowDoor, plan: Plan, id: str, by: str, slots: Callable[[str], int] = lambda node: 1
) -> PlanRecord:
    """Store the plan in one batch: nothing of it runs before all of it is stored. The same plan with the same
    id is the same submit. `slots`: how many steps a node runs at once, where its queue has no limit yet."""
    check_id(id)
    checks.text("by", by, least=1)
    steps = plan.resolved()
    hash = plan.content_hash
    record = _new_record(plan, id, hash, by, door.now())
    found = read_record(door, id)
    if found is not None and found[0].hash != hash:
        raise PlanRefused(id=id, state=found[0].state, why="another plan has this id")
    if found is not None and not _is_torn(door, id):
        return found[0]
    batch = [*_limits(door, plan, slots), *_commands(record, steps)]
    replies = door.apply(batch)
    noted = next(reply for reply, command in zip(replies, batch, strict=True) if type(command) is Note)
    if isinstance(noted, NoteConflict):
        now = find_record(door, id)[0]
        if now.hash != hash:
            raise PlanRefused(id=id, state=now.state, why="another plan has this id")
        return now
    if refused := refusals(replies):
        _withdraw(door, record, noted)
        raise refused[0]
    return record


def _new_record(plan: Plan, id: str, hash: str, by: str, now: int) -> PlanRecord:
    kinds = [step.kind for step in plan.steps]
    return PlanRecord(
        id=id,
        name=plan.name,
        hash=hash,
        by=by,
        created_at=now,
        steps=len(plan.steps),
        pivot=None if plan.pivot is None else plan.pivot.name,
        gates=kinds.count(StepKind.GATE),
        cleanups=kinds.count(StepKind.CLEANUP),
        locks=plan.locks,
    )


def _is_torn(door: FlowDoor, id: str) -> bool:
    """True if the record of a plan exists without its steps: its submit was refused, and its process died
    before it withdrew the record."""
    group = door.reads.group(group_of(id))
    return group is None or (group.state is GroupState.OPEN and not group.paused)


def _limits(door: FlowDoor, plan: Plan, slots: Callable[[str], int]) -> list[Command]:
    """A node runs one step at a time, unless its queue has a limit of its own."""
    queues = [(node, door.reads.queue(node_queue(node))) for node in plan.nodes]
    return [
        SetQueue(queue=node_queue(node), cap=slots(node))
        for node, queue in queues
        if queue is None or queue.cap is None
    ]


def _commands(record: PlanRecord, steps: Sequence[Step]) -> list[Command]:
    id, group = record.id, group_of(record.id)
    first = (After(locks_id(id)),) if record.locks else ()
    main = [step_spec(id, step, Stage.STEPS, first) for step in steps if step.kind is not StepKind.CLEANUP]
    found: list[Command] = [
        Note(key=record_key(id), value=encode(record), expect=0),
        Open(group, OnFailure.STOP),
    ]
    if record.locks:
        found.append(Append((_locks_spec(record),)))
    found.append(Append(tuple(main)))
    if record.cleanups:
        cleanup = [step_spec(id, step, Stage.CLEANUP) for step in steps if step.kind is StepKind.CLEANUP]
        found += [Open(group_of(id, Stage.CLEANUP)), Append(tuple(cleanup))]
    return [*found, Append((first_advance(id, 0, Stage.STEPS),)), Seal(group)]


def step_spec(plan: str, step: Step, stage: Stage, first: tuple[After, ...] = ()) -> Spec:
    """The job of a step. `first`: the dependencies of a step that has none of its own. A cleanup step runs
    whatever the end of the cleanup steps before it."""
    anyway = stage is Stage.CLEANUP
    gate = step.kind is StepKind.GATE
    return Spec(
        id=step_id(plan, step.name),
        queue=GATES if gate else node_queue(step.node),
        kind=GATE if gate else STEP,
        payload=encode(StepJob(plan, step)),
        group=group_of(plan, stage),
        after=tuple([After(step_id(plan, name), run_anyway=anyway) for name in step.after]) or first,
        max_attempts=max_attempts(step.retry),
        max_losses=MAX_LOSSES,
        retention=RETENTION,
        ready_at=NEVER if gate else None,
        ttl=None if step.expires is None else checks.micros(step.expires),
        correlation_id=record_key(plan),
    )


def _locks_spec(record: PlanRecord) -> Spec:
    return Spec(
        id=locks_id(record.id),
        queue=FLOWS,
        kind=LOCKS,
        payload=encode(LocksJob(record.id, record.locks)),
        group=group_of(record.id),
        max_attempts=1_000_000,
        max_losses=1_000_000,
        retention=RETENTION,
        correlation_id=record_key(record.id),
    )


def _withdraw(door: FlowDoor, record: PlanRecord, noted: Result | TowpathError) -> None:
    """Delete the record of a plan with refused steps."""
    assert isinstance(noted, Noted)
    door.apply([Note(key=record_key(record.id), value=None, expect=noted.version)])
