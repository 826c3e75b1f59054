"""`plan`: submit, run, inspect and change plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import OK, CliGroup, Session, combine, confirm, pass_session
from towpath.cli.output import format_pairs, format_span, format_time, print_result, table
from towpath.cli.plan_files import load_plan
from towpath.cli.plan_runs import agent, by_option, check, dry_run, run, submit, watch
from towpath.cli.plan_views import (
    code_of,
    counted,
    open_app,
    open_plan,
    status_data,
    status_lines,
    step_table,
    took,
)
from towpath.cli.values import now
from towpath.flows import graph as drawings
from towpath.flows.kinds import PlanState

if TYPE_CHECKING:
    from towpath.flows.status import NodeMetrics, PlanStatus, StepStatus
    from towpath.operations.plans import PlanHandle


@click.group("plan", cls=CliGroup)
def plan() -> None:
    """Run plans: steps on many nodes, with dependencies and rollback.

    PLAN is the id of a plan, or the beginning of its id. FILE[:NAME] is a Python file with a plan or with a
    function that returns one, MODULE:NAME, or a JSON file of a plan."""


for each in (run, submit, check, dry_run, watch, agent):
    plan.add_command(each)


# Views


@plan.command("list")
@click.option("--state", type=click.Choice([state.value for state in PlanState]), help="State.")
@click.option("--prefix", default="", help="Beginning of the id.")
@pass_session
def list_plans(session: Session, /, state: str | None, prefix: str) -> int:
    """List plans with their states."""
    with open_app(session) as app:
        found = app.plans.list(state=state, prefix=prefix)
    data = {"plans": [status_data(each) for each in found]}
    print_result(session.json, data, lambda: _plan_table(found))
    return OK


def _plan_table(found: Sequence[PlanStatus]) -> object:
    if not found:
        return "No plan matches."
    at = now()
    rows = [
        (
            each.id,
            each.state,
            counted(each.steps),
            counted(each.undo),
            took(each, at),
            each.by,
            (each.why or "").partition("\n")[0][:60] or None,
        )
        for each in found
    ]
    return table(("id", "state", "steps", "undo", "took", "by", "why"), rows)


@plan.command("status")
@click.argument("plan")
@pass_session
def status(session: Session, /, plan: str) -> int:
    """Show the state of a plan and what is left. The exit code is that of the state: 1 rolled back, 7 parked
    or rollback failed, else 0."""
    with open_plan(session, plan) as (_, handle):
        found = handle.status()
    print_result(session.json, status_data(found), lambda: status_lines(found, now()))
    return code_of(found)


@plan.command("show")
@click.argument("plan")
@click.option("--step", "name", help="Only this step, with its result and errors.")
@pass_session
def show(session: Session, /, plan: str, name: str | None) -> int:
    """Show the steps of a plan.

    With states, attempts, durations and errors."""
    with open_plan(session, plan) as (_, handle):
        if name is not None:
            step = handle.step(name)
            print_result(session.json, step.as_dict(), lambda: _step_lines(step))
            return OK
        found, steps = handle.status(), handle.steps()
    data = {**status_data(found), "list": [step.as_dict() for step in steps]}
    print_result(session.json, data, lambda: step_table(steps))
    return OK


def _step_lines(step: StepStatus) -> list[str]:
    values = step.as_dict()
    return format_pairs(
        {name.replace("_", " "): value for name, value in values.items() if value is not None}
    )


FORMATS = {"tree" if name == "text" else name: draw for name, draw in drawings.FORMS.items()}


@plan.command("graph")
@click.argument("plan", required=False)
@click.option("--file", metavar="FILE[:NAME]", help="Draw the plan of a file instead of a submitted one.")
@click.option(
    "--format", "kind", type=click.Choice([*FORMATS]), default="tree", show_default=True, help="Format."
)
@click.option("--around", metavar="STEP", help="Only this step and its neighbours, for a large plan.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@pass_session
def graph(session: Session, /, plan: str | None, file: str | None, kind: str, **options: Any) -> int:
    """Draw a plan with the states of its steps."""
    if (plan is None) == (file is None):
        raise click.UsageError("Give a plan, or --file.", click.get_current_context())
    if file is not None:
        loaded = load_plan(session, file).plan
        drawn = drawings.drawing(loaded.steps, None, loaded.name, options["around"])
    else:
        assert plan is not None
        with open_plan(session, plan) as (_, handle):
            drawn = _drawing(handle, options["around"])
    text = FORMATS[kind](drawn)
    if options["output"] is not None:
        options["output"].write_text(text + "\n", "utf-8")
        text = str(options["output"])
    print_result(session.json, {"title": drawn.title, "format": kind, "text": text}, text.splitlines())
    return OK


def _drawing(handle: PlanHandle, around: str | None) -> drawings.Drawing:
    live = {
        step.name: drawings.Live(
            str(step.state), step.duration, None if step.undo is None else str(step.undo)
        )
        for step in handle.steps()
    }
    return drawings.drawing(handle.plan().steps, live, handle.id, around)


@plan.command("chain")
@click.argument("plan")
@click.argument("step")
@pass_session
def chain(session: Session, /, plan: str, step: str) -> int:
    """Show the steps that a step waits for.

    In their order; the step itself is the last."""
    with open_plan(session, plan) as (_, handle):
        found = handle.chain(step)
    data = {"plan": handle.id, "chain": [each.as_dict() for each in found]}
    print_result(session.json, data, lambda: step_table(found))
    return OK


@plan.command("metrics")
@click.argument("plan", required=False)
@pass_session
def metrics(session: Session, /, plan: str | None) -> int:
    """Show figures per node and kind of step.

    Steps that wait, average duration and failure rate, of one plan or of all."""
    with open_app(session) as app:
        found = app.plans.metrics(None if plan is None else _handle_id(session, plan))
    print_result(session.json, {"nodes": [each.as_dict() for each in found]}, lambda: _metrics(found))
    return OK


def _handle_id(session: Session, text: str) -> str:
    with open_plan(session, text) as (_, handle):
        return handle.id


def _metrics(found: Sequence[NodeMetrics]) -> object:
    if not found:
        return "There are no plans."
    columns = ("node", "kind", "waiting", "done", "failed", "average", "failure rate")
    rows = [
        (
            each.node or "-",
            each.kind,
            each.waiting,
            each.done,
            each.failed,
            None if each.average is None else format_span(round(each.average * 1_000_000)),
            None if each.failure_rate is None else f"{each.failure_rate:.1%}",
        )
        for each in found
    ]
    return table(columns, rows, numbers=columns[2:])


@plan.command("audit")
@click.argument("plan")
@pass_session
def audit(session: Session, /, plan: str) -> int:
    """Show the operations of people on a plan, oldest first."""
    with open_plan(session, plan) as (_, handle):
        found = handle.audit()
    rows = [(format_time(each.at), each.by, each.operation, each.step, each.why) for each in found]
    columns = ("time", "by", "operation", "step", "why")
    data = {"plan": handle.id, "audit": [dict(zip(columns, row, strict=True)) for row in rows]}
    print_result(session.json, data, lambda: table(columns, rows) if rows else "No operation yet.")
    return OK


# Operations

reason_option = click.option("--reason", help="Reason, kept in the audit.")
needed_reason = click.option("--reason", required=True, help="Reason, kept in the audit.")
on_plan = combine(click.argument("plan"), reason_option, by_option)
on_step = combine(click.argument("plan"), click.argument("step"), needed_reason, by_option)


def _operate(session: Session, plan: str, operation: Callable[[PlanHandle], object], became: str) -> int:
    """Apply an operation and print the state after it. `became` is a sentence with `{}` for the id."""
    with open_plan(session, plan) as (_, handle):
        operation(handle)
        found = handle.status()
    print_result(session.json, status_data(found), f"{became.format(found.id)}; the plan is {found.state}")
    return OK


@plan.command("retry")
@click.argument("plan")
@click.argument("step", required=False)
@reason_option
@by_option
@pass_session
def retry(session: Session, /, plan: str, step: str | None, reason: str | None, by: str | None) -> int:
    """Run failed steps again.

    Also the steps that were stopped: after the plan was parked, or its rollback failed. With STEP: of the
    failed steps only this one."""
    what = "the failed steps" if step is None else step
    return _operate(session, plan, lambda it: it.retry(step, by=by, why=reason), f"{what} of {{}} run again")


@plan.command("skip")
@on_step
@pass_session
def skip(session: Session, /, plan: str, step: str, reason: str, by: str | None) -> int:
    """Count a step as done without its effect. It is not undone later."""
    return _operate(session, plan, lambda it: it.skip(step, reason, by=by), f"{step} of {{}} is skipped")


@plan.command("mark-done")
@on_step
@pass_session
def mark_done(session: Session, /, plan: str, step: str, reason: str, by: str | None) -> int:
    """Count a step as done: its effect exists. After a failed rollback: the step was undone by hand."""
    return _operate(session, plan, lambda it: it.mark_done(step, reason, by=by), f"{step} of {{}} is done")


@plan.command("approve")
@click.argument("plan")
@click.argument("step")
@reason_option
@by_option
@pass_session
def approve(session: Session, /, plan: str, step: str, reason: str | None, by: str | None) -> int:
    """Let the steps behind a gate run. STEP is the name of the gate."""
    return _operate(
        session,
        plan,
        lambda it: it.approve(step, by=by, why=reason),
        f"{step} of {{}} is approved",
    )


@plan.command("reject")
@on_step
@pass_session
def reject(session: Session, /, plan: str, step: str, reason: str, by: str | None) -> int:
    """Refuse a gate: the plan is rolled back. STEP is the name of the gate."""
    return _operate(session, plan, lambda it: it.reject(step, reason, by=by), f"{step} of {{}} is rejected")


@plan.command("pause")
@on_plan
@pass_session
def pause(session: Session, /, plan: str, reason: str | None, by: str | None) -> int:
    """Start no new step until `resume`. Running steps finish."""
    return _operate(session, plan, lambda it: it.pause(by=by, why=reason), "{} is held")


@plan.command("resume")
@on_plan
@pass_session
def resume(session: Session, /, plan: str, reason: str | None, by: str | None) -> int:
    """Resume a paused plan."""
    return _operate(session, plan, lambda it: it.resume(by=by, why=reason), "{} goes on")


@plan.command("abort")
@on_plan
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def abort(session: Session, /, plan: str, reason: str | None, by: str | None, yes: bool) -> int:
    """Roll a plan back, or complete it.

    Before its pivot the plan is rolled back, after it the plan is completed. The command prints which."""
    with open_plan(session, plan) as (_, handle):
        if sys.stdin.isatty():
            confirm(f"Abort plan {handle.id}?", yes)
        rolls_back = handle.abort(by=by, why=reason)
        found = handle.status()
    text = {
        True: "before its pivot, so it is rolled back",
        False: "after its pivot, so it is completed",
        None: "its pivot is running: the plan is completed if it takes effect, otherwise rolled back",
    }[rolls_back]
    data = {**status_data(found), "rolls_back": rolls_back}
    print_result(session.json, data, f"{found.id}: {text}; the plan is {found.state}")
    return OK


@plan.command("purge")
@click.argument("plan")
@pass_session
def purge(session: Session, /, plan: str) -> int:
    """Delete a plan that has ended, with its jobs and its audit."""
    with open_plan(session, plan) as (_, handle):
        jobs = handle.purge()
    print_result(session.json, {"id": handle.id, "purged": jobs}, f"{handle.id} is deleted: {jobs} jobs")
    return OK
