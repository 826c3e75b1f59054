"""A node that was lost and returns: promotion has taken it out of the table, and its tables are out of date.

`fence` makes them unusable and keeps their rows, so that rows which no replica had can be read. `discard`
drops them; the node can then join again. Between the return of the node and its fence, programs that connect
to this node alone still see the old tables: a node that was promoted away should be started without its
clients."""

from __future__ import annotations

from psycopg import sql

from towpath.apps.shards import names, replication, schema, tables
from towpath.apps.shards.copying import LOCK_TIMEOUT, kind_of
from towpath.apps.shards.inventory import relations
from towpath.apps.shards.routines import Cluster, Work
from towpath.apps.shards.session import compose, session
from towpath.errors import InvalidInput

FENCED = "_fenced"
"""Appended to the name of the logical table."""


def fence(cluster: Cluster, table: str, node: str) -> list[int]:
    """Rename the logical table of a node that is no longer a node of the table, refuse writes to its shard
    tables, and end their replication. Returns the shards with rows. Repeating it is safe."""
    work = _outside(cluster, table, node)
    record = cluster.record(work)
    logical, fenced = (record.schema, table), f"{table}{FENCED}"
    with session(cluster, work) as returned:
        with returned.bounded():
            found = relations(returned.connection)
        held = sorted(
            shard
            for shard in range(len(record.shards))
            if (each := found.get(names.shard_table(table, shard))) is not None and each.kind != "foreign"
        )
        with returned.transaction(lock_timeout=LOCK_TIMEOUT):
            if kind_of(returned, logical) is not None:
                returned.run(compose("ALTER TABLE {table} RENAME TO {name}", table=logical, name=fenced))
                returned.run(schema.guard_table(sql.Identifier(record.schema, fenced)))
            for shard in held:
                for statement in schema.guard(record, shard):
                    returned.run(statement)
        for shard in held:
            replication.drop_subscription(returned, names.subscription(table, shard, node))
    return held


def discard(cluster: Cluster, table: str, node: str) -> None:
    """Drop all that a fenced node has of the table."""
    fence(cluster, table, node)
    work = _outside(cluster, table, node)
    record = cluster.record(work)
    tables.drop_subscriptions(cluster, work)
    with cluster.nodes.connect(node, lock_timeout=tables.LOCK_TIMEOUT) as connection:
        fenced = sql.Identifier(record.schema, f"{table}{FENCED}")
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(fenced))
    tables.drop_tables(cluster, work)


def _outside(cluster: Cluster, table: str, node: str) -> Work:
    record = cluster.catalogue.get(table)
    if node in record.nodes:
        raise InvalidInput(field="node", value=node, expected=f"not one of the table: {record.nodes}")
    return Work(table=table, plan="", node=node)
