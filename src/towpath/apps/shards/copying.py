"""The steps of a move before its pivot: preflight, the table on the target, replication, and the comparison
of the rows. Steps of the target have the source as their peer, steps of the source the target.

The functions are idempotent. An undo drops only relations with the tag of its own plan, and the copy on the
target only while the source has its own copy attached."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from towpath import Fail, Running, current
from towpath.apps.shards import names, replication, schema
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.nodes import NodeAway
from towpath.apps.shards.preconditions import against_move
from towpath.apps.shards.replication import ReplicationBroken, qualified
from towpath.apps.shards.routines import Cluster, Work, routine
from towpath.apps.shards.session import NodeSession, compose, session
from towpath.apps.shards.verify import Comparison
from towpath.errors import NotInJob

MAX_LAG = 1024 * 1024
"""Bytes of WAL that the target may be behind when the copy counts as ready."""
STALLED_TIMES = 10
"""Of the limit of a statement: so long a copy may be without progress before the step is tried again."""
LOCK_TIMEOUT = "1s"
TRIES = 30
_PAUSE = 0.3
_TRANSIENT = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected, ReplicationBroken)
T = TypeVar("T")


def job() -> Running | None:
    """The job of the step; None if the routine is called by another program."""
    try:
        return current()
    except NotInJob:
        return None


def report(done: int, total: int | None = None) -> None:
    """Report progress, and stop if the job was asked to."""
    running = job()
    if running is not None:
        running.check()
        running.progress(done, total)


def check_stop() -> None:
    running = job()
    if running is not None:
        running.check()


def table_of(work: Work) -> tuple[str, str]:
    return names.SCHEMA, names.shard_table(work.table, work.shard)


def kind_of(node: NodeSession, table: tuple[str, str]) -> tuple[str, bool, str] | None:
    """The kind (`r` table, `f` foreign table), whether it is a partition, and the comment of a relation."""
    rows = node.run(
        "SELECT c.relkind::text, c.relispartition, coalesce(obj_description(c.oid, 'pg_class'), '')"
        " FROM pg_catalog.pg_class c WHERE c.oid = to_regclass(%s)",
        [qualified(table)],
    )
    return rows[0] if rows else None


def nothing(cluster: Cluster, work: Work) -> None:
    """The undo of a step without an effect."""


def preflight(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Refuse the move, with all reasons, before anything is changed."""
    record = cluster.record(work)
    with session(cluster, work) as target, session(cluster, work, work.peer) as source:
        reasons = against_move(record, work, source, target)
        if reasons:
            raise Fail("; ".join(reasons))
        size = source.value("SELECT pg_total_relation_size(to_regclass(%s))", [qualified(table_of(work))])
        return {"bytes": size}


def create_copy(cluster: Cluster, work: Work) -> None:
    """Create the shard table on the target: empty, guarded, without secondary indexes."""
    record = cluster.record(work)
    with session(cluster, work) as target:
        if _created(target, work):
            return
        with target.transaction(lock_timeout=LOCK_TIMEOUT):
            target.run(schema.create_shard(record, work.shard))
            for statement in schema.guard(record, work.shard):
                target.run(statement)
            target.run(schema.comment("TABLE", sql.Identifier(*table_of(work)), schema.tag(work.plan)))


def copy_created(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as target:
        return _of_plan(target, work)


def _created(target: NodeSession, work: Work) -> bool:
    """Whether the table is there and belongs to this plan; raises `Fail` for a table of another plan."""
    if _of_plan(target, work):
        return True
    if kind_of(target, table_of(work)) is not None:
        raise Fail(f"{table_of(work)[1]} exists on node {work.node} and is not of plan {work.plan}")
    return False


def _of_plan(target: NodeSession, work: Work) -> bool:
    found = kind_of(target, table_of(work))
    return found is not None and found[0] == "r" and found[2] == schema.tag(work.plan)


def drop_copy(cluster: Cluster, work: Work) -> None:
    """Drop the copy on the target, if this plan created it and the source has its own copy attached: an undo
    never drops the last copy."""
    with session(cluster, work) as target:
        found = kind_of(target, table_of(work))
        if found is None or found[0] != "r" or found[2] != schema.tag(work.plan):
            return
        with session(cluster, work, work.peer) as source:
            kept = kind_of(source, table_of(work))
        if found[1] or kept is None or kept[:2] != ("r", True):
            raise Fail(f"{table_of(work)[1]} on {work.node} may be the only copy; it is not dropped")
        with target.transaction(lock_timeout=LOCK_TIMEOUT):
            target.run(compose("DROP TABLE IF EXISTS {table}", table=table_of(work)))


def publish(cluster: Cluster, work: Work) -> None:
    with session(cluster, work) as source:
        replication.create_publication(source, _publication(work, work.peer), table_of(work))


def published(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as source:
        return replication.publishes(source, _publication(work, work.peer), table_of(work))


def unpublish(cluster: Cluster, work: Work) -> None:
    with session(cluster, work) as source:
        replication.drop_publication(source, _publication(work, work.peer))


def reserve(cluster: Cluster, work: Work) -> None:
    """Create the slot on the source, in a transaction of its own."""
    with session(cluster, work) as source:
        replication.create_slot(source, _slot(work, work.peer))


def reserved(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as source:
        return replication.slot_exists(source, _slot(work, work.peer))


def release(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Drop the slot, and the slots that table synchronisation has left behind: DROP SUBSCRIPTION drops them
    only if it reaches this node."""
    with session(cluster, work) as source:
        replication.drop_slot(source, _slot(work, work.peer))
        left = replication.sync_slots(source)
        dropped = _orphans(cluster, work, source, left) if left else []
        for name in dropped:
            replication.drop_slot(source, name)
        return {"sync_slots": dropped}


def _orphans(
    cluster: Cluster, work: Work, source: NodeSession, slots: list[tuple[str, str, str]]
) -> list[str]:
    """The synchronisation slots of subscriptions that no node of the table has. None while a node is away:
    the audit finds them later."""
    live = dict([replication.subscriptions(source)])
    try:
        for node in cluster.record(work).nodes:
            if node != work.node:
                with session(cluster, work, node) as each:
                    identifier, found = replication.subscriptions(each)
                    live[identifier] = live.get(identifier, set()) | found
    except NodeAway:
        return []
    return [name for name, oid, server in slots if oid not in live.get(server, {oid})]


def subscribe(cluster: Cluster, work: Work) -> None:
    """Subscribe the target and begin the copy. The table is emptied first: an earlier subscription of this
    plan may have copied rows, and copying them again would fail on the primary key."""
    table = table_of(work)
    with session(cluster, work) as target:
        name = names.subscription(work.table, work.shard, work.node)
        if replication.subscribed(target, name, table):
            return
        replication.drop_subscription(target, name)
        found = kind_of(target, table)
        if found is None or found[1] or found[2] != schema.tag(work.plan):
            raise Fail(f"{table[1]} on node {work.node} is not the empty copy of plan {work.plan}")
        with target.transaction(lock_timeout=LOCK_TIMEOUT):
            # Only a superuser may set session_replication_role, for which the guard does not fire.
            for statement in (
                "ALTER TABLE {table} DISABLE TRIGGER USER",
                "TRUNCATE {table}",
                "ALTER TABLE {table} ENABLE TRIGGER USER",
            ):
                target.run(compose(statement, table=table))
        replication.create_subscription(
            target,
            name,
            cluster.nodes.conninfo(work.peer),
            publication=_publication(work, work.node),
            slot=_slot(work, work.node),
            table=table,
        )


def unsubscribe(cluster: Cluster, work: Work) -> None:
    with session(cluster, work) as target:
        replication.drop_subscription(target, names.subscription(work.table, work.shard, work.node))


def await_copy(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Wait until all rows are copied and the target is less than `MAX_LAG` behind. Rows are reported as
    progress."""
    name, table = names.subscription(work.table, work.shard, work.node), table_of(work)
    with session(cluster, work) as target, session(cluster, work, work.peer) as source:
        total = source.value(
            "SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%s)", [qualified(table)]
        )
        seen, since, pause = object(), time.monotonic(), 0.02
        while True:
            check_stop()
            state = replication.state_of(target, name, table)
            behind = replication.lag(source, _slot(work, work.node))
            if state is None or behind is None:
                raise ReplicationBroken(name=name, node=work.node, why="the subscription or its slot is gone")
            if state == "r" and behind <= MAX_LAG:
                return {"lag_bytes": behind}
            copied = target.value(
                "SELECT tuples_processed FROM pg_stat_progress_copy WHERE relid = to_regclass(%s)",
                [qualified(table)],
            )
            if copied is not None:
                report(copied, max(total, copied))
            if (state, behind, copied) != seen:
                seen, since = (state, behind, copied), time.monotonic()
            elif time.monotonic() - since > STALLED_TIMES * target.limit:
                why = f"no progress in state {state}; the log of the server has the reason"
                raise ReplicationBroken(name=name, node=work.node, why=why)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)


def finish_copy(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Create the secondary indexes of the source on the target, and add the CHECK constraint that makes the
    later ATTACH skip its scan. During the copy these would slow down every row."""
    table, record = table_of(work), cluster.record(work)
    with session(cluster, work, work.peer) as source, session(cluster, work) as target:
        made = []
        for name, definition in secondary_indexes(source, table):
            if target.value("SELECT to_regclass(%s)", [qualified((table[0], name))]) is None:
                target.run(definition, endless=True)
                made.append(name)
        add_check(record, work.shard, target)
        return {"indexes": made}


def add_check(record: TableRecord, shard: int, node: NodeSession) -> None:
    """Add the partition constraint as a CHECK to a copy that is not attached, unless it has it."""
    with node.bounded():
        oid = schema.parent_oid(node.connection, record)
    if oid is None:
        raise Fail(f"node {node.node} has no table {record.schema}.{record.table}")
    exists = "SELECT 1 FROM pg_catalog.pg_constraint WHERE conrelid = to_regclass(%s) AND conname = %s"
    table = (names.SCHEMA, names.shard_table(record.table, shard))
    if node.value(exists, [qualified(table), names.hash_check(record.table, shard)]) is None:
        node.run(schema.add_hash_check(record, shard, oid), endless=True)


def secondary_indexes(node: NodeSession, table: tuple[str, str]) -> list[tuple[str, str]]:
    """Name and definition of the indexes that no constraint has created."""
    return node.run(
        "SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM pg_catalog.pg_index i"
        " JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid"
        " WHERE i.indrelid = to_regclass(%s)"
        " AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_constraint k WHERE k.conindid = i.indexrelid"
        " AND k.conrelid = i.indrelid) ORDER BY 1",
        [qualified(table)],
    )


def verify(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Compare the rows on both nodes, chunk by chunk, and collect the statistics of the target meanwhile. The
    last key compared is the cursor of the job, so that the next attempt continues behind it."""
    with (
        session(cluster, work, work.peer) as source,
        session(cluster, work) as target,
        session(cluster, work, None, "analyze") as other,
        ThreadPoolExecutor(1) as thread,
    ):
        comparison = Comparison(source, target, table_of(work), _slot(work, work.node))
        with session(cluster, work, work.peer, "lock") as holder:
            pause = retried(lambda number: comparison.synchronise(holder))
        analyzed = thread.submit(other.run, compose("ANALYZE {table}", table=table_of(work)), endless=True)
        running = job()
        cursor = None if running is None else running.cursor
        after, rows = (tuple(cursor["after"]), cursor["rows"]) if cursor else (None, 0)
        for last, count in comparison.chunks(after, work.more.get("chunk")):
            rows += count
            report(rows)
            if last is not None and running is not None:
                running.checkpoint({"after": list(last), "rows": rows})
        analyzed.result()
        return {"rows": rows, "pause": round(pause, 4)}


def retried(attempt: Callable[[int], T]) -> T:
    """Try again while a lock is not granted or the target has not caught up."""
    for number in range(1, TRIES + 1):
        check_stop()
        try:
            return attempt(number)
        except _TRANSIENT:
            if number == TRIES:
                raise
        time.sleep(_PAUSE)
    raise AssertionError


def _publication(work: Work, subscriber: str) -> str:
    return names.publication(work.table, work.shard, subscriber)


def _slot(work: Work, subscriber: str) -> str:
    return names.slot(work.table, work.shard, subscriber)


PREFLIGHT = routine("move-preflight", preflight, undo=nothing)
CREATE = routine("move-create", create_copy, check=copy_created, undo=drop_copy)
PUBLISH = routine("move-publish", publish, check=published, undo=unpublish)
RESERVE = routine("move-reserve", reserve, check=reserved, undo=release)
SUBSCRIBE = routine("move-subscribe", subscribe, undo=unsubscribe)
COPY = routine("move-copy", await_copy, undo=nothing)
FINISH = routine("move-finish", finish_copy, undo=nothing)
VERIFY = routine("move-verify", verify, undo=nothing)
UNSUBSCRIBE = routine("move-unsubscribe", unsubscribe)
RELEASE = routine("move-release", release)
UNPUBLISH = routine("move-unpublish", unpublish)
