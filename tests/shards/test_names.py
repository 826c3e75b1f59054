"""Names of database objects, and plans for many shards: both are pure."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.apps.shards import names
from towpath.apps.shards.catalogue import Column, Shard, TableRecord, check_record, decode, encode
from towpath.apps.shards.nodes import is_database
from towpath.apps.shards.placement import initial
from towpath.apps.shards.plans import create_plan, drop_plan
from towpath.errors import InvalidInput
from towpath.flows.plan import Plan

TABLES = st.from_regex(r"[a-z_][a-z0-9_]{0,29}", fullmatch=True)
NODES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}", fullmatch=True)
SHARDS = st.integers(0, names.MAX_SHARDS - 1)


@given(TABLES, SHARDS, NODES, st.integers(1, 10**6))
def test_every_name_is_an_identifier(table: str, shard: int, node: str, generation: int) -> None:
    names.check_table(table)
    names.check_node(node)
    made = [
        names.shard_table(table, shard),
        names.route_table(table, shard, generation),
        names.old_table(table, shard, generation),
        names.hash_check(table, shard),
        names.server_name(node),
        names.publication(table, shard, node),
        names.slot(table, shard, node),
        names.subscription(table, shard, node),
    ]
    assert all(len(name.encode()) <= names.MAX_IDENTIFIER for name in made)
    assert re.fullmatch(r"[a-z0-9_]+", names.slot(table, shard, node))
    assert names.shard_of(made[0]) == (table, shard, None)
    assert names.shard_of(made[1]) == names.shard_of(made[2]) == (table, shard, generation)


@given(st.sets(st.tuples(TABLES, SHARDS, NODES), min_size=2, max_size=2))
def test_different_replicas_have_different_slots(two: set[tuple[str, int, str]]) -> None:
    assert len({names.slot(*each) for each in two}) == 2


def test_names_that_differ_in_case_have_different_slots() -> None:
    nodes = ("db-1", "db_1", "DB_1", "db.1")
    assert len({names.slot("t", 0, node) for node in nodes}) == len(nodes)


@pytest.mark.parametrize("name", ["", "T", "1t", "a-b", "a" * 31, "tä"])
def test_names_of_tables_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        names.check_table(name)


def test_addresses_of_databases() -> None:
    assert is_database("postgresql://db1/shop")
    assert is_database("host=db1 dbname=shop")
    assert not is_database("https://host/path?a=b")
    assert not is_database("/srv/work=1")
    assert not is_database("./here=1")


def record_of(shards: int, nodes: int, length: int = 8) -> TableRecord:
    on = tuple(f"n{number:0{length - 1}}" for number in range(nodes))
    return TableRecord(
        table="items",
        columns=(Column("id", "bigint"),),
        key=("id",),
        constraints=("PRIMARY KEY (id)",),
        rf=3,
        nodes=on,
        shards=tuple(Shard(each) for each in initial(on, shards, 3)),
        plan="create-items-1",
    )


def test_plans_for_many_shards_are_valid_and_equal() -> None:
    record = record_of(3_000, 100)
    assert decode(encode(record)) == record
    for plan, again in (
        (create_plan(record), create_plan(record)),
        (drop_plan(record, "drop-1"), drop_plan(record, "drop-1")),
    ):
        plan.check(record.nodes)
        assert plan == again
        assert Plan.from_json(plan.to_json()) == plan
        assert len(plan.steps) == 3 * 100 + (2 if plan.name == "create-items" else 3)


def test_a_record_that_no_note_can_hold_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_record(record_of(3_000, 100, 50))
    assert caught.value.field == "record"
