"""Plans: steps on nodes with dependencies, undos and checks, as pure data.

A plan is built by a pure function, printed, compared, hashed, written as JSON and read again. It does nothing
by itself: `check` finds all reasons why it must not run, and the coordinator runs it."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Collection, Iterable
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.retry import Backoff, Exponential
from towpath.errors import InvalidInput, InvalidPlan
from towpath.escapes import escape
from towpath.flows.actions import Action, Http, Shell, Sql, TaskCall, action_of, action_text
from towpath.flows.ordering import topological

MAX_STEPS = 100_000
MAX_REASONS = 1000
"""Reasons that the error of an invalid plan has at most."""
SHOWN = 200
"""Steps that `str(plan)` prints."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LIST = re.compile(rf"(?:{_NAME.pattern})(?:/{_NAME.pattern})*")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,99}")


class StepKind(StrEnum):
    """What happens to a step when the plan fails.

    - `reversible`: undone. Before the pivot, if the plan has one.
    - `pivot`: the point of no return. When it has taken effect, the plan goes only forward.
    - `forward`: only after the pivot; retried, skipped or marked as done by a person, never undone.
    - `cleanup`: runs at the end, whether the plan succeeded or was rolled back.
    - `gate`: waits for the approval of a person."""

    REVERSIBLE = "reversible"
    PIVOT = "pivot"
    FORWARD = "forward"
    CLEANUP = "cleanup"
    GATE = "gate"


class StepRetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`attempts`: how often the action is tried, with the delays of `backoff`. `check_attempts`: how often
    the check is asked while it answers `unknown`, before the step counts as unknown."""

    attempts: int = 5
    backoff: Backoff = Exponential(base=1.0, cap=60.0)
    check_attempts: int = 5

    def __post_init__(self) -> None:
        checks.whole("retry.attempts", self.attempts, 1, 1_000_000)
        checks.whole("retry.check_attempts", self.check_attempts, 1, 1_000_000)
        if not isinstance(self.backoff, Backoff):
            raise InvalidInput(
                field="retry.backoff", value=self.backoff, expected="a backoff, such as Fixed(5)"
            )


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step of a plan.

    - `node`: where the action runs. A gate has neither a node nor an action.
    - `undo`: reverses the action. It must succeed when there is nothing to reverse.
    - `check`: answers whether the action took effect.
    - `after`: names of the steps that must be done before this one.
    - `timeout`: seconds of one run of the action.
    - `locks`: names of resources. Two steps with a common lock never run at the same time, also those of two
      plans.
    - `rollback_after`: the undo waits for the undos of these steps, instead of those of the steps that depend
      on it.
    - `needs`, `undo_destroys`: names of things (a table, a copy of a shard) that the step relies on, and that
      its undo destroys. The plan is refused if an undo could destroy a thing that another step still needs.
    - `expires`: seconds after the submit when a gate that nobody approved fails."""

    name: str
    node: str = ""
    action: Action | None = None
    undo: Action | None = None
    check: Action | None = None
    after: tuple[str, ...] = ()
    kind: StepKind = StepKind.REVERSIBLE
    timeout: float | timedelta | None = None
    retry: StepRetry = StepRetry()
    locks: tuple[str, ...] = ()
    rollback_after: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    undo_destroys: tuple[str, ...] = ()
    undo_retry: StepRetry | None = None
    expires: float | timedelta | None = None
    description: str = ""

    def __post_init__(self) -> None:
        # Runs for every delivery of every step: values that are right are recognised with few calls.
        step_name("name", self.name)
        self._check_types()
        for field in ("timeout", "expires"):
            if (span := getattr(self, field)) is not None:
                force_setattr(self, field, checks.some_micros(span, field) / checks.SECOND)
        for field in ("action", "undo", "check"):
            action = getattr(self, field)
            if action is not None and type(action) not in _ACTIONS:
                force_setattr(self, field, action_of(action, field))
        if self.after != ():
            force_setattr(self, "after", _names("after", self.after))
        if self.rollback_after is not None:
            force_setattr(self, "rollback_after", _names("rollback_after", self.rollback_after))
        for field in ("locks", "needs", "undo_destroys"):
            if getattr(self, field) != ():
                force_setattr(self, field, _resources(field, getattr(self, field)))
        # Fields equal to their default are left out of the JSON if they are the same object as it.
        for field, default in _DEFAULTS:
            value = getattr(self, field)
            if value is not default and value == default:
                force_setattr(self, field, default)

    def _check_types(self) -> None:
        if not (isinstance(self.node, str) and (self.node == "" or _NODE.fullmatch(self.node))):
            expected = "1 to 100 letters, digits or ._-:@, the first a letter or digit"
            raise InvalidInput(field="node", value=self.node, expected=expected)
        if type(self.kind) is not StepKind:
            try:
                force_setattr(self, "kind", StepKind(self.kind))
            except ValueError:
                expected = f"one of {', '.join(StepKind)}"
                raise InvalidInput(field="kind", value=self.kind, expected=expected) from None
        if type(self.retry) is not StepRetry:
            raise InvalidInput(field="retry", value=self.retry, expected="a StepRetry")
        if self.undo_retry is not None and type(self.undo_retry) is not StepRetry:
            raise InvalidInput(field="undo_retry", value=self.undo_retry, expected="a StepRetry")
        if self.description != "":
            checks.text("description", self.description, 1000)


_ACTIONS = frozenset({TaskCall, Sql, Shell, Http})
_DEFAULTS: list[tuple[str, Any]] = [
    (field.name, field.default)
    for field in msgspec.structs.fields(Step)
    if field.default is not msgspec.NODEFAULT and field.default is not None
]


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Steps in the order of their declaration. Equal plans have equal hashes."""

    name: str
    steps: tuple[Step, ...]
    description: str = ""

    def __post_init__(self) -> None:
        step_name("plan.name", self.name)
        force_setattr(self, "steps", checks.all_of("steps", self.steps, Step))
        checks.text("description", self.description, 1000)

    def check(self, nodes: Collection[str] | None = None) -> None:
        """Raise `InvalidPlan` with all reasons why the plan could not run, or could not be undone. `nodes`:
        the names of the known nodes, if they are known."""
        from towpath.flows.validation import reasons_against

        if reasons := reasons_against(self, nodes):
            raise InvalidPlan(plan=self.name, reasons=reasons)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the plan as JSON, in hexadecimal: the same plan has the same hash in every process."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(content: bytes | str) -> Plan:
        """Read the output of `to_json`. A field that a plan does not have is an error."""
        try:
            return msgspec.json.decode(content, type=Plan)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise InvalidInput(field="plan", value=content, expected=f"a plan as JSON: {error}") from None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its nodes, sorted."""
        return tuple(sorted({step.node for step in self.steps if step.node}))

    @property
    def locks(self) -> tuple[str, ...]:
        """The locks of all steps, sorted."""
        return tuple(sorted({lock for step in self.steps for lock in step.locks}))

    @property
    def pivot(self) -> Step | None:
        return next((step for step in self.steps if step.kind is StepKind.PIVOT), None)

    def by_name(self) -> dict[str, Step]:
        return {step.name: step for step in self.steps}

    def resolved(self) -> tuple[Step, ...]:
        """The steps as they are run, each behind the steps that it waits for. Steps with a common lock that
        have no order are put in one. Cleanup steps come last and wait only for cleanup steps, since they run
        at the end anyway."""
        return resolved_steps(self.steps)

    def __str__(self) -> str:
        on = f" on {counted(len(self.nodes), 'node')}" if self.nodes else ""
        lines = [f"plan {self.name}: {counted(len(self.steps), 'step')}{on}, {self.content_hash[:12]}"]
        if self.description:
            lines.append(f"  {escape(self.description)}")
        lines += [_line(step) for step in self.steps[:SHOWN]]
        if (more := len(self.steps) - SHOWN) > 0:
            lines.append(f"  and {counted(more, 'more step')}")
        return "\n".join(lines)


def resolved_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """As `Plan.resolved`. Raises `InvalidPlan` if the dependencies have a cycle."""
    known = {step.name: step for step in steps}
    cleanup = {name for name, step in known.items() if step.kind is StepKind.CLEANUP}
    waits = {
        name: [
            source for source in step.after if source in known and (source in cleanup) == (name in cleanup)
        ]
        for name, step in known.items()
    }
    order = topological(waits)
    if len(order) < len(known):
        raise InvalidPlan(plan="", reasons=["the dependencies have a cycle"])
    order.sort(key=cleanup.__contains__)
    last_holder: dict[tuple[str, bool], str] = {}
    for name in order:
        for lock in known[name].locks:
            before = last_holder.get((lock, name in cleanup))
            if before is not None and before not in waits[name]:
                waits[name].append(before)
            last_holder[lock, name in cleanup] = name
    return tuple(_waiting(known[name], tuple(sorted(waits[name]))) for name in order)


def _waiting(step: Step, after: tuple[str, ...]) -> Step:
    return step if after == step.after else msgspec.structs.replace(step, after=after)


def _line(step: Step) -> str:
    parts = [f"  {step.name}"]
    if step.node:
        parts.append(f"on {step.node}")
    if step.kind is not StepKind.REVERSIBLE:
        parts.append(f"({step.kind})")
    if step.after:
        after = ", ".join(step.after[:10]) + (
            f" and {len(step.after) - 10} more" if len(step.after) > 10 else ""
        )
        parts.append(f"after {after}")
    line = " ".join(parts)
    if step.action is not None:
        line += f": {escape(action_text(step.action))}"
    return f"{line}; undo: {escape(action_text(step.undo))}" if step.undo is not None else line


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def step_name(field: str, value: object) -> None:
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        expected = "1 to 100 letters, digits or ._-, the first a letter or digit"
        raise InvalidInput(field=field, value=value, expected=expected)


def _names(field: str, values: Iterable[Any]) -> tuple[str, ...]:
    """Names of steps, sorted, each once. A step stands for its name."""
    if type(values) is tuple and _are_names(values):
        return values
    given = checks.all_of(field, values, (str, Step))
    found = sorted({each.name if isinstance(each, Step) else each for each in given})
    for name in found:
        step_name(field, name)
    return tuple(found)


def _are_names(values: tuple[Any, ...]) -> bool:
    """Are these sorted names of steps? One match of all is faster than one of each."""
    try:
        joined = "/".join(values)
    except TypeError:
        return False
    return all(map(operator.lt, values, values[1:])) and _LIST.fullmatch(joined) is not None


def _resources(field: str, values: Iterable[Any]) -> tuple[str, ...]:
    found = set(checks.all_of(field, values, str))
    for name in found:
        checks.text(field, name, 200, least=1)
    return tuple(sorted(found))
