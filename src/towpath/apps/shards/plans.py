"""Builders of the plans that create and drop a table. They are pure: the same record gives the same plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from towpath.apps.shards import names, tables
from towpath.apps.shards.catalogue import PendingChange, TableRecord, check_record
from towpath.apps.shards.routines import PREFIX, Routine, Work
from towpath.flows.actions import TaskCall
from towpath.flows.plan import Plan, Step, StepKind


def step(
    routine: Routine,
    name: str,
    work: Work,
    *,
    after: Iterable[str] = (),
    kind: StepKind = StepKind.REVERSIBLE,
    **more: Any,
) -> Step:
    """A step that runs a routine on the node of its work. Only a reversible step has an undo. `more` are
    fields of `Step`, such as `timeout`, `retry`, `needs`."""

    def call(suffix: str) -> TaskCall:
        return TaskCall(f"{PREFIX}{routine.name}{suffix}", msgspec.Raw(msgspec.json.encode({"work": work})))

    undo = None if routine.undo is None or kind is not StepKind.REVERSIBLE else call(".undo")
    check = None if routine.check is None else call(".check")
    return Step(
        name=name,
        node=work.node,
        action=call(""),
        undo=undo,
        check=check,
        after=tuple(after),
        kind=kind,
        **more,
    )


def new_record(record: TableRecord) -> TableRecord:
    """The record of a table that its plan is about to create; raises `InvalidInput`."""
    pending = PendingChange(record.plan, "create")
    return check_record(msgspec.structs.replace(record, state="creating", pending=pending))


def create_plan(record: TableRecord, extra: Iterable[Step] = ()) -> Plan:
    """Create the tables and routes on all nodes, read the table once from each node, commit the record.
    `extra` are steps between the routes and the commit: those of the replicas."""
    record = new_record(record)
    plan, first = record.plan, record.nodes[0]

    def on(node: str, **more: Any) -> Work:
        return Work(table=record.table, plan=plan, node=node, **more)

    begin = step(
        tables.BEGIN_CREATE,
        "begin",
        on(first, more={"record": msgspec.to_builtins(record)}),
        locks=(names.lock(record.table),),
    )
    made = [step(tables.TABLES, f"tables-{node}", on(node), after=["begin"]) for node in record.nodes]
    ready = [each.name for each in made]
    routes = [step(tables.ROUTES, f"routes-{node}", on(node), after=ready) for node in record.nodes]
    verify = [
        step(tables.VERIFY, f"verify-{node}", on(node), after=[f"routes-{node}"]) for node in record.nodes
    ]
    more = list(extra)
    last = [each.name for each in [*verify, *more]]
    commit = step(tables.COMMIT, "commit", on(first), after=last, kind=StepKind.PIVOT)
    steps = (begin, *made, *routes, *verify, *more, commit)
    return Plan(name=f"create-{record.table}", steps=steps, description=_about("create", record))


def routes_done(record: TableRecord) -> tuple[str, ...]:
    """The steps of `create_plan` after which every node has its tables and routes: `after` of the extra
    steps."""
    return tuple(f"routes-{node}" for node in record.nodes)


def drop_plan(record: TableRecord, plan: str) -> Plan:
    """Drop the table on all nodes. Each node rehearses it first; the pivot marks the record;
    subscriptions are dropped before the slots and tables that they use."""
    first = record.nodes[0]

    def on(node: str, **more: Any) -> Work:
        return Work(table=record.table, plan=plan, node=node, **more)

    known = {"nodes": list(record.nodes)}
    begin = step(tables.BEGIN_DROP, "begin", on(first, more=known), locks=(names.lock(record.table),))
    tried = [
        step(tables.REHEARSE_DROP, f"rehearse-{node}", on(node), after=["begin"]) for node in record.nodes
    ]
    mark = step(
        tables.MARK_DROPPING, "mark", on(first), after=[each.name for each in tried], kind=StepKind.PIVOT
    )
    forward: dict[str, Any] = {"kind": StepKind.FORWARD}
    subscriptions = [
        step(tables.DROP_SUBSCRIPTIONS, f"subscriptions-{node}", on(node), after=["mark"], **forward)
        for node in record.nodes
    ]
    before = [each.name for each in subscriptions]
    dropped = [
        step(tables.DROP_TABLES, f"tables-{node}", on(node), after=before, **forward) for node in record.nodes
    ]
    last = step(tables.FORGET, "forget", on(first), after=[each.name for each in dropped], **forward)
    steps = (begin, *tried, mark, *subscriptions, *dropped, last)
    return Plan(name=f"drop-{record.table}", steps=steps, description=_about("drop", record))


def _about(operation: str, record: TableRecord) -> str:
    return (
        f"{operation} table {record.table}: {len(record.shards)} shards, {record.rf} copies each,"
        f" {len(record.nodes)} nodes"
    )
