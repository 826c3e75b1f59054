"""The inventory of a node: its version and limits, and every object that belongs to shards, read from the
system catalogues of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from psycopg import Connection, Error

from towpath.apps.shards import names
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.nodes import Nodes
from towpath.errors import NodeAway

MAX_THREADS = 16
"""Nodes read at the same time."""
PREFIX = "towpath_"
"""Of publications, slots and subscriptions."""


class Relation(msgspec.Struct, frozen=True):
    """A relation in the schema of shards. `kind`: `table`, `foreign` or another. `parent` is the logical
    table that it is attached to, `schema.table`; `bound` is (modulus, remainder) of that partition."""

    name: str
    kind: str
    parent: str | None = None
    bound: tuple[int, int] | None = None
    comment: str | None = None
    server: str | None = None
    remote: str | None = None
    guarded: bool = False
    hash_check: bool = False
    rows: int | None = None
    size: int | None = None


class Slot(msgspec.Struct, frozen=True):
    name: str
    active: bool


class Subscribed(msgspec.Struct, frozen=True):
    """A subscription. `tables`: relation -> state letter of its copy, `r` when it is ready."""

    name: str
    enabled: bool
    slot: str | None
    tables: Mapping[str, str]


class Inventory(msgspec.Struct, frozen=True):
    """The objects on one node, by name. `publications`: name -> its tables. `logical`: the logical tables,
    `schema.table` -> comment."""

    node: str
    logical: Mapping[str, str | None]
    relations: Mapping[str, Relation]
    publications: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, Slot]
    subscriptions: Mapping[str, Subscribed]
    servers: tuple[str, ...]


class NodeFacts(msgspec.Struct, frozen=True):
    """A server: what preflight and `towpath shards nodes` look at."""

    node: str
    version: int
    version_text: str
    identity: str
    """The system identifier and the time of the start: two copies of a data directory have one identifier."""
    encoding: str
    wal_level: str
    in_recovery: bool
    superuser: bool
    may_create: bool
    """CREATE on the database."""
    may_replicate: bool
    """The role can create slots and subscriptions, and read how far a subscription is."""
    fdw: str
    """`installed`, `available` or `missing`."""
    slots: int
    max_slots: int
    senders: int
    max_senders: int
    max_workers: int
    """Logical replication workers."""


_RELATIONS = r"""
SELECT c.relname, CASE c.relkind WHEN 'r' THEN 'table' WHEN 'f' THEN 'foreign' ELSE c.relkind::text END,
  pn.nspname || '.' || p.relname,
  regexp_match(pg_get_expr(c.relpartbound, c.oid), 'modulus (\d+), remainder (\d+)'),
  obj_description(c.oid, 'pg_class'), s.srvname,
  (SELECT string_agg(split_part(o, '=', 2), '.' ORDER BY o)
     FROM unnest(f.ftoptions) o WHERE o LIKE 'schema_name=%' OR o LIKE 'table_name=%'),
  EXISTS (SELECT 1 FROM pg_trigger g WHERE g.tgrelid = c.oid AND g.tgname = %(guard)s),
  EXISTS (SELECT 1 FROM pg_constraint k WHERE k.conrelid = c.oid AND k.conname = c.relname || '_hash'),
  CASE WHEN c.relkind = 'r' THEN greatest(pg_stat_get_live_tuples(c.oid), 0) END,
  CASE WHEN c.relkind = 'r' THEN pg_total_relation_size(c.oid) END
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class p ON p.oid = i.inhparent
LEFT JOIN pg_namespace pn ON pn.oid = p.relnamespace
LEFT JOIN pg_foreign_table f ON f.ftrelid = c.oid
LEFT JOIN pg_foreign_server s ON s.oid = f.ftserver
WHERE n.nspname = %(schema)s AND c.relkind NOT IN ('i', 't', 'S')
""".replace("'schema_name=%' OR o LIKE 'table_name=%'", "'schema_name=%%' OR o LIKE 'table_name=%%'")

_LOGICAL = """
SELECT n.nspname || '.' || c.relname, obj_description(c.oid, 'pg_class')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'p' AND obj_description(c.oid, 'pg_class') ^@ 'towpath shards: '
"""

_PUBLICATIONS = """
SELECT p.pubname, array_agg(t.schemaname || '.' || t.tablename) FILTER (WHERE t.tablename IS NOT NULL)
FROM pg_publication p LEFT JOIN pg_publication_tables t ON t.pubname = p.pubname
WHERE p.pubname ^@ %s GROUP BY 1
"""

_SUBSCRIPTIONS = """
SELECT s.subname, s.subenabled, s.subslotname,
  coalesce(jsonb_object_agg(c.relname, r.srsubstate) FILTER (WHERE c.oid IS NOT NULL), '{}')
FROM pg_subscription s
LEFT JOIN pg_subscription_rel r ON r.srsubid = s.oid
LEFT JOIN pg_class c ON c.oid = r.srrelid
WHERE s.subname ^@ %s AND s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
GROUP BY 1, 2, 3
"""

_SLOTS = """
SELECT slot_name, active FROM pg_replication_slots
WHERE slot_name ^@ %s AND (database = current_database() OR database IS NULL)
"""

_FACTS = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'),
  (SELECT system_identifier::text FROM pg_control_system()) || ' ' || pg_postmaster_start_time(),
  current_setting('server_encoding'), current_setting('wal_level'), pg_is_in_recovery(),
  r.rolsuper, r.rolsuper OR has_database_privilege(current_database(), 'CREATE'),
  r.rolsuper OR (r.rolreplication AND pg_has_role('pg_create_subscription', 'USAGE')
    AND has_function_privilege('pg_replication_origin_progress(text, boolean)', 'EXECUTE')),
  CASE WHEN EXISTS (SELECT 1 FROM pg_extension WHERE extname = 'postgres_fdw') THEN 'installed'
       WHEN EXISTS (SELECT 1 FROM pg_available_extensions WHERE name = 'postgres_fdw') THEN 'available'
       ELSE 'missing' END,
  (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
  (SELECT count(*) FROM pg_stat_replication), current_setting('max_wal_senders')::int,
  current_setting('max_logical_replication_workers')::int
FROM pg_roles r WHERE r.rolname = current_user
"""


def relations(connection: Connection[Any]) -> dict[str, Relation]:
    """The relations in the schema of shards."""
    rows = connection.execute(_RELATIONS.encode(), {"schema": names.SCHEMA, "guard": names.GUARD}).fetchall()
    return {
        name: Relation(name, kind, parent, None if bound is None else (int(bound[0]), int(bound[1])), *more)
        for name, kind, parent, bound, *more in rows
    }


def inventory(connection: Connection[Any], node: str) -> Inventory:
    """All objects of shards on a node."""
    publications = connection.execute(_PUBLICATIONS.encode(), (PREFIX,)).fetchall()
    slots = connection.execute(_SLOTS.encode(), (PREFIX,)).fetchall()
    subscriptions = connection.execute(_SUBSCRIPTIONS.encode(), (PREFIX,)).fetchall()
    servers = connection.execute(
        "SELECT srvname FROM pg_foreign_server WHERE srvname ^@ %s ORDER BY 1", (names.SERVER_PREFIX,)
    ).fetchall()
    return Inventory(
        node,
        dict(connection.execute(_LOGICAL.encode()).fetchall()),
        relations(connection),
        {name: tuple(tables or ()) for name, tables in publications},
        {name: Slot(name, active) for name, active in slots},
        {each[0]: Subscribed(*each) for each in subscriptions},
        tuple(server for (server,) in servers),
    )


def facts(connection: Connection[Any], node: str) -> NodeFacts:
    """The version, the limits and the rights on a node."""
    row = connection.execute(_FACTS.encode()).fetchone()
    assert row is not None
    return NodeFacts(node, *row)


def of_nodes(nodes: Nodes, which: Iterable[str]) -> dict[str, Inventory | NodeAway]:
    """The inventories of several nodes, read at the same time; for a node that cannot be reached, the
    error."""
    return _each(nodes, which, inventory)


def facts_of(nodes: Nodes, which: Iterable[str]) -> dict[str, NodeFacts | NodeAway]:
    """The facts of several nodes, as `of_nodes`."""
    return _each(nodes, which, facts)


def _each(nodes: Nodes, which: Iterable[str], read: Any) -> dict[str, Any]:
    wanted = sorted(set(which))

    def one(node: str) -> Any:
        try:
            with nodes.connect(node, statement_timeout="10s") as connection:
                return read(connection, node)
        except NodeAway as away:
            return away
        except Error as error:
            return NodeAway(node=node, why=str(error).strip())

    if not wanted:
        return {}
    with ThreadPoolExecutor(min(len(wanted), MAX_THREADS)) as threads:
        return dict(zip(wanted, threads.map(one, wanted), strict=True))


def logical_name(record: TableRecord) -> str:
    return f"{record.schema}.{record.table}"
