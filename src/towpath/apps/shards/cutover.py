"""The pivot of a move and the steps after it.

The pivot is one transaction on the source. It locks the logical table and the shard, waits until the target
has confirmed the last position, puts a route to the target in the place of the shard, and leaves a forwarder
under the old name, so that routes of other nodes still reach the rows. Writers that waited for the lock
continue on the target. If the transaction fails at any point, the server rolls it back and writers continue
on the source.

A writer of this node locks the logical table, then the shard. A writer of another node locks the shard, then
the logical table, for its hash partition constraint. `lock_switch` therefore locks in four steps."""

from __future__ import annotations

import time
from typing import Any

from psycopg.sql import Composed

from towpath import Fail
from towpath.apps.shards import names, replication, schema
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.copying import LOCK_TIMEOUT, kind_of, retried, table_of
from towpath.apps.shards.routines import Cluster, Work, routine
from towpath.apps.shards.session import NodeSession, compose, session
from towpath.apps.shards.verify import CONFIRM, IDLE

_FIRST, _SECOND = "300ms", "150ms"
"""The time to wait for each lock, before and after writers are held back. All four together are less than the
default of `deadlock_timeout` (1 s): if transactions wait for each other, this side gives up, not the
writer."""


def pivot(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Hand the shard over to the target. Returns the seconds for which writers waited."""
    record = cluster.record(work)
    if record.pending is None or record.pending.plan != work.plan:
        raise Fail(f"table {work.table} has no pending change of plan {work.plan}")
    with session(cluster, work) as source:
        if _pivoted(source, work):
            return {"pause": None}
        return retried(lambda number: _switch(cluster, record, work, source) | {"tries": number})


def _switch(cluster: Cluster, record: TableRecord, work: Work, source: NodeSession) -> dict[str, Any]:
    slots = [names.slot(work.table, work.shard, node) for node in (work.peer, *work.more.get("replicas", ()))]
    old = names.old_table(work.table, work.shard, work.generation - 1)
    route = names.route_table(work.table, work.shard, work.generation)
    table = table_of(work)
    ready = replication.position(source)
    replication.await_position(source, slots, ready, source.limit)
    with source.transaction(idle_in_transaction_session_timeout=IDLE):
        ensure_server(cluster, source, work.peer)
        begun = time.monotonic()
        lock_switch(source, record, table)
        last = replication.position(source)
        waited = replication.await_position(source, slots, last, CONFIRM)
        source.run(schema.detach(record, table[1]))
        source.run(compose("ALTER TABLE {table} RENAME TO {old}", table=table, old=old))
        source.run(schema.create_foreign(record, table[1], work.shard, work.peer))
        source.run(schema.create_route(record, work.shard, work.peer, work.generation))
        source.run(schema.attach(record, route, work.shard))
    return {"pause": round(time.monotonic() - begun, 4), "caught_up": round(waited, 4), "position": last}


def ensure_server(cluster: Cluster, node: NodeSession, peer: str) -> None:
    """The foreign server for a peer, in the transaction of the caller that creates a route to it."""
    with node.bounded():
        schema.ensure_servers(node.connection, cluster.nodes, [peer])


def lock_switch(node: NodeSession, record: TableRecord, table: tuple[str, str] | None = None) -> None:
    """Lock the logical table, and the shard table that takes or leaves its place in it, in the transaction of
    the caller.

    First new writers are held back and running writers finish: on the logical table by a lock that does not
    conflict with ACCESS SHARE, which writers of other nodes need to finish, then on the shard. When no writer
    is left, both locks are raised."""
    logical = (record.schema, record.table)
    steps = [(_FIRST, "ONLY", logical, "SHARE ROW EXCLUSIVE"), (_SECOND, "ONLY", logical, "ACCESS EXCLUSIVE")]
    if table is not None:
        steps.insert(1, (_FIRST, "", table, "EXCLUSIVE"))
        steps.append((_SECOND, "", table, "ACCESS EXCLUSIVE"))
    for timeout, only, name, mode in steps:
        node.run("SELECT set_config('lock_timeout', %s, true)", [timeout])
        node.run(compose(f"LOCK TABLE {only} {{table}} IN {mode} MODE", table=name))


def unguard(cluster: Cluster, work: Work) -> None:
    """Allow writes to the copy that becomes the primary. No route leads to it before the pivot."""
    _run_all(cluster, work, schema.unguard(cluster.record(work), work.shard))


def guard(cluster: Cluster, work: Work) -> None:
    """Refuse writes again: the copy does not become the primary."""
    with session(cluster, work) as target:
        found = kind_of(target, table_of(work))
    if found is not None and found[:2] == ("r", False):
        _run_all(cluster, work, schema.guard(cluster.record(work), work.shard))


def _run_all(cluster: Cluster, work: Work, statements: list[Composed]) -> None:
    with session(cluster, work) as node, node.transaction(lock_timeout=LOCK_TIMEOUT):
        for statement in statements:
            node.run(statement)


def pivoted(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as source:
        return _pivoted(source, work)


def _pivoted(source: NodeSession, work: Work) -> bool:
    """Whether the route to the target is attached on the source: it is so from the commit of the pivot on."""
    return attached(source, names.route_table(work.table, work.shard, work.generation))


def attached(node: NodeSession, name: str) -> bool:
    found = kind_of(node, (names.SCHEMA, name))
    return found is not None and found[1]


def attach_copy(cluster: Cluster, work: Work) -> dict[str, Any]:
    """On the target: put the shard table in the place of the route to the source."""
    record, name = cluster.record(work), table_of(work)[1]

    def attempt(number: int) -> dict[str, Any]:
        if attached(target, name):
            return {}
        with target.transaction():
            begun = time.monotonic()
            lock_switch(target, record, table_of(work))
            drop_routes(target, record, work.shard)
            target.run(schema.attach(record, name, work.shard))
            target.run(schema.drop_hash_check(record, work.shard))
        return {"pause": round(time.monotonic() - begun, 4), "tries": number}

    with session(cluster, work) as target:
        return retried(attempt)


def copy_attached(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as target:
        return attached(target, table_of(work)[1])


def reroute(cluster: Cluster, work: Work) -> dict[str, Any]:
    """On a node that has neither copy: put a route to the new primary (the peer) in the place of the old."""
    record = cluster.record(work)
    route = names.route_table(work.table, work.shard, work.generation)

    def attempt(number: int) -> dict[str, Any]:
        if attached(node, route):
            return {}
        with node.transaction():
            ensure_server(cluster, node, work.peer)
            begun = time.monotonic()
            lock_switch(node, record)
            drop_routes(node, record, work.shard)
            node.run(schema.create_route(record, work.shard, work.peer, work.generation))
            node.run(schema.attach(record, route, work.shard))
        return {"pause": round(time.monotonic() - begun, 4), "tries": number}

    with session(cluster, work) as node:
        return retried(attempt)


def rerouted(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as node:
        return attached(node, names.route_table(work.table, work.shard, work.generation))


def drop_routes(node: NodeSession, record: TableRecord, shard: int) -> None:
    """Detach and drop the routes of a shard, in the transaction of the caller."""
    pattern = f"^{names.shard_table(record.table, shard)}_g[0-9]+_route$"
    rows = node.run(
        "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind = 'f' AND c.relname ~ %s",
        [names.SCHEMA, pattern],
    )
    for (name,) in rows:
        if attached(node, name):
            node.run(schema.detach(record, name))
        node.run(compose("DROP FOREIGN TABLE {table}", table=(names.SCHEMA, name)))


def retire(cluster: Cluster, work: Work) -> dict[str, Any]:
    """On the source, after all nodes have routes to the target: drop the forwarder and the old rows. The old
    rows stay if the target does not have the shard attached."""
    old = (names.SCHEMA, names.old_table(work.table, work.shard, work.generation - 1))
    table = table_of(work)
    with session(cluster, work) as source:
        with session(cluster, work, work.peer) as target:
            found = kind_of(target, table)
        if found is None or found[:2] != ("r", True):
            raise Fail(f"{work.peer} has no attached copy of {table[1]}; {old[1]} is not dropped")
        forwarder = kind_of(source, table)
        with source.transaction(lock_timeout=LOCK_TIMEOUT):
            if forwarder is not None and forwarder[0] == "f":
                source.run(compose("DROP FOREIGN TABLE {table}", table=table))
            kept = bool(work.more.get("keep_old"))
            if not kept:
                source.run(compose("DROP TABLE IF EXISTS {table}", table=old))
        return {"kept": old[1] if kept else None}


def retired(cluster: Cluster, work: Work) -> bool:
    old = (names.SCHEMA, names.old_table(work.table, work.shard, work.generation - 1))
    with session(cluster, work) as source:
        gone = kind_of(source, table_of(work)) is None
        return gone and (bool(work.more.get("keep_old")) or kind_of(source, old) is None)


UNGUARD = routine("move-unguard", unguard, undo=guard)
PIVOT = routine("move-pivot", pivot, check=pivoted)
ATTACH = routine("move-attach", attach_copy, check=copy_attached)
REROUTE = routine("move-reroute", reroute, check=rerouted)
RETIRE = routine("move-retire", retire, check=retired)
