"""Plans as data: equality, hash, JSON, printing, the order derived from locks."""

from __future__ import annotations

import hashlib
import random
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath import Exponential
from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.actions import Shell, Sql
from towpath.flows.plan import Plan, Step, StepKind, StepRetry

A, B, C = Sql("a"), Sql("b"), Sql("c")


def step(name: str, **fields: Any) -> Step:
    return Step(name, **{"node": "n1", "action": A, "undo": B, **fields})


PLAN = Plan(
    "move",
    (
        step("copy", timeout=5, retry=StepRetry(attempts=2)),
        Step("ask", kind=StepKind.GATE, after=("copy",), expires=timedelta(hours=1)),
        step("switch", undo=None, kind=StepKind.PIVOT, after=("ask", "copy"), check=Shell(("true",))),
        step("drop", node="n2", undo=None, kind=StepKind.FORWARD, after=("switch",), locks=("b", "a", "b")),
        step("tidy", undo=None, kind=StepKind.CLEANUP),
    ),
    description="moves a table",
)


def test_the_example_is_valid() -> None:
    PLAN.check()
    PLAN.check(nodes=["n1", "n2"])
    assert PLAN.nodes == ("n1", "n2")
    assert PLAN.locks == ("a", "b")
    assert PLAN.pivot == PLAN.by_name()["switch"]


def test_a_plan_is_the_same_after_json() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert again.content_hash == PLAN.content_hash
    assert again.to_json() == PLAN.to_json()


def test_the_hash_is_a_promise() -> None:
    """A saved or approved plan is found again by its hash, also by another release."""
    plan = Plan("p", (step("one"), step("two", after=("one",))))
    assert plan.to_json() == (
        b'{"name":"p","steps":['
        b'{"action":{"run":"sql","statement":"a"},"name":"one","node":"n1",'
        b'"undo":{"run":"sql","statement":"b"}},'
        b'{"action":{"run":"sql","statement":"a"},"after":["one"],"name":"two","node":"n1",'
        b'"undo":{"run":"sql","statement":"b"}}]}'
    )
    assert plan.content_hash == hashlib.sha256(plan.to_json()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        step("one", timeout=timedelta(seconds=3), retry=StepRetry(), after=["b", "a", "a"], description=""),
        step("one", timeout=3.0, kind="reversible", after=(step("a"), step("b")), locks=[], needs=set()),
        step("one", timeout=3, retry=StepRetry(attempts=5, backoff=Exponential(base=1, cap=60))),
    ],
)
def test_equal_steps_have_equal_json(other: Step) -> None:
    plain = step("one", timeout=3.0, after=other.after)
    assert other == plain
    assert msgspec.json.encode(other) == msgspec.json.encode(plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "n2"},
        {"action": C},
        {"undo": C},
        {"check": A},
        {"after": ["zero"]},
        {"kind": "forward"},
        {"timeout": 4},
        {"retry": StepRetry(attempts=6)},
        {"retry": StepRetry(check_attempts=6)},
        {"locks": ["l"]},
        {"rollback_after": []},
        {"rollback_after": ["zero"]},
        {"needs": ["r"]},
        {"undo_destroys": ["r"]},
        {"undo_retry": StepRetry()},
        {"expires": 4},
        {"description": "text"},
    ],
    ids=str,
)
def test_every_field_changes_the_hash(fields: dict[str, Any]) -> None:
    assert Plan("p", (step("one", **fields),)).content_hash != Plan("p", (step("one"),)).content_hash


NAMES = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.builds(
    Step,
    name=NAMES,
    node=st.sampled_from(["", "n1", "n2"]),
    action=st.sampled_from([None, A, Shell(("ls",))]),
    undo=st.sampled_from([None, B]),
    after=st.lists(NAMES, max_size=3),
    kind=st.sampled_from([*StepKind, *map(str, StepKind)]),
    timeout=st.sampled_from([None, 1, 1.0, timedelta(seconds=1), 2]),
    retry=st.sampled_from([StepRetry(), StepRetry(5), StepRetry(attempts=3)]),
    locks=st.lists(NAMES, max_size=2),
    rollback_after=st.none() | st.lists(NAMES, max_size=2),
)
PLANS = st.builds(Plan, name=NAMES, steps=st.lists(STEPS, max_size=4))


@given(PLANS, PLANS)
def test_plans_are_equal_if_and_only_if_their_hashes_are(one: Plan, two: Plan) -> None:
    assert (one == two) == (one.content_hash == two.content_hash)
    assert Plan.from_json(one.to_json()) == one
    assert Plan.from_json(msgspec.json.format(one.to_json(), indent=2)).content_hash == one.content_hash


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "-a"}, "name"),
        ({"name": "a" * 101}, "name"),
        ({"node": "a b"}, "node"),
        ({"node": None}, "node"),
        ({"action": "DROP TABLE a"}, "action"),
        ({"undo": "DROP TABLE a"}, "undo"),
        ({"check": 3}, "check"),
        ({"after": "copy"}, "after"),
        ({"after": ["a b"]}, "after"),
        ({"after": [3]}, "after"),
        ({"kind": "maybe"}, "kind"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"expires": 0}, "expires"),
        ({"retry": 3}, "retry"),
        ({"retry": None}, "retry"),
        ({"undo_retry": 3}, "undo_retry"),
        ({"locks": ["a\0"]}, "locks"),
        ({"needs": [""]}, "needs"),
        ({"undo_destroys": "table"}, "undo_destroys"),
        ({"rollback_after": ["/"]}, "rollback_after"),
        ({"description": "a" * 1001}, "description"),
    ],
    ids=str,
)
def test_a_wrong_value_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        step(**{"name": "one", **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `name`"),
        (b'{"name": "p", "steps": [{"name": "a", "rolback": 1}]}', "unknown field `rolback`"),
        (b'{"name": "p", "steps": [{"name": "a/b"}]}', r"letters.*\$.steps\[0\]"),
        (b'{"name": "p", "steps": [{"name": "a", "action": {"run": "rm"}}]}', "Invalid value 'rm'"),
    ],
)
def test_json_that_is_not_a_plan_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Plan.from_json(content)


def test_a_plan_is_printed() -> None:
    text = str(PLAN)
    assert text.splitlines()[0].startswith("plan move: 5 steps on 2 nodes, ")
    assert "  copy on n1: a; undo: b" in text.splitlines()
    assert "  ask (gate) after copy" in text.splitlines()
    assert "  switch on n1 (pivot) after ask, copy: a" in text.splitlines()


def test_a_long_plan_is_printed_in_part() -> None:
    text = str(Plan("p", tuple(step(f"s{n}", after=[f"s{m}" for m in range(n)][:30]) for n in range(300))))
    assert len(text.splitlines()) == 202
    assert "and 100 more steps" in text
    assert " and 20 more: a" in text


def test_hostile_text_is_escaped() -> None:
    text = str(
        Plan("p", (step("one", action=Sql("a\x1b[2J\u202eb"), description="c\nd"),), description="\x07")
    )
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\x07" not in text


def after(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {each.name: each.after for each in plan.resolved()}


def test_steps_with_a_common_lock_are_ordered() -> None:
    plan = Plan("p", tuple(step(name, locks=["l"]) for name in "cab"))
    assert after(plan) == {"c": (), "a": ("c",), "b": ("a",)}
    plan = Plan("p", (step("a", after=["b"], locks=["l"]), step("b", locks=["l"]), step("c", locks=["l"])))
    assert after(plan) == {"b": (), "a": ("b",), "c": ("a",)}


def test_an_order_by_locks_has_no_cycle() -> None:
    """Each lock alone would allow both orders of b and c; the derived edges follow one order of all steps."""
    plan = Plan(
        "p",
        (
            step("a", locks=["x"]),
            step("b", locks=["x", "y"], after=["d"]),
            step("c", locks=["y"]),
            step("d", locks=["y", "x"]),
        ),
    )
    assert after(plan) == {"a": (), "c": (), "d": ("a", "c"), "b": ("d",)}


def test_cleanup_steps_come_last_and_wait_only_for_cleanup_steps() -> None:
    clean = {"undo": None, "kind": "cleanup"}
    plan = Plan(
        "p",
        (
            step("z", **clean, after=["a", "y"], locks=["l"]),
            step("y", **clean, after=["b"], locks=["l"]),
            step("a", locks=["l"]),
            step("b", locks=["l"]),
        ),
    )
    plan.check()
    assert after(plan) == {"a": (), "b": ("a",), "y": (), "z": ("y",)}
    assert [each.name for each in plan.resolved()] == ["a", "b", "y", "z"]


def test_a_cycle_is_not_resolved() -> None:
    with pytest.raises(InvalidPlan, match="cycle"):
        Plan("p", (step("a", after=["b"]), step("b", after=["a"]))).resolved()


def test_a_large_plan_takes_seconds() -> None:
    chance = random.Random(4)
    began = time.process_time()
    large = tuple(
        step(
            f"s{n}",
            node=f"n{n % 50}",
            after={f"s{chance.randrange(max(0, n - 500), n)}" for _ in range(min(3, n))} | {f"s{n - n % 10}"}
            if n % 10
            else (),
            needs=[f"t{n // 10}"] if n % 10 else (),
            undo_destroys=() if n % 10 else [f"t{n // 10}"],
            locks=[f"l{n % 1000}"] if n % 5 == 0 else (),
        )
        for n in range(20_000)
    )
    plan = Plan("large", large)
    plan.check()
    assert len(plan.resolved()) == 20_000
    assert Plan.from_json(plan.to_json()).content_hash == plan.content_hash
    assert time.process_time() - began < 16
