"""The vocabulary of a command queue: the plan that the commands of a group become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.actions import Shell, Sql
from towpath.flows.command_queue import CommandGroup, CommandQueue, CommandState, GroupSummary
from towpath.flows.plan import Plan, StepKind


class StoredGroup:
    """A submitted group of which nothing has run."""

    def __init__(self, id: str, plan: Plan) -> None:
        self.id, self.name, self._plan = id, plan.name, plan

    def plan(self) -> Plan:
        return self._plan

    def steps(self) -> Sequence[CommandState]:
        return ()

    def abort(self, *, by: str | None = None, why: str | None = None) -> bool | None:
        raise AssertionError("not here")


class Store:
    """Plans in memory that nobody runs. The flows of commands on a real ledger are in test_command_flows."""

    def __init__(self) -> None:
        self.groups: dict[str, StoredGroup] = {}

    def submit(self, plan: Plan, *, id: str | None = None, by: str | None = None) -> CommandGroup:
        plan.check()
        assert id is not None
        self.groups[id] = StoredGroup(id, plan)
        return self.groups[id]

    def get(self, id: str) -> CommandGroup:
        return self.groups[id]

    def list(self) -> Sequence[GroupSummary]:
        return [*self.groups.values()]


@pytest.fixture
def queue() -> CommandQueue:
    return CommandQueue(Store())


def shape(queue: CommandQueue, group: str = "g") -> list[tuple[str, str, tuple[str, ...]]]:
    return [(step.name, str(step.kind), step.after) for step in queue.built(group).steps]


def test_commands_wait_for_a_set(queue: CommandQueue) -> None:
    a = queue.add("n1", "A", "UNDO A", "g")
    b = queue.add("n2", "B", "UNDO B", "g")
    queue.set_wait_for({a, b})
    queue.add("n1", "C", "UNDO C", "g")
    queue.set_wait_for(a).add("n1", "D", "UNDO D", "g")
    queue.reset_wait_for().add("n1", "E", "UNDO E", "g")
    assert (a, b) == ("g/c1", "g/c2")
    assert shape(queue) == [
        ("c1", "reversible", ()),
        ("c2", "reversible", ()),
        ("c3", "reversible", ("c1", "c2")),
        ("c4", "reversible", ("c1",)),
        ("c5", "reversible", ()),
    ]
    steps = queue.built("g").steps
    assert (steps[2].node, steps[2].action, steps[2].undo) == ("n1", Sql("C"), Sql("UNDO C"))


def test_the_first_command_without_a_rollback_is_the_pivot(queue: CommandQueue) -> None:
    """It waits for all commands before it, and the commands after it wait for it."""
    a = queue.add("n1", "A", "UNDO A", "g")
    queue.add("n2", "B", "UNDO B", "g")
    queue.set_wait_for(a).add("n2", "C", "UNDO C", "g")
    queue.reset_wait_for().add("n1", "DROP", "", "g")
    queue.add("n2", "DROP", None, "g")
    last = queue.add("n1", "CREATE", "DROP", "g")
    queue.set_wait_for(last).add("n1", "CLEAN", "", "g")
    assert shape(queue) == [
        ("c1", "reversible", ()),
        ("c2", "reversible", ()),
        ("c3", "reversible", ("c1",)),
        ("c4", "pivot", ("c2", "c3")),
        ("c5", "forward", ("c4",)),
        ("c6", "forward", ("c4",)),
        ("c7", "forward", ("c6",)),
    ]
    assert queue.get("g/c6").rollback is None
    queue.built("g").check()


def test_nothing_is_stored_before_the_submit(queue: CommandQueue) -> None:
    id = queue.add("n1", "A", "UNDO A")
    group = id.rpartition("/")[0]
    assert group.startswith("commands-")
    assert queue.get(id).state == "draft"
    assert queue.submit().id == group
    assert queue.get(id).command == "A"
    assert queue.add("n1", "A", "UNDO A").rpartition("/")[0] != group


def test_a_group_that_is_not_valid_stays_a_draft(queue: CommandQueue) -> None:
    """The rollback of c1 destroys the only copy that c2 needs; c2 does not wait for c1."""
    queue.add("target", "CREATE TABLE s1", "DROP TABLE s1", "g", undo_destroys=["copy of s1"])
    queue.add("source", "DETACH s1", "ATTACH s1", "g", needs=["copy of s1"])
    with pytest.raises(InvalidPlan, match="the undo of step c1 destroys copy of s1 and step c2 needs it"):
        queue.submit("g")
    assert queue.pending_count() == 2
    assert queue.rollback_group("g") is True
    assert queue.pending_count() == 0


def test_options_of_a_command(queue: CommandQueue) -> None:
    a = queue.add("n1", "A", "UNDO A", "g", check="SELECT 1", timeout=3, locks=["t"])
    queue.set_wait_for(a)
    queue.add("n1", Shell(("ls",)), Sql("UNDO"), "g", rollback_wait_for=[])
    first, second = queue.built("g").steps
    assert (first.check, first.timeout, first.locks) == (Sql("SELECT 1"), 3.0, ("t",))
    assert (second.action, second.undo, second.rollback_after) == (Shell(("ls",)), Sql("UNDO"), ())
    with pytest.raises(InvalidInput, match="an option of a command"):
        queue.add("n1", "A", "UNDO A", "g", retires=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("id", ["other/c1", "g/c2", "g/c9", "c1", ""])
def test_a_command_waits_only_for_commands_of_its_group(queue: CommandQueue, id: str) -> None:
    queue.add("n1", "A", "UNDO A", "g")
    queue.add("n1", "A", "UNDO A", "other")
    with pytest.raises(InvalidInput, match="the id of a command"):
        queue.set_wait_for([id]).add("n1", "B", "UNDO B", "g")


def test_a_wrong_value_is_refused_when_it_is_added(queue: CommandQueue) -> None:
    wrong: Any = queue
    calls: list[Callable[[], object]] = [
        lambda: wrong.add("no node", "A", "UNDO A", "g"),
        lambda: wrong.add("n1", 3, "UNDO A", "g"),
        lambda: wrong.add("n1", "A", 3, "g"),
        lambda: wrong.add("n1", "A", "UNDO A", "g/h"),
        lambda: wrong.add("n1", "A", "UNDO A", "g", timeout=-1),
        lambda: wrong.set_wait_for(None),
        lambda: wrong.set_wait_for([3]),
    ]
    for call in calls:
        with pytest.raises(InvalidInput):
            call()
    assert queue.pending_count() == 0


def test_a_submitted_group_is_closed(queue: CommandQueue) -> None:
    id = queue.add("n1", "A", "UNDO A", "g")
    queue.submit("g")
    with pytest.raises(InvalidInput, match="not submitted"):
        queue.set_wait_for(id).add("n1", "B", "UNDO B", "g")
    with pytest.raises(InvalidInput, match="a group with commands"):
        queue.submit("nothing")


def test_unknown_commands(queue: CommandQueue) -> None:
    queue.add("n1", "A", "UNDO A", "g")
    for read in (queue.get, queue.dependency_chain):
        with pytest.raises(InvalidInput, match="the id of a command"):
            read("g/c7")
    with pytest.raises(InvalidInput, match="given to the queue"):
        queue.process("n1")


def test_the_dependency_chain(queue: CommandQueue) -> None:
    a = queue.add("n1", "A", "UNDO A", "g")
    b = queue.add("n1", "B", "UNDO B", "g")
    c = queue.set_wait_for([a]).add("n2", "C", "UNDO C", "g")
    d = queue.set_wait_for([c]).add("n1", "D", "UNDO D", "g")
    assert [command.id for command in queue.dependency_chain(d)] == [a, c, d]
    queue.submit("g")
    assert [command.id for command in queue.dependency_chain(d)] == [a, c, d]
    assert [command.id for command in queue.dependency_chain(b)] == [b]
    assert [command.command for command in queue.commands_for_node("n1")] == ["A", "B", "D"]


@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, 19), max_size=4)),
        min_size=1,
        max_size=20,
    )
)
def test_every_group_is_a_valid_plan_with_the_order_of_its_waits(
    commands: list[tuple[bool, set[int]]],
) -> None:
    queue = CommandQueue(Store())
    ids: list[str] = []
    for reversible, waits in commands:
        queue.set_wait_for([ids[n] for n in waits if n < len(ids)])
        ids.append(queue.add("n1", "A", "UNDO" if reversible else "", "g"))
    plan = queue.built("g")
    plan.check()
    irreversible = [n for n, (reversible, _) in enumerate(commands) if not reversible]
    assert [step.kind for step in plan.steps] == [
        StepKind.REVERSIBLE
        if not irreversible or n < irreversible[0]
        else StepKind.PIVOT
        if n == irreversible[0]
        else StepKind.FORWARD
        for n in range(len(commands))
    ]
    for (_, waits), step in zip(commands, plan.steps, strict=True):
        assert {f"c{n + 1}" for n in waits if f"g/c{n + 1}" in ids[: int(step.name[1:]) - 1]} <= set(
            step.after
        )
