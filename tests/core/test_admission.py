"""Admission: random graphs, and the small cases that are easy to get wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core.admission import admit
from towpath.core.commands import GroupState, Placed
from towpath.core.facts import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyHolder,
    Known,
    Origin,
    Room,
    key_of,
    namespace,
    node,
    walks,
)
from towpath.core.job import FINISHED, After, Key, KeyPolicy, Reason, Spec, State
from towpath.errors import DependencyCycle, GroupClosed, QueueFull, UnknownDependency, UnknownGroup

NOW = 10**9
Edges = dict[int, list[tuple[int, bool]]]


@st.composite
def dags(draw: st.DrawFn) -> Edges:
    """node -> [(an earlier node, run_anyway)]"""
    size = draw(st.integers(1, 12))
    edges = st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=4)
    return {n: [(m, anyway) for m, anyway in draw(edges) if m < n] for n in range(size)}


def specs_of(graph: Edges, order: list[int]) -> list[Spec]:
    after = {n: tuple(After(f"n{m}", anyway) for m, anyway in deps) for n, deps in graph.items()}
    return [Spec(id=f"n{n}", queue="q", after=after[n]) for n in order if n in graph]


def check(admission: Admission, specs: list[Spec]) -> None:
    """Properties of every admission."""
    seqs = [job.seq for job in admission.jobs]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(admission.answers) == len(specs)
    assert len(set(admission.edges)) == len(admission.edges)
    for job in admission.jobs:
        into = [edge for edge in admission.edges if edge[1] == job.seq]
        gates = [gate for gate in admission.gates if gate[1] == job.seq]
        if job.state in FINISHED:
            assert (job.waits, job.finished_at) == (0, NOW)
        else:
            assert (job.state is State.BLOCKED) == (job.waits > 0)
            assert job.waits == len(into) + len(gates)


@given(dags(), st.permutations(range(12)))
def test_any_order_of_a_dag_is_admitted(graph: Edges, order: list[int]) -> None:
    specs = specs_of(graph, order)
    admission = admit(specs, AppendFacts(), NOW, 1)
    check(admission, specs)
    assert [job.id for job in admission.jobs] == [spec.id for spec in specs]
    by_id = {job.id: job for job in admission.jobs}
    for n, deps in graph.items():
        assert by_id[f"n{n}"].waits == len({m for m, _ in deps})


@given(dags(), st.permutations(range(12)), st.sampled_from([State.DONE, State.FAILED, State.CANCELED]))
def test_the_end_of_a_root_runs_through_the_graph(graph: Edges, order: list[int], root: State) -> None:
    """Node 0 exists and is finished: new jobs that need its success, and their dependents, get its state."""
    specs = [spec for spec in specs_of(graph, order) if spec.id != "n0"]
    known = {"n0": Known("n0", 99, root)}
    if not specs:
        return
    admission = admit(specs, AppendFacts(known=known), NOW, 1)
    check_states = {job.id: job for job in admission.jobs}
    lost = {0} if root is not State.DONE else set()
    for n in sorted(graph):
        if n and any(m in lost and not _anyway(graph[n], m) for m, _ in graph[n]):
            lost.add(n)
    for n in graph:
        if n:
            job = check_states[f"n{n}"]
            assert (job.state in FINISHED) == (n in lost)
            if n in lost:
                assert (job.state, job.reason) == (root, Reason.DEPENDENCY)


def _anyway(deps: list[tuple[int, bool]], m: int) -> bool:
    """A dependency that needs success overrides one that does not."""
    return all(anyway for other, anyway in deps if other == m)


@given(dags(), st.permutations(range(12)), st.data())
def test_a_back_edge_is_a_cycle(graph: Edges, order: list[int], data: st.DataObject) -> None:
    chain = {n: [*deps, *([(n - 1, False)] if n else [])] for n, deps in graph.items()}
    low = data.draw(st.integers(0, len(chain) - 1))
    high = data.draw(st.integers(low, len(chain) - 1))
    chain[low].append((high, data.draw(st.booleans())))
    with pytest.raises(DependencyCycle) as caught:
        admit(specs_of(chain, order), AppendFacts(), NOW, 1)
    ids = caught.value.details["ids"]
    assert len(set(ids)) == len(ids)
    needs = {f"n{n}": {f"n{m}" for m, _ in deps} for n, deps in chain.items()}
    assert all(after in needs[id] for id, after in zip(ids, (*ids[1:], ids[0]), strict=True))


def test_a_long_chain_needs_no_recursion() -> None:
    specs = [Spec(id=f"n{n}", queue="q", after=(After(f"n{n + 1}"),)) for n in range(20_000)]
    admission = admit([*specs, Spec(id="n20000", queue="q")], AppendFacts(), NOW, 1)
    assert admission.jobs[-1].state is State.READY
    assert len(admission.edges) == 20_000


def test_unknown_ids_are_all_named() -> None:
    specs = [
        Spec(id="a", queue="q", after=(After("y"), After("x", group=True), After("b"))),
        Spec(id="b", queue="q"),
    ]
    with pytest.raises(UnknownDependency) as caught:
        admit(specs, AppendFacts(), NOW, 1)
    assert caught.value.details == {"ids": ("group x", "y")}


def test_the_plain_way_and_the_long_way_agree() -> None:
    specs = [Spec(id=f"n{n}", queue="q", priority=n, part="p", payload=b"x" * n, delay=n) for n in range(5)]
    plain = admit(specs, AppendFacts(), NOW, 7)
    long = admit(specs, AppendFacts(known={"other": Known("other", 1, State.DONE)}), NOW, 7)
    assert plain.jobs == long.jobs
    assert plain.answers == long.answers


def test_origin_is_inherited_and_never_refused_for_room() -> None:
    full = AppendFacts(rooms={"q": Room(capacity=0)})
    specs = [Spec(id="a", queue="q"), Spec(id="b", queue="q", parent="p", correlation_id="d")]
    with pytest.raises(QueueFull):
        admit(specs, full, NOW, 1)
    a, b = admit(specs, full, NOW, 1, Origin(parent="o", correlation_id="c")).jobs
    assert (a.parent, a.correlation_id, b.parent, b.correlation_id) == ("o", "c", "p", "d")


@pytest.mark.parametrize("state", [GroupState.SEALED, GroupState.ABORTING, GroupState.CLOSED])
def test_a_closed_door(state: GroupState) -> None:
    facts = AppendFacts(groups={"g": GroupFact(state, State.DONE if state is GroupState.CLOSED else None)})
    specs = [Spec(id="a", queue="q", group="g")]
    with pytest.raises(GroupClosed):
        admit(specs, facts, NOW, 1)
    if state is GroupState.CLOSED:
        with pytest.raises(GroupClosed):
            admit(specs, facts, NOW, 1, Origin(group="g"))
    else:
        (job,) = admit(specs, facts, NOW, 1, Origin(group="g")).jobs
        assert job.state is (State.READY if state is GroupState.SEALED else State.CANCELED)
    with pytest.raises(UnknownGroup):
        admit(specs, AppendFacts(), NOW, 1)


def holder(state: State | None, until: int = 0, runner: int | None = None) -> AppendFacts:
    known = {} if state is None else {"old": Known("old", 3, state)}
    return AppendFacts(known=known, holders={("", "k"): KeyHolder("old", 3, state, until, runner)})


@pytest.mark.parametrize(
    ("state", "until", "held"),
    [
        (State.READY, 0, True),
        (State.RUNNING, 0, True),
        (State.BLOCKED, NOW - 5, True),
        (State.DONE, 0, False),
        (State.DONE, NOW, False),
        (State.DONE, NOW + 1, True),
        (None, NOW + 1, True),
        (None, 0, False),
    ],
)
def test_unique(state: State | None, until: int, held: bool) -> None:
    admission = admit([Spec(id="new", queue="q", key=Key("k", window=9))], holder(state, until), NOW, 5)
    if held:
        assert admission.answers == (Placed("old", 3),)
        assert (admission.jobs, admission.aliases, admission.keys) == ([], [("new", "old")], [])
    else:
        (taken,) = admission.keys
        assert (taken.id, taken.seq, taken.until, taken.runner) == ("new", 5, NOW + 9, None)


def test_replace_waiting_running_and_both() -> None:
    specs = [Spec(id="new", queue="q", key=Key("k", KeyPolicy.REPLACE))]
    waiting = admit(specs, holder(State.READY), NOW, 5)
    assert (waiting.superseded, waiting.handed, waiting.asked, waiting.edges) == ([3], [(3, 5)], [], [])
    running = admit(specs, holder(State.RUNNING), NOW, 5)
    assert (running.superseded, running.handed, running.asked) == ([], [(3, 5)], [3])
    assert running.edges == [(3, 5, True)]
    both = admit(specs, holder(State.BLOCKED, runner=1), NOW, 5)
    assert (both.superseded, both.handed, both.asked, both.edges) == ([3], [(3, 5)], [], [(1, 5, True)])
    assert both.keys[0].runner == 1


def test_an_edge_is_never_given_twice() -> None:
    """The newer job already depends on the running job that it replaces: one edge, one wait."""
    specs = [Spec(id="new", queue="q", key=Key("k", KeyPolicy.REPLACE), after=(After("old"),))]
    check_edges = admit(specs, holder(State.RUNNING), NOW, 5)
    pairs = [(src, dst) for src, dst, _ in check_edges.edges]
    assert len(pairs) == len(set(pairs))
    assert check_edges.jobs[0].waits == len(pairs)


def test_walks_only_where_a_cycle_is_possible() -> None:
    key = Key("k", KeyPolicy.REPLACE)
    holders = {("", "k"): KeyHolder("old", 3, State.READY, 0)}
    assert walks([Spec(id="a", queue="q", group="g")], holders) == set()
    assert walks([Spec(id="a", queue="q", key=key)], holders) == set()
    assert walks([Spec(id="a", queue="q", group="g", key=Key("k"))], holders) == {node("g")}
    specs = [Spec(id="a", queue="q", group="g", key=key, after=(After("x"),))]
    assert walks(specs, holders) == {node("g"), "old"}


def test_namespaces() -> None:
    assert [namespace(queue) for queue in ("q", "a/b", "a/b/c", "/x")] == ["", "a", "a", ""]
    assert key_of(Spec(id="a", queue="n/q", key=Key("k"))) == ("n", "k")
    assert key_of(Spec(id="a", queue="n/q", key=Key("k", KeyPolicy.SERIAL))) is None
