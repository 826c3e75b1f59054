"""The rules of a valid plan. Each rule is a generator of reasons; a plan is refused with the reasons of
all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from towpath.flows.ordering import closure, cycles, not_behind, reverse, topological
from towpath.flows.plan import MAX_REASONS, MAX_STEPS, Plan, Step, StepKind, StepRetry, resolved_steps
from towpath.flows.rollback import undo_waits

_PARTS = {
    # kind -> the parts that a step of it must have, and those that it must not have
    StepKind.REVERSIBLE: ("node action undo", "expires"),
    StepKind.PIVOT: ("node action", "undo undo_retry undo_destroys rollback_after expires"),
    StepKind.FORWARD: ("node action", "undo undo_retry undo_destroys rollback_after expires"),
    StepKind.CLEANUP: ("node action", "undo undo_retry undo_destroys rollback_after expires"),
    StepKind.GATE: (
        "",
        "node action undo check undo_retry undo_destroys rollback_after timeout locks needs",
    ),
}
_WHY = {
    StepKind.PIVOT: "after the pivot there is only forward recovery",
    StepKind.FORWARD: "a step after the pivot is never undone",
    StepKind.CLEANUP: "a cleanup step is never undone",
    StepKind.GATE: "a gate runs nothing",
}


def reasons_against(plan: Plan, nodes: Collection[str] | None = None) -> list[str]:
    """The reasons why the plan is not valid: all, or the first `MAX_REASONS`."""
    return list(islice(_reasons(plan, nodes), MAX_REASONS))


def _reasons(plan: Plan, nodes: Collection[str] | None) -> Iterator[str]:
    """The rules that follow dependencies are only tried on steps with unique names, and the rules about
    orders only without cycles."""
    if found := list(_shape(plan)):
        yield from found
        return
    steps = plan.by_name()
    yield from _unknown(steps, nodes)
    for step in plan.steps:
        yield from _parts(step)
    yield from _pivot(steps)
    yield from _cleanup(steps)
    yield from _rollback_after(steps)
    loops = cycles({name: step.after for name, step in steps.items()})
    for loop in loops:
        yield f"the steps {_ring(loop)} wait for each other"
    if not loops:
        yield from _undo_orders(steps)


def _shape(plan: Plan) -> Iterator[str]:
    if not plan.steps:
        yield "there are no steps"
    if len(plan.steps) > MAX_STEPS:
        yield f"there are {len(plan.steps)} steps, at most {MAX_STEPS} are possible"
    seen: set[str] = set()
    for step in plan.steps:
        if step.name in seen:
            yield f"two steps have the name {step.name}"
        seen.add(step.name)


def _unknown(steps: dict[str, Step], nodes: Collection[str] | None) -> Iterator[str]:
    for step in steps.values():
        for name in step.after:
            if name not in steps:
                yield f"step {step.name} is after {name}, and there is no such step"
        for name in step.rollback_after or ():
            if name not in steps:
                yield f"the rollback of step {step.name} is after {name}, and there is no such step"
        if step.node and nodes is not None and step.node not in nodes:
            yield f"step {step.name} is on the node {step.node}, and there is no such node"


def _parts(step: Step) -> Iterator[str]:
    must, must_not = _PARTS[step.kind]
    for part in must.split():
        if not getattr(step, part):
            if part == "undo":
                yield (
                    f"step {step.name} is reversible and has no undo; a step that cannot be undone is"
                    f" a pivot, or a forward step after it"
                )
            else:
                yield f"step {step.name} has no {part}"
    if step.kind is StepKind.GATE and step.retry != StepRetry():
        yield f"the gate step {step.name} must not have retry: {_WHY[step.kind]}"
    for part in must_not.split():
        if getattr(step, part) not in (None, "", ()):
            why = "only a gate expires" if part == "expires" else _WHY[step.kind]
            yield f"the {step.kind} step {step.name} must not have {part}: {why}"


def _pivot(steps: dict[str, Step]) -> Iterator[str]:
    pivots = [step.name for step in steps.values() if step.kind is StepKind.PIVOT]
    forward = [step.name for step in steps.values() if step.kind is StepKind.FORWARD]
    if len(pivots) > 1:
        yield f"there are {len(pivots)} pivots, at most one is possible: {', '.join(pivots[:10])}"
    elif not pivots:
        for name in forward:
            yield f"step {name} is a forward step and there is no pivot"
    else:
        pivot = pivots[0]
        waits = {name: step.after for name, step in steps.items()}
        before, behind = closure(waits, [pivot]), closure(reverse(waits), [pivot])
        for name, step in steps.items():
            if step.kind is StepKind.FORWARD and name not in behind:
                yield f"step {name} is a forward step and not after the pivot {pivot}"
            elif step.kind in (StepKind.REVERSIBLE, StepKind.GATE) and name in behind:
                yield f"the {step.kind} step {name} is after the pivot {pivot}: only forward steps are"
            elif step.kind in (StepKind.REVERSIBLE, StepKind.GATE) and name not in before:
                yield f"the {step.kind} step {name} is not before the pivot {pivot}, which must wait for it"


def _cleanup(steps: dict[str, Step]) -> Iterator[str]:
    for step in steps.values():
        if step.kind is not StepKind.CLEANUP:
            for name in step.after:
                if name in steps and steps[name].kind is StepKind.CLEANUP:
                    yield f"step {step.name} is after the cleanup step {name}, which runs at the end"


def _rollback_after(steps: dict[str, Step]) -> Iterator[str]:
    for step in steps.values():
        for name in step.rollback_after or ():
            if name in steps and steps[name].kind is not StepKind.REVERSIBLE:
                kind = steps[name].kind
                yield f"the rollback of step {step.name} is after {name}, and a {kind} step has no rollback"


def _undo_orders(steps: dict[str, Step]) -> Iterator[str]:
    run = resolved_steps(steps.values())
    undo = undo_waits(run)
    loops = cycles(undo)
    for loop in loops:
        yield (
            f"the rollbacks of the steps {_ring(loop)} wait for each other;"
            f" a step waits for the rollback of its dependents unless it has a rollback_after"
        )
    if not loops:
        yield from _locked(run, undo)
        yield from _destroyed(steps, run, undo)


def _locked(run: tuple[Step, ...], undo: dict[str, list[str]]) -> Iterator[str]:
    """Steps with a common lock run one after the other, and their undos in the reverse order. Only a step
    with a `rollback_after` can leave this order."""
    last: dict[str, Step] = {}
    pairs: dict[str, tuple[str, str, str]] = {}
    for step in run:
        if step.kind is StepKind.REVERSIBLE:
            for lock in step.locks:
                before = last.get(lock)
                if before is not None and before.rollback_after is not None:
                    pairs[f"{len(pairs)}"] = (lock, before.name, step.name)
                last[lock] = step
    graph = reverse(undo)
    firsts = {key: [before] for key, (_, before, _) in pairs.items()}
    seconds = {key: [behind] for key, (_, _, behind) in pairs.items()}
    for key, _, _ in not_behind(graph, topological(graph), firsts, seconds):
        lock, first, second = pairs[key]
        yield f"the rollback of step {first} must wait for that of step {second}: both have the lock {lock}"


def _destroyed(steps: dict[str, Step], run: tuple[Step, ...], undo: dict[str, list[str]]) -> Iterator[str]:
    """A thing that the undo of a step destroys may be needed by a step behind it that is undone before it,
    and by the pivot and the steps after it, with which no undo runs any more."""
    destroyers: dict[str, list[str]] = {}
    needers: dict[str, list[str]] = {}
    for step in run:
        for thing in step.undo_destroys:
            destroyers.setdefault(thing, []).append(step.name)
        for thing in step.needs:
            if step.kind not in (StepKind.PIVOT, StepKind.FORWARD):
                needers.setdefault(thing, []).append(step.name)
    waits = {step.name: step.after for step in run}
    undone_after = reverse(undo)
    # With `undone_after` as the graph, x is behind y if the undo of y waits for the undo of x.
    for graph, why in (
        (waits, "and step {x} needs it without being after step {y}"),
        (undone_after, "before step {x}, which needs it, is undone"),
    ):
        for thing, y, x in not_behind(graph, topological(graph), destroyers, needers):
            if steps[x].kind is StepKind.CLEANUP:
                if graph is waits:
                    yield f"the undo of step {y} destroys {thing}, and the cleanup step {x} needs it"
            else:
                yield f"the undo of step {y} destroys {thing} " + why.format(x=x, y=y)


def _ring(loop: list[str]) -> str:
    shown = loop if len(loop) <= 12 else [*loop[:10], f"... {len(loop) - 11} more ...", loop[-1]]
    return " -> ".join([*shown, loop[0]])
