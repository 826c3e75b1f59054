"""The coordinator of a plan: a job that runs when a group of the plan has closed, decides what comes next and
appends it.

`decide` is pure. `advance` is the handler of `towpath.plan.advance`: it may be delivered several times, and
may die at any point. The decision to roll back is written to the record of the plan first, compared with the
version that was read; from then on no operator can change the steps. The jobs that follow from it have ids
that are derived from the plan, so that a second delivery appends the same jobs. The end of the coordinator is
one transaction with the next state of the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice

import msgspec
from msgspec.structs import replace

from towpath.core.checks import SECOND
from towpath.core.commands import Append, GroupState, Note, Open, Seal
from towpath.core.job import CANCELED, DONE, FAILED, After, Job, Reason, Spec
from towpath.core.views import GroupView
from towpath.flows import operate
from towpath.flows.kinds import (
    CHUNK,
    FLOWS,
    LOCK,
    LOCKS,
    MAX_LEFT,
    RETENTION,
    UNDO,
    FlowDoor,
    PlannedStep,
    PlanRecord,
    PlanState,
    Stage,
    StepJob,
    advance_id,
    advance_spec,
    answered,
    decode_planned_step,
    encode,
    group_of,
    members,
    node_queue,
    read_record,
    record_key,
    record_note,
    undo_id,
)
from towpath.flows.plan import Step, StepKind
from towpath.flows.rollback import Undo, undo_order
from towpath.flows.step import Effect, effect_of, max_attempts

PATIENCE = 5 * SECOND
"""How long an operator has to apply the effects of an operation before a coordinator does it."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """A step of a closed group, as far as the decision depends on it. `failed`: it failed by itself, not
    because of a dependency."""

    name: str
    kind: StepKind
    done: bool
    failed: bool
    effect: Effect


class Next(StrEnum):
    FINISH = "finish"
    ROLL_BACK = "roll back"
    PARK = "park"
    COMPLETE = "complete"


class Choice(msgspec.Struct, frozen=True):
    next: Next
    why: str | None = None


def member_of(job: Job, step: PlannedStep) -> Member:
    failed = job.state is FAILED and job.reason is not Reason.DEPENDENCY
    return Member(step.name, step.kind, job.state is DONE, failed, effect_of(job))


def decide(members: Sequence[Member], aborting: bool = False) -> Choice:
    """What follows when the group of the steps has closed. `aborting`: a person has asked for the end of the
    plan."""
    open_members = [member for member in members if not member.done]
    if not open_members:
        return Choice(Next.FINISH)
    failed = [member for member in open_members if member.failed]
    pivot = next((member for member in members if member.kind is StepKind.PIVOT), None)
    if pivot is not None and pivot.effect is Effect.APPLIED:
        if aborting and not failed:
            return Choice(Next.COMPLETE, f"the pivot {pivot.name} took effect before the abort")
        return Choice(Next.PARK, f"{_named(failed or open_members)} after the pivot {pivot.name}")
    if pivot is not None and pivot.effect is not Effect.NONE:
        return Choice(Next.PARK, f"the pivot {pivot.name} may have taken effect")
    unknown = [member for member in failed if member.effect is Effect.UNKNOWN]
    if unknown and not aborting:
        return Choice(Next.PARK, f"it is unknown whether {_names(unknown)} took effect")
    return Choice(Next.ROLL_BACK, "aborted" if aborting else _named(failed or open_members))


def _names(members: Sequence[Member]) -> str:
    return _listed([member.name for member in members])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _named(members: Sequence[Member]) -> str:
    verb = "failed" if members[0].failed else "was canceled" if len(members) == 1 else "were canceled"
    return f"{_names(members)} {verb}"


# The handler


class Settlement(msgspec.Struct, frozen=True):
    """The end of a coordinator: jobs and notes of its settling transaction, or the microseconds after which
    it runs again."""

    spawn: tuple[Spec, ...] = ()
    notes: tuple[Note, ...] = ()
    again: int | None = None


_NOTHING = Settlement()


def advance(door: FlowDoor, plan: str, number: int) -> Settlement:
    """Run the coordinator `number` of a plan."""
    found = read_record(door, plan)
    if found is None:
        return _NOTHING
    record, version = found
    if record.intent is not None:
        if door.now() - record.intent.at < PATIENCE:
            return Settlement(again=SECOND)
        operate.complete(door, record, version)
        return Settlement(again=1)
    if record.round != number or record.state.is_final:
        return _NOTHING
    group = door.reads.group(group_of(plan, record.stage))
    if record.building:
        return _build_undo(door, record, version, _steps_of(door, record.id))
    if group is None or group.state is not GroupState.CLOSED:
        return Settlement(again=SECOND)
    if record.stage is Stage.STEPS:
        return _after_steps(door, record, version, group)
    if record.stage is Stage.UNDO:
        return _after_undo(door, record, version, group)
    return _after_cleanup(door, record, version, group)


def _after_steps(door: FlowDoor, record: PlanRecord, version: int, group: GroupView) -> Settlement:
    if group.failed + group.canceled == 0:
        return _finish(door, record, version, PlanState.DONE)
    steps = _steps_of(door, record.id)
    choice = decide([member_of(job, step) for job, step in steps], record.aborting)
    match choice.next:
        case Next.FINISH:
            return _finish(door, record, version, PlanState.DONE)
        case Next.PARK:
            left = [step.name for job, step in steps if job.state is not DONE]
            return _end(door, replace(record, why=choice.why), version, PlanState.PARKED, left)
        case Next.COMPLETE:
            return _complete(door, record, version, choice)
    building = replace(record, state=PlanState.ROLLING_BACK, stage=Stage.UNDO, building=True, why=choice.why)
    (noted,) = answered(door.apply([record_note(building, version)]))
    return _build_undo(door, building, noted.version, steps)  # type: ignore[union-attr]


def _steps_of(door: FlowDoor, plan: str) -> list[tuple[Job, PlannedStep]]:
    return [
        (job, decode_planned_step(job.payload).step)
        for job in members(door, group_of(plan))
        if job.kind != LOCKS
    ]


def _complete(door: FlowDoor, record: PlanRecord, version: int, choice: Choice) -> Settlement:
    """The pivot took effect before the abort: the canceled steps run after all."""
    number = record.round + 1
    resumed = replace(record, round=number, aborting=False, why=choice.why)
    operate.revive(door, group_of(record.id), (CANCELED,), f"{record_key(record.id)}/complete/{number}")
    return Settlement((_next(record.id, number, Stage.STEPS),), (record_note(resumed, version),))


def _next(plan: str, number: int, stage: Stage) -> Spec:
    """The coordinator after a group. It waits for the one before it too: that one writes the record."""
    after = (
        After(group_of(plan, stage), run_anyway=True, group=True),
        After(advance_id(plan, number - 1), run_anyway=True),
    )
    return advance_spec(plan, number, after)


# Rollback


def _build_undo(
    door: FlowDoor, record: PlanRecord, version: int, steps: Sequence[tuple[Job, PlannedStep]]
) -> Settlement:
    """Append the undo jobs and the next coordinator. Nothing of the group runs before it is sealed."""
    group, number = group_of(record.id, Stage.UNDO), record.round + 1
    known = {step.name: (job, step) for job, step in steps}
    effects = {
        step.name
        for job, step in steps
        if step.kind is StepKind.REVERSIBLE and effect_of(job) is not Effect.NONE
    }
    rolling = replace(record, building=False, round=number)
    if not effects:
        return _finish(door, replace(rolling, round=record.round), version, PlanState.ROLLED_BACK)
    view = door.reads.group(group)
    if view is None or view.state is GroupState.OPEN:
        answered(door.apply([Open(group)]))
        undos = iter(undo_order([step for _, step in steps], effects))
        while chunk := [undo_spec(record.id, *known[undo.step], undo) for undo in islice(undos, CHUNK)]:
            answered(door.apply([Append(tuple(chunk), inside=True)]))
    answered(door.apply([Append((_next(record.id, number, Stage.UNDO),), inside=True), Seal(group)]))
    return Settlement(notes=(record_note(rolling, version),))


def undo_spec(plan: str, job: Job | Spec, step: PlannedStep, undo: Undo) -> Spec:
    """The job that undoes a step, on the node of the step, with the payload of the step. A join runs anywhere
    and does nothing."""
    retry = step.undo_retry or step.retry
    return Spec(
        id=undo_id(plan, step.name),
        queue=FLOWS if undo.join else node_queue(step.node),
        kind=UNDO,
        payload=encode(StepJob(plan, _nothing(step))) if undo.join else job.payload,
        group=group_of(plan, Stage.UNDO),
        after=tuple(After(undo_id(plan, name), run_anyway=True) for name in undo.after),
        max_attempts=max_attempts(retry),
        max_losses=1_000,
        retention=RETENTION,
        correlation_id=record_key(plan),
    )


def _nothing(step: PlannedStep) -> Step:
    return Step(step.name, kind=StepKind.GATE)


def _after_undo(door: FlowDoor, record: PlanRecord, version: int, group: GroupView) -> Settlement:
    if group.failed + group.canceled == 0:
        return _finish(door, record, version, PlanState.ROLLED_BACK)
    left = _not_done(door, record.id, Stage.UNDO)
    shown = replace(record, left=tuple(left[:MAX_LEFT]), left_count=len(left))
    return _finish(door, shown, version, PlanState.ROLLBACK_FAILED)


def _not_done(door: FlowDoor, plan: str, stage: Stage) -> list[str]:
    """The steps of a group that are not done, by name."""
    start = len(group_of(plan)) + 1
    return [
        job.id[start:].removesuffix("/undo")
        for job in members(door, group_of(plan, stage), bodies=False)
        if job.state is not DONE
    ]


# The end


def _finish(door: FlowDoor, record: PlanRecord, version: int, ending: PlanState) -> Settlement:
    """Run the cleanup, or end the plan if it has none, or if the cleanup has run before."""
    cleanup = group_of(record.id, Stage.CLEANUP)
    view = door.reads.group(cleanup) if record.cleanups else None
    if view is None:
        return _end(door, replace(record, building=False), version, ending, record.left)
    if view.state is GroupState.CLOSED:
        return _after_cleanup(door, replace(record, building=False, ending=ending), version, view)
    number = record.round + 1
    answered(door.apply([Seal(cleanup)]))
    cleaning = replace(
        record,
        state=PlanState.CLEANING_UP,
        stage=Stage.CLEANUP,
        building=False,
        round=number,
        ending=ending,
    )
    return Settlement((_next(record.id, number, Stage.CLEANUP),), (record_note(cleaning, version),))


def _after_cleanup(door: FlowDoor, record: PlanRecord, version: int, group: GroupView) -> Settlement:
    assert record.ending is not None
    left = list(record.left)
    if group.failed + group.canceled:
        names = _not_done(door, record.id, Stage.CLEANUP)
        if record.ending is not PlanState.ROLLBACK_FAILED:
            why = f"{_listed(names)} of the cleanup failed"
            return _end(door, replace(record, stage=Stage.CLEANUP, why=why), version, PlanState.PARKED, names)
        left += names
    return _end(door, record, version, record.ending, left)


def _end(
    door: FlowDoor, record: PlanRecord, version: int, state: PlanState, left: Iterable[str]
) -> Settlement:
    """The last state of the record. The locks are released if nothing is left that a person must repair."""
    names = list(left)
    ended = replace(
        record,
        state=state,
        left=tuple(names[:MAX_LEFT]),
        left_count=max(len(names), record.left_count if names else 0),
        finished_at=door.now(),
    )
    notes = [record_note(ended, version)]
    if state in (PlanState.DONE, PlanState.ROLLED_BACK):
        notes += unlock(door, record)
    return Settlement(notes=tuple(notes))


# Locks


def unlock(door: FlowDoor, record: PlanRecord) -> list[Note]:
    """Delete the locks that the plan holds."""
    held = ((lock, door.reads.note(f"{LOCK}{lock}")) for lock in record.locks)
    return [
        Note(key=f"{LOCK}{lock}", value=None, expect=note.version)
        for lock, note in held
        if note is not None and note.value == record.id.encode()
    ]


LOCK_PAUSE = SECOND


def take_locks(door: FlowDoor, plan: str, locks: Sequence[str]) -> Settlement:
    """The handler of `towpath.plan.locks`: take all locks in one transaction, or wait. A plan never holds
    some of its locks while it waits for others, so that two plans cannot wait for each other."""
    notes: list[Note] = []
    for lock in locks:
        held = door.reads.note(f"{LOCK}{lock}")
        if held is None:
            notes.append(Note(key=f"{LOCK}{lock}", value=plan.encode(), expect=0))
        elif held.value != plan.encode():
            return Settlement(again=LOCK_PAUSE)
    return Settlement(notes=tuple(notes))
