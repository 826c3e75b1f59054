"""The placement planner: balance, distinct nodes, fewest moves, purity, and lost nodes."""

from __future__ import annotations

import copy
import time
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from towpath.apps.shards.placement import Copy, Placement, balanced, changes, initial, loads
from towpath.errors import InvalidInput


def named(count: int, start: int = 0) -> list[str]:
    return [f"n{number:03}" for number in range(start, start + count)]


def spread(values: list[int]) -> int:
    return max(values) - min(values)


def check(placement: Placement, nodes: list[str], rf: int) -> None:
    """Each shard on exactly `rf` different nodes of these, and loads that differ by at most one."""
    assert all(len(shard) == len({*shard}) == rf for shard in placement)
    assert all({*shard} <= {*nodes} for shard in placement)
    assert spread(list(loads(placement, nodes).values())) <= 1


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], Placement, int]:
    nodes = named(draw(st.integers(1, 12)))
    rf = draw(st.integers(1, len(nodes)))
    return nodes, initial(nodes, draw(st.integers(1, 79)), rf), rf


@st.composite
def uneven(draw: st.DrawFn) -> tuple[list[str], Placement, int]:
    """A placement that no planner made: any nodes, in any order."""
    nodes = named(draw(st.integers(1, 8)))
    rf = draw(st.integers(1, len(nodes)))
    orders = draw(st.lists(st.permutations(nodes), min_size=1, max_size=40))
    return nodes, tuple(tuple(order[:rf]) for order in orders), rf


@given(tables())
def test_a_new_table_is_balanced_by_copies_and_by_primaries(table: tuple[list[str], Placement, int]) -> None:
    nodes, placement, rf = table
    check(placement, nodes, rf)
    primaries = Counter(shard[0] for shard in placement)
    assert spread([primaries[node] for node in nodes]) <= 1
    assert initial(reversed(nodes), len(placement), rf) == placement


def test_the_replicas_of_one_node_are_spread() -> None:
    nodes = named(5)
    placement = initial(nodes, 60, 2)
    partners = Counter(shard[1] for shard in placement if shard[0] == nodes[0])
    assert partners == dict.fromkeys(nodes[1:], 3)


@given(tables())
def test_a_balanced_table_needs_no_moves(table: tuple[list[str], Placement, int]) -> None:
    nodes, placement, rf = table
    assert balanced(placement, nodes, rf).placement == placement


@given(uneven())
def test_a_rebalance_makes_the_fewest_moves(table: tuple[list[str], Placement, int]) -> None:
    nodes, placement, rf = table
    before = copy.deepcopy(placement)
    planned = balanced(placement, nodes, rf)
    assert placement == before
    check(planned.placement, nodes, rf)
    had = loads(placement, nodes).values()
    low, more = divmod(sum(had), len(nodes))
    least = max(sum(max(0, load - low - (more > 0)) for load in had), sum(max(0, low - load) for load in had))
    assert len(changes(placement, planned.placement).added) == least
    assert planned == balanced(placement, list(reversed(nodes)), rf)


@given(tables(), st.integers(1, 4))
def test_added_nodes_get_their_part_and_other_copies_stay(
    table: tuple[list[str], Placement, int], more: int
) -> None:
    nodes, placement, rf = table
    new = named(more, start=len(nodes))
    planned = balanced(placement, nodes + new, rf)
    check(planned.placement, nodes + new, rf)
    difference = changes(placement, planned.placement)
    assert {each.node for each in difference.added} <= {*new}
    assert len(difference.added) == sum(loads(planned.placement, new).values())


@given(tables(), st.data())
def test_drained_nodes_keep_no_copy_and_no_shard_is_lost(
    table: tuple[list[str], Placement, int], data: st.DataObject
) -> None:
    nodes, placement, rf = table
    drained = data.draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - rf, unique=True))
    left = [node for node in nodes if node not in drained]
    assume(left)
    planned = balanced(placement, left, rf, drained)
    check(planned.placement, left, rf)
    assert (planned.lost, planned.degraded) == ((), ())
    _keeps_existing_primaries(placement, planned.placement, left)


@given(tables(), st.data())
def test_lost_nodes_are_replaced_and_a_shard_without_copies_is_reported(
    table: tuple[list[str], Placement, int], data: st.DataObject
) -> None:
    nodes, placement, rf = table
    gone = data.draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1, unique=True))
    left = [node for node in nodes if node not in gone]
    planned = balanced(placement, left, rf)
    without = tuple(number for number, shard in enumerate(placement) if {*shard} <= {*gone})
    assert planned.lost == without
    assert all(planned.placement[number] == placement[number] for number in without)
    kept = tuple(shard for number, shard in enumerate(planned.placement) if number not in without)
    copies = min(rf, len(left))
    if kept:
        check(kept, left, copies)
    assert planned.degraded == (
        tuple(n for n in range(len(placement)) if n not in without) if copies < rf else ()
    )
    _keeps_existing_primaries(placement, planned.placement, left)


def _keeps_existing_primaries(old: Placement, new: Placement, left: list[str]) -> None:
    """A shard with a copy on a node that stays has its primary where there are rows, unless it was moved
    away as a whole."""
    for was, now in zip(old, new, strict=True):
        stayed = {*was} & {*now}
        assert not stayed or now[0] in stayed


def test_two_losses_at_once_restore_all_copies() -> None:
    nodes = named(6)
    placement = initial(nodes, 12, 3)
    pairs = [(one, two) for one in nodes for two in nodes if one < two]
    for pair in pairs:
        left = [node for node in nodes if node not in pair]
        planned = balanced(placement, left, 3)
        check(planned.placement, left, 3)
        assert planned.lost == planned.degraded == ()


def test_the_scenario_of_four_nodes_and_three_copies() -> None:
    nodes = named(4)
    placement = initial(nodes, 8, 3)
    after_one = balanced(placement, nodes[1:], 3)
    assert {frozenset(shard) for shard in after_one.placement} == {frozenset(nodes[1:])}
    after_two = balanced(after_one.placement, nodes[2:], 3)
    assert after_two.degraded == tuple(range(8))
    both_back = balanced(after_two.placement, nodes, 3)
    check(both_back.placement, nodes, 3)


def test_the_difference_of_placements() -> None:
    found = changes((("a", "b"), ("b", "c")), (("a", "b"), ("c", "a")))
    assert found.added == (Copy(1, "a"),)
    assert found.removed == (Copy(1, "b"),)
    assert found.primaries == (1,)


@pytest.mark.parametrize(
    ("nodes", "shards", "rf", "field"),
    [
        ([], 1, 1, "nodes"),
        (["a", "a"], 1, 1, "nodes"),
        (["a"], 0, 1, "shards"),
        (["a"], 3001, 1, "shards"),
        (["a"], 1, 0, "rf"),
        (["a"], 1, 2, "rf"),
    ],
)
def test_wrong_numbers_are_refused(nodes: list[str], shards: int, rf: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        initial(nodes, shards, rf)
    assert caught.value.field == field


def test_three_thousand_shards_over_a_hundred_nodes_are_planned_in_two_seconds() -> None:
    nodes = named(100)
    begin = time.perf_counter()
    placement = initial(nodes, 3_000, 3)
    added = balanced(placement, named(110), 3)
    drained = balanced(placement, nodes[10:], 3, nodes[:10])
    lost = balanced(placement, nodes[2:], 3)
    assert time.perf_counter() - begin < 4 * 2
    check(added.placement, named(110), 3)
    check(drained.placement, nodes[10:], 3)
    check(lost.placement, nodes[2:], 3)
