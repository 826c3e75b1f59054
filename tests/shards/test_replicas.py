"""Replicas on three real servers: creation, changes of placement, and promotion after the loss of a node."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.shards import Fleet
from tests.support.waiting import until
from towpath.apps.shards import replicas
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.fencing import discard, fence
from towpath.apps.shards.moves import change_plans, shard_plan
from towpath.apps.shards.plans import create_plan, routes_done
from towpath.errors import InvalidInput
from towpath.testing.postgres import Server


@pytest.fixture
def record(fleet: Fleet) -> TableRecord:
    """A table with two shards and two copies of each."""
    wanted = fleet.record(shards=2, rf=2)
    fleet.run(create_plan(wanted, replicas.initial_steps(wanted, wanted.plan, routes_done(wanted))))
    fill(fleet, 1, 100)
    return fleet.catalogue.get("items")


def fill(fleet: Fleet, first: int, last: int, node: str = "n1") -> None:
    statement = "INSERT INTO public.items SELECT g, 'row ' || g FROM generate_series(%s::int, %s) g"
    fleet.query(node, statement, [first, last])


def total(fleet: Fleet, node: str = "n2") -> int:
    count: int = fleet.query(node, "SELECT count(*) FROM public.items")[0][0]
    return count


def rows_of(fleet: Fleet, node: str, shard: int) -> list[tuple[object, ...]]:
    return fleet.query(node, f"SELECT * FROM towpath_shards.items_s{shard} ORDER BY id")


def check_copies(fleet: Fleet) -> None:
    """Every replica has the rows of its primary, after the time that replication takes."""
    assert fleet.audit() == []
    for number, shard in enumerate(fleet.catalogue.get("items").shards):
        for node in shard.replicas:
            until(
                lambda number=number, shard=shard, node=node: (  # type: ignore[misc]
                    rows_of(fleet, node, number) == rows_of(fleet, shard.primary, number)
                ),
                10,
            )


def test_a_new_table_has_its_replicas(fleet: Fleet, record: TableRecord) -> None:
    assert [len(shard.nodes) for shard in record.shards] == [2, 2]
    check_copies(fleet)


@pytest.mark.parametrize("change", ["replica", "primary", "swap", "switchover", "both"])
def test_copies_change_their_places(fleet: Fleet, record: TableRecord, change: str) -> None:
    first, second = record.shards[0].nodes
    (third,) = {*fleet.nodes} - {first, second}
    wanted = {
        "replica": (first, third),
        "primary": (third, second),
        "swap": (second, first),
        "switchover": (second, third),
        "both": (third, first),
    }[change]
    fleet.run(shard_plan(record, 0, wanted, "change-1"))
    assert fleet.catalogue.get("items").shards[0].nodes == wanted
    fill(fleet, 101, 200, third)
    assert total(fleet) == 200
    check_copies(fleet)
    before = fleet.catalogue.get("items")
    fleet.run(shard_plan(before, 0, (first, second), "change-2"))
    fill(fleet, 201, 300)
    assert total(fleet) == 300
    check_copies(fleet)


@pytest.mark.parametrize("change", ["primary", "switchover"])
def test_a_change_before_its_pivot_is_rolled_back(fleet: Fleet, record: TableRecord, change: str) -> None:
    first, second = record.shards[0].nodes
    (third,) = {*fleet.nodes} - {first, second}
    wanted = {"primary": (third, second), "switchover": (second, third)}[change]
    plan = shard_plan(record, 0, wanted, "change-1")
    fleet.roll_back(fleet.run(plan, until=lambda step: step == plan.pivot))
    assert fleet.catalogue.get("items") == record
    fill(fleet, 101, 200)
    check_copies(fleet)


def test_a_replica_is_promoted_when_a_node_is_lost(
    fleet: Fleet, record: TableRecord, shard_servers: dict[str, Server]
) -> None:
    lost = record.shards[0].primary
    check_copies(fleet)
    with shard_servers[lost].outage("immediate"):
        chosen = replicas.furthest(replicas.positions(fleet.cluster, record, lost))
        fleet.run(replicas.promote_plan(record, lost, chosen, "promote-1"))
        now = fleet.catalogue.get("items")
        assert lost not in now.nodes
        for node in now.nodes:
            assert total(fleet, node) == 100
        fill(fleet, 101, 150, now.nodes[0])
        wanted = tuple((*shard.nodes, *({*now.nodes} - {*shard.nodes}))[:2] for shard in now.shards)
        for plan in change_plans(now, wanted, "restore", "rebalance"):
            fleet.run(plan)
        assert total(fleet, now.nodes[1]) == 150
        assert [len(shard.nodes) for shard in fleet.catalogue.get("items").shards] == [2, 2]
    assert fence(fleet.cluster, "items", lost)
    with pytest.raises(psycopg.errors.UndefinedTable):
        fill(fleet, 151, 200, lost)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        fleet.query(lost, "DELETE FROM public.items_fenced")
    discard(fleet.cluster, "items", lost)
    check_copies(fleet)
    join = change_plans(now := fleet.catalogue.get("items"), now.placement(), "a", "add-node", [lost])
    for plan in join:
        fleet.run(plan)
    assert total(fleet, lost) == 150


def test_a_shard_without_replica_cannot_be_promoted(fleet: Fleet) -> None:
    record = fleet.create()
    with pytest.raises(InvalidInput):
        replicas.furthest(replicas.positions(fleet.cluster, record, record.shards[0].primary))


def test_a_node_that_answers_is_not_lost(fleet: Fleet, record: TableRecord) -> None:
    lost = record.shards[0].primary
    chosen = replicas.furthest(replicas.positions(fleet.cluster, record, lost))
    plan = replicas.promote_plan(record, lost, chosen, "promote-1")
    with pytest.raises(Exception, match="answers"):
        fleet.run(plan)
