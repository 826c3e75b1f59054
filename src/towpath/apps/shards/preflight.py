"""Preflight: every reason why servers cannot hold a sharded table, found before the first step of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from psycopg import Error

from towpath.apps.shards import names, schema
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.inventory import (
    Inventory,
    NodeFacts,
    facts_of,
    logical_name,
    of_nodes,
)
from towpath.apps.shards.nodes import Nodes
from towpath.errors import NodeAway, TowpathError

MIN_VERSION = 160_000
"""PostgreSQL 16: `origin = none` of subscriptions."""


class NotReady(TowpathError):
    """`reasons` is the list of all reasons."""

    sentence = "the servers are not ready: {text}"

    def __init__(self, *, reasons: Sequence[str], text: str = "") -> None:
        self.reasons = tuple(reasons)
        super().__init__(reasons=self.reasons, text="; ".join(reasons))


def preflight(nodes: Nodes, which: Iterable[str], copies: Mapping[str, int] | None = None) -> list[str]:
    """The reasons why these nodes cannot hold shards, sorted. `copies`: new slots that each node needs."""
    found = facts_of(nodes, which)
    reasons = [str(each) for each in found.values() if isinstance(each, NodeAway)]
    known = [each for each in found.values() if isinstance(each, NodeFacts)]
    for each in known:
        reasons += [f"{each.node}: {why}" for why in _against(each, (copies or {}).get(each.node, 1))]
    reasons += _together(known)
    return sorted(reasons)


def unreachable(nodes: Nodes, which: Iterable[str]) -> list[str]:
    """The reasons why some of these nodes cannot be used at all, sorted."""
    return sorted(str(each) for each in facts_of(nodes, which).values() if isinstance(each, NodeAway))


def preflight_create(nodes: Nodes, record: TableRecord) -> list[str]:
    """The reasons why this table cannot be created: those of `preflight`, names that are taken, and types
    that a node does not have."""
    copies = {
        node: sum(len(shard.replicas) for shard in record.shards if shard.primary == node) + 1
        for node in record.nodes
    }
    reasons = preflight(nodes, record.nodes, copies)
    for node, found in of_nodes(nodes, record.nodes).items():
        if isinstance(found, Inventory):
            reasons += [f"{node}: {why}" for why in _taken(record, found)]
            reasons += [f"{node}: {why}" for why in _types(nodes, node, record)]
    return sorted(reasons)


def _against(each: NodeFacts, slots: int) -> Iterator[str]:
    if each.version < MIN_VERSION:
        yield f"PostgreSQL {each.version_text}; version {MIN_VERSION // 10_000} or newer is needed"
    if each.in_recovery:
        yield "the server is a standby; use the address of its primary"
    if each.wal_level != "logical":
        yield f"wal_level is {each.wal_level}; set wal_level = logical and restart the server"
    free = each.max_slots - each.slots
    if free < slots:
        yield f"{free} of {each.max_slots} replication slots are free, {slots} needed: max_replication_slots"
    if each.max_senders - each.senders < slots:
        left = each.max_senders - each.senders
        yield f"{left} of {each.max_senders} WAL senders are free, {slots} needed: max_wal_senders"
    if each.max_workers < 2:
        yield f"max_logical_replication_workers is {each.max_workers}; at least 2 are needed"
    if not each.may_create:
        yield "the role has no CREATE on the database"
    if not each.may_replicate:
        yield (
            "the role needs REPLICATION, membership in pg_create_subscription, and EXECUTE on"
            " pg_replication_origin_progress(text, boolean)"
        )
    if each.fdw == "missing":
        yield "the extension postgres_fdw is not available"
    elif each.fdw == "available" and not each.superuser:
        yield "a superuser must run CREATE EXTENSION postgres_fdw first"


def _together(known: Sequence[NodeFacts]) -> Iterator[str]:
    """Reasons against nodes as a set."""
    servers: dict[str, list[str]] = {}
    for each in known:
        servers.setdefault(each.identity, []).append(each.node)
    for same in servers.values():
        if len(same) > 1:
            yield f"{', '.join(same)}: the same PostgreSQL server; each node must be one of its own"
    encodings = sorted({each.encoding for each in known})
    if len(encodings) > 1:
        yield f"the databases have different encodings: {', '.join(encodings)}"


def _taken(record: TableRecord, found: Inventory) -> Iterator[str]:
    relations = [name for name in found.relations if (names.shard_of(name) or ("",))[0] == record.table]
    yield from (f"{names.SCHEMA}.{name} exists already" for name in sorted(relations)[:5])
    if logical_name(record) in found.logical:
        yield f"{logical_name(record)} exists already"


def _types(nodes: Nodes, node: str, record: TableRecord) -> Iterator[str]:
    """Create the logical table and a shard table, then roll back: name, types, collations and operators."""
    try:
        with nodes.connect(node, autocommit=False, lock_timeout="5s") as connection:
            try:
                _rehearse(connection, record)
            finally:
                connection.rollback()
    except Error as error:
        yield str(error).strip().splitlines()[0]
    except NodeAway as away:
        yield str(away)


def _rehearse(connection: Any, record: TableRecord) -> None:
    schema.ensure_schema(connection)
    connection.execute(schema.create_parent(record))
    if not connection.execute("SELECT to_regclass(%s)", (f"{names.SCHEMA}.{record.table}_s0",)).fetchone()[0]:
        connection.execute(schema.create_shard(record, 0))
        connection.execute(schema.attach(record, names.shard_table(record.table, 0), 0))
