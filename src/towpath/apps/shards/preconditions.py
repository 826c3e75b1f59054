"""Reasons against a move or a replica, all found before anything is changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg

from towpath.apps.shards import names, schema
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.replication import qualified
from towpath.apps.shards.routines import Work
from towpath.apps.shards.session import NodeSession

MIN_VERSION = 160_000
_ROOM = 1.2
"""Free bytes on the target, as a multiple of the size of the shard."""
_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attgenerated::text
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attname
"""
_LOCALE = """
SELECT pg_encoding_to_char(encoding), datlocprovider::text, datcollate,
       concat_ws(' ', system_identifier, pg_postmaster_start_time())
FROM pg_catalog.pg_database, pg_catalog.pg_control_system() WHERE datname = current_database()
"""
_SOURCE = """
SELECT current_setting('wal_level') = 'logical',
       current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_catalog.pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_catalog.pg_stat_replication),
       (SELECT rolsuper OR rolreplication FROM pg_catalog.pg_roles WHERE rolname = current_user)
"""
_TARGET = """
SELECT current_setting('max_logical_replication_workers')::int
         - (SELECT count(*) FROM pg_catalog.pg_stat_activity
            WHERE backend_type LIKE 'logical replication %% worker'),
       current_setting(%s)::int - (SELECT count(*) FROM pg_catalog.pg_replication_origin),
       (SELECT rolsuper OR pg_has_role(oid, 'pg_create_subscription', 'member')
        FROM pg_catalog.pg_roles WHERE rolname = current_user)
"""


def against_move(record: TableRecord, work: Work, source: NodeSession, target: NodeSession) -> list[str]:
    """All reasons why the shard cannot be copied from `source` to `target`."""
    table = (names.SCHEMA, names.shard_table(record.table, work.shard))
    old = [each for each in (source, target) if each.version < MIN_VERSION]
    if old:
        return [f"node {each.node} is older than PostgreSQL {MIN_VERSION // 10_000}" for each in old]
    found = [*_of_servers(source, target), *_of_source(source, table), *_of_target(work, target, table)]
    found += _of_disk(source, target, table)
    logical = qualified((record.schema, record.table))
    if _columns(source, qualified(table)) != _columns(target, logical):
        found.append(
            f"the columns of {table[1]} on {source.node} are not those of {logical} on {target.node}"
        )
    return found


def _of_servers(source: NodeSession, target: NodeSession) -> Iterator[str]:
    ((*here, first),) = source.run(_LOCALE)
    ((*there, second),) = target.run(_LOCALE)
    if first == second:
        yield (
            f"{source.node} and {target.node} are one server: a subscription to the server itself waits"
            " for ever"
        )
    if here != there:
        yield f"encoding and collation differ: {here} on {source.node}, {there} on {target.node}"


def _of_source(source: NodeSession, table: tuple[str, str]) -> Iterator[str]:
    ((logical, slots, senders, allowed),) = source.run(_SOURCE)
    if not logical:
        yield f"wal_level of {source.node} is not logical"
    if slots < 1:
        yield f"no free replication slot on {source.node}: raise max_replication_slots"
    if senders < 2:
        yield f"fewer than two free WAL senders on {source.node}: raise max_wal_senders"
    if not allowed:
        yield f"the user on {source.node} needs the attribute REPLICATION"
    rows = source.run(
        "SELECT relkind::text, relispartition, relreplident::text, EXISTS (SELECT 1 FROM"
        " pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)"
        " FROM pg_catalog.pg_class c WHERE oid = to_regclass(%s)",
        [qualified(table)],
    )
    if not rows or rows[0][:2] != ("r", True):
        yield f"{source.node} has no primary copy {table[1]}"
    elif not rows[0][3] or rows[0][2] not in ("d", "f"):
        yield (
            f"{table[1]} needs a primary key as its replica identity: without one, publishing it makes every"
            " UPDATE and DELETE fail"
        )


def _of_target(work: Work, target: NodeSession, table: tuple[str, str]) -> Iterator[str]:
    origins = "max_active_replication_origins" if target.version >= 180_000 else "max_replication_slots"
    ((workers, free, allowed),) = target.run(_TARGET, [origins])
    if workers < 2:
        yield f"fewer than two free workers on {target.node}: raise max_logical_replication_workers"
    if free < 2:
        yield f"no free replication origin on {target.node}: raise {origins}"
    if not allowed:
        yield f"the user on {target.node} may not create subscriptions"
    comment = target.value(
        "SELECT coalesce(obj_description(to_regclass(%s), 'pg_class'), '') WHERE to_regclass(%s) IS NOT NULL",
        [qualified(table), qualified(table)],
    )
    if comment is not None and comment != schema.tag(work.plan):
        yield f"{table[1]} exists on {target.node} already"


def _of_disk(source: NodeSession, target: NodeSession, table: tuple[str, str]) -> Iterator[str]:
    """Unknown if the user may not run programs on the server."""
    free = free_bytes(target)
    size = source.value("SELECT pg_total_relation_size(to_regclass(%s))", [qualified(table)]) or 0
    if free is not None and free < size * _ROOM:
        yield f"{target.node} has {free} bytes free, and the shard has {size}"


def free_bytes(node: NodeSession) -> int | None:
    """Free bytes of the file system with the data; None if the user may not ask."""
    with suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.ExternalRoutineException, ValueError):
        folder = node.value("SELECT current_setting('data_directory')")
        with node.transaction():
            node.run("CREATE TEMPORARY TABLE towpath_free (line text) ON COMMIT DROP")
            command = psycopg.sql.Literal(f"df -Pk {shlex.quote(folder)}")
            node.run(psycopg.sql.SQL("COPY pg_temp.towpath_free FROM PROGRAM {}").format(command))
            lines = node.run("SELECT line FROM pg_temp.towpath_free")
        return int(str(lines[-1][0]).split()[3]) * 1024
    return None


def _columns(node: NodeSession, table: str) -> list[tuple[Any, ...]]:
    return node.run(_COLUMNS, [table])
