"""Moves of shards on three real servers: the plan, its undo, and the placement after it."""

from __future__ import annotations

from tests.support.shards import Fleet
from towpath.apps.shards.moves import change_plans, move_plan


def fill(fleet: Fleet, rows: int, node: str = "n1") -> None:
    fleet.query(node, "INSERT INTO public.items SELECT g, 'row ' || g FROM generate_series(1, %s) g", [rows])


def counts(fleet: Fleet) -> dict[str, int]:
    return {node: fleet.query(node, "SELECT count(*) FROM public.items")[0][0] for node in fleet.nodes}


def test_a_moved_shard_has_all_rows_and_nothing_is_left(fleet: Fleet) -> None:
    record = fleet.create()
    fill(fleet, 1000)
    source = record.shards[0].primary
    target = next(node for node in fleet.nodes if node != source)
    plan = move_plan(record, 0, source, target, "move-1")
    fleet.run(plan)
    assert fleet.catalogue.get("items").shards[0].nodes == (target,)
    assert counts(fleet) == dict.fromkeys(fleet.nodes, 1000)
    assert fleet.audit() == []


def test_each_prefix_of_the_steps_before_the_pivot_can_be_rolled_back(fleet: Fleet) -> None:
    record = fleet.create()
    fill(fleet, 200)
    source = record.shards[0].primary
    target = next(node for node in fleet.nodes if node != source)
    plan = move_plan(record, 0, source, target, "move-1")
    before = [step.name for step in plan.resolved()]
    for last in before[1 : before.index("pivot") + 1]:
        done = fleet.run(plan, until=lambda step, last=last: step.name == last)  # type: ignore[misc]
        fleet.roll_back(done)
        assert fleet.audit() == [], last
        assert counts(fleet) == dict.fromkeys(fleet.nodes, 200)


def test_a_node_is_emptied_removed_and_added_again(fleet: Fleet) -> None:
    record = fleet.create()
    fill(fleet, 500)
    wanted = tuple(("n1",) if shard.nodes == ("n3",) else shard.nodes for shard in record.shards)
    for plan in change_plans(record, wanted, "remove", "remove-node", remove_nodes=["n3"]):
        fleet.run(plan)
    assert fleet.audit() == []
    record = fleet.catalogue.get("items")
    assert record.nodes == ("n1", "n2")
    wanted = (("n3",), *record.placement()[1:])
    for plan in change_plans(record, wanted, "add", "add-node", add_nodes=["n3"]):
        fleet.run(plan)
    assert fleet.audit() == []
    assert counts(fleet) == dict.fromkeys(fleet.nodes, 500)
