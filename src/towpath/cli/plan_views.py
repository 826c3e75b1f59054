"""Plans on the command line: find one, its exit code, and its status as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from towpath import State, commands
from towpath.cli.base import NOT_FOUND, OK, PARKED, REFUSED, Failure, Session, bad_input
from towpath.cli.output import format_pairs, format_span, format_time, table
from towpath.cli.targets import existing_url
from towpath.errors import UnknownPlan
from towpath.flows.kinds import PlanState
from towpath.flows.status import PlanStatus, StageCounts, StepStatus

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.operations.plans import PlanHandle

MAX_CANDIDATES = 10
"""Plans that the error about an ambiguous id lists."""
MAX_LEFT = 20
"""Names of steps in a line of text."""
CODES: Mapping[PlanState, int] = {
    PlanState.ROLLED_BACK: REFUSED,
    PlanState.ROLLBACK_FAILED: PARKED,
    PlanState.PARKED: PARKED,
}
"""Exit codes of the states in which a plan has ended without success."""


def code_of(status: PlanStatus) -> int:
    return CODES.get(status.state, OK)


@contextmanager
def open_app(session: Session) -> Iterator[App]:
    from towpath.app import App

    with App(existing_url(session.url)) as app:
        yield app


@contextmanager
def open_plan(session: Session, text: str) -> Iterator[tuple[App, PlanHandle]]:
    """The app and the plan that `text` denotes: its id, or the beginning of its id."""
    with open_app(session) as app:
        yield app, app.plans.get(find_plan(app, text))


def find_plan(app: App, text: str) -> str:
    try:
        return app.plans.get(text).status().id
    except UnknownPlan:
        found = app.plans.list(prefix=text)
    if not found:
        raise Failure(f"There is no plan {text}.", NOT_FOUND, "`towpath plan list` lists the plans.")
    if len(found) > 1:
        lines = [f"{each.id}  {each.state}" for each in found[:MAX_CANDIDATES]]
        message = "\n".join([f"{text} denotes several plans; nothing was changed.", *lines])
        raise bad_input(message, "Give more characters of the id.")
    return found[0].id


def status_data(status: PlanStatus) -> dict[str, Any]:
    return {**status.as_dict(), "code": code_of(status)}


def counted(counts: StageCounts) -> str | None:
    """Counts of a stage in words; None for a stage without jobs."""
    if not counts.total:
        return None
    parts = [f"{counts.done} of {counts.total} done"]
    parts += [
        f"{number} {name}"
        for name, number in (("failed", counts.failed), ("canceled", counts.canceled))
        if number
    ]
    return ", ".join(parts)


def took(status: PlanStatus, now: int) -> str:
    end = status.finished_at
    last = now if end is None else round(end.timestamp() * 1_000_000)
    return format_span(max(0, last - round(status.created_at.timestamp() * 1_000_000)))


def status_lines(status: PlanStatus, now: int) -> list[str]:
    """The status for people, with the next step where a person is needed."""
    left = ", ".join(status.left[:MAX_LEFT])
    if status.left_count > MAX_LEFT:
        left += f" and {status.left_count - MAX_LEFT} more"
    values: dict[str, object] = {
        "plan": status.id,
        "state": status.state,
        "why": status.why,
        "steps": counted(status.steps),
        "undo": counted(status.undo),
        "cleanup": counted(status.cleanup),
        "left": left or None,
        "by": status.by,
        "submitted": format_time(status.created_at),
        "finished": format_time(status.finished_at),
        "took": took(status, now),
        "hash": status.hash[:12],
    }
    shown = {name: value for name, value in values.items() if value is not None}
    return [*format_pairs(shown), *advice(status)]


def advice(status: PlanStatus) -> list[str]:
    """What a person can do now."""
    id = status.id
    match status.state:
        case PlanState.PARKED:
            return [
                f"A person has to decide. `towpath plan show {id}` shows the steps and their errors. Then:",
                f"  towpath plan retry {id}                    run what is left again",
                f"  towpath plan mark-done {id} STEP --reason  the effect of the step exists",
                f"  towpath plan skip {id} STEP --reason       go on without the step",
            ]
        case PlanState.ROLLBACK_FAILED:
            return [
                f"Some steps are not undone. `towpath plan show {id}` shows the errors of their undos. Then:",
                f"  towpath plan retry {id}                    run the failed undos again",
                f"  towpath plan mark-done {id} STEP --reason  the step was undone by hand",
            ]
        case PlanState.WAITING:
            return [
                f"A gate waits: towpath plan approve {id} GATE, or towpath plan reject {id} GATE --reason"
            ]
        case PlanState.PAUSED:
            return [f"Continue with: towpath plan resume {id}"]
    return []


def step_table(steps: Sequence[StepStatus]) -> object:
    """The steps with their states, in the order of their dependencies."""
    if not steps:
        return "The plan has no steps."
    rows = [
        (
            step.name,
            step.node or None,
            step.kind,
            step.state,
            None if step.undo is None else step.undo,
            step.attempts,
            None if step.duration is None else format_span(round(step.duration * 1_000_000)),
            _problem(step),
        )
        for step in steps
    ]
    columns = ("step", "node", "kind", "state", "undo", "attempts", "took", "error")
    return table(columns, rows, numbers=("attempts", "took"))


def _problem(step: StepStatus) -> str | None:
    """The first line of the error of the undo or of the step, or the reason of its state."""
    if step.undo_error and step.undo != "done":
        return step.undo_error.partition("\n")[0]
    if step.state == "done":
        return step.reason or None
    return (step.error or step.reason or "").partition("\n")[0] or None


def failed_steps(handle: PlanHandle, status: PlanStatus) -> list[StepStatus]:
    """The first steps with a failed action or undo. Reads the steps only if there are any."""
    if not any(counts.failed for counts in (status.steps, status.undo, status.cleanup)):
        return []
    found = [step for step in handle.steps() if "failed" in (step.state, step.undo)]
    return [step for step in found if step.reason != "dependency"][:MAX_LEFT]


def failure_lines(steps: Sequence[StepStatus]) -> list[str]:
    return [f"{step.name} on {step.node or 'no node'}: {_problem(step) or 'failed'}" for step in steps]


def running_steps(app: App, status: PlanStatus, limit: int) -> list[tuple[str, int]]:
    """Names of the running steps of the present stage, and the times of their starts."""
    group = f"plan/{status.id}" + ("" if status.stage == "steps" else f"/{status.stage}")
    states = (State.RUNNING,)
    query = commands.Query(group=group, states=states, bodies=False, limit=limit, oldest_first=True)
    start = len(f"plan/{status.id}/")
    return [(job.id[start:], job.started_at or 0) for job in app.ledger.find(query).jobs]
