"""A dry run of a plan: the checks of its steps run as jobs on their nodes, and no action."""

from __future__ import annotations

import msgspec

from towpath.core import checks
from towpath.core.commands import Append, Open, Seal
from towpath.core.job import DONE, Spec
from towpath.flows.actions import Answer
from towpath.flows.kinds import CHECK, FlowDoor, StepJob, answered, encode, members, node_queue
from towpath.flows.plan import Plan, Step

RETENTION = checks.DAY
ATTEMPTS = 3


class Rehearsed(msgspec.Struct, frozen=True):
    """The answer of the check of a step before the plan runs; None without a check. `error`: why the check
    has no answer."""

    step: str
    node: str
    answer: Answer | None
    error: str | None = None


def rehearsal_group(number: str) -> str:
    return f"plan-check/{number}"


def rehearse(door: FlowDoor, plan: Plan, number: str) -> bool:
    """Append the checks; False if the plan has none."""
    group = rehearsal_group(number)
    specs = [_spec(plan, step, number) for step in plan.steps if step.check is not None]
    if specs:
        answered(door.apply([Open(group), Append(tuple(specs)), Seal(group)]))
    return bool(specs)


def _spec(plan: Plan, step: Step, number: str) -> Spec:
    return Spec(
        id=f"{rehearsal_group(number)}/{step.name}",
        queue=node_queue(step.node),
        kind=CHECK,
        payload=encode(StepJob(plan.name, step)),
        group=rehearsal_group(number),
        max_attempts=ATTEMPTS,
        retention=RETENTION,
    )


def answers(door: FlowDoor, plan: Plan, number: str) -> list[Rehearsed]:
    """The answers of all steps, in the order of the plan."""
    start = len(rehearsal_group(number)) + 1
    jobs = {job.id[start:]: job for job in members(door, rehearsal_group(number))}
    found: list[Rehearsed] = []
    for step in plan.steps:
        job = jobs.get(step.name)
        if job is None:
            found.append(Rehearsed(step.name, step.node, None))
        elif job.state is DONE and job.result is not None:
            found.append(Rehearsed(step.name, step.node, Answer(msgspec.json.decode(job.result))))
        else:
            found.append(Rehearsed(step.name, step.node, Answer.UNKNOWN, job.error or str(job.state)))
    return found
