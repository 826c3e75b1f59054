"""Replicas: copies of a shard that follow its primary by logical replication. A replica follows another
primary after a move, is dropped, or is promoted when the node of its primary is lost.

Replication is asynchronous: rows that the lost primary had acknowledged and not yet sent are not on any
replica. `positions` and the result of the promotion report how far the replica was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import sql

from towpath import Exponential, Fail
from towpath.apps.shards import copying, cutover, names, replication, schema, tables
from towpath.apps.shards.catalogue import PendingChange, Shard, TableRecord
from towpath.apps.shards.copying import LOCK_TIMEOUT, kind_of, table_of
from towpath.apps.shards.membership import begin_step
from towpath.apps.shards.nodes import NodeAway
from towpath.apps.shards.plans import step
from towpath.apps.shards.routines import Cluster, Work, routine
from towpath.apps.shards.session import NodeSession, compose, session
from towpath.errors import InvalidInput
from towpath.flows.plan import Plan, Step, StepKind, StepRetry

_FORWARD: dict[str, Any] = {
    "kind": StepKind.FORWARD,
    "retry": StepRetry(attempts=200, backoff=Exponential(base=0.5, cap=60.0), check_attempts=200),
}


def switch(cluster: Cluster, work: Work) -> None:
    """Follow the new primary (the peer). The replica has all rows up to the pivot; the slot on the new
    primary was made before the pivot, and changes that came to it by replication are left out (`origin =
    none`)."""
    with session(cluster, work) as node:
        if not _follows(node, work):
            _follow(cluster, work, node)


def _follow(cluster: Cluster, work: Work, node: NodeSession) -> None:
    """Replace the subscription in one transaction; its comment names the generation that it follows."""
    name = names.subscription(work.table, work.shard, work.node)
    with node.transaction():
        if node.value("SELECT 1 FROM pg_catalog.pg_subscription WHERE subname = %s", [name]):
            for statement in replication.DROP_STATEMENTS:
                node.run(compose(statement, name=name))
        replication.subscribe_statement(
            node,
            name,
            cluster.nodes.conninfo(work.peer),
            publication=names.publication(work.table, work.shard, work.node),
            slot=names.slot(work.table, work.shard, work.node),
            copy=False,
        )
        node.run(schema.comment("SUBSCRIPTION", sql.Identifier(name), _following(work)))


def _following(work: Work) -> str:
    return f"towpath shards: generation {work.generation} of {work.peer}"


def _follows(node: NodeSession, work: Work) -> bool:
    comment = node.value(
        "SELECT obj_description(oid, 'pg_subscription') FROM pg_catalog.pg_subscription WHERE subname = %s",
        [names.subscription(work.table, work.shard, work.node)],
    )
    return bool(comment == _following(work))


def follows(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as node:
        return _follows(node, work)


def demote(cluster: Cluster, work: Work) -> None:
    """The former primary becomes a replica of the new one (the peer): its rows are those of the pivot."""
    record, table = cluster.record(work), table_of(work)
    old = names.old_table(work.table, work.shard, work.generation - 1)
    with session(cluster, work) as node:
        if kind_of(node, (names.SCHEMA, old)) is not None:
            with node.transaction(lock_timeout=LOCK_TIMEOUT):
                node.run(compose("DROP FOREIGN TABLE IF EXISTS {table}", table=table))
                node.run(
                    compose("ALTER TABLE {old} RENAME TO {name}", old=(names.SCHEMA, old), name=table[1])
                )
                for statement in schema.guard(record, work.shard):
                    node.run(statement)
        copying.add_check(record, work.shard, node)
        if not _follows(node, work):
            _follow(cluster, work, node)


def drop_replica(cluster: Cluster, work: Work) -> None:
    """Drop the copy of a replica, if the primary (the peer) has its own copy attached."""
    table = table_of(work)
    with session(cluster, work) as node:
        found = kind_of(node, table)
        replication.drop_subscription(node, names.subscription(work.table, work.shard, work.node))
        if found is None or found[0] != "r":
            return
        with session(cluster, work, work.peer) as primary:
            kept = kind_of(primary, table)
        if found[1] or kept is None or kept[:2] != ("r", True):
            raise Fail(f"{table[1]} on {work.node} may be the only copy; it is not dropped")
        with node.transaction(lock_timeout=LOCK_TIMEOUT):
            node.run(compose("DROP TABLE IF EXISTS {table}", table=table))


def dropped(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as node:
        return kind_of(node, table_of(work)) is None


def initial_steps(record: TableRecord, plan: str, after: tuple[str, ...]) -> tuple[Step, ...]:
    """The steps that give a new table its replicas, for the plan that creates it."""
    made: list[Step] = []
    for number, shard in enumerate(record.shards):
        for node in shard.replicas:
            made += copy_steps(record, number, (shard.primary, node), plan, after)
    return tuple(made)


def copy_steps(
    record: TableRecord, shard: int, way: tuple[str, str], plan: str, after: Sequence[str]
) -> list[Step]:
    """Create a replica of an empty shard: `way` is from the primary to the replica."""
    primary, node = way
    generation = record.shards[shard].generation
    here = Work(table=record.table, plan=plan, node=node, shard=shard, peer=primary, generation=generation)
    there = Work(table=record.table, plan=plan, node=primary, shard=shard, peer=node, generation=generation)
    parts = [
        (copying.CREATE, "create", here),
        (copying.PUBLISH, "publish", there),
        (copying.RESERVE, "reserve", there),
        (copying.SUBSCRIBE, "subscribe", here),
        (copying.COPY, "copy", here),
        (copying.FINISH, "finish", here),
    ]
    made: list[Step] = []
    for routine_, name, work in parts:
        made.append(step(routine_, f"{name}-s{shard}-{node}", work, after=after))
        after = [made[-1].name]
    return made


# Promotion


def positions(cluster: Cluster, record: TableRecord, lost: str) -> dict[int, dict[str, int]]:
    """For every shard with its primary on the lost node: the position in the primary's WAL that each replica
    has applied. Replicas that cannot be reached are left out."""
    found: dict[int, dict[str, int]] = {}
    for number, shard in enumerate(record.shards):
        if shard.primary == lost:
            found[number] = {}
            for node in shard.replicas:
                work = Work(table=record.table, plan="", node=node, shard=number)
                try:
                    with session(cluster, work) as replica:
                        found[number][node] = _applied(replica, work)
                except NodeAway:
                    continue
    return found


def _applied(node: NodeSession, work: Work) -> int:
    statement = (
        "SELECT coalesce(pg_replication_origin_progress('pg_' || oid, false) - '0/0'::pg_lsn, 0)::bigint"
        " FROM pg_catalog.pg_subscription WHERE subname = %s"
    )
    found = node.value(statement, [names.subscription(work.table, work.shard, work.node)])
    return -1 if found is None else int(found)


def furthest(positions: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """The replica of each shard with the highest position; the first by name among equals. Raises
    `InvalidInput` if a shard has none."""
    without = [shard for shard, found in positions.items() if not found]
    if without:
        raise InvalidInput(
            field="lost", value=without, expected="a replica that can be reached for each of these shards"
        )
    return {shard: min(found, key=lambda node: (-found[node], node)) for shard, found in positions.items()}


def promote_plan(record: TableRecord, lost: str, chosen: Mapping[int, str], plan: str) -> Plan:
    """Make the chosen replicas primaries, and take the lost node out of the table. The copies that are
    missing then are added by `moves.change_plans`."""
    shards: dict[int, Shard] = {}
    for number, shard in enumerate(record.shards):
        left = tuple(node for node in shard.nodes if node != lost)
        if shard.primary == lost:
            if chosen.get(number) not in left:
                raise InvalidInput(field="chosen", value=chosen.get(number), expected=f"one of {left}")
            first = chosen[number]
            left = (first, *(node for node in left if node != first))
            shards[number] = Shard(left, shard.generation + 1)
        elif lost in shard.nodes:
            shards[number] = Shard(left, shard.generation)
    stay = [node for node in record.nodes if node != lost]
    pending = PendingChange(plan, "promote", shards=shards, remove_nodes=(lost,))
    base = Work(table=record.table, plan=plan, node=stay[0], peer=lost)
    steps = [
        begin_step(record, pending, stay[0]),
        step(LOST, "lost", base, after=["begin"]),
        step(tables.COMMIT, "commit", base, after=["lost"], kind=StepKind.PIVOT),
    ]
    for number, shard in shards.items():
        steps += _promotion(record, number, shard, lost, base)
    about = f"promote the replicas of node {lost} of table {record.table}"
    return Plan(name=f"promote-{record.table}", steps=tuple(steps), description=about)


def _promotion(record: TableRecord, shard: int, new: Shard, lost: str, base: Work) -> list[Step]:
    def work(node: str, peer: str) -> Work:
        return Work(
            table=base.table,
            plan=base.plan,
            node=node,
            shard=shard,
            peer=peer,
            generation=new.generation,
        )

    if record.shards[shard].primary != lost:
        slot = step(
            copying.RELEASE, f"release-s{shard}", work(new.primary, lost), after=["commit"], **_FORWARD
        )
        publication = step(
            copying.UNPUBLISH, f"unpublish-s{shard}", work(new.primary, lost), after=[slot.name], **_FORWARD
        )
        return [slot, publication]
    promote = step(PROMOTE, f"promote-s{shard}", work(new.primary, lost), after=["commit"], **_FORWARD)
    made = [promote]
    for node in record.nodes:
        if node not in (lost, new.primary):
            route = work(node, new.primary)
            made.append(
                step(cutover.REROUTE, f"reroute-s{shard}-{node}", route, after=["commit"], **_FORWARD)
            )
    for node in new.replicas:
        after = [promote.name]
        for routine_, name, each in (
            (EMPTY, "empty", work(node, new.primary)),
            (copying.PUBLISH, "publish", work(new.primary, node)),
            (copying.RESERVE, "reserve", work(new.primary, node)),
            (copying.SUBSCRIBE, "subscribe", work(node, new.primary)),
            (copying.COPY, "copy", work(node, new.primary)),
        ):
            made.append(step(routine_, f"{name}-s{shard}-{node}", each, after=after, **_FORWARD))
            after = [made[-1].name]
    return made


def lost(cluster: Cluster, work: Work) -> None:
    """Refuse a promotion while the lost node (the peer) answers: its clients would write to two primaries."""
    try:
        with session(cluster, work, work.peer):
            pass
    except NodeAway:
        return
    raise Fail(f"node {work.peer} answers; remove it with remove-node, or stop it first")


def promote(cluster: Cluster, work: Work) -> dict[str, Any]:
    """Make this replica the primary: end its subscription, allow writes, attach it."""
    with session(cluster, work) as node:
        applied = _applied(node, work)
        replication.drop_subscription(node, names.subscription(work.table, work.shard, work.node))
    cutover.unguard(cluster, work)
    return {"applied": applied, **cutover.attach_copy(cluster, work)}


def empty(cluster: Cluster, work: Work) -> None:
    """Prepare another replica of the lost primary for a new copy: it may have rows that the new primary does
    not have. The new primary (the peer) must have its copy attached."""
    table = table_of(work)
    with session(cluster, work) as node:
        if _of_plan(node, work):
            return
        with session(cluster, work, work.peer) as primary:
            kept = kind_of(primary, table)
        if kept is None or kept[:2] != ("r", True):
            raise Fail(f"{work.peer} has no attached copy of {table[1]}")
        replication.drop_subscription(node, names.subscription(work.table, work.shard, work.node))
        node.run(schema.comment("TABLE", sql.Identifier(*table), schema.tag(work.plan)))


def emptied(cluster: Cluster, work: Work) -> bool:
    with session(cluster, work) as node:
        return _of_plan(node, work)


def _of_plan(node: NodeSession, work: Work) -> bool:
    """Whether the table has the tag of this plan; `copying.subscribe` empties such a table."""
    found = kind_of(node, table_of(work))
    return found is not None and found[2] == schema.tag(work.plan)


SWITCH = routine("replica-switch", switch, check=follows)
DEMOTE = routine("replica-demote", demote, check=follows)
DROP = routine("replica-drop", drop_replica, check=dropped)
LOST = routine("replica-lost", lost, undo=copying.nothing)
PROMOTE = routine("replica-promote", promote, check=cutover.copy_attached)
EMPTY = routine("replica-empty", empty, check=emptied)
