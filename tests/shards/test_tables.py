"""A logical table on three real servers: created, written and read from every node, dropped, rolled back."""

from __future__ import annotations

import msgspec
import psycopg
import pytest

from tests.support.shards import Fleet
from towpath.apps.shards import names
from towpath.apps.shards.catalogue import TableBusy, UnknownTable
from towpath.apps.shards.membership import join_plan
from towpath.apps.shards.moves import shard_plan
from towpath.apps.shards.plans import create_plan, drop_plan
from towpath.apps.shards.tables import NotOurs
from towpath.testing.postgres import Server


def test_every_node_writes_and_reads_all_rows(fleet: Fleet) -> None:
    record = fleet.create(shards=5)
    assert record.state == "ready"
    assert record.pending is None
    for number, node in enumerate(fleet.urls):
        rows = range(number * 100, number * 100 + 100)
        fleet.query(node, "INSERT INTO items (id) SELECT * FROM unnest(%s::bigint[])", [list(rows)])
        fleet.query(node, "INSERT INTO items VALUES (%s, 'one')", [1000 + number])
    for node in fleet.urls:
        assert fleet.query(node, "SELECT count(*), count(DISTINCT id) FROM items") == [(303, 303)]
        assert fleet.query(node, "SELECT name FROM items WHERE id = 1001") == [("one",)]
        fleet.query(node, "UPDATE items SET name = %s WHERE id = 7", [node])
        assert fleet.query("n1", "SELECT name FROM items WHERE id = 7") == [(node,)]
    fleet.query("n3", "DELETE FROM items WHERE id < 50")
    assert fleet.query("n2", "SELECT count(*) FROM items") == [(253,)]
    assert fleet.audit() == []


def test_each_shard_is_one_table_on_its_primary(fleet: Fleet) -> None:
    record = fleet.create(shards=5)
    fleet.query("n1", "INSERT INTO items SELECT generate_series(1, 500)")
    total = 0
    for number, shard in enumerate(record.shards):
        table = f"{names.SCHEMA}.{names.shard_table('items', number)}"
        total += fleet.query(shard.primary, f"SELECT count(*) FROM {table}")[0][0]
        with pytest.raises(psycopg.errors.UndefinedTable):
            fleet.query(next(n for n in fleet.urls if n != shard.primary), f"SELECT 1 FROM {table}")
    assert total == 500


def test_a_key_exists_once_whatever_node_writes_it(fleet: Fleet) -> None:
    fleet.create()
    fleet.query("n1", "INSERT INTO items VALUES (1, 'first')")
    for node in fleet.urls:
        with pytest.raises(psycopg.errors.UniqueViolation):
            fleet.query(node, "INSERT INTO items VALUES (1, 'second')")
        fleet.query(node, "INSERT INTO items VALUES (1, 'second') ON CONFLICT DO NOTHING")
    assert fleet.query("n2", "SELECT name FROM items") == [("first",)]


def test_a_key_of_two_columns_and_constraints(fleet: Fleet) -> None:
    columns = "a text, b uuid DEFAULT gen_random_uuid(), c numeric(9, 2) CHECK (c > 0), UNIQUE (c, a, b)"
    record = fleet.create("pairs", columns=columns, key=("a", "b"))
    assert record.constraints == (
        'PRIMARY KEY ("a", "b")',
        "UNIQUE (c, a, b)",
        "CHECK ((c > (0)::numeric))",
    )
    fleet.query("n1", "INSERT INTO pairs (a, c) SELECT 'k' || x, x FROM generate_series(1, 50) x")
    for node in fleet.urls:
        with pytest.raises(psycopg.errors.CheckViolation):
            fleet.query(node, "INSERT INTO pairs (a, c) VALUES ('k1', -1)")
        assert fleet.query(node, "SELECT count(*) FROM pairs") == [(50,)]


def test_a_drop_leaves_nothing(fleet: Fleet) -> None:
    record = fleet.create(shards=7)
    other = fleet.create("others", shards=2)
    fleet.run(drop_plan(record, "drop-items-1"))
    with pytest.raises(UnknownTable):
        fleet.catalogue.get("items")
    assert fleet.audit() == []
    fleet.query("n1", "INSERT INTO others SELECT generate_series(1, 10)")
    assert fleet.query("n3", "SELECT count(*) FROM others") == [(10,)]
    fleet.run(drop_plan(other, "drop-others-1"))
    left = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s"
    for node in fleet.urls:
        assert fleet.query(node, left, [names.SCHEMA]) == [(0,)]
        assert fleet.query(node, "SELECT count(*) FROM pg_namespace WHERE nspname = %s", [names.SCHEMA]) == [
            (0,)
        ]
        assert fleet.query(node, "SELECT count(*) FROM pg_foreign_server") == [(0,)]


def test_a_creation_that_stops_at_any_step_is_rolled_back(fleet: Fleet) -> None:
    plan = create_plan(fleet.record())
    for stop in [step.name for step in plan.resolved()]:
        ran = fleet.run(plan, until=lambda step, stop=stop: step.name == stop)  # type: ignore[misc]
        assert all(fleet.answer(step) is True for step in ran if step.check is not None)
        fleet.roll_back(ran)
        fleet.roll_back(ran)
        assert fleet.catalogue.find("items") is None
        assert fleet.audit() == []
    fleet.run(plan)
    assert fleet.audit() == []


def test_every_step_of_a_creation_can_be_repeated(fleet: Fleet) -> None:
    plan = create_plan(fleet.record())
    for step in plan.resolved():
        if step.check is not None and step.name not in ("begin", "commit"):
            assert fleet.answer(step) is False
        fleet.act(step)
        fleet.act(step)
        assert step.check is None or fleet.answer(step) is True
    assert fleet.audit() == []


def test_every_step_of_a_drop_can_be_repeated(fleet: Fleet) -> None:
    plan = drop_plan(fleet.create(), "drop-items-1")
    for step in plan.resolved():
        fleet.act(step)
        if step.name != "forget":
            fleet.act(step)
    assert fleet.audit() == []


def test_a_relation_of_the_user_is_never_dropped(fleet: Fleet) -> None:
    fleet.query("n2", "CREATE TABLE items (mine int)")
    plan = create_plan(fleet.record())
    with pytest.raises(NotOurs):
        fleet.run(plan)
    fleet.roll_back(plan.resolved()[:-1])
    assert fleet.query("n2", "SELECT count(*) FROM items") == [(0,)]
    assert fleet.audit() == []


def test_a_second_table_of_the_same_name_is_refused(fleet: Fleet) -> None:
    first = fleet.create()
    again = create_plan(fleet.record()).resolved()[0]
    fleet.act(again)  # the same plan
    other = create_plan(msgspec.structs.replace(first, plan="create-items-2"))
    with pytest.raises(TableBusy):
        fleet.run(other)
    fleet.roll_back(other.resolved()[:-1])
    assert fleet.catalogue.get("items") == first
    assert fleet.audit() == []


def test_a_plan_for_an_older_placement_does_not_begin(fleet: Fleet) -> None:
    record = fleet.create(nodes=["n1", "n2"])
    drop = drop_plan(record, "drop-items-1")
    first, second = (shard_plan(record, 0, ("n2",), f"move-items-{number}") for number in (1, 2))
    fleet.run(first)
    with pytest.raises(TableBusy) as caught:
        fleet.run(second)
    assert "changed since the plan was made" in str(caught.value)
    fleet.run(join_plan(fleet.catalogue.get("items"), ["n3"], "add-node-1"))
    with pytest.raises(TableBusy):
        fleet.run(drop)
    assert fleet.audit() == []


def test_a_view_on_the_table_stops_a_drop_before_the_point_of_no_return(fleet: Fleet) -> None:
    record = fleet.create()
    fleet.query("n3", "CREATE VIEW names AS SELECT name FROM items")
    plan = drop_plan(record, "drop-items-1")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        fleet.run(plan)
    fleet.roll_back(step for step in plan.resolved() if step.undo is not None)
    assert fleet.catalogue.get("items") == record
    assert fleet.audit() == []
    fleet.query("n1", "INSERT INTO items (id) VALUES (1)")
    assert fleet.query("n3", "SELECT * FROM names") == [("x",)]


def test_a_new_address_of_a_node_corrects_the_servers(fleet: Fleet, shard_servers: dict[str, Server]) -> None:
    fleet.create("first", shards=2)
    fleet.query("n1", "ALTER SERVER towpath_n2 OPTIONS (SET port '1', ADD sslmode 'disable')")
    fleet.create("second", shards=2)
    options = fleet.query("n1", "SELECT srvoptions FROM pg_foreign_server WHERE srvname = 'towpath_n2'")
    assert f"port={shard_servers['n2'].port}" in options[0][0]
    assert "sslmode=disable" not in options[0][0]
