"""The comparison of rows, the reasons against a move, and the limits of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.support.pg_proxy import Fault, Rule, proxied
from tests.support.shards import Fleet
from towpath import Fail
from towpath.apps.shards import copying
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.moves import move_plan
from towpath.apps.shards.nodes import NodeAway, Nodes
from towpath.apps.shards.routines import Cluster, Work
from towpath.apps.shards.session import NodeSession, session
from towpath.apps.shards.verify import Comparison, RowsDiffer
from towpath.testing.postgres import Server

COPY = "towpath_shards.items_s0"


@pytest.fixture
def copied(fleet: Fleet) -> Work:
    """A shard with 100 rows that is copied from n1 to n2, before the comparison of the rows."""
    record = fleet.create(shards=1)
    fleet.query("n1", "INSERT INTO public.items SELECT g, 'row ' || g FROM generate_series(1, 100) g")
    plan = move_plan(record, 0, "n1", "n2", "move-1")
    fleet.run(plan, until=lambda step: step.name.startswith("verify"))
    return Work(table="items", plan="move-1", node="n2", peer="n1", generation=2, more={"chunk": 30})


def test_equal_rows_are_counted_in_chunks(fleet: Fleet, copied: Work) -> None:
    assert copying.verify(fleet.cluster, copied)["rows"] == 100


def test_a_comparison_continues_behind_its_cursor(fleet: Fleet, copied: Work) -> None:
    with compared(fleet, copied) as comparison:
        first = next(comparison.chunks(chunk=30))
        assert first == (("30",), 30)
        assert [count for _, count in comparison.chunks(first[0], 30)] == [30, 30, 10]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("DELETE FROM {} WHERE id = 42", "42"),
        ("UPDATE {} SET name = 'another' WHERE id = 77", "77"),
        ("INSERT INTO {} VALUES (1000, 'too much')", "1000"),
    ],
)
def test_a_row_that_differs_is_named(fleet: Fleet, copied: Work, change: str, key: str) -> None:
    with psycopg.connect(fleet.urls["n2"], autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(change.format(COPY).encode())
    with pytest.raises(RowsDiffer, match=f"in 1 rows, for example {key}$"):
        copying.verify(fleet.cluster, copied)


@contextmanager
def compared(fleet: Fleet, work: Work) -> Iterator[Comparison]:
    with session(fleet.cluster, work) as target, session(fleet.cluster, work, "n1") as source:
        comparison = Comparison(source, target, ("towpath_shards", "items_s0"), "towpath_items_s0_to_n2")
        with session(fleet.cluster, work, "n1", "lock") as holder:
            comparison.synchronise(holder)
        yield comparison


def preflight(fleet: Fleet, record: TableRecord, target: str = "n2") -> str:
    work = Work(table=record.table, plan="move-1", node=target, peer=record.shards[0].primary, generation=2)
    with pytest.raises(Fail) as failed:
        copying.preflight(fleet.cluster, work)
    return str(failed.value)


def test_all_reasons_against_a_move_are_found_before_it(fleet: Fleet) -> None:
    record = fleet.create(shards=1)
    fleet.query("n1", f"ALTER TABLE {COPY} DROP CONSTRAINT items_s0_pkey")
    fleet.query("n2", "ALTER TABLE public.items ADD COLUMN more int")
    fleet.query("n2", f"CREATE TABLE {COPY} (id bigint)")
    reasons = preflight(fleet, record)
    assert "needs a primary key as its replica identity" in reasons
    assert "the columns of items_s0 on n1 are not those of" in reasons
    assert "items_s0 exists on n2 already" in reasons


def test_a_server_is_not_a_peer_of_itself(fleet: Fleet, shard_servers: dict[str, Server]) -> None:
    """A subscription to a database of the same server would wait for ever."""
    record = fleet.create(shards=1, nodes=["n1", "n2"])
    same = fleet.urls["n1"].replace("127.0.0.1", "localhost")
    cluster = Cluster(Nodes({**fleet.urls, "n2": same}), fleet.catalogue)
    work = Work(table=record.table, plan="move-1", node="n2", peer="n1", generation=2)
    with pytest.raises(Fail, match="one server"):
        copying.preflight(cluster, work)


def test_a_hanging_connection_ends_after_the_limit(fleet: Fleet, shard_servers: dict[str, Server]) -> None:
    port = shard_servers["n1"].port
    with proxied(port) as proxy:
        nodes = Nodes({"n1": fleet.urls["n1"].replace(f":{port}/", f":{proxy.port}/")})
        cluster = Cluster(nodes, fleet.catalogue, limit=0.2)
        with session(cluster, Work(table="t", plan="p", node="n1")) as node:
            proxy.rule = Rule(Fault.HANG, 0)
            begun = time.monotonic()
            with pytest.raises(NodeAway):
                node.run("SELECT 1")
            assert time.monotonic() - begun < 5


def test_an_endless_statement_is_only_cut_when_the_server_does_not_run_it(
    fleet: Fleet, shard_servers: dict[str, Server]
) -> None:
    port = shard_servers["n1"].port
    with proxied(port) as proxy:
        nodes = Nodes({"n1": fleet.urls["n1"].replace(f":{port}/", f":{proxy.port}/")})
        cluster = Cluster(nodes, fleet.catalogue, limit=0.1)
        with session(cluster, Work(table="t", plan="p", node="n1")) as node:
            assert node.run("SELECT 'done' FROM pg_sleep(1)", endless=True) == [("done",)]
            proxy.rule = Rule(Fault.HANG, 1)
            with pytest.raises(NodeAway):
                _run_twice(node)


def _run_twice(node: NodeSession) -> None:
    for _ in range(2):
        node.run("SELECT 1", endless=True)


def test_a_session_ends_the_session_of_an_earlier_delivery(fleet: Fleet) -> None:
    work = Work(table="t", plan="p", node="n1")
    with session(fleet.cluster, work) as earlier:
        earlier.run("SELECT 1")
        with session(fleet.cluster, work) as later:
            assert later.value("SELECT 1") == 1
        with pytest.raises(NodeAway):
            earlier.run("SELECT 1")
