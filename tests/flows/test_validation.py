"""Every reason why a plan is refused, as a table, and plans at the edge that are accepted."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.actions import Sql
from towpath.flows.ordering import closure
from towpath.flows.plan import MAX_REASONS, Plan, Step, StepRetry
from towpath.flows.rollback import undo_waits
from towpath.flows.validation import reasons_against

ACTION, UNDO = Sql("do"), Sql("undo")


def rev(name: str, *after: str, **more: Any) -> Step:
    return Step(name, **{"node": "n", "action": ACTION, "undo": UNDO, "after": after, **more})


def other(kind: str, name: str, *after: str, **more: Any) -> Step:
    return rev(name, *after, **{"undo": None, "kind": kind, **more})


def pivot(name: str, *after: str, **more: Any) -> Step:
    return other("pivot", name, *after, **more)


def forward(name: str, *after: str, **more: Any) -> Step:
    return other("forward", name, *after, **more)


def cleanup(name: str, *after: str, **more: Any) -> Step:
    return other("cleanup", name, *after, **more)


def gate(name: str, *after: str, **more: Any) -> Step:
    return other("gate", name, *after, **{"node": "", "action": None, **more})


REFUSED: list[tuple[list[Step], list[str]]] = [
    ([], ["there are no steps"]),
    ([rev("a"), rev("a")], ["two steps have the name a"]),
    ([rev("a", "a")], ["the steps a -> a wait for each other"]),
    ([rev("a", "b"), rev("b", "a"), rev("c", "b")], ["the steps a -> b -> a wait for each other"]),
    (
        [rev("a", "b"), rev("b", "a"), rev("c", "d"), rev("d", "e"), rev("e", "c")],
        ["the steps a -> b -> a wait for each other", "the steps c -> d -> e -> c wait for each other"],
    ),
    ([rev("a", "x")], ["step a is after x, and there is no such step"]),
    ([rev("a", rollback_after=["x"])], ["the rollback of step a is after x, and there is no such step"]),
    ([rev("a", node="m")], ["step a is on the node m, and there is no such node"]),
    ([rev("a", node="")], ["step a has no node"]),
    ([rev("a", action=None)], ["step a has no action"]),
    (
        [rev("a", undo=None)],
        [
            "step a is reversible and has no undo; a step that cannot be undone is a pivot, or a forward step"
            " after it"
        ],
    ),
    (
        [pivot("p", undo=UNDO)],
        ["the pivot step p must not have undo: after the pivot there is only forward recovery"],
    ),
    (
        [pivot("p"), forward("f", "p", undo=UNDO)],
        ["the forward step f must not have undo: a step after the pivot is never undone"],
    ),
    ([cleanup("c", undo=UNDO)], ["the cleanup step c must not have undo: a cleanup step is never undone"]),
    (
        [cleanup("c", undo_retry=StepRetry(), undo_destroys=["t"], rollback_after=[])],
        [
            "the cleanup step c must not have undo_retry: a cleanup step is never undone",
            "the cleanup step c must not have undo_destroys: a cleanup step is never undone",
        ],
    ),
    (
        [gate("g", node="n", action=ACTION)],
        [
            "the gate step g must not have node: a gate runs nothing",
            "the gate step g must not have action: a gate runs nothing",
        ],
    ),
    (
        [gate("g", check=ACTION, timeout=3, locks=["l"], needs=["t"])],
        [
            f"the gate step g must not have {part}: a gate runs nothing"
            for part in ("check", "timeout", "locks", "needs")
        ],
    ),
    ([rev("a", expires=3)], ["the reversible step a must not have expires: only a gate expires"]),
    ([pivot("p"), pivot("q", "p")], ["there are 2 pivots, at most one is possible: p, q"]),
    ([forward("f")], ["step f is a forward step and there is no pivot"]),
    (
        [pivot("p"), forward("f")],
        ["step f is a forward step and not after the pivot p"],
    ),
    (
        [forward("f"), pivot("p", "f")],
        ["step f is a forward step and not after the pivot p"],
    ),
    (
        [pivot("p"), rev("a", "p")],
        ["the reversible step a is after the pivot p: only forward steps are"],
    ),
    (
        [pivot("p"), gate("g", "p")],
        ["the gate step g is after the pivot p: only forward steps are"],
    ),
    (
        [pivot("p"), rev("a")],
        ["the reversible step a is not before the pivot p, which must wait for it"],
    ),
    ([cleanup("c"), rev("a", "c")], ["step a is after the cleanup step c, which runs at the end"]),
    (
        [rev("a", rollback_after=["g"]), gate("g")],
        ["the rollback of step a is after g, and a gate step has no rollback"],
    ),
    (
        [rev("a"), rev("b", "a", rollback_after=["a"])],
        [
            "the rollbacks of the steps b -> a -> b wait for each other; a step waits for the rollback of its"
            " dependents unless it has a rollback_after"
        ],
    ),
    (
        [rev("a", locks=["l"], rollback_after=[]), rev("b", locks=["l"])],
        ["the rollback of step a must wait for that of step b: both have the lock l"],
    ),
    (
        [gate("g", retry=StepRetry(attempts=3))],
        ["the gate step g must not have retry: a gate runs nothing"],
    ),
    # The undo of `make` drops the table that another step needs.
    (
        [rev("make", undo_destroys=["t"]), rev("use", needs=["t"])],
        [
            "the undo of step make destroys t and step use needs it without being after step make",
            "the undo of step make destroys t before step use, which needs it, is undone",
        ],
    ),
    (
        [rev("use", needs=["t"]), rev("make", "use", undo_destroys=["t"])],
        [
            "the undo of step make destroys t and step use needs it without being after step make",
            "the undo of step make destroys t before step use, which needs it, is undone",
        ],
    ),
    (
        [rev("make", undo_destroys=["t"], rollback_after=[]), rev("use", "make", needs=["t"])],
        ["the undo of step make destroys t before step use, which needs it, is undone"],
    ),
    (
        [rev("make", undo_destroys=["t"]), cleanup("tidy", "make", needs=["t"])],
        ["the undo of step make destroys t, and the cleanup step tidy needs it"],
    ),
    # Several rules at once: all reasons are there.
    (
        [rev("a", "x", undo=None), forward("f", "a")],
        [
            "step a is after x, and there is no such step",
            "step a is reversible and has no undo; a step that cannot be undone is a pivot, or a forward step"
            " after it",
            "step f is a forward step and there is no pivot",
        ],
    ),
]


@pytest.mark.parametrize(("steps", "reasons"), REFUSED, ids=[reasons[0][:60] for _, reasons in REFUSED])
def test_a_plan_is_refused_with_all_reasons(steps: list[Step], reasons: list[str]) -> None:
    with pytest.raises(InvalidPlan) as caught:
        Plan("move", tuple(steps)).check(nodes={"n"})
    assert caught.value.reasons == tuple(reasons)
    assert str(caught.value).startswith("plan move is not valid:")
    assert all(reason in str(caught.value) for reason in reasons)


ACCEPTED: list[list[Step]] = [
    [rev("a")],
    [gate("g", expires=3)],
    [cleanup("c")],
    [pivot("p")],
    [rev("a"), gate("g", "a"), rev("b", "g"), pivot("p", "b"), forward("f", "p"), forward("h", "f")],
    [rev("a"), cleanup("c", "a"), cleanup("d", "c")],
    [rev("a", rollback_after=[]), rev("b", "a", rollback_after=["a"])],
    [rev("make", undo_destroys=["t"]), rev("use", "make", needs=["t"])],
    [rev("make", undo_destroys=["t"], needs=["t"])],
    [rev("make", undo_destroys=["t"]), gate("g", "make"), rev("use", "g", needs=["t"])],
    [rev("make", undo_destroys=["t"]), pivot("p", "make", needs=["t"]), forward("use", "p", needs=["t"])],
    [
        rev("make", undo_destroys=["t"], rollback_after=["use"]),
        rev("use", "make", needs=["t"], rollback_after=[]),
    ],
    [rev("make", undo_destroys=["t"], locks=["l"]), rev("use", needs=["t"], locks=["l"])],
    [rev("use", needs=["t"])],
    [rev("a", locks=["l"], rollback_after=["c"]), rev("b", locks=["l"]), rev("c", rollback_after=["b"])],
    [rev("a", rollback_after=[]), rev("b", locks=["l"]), rev("c", locks=["l"])],
    [rev("make", undo_destroys=["t"])],
]


@pytest.mark.parametrize("steps", ACCEPTED, ids=lambda steps: " ".join(step.name for step in steps))
def test_a_valid_plan_is_accepted(steps: list[Step]) -> None:
    Plan("move", tuple(steps)).check(nodes=["n", "m"])
    Plan("move", tuple(steps)).check()


def test_too_many_steps_are_refused() -> None:
    steps = tuple(rev(f"s{n}") for n in range(100_001))
    with pytest.raises(InvalidPlan, match="there are 100001 steps, at most 100000 are possible"):
        Plan("large", steps).check()


def test_an_error_with_many_reasons_is_bounded() -> None:
    plan = Plan("p", tuple(rev(f"s{n}", undo=None) for n in range(5000)))
    with pytest.raises(InvalidPlan) as caught:
        plan.check()
    assert len(caught.value.reasons) == MAX_REASONS
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).endswith("- and 980 more")


def test_the_error_is_an_invalid_input_and_survives_pickling() -> None:
    error = InvalidPlan(plan="p\x1b", reasons=["one", "two\n"])
    assert str(error) == "plan p\\x1b is not valid:\n- one\n- two\\n"
    again = pickle.loads(pickle.dumps(error))
    assert again == error
    assert again.reasons == ("one", "two\n")
    assert isinstance(error, InvalidInput)
    assert str(error.renamed("plans[3]")) == "plans[3]: one; two\\n"
    assert str(InvalidPlan(plan="p", reasons=["one"])) == "plan p is not valid: one"


NAMES = [f"s{n}" for n in range(7)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    steps = []
    for n, name in enumerate(NAMES):
        after = draw(st.sets(st.sampled_from(NAMES[:n]), max_size=3)) if n else set()
        things = st.sets(st.sampled_from(["t", "u"]), max_size=1)
        before = draw(st.none() | st.none() | st.sets(st.sampled_from(NAMES), max_size=2))
        steps.append(
            rev(
                name,
                *after,
                needs=draw(things),
                undo_destroys=draw(things),
                locks=draw(st.sets(st.sampled_from(["l", "m"]), max_size=1)),
                rollback_after=None if before is None else before - {name},
            )
        )
    return Plan("p", tuple(steps))


@given(plans())
def test_the_rule_about_destroyed_things_is_the_rule(plan: Plan) -> None:
    """Compared with the closures, one pair of steps after the other."""
    run = plan.resolved()
    waits = {step.name: step.after for step in run}
    undo = undo_waits(run)
    reasons = set(reasons_against(plan))
    if any("rollbacks" in reason for reason in reasons):
        return
    reasons = {reason for reason in reasons if "both have the lock" not in reason}
    expected = set()
    for y in run:
        for x in run:
            for thing in {*y.undo_destroys} & {*x.needs}:
                if x.name != y.name and y.name not in closure(waits, [x.name]):
                    expected.add(
                        f"the undo of step {y.name} destroys {thing} and step {x.name} needs it without being"
                        f" after step {y.name}"
                    )
                if x.name != y.name and x.name not in closure(undo, [y.name]):
                    expected.add(
                        f"the undo of step {y.name} destroys {thing} before step {x.name}, which needs it, is"
                        f" undone"
                    )
    assert reasons == expected
