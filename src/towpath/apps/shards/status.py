"""The state of tables and nodes for `towpath shards status` and `towpath shards nodes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from towpath.apps.shards import names
from towpath.apps.shards.catalogue import Shard, TableRecord
from towpath.apps.shards.inventory import Inventory, NodeFacts, facts_of, of_nodes
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.preflight import preflight
from towpath.errors import NodeAway

RfStatus = Literal["ok", "degraded", "broken"]


class CopyStatus(msgspec.Struct, frozen=True):
    """One copy of a shard. `state`: `ok`, `away` (the node cannot be reached), `missing` (no table),
    `pending` (no table yet or any more: a plan creates or drops the logical table), or the progress of
    its subscription: `copying`, `stopped`. `rows` is an estimate. `rf_status` is that of the
    shard. `pending` is the operation that a running plan makes on it."""

    table: str
    shard: int
    node: str
    role: Literal["primary", "replica"]
    state: str
    rows: int | None
    size: int | None
    rf_status: RfStatus
    pending: str


class NodeStatus(msgspec.Struct, frozen=True):
    """A node, and the reasons why it cannot hold shards."""

    node: str
    reachable: bool
    version: str
    wal_level: str
    free_slots: int | None
    fdw: str
    reasons: tuple[str, ...]


def status(nodes: Nodes, records: Iterable[TableRecord]) -> list[CopyStatus]:
    """Every copy of every shard, the primary first."""
    known = list(records)
    wanted = {node for record in known for node in record.nodes}
    found = of_nodes(nodes, (node for node in wanted if node in nodes))
    return [each for record in known for each in copies(record, found)]


def copies(record: TableRecord, found: Mapping[str, Inventory | NodeAway]) -> Iterator[CopyStatus]:
    """The copies of one table, from the inventories of its nodes. Pure."""
    for number, shard in enumerate(record.shards):
        states = {node: _state(record, number, shard, node, found.get(node)) for node in shard.nodes}
        health = rf_status(record.rf, shard, states)
        for node in shard.nodes:
            each = found.get(node)
            name = names.shard_table(record.table, number)
            relation = each.relations.get(name) if isinstance(each, Inventory) else None
            yield CopyStatus(
                record.table,
                number,
                node,
                "primary" if node == shard.primary else "replica",
                states[node],
                None if relation is None else relation.rows,
                None if relation is None else relation.size,
                health,
                _pending(record, number),
            )


def rf_status(rf: int, shard: Shard, states: Mapping[str, str]) -> RfStatus:
    """`ok`: all copies are there; `broken`: no copy with all rows; `degraded`: everything else, also a lost
    primary with a replica that can be promoted, and a table that is being created."""
    well = [node for node in shard.nodes if states[node] == "ok"]
    if len(well) >= rf:
        return "ok"
    return "degraded" if well or "pending" in states.values() else "broken"


def node_status(nodes: Nodes) -> list[NodeStatus]:
    """Every node of the settings, sorted by name."""
    reasons = preflight(nodes, nodes)
    return [_node(each, reasons) for _, each in sorted(facts_of(nodes, nodes).items())]


def _node(each: NodeFacts | NodeAway, reasons: list[str]) -> NodeStatus:
    if isinstance(each, NodeAway):
        return NodeStatus(each.details["node"], False, "", "", None, "", (str(each),))
    own = tuple(
        why.removeprefix(f"{each.node}: ")
        for why in reasons
        if why.startswith(f"{each.node}: ") or each.node in why.split(":")[0].split(", ")
    )
    free = each.max_slots - each.slots
    return NodeStatus(each.node, True, each.version_text, each.wal_level, free, each.fdw, own)


def _state(
    record: TableRecord, number: int, shard: Shard, node: str, found: Inventory | NodeAway | None
) -> str:
    if not isinstance(found, Inventory):
        return "away"
    relation = found.relations.get(names.shard_table(record.table, number))
    if relation is None or relation.kind != "table":
        return "missing" if record.state == "ready" else "pending"
    if node == shard.primary:
        return "ok"
    subscription = found.subscriptions.get(names.subscription(record.table, number, node))
    if subscription is None or not subscription.enabled:
        return "stopped"
    letter = subscription.tables.get(names.shard_table(record.table, number))
    return "ok" if letter == "r" else "copying"


def _pending(record: TableRecord, shard: int) -> str:
    change = record.pending
    if change is None or (change.shards and shard not in change.shards):
        return ""
    return change.operation
