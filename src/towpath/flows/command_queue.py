"""Commands on nodes in the vocabulary of a command queue: a thin layer over plans.

`add` collects the commands of a group, `set_wait_for` names the commands that the next ones wait for, and
`submit` stores the whole group as one plan: nothing of a group runs before all of it is stored.
`process(node)` runs the commands of one node in this process, as an agent of the node does; any worker of the
queue `node/<node>` may do the same.

A command without a rollback cannot be undone, so that the first such command of a group is its pivot. The
commands added before the pivot are reversible, and the pivot waits for all of them. The commands added after
it are forward steps: they wait for the pivot and are never rolled back, also those with a rollback of their
own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, Self, TypedDict, Unpack

import msgspec

from towpath.core import checks
from towpath.errors import InvalidInput
from towpath.flows.actions import Action, Sql, action_of, action_text
from towpath.flows.plan import Plan, Step, StepKind, StepRetry, step_name

DRAFT = "draft"
"""The state of a command in a group that was not submitted."""


class CommandState(Protocol):
    """A step of a submitted plan at one moment, as `app.plans` returns it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def attempts(self) -> int: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def finished_at(self) -> datetime | None: ...
    @property
    def duration(self) -> float | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def undo(self) -> str | None: ...


class CommandGroup(Protocol):
    """A submitted plan, as `app.plans.get` returns it."""

    @property
    def id(self) -> str: ...
    def plan(self) -> Plan: ...
    def steps(self) -> Sequence[CommandState]: ...
    def abort(self, *, by: str | None = None, why: str | None = None) -> bool | None: ...


class GroupSummary(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


class PlanStore(Protocol):
    """The part of `app.plans` that a command queue uses."""

    def submit(self, plan: Plan, *, id: str | None = None, by: str | None = None) -> CommandGroup: ...
    def get(self, id: str) -> CommandGroup: ...
    def list(self) -> Sequence[GroupSummary]: ...


class CommandOptions(TypedDict, total=False):
    """Options of a command. `rollback_wait_for`: its rollback waits for the rollbacks of these commands,
    instead of those of the commands that waited for it. The others are those of `Step`."""

    check: Any
    timeout: float | timedelta | None
    retry: StepRetry
    locks: Iterable[str]
    needs: Iterable[str]
    undo_destroys: Iterable[str]
    rollback_wait_for: Iterable[str]


class QueuedCommand(msgspec.Struct, frozen=True):
    """A command at one moment. `rollback_state`: the state of its rollback, if it has begun. `duration`:
    seconds."""

    id: str
    group: str
    node: str
    command: str
    rollback: str | None
    kind: StepKind
    wait_for: tuple[str, ...]
    state: str = DRAFT
    tries: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration: float | None = None
    error: str | None = None
    rollback_state: str | None = None

    @property
    def is_pending(self) -> bool:
        return self.state not in ("done", "failed", "canceled")


class CommandQueue:
    """Not safe for several threads: each builds its groups with a queue of its own.

    - `plans`: `app.plans`.
    - `name`: the name of its plans. Commands without a group are in a group `<name>-<8 random digits>`.
    - `action`: the action of a command that is a text.
    - `work`: runs the jobs of a queue until none is ready, for `process`:
      `lambda queue: app.run(queues=(queue,), burst=True)`."""

    def __init__(
        self,
        plans: PlanStore,
        name: str = "commands",
        *,
        action: Callable[[str], Any] = Sql,
        work: Callable[[str], object] | None = None,
    ) -> None:
        self._plans, self._name, self._action, self._work = plans, name, action, work
        self._drafts: dict[str, list[Step]] = {}
        self._wait_for: tuple[str, ...] = ()
        self._unnamed = ""

    # Build

    def add(
        self,
        node: str,
        command: Any,
        rollback: Any = None,
        group: str | None = None,
        **options: Unpack[CommandOptions],
    ) -> str:
        """Add a command to a group and return its id. An empty rollback is none. The command waits for the
        commands of the last `set_wait_for`."""
        plan = self._group(group)
        draft = self._drafts.get(plan, [])
        unknown = set(options) - CommandOptions.__annotations__.keys()
        if unknown:
            raise InvalidInput(field="option", value=min(unknown), expected="an option of a command")
        fields: dict[str, Any] = dict(options)
        if fields.get("check") is not None:
            fields["check"] = self._act(fields["check"], "check")
        if "rollback_wait_for" in fields:
            fields["rollback_after"] = self._names("rollback_wait_for", fields.pop("rollback_wait_for"), plan)
        step = Step(
            f"c{len(draft) + 1}",
            node,
            self._act(command, "command"),
            undo=None if rollback is None or rollback == "" else self._act(rollback, "rollback"),
            after=self._names("wait_for", self._wait_for, plan),
            **fields,
        )
        self._drafts.setdefault(plan, draft).append(step)
        return f"{plan}/{step.name}"

    def set_wait_for(self, ids: str | Iterable[str]) -> Self:
        """The commands that are added from now on wait for all of these commands. The highest id alone is not
        enough: on several nodes it may be done first."""
        self._wait_for = (ids,) if isinstance(ids, str) else checks.all_of("wait_for", ids, str)
        return self

    def reset_wait_for(self) -> Self:
        self._wait_for = ()
        return self

    def built(self, group: str | None = None) -> Plan:
        """The plan of a group that was not submitted."""
        plan = self._group(group)
        if plan not in self._drafts:
            raise InvalidInput(field="group", value=group, expected="a group with commands")
        return Plan(self._name, tuple(_steps(self._drafts[plan])))

    def submit(self, group: str | None = None, *, by: str | None = None) -> CommandGroup:
        """Check and store all commands of a group. Raises `InvalidPlan` with all reasons; nothing is stored
        then, and the group can be changed or dropped."""
        plan = self._group(group)
        submitted = self._plans.submit(self.built(plan), id=plan, by=by)
        del self._drafts[plan]
        if plan == self._unnamed:
            self._unnamed = ""
        self.reset_wait_for()
        return submitted

    def process(self, node: str) -> None:
        """Submit all groups, and run the commands of a node until none of them is ready."""
        if self._work is None:
            raise InvalidInput(field="work", value=None, expected="given to the queue, to run commands here")
        for group in [*self._drafts]:
            self.submit(group)
        self._work(f"node/{node}")

    def rollback_group(self, group: str, *, by: str | None = None, why: str | None = None) -> bool | None:
        """Stop a group and roll it back. Its rollbacks are durable jobs, each on the node of its command.
        Returns True; False if the pivot of the group is done, so that the group is completed; None if the
        pivot runs now. A group that was not submitted is dropped."""
        if self._drafts.pop(group, None) is not None:
            return True
        return self._plans.get(group).abort(by=by, why=why)

    # Inspect

    def get(self, id: str) -> QueuedCommand:
        group = _split(id)[0]
        for command in self.group(group):
            if command.id == id:
                return command
        raise InvalidInput(field="command", value=id, expected=f"the id of a command of group {group}")

    def group(self, group: str) -> list[QueuedCommand]:
        """The commands of a group, in the order in which they were added."""
        if group in self._drafts:
            return [_shown(group, step, None) for step in _steps(self._drafts[group])]
        found = self._plans.get(group)
        views = {view.name: view for view in found.steps()}
        steps = sorted(found.plan().steps, key=lambda step: _number(step.name))
        return [_shown(group, step, views.get(step.name)) for step in steps]

    def commands_for_node(self, node: str) -> list[QueuedCommand]:
        """All commands of this queue on a node. Reads all its groups."""
        return self._commands(node)

    def pending(self, node: str | None = None) -> list[QueuedCommand]:
        """The commands that have not ended, of one node or of all."""
        return [command for command in self._commands(node) if command.is_pending]

    def pending_count(self, node: str | None = None) -> int:
        return len(self.pending(node))

    def dependency_chain(self, id: str) -> list[QueuedCommand]:
        """The commands that a command waits for, directly or through others, and the command itself as the
        last."""
        by_id = {command.id: command for command in self.group(_split(id)[0])}
        if id not in by_id:
            raise InvalidInput(field="command", value=id, expected="the id of a command")
        needed, stack = {id}, [id]
        while stack:
            new = set(by_id[stack.pop()].wait_for) - needed
            needed |= new
            stack += new
        return [command for command in by_id.values() if command.id in needed]

    def average_execution_time(self, node: str | None = None) -> float | None:
        """Mean duration of the done commands in seconds; None without any."""
        done = [each.duration or 0.0 for each in self._commands(node) if each.state == "done"]
        return sum(done) / len(done) if done else None

    def failure_rate(self, node: str | None = None) -> float | None:
        """The share of failed commands among the done and failed commands; None without any."""
        states = [each.state for each in self._commands(node) if each.state in ("done", "failed")]
        return states.count("failed") / len(states) if states else None

    def _commands(self, node: str | None) -> list[QueuedCommand]:
        groups = [each.id for each in self._plans.list() if each.name == self._name]
        found = (command for group in (*groups, *self._drafts) for command in self.group(group))
        return [command for command in found if node is None or command.node == node]

    def _act(self, value: Any, field: str) -> Action:
        return action_of(self._action(value) if isinstance(value, str) else value, field)

    def _names(self, field: str, ids: Iterable[str], group: str) -> tuple[str, ...]:
        found = []
        draft = self._drafts.get(group, [])
        for id in ids:
            owner, name = _split(id)
            number = int(name[1:]) if name[1:].isdecimal() else 0
            if owner != group or not 1 <= number <= len(draft) or draft[number - 1].name != name:
                expected = f"the id of a command that was added to group {group} and not submitted"
                raise InvalidInput(field=field, value=id, expected=expected)
            found.append(name)
        return tuple(found)

    def _group(self, group: str | None) -> str:
        if group is not None and group != "":
            step_name("group", group)
            return group
        self._unnamed = self._unnamed or f"{self._name}-{uuid.uuid4().hex[:8]}"
        return self._unnamed


def _steps(added: list[Step]) -> Iterator[Step]:
    """The steps of a group: reversible up to the first command without a rollback, the pivot, then
    forward."""
    pivot: int | None = None
    waited_for: set[str] = set()
    for n, step in enumerate(added):
        after = set(step.after)
        if pivot is None and step.undo is None:
            pivot = n
            after |= {other.name for other in added[:n] if other.name not in waited_for}
            yield _never_undone(step, StepKind.PIVOT, after)
        elif pivot is None:
            yield step
        else:
            if all(_number(name) <= pivot for name in after):
                after.add(added[pivot].name)
            yield _never_undone(step, StepKind.FORWARD, after)
        waited_for |= after


def _never_undone(step: Step, kind: StepKind, after: set[str]) -> Step:
    return msgspec.structs.replace(
        step, kind=kind, after=tuple(after), undo=None, undo_destroys=(), rollback_after=None
    )


def _number(name: str) -> int:
    """The number of the command `c<number>`, from 1."""
    return int(name[1:])


def _shown(group: str, step: Step, view: CommandState | None) -> QueuedCommand:
    assert step.action is not None
    command = QueuedCommand(
        id=f"{group}/{step.name}",
        group=group,
        node=step.node,
        command=action_text(step.action, 1_000_000),
        rollback=None if step.undo is None else action_text(step.undo, 1_000_000),
        kind=step.kind,
        wait_for=tuple(f"{group}/{name}" for name in step.after),
    )
    if view is None:
        return command
    return msgspec.structs.replace(
        command,
        state=str(view.state),
        tries=view.attempts,
        started_at=view.started_at,
        finished_at=view.finished_at,
        duration=view.duration,
        error=view.error,
        rollback_state=None if view.undo is None else str(view.undo),
    )


def _split(id: object) -> tuple[str, str]:
    group, slash, name = id.rpartition("/") if isinstance(id, str) else ("", "", "")
    if not slash or not group:
        raise InvalidInput(field="command", value=id, expected="the id of a command, as `add` returns it")
    return group, name
