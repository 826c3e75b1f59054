"""Graphs of plans: the tree by hand, the pictures by their structure, hostile text, large plans."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr

from towpath.errors import InvalidInput, InvalidPlan
from towpath.flows.actions import Sql
from towpath.flows.graph import (
    FORMS,
    MOST_DRAWN,
    Drawing,
    Live,
    dependency_chain,
    dot,
    drawing,
    mermaid,
    span,
    svg,
    text,
)
from towpath.flows.plan import Step

HOSTILE = 'x"];\x1b[2J\u202e</text><script>alert(1)</script>&#quot;--\\"\n}'
NAMESPACE = "{http://www.w3.org/2000/svg}"


def step(name: str, *after: str, **more: Any) -> Step:
    return Step(name, **{"node": "n1", "action": Sql(f"do {name}"), "undo": Sql("u"), "after": after, **more})


STEPS = [
    step("prepare"),
    step("copy1", "create", node="n2"),
    step("create", "prepare"),
    step("copy2", "create"),
    Step("ask", kind="gate", after=("copy1", "copy2")),  # type: ignore[arg-type]
    step("switch", "ask", undo=None, kind="pivot"),
    step("drop1", "switch", undo=None, kind="forward"),
    step("drop2", "switch", undo=None, kind="forward"),
    step("tidy", undo=None, kind="cleanup"),
]
LIVE = {
    "prepare": Live("done", 1.23),
    "create": Live("done", 0.2, undo="running"),
    "copy1": Live("running"),
    "copy2": Live("failed", 75),
    **{name: Live("blocked") for name in ("ask", "switch", "drop1", "drop2", "tidy")},
}
EDGES = {
    ("prepare", "create"),
    ("create", "copy1"),
    ("create", "copy2"),
    ("copy1", "ask"),
    ("copy2", "ask"),
    ("ask", "switch"),
    ("switch", "drop1"),
    ("switch", "drop2"),
}


def test_the_tree() -> None:
    assert text(drawing(STEPS, LIVE, "move-1")).splitlines() == [
        "move-1: 9 steps (5 blocked, 2 done, 1 running, 1 failed)",
        "├─ prepare on n1 [done, 1.2 s]",
        "│  ↓ create on n1 [done, 200 ms, undo running]",
        "│  ├─ copy1 on n2 [running]",
        "│  └─ copy2 on n1 [failed, 1 min 15 s]",
        "│     ↓ ask (gate) [blocked] also after copy1",
        "│     ↓ switch on n1 (pivot) [blocked]",
        "│     ├─ drop1 on n1 (forward) [blocked]",
        "│     └─ drop2 on n1 (forward) [blocked]",
        "└─ tidy on n1 (cleanup) [blocked]",
    ]


def test_a_plan_that_was_not_submitted_has_no_states() -> None:
    assert text(drawing(STEPS[:1])).splitlines() == ["1 step", "└─ prepare on n1"]


def test_steps_in_a_row_are_not_indented() -> None:
    lines = text(
        drawing([step(f"s{n}", *([f"s{n - 1}"] if n else [])) for n in range(MOST_DRAWN)])
    ).splitlines()
    assert max(map(len, lines)) < 20
    assert lines[3] == "   ↓ s2 on n1"


def test_a_step_after_many_names_some() -> None:
    line = text(drawing([*(step(f"s{n}") for n in range(9)), step("z", *(f"s{n}" for n in range(9)))]))
    assert "z on n1 also after s0, s1, s2, s3, s4 and 3 more" in line


def test_mermaid() -> None:
    lines = mermaid(drawing(STEPS, LIVE, "move-1")).splitlines()
    assert lines[0] == "flowchart TD"
    names = {found[1]: found[2] for line in lines if (found := re.match(r'  (s\d+)\W+"(\w+)<br/>', line))}
    arrows = [re.fullmatch(r"  (s\d+) --> (s\d+)", line) for line in lines]
    assert {(names[found[1]], names[found[2]]) for found in arrows if found} == EDGES
    assert '  s0["prepare<br/>n1<br/>done, 1.2 s"]' in lines
    assert "  class s0 done" in lines
    assert [line for line in lines if "switch" in line] == ['  s5{{"switch<br/>n1, pivot<br/>blocked"}}']


def test_dot() -> None:
    lines = dot(drawing(STEPS, LIVE, "move-1")).splitlines()
    names = {found[1]: found[2] for line in lines if (found := re.match(r'  (s\d+) \[label="(\w+)\\n', line))}
    arrows = [re.fullmatch(r"  (s\d+) -> (s\d+);", line) for line in lines]
    assert {(names[found[1]], names[found[2]]) for found in arrows if found} == EDGES
    assert lines[0] == 'digraph "move-1" {'
    assert lines[-1] == "}"
    assert '  s0 [label="prepare\\nn1\\ndone, 1.2 s", fillcolor="#c8e6c9", tooltip="do prepare"];' in lines


Box = tuple[float, float, float, float]


def boxes(picture: str) -> dict[str, Box]:
    """The name of each step with left, top, right and bottom of its box."""
    found: dict[str, Box] = {}
    for group in ET.fromstring(picture).iter(f"{NAMESPACE}g"):
        rect, title = group.find(f"{NAMESPACE}rect"), group.find(f"{NAMESPACE}title")
        assert rect is not None
        assert title is not None
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found[(title.text or "").partition(":")[0]] = (x, y, x + width, y + height)
    return found


def test_svg_draws_each_step_below_the_steps_that_it_waits_for() -> None:
    picture = svg(drawing(STEPS, LIVE, "move-1"))
    found = boxes(picture)
    assert found.keys() == {each.name for each in STEPS}
    assert all(found[source][3] < found[target][1] for source, target in EDGES)
    paths = [path for path in ET.fromstring(picture).iter(f"{NAMESPACE}path") if "marker-end" in path.attrib]
    assert len(paths) == len(EDGES)
    assert "done, 1.2 s" in picture
    assert "#ffcdd2" in picture


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    names = [f"s{n}" for n in range(draw(st.integers(1, 40)))]
    return [
        step(name, *(draw(st.sets(st.sampled_from(names[:n]), max_size=4)) if n else ()))
        for n, name in enumerate(names)
    ]


@given(graphs())
def test_boxes_never_overlap_and_every_form_has_every_step(steps: list[Step]) -> None:
    drawn = drawing(steps)
    picture = svg(drawn)
    found = boxes(picture)
    canvas = ET.fromstring(picture)
    assert found.keys() == {each.name for each in steps}
    for name, (left, top, right, bottom) in found.items():
        assert left >= 0
        assert right <= float(canvas.attrib["width"])
        assert bottom <= float(canvas.attrib["height"])
        for other, (left2, top2, right2, bottom2) in found.items():
            assert name == other or right < left2 or right2 < left or bottom < top2 or bottom2 < top
    for each in steps:
        assert all(found[source][3] < found[each.name][1] for source in each.after)
    shown = [re.sub(r"^[│├└─↓ ]+", "", line).split()[0] for line in text(drawn).splitlines()[1:]]
    assert sorted(shown) == sorted(each.name for each in steps)
    assert mermaid(drawn).count(" --> ") == dot(drawn).count(" -> ") == sum(len(each.after) for each in steps)


def hostile() -> Drawing:
    """Names of steps are checked, but a drawing must not rely on it."""
    bad = step("a")
    force_setattr(bad, "name", HOSTILE)
    force_setattr(bad, "node", HOSTILE)
    force_setattr(bad, "action", Sql(HOSTILE))
    return Drawing(HOSTILE, (bad, step("b")), {HOSTILE: Live(HOSTILE, undo=HOSTILE)})


@pytest.mark.parametrize("form", FORMS)
def test_hostile_text_is_escaped(form: str) -> None:
    found = FORMS[form](hostile())
    assert "\x1b" not in found
    assert "\u202e" not in found
    plain = FORMS[form](drawing([step("a"), step("b")], {"a": Live("x", undo="y")}, "title"))
    assert len(found.splitlines()) == len(plain.splitlines())


def test_hostile_text_stays_inside_its_quotes() -> None:
    for line in mermaid(hostile()).splitlines()[1:3]:
        assert re.fullmatch(r'  s\d+\["[A-Za-z0-9 _.,:()/#;<br/>-]*"\]', line)
        assert "script>" not in line.replace("<br/>", "")
    for line in dot(hostile()).splitlines():
        unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "Q", line)
        assert '"' not in unquoted
        assert "script" not in unquoted
    picture = ET.fromstring(svg(hostile()))
    assert {element.tag.removeprefix(NAMESPACE) for element in picture.iter()} <= {
        *("svg", "defs", "marker", "path", "rect", "text", "g", "title")
    }


def test_the_dependency_chain_of_a_step() -> None:
    assert [each.name for each in dependency_chain(STEPS, "ask")] == [
        "prepare",
        "create",
        "copy1",
        "copy2",
        "ask",
    ]
    assert [each.name for each in dependency_chain(STEPS, "tidy")] == ["tidy"]
    locked = [step("a", locks=["l"]), step("b", locks=["l"])]
    assert [each.name for each in dependency_chain(locked, "b")] == ["a", "b"]


@pytest.mark.parametrize("call", [dependency_chain, lambda steps, name: drawing(steps, around=name)])
def test_an_unknown_step_is_refused(call: Any) -> None:
    with pytest.raises(InvalidInput, match="the name of a step"):
        call(STEPS, "nothing")
    with pytest.raises(InvalidPlan, match="cycle"):
        call([step("a", "b"), step("b", "a")], "a")


def test_the_steps_around_a_step() -> None:
    drawn = drawing(STEPS, LIVE, "move-1", around="copy1", distance=1)
    assert [each.name for each in drawn.steps] == ["create", "copy1", "ask"]
    assert drawn.heading.startswith("move-1: 3 of 9 steps")
    assert [each.name for each in drawing(STEPS, around="copy1").steps] == [
        *("prepare", "create", "copy1", "copy2", "ask", "switch"),
    ]


def test_a_large_plan_is_drawn_by_node_or_around_a_step() -> None:
    steps = [step(f"s{n}", *([f"s{n - 50}"] if n >= 50 else []), node=f"n{n % 200}") for n in range(20_000)]
    live = {each.name: Live("done" if n < 400 else "blocked") for n, each in enumerate(steps)}
    began = time.process_time()
    drawn = drawing(steps, live, "large")
    lines = text(drawn).splitlines()
    assert lines[0] == "large: 20,000 steps (19,600 blocked, 400 done)"
    assert lines[1] == "n0: 98 blocked, 2 done"
    assert lines[-2:] == [
        "and 100 more nodes",
        "A tree has at most 500 steps: draw the steps around one of them.",
    ]
    for picture in (mermaid, dot, svg):
        with pytest.raises(InvalidInput, match="20,000 steps; it must be at most 500 steps in a picture"):
            picture(drawn)
    near = drawing(steps, live, "large", around="s5000")
    assert [each.name for each in near.steps] == ["s4900", "s4950", "s5000", "s5050", "s5100"]
    assert len(svg(near)) < 10_000
    hub = [step("hub"), *(step(f"s{n}", "hub") for n in range(5000))]
    assert len(drawing(hub, around="s1").steps) == MOST_DRAWN
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 ms"), (0.34, "340 ms"), (1, "1.0 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (7260, "2 h 1 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert span(seconds) == shown
