"""`app.plans`: build plans, submit them, read them, and the operations of people on them."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from towpath.core.job import DONE, Reason
from towpath.errors import InvalidInput, PlanRefused, UnknownJob
from towpath.flows import operate, status
from towpath.flows.actions import Action, Answer, TaskCall
from towpath.flows.kinds import Operation, PlanState, advance_id, find_record
from towpath.flows.ordering import closure
from towpath.flows.plan import Plan, Step, StepKind, StepRetry
from towpath.flows.rehearsal import Rehearsed, answers, rehearsal_group, rehearse
from towpath.flows.status import AuditView, NodeMetrics, PlanStatus, StepStatus
from towpath.flows.submission import submit
from towpath.operations.flows import EngineDoor
from towpath.runtime.engine import in_thread, same_as
from towpath.settings import Settings
from towpath.tasks.handles import Deadline, inside_handler
from towpath.tasks.new_jobs import new_id
from towpath.tasks.task import Call, Registry

Doing = Action | Call[Any]
"""An action, or a call of a task: `task.of(...)`."""


class StepOptions(TypedDict, total=False):
    """The options of `plan.step(...)`, as those of `Step`."""

    undo: Doing | None
    check: Doing | None
    after: Iterable[str | Step]
    kind: StepKind | str
    timeout: float | timedelta | None
    retry: StepRetry
    locks: Iterable[str]
    rollback_after: Iterable[str | Step] | None
    needs: Iterable[str]
    undo_destroys: Iterable[str]
    undo_retry: StepRetry | None
    description: str


class Plans:
    """The plans in the ledger of an app."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._engine = registry.engine
        self._settings = settings
        self._door = EngineDoor(registry.engine)

    def new(self, name: str, description: str = "") -> PlanBuilder:
        """Build a plan step by step."""
        return PlanBuilder(self, name, description)

    def submit(self, plan: Plan, *, id: str | None = None, by: str | None = None) -> PlanHandle:
        """Check the plan and store it, all of it or nothing. The same plan with the same id is the same
        submit. Raises `InvalidPlan` with all reasons, and `PlanRefused` if another plan has the id."""
        plan.check(self._nodes)
        self._check_calls(plan)
        id = id or f"{plan.name[:91]}-{new_id()[-8:]}"
        submit(self._door, plan, id, by or _user(), self._slots)
        return self.get(id)

    asubmit = in_thread(submit)

    def dry_run(self, plan: Plan, *, timeout: float | None = None) -> list[Rehearsed]:
        """Run the checks of all steps on their nodes, and no action; return the answers. Steps without a
        check have none. The plan is checked first, as by `submit`."""
        plan.check(self._nodes)
        self._check_calls(plan)
        number = new_id()
        if rehearse(self._door, plan, number):
            self._engine.watch.group(rehearsal_group(number), timeout, inside_handler("a dry run", timeout))
        return answers(self._door, plan, number)

    adry_run = in_thread(dry_run)

    def get(self, id: str) -> PlanHandle:
        """A handle on a plan. Its methods raise `UnknownPlan` if there is none of this id."""
        return PlanHandle(self._registry, id)

    def list(self, *, state: PlanState | str | None = None, prefix: str = "") -> list[PlanStatus]:
        """The plans in the ledger in the order of their ids, of one state or of all."""
        wanted = None if state is None else _state(state)
        found = [status.status_of(self._door, record) for record in status.records(self._door, prefix)]
        return [each for each in found if wanted is None or each.state is wanted]

    alist = in_thread(list)  # noqa: A003

    def metrics(self, plan: str | None = None) -> Sequence[NodeMetrics]:
        """Depth, mean duration and failure rate by node and kind of step, of one plan or of all. Reads all
        their jobs."""
        return status.metrics(self._door, plan)

    ametrics = in_thread(metrics)

    @property
    def _nodes(self) -> Sequence[str] | None:
        """The names of the known nodes; None if the settings have none."""
        return tuple(self._settings.nodes) or None

    def _slots(self, node: str) -> int:
        """How many steps a node runs at once."""
        found = self._settings.nodes.get(node)
        return 1 if found is None else found.concurrency

    def _check_calls(self, plan: Plan) -> None:
        """Refuse calls of tasks that cannot run in a step, as far as the tasks are known here."""
        for step in plan.steps:
            for field in ("action", "undo", "check"):
                call = getattr(step, field)
                task = self._registry.tasks.get(call.task) if isinstance(call, TaskCall) else None
                if task is None:
                    continue
                if task.process:
                    expected = "a task without process=True: a step runs in the worker itself"
                    raise InvalidInput(
                        field=f"{field} of step {step.name}", value=task.kind, expected=expected
                    )
                try:
                    task.codec.decode(bytes(call.args))
                except InvalidInput as error:
                    raise error.renamed(f"{field} of step {step.name}") from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"


def _state(state: str) -> PlanState:
    try:
        return PlanState(state)
    except ValueError:
        expected = f"one of {', '.join(PlanState)}"
        raise InvalidInput(field="state", value=state, expected=expected) from None


class PlanBuilder:
    """A plan that is being built. `step` and `gate` return the step, which later steps may name in
    `after`."""

    def __init__(self, plans: Plans, name: str, description: str = "") -> None:
        self._plans = plans
        self._name, self._description = name, description
        self._steps: list[Step] = []

    def step(self, name: str, node: str, action: Doing, /, **options: Unpack[StepOptions]) -> Step:
        """Add a step that runs `action` on a node."""
        return self._add(Step(name, node, action, **options))  # type: ignore[arg-type]

    def gate(
        self,
        name: str,
        *,
        after: Iterable[str | Step] = (),
        expires: float | timedelta | None = None,
        description: str = "",
    ) -> Step:
        """Add a gate: the steps after it wait until a person approves it. After `expires` seconds it
        fails."""
        names: Any = after
        return self._add(
            Step(name, after=names, kind=StepKind.GATE, expires=expires, description=description)
        )

    def _add(self, step: Step) -> Step:
        self._steps.append(step)
        return step

    @property
    def built(self) -> Plan:
        return Plan(self._name, tuple(self._steps), self._description)

    def submit(self, *, id: str | None = None, by: str | None = None) -> PlanHandle:
        """As `app.plans.submit`."""
        return self._plans.submit(self.built, id=id, by=by)

    asubmit = in_thread(submit)

    def dry_run(self, *, timeout: float | None = None) -> list[Rehearsed]:
        """As `app.plans.dry_run`."""
        return self._plans.dry_run(self.built, timeout=timeout)

    adry_run = in_thread(dry_run)


class PlanHandle:
    """A submitted plan. The operations keep `by` and `why` in the audit of the plan; they raise `PlanRefused`
    if the state of the plan or of the step does not allow them."""

    def __init__(self, registry: Registry, id: str) -> None:
        self._registry = registry
        self._engine = registry.engine
        self._door = EngineDoor(registry.engine)
        self.id = id

    def __repr__(self) -> str:
        return f"<plan {self.id}>"

    def status(self) -> PlanStatus:
        """The state of the plan and the counts of its steps."""
        return status.status(self._door, self.id)

    astatus = in_thread(status)

    def steps(self) -> list[StepStatus]:
        """All steps with their states, results and durations."""
        return status.step_statuses(self._door, self.id)

    asteps = in_thread(steps)

    def step(self, name: str) -> StepStatus:
        found = status.step_status(self._door, self.id, name)
        if found is None:
            raise InvalidInput(field="step", value=name, expected=f"the name of a step of plan {self.id}")
        return found

    astep = in_thread(step)

    def wait(self, timeout: float | None = None, *, wait_inside: bool = False) -> PlanStatus:
        """Wait until the plan has ended or is parked. Raises TimeoutError; the plan goes on."""
        left = Deadline(timeout)
        report = inside_handler(f"plan {self.id}", timeout, wait_inside)
        while True:
            seen = self._engine.ledger.version()
            record = find_record(self._door, self.id)[0]
            if record.state.is_final and record.intent is None:
                return self.status()
            try:
                self._engine.watch.job(advance_id(self.id, record.round), left.seconds(), report)
            except UnknownJob:
                self._engine.ledger.wait(seen, _pause(left))

    @same_as(wait)
    async def await_(self, timeout: float | None = None, *, wait_inside: bool = False) -> PlanStatus:
        left = Deadline(timeout)
        report = inside_handler(f"plan {self.id}", timeout, wait_inside)
        while True:
            record = (await asyncio.to_thread(find_record, self._door, self.id))[0]
            if record.state.is_final and record.intent is None:
                return await self.astatus()
            try:
                await self._engine.watch.ajob(advance_id(self.id, record.round), left.seconds(), report)
            except UnknownJob:
                await asyncio.sleep(_pause(left))

    def chain(self, step: str) -> list[StepStatus]:
        """The step and all steps that it waits for, each behind the steps that it waits for."""
        found = self.steps()
        waits = {each.name: each.after for each in found}
        if step not in waits:
            raise InvalidInput(field="step", value=step, expected=f"the name of a step of plan {self.id}")
        names = closure(waits, [step]) | {step}
        return [each for each in found if each.name in names]

    achain = in_thread(chain)

    def plan(self) -> Plan:
        """The plan as it runs: its steps in order, with the dependencies that follow from locks."""
        record = find_record(self._door, self.id)[0]
        return Plan(record.name, tuple(status.steps_of(self._door, self.id)))

    aplan = in_thread(plan)

    def audit(self) -> list[AuditView]:
        """The operations of people on this plan, oldest first."""
        return status.audit(self._door, self.id)

    aaudit = in_thread(audit)

    # Operations

    def retry(
        self,
        step: str | None = None,
        *,
        by: str | None = None,
        why: str | None = None,
        drift: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Run what failed or was stopped again, after the plan was parked or its rollback failed. With
        `step`: of the failed steps only this one. With `drift`, the checks of the steps that are done run
        first, within `timeout` seconds; if one answers that its step is not applied any more, the retry is
        refused."""
        if drift:
            self._check_drift(timeout)
        self._operate(Operation.RETRY, by, step, why)

    aretry = in_thread(retry)

    def skip(self, step: str, why: str, *, by: str | None = None) -> None:
        """Count a step as done without its effect: it is not undone later."""
        self._operate(Operation.SKIP, by, step, why)

    askip = in_thread(skip)

    def mark_done(self, step: str, why: str, *, by: str | None = None) -> None:
        """Count a step as done: its effect exists."""
        self._operate(Operation.MARK_DONE, by, step, why)

    amark_done = in_thread(mark_done)

    def approve(self, gate: str, *, by: str | None = None, why: str | None = None) -> None:
        """Let the steps behind a gate run."""
        self._operate(Operation.APPROVE, by, gate, why)

    aapprove = in_thread(approve)

    def reject(self, gate: str, why: str, *, by: str | None = None) -> None:
        """Refuse a gate: the plan is rolled back."""
        self._operate(Operation.REJECT, by, gate, why)

    areject = in_thread(reject)

    def pause(self, *, by: str | None = None, why: str | None = None) -> None:
        """Start no new step until `resume`; running steps finish."""
        self._operate(Operation.PAUSE, by, None, why)

    apause = in_thread(pause)

    def resume(self, *, by: str | None = None, why: str | None = None) -> None:
        self._operate(Operation.RESUME, by, None, why)

    aresume = in_thread(resume)

    def abort(self, *, by: str | None = None, why: str | None = None) -> bool | None:
        """End the plan: before its pivot it is rolled back (returns True), after it the plan is completed
        (returns False). None: the pivot runs now, and its effect decides."""
        return self._operate(Operation.ABORT, by, None, why)

    aabort = in_thread(abort)

    def purge(self) -> int:
        """Delete the plan, after it has ended; return the number of deleted jobs."""
        return operate.purge(self._door, self.id)

    apurge = in_thread(purge)

    def _check_drift(self, timeout: float | None) -> None:
        found = self.status()
        done = {each.name for each in self.steps() if each.state is DONE and each.reason != Reason.SKIPPED}
        steps = tuple(step for step in status.steps_of(self._door, self.id) if step.name in done)
        plan, number = Plan(found.name, steps), new_id()
        if rehearse(self._door, plan, number):
            self._engine.watch.group(rehearsal_group(number), timeout, inside_handler("a check", timeout))
        gone = [each.step for each in answers(self._door, plan, number) if each.answer is Answer.NOT_APPLIED]
        if gone:
            why = f"these steps are done and not applied any more: {', '.join(gone[:10])}"
            raise PlanRefused(id=self.id, state=found.state, why=why)

    def _operate(
        self, operation: Operation, by: str | None, step: str | None, why: str | None
    ) -> bool | None:
        return operate.operate(self._door, self.id, operation, by or _user(), step, why).rolls_back


def _pause(left: Deadline) -> float:
    """A short wait for an operation that another process applies. Raises TimeoutError after the deadline."""
    seconds = left.seconds()
    if seconds is not None and seconds <= 0:
        raise TimeoutError("the plan has not ended")
    return 0.1 if seconds is None else min(0.1, seconds)
