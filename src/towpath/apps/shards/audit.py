"""The audit: what on the nodes differs from the catalogue. It finds missing and wrong tables and routes, and
orphans: tables, publications, slots and subscriptions that no record explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from towpath.apps.shards import names
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.inventory import Inventory, Relation, logical_name, of_nodes
from towpath.apps.shards.nodes import Nodes
from towpath.errors import NodeAway


def audit(nodes: Nodes, records: Iterable[TableRecord]) -> list[str]:
    """Read all nodes and return every difference, sorted. Shards that a running plan changes are left out."""
    found = of_nodes(nodes, nodes)
    return differences(found, list(records))


def differences(found: Mapping[str, Inventory | NodeAway], records: Sequence[TableRecord]) -> list[str]:
    """The differences between inventories and records. Pure."""
    reasons = [f"{away}" for away in found.values() if isinstance(away, NodeAway)]
    known = {node: each for node, each in found.items() if isinstance(each, Inventory)}
    for record in records:
        for node in record.nodes:
            if node not in found:
                reasons.append(f"table {record.table}: node {node} is not in the settings")
            elif node in known:
                reasons += _wrong(record, known[node])
    explained = _Explained(records)
    for each in known.values():
        reasons += explained.orphans(each)
    return sorted(reasons)


def _busy(record: TableRecord, shard: int) -> bool:
    """Does a running plan change this shard?"""
    change = record.pending
    return record.state != "ready" or (change is not None and (not change.shards or shard in change.shards))


def _wrong(record: TableRecord, found: Inventory) -> Iterator[str]:
    """Missing and wrong objects of one table on one node."""
    node, table = found.node, record.table
    if record.state == "ready" and record.pending is None and logical_name(record) not in found.logical:
        yield f"{node}: the logical table {logical_name(record)} is missing"
        return
    for number, shard in enumerate(record.shards):
        if _busy(record, number):
            continue
        copy = found.relations.get(names.shard_table(table, number))
        route_name = names.route_table(table, number, shard.generation)
        route = found.relations.get(route_name)
        if node in shard.nodes:
            yield from _wrong_copy(record, number, node, copy)
        if node != shard.primary:
            yield from _wrong_route(record, number, node, route)
        if node in shard.replicas:
            yield from _wrong_subscription(record, number, found)
        if node == shard.primary:
            yield from _wrong_publications(record, number, found)


def _wrong_copy(record: TableRecord, number: int, node: str, copy: Relation | None) -> Iterator[str]:
    name = names.shard_table(record.table, number)
    is_primary = node == record.shards[number].primary
    if copy is None:
        yield f"{node}: table {name} is missing"
    elif copy.kind != "table":
        yield f"{node}: {name} is a {copy.kind} relation, not a table"
    elif is_primary and (copy.parent != logical_name(record) or copy.bound != (len(record.shards), number)):
        yield f"{node}: table {name} is not attached to {logical_name(record)} as shard {number}"
    elif is_primary and copy.guarded:
        yield f"{node}: table {name} is the primary copy, but refuses writes"
    elif is_primary and copy.hash_check:
        yield f"{node}: table {name} still has the constraint {names.hash_check(record.table, number)}"
    elif not is_primary and copy.parent is not None:
        yield f"{node}: table {name} is a replica, but attached to {copy.parent}"
    elif not is_primary and not copy.guarded:
        yield f"{node}: table {name} is a replica, but does not refuse writes"


def _wrong_route(record: TableRecord, number: int, node: str, route: Relation | None) -> Iterator[str]:
    shard = record.shards[number]
    name = names.route_table(record.table, number, shard.generation)
    remote = f"{names.SCHEMA}.{names.shard_table(record.table, number)}"
    if route is None:
        yield f"{node}: route {name} is missing"
    elif route.kind != "foreign" or route.remote != remote:
        yield f"{node}: route {name} leads to {route.remote}, not to {remote}"
    elif route.server != names.server_name(shard.primary):
        server = names.server_name(shard.primary)
        yield f"{node}: route {name} leads to server {route.server}, not to {server}"
    elif route.parent != logical_name(record) or route.bound != (len(record.shards), number):
        yield f"{node}: route {name} is not attached to {logical_name(record)} as shard {number}"


def _wrong_subscription(record: TableRecord, number: int, found: Inventory) -> Iterator[str]:
    name = names.subscription(record.table, number, found.node)
    each = found.subscriptions.get(name)
    if each is None:
        yield f"{found.node}: subscription {name} is missing"
    elif not each.enabled:
        yield f"{found.node}: subscription {name} is disabled"
    elif names.shard_table(record.table, number) not in each.tables:
        yield f"{found.node}: subscription {name} does not include its table"


def _wrong_publications(record: TableRecord, number: int, found: Inventory) -> Iterator[str]:
    table = f"{names.SCHEMA}.{names.shard_table(record.table, number)}"
    for replica in record.shards[number].replicas:
        publication = names.publication(record.table, number, replica)
        slot = names.slot(record.table, number, replica)
        if table not in found.publications.get(publication, ()):
            yield f"{found.node}: publication {publication} of {table} is missing"
        if slot not in found.slots:
            yield f"{found.node}: replication slot {slot} is missing"


class _Explained:
    """The names that records explain, for each node. Objects of a shard that a running plan changes are
    explained on every node."""

    def __init__(self, records: Sequence[TableRecord]) -> None:
        self._records = {record.table: record for record in records}
        self._logical = {logical_name(record): record for record in records}

    def orphans(self, found: Inventory) -> Iterator[str]:
        node = found.node
        for name in found.logical:
            record = self._logical.get(name)
            if record is None or (node not in record.nodes and record.pending is None):
                yield f"{node}: orphan logical table {name}"
        for name, relation in found.relations.items():
            if not self._relation(node, name):
                yield f"{node}: orphan {relation.kind} {names.SCHEMA}.{name}"
        objects = {
            "publication": found.publications,
            "slot": found.slots,
            "subscription": found.subscriptions,
        }
        for what, present in objects.items():
            expected = self._replication(node, what)
            yield from (f"{node}: orphan {what} {name}" for name in present if name not in expected)

    def _relation(self, node: str, name: str) -> bool:
        parts = names.shard_of(name)
        record = None if parts is None else self._records.get(parts[0])
        if parts is None or record is None or parts[1] >= len(record.shards):
            return False
        number = parts[1]
        if _busy(record, number):
            return True
        shard = record.shards[number]
        if name == names.shard_table(record.table, number):
            return node in shard.nodes
        is_route = name == names.route_table(record.table, number, shard.generation)
        return is_route and node in record.nodes and node != shard.primary

    def _replication(self, node: str, what: str) -> set[str]:
        """The names of publications, slots or subscriptions that belong on a node."""
        name_of = {"publication": names.publication, "slot": names.slot, "subscription": names.subscription}
        expected = set()
        for record in self._records.values():
            for number, shard in enumerate(record.shards):
                change = record.pending.shards.get(number) if record.pending is not None else None
                placements = [shard] if change is None else [shard, change]
                busy = _busy(record, number)
                for subscriber in {each for placed in placements for each in placed.nodes}:
                    here = node == subscriber if what == "subscription" else node == shard.primary
                    if busy or (here and subscriber in shard.replicas):
                        expected.add(name_of[what](record.table, number, subscriber))
        return expected
