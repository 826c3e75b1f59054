"""What is known of a plan at one moment, read from its record, its groups and its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from towpath.core.checks import SECOND, optional_utc, utc
from towpath.core.commands import GroupState
from towpath.core.job import CANCELED, DONE, FAILED, READY, RUNNING, SCHEDULED, Job, Reason, State
from towpath.core.views import NoteQuery, Query, Readable, id_token
from towpath.flows.kinds import (
    GATE,
    LOCKS,
    PLANS,
    UNDO,
    FlowDoor,
    PlanRecord,
    PlanState,
    Stage,
    audit_prefix,
    decode_audit,
    decode_step,
    find_record,
    group_of,
    members,
    record_of,
    step_id,
)
from towpath.flows.plan import Step, StepKind


@dataclass(frozen=True, slots=True)
class StageCounts(Readable):
    """How many jobs of a group of the plan have ended, and how."""

    total: int = 0
    unfinished: int = 0
    done: int = 0
    failed: int = 0
    canceled: int = 0


@dataclass(frozen=True, slots=True)
class PlanStatus(Readable):
    """A plan at one moment. `why`: the reason of a rollback or of a parked plan. `left`: the first steps that
    are not done, or have a failed undo or cleanup, of `left_count`."""

    id: str
    name: str
    state: PlanState
    stage: Stage
    by: str
    created_at: datetime
    finished_at: datetime | None
    steps: StageCounts
    undo: StageCounts
    cleanup: StageCounts
    why: str | None
    left: tuple[str, ...]
    left_count: int
    hash: str
    operations: int

    @property
    def is_final(self) -> bool:
        return self.state.is_final


@dataclass(frozen=True, slots=True)
class StepStatus(Readable):
    """A step at one moment. `duration` is that of the last delivery, in seconds. `undo`: the state of its
    undo, if it has one to run."""

    name: str
    kind: StepKind
    node: str
    after: tuple[str, ...]
    state: State
    reason: Reason
    attempts: int
    started_at: datetime | None
    finished_at: datetime | None
    duration: float | None
    result: Any
    error: str | None
    undo: State | None = None
    undo_error: str | None = None


def status(door: FlowDoor, plan: str) -> PlanStatus:
    """Raises `UnknownPlan`."""
    return status_of(door, find_record(door, plan)[0])


def status_of(door: FlowDoor, record: PlanRecord) -> PlanStatus:
    return PlanStatus(
        id=record.id,
        name=record.name,
        state=state_of(door, record),
        stage=record.stage,
        by=record.by,
        created_at=utc(record.created_at),
        finished_at=optional_utc(record.finished_at),
        steps=_counts(door, record, Stage.STEPS),
        undo=_counts(door, record, Stage.UNDO),
        cleanup=_counts(door, record, Stage.CLEANUP),
        why=record.why,
        left=record.left,
        left_count=record.left_count,
        hash=record.hash,
        operations=record.operations,
    )


def _counts(door: FlowDoor, record: PlanRecord, stage: Stage) -> StageCounts:
    view = door.reads.group(group_of(record.id, stage))
    if view is None:
        return StageCounts()
    # The job that takes the locks is a member of the group, and no step.
    locked = bool(record.locks) and stage is Stage.STEPS
    total, unfinished, done = view.total - locked, view.unfinished, view.done
    if locked:
        unfinished, done = (unfinished, done - 1) if done else (unfinished - 1, done)
    return StageCounts(total, max(0, unfinished), max(0, done), view.failed, view.canceled)


def state_of(door: FlowDoor, record: PlanRecord) -> PlanState:
    """The state of a plan, with the states that are not stored."""
    if record.state is not PlanState.RUNNING:
        return record.state
    group = door.reads.group(group_of(record.id))
    if group is not None and group.state is GroupState.ABORTING:
        return PlanState.STOPPING
    if record.gates and _only_gates_wait(door, record.id):
        return PlanState.WAITING
    return PlanState.RUNNING


def _only_gates_wait(door: FlowDoor, plan: str) -> bool:
    """True if a gate waits for a decision, and no other step runs or could run."""
    group = group_of(plan)
    if _any(door, Query(group=group, states=(READY, RUNNING), limit=1, bodies=False)):
        return False
    found = door.reads.find(Query(group=group, states=(SCHEDULED,), limit=1000, bodies=False)).jobs
    return bool(found) and all(job.kind == GATE for job in found)


def _any(door: FlowDoor, query: Query) -> bool:
    return bool(door.reads.find(query).jobs)


def step_statuses(door: FlowDoor, plan: str) -> list[StepStatus]:
    """The steps of a plan, each behind the steps that it waits for; the cleanup last. Reads all of them."""
    record = find_record(door, plan)[0]
    undos = {
        job.id.removesuffix("/undo"): job
        for job in members(door, group_of(plan, Stage.UNDO))
        if job.kind == UNDO
    }
    found = [
        _step_status(job, undos.get(job.id)) for job in members(door, group_of(plan)) if job.kind != LOCKS
    ]
    if record.cleanups:
        found += [_step_status(job, None) for job in members(door, group_of(plan, Stage.CLEANUP))]
    return found


def step_status(door: FlowDoor, plan: str, step: str) -> StepStatus | None:
    """One step; None if the plan has no step of this name."""
    id = step_id(plan, step)
    jobs = door.reads.get_many([id, f"{id}/undo"])
    return None if id not in jobs else _step_status(jobs[id], jobs.get(f"{id}/undo"))


def _step_status(job: Job, undo: Job | None) -> StepStatus:
    step = decode_step(job.payload).step
    return StepStatus(
        name=step.name,
        kind=step.kind,
        node=step.node,
        after=step.after,
        state=job.state,
        reason=job.reason,
        attempts=job.attempts,
        started_at=optional_utc(job.started_at),
        finished_at=optional_utc(job.finished_at),
        duration=_duration(job),
        result=None if job.result is None else msgspec.json.decode(job.result),
        error=job.error,
        undo=None if undo is None else undo.state,
        undo_error=None if undo is None else undo.error,
    )


def _duration(job: Job) -> float | None:
    if job.started_at is None or job.finished_at is None:
        return None
    return max(0, job.finished_at - job.started_at) / SECOND


def steps_of(door: FlowDoor, plan: str) -> list[Step]:
    """The steps of a submitted plan."""
    groups = (group_of(plan), group_of(plan, Stage.CLEANUP))
    return [
        decode_step(job.payload).step for group in groups for job in members(door, group) if job.kind != LOCKS
    ]


def records(door: FlowDoor, prefix: str = "") -> Iterator[PlanRecord]:
    """The records of all plans by the prefix of their ids, in the order of their ids. The notes of the
    audit, which are between them, are passed over."""
    page: str | None = None
    while True:
        notes = door.reads.notes(NoteQuery(prefix=PLANS + prefix, limit=100, page=page))
        for note in notes.notes:
            id = note.key.removeprefix(PLANS)
            if "/" in id:
                # Continue behind the last note of this plan.
                page = id_token(f"{PLANS}{id.partition('/')[0]}/\U0010ffff")
                break
            yield record_of(note)
        else:
            page = notes.next
            if page is None:
                return


@dataclass(frozen=True, slots=True)
class AuditView(Readable):
    """An operation of a person on a plan."""

    at: datetime
    by: str
    operation: str
    step: str | None
    why: str | None


def audit(door: FlowDoor, plan: str) -> list[AuditView]:
    """The operations of people on a plan, oldest first."""
    found: list[AuditView] = []
    page: str | None = None
    while True:
        notes = door.reads.notes(NoteQuery(prefix=audit_prefix(plan), limit=1000, page=page))
        for note in notes.notes:
            entry = decode_audit(note.value)
            found.append(AuditView(utc(entry.at), entry.by, entry.operation, entry.step, entry.why))
        page = notes.next
        if page is None:
            return found


@dataclass(frozen=True, slots=True)
class NodeMetrics(Readable):
    """The jobs of plans on one node, of one kind of step. `waiting`: how many wait or run. `average` is the
    mean duration of the done ones in seconds, `failure_rate` the share of the ended ones that failed."""

    node: str
    kind: str
    waiting: int
    done: int
    failed: int
    average: float | None
    failure_rate: float | None


def metrics(door: FlowDoor, plan: str | None = None) -> list[NodeMetrics]:
    """Figures by node and kind of step, of one plan or of all. Reads all jobs of the plans."""
    plans = [plan] if plan is not None else [record.id for record in records(door)]
    found: dict[tuple[str, str], list[float]] = {}
    for each in plans:
        for stage in Stage:
            for job in members(door, group_of(each, stage)):
                if job.kind != LOCKS:
                    _count(found, job, stage)
    return [
        NodeMetrics(
            node,
            kind,
            int(waiting),
            int(done),
            int(failed),
            seconds / done if done else None,
            failed / (done + failed) if done + failed else None,
        )
        for (node, kind), (waiting, done, failed, seconds) in sorted(found.items())
    ]


def _count(found: dict[tuple[str, str], list[float]], job: Job, stage: Stage) -> None:
    step = decode_step(job.payload).step
    kind = "undo" if stage is Stage.UNDO else str(step.kind)
    row = found.setdefault((step.node, kind), [0, 0, 0, 0.0])
    if job.state is DONE:
        row[1] += 1
        row[3] += _duration(job) or 0.0
    elif job.state is FAILED and job.reason is not Reason.DEPENDENCY:
        row[2] += 1
    elif job.state not in (FAILED, CANCELED):
        row[0] += 1
