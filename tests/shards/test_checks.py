"""What is refused before anything is created, what the audit finds, and what the status shows."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import psycopg
import pytest

from tests.support.shards import SETTINGS, Fleet
from towpath.apps.shards import names
from towpath.apps.shards.catalogue import PendingChange, Shard
from towpath.apps.shards.columns import described
from towpath.apps.shards.inventory import facts
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.preflight import preflight, preflight_create
from towpath.apps.shards.status import node_status, rf_status, status
from towpath.errors import InvalidInput, NodeAway
from towpath.testing.postgres import Server


@pytest.mark.parametrize(
    ("columns", "key", "expected"),
    [
        ("id bigint", ("no",), "different columns of id"),
        ("id bigint", (), "different columns of id"),
        ("id bigint", ("id", "id"), "different columns of id"),
        ("id bigserial", ("id",), "without sequences (id)"),
        ("id bigint GENERATED ALWAYS AS IDENTITY", ("id",), "without sequences (id)"),
        ("id bigint, b int GENERATED ALWAYS AS (1) STORED", ("id",), "without generated columns (b)"),
        ("id bigint, b int PRIMARY KEY", ("id",), "with the key (id) in each PRIMARY KEY"),
        ("id bigint, b int UNIQUE", ("id",), "UNIQUE (b) is per shard"),
        ("id wrong", ("id",), 'type "wrong" does not exist'),
        ("id int); DROP TABLE x; CREATE TABLE y (a int", ("id",), "cannot insert multiple commands"),
    ],
)
def test_columns_that_a_sharded_table_cannot_have(
    shard_servers: dict[str, Server], columns: str, key: tuple[str, ...], expected: str
) -> None:
    with Nodes({"n1": shard_servers["n1"].url()}).connect("n1") as connection:
        with pytest.raises(InvalidInput) as caught:
            described(connection, columns, key)
    assert expected in str(caught.value)


def test_ready_servers_have_no_reasons(fleet: Fleet) -> None:
    assert preflight(fleet.nodes, fleet.urls) == []
    assert preflight_create(fleet.nodes, fleet.record(rf=2)) == []
    assert fleet.audit() == []


def test_all_reasons_are_reported_at_once(fleet: Fleet, postgres: Server) -> None:
    with contextlib.ExitStack() as stack:
        url = postgres.create_database()
        stack.callback(postgres.drop_database, url)
        fleet.query("n1", "CREATE ROLE poor LOGIN")
        stack.callback(fleet.query, "n1", "DROP ROLE poor")
        addresses = {
            "replica": url,
            "poor": fleet.urls["n1"].replace("postgres@", "poor@"),
            "same": fleet.urls["n1"],
            "gone": "postgresql://postgres@127.0.0.1:1/x?connect_timeout=1",
        }
        reasons = preflight(Nodes(addresses), addresses)
    text = "\n".join(reasons)
    assert "replica: wal_level is replica" in text
    assert "poor: the role needs REPLICATION" in text
    assert "poor: the role has no CREATE on the database" in text
    assert "poor, same: the same PostgreSQL server" in text
    assert "node gone: cannot be reached" in text
    with pytest.raises(NodeAway):
        with Nodes(addresses).connect("gone"):
            pass


def test_names_that_are_taken_and_missing_types_are_found_before_the_first_step(fleet: Fleet) -> None:
    fleet.query("n2", "CREATE TABLE items (mine int)")
    fleet.query("n1", "CREATE DOMAIN points AS int")
    record = fleet.record(columns="id bigint, p public.points")
    reasons = preflight_create(fleet.nodes, record)
    assert any(reason.startswith("n2: ") and "points" in reason for reason in reasons)
    reasons = preflight_create(fleet.nodes, fleet.record())
    assert reasons == ['n2: relation "items" already exists']


def test_a_password_is_in_no_record_and_no_message(fleet: Fleet, tmp_path: Path) -> None:
    fleet.query("n1", "ALTER ROLE postgres PASSWORD 'hush'")
    nodes = Nodes(fleet.urls, lambda node: "hush")
    assert nodes.mapping_options("n1") == {"user": "postgres", "password": "hush"}
    assert "password" not in nodes.server_options("n1")
    away = Nodes({"n1": "postgresql://postgres@127.0.0.1:1/x"}, lambda node: "hush")
    with pytest.raises(NodeAway) as caught:
        with away.connect("n1"):
            pass
    assert "hush" not in str(caught.value)
    with pytest.raises(InvalidInput) as wrong:
        Nodes({"n1": "no such=thing hush"}).parameters("n1")
    assert "hush" not in str(wrong.value)


def test_the_audit_finds_what_no_record_explains(fleet: Fleet) -> None:
    record = fleet.create(shards=3)
    first = record.shards[0].primary
    other = next(node for node in fleet.urls if node != first)
    table = names.shard_table("items", 0)
    route = names.route_table("items", 0, 1)
    fleet.query(other, f"CREATE TABLE {names.SCHEMA}.{table} (id int)")
    fleet.query(other, f"CREATE TABLE {names.SCHEMA}.{names.old_table('items', 0, 1)} (id int)")
    fleet.query(other, f"CREATE TABLE {names.SCHEMA}.strange (id int)")
    fleet.query(first, f"CREATE PUBLICATION {names.publication('items', 0, other)}")
    slot = names.slot("items", 0, other)
    fleet.query(first, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    subscription = names.subscription("items", 0, other)
    fleet.query(
        other,
        f"CREATE SUBSCRIPTION {subscription} CONNECTION '' PUBLICATION x"
        " WITH (connect = false, slot_name = NONE)",
    )
    assert fleet.audit() == sorted(
        [
            f"{other}: orphan table {names.SCHEMA}.{table}",
            f"{other}: orphan table {names.SCHEMA}.{names.old_table('items', 0, 1)}",
            f"{other}: orphan table {names.SCHEMA}.strange",
            f"{first}: orphan publication {names.publication('items', 0, other)}",
            f"{first}: orphan slot {slot}",
            f"{other}: orphan subscription {subscription}",
        ]
    )
    # While a plan moves the shard, these are explained; the table outside of all shards is not.
    fleet.catalogue.begin("items", PendingChange("move-1", "move", {0: Shard((other,), 2)}))
    assert fleet.audit() == [f"{other}: orphan table {names.SCHEMA}.strange"]
    fleet.catalogue.cancel("items", "move-1")
    fleet.query(other, f"DROP SUBSCRIPTION {subscription}")
    fleet.query(first, "SELECT pg_drop_replication_slot(%s)", [slot])
    fleet.query(other, f"ALTER FOREIGN TABLE {names.SCHEMA}.{route} OPTIONS (SET table_name 'x')")
    wrong = f"{other}: route {route} leads to {names.SCHEMA}.x, not to {names.SCHEMA}.{table}"
    assert wrong in fleet.audit()


def test_the_audit_finds_missing_and_detached_relations(fleet: Fleet) -> None:
    record = fleet.create(shards=3)
    first, second = record.shards[0].primary, record.shards[1].primary
    table, route = names.shard_table("items", 0), names.route_table("items", 0, 1)
    fleet.query(first, f"ALTER TABLE items DETACH PARTITION {names.SCHEMA}.{table}")
    fleet.query(second, f"DROP FOREIGN TABLE {names.SCHEMA}.{route}")
    assert fleet.audit() == sorted(
        [
            f"{first}: table {table} is not attached to public.items as shard 0",
            f"{second}: route {route} is missing",
        ]
    )
    fleet.query(second, "DROP TABLE items")
    assert f"{second}: the logical table public.items is missing" in fleet.audit()


def test_the_status_shows_copies_sizes_and_lost_nodes(fleet: Fleet, shard_servers: dict[str, Server]) -> None:
    record = fleet.create(shards=3)
    fleet.query("n1", "INSERT INTO items SELECT generate_series(1, 300)")
    fleet.query("n1", "SELECT pg_stat_force_next_flush()")
    found = status(fleet.nodes, [record])
    assert [(each.shard, each.node, each.role, each.state, each.rf_status) for each in found] == [
        (number, shard.primary, "primary", "ok", "ok") for number, shard in enumerate(record.shards)
    ]
    assert all(each.size is not None and each.size > 0 for each in found)
    lost = record.shards[0].primary
    with shard_servers[lost].outage("immediate"):
        found = status(fleet.nodes, [record])
        assert [each.rf_status for each in found] == [
            "broken" if shard.primary == lost else "ok" for shard in record.shards
        ]
        nodes = {each.node: each for each in node_status(fleet.nodes)}
        assert not nodes[lost].reachable
        assert nodes[lost].reasons
        assert [f"node {lost}: cannot be reached" in why for why in fleet.audit()] == [True]
        with pytest.raises(psycopg.OperationalError):
            fleet.query(record.shards[1].primary, "SELECT count(*) FROM items")
    assert fleet.query(record.shards[1].primary, "SELECT count(*) FROM items") == [(300,)]


def test_the_status_of_a_shard_follows_its_copies() -> None:
    shard = Shard(("a", "b"))
    assert rf_status(2, shard, {"a": "ok", "b": "ok"}) == "ok"
    assert rf_status(2, shard, {"a": "ok", "b": "copying"}) == "degraded"
    assert rf_status(2, shard, {"a": "away", "b": "ok"}) == "degraded"
    assert rf_status(2, shard, {"a": "away", "b": "copying"}) == "broken"
    assert rf_status(2, shard, {"a": "pending", "b": "pending"}) == "degraded"


def test_a_pending_operation_is_shown(fleet: Fleet) -> None:
    record = fleet.create(shards=2)
    moving = msgspec.structs.replace(record, pending=PendingChange("p", "move", {1: Shard(("n3",), 2)}))
    assert [each.pending for each in status(fleet.nodes, [moving])] == ["", "move"]


def test_the_facts_of_a_node(fleet: Fleet) -> None:
    with fleet.nodes.connect("n1") as connection:
        found = facts(connection, "n1")
    assert found.wal_level == "logical"
    assert found.max_slots == int(SETTINGS["max_replication_slots"])
    assert found.superuser
    assert found.fdw in ("available", "installed")
