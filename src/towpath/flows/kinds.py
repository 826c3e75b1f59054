"""The built-in kinds of plans, the names of their jobs, groups, queues and notes, and the door through which
the flows use a ledger.

`operations.flows` makes tasks of these kinds. Every worker runs them, beside the tasks of its app."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from towpath.core import checks
from towpath.core.commands import Command, Note, Result
from towpath.core.job import After, Job, Spec
from towpath.core.lanes import FLOWS as FLOWS
from towpath.core.lanes import NODES
from towpath.core.views import MAX_PAGE, NoteView, Query
from towpath.errors import InvalidInput, Refused, TowpathError, UnknownPlan
from towpath.flows.actions import Action
from towpath.flows.plan import Step, StepKind, StepRetry
from towpath.ledger import LedgerReads

STEP, UNDO, CHECK = "towpath.plan.step", "towpath.plan.undo", "towpath.plan.check"
GATE, LOCKS, ADVANCE = "towpath.plan.gate", "towpath.plan.locks", "towpath.plan.advance"
KINDS = (STEP, UNDO, CHECK, GATE, LOCKS, ADVANCE)

GATES = "towpath/gates"
"""The queue of gates. No worker claims them: `NEVER` is the time at which they are ready."""
NEVER = checks.FOREVER
RETENTION = 90 * checks.DAY
"""For how long the jobs of a finished plan are kept."""
PLANS, LOCK = "plan/", "plan-lock/"
CHUNK = 5_000
"""Specs of one append of undo jobs."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_id(id: str) -> str:
    if not isinstance(id, str) or not _ID.fullmatch(id):
        expected = "letters, digits, _ . and -, at most 100, the first a letter or a digit"
        raise InvalidInput(field="plan", value=id, expected=expected)
    return id


class Stage(StrEnum):
    """The group of a plan that runs now."""

    STEPS = "steps"
    UNDO = "undo"
    CLEANUP = "cleanup"


def group_of(plan: str, stage: Stage = Stage.STEPS) -> str:
    return f"{PLANS}{plan}" if stage is Stage.STEPS else f"{PLANS}{plan}/{stage}"


def step_id(plan: str, step: str) -> str:
    return f"{PLANS}{plan}/{step}"


def undo_id(plan: str, step: str) -> str:
    return f"{PLANS}{plan}/{step}/undo"


def advance_id(plan: str, number: int) -> str:
    return f"{PLANS}{plan}//next/{number}"


def locks_id(plan: str) -> str:
    return f"{PLANS}{plan}//locks"


def node_queue(node: str) -> str:
    return f"{NODES}{node}"


def record_key(plan: str) -> str:
    return f"{PLANS}{plan}"


def audit_prefix(plan: str) -> str:
    return f"{PLANS}{plan}/audit/"


class PlanState(StrEnum):
    """`waiting` (only gates are left to decide) and `stopping` (a step failed, others still run) are derived
    when a status is read; all others are stored."""

    RUNNING = "running"
    PAUSED = "paused"
    WAITING = "waiting"
    STOPPING = "stopping"
    ROLLING_BACK = "rolling_back"
    CLEANING_UP = "cleaning_up"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ROLLBACK_FAILED = "rollback_failed"
    PARKED = "parked"

    @property
    def is_final(self) -> bool:
        """True if nothing happens any more unless a person acts."""
        return self in _FINAL


_FINAL = frozenset(
    {PlanState.DONE, PlanState.ROLLED_BACK, PlanState.ROLLBACK_FAILED, PlanState.PARKED},
)


class Operation(StrEnum):
    """What a person may do with a plan."""

    RETRY = "retry"
    SKIP = "skip"
    MARK_DONE = "mark_done"
    APPROVE = "approve"
    REJECT = "reject"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"


class Intent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted operation; its effects are being applied. It is written with the record
    before any effect, so that another process can apply the effects after a crash. `number` counts the
    operations of the plan."""

    number: int
    operation: Operation
    by: str
    at: int
    step: str | None = None
    why: str | None = None


class PlanRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note of a plan. Every change compares the version, so that a coordinator and an operator never
    decide at the same time. `round` is the number of the coordinator that decides next; a coordinator with
    another number does nothing. `building`: the coordinator is appending the jobs of the stage. `ending`: the
    state after the cleanup. `left`: the first steps that are not done, or not undone."""

    id: str
    name: str
    hash: str
    by: str
    created_at: int
    steps: int
    state: PlanState = PlanState.RUNNING
    stage: Stage = Stage.STEPS
    round: int = 0
    building: bool = False
    ending: PlanState | None = None
    aborting: bool = False
    intent: Intent | None = None
    operations: int = 0
    pivot: str | None = None
    gates: int = 0
    cleanups: int = 0
    locks: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_count: int = 0
    why: str | None = None
    finished_at: int | None = None


MAX_LEFT = 100
"""Names of `PlanRecord.left`."""


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operation of a person on a plan."""

    at: int
    by: str
    operation: str
    step: str | None = None
    why: str | None = None


class StepJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a step, of its undo and of its check in a rehearsal: all that its handler needs."""

    plan: str
    step: Step


class StoredStep(msgspec.Struct, frozen=True):
    """A step as its handler reads it: it was checked when the plan was made, and is not checked again."""

    name: str
    node: str = ""
    action: Action | None = None
    undo: Action | None = None
    check: Action | None = None
    timeout: float | None = None
    retry: StepRetry = StepRetry()
    undo_retry: StepRetry | None = None


class PlannedStep(msgspec.Struct, frozen=True):
    """A step as the coordinator reads it, without its actions."""

    name: str
    node: str = ""
    kind: StepKind = StepKind.REVERSIBLE
    after: tuple[str, ...] = ()
    rollback_after: tuple[str, ...] | None = None
    retry: StepRetry = StepRetry()
    undo_retry: StepRetry | None = None


class PlannedStepJob(msgspec.Struct, frozen=True):
    plan: str
    step: PlannedStep


class StoredStepJob(msgspec.Struct, frozen=True):
    plan: str
    step: StoredStep


class AdvanceJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a coordinator. `number` -1: it only applies the effects of an operation, after the end
    of its process."""

    plan: str
    number: int


class LocksJob(msgspec.Struct, frozen=True, omit_defaults=True):
    plan: str
    locks: tuple[str, ...]


encode = msgspec.json.Encoder().encode
decode_step = msgspec.json.Decoder(StepJob).decode
decode_planned_step = msgspec.json.Decoder(PlannedStepJob).decode
decode_stored_step = msgspec.json.Decoder(StoredStepJob).decode
decode_advance = msgspec.json.Decoder(AdvanceJob).decode
decode_locks = msgspec.json.Decoder(LocksJob).decode
_decode_record = msgspec.json.Decoder(PlanRecord).decode
decode_audit = msgspec.json.Decoder(AuditEntry).decode


class FlowDoor(Protocol):
    """A ledger as the flows see it. `apply` commits the commands in one batch and returns a result or an
    error for each."""

    @property
    def reads(self) -> LedgerReads: ...

    def apply(self, commands: Sequence[Command]) -> Sequence[Result | TowpathError]: ...

    def now(self) -> int: ...


def read_record(door: FlowDoor, plan: str) -> tuple[PlanRecord, int] | None:
    """The record of a plan and its version; None if there is no such plan."""
    note = door.reads.note(record_key(plan))
    return None if note is None else (record_of(note), note.version)


def find_record(door: FlowDoor, plan: str) -> tuple[PlanRecord, int]:
    """The record of a plan and its version. Raises `UnknownPlan`."""
    found = read_record(door, check_id(plan))
    if found is None:
        raise UnknownPlan(id=plan)
    return found


def record_of(note: NoteView) -> PlanRecord:
    return _decode_record(note.value)


def record_note(record: PlanRecord, version: int) -> Note:
    """The write of a record that was read at this version."""
    return Note(key=record_key(record.id), value=encode(record), expect=version)


def answered(replies: Sequence[Result | TowpathError]) -> list[Result]:
    """The results; raises the first error."""
    found: list[Result] = []
    for reply in replies:
        if isinstance(reply, TowpathError):
            raise reply
        found.append(reply)
    return found


def refusals(replies: Sequence[Result | TowpathError]) -> list[Refused]:
    """The refusals of commands among the replies; raises an error of the ledger itself."""
    for reply in replies:
        if isinstance(reply, TowpathError) and not isinstance(reply, Refused):
            raise reply
    return [reply for reply in replies if isinstance(reply, Refused)]


def members(door: FlowDoor, group: str, bodies: bool = True) -> Iterator[Job]:
    """The jobs of a group in the order of their append, read in pages."""
    page: str | None = None
    while True:
        query = Query(group=group, bodies=bodies, oldest_first=True, limit=MAX_PAGE, page=page)
        found = door.reads.find(query)
        yield from found.jobs
        page = found.next
        if page is None:
            return


def advance_spec(plan: str, number: int, after: tuple[After, ...] = (), delay: int = 0) -> Spec:
    """A coordinator. It is never given up: the plan would have no end."""
    return Spec(
        id=advance_id(plan, number),
        queue=FLOWS,
        kind=ADVANCE,
        payload=encode(AdvanceJob(plan, number)),
        priority=0,
        max_attempts=1_000_000,
        max_losses=1_000_000,
        retention=RETENTION,
        after=after,
        delay=delay,
        correlation_id=record_key(plan),
    )


def first_advance(plan: str, number: int, stage: Stage) -> Spec:
    """The coordinator that runs when the group of a stage has closed."""
    return advance_spec(plan, number, (After(group_of(plan, stage), run_anyway=True, group=True),))
