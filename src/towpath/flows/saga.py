"""The rollback of a durable function: when its job has failed or was canceled, the undos of its steps run as
the rollback of a plan, in reverse order.

`end_saga` is the handler of `towpath.saga`. It may be delivered several times and may die at any point: its
commands are the same each time. First it stores the note `saga/<seq>`: from then on a revived job records no
undo and runs no step. Then it reads the job once more, and begins the rollback if the job is not revived."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from towpath.core.commands import Append, Command, Note, Noted, Open, Resolve, Seal
from towpath.core.job import FINISHED, STATE_TTL, Job, Spec
from towpath.core.results import Resolution
from towpath.core.steps import SagaJob, StepRecord, UndoRecord, read_steps, saga_key, saga_spec, step_key
from towpath.errors import NoteConflict
from towpath.flows.actions import TaskCall
from towpath.flows.coordinator import Settlement, undo_spec
from towpath.flows.kinds import (
    FLOWS,
    FlowDoor,
    PlanRecord,
    PlanState,
    Stage,
    answered,
    decode_planned_step,
    encode,
    first_advance,
    group_of,
    record_key,
    refusals,
    step_id,
)
from towpath.flows.plan import Plan, Step, StepRetry
from towpath.flows.rollback import Undo
from towpath.flows.submission import step_spec

_OUTSIDE = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_SHOWN = 60
"""Characters of a name in the name of a step or the id of a plan."""


def plan_id(job: str, seq: int) -> str:
    """The id of the plan that rolls back a job. The id of a job may be used again later, its `seq` not."""
    return f"saga-{_named(job)}-{seq}"


def _named(text: str) -> str:
    return _OUTSIDE.sub("-", text)[:MAX_SHOWN].strip("-._") or "job"


def end_saga(door: FlowDoor, saga: SagaJob) -> Settlement:
    """After the end of the job of a saga: begin its rollback, if there is something to undo."""
    job = _job(door, saga)
    if _goes_on(job):
        return _later(saga)
    if not rollback_steps(_read(door, saga)):
        return Settlement()
    key, id = saga_key(saga.seq), plan_id(saga.job, saga.seq)
    [noted] = answered(door.apply([Note(key=key, value=id.encode(), ttl=STATE_TTL)]))
    assert isinstance(noted, Noted)
    job, records = _job(door, saga), _read(door, saga)
    if _goes_on(job) or not rollback_steps(records):
        # A person revived it in the meantime; it may be done already.
        refusals(door.apply([Note(key=key, value=None, expect=noted.version)]))
        return _later(saga)
    replies = door.apply(rollback_commands(door, saga, job, records))
    answered([reply for reply in replies if not isinstance(reply, NoteConflict)])
    return Settlement(notes=tuple(Note(key=step_key(saga.job, number), value=None) for number in records))


def _job(door: FlowDoor, saga: SagaJob) -> Job | None:
    """None if the job was deleted."""
    job = door.reads.get(saga.job)
    return None if job is None or job.seq != saga.seq else job


def _goes_on(job: Job | None) -> bool:
    return job is not None and job.state not in FINISHED


def _later(saga: SagaJob) -> Settlement:
    return Settlement(spawn=(saga_spec(replace(saga, again=saga.again + 1)),))


def _read(door: FlowDoor, saga: SagaJob) -> dict[int, StepRecord]:
    return read_steps(door.reads.notes, saga.job, saga.seq)


def rollback_steps(records: Mapping[int, StepRecord]) -> list[tuple[Step, UndoRecord]]:
    """The steps of the plan: the recorded steps with an undo, each after the one before it. A step without a
    result may have taken effect, so it is undone as well."""
    found: list[tuple[Step, UndoRecord]] = []
    for number, record in sorted(records.items()):
        for n, undo in enumerate(record.undo):
            name = f"{number:04}{f'.{n}' if n else ''}-{_named(record.name)}"
            step = Step(
                name,
                node=_named(undo.queue),
                undo=TaskCall(undo.task, undo.args),
                after=(found[-1][0].name,) if found else (),
                undo_retry=StepRetry(attempts=undo.attempts),
                description="may have begun" if record.result is UNSET else "finished",
            )
            found.append((step, undo))
    return found


def rollback_commands(
    door: FlowDoor, saga: SagaJob, job: Job | None, records: Mapping[int, StepRecord]
) -> list[Command]:
    """Store a plan with steps that have run, and its rollback. Applied twice, the commands change nothing,
    and the first is refused."""
    id, found = plan_id(saga.job, saga.seq), rollback_steps(records)
    steps = [step for step, _ in found]
    plan = Plan(_named("saga" if job is None else job.kind), tuple(steps))
    ended = (
        "has ended" if job is None else f"is {job.state} ({job.reason})" if job.reason else f"is {job.state}"
    )
    why = f"job {saga.job} {ended}"
    correlation = None if job is None else job.correlation_id
    record = PlanRecord(
        id=id,
        name=plan.name,
        hash=plan.content_hash,
        by="towpath.saga",
        created_at=door.now(),
        steps=len(steps),
        state=PlanState.ROLLING_BACK,
        stage=Stage.UNDO,
        round=1,
        why=why,
    )
    return [
        Note(key=record_key(id), value=encode(record), expect=0),
        Open(group_of(id)),
        Append(tuple(_ran(id, step) for step in steps), inside=True),
        *[Resolve(step_id(id, step.name), Resolution.MARKED, why, record.by) for step in steps],
        Seal(group_of(id)),
        Open(group_of(id, Stage.UNDO)),
        Append(_undos(id, found, correlation), inside=True),
        Append((first_advance(id, 1, Stage.UNDO),), inside=True),
        Seal(group_of(id, Stage.UNDO)),
    ]


def _ran(plan: str, step: Step) -> Spec:
    """The job of a step, which is marked as done before its group is sealed."""
    return replace(step_spec(plan, step, Stage.STEPS), queue=FLOWS)


def _undos(plan: str, found: Sequence[tuple[Step, UndoRecord]], correlation: str | None) -> tuple[Spec, ...]:
    """The last step is undone first. Each undo runs in the queue of its task: the workers there have it."""
    specs: list[Spec] = []
    before: tuple[str, ...] = ()
    for step, undo in reversed(found):
        ran = _ran(plan, step)
        spec = undo_spec(plan, ran, decode_planned_step(ran.payload).step, Undo(step.name, before))
        specs.append(replace(spec, queue=undo.queue, correlation_id=correlation or spec.correlation_id))
        before = (step.name,)
    return tuple(specs)
