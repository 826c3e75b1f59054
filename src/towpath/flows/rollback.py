"""The order of a rollback, as a pure function of the steps and of the set of steps that took effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.ordering import Waits, cycles, topological

MOST_INLINE = 4
"""A step without effect is passed over if at most this many undos are behind it; else it becomes a join. So
the number of edges is linear in the number of dependencies."""


class Undoable(Protocol):
    """The part of a step that decides its place in a rollback. `after` includes the edges derived from
    locks."""

    @property
    def name(self) -> str: ...
    @property
    def after(self) -> Collection[str]: ...
    @property
    def rollback_after(self) -> Collection[str] | None: ...


class Undo(NamedTuple):
    """One undo: it runs when the undos of the steps `after` have ended, well or not. A `join` undoes nothing:
    it is a step without effect, such as a gate, that many undos wait for on behalf of many others."""

    step: str
    after: tuple[str, ...]
    join: bool = False


def undo_waits(steps: Iterable[Undoable]) -> dict[str, list[str]]:
    """Each step with the steps to be undone before it: its dependents, or its `rollback_after`.
    The last step comes first."""
    known = list(steps)
    found: dict[str, list[str]] = {step.name: [] for step in reversed(known)}
    for step in known:
        for source in step.after:
            if source in found:
                found[source].append(step.name)
    for step in known:
        if step.rollback_after is not None:
            found[step.name] = [name for name in step.rollback_after if name in found]
    return found


def undo_order(steps: Iterable[Undoable], effects: Collection[str]) -> list[Undo]:
    """The undo of every step in `effects`, each behind the undos that it waits for. The undo of a step waits
    for the undo of each step that depends on it; a step without effect is replaced by the steps behind it."""
    waits = undo_waits(steps)
    done = set(effects)
    if unknown := done - waits.keys():
        raise InvalidInput(field="effects", value=sorted(unknown)[:5], expected="names of steps of the plan")
    order = topological(waits)
    if len(order) < len(waits):
        reasons = [f"the rollback order has a cycle: {' -> '.join(cycle)}" for cycle in cycles(waits)]
        raise InvalidPlan(plan="", reasons=reasons)
    after, joins = _contracted(order, waits, done)
    _drop_joins(order, after, joins)
    return [Undo(name, tuple(sorted(after[name])), name in joins) for name in order if name in after]


def _contracted(order: list[str], waits: Waits, done: set[str]) -> tuple[dict[str, set[str]], set[str]]:
    """(undos with the undos that they wait for, the names of joins). Steps without effect are passed over or
    become joins."""
    after: dict[str, set[str]] = {}
    joins: set[str] = set()
    behind: dict[str, set[str]] = {}
    for name in order:
        nearest: set[str] = set()
        for other in waits[name]:
            if other in after:
                nearest.add(other)
            else:
                nearest |= behind[other]
        if name in done:
            after[name] = nearest
        elif len(nearest) > MOST_INLINE:
            after[name] = nearest
            joins.add(name)
        else:
            behind[name] = nearest
    return after, joins


def _drop_joins(order: list[str], after: dict[str, set[str]], joins: set[str]) -> None:
    """Remove joins without a waiter and joins with one waiter, which takes over the edges. From the last undo
    to the first, so that each set moves once."""
    waiters: dict[str, set[str]] = {name: set() for name in joins}
    for name in reversed(order):
        if name not in after:
            continue
        if name in joins and len(waiters[name]) < 2:
            for waiter in waiters[name]:
                after[waiter].discard(name)
                after[waiter] |= after[name]
                for other in after[name] & joins:
                    waiters[other].add(waiter)
            del after[name]
            joins.discard(name)
            continue
        for other in after[name] & joins:
            waiters[other].add(name)
