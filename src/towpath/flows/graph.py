"""The graph of a plan as a text tree, Mermaid, DOT or SVG, with the live states of its steps.

A picture of thousands of steps is of no use and takes long to lay out. The text of a large plan has a line
per node; the pictures are refused with the way out, which is to draw the steps around one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from towpath.errors import Described, InvalidInput
from towpath.escapes import escape
from towpath.flows.actions import action_text
from towpath.flows.ordering import closure, reverse
from towpath.flows.plan import Step, StepKind, counted, resolved_steps

MOST_DRAWN = 500
"""Steps of a drawing."""
MOST_LINES = 100
"""Nodes in the text of a large plan."""
DISTANCE = 2
"""Edges between a step and the steps that are drawn around it."""
MOST_NAMES = 5
"""Further dependencies that a line of the tree names."""


class Live(msgspec.Struct, frozen=True):
    """The state of a step when the plan is drawn: the state of its job, and that of its undo if it has begun.
    `duration`: seconds."""

    state: str
    duration: float | None = None
    undo: str | None = None


class Drawing(msgspec.Struct, frozen=True):
    """Steps in topological order with their states. `left_out`: steps of the plan that are not drawn."""

    title: str
    steps: tuple[Step, ...]
    live: Mapping[str, Live] = {}
    left_out: int = 0

    def state(self, step: Step) -> str:
        """The state in words, such as `done, 1.2 s, undo running`; empty for a plan that was not
        submitted."""
        live = self.live.get(step.name)
        if live is None:
            return ""
        words = live.state if live.duration is None else f"{live.state}, {span(live.duration)}"
        return words if live.undo is None else f"{words}, undo {live.undo}"

    @property
    def summary(self) -> str:
        counts = Counter(live.state for live in self.live.values())
        return ", ".join(f"{count:,} {state}" for state, count in counts.most_common())

    @property
    def heading(self) -> str:
        drawn = counted(len(self.steps), "step")
        if self.left_out:
            drawn = f"{len(self.steps):,} of {len(self.steps) + self.left_out:,} steps"
        return ": ".join(filter(None, [self.title, drawn])) + (f" ({self.summary})" if self.live else "")


def drawing(
    steps: Iterable[Step],
    live: Mapping[str, Live] | None = None,
    title: str = "",
    around: str | None = None,
    distance: int = DISTANCE,
) -> Drawing:
    """The drawing of a plan, or of the steps `around` one step: at most `distance` edges away, and at most
    `MOST_DRAWN`."""
    ordered = resolved_steps(steps)
    chosen = ordered
    if around is not None:
        near = _near(ordered, around, distance)
        chosen = tuple(step for step in ordered if step.name in near)
    return Drawing(title, chosen, live or {}, len(ordered) - len(chosen))


def dependency_chain(steps: Iterable[Step], name: str) -> tuple[Step, ...]:
    """The steps that a step waits for, directly or through others, each behind the steps that it waits for;
    the step itself is the last."""
    ordered = resolved_steps(steps)
    waits = {step.name: step.after for step in ordered}
    _known(waits, name)
    needed = closure(waits, [name]) | {name}
    return tuple(step for step in ordered if step.name in needed)


def _near(steps: Sequence[Step], name: str, distance: int) -> set[str]:
    waits = {step.name: step.after for step in steps}
    _known(waits, name)
    dependents = reverse(waits)
    found, edge = {name}, [name]
    for _ in range(distance):
        edge = [other for each in edge for other in (*waits[each], *dependents[each]) if other not in found]
        found.update(edge[: max(0, MOST_DRAWN - len(found))])
    return found


def _known(waits: Mapping[str, object], name: str) -> None:
    if name not in waits:
        raise InvalidInput(field="step", value=name, expected="the name of a step of the plan")


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# Text


def text(drawn: Drawing) -> str:
    """A tree in which each step is below the last of the steps that it waits for. Steps in a row are not
    indented: `↓` is the step that follows. A large plan has a line per node instead."""
    if len(drawn.steps) > MOST_DRAWN:
        return _by_node(drawn)
    place = {step.name: n for n, step in enumerate(drawn.steps)}
    children: dict[str | None, list[Step]] = {None: []}
    for step in drawn.steps:
        inside = [name for name in step.after if name in place]
        parent = max(inside, key=place.__getitem__) if inside else None
        children.setdefault(parent, []).append(step)
    lines = [escape(drawn.heading)]
    stack = _forks(children[None], "")
    while stack:
        lead, inner, step = stack.pop()
        below = children.get(step.name, [])
        lines.append(f"{lead}{_label(drawn, step, place)}")
        stack += [(f"{inner}↓ ", inner, below[0])] if len(below) == 1 else _forks(below, inner)
    return "\n".join(lines)


def _forks(steps: list[Step], inner: str) -> list[tuple[str, str, Step]]:
    """The start of the line, the start of the lines below it, and the step; the first step is the last."""
    last = len(steps) - 1
    return [
        (f"{inner}{'└─' if n == last else '├─'} ", f"{inner}{'   ' if n == last else '│  '}", step)
        for n, step in reversed(list(enumerate(steps)))
    ]


def _label(drawn: Drawing, step: Step, place: Mapping[str, int]) -> str:
    parts = [step.name]
    if step.node:
        parts.append(f"on {step.node}")
    if step.kind is not StepKind.REVERSIBLE:
        parts.append(f"({step.kind})")
    if state := drawn.state(step):
        parts.append(f"[{state}]")
    others = sorted((name for name in step.after if name in place), key=place.__getitem__)[:-1]
    if others:
        more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
        parts.append(f"also after {', '.join(others[:MOST_NAMES])}{more}")
    return escape(" ".join(parts))


def _by_node(drawn: Drawing) -> str:
    nodes: dict[str, Counter[str]] = {}
    for step in drawn.steps:
        live = drawn.live.get(step.name)
        nodes.setdefault(step.node or "gates", Counter())["planned" if live is None else live.state] += 1
    lines = [escape(drawn.heading)]
    for node, counts in sorted(nodes.items())[:MOST_LINES]:
        shown = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        lines.append(escape(f"{node}: {shown}"))
    if len(nodes) > MOST_LINES:
        lines.append(f"and {len(nodes) - MOST_LINES:,} more nodes")
    lines.append(f"A tree has at most {MOST_DRAWN} steps: draw the steps around one of them.")
    return "\n".join(lines)


# Mermaid and DOT

COLOURS = {
    "done": "#c8e6c9",
    "running": "#bbdefb",
    "failed": "#ffcdd2",
    "canceled": "#d7ccc8",
    "undone": "#ffe0b2",
    "": "#f5f5f5",
}
"""The colours of states; that of the empty state is for all others."""
_BORDERS = {StepKind.PIVOT: "#b71c1c", StepKind.GATE: "#6a1b9a"}


def colour_of(drawn: Drawing, step: Step) -> str:
    """The state that decides the colour: a key of `COLOURS`."""
    live = drawn.live.get(step.name)
    if live is None:
        return ""
    if live.undo is not None:
        return {"done": "undone", "failed": "failed"}.get(live.undo, "running")
    return live.state if live.state in COLOURS else ""


def mermaid(drawn: Drawing) -> str:
    """A Mermaid flowchart."""
    _small(drawn)
    shapes = {
        StepKind.REVERSIBLE: ('["', '"]'),
        StepKind.PIVOT: ('{{"', '"}}'),
        StepKind.FORWARD: ('[/"', '"/]'),
        StepKind.CLEANUP: ('(["', '"])'),
        StepKind.GATE: ('{"', '"}'),
    }
    lines = ["flowchart TD"]
    ids = {step.name: f"s{n}" for n, step in enumerate(drawn.steps)}
    for step in drawn.steps:
        left, right = shapes[step.kind]
        label = "<br/>".join(_in_mermaid(part) for part in _caption(drawn, step))
        lines.append(f"  {ids[step.name]}{left}{label}{right}")
    lines += [f"  {source} --> {target}" for source, target in _edges(drawn, ids)]
    for colour, fill in COLOURS.items():
        members = [ids[step.name] for step in drawn.steps if colour_of(drawn, step) == colour]
        if members and colour:
            lines.append(f"  classDef {colour} fill:{fill}")
            lines.append(f"  class {','.join(members)} {colour}")
    return "\n".join(lines) + "\n"


def _in_mermaid(label: str) -> str:
    """Every character that could end a label or begin an entity is written as its number."""
    return "".join(
        each if each.isascii() and (each.isalnum() or each in " _.,:()/-") else f"#{ord(each)};"
        for each in escape(label)
    )


def dot(drawn: Drawing) -> str:
    """A graph for Graphviz."""
    _small(drawn)
    shapes = {StepKind.PIVOT: "hexagon", StepKind.GATE: "diamond", StepKind.CLEANUP: "ellipse"}
    lines = [
        f"digraph {_in_dot(drawn.title or 'plan')} {{",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif"];',
    ]
    ids = {step.name: f"s{n}" for n, step in enumerate(drawn.steps)}
    for step in drawn.steps:
        label = _in_dot("\n".join(_caption(drawn, step)))
        fields = [f"label={label}", f'fillcolor="{COLOURS[colour_of(drawn, step)]}"']
        if step.kind in shapes:
            fields.append(f"shape={shapes[step.kind]}")
        if step.action is not None:
            fields.append(f"tooltip={_in_dot(action_text(step.action))}")
        lines.append(f"  {ids[step.name]} [{', '.join(fields)}];")
    lines += [f"  {source} -> {target};" for source, target in _edges(drawn, ids)]
    return "\n".join([*lines, "}"]) + "\n"


def _in_dot(label: str) -> str:
    quoted = escape(label, lines=True).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'


def _caption(drawn: Drawing, step: Step) -> list[str]:
    """The lines of a box."""
    where = [step.node] if step.node else []
    if step.kind is not StepKind.REVERSIBLE:
        where.append(str(step.kind))
    return [line for line in (step.name, ", ".join(where), drawn.state(step)) if line]


def _edges(drawn: Drawing, ids: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(ids[name], ids[step.name]) for step in drawn.steps for name in step.after if name in ids]


def _small(drawn: Drawing) -> None:
    if len(drawn.steps) > MOST_DRAWN:
        expected = f"at most {MOST_DRAWN} steps in a picture: draw the steps around one of them"
        raise InvalidInput(field="plan", value=Described(f"{len(drawn.steps):,} steps"), expected=expected)


# SVG

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, HEAD = 200, 58, 24, 44, 20, 34
"""Pixels of a box, of the gaps between boxes, of the margin and of the title."""
PER_ROW = 12
_LETTERS = 28


def svg(drawn: Drawing) -> str:
    """A picture of its own: each step is below the steps that it waits for."""
    _small(drawn)
    rows = _rows(drawn)
    widest = max((len(row) for row in rows), default=0)
    width = max(2 * MARGIN + widest * (WIDTH + GAP_X) - GAP_X, 400)
    height = 2 * MARGIN + HEAD + len(rows) * (HEIGHT + GAP_Y)
    corner: dict[str, tuple[float, float]] = {}
    for n, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        for m, step in enumerate(row):
            corner[step.name] = (left + m * (WIDTH + GAP_X), MARGIN + HEAD + n * (HEIGHT + GAP_Y))
    ids = {step.name: step.name for step in drawn.steps}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#616161"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 14}" font-size="15">{_in_xml(drawn.heading)}</text>',
            *(_arrow(corner[source], corner[target]) for source, target in _edges(drawn, ids)),
            *(_box(drawn, step, corner[step.name]) for step in drawn.steps),
            "</svg>\n",
        ]
    )


def _rows(drawn: Drawing) -> list[list[Step]]:
    """The steps in rows, by the longest way to them; in a row by the places of the steps that they wait for.
    A long row is continued below."""
    level: dict[str, int] = {}
    layers: list[list[Step]] = []
    for step in drawn.steps:
        level[step.name] = 1 + max((level[name] for name in step.after if name in level), default=-1)
        if level[step.name] == len(layers):
            layers.append([])
        layers[level[step.name]].append(step)
    place: dict[str, float] = {}
    rows = []
    for layer in layers:
        above = {step.name: [place[name] for name in step.after if name in place] for step in layer}
        layer.sort(key=lambda step: sum(above[step.name]) / max(1, len(above[step.name])))
        place |= {step.name: (n + 0.5) / len(layer) for n, step in enumerate(layer)}
        rows += [layer[n : n + PER_ROW] for n in range(0, len(layer), PER_ROW)]
    return rows


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = (source[0] + WIDTH / 2, source[1] + HEIGHT), (target[0] + WIDTH / 2, target[1])
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}" fill="none"'
        ' stroke="#616161" marker-end="url(#tip)"/>'
    )


def _box(drawn: Drawing, step: Step, corner: tuple[float, float]) -> str:
    x, y = corner
    dashes = ' stroke-dasharray="5 3"' if step.kind in (StepKind.CLEANUP, StepKind.GATE) else ""
    lines = [
        f'<text x="{x + 10:g}" y="{y + 18 + 16 * n:g}"{bold}>{_in_xml(_short(line))}</text>'
        for n, line in enumerate(_caption(drawn, step))
        for bold in ([' font-weight="bold"'] if n == 0 else [""])
    ]
    title = step.name if step.action is None else f"{step.name}: {action_text(step.action)}"
    return (
        f"<g><title>{_in_xml(title)}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
        f' fill="{COLOURS[colour_of(drawn, step)]}" stroke="{_BORDERS.get(step.kind, "#616161")}"'
        f' stroke-width="{2 if step.kind in _BORDERS else 1}"{dashes}/>{"".join(lines)}</g>'
    )


def _short(line: str) -> str:
    return line if len(line) <= _LETTERS else f"{line[: _LETTERS - 1]}…"


_XML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


def _in_xml(content: str) -> str:
    return escape(content).translate(_XML)


FORMS: Mapping[str, Callable[[Drawing], str]] = {"text": text, "mermaid": mermaid, "dot": dot, "svg": svg}
"""The forms of a graph by name."""
