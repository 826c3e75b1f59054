"""The order of a rollback, on small graphs by hand and on random graphs by its invariants."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.actions import Sql
from towpath.flows.ordering import closure, cycles, topological
from towpath.flows.plan import Plan, Step
from towpath.flows.rollback import Undo, undo_order, undo_waits

Waits = Mapping[str, Collection[str]]


def steps(after: Waits, rollback_after: Waits | None = None) -> list[Step]:
    given = rollback_after or {}
    return [
        Step(
            name,
            "n",
            Sql("a"),
            Sql("b"),
            after=tuple(sources),
            rollback_after=tuple(given[name]) if name in given else None,
        )
        for name, sources in after.items()
    ]


def order(after: Waits, effects: str, rollback_after: Waits | None = None) -> list[tuple[str, str]]:
    undos = undo_order(steps(after, rollback_after), effects)
    assert not any(undo.join for undo in undos)
    return [(undo.step, "".join(undo.after)) for undo in undos]


CHAIN = {"a": "", "b": "a", "c": "b"}
DIAMOND = {"a": "", "b": "a", "c": "a", "d": "bc"}


@pytest.mark.parametrize(
    ("after", "effects", "expected"),
    [
        (CHAIN, "abc", [("c", ""), ("b", "c"), ("a", "b")]),
        (CHAIN, "ab", [("b", ""), ("a", "b")]),
        (CHAIN, "ac", [("c", ""), ("a", "c")]),
        (CHAIN, "", []),
        (DIAMOND, "abcd", [("d", ""), ("c", "d"), ("b", "d"), ("a", "bc")]),
        (DIAMOND, "abc", [("c", ""), ("b", ""), ("a", "bc")]),
        (DIAMOND, "ad", [("d", ""), ("a", "d")]),
        (DIAMOND, "bc", [("c", ""), ("b", "")]),
        ({"a": "", "b": ""}, "ab", [("b", ""), ("a", "")]),
    ],
)
def test_the_order_by_hand(after: Waits, effects: str, expected: list[tuple[str, str]]) -> None:
    assert order(after, effects) == expected


@pytest.mark.parametrize(
    ("rollback_after", "effects", "expected"),
    [
        ({"a": ""}, "abc", [("c", ""), ("b", "c"), ("a", "")]),
        ({"a": "", "b": "a"}, "abc", [("c", ""), ("a", ""), ("b", "a")]),
        ({"a": "c"}, "abc", [("c", ""), ("b", "c"), ("a", "c")]),
        ({"a": "b"}, "ac", [("c", ""), ("a", "c")]),
        ({"a": "", "b": "a", "c": "b"}, "abc", [("a", ""), ("b", "a"), ("c", "b")]),
        ({"a": "", "b": "a", "c": "b"}, "ac", [("a", ""), ("c", "a")]),
    ],
)
def test_rollback_after_replaces_the_dependents(
    rollback_after: Waits, effects: str, expected: list[tuple[str, str]]
) -> None:
    assert sorted(order(CHAIN, effects, rollback_after)) == sorted(expected)


def test_locks_order_the_undos_too() -> None:
    plan = Plan("p", tuple(Step(name, "n", Sql("a"), Sql("b"), locks=("l",)) for name in "abc"))
    assert undo_order(plan.resolved(), "abc") == [Undo("c", ()), Undo("b", ("c",)), Undo("a", ("b",))]


def test_a_gate_between_many_steps_becomes_a_join() -> None:
    """1,000 steps before a gate and 1,000 after it: 2,000 edges, not a million."""
    before, behind = ([f"{letter}{n}" for n in range(1000)] for letter in "ab")
    after = {**dict.fromkeys(before, ()), "gate": before, **dict.fromkeys(behind, ("gate",))}
    undos = undo_order(steps(after), [*before, *behind])
    assert [undo for undo in undos if undo.join] == [Undo("gate", tuple(sorted(behind)), True)]
    assert {undo.after for undo in undos if undo.step in before} == {("gate",)}
    assert sum(len(undo.after) for undo in undos) == 2000
    assert all(not undo.join for undo in undo_order(steps(after), before))
    assert undo_order(steps(after), ["a0", *behind])[-1] == Undo("a0", tuple(sorted(behind)))


def test_an_unknown_step_has_no_undo() -> None:
    with pytest.raises(InvalidInput, match="names of steps"):
        undo_order(steps(CHAIN), "ax")


def test_a_cycle_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="cycle"):
        undo_order(steps(CHAIN, {"b": "a"}), "ab")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Step], set[str]]:
    """Steps with random dependencies and some overrides of the rollback order, and a random set of
    effects."""
    n = draw(st.integers(1, 14))
    names = [f"s{i}" for i in range(n)]
    after = {
        name: draw(st.sets(st.sampled_from(names[:i]), max_size=4)) if i else set()
        for i, name in enumerate(names)
    }
    override = draw(st.dictionaries(st.sampled_from(names), st.sets(st.sampled_from(names)), max_size=3))
    found = steps(after, {name: others - {name} for name, others in override.items()})
    assume(not cycles(undo_waits(found)))
    return draw(st.permutations(found)), draw(st.sets(st.sampled_from(names)))


@given(graphs())
def test_the_invariants_of_a_rollback(graph: tuple[list[Step], set[str]]) -> None:
    found, effects = graph
    undos = undo_order(found, effects)
    waits = undo_waits(found)
    # Every step with effect is undone exactly once, and nothing else.
    assert sorted(undo.step for undo in undos if not undo.join) == sorted(effects)
    # Each undo is behind the undos that it waits for.
    place = {undo.step: n for n, undo in enumerate(undos)}
    assert len(place) == len(undos)
    assert all(place[other] < place[undo.step] for undo in undos for other in undo.after)
    # The order is exactly the order that the dependencies (or their overrides) require: no undo too early,
    # and no undo waits without need.
    after = {undo.step: undo.after for undo in undos}
    for name in effects:
        assert closure(after, [name]) & effects == closure(waits, [name]) & effects
    # A join has several waiters and several undos behind it.
    for undo in undos:
        if undo.join:
            assert len(undo.after) > 1
            assert sum(undo.step in other.after for other in undos) > 1


@given(graphs())
def test_without_overrides_an_undo_never_precedes_that_of_a_dependent(
    graph: tuple[list[Step], set[str]],
) -> None:
    found, effects = graph
    after = {step.name: step.after for step in found}
    plain = steps(after)
    undos = undo_order(plain, effects)
    place = {undo.step: n for n, undo in enumerate(undos)}
    for name in effects:
        for source in closure(after, [name]) & effects:
            assert place[name] < place[source]


@given(graphs(), st.randoms(use_true_random=False))
def test_effects_of_a_run_that_stopped_anywhere(
    graph: tuple[list[Step], set[str]], chance: random.Random
) -> None:
    """A run executes steps in an order that the dependencies allow and stops at any point. Any schedule of
    its undos passes only through states that a run can be in: no step stands without a step that it depends
    on."""
    after = {step.name: step.after for step in graph[0]}
    ran = topological(after)[: chance.randrange(len(after) + 1)]
    undos = {undo.step: set(undo.after) for undo in undo_order(steps(after), ran)}
    standing = set(ran)
    while undos:
        name = chance.choice(sorted(step for step, waits in undos.items() if not waits))
        del undos[name]
        for waits in undos.values():
            waits.discard(name)
        standing.discard(name)
        assert all(source in standing for step in standing for source in after[step])
    assert not standing


def test_the_order_of_100_000_steps_takes_linear_time() -> None:
    chance = random.Random(7)

    def seconds(n: int) -> float:
        found = steps(
            {
                f"s{i}": {f"s{chance.randrange(max(0, i - 1000), i)}" for _ in range(min(i, 3))}
                for i in range(n)
            }
        )
        effects = {step.name for step in found if chance.random() < 0.7}
        began = time.process_time()
        undos = undo_order(found, effects)
        spent = time.process_time() - began
        assert sum(not undo.join for undo in undos) == len(effects)
        assert sum(len(undo.after) for undo in undos) < 4 * 3 * n
        return spent

    small, large = seconds(10_000), seconds(100_000)
    assert large < 20
    assert large < 30 * max(small, 0.05)
