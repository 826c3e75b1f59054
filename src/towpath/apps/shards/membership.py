"""Nodes that join and leave a table: the logical table and its routes on a node without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from towpath import Fail
from towpath.apps.shards import names, schema, tables
from towpath.apps.shards.catalogue import PendingChange, TableRecord
from towpath.apps.shards.copying import LOCK_TIMEOUT, nothing
from towpath.apps.shards.inventory import relations
from towpath.apps.shards.plans import step
from towpath.apps.shards.routines import Cluster, Work, routine
from towpath.apps.shards.session import compose, session
from towpath.errors import InvalidInput
from towpath.flows.plan import Plan, Step, StepKind


def begin_change(cluster: Cluster, work: Work) -> None:
    """Store the pending change of the plan in the record of the table."""
    cluster.catalogue.begin(work.table, msgspec.convert(work.more["pending"], PendingChange, strict=False))


def may_leave(cluster: Cluster, work: Work) -> None:
    held = cluster.record(work).on(work.node)
    if held:
        raise Fail(f"node {work.node} has copies of the shards {', '.join(map(str, held))} of {work.table}")


def leave(cluster: Cluster, work: Work) -> None:
    """Drop the logical table and the routes of a node without copies. A node with a shard table of a record
    is left as it is."""
    record = cluster.record(work)
    if record.on(work.node):
        raise Fail(f"node {work.node} has copies of shards of {work.table}; its tables are not dropped")
    with session(cluster, work) as node:
        with node.transaction(lock_timeout=LOCK_TIMEOUT):
            logical = (record.schema, record.table)
            node.run(compose("DROP TABLE IF EXISTS {table}", table=logical))
            with node.bounded():
                found = relations(node.connection)
            for name, each in found.items():
                parts = names.shard_of(name)
                if parts is not None and parts[0] == work.table and each.kind == "foreign":
                    node.run(compose("DROP FOREIGN TABLE IF EXISTS {table}", table=(names.SCHEMA, name)))
            with node.bounded():
                schema.drop_unused_servers(node.connection)
                schema.drop_schema_if_empty(node.connection)


def undo_join(cluster: Cluster, work: Work) -> None:
    """Drop the logical table that this plan created on a node."""
    with cluster.nodes.connect(work.node) as connection:
        record = cluster.record(work)
        try:
            ours = tables.has_parent(connection, record, work)
        except tables.NotOurs:
            return
    if ours:
        leave(cluster, work)


def joined(cluster: Cluster, work: Work) -> bool:
    return tables.tables_created(cluster, work)


BEGIN = routine("begin-change", begin_change, check=tables.begun, undo=tables.cancel)
JOIN = routine("join", tables.create_tables, check=joined, undo=undo_join)
JOIN_ROUTES = routine("join-routes", tables.create_routes, check=tables.routes_created, undo=nothing)
MAY_LEAVE = routine("may-leave", may_leave, undo=nothing)
LEAVE = routine("leave", leave)


def begin_step(record: TableRecord, pending: PendingChange, node: str, **more: Any) -> Step:
    """The first step of a plan: store its pending change, under the lock of the table."""
    given = {"pending": msgspec.to_builtins(pending.made_for(record), str_keys=True)}
    work = Work(table=record.table, plan=pending.plan, node=node, more=given)
    return step(BEGIN, "begin", work, locks=(names.lock(record.table),), **more)


def join_plan(record: TableRecord, nodes: Sequence[str], plan: str, operation: str = "add-node") -> Plan:
    """Create the logical table with routes to all shards on nodes that do not have it."""
    known = [node for node in nodes if node in record.nodes]
    if known or not nodes:
        raise InvalidInput(field="nodes", value=list(nodes), expected=f"nodes other than {record.nodes}")
    pending = PendingChange(plan, operation, add_nodes=tuple(sorted(nodes)))
    steps = [begin_step(record, pending, nodes[0])]
    for node in nodes:
        work = Work(table=record.table, plan=plan, node=node)
        steps.append(step(JOIN, f"tables-{node}", work, after=["begin"]))
        steps.append(step(JOIN_ROUTES, f"routes-{node}", work, after=[f"tables-{node}"]))
        steps.append(step(tables.VERIFY, f"verify-{node}", work, after=[f"routes-{node}"]))
    last = [f"verify-{node}" for node in nodes]
    commit = Work(table=record.table, plan=plan, node=nodes[0])
    steps.append(step(tables.COMMIT, "commit", commit, after=last, kind=StepKind.PIVOT))
    about = f"{operation} {', '.join(nodes)} of table {record.table}"
    return Plan(name=f"{operation}-{record.table}", steps=tuple(steps), description=about)


def leave_plan(record: TableRecord, nodes: Sequence[str], plan: str, operation: str = "remove-node") -> Plan:
    """Drop the logical table on nodes that have no copy of a shard any more."""
    held = [node for node in nodes if record.on(node)]
    if held:
        raise InvalidInput(field="nodes", value=held, expected="nodes without copies of shards")
    stay = [node for node in record.nodes if node not in nodes]
    if not stay or not {*nodes} <= {*record.nodes}:
        raise InvalidInput(field="nodes", value=list(nodes), expected=f"some of {record.nodes}, not all")
    pending = PendingChange(plan, operation, remove_nodes=tuple(sorted(nodes)))
    steps = [begin_step(record, pending, stay[0])]
    works = [Work(table=record.table, plan=plan, node=node) for node in nodes]
    steps += [step(MAY_LEAVE, f"may-leave-{each.node}", each, after=["begin"]) for each in works]
    commit = Work(table=record.table, plan=plan, node=stay[0])
    last = [f"may-leave-{node}" for node in nodes]
    steps.append(step(tables.COMMIT, "commit", commit, after=last, kind=StepKind.PIVOT))
    steps += [
        step(LEAVE, f"leave-{each.node}", each, after=["commit"], kind=StepKind.FORWARD) for each in works
    ]
    about = f"{operation} {', '.join(nodes)} of table {record.table}"
    return Plan(name=f"{operation}-{record.table}", steps=tuple(steps), description=about)
