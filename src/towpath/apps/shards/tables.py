"""Routines that create and drop a logical table on real servers. Each can be repeated: an action skips what
exists, an undo and a drop skip what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from psycopg import Connection
from psycopg.sql import SQL

from towpath.apps.shards import names, replication, schema
from towpath.apps.shards.catalogue import PendingChange, TableBusy, TableRecord
from towpath.apps.shards.inventory import Relation, inventory, logical_name, relations
from towpath.apps.shards.routines import Cluster, Unchangeable, Work, routine
from towpath.apps.shards.session import session

BATCH = 100
"""Shards created in one transaction: each needs a lock, and a server has a limited number of them."""
LOCK_TIMEOUT = "5s"
"""A statement that waits longer for a lock fails and is retried, so that the statements behind it go on."""


class NotOurs(Unchangeable):
    """A relation with the name exists that this plan has not created."""

    sentence = "node {node}: {name} exists already and was not created by plan {plan}"


def nothing(cluster: Cluster, work: Work) -> None:
    """The undo of a step that only looks."""


# The record


def begin_create(cluster: Cluster, work: Work) -> None:
    record = msgspec.convert(work.more["record"], TableRecord)
    found = cluster.catalogue.find(work.table)
    if found is not None and found[0].plan != work.plan:
        raise TableBusy(table=work.table, why="a table of this name exists already")
    if found is None:
        cluster.catalogue.write(work.table, record, 0)


def begun(cluster: Cluster, work: Work) -> bool:
    """Has the record the pending change of this plan?"""
    found = cluster.catalogue.find(work.table)
    return found is not None and found[0].pending is not None and found[0].pending.plan == work.plan


def cancel(cluster: Cluster, work: Work) -> None:
    cluster.catalogue.cancel(work.table, work.plan)


def commit(cluster: Cluster, work: Work) -> None:
    cluster.catalogue.commit(work.table, work.plan)


def committed(cluster: Cluster, work: Work) -> bool:
    """Is the change of this plan no longer pending? The step before it has seen it pending."""
    found = cluster.catalogue.find(work.table)
    return found is not None and (found[0].pending is None or found[0].pending.plan != work.plan)


# The tables of a node


def create_tables(cluster: Cluster, work: Work) -> dict[str, int]:
    """Create the logical table and the shard tables for which the node is the primary."""
    record = cluster.record(work)
    own = _primaries(record, work.node)
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        schema.ensure_schema(connection)
        if not has_parent(connection, record, work):
            connection.execute(schema.create_parent(record))
            connection.execute(schema.comment("TABLE", schema.logical(record), schema.tag(work.plan)))
        connection.commit()
        present = relations(connection)
        for some in _batches(own):
            for shard in some:
                _create_shard(connection, record, work, shard, present)
            connection.commit()
    return {"shards": len(own)}


def _create_shard(
    connection: Connection[Any], record: TableRecord, work: Work, shard: int, present: dict[str, Relation]
) -> None:
    name = names.shard_table(record.table, shard)
    found = present.get(name)
    if found is not None and found.comment != schema.tag(work.plan):
        raise NotOurs(node=work.node, name=f"{names.SCHEMA}.{name}", plan=work.plan)
    if found is None:
        connection.execute(schema.create_shard(record, shard))
        connection.execute(schema.comment("TABLE", schema.relation(name), schema.tag(work.plan)))
    if found is None or found.parent is None:
        connection.execute(schema.attach(record, name, shard))


def has_parent(connection: Connection[Any], record: TableRecord, work: Work) -> bool:
    found = connection.execute(
        "SELECT c.relkind = 'p' AND obj_description(c.oid, 'pg_class') = %s FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
        (schema.tag(work.plan), record.schema, record.table),
    ).fetchone()
    if found is not None and found[0] is not True:
        raise NotOurs(node=work.node, name=logical_name(record), plan=work.plan)
    return found is not None


def tables_created(cluster: Cluster, work: Work) -> bool:
    record = cluster.record(work)
    with cluster.nodes.connect(work.node) as connection:
        present = relations(connection)
        return has_parent(connection, record, work) and all(
            (found := present.get(names.shard_table(record.table, shard))) is not None
            and found.parent == logical_name(record)
            for shard in _primaries(record, work.node)
        )


def undo_tables(cluster: Cluster, work: Work) -> None:
    """Drop the relations that this plan has created on the node."""
    found = cluster.catalogue.find(work.table)
    if found is None or found[0].plan != work.plan:
        return
    record = found[0]
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        ours = {
            name: each
            for name, each in relations(connection).items()
            if each.comment == schema.tag(work.plan) and _of(record, name)
        }
        _drop(connection, ours.values())
        try:
            if has_parent(connection, record, work):
                connection.execute(SQL("DROP TABLE {}").format(schema.logical(record)))
        except NotOurs:
            pass
        _tidy(connection)


# The routes of a node


def create_routes(cluster: Cluster, work: Work) -> dict[str, int]:
    """Create the routes to the shards of other nodes."""
    record = cluster.record(work)
    others = _remote(record, work.node)
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        present = relations(connection)
        for some in _batches(others):
            peers = sorted({record.shards[shard].primary for shard in some})
            schema.ensure_servers(connection, cluster.nodes, peers)
            for shard in some:
                add_route(connection, record, shard, work.plan, present)
            connection.commit()
    return {"routes": len(others)}


def add_route(
    connection: Connection[Any], record: TableRecord, shard: int, plan: str, present: dict[str, Relation]
) -> None:
    """Create and attach the route to the primary of a shard, unless it is there. The servers must exist."""
    placed = record.shards[shard]
    name = names.route_table(record.table, shard, placed.generation)
    if name not in present:
        connection.execute(schema.create_route(record, shard, placed.primary, placed.generation))
        connection.execute(schema.comment("FOREIGN TABLE", schema.relation(name), schema.tag(plan)))
    if name not in present or present[name].parent is None:
        connection.execute(schema.attach(record, name, shard))


def routes_created(cluster: Cluster, work: Work) -> bool:
    record = cluster.record(work)
    with cluster.nodes.connect(work.node) as connection:
        present = relations(connection)
    wanted = [
        names.route_table(record.table, shard, record.shards[shard].generation)
        for shard in _remote(record, work.node)
    ]
    return all(name in present and present[name].parent is not None for name in wanted)


def undo_routes(cluster: Cluster, work: Work) -> None:
    found = cluster.catalogue.find(work.table)
    if found is None or found[0].plan != work.plan:
        return
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        present = relations(connection).values()
        _drop(connection, [each for each in present if each.kind == "foreign" and _of(found[0], each.name)])
        _tidy(connection)


def verify_routes(cluster: Cluster, work: Work) -> dict[str, int]:
    """Read the logical table on the node once, which opens a connection through every server."""
    record = cluster.record(work)
    with cluster.nodes.connect(work.node, statement_timeout="60s") as connection:
        row = connection.execute(SQL("SELECT count(*) FROM {}").format(schema.logical(record))).fetchone()
    return {"rows": 0 if row is None else int(row[0])}


# Drop


def begin_drop(cluster: Cluster, work: Work) -> None:
    change = PendingChange(work.plan, "drop", nodes=tuple(work.more["nodes"]))
    cluster.catalogue.begin(work.table, change)


def rehearse_drop(cluster: Cluster, work: Work) -> None:
    """Drop the logical table and roll back: views that depend on it, missing rights and an unreachable node
    are found before the point of no return."""
    record = cluster.record(work)
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        connection.execute(SQL("DROP TABLE IF EXISTS {}").format(schema.logical(record)))
        connection.rollback()


def mark_dropping(cluster: Cluster, work: Work) -> None:
    found = cluster.catalogue.find(work.table)
    if found is not None and found[0].state != "dropping":
        record, version = found
        cluster.catalogue.write(work.table, msgspec.structs.replace(record, state="dropping"), version)


def marked_dropping(cluster: Cluster, work: Work) -> bool:
    found = cluster.catalogue.find(work.table)
    return found is None or found[0].state == "dropping"


def drop_subscriptions(cluster: Cluster, work: Work) -> None:
    """Drop the subscriptions of the table on the node. The slots are dropped on their own nodes, so a
    publisher that is away does not matter here."""
    with session(cluster, work) as node:
        with node.bounded():
            found = inventory(node.connection, work.node)
        for name in _replication(cluster.record(work), found.subscriptions):
            replication.drop_subscription(node, name)


def drop_tables(cluster: Cluster, work: Work) -> None:
    """Drop slots, publications and all relations of the table on the node."""
    record = cluster.record(work)
    with session(cluster, work) as node:
        with node.bounded():
            found = inventory(node.connection, work.node)
        for name in _replication(record, found.slots):
            replication.drop_slot(node, name)
        for name in _replication(record, found.publications):
            replication.drop_publication(node, name)
    with cluster.nodes.connect(work.node, autocommit=False, lock_timeout=LOCK_TIMEOUT) as connection:
        if logical_name(record) in found.logical:
            connection.execute(SQL("DROP TABLE IF EXISTS {}").format(schema.logical(record)))
        left = relations(connection)
        _drop(connection, [each for name, each in left.items() if _of(record, name)])
        _tidy(connection)


def forget(cluster: Cluster, work: Work) -> None:
    found = cluster.catalogue.find(work.table)
    if found is not None:
        cluster.catalogue.write(work.table, None, found[1])


def forgotten(cluster: Cluster, work: Work) -> bool:
    return cluster.catalogue.find(work.table) is None


# Helpers


def _primaries(record: TableRecord, node: str) -> list[int]:
    return [number for number, shard in enumerate(record.shards) if shard.primary == node]


def _remote(record: TableRecord, node: str) -> list[int]:
    return [number for number, shard in enumerate(record.shards) if shard.primary != node]


def _batches(shards: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(shards), BATCH):
        yield shards[at : at + BATCH]


def _of(record: TableRecord, relation: str) -> bool:
    """Does a relation in the schema of shards belong to this table?"""
    parts = names.shard_of(relation)
    return parts is not None and parts[0] == record.table


def _replication(record: TableRecord, present: Iterable[str]) -> list[str]:
    """The publications, slots or subscriptions of this table among those present."""
    makers: tuple[Callable[[str, int, str], str], ...] = (names.publication, names.slot, names.subscription)
    nodes = {*record.nodes, *(() if record.pending is None else record.pending.add_nodes)}
    ours = {
        make(record.table, shard, node)
        for shard in range(len(record.shards))
        for node in nodes
        for make in makers
    }
    return sorted(ours.intersection(present))


def _drop(connection: Connection[Any], found: Iterable[Relation]) -> None:
    for each in found:
        kind = SQL("FOREIGN TABLE" if each.kind == "foreign" else "TABLE")
        connection.execute(SQL("DROP {} IF EXISTS {}").format(kind, schema.relation(each.name)))
    connection.commit()


def _tidy(connection: Connection[Any]) -> None:
    """Drop the servers and the schema when nothing uses them."""
    schema.drop_unused_servers(connection)
    schema.drop_schema_if_empty(connection)
    connection.commit()


BEGIN_CREATE = routine("begin-create", begin_create, check=begun, undo=cancel)
TABLES = routine("tables", create_tables, check=tables_created, undo=undo_tables)
ROUTES = routine("routes", create_routes, check=routes_created, undo=undo_routes)
VERIFY = routine("verify", verify_routes, undo=nothing)
COMMIT = routine("commit", commit, check=committed, undo=nothing)
BEGIN_DROP = routine("begin-drop", begin_drop, check=begun, undo=cancel)
REHEARSE_DROP = routine("rehearse-drop", rehearse_drop, undo=nothing)
MARK_DROPPING = routine("mark-dropping", mark_dropping, check=marked_dropping)
DROP_SUBSCRIPTIONS = routine("drop-subscriptions", drop_subscriptions)
DROP_TABLES = routine("drop-tables", drop_tables)
FORGET = routine("forget", forget, check=forgotten)
