"""SQL statements of the logical table, its shard tables and its routes. The functions that only build a
statement are pure; the functions with a connection run in the transaction of the caller.

Sessions of `Nodes.connect` have an empty search path, so every name is qualified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from psycopg import Connection
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from towpath.apps.shards import names
from towpath.apps.shards.catalogue import TableRecord
from towpath.apps.shards.nodes import Nodes

FETCH_SIZE = 1_000
"""Rows that a route transfers at once, for reads and for inserts of several rows."""


def relation(name: str) -> Identifier:
    """A relation in the schema of shards."""
    return Identifier(names.SCHEMA, name)


def logical(record: TableRecord) -> Identifier:
    return Identifier(record.schema, record.table)


def tag(plan: str) -> str:
    """The comment of a relation. An undo drops only the relations of its own plan."""
    return f"towpath shards: plan {plan}"


def columns(record: TableRecord, *, defaults: bool = True) -> Composed:
    """The column definitions, separated by commas."""
    return SQL(", ").join(
        SQL("{} {}{}{}").format(
            Identifier(each.name),
            SQL(each.type),
            SQL(" NOT NULL" if each.not_null or each.name in record.key else ""),
            SQL(f" DEFAULT {each.default}" if defaults and each.default is not None else ""),
        )
        for each in record.columns
    )


def create_parent(record: TableRecord) -> Composed:
    """The logical table. It has no constraints besides NOT NULL: PostgreSQL has no unique index over foreign
    partitions. Constraints are on the shard tables."""
    key = SQL(", ").join(map(Identifier, record.key))
    return SQL("CREATE TABLE {} ({}) PARTITION BY HASH ({})").format(logical(record), columns(record), key)


def create_shard(record: TableRecord, shard: int) -> Composed:
    """The table of a shard with all constraints, not attached."""
    parts = [columns(record), *map(SQL, record.constraints)]
    table = relation(names.shard_table(record.table, shard))
    return SQL("CREATE TABLE {} ({})").format(table, SQL(", ").join(parts))


def create_foreign(record: TableRecord, name: str, shard: int, primary: str) -> Composed:
    """A foreign table with this name for the shard table on a node: a route, or a forwarder. It has no
    defaults: the logical table adds them."""
    return SQL("CREATE FOREIGN TABLE {} ({}) SERVER {} OPTIONS (schema_name {}, table_name {})").format(
        relation(name),
        columns(record, defaults=False),
        Identifier(names.server_name(primary)),
        Literal(names.SCHEMA),
        Literal(names.shard_table(record.table, shard)),
    )


def create_route(record: TableRecord, shard: int, primary: str, generation: int) -> Composed:
    """The route to the primary of a shard at a generation, not attached."""
    return create_foreign(record, names.route_table(record.table, shard, generation), shard, primary)


def attach(record: TableRecord, name: str, shard: int) -> Composed:
    """Attach a relation of the schema of shards as the partition of a shard."""
    return SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES WITH (MODULUS {}, REMAINDER {})").format(
        logical(record), relation(name), Literal(len(record.shards)), Literal(shard)
    )


def detach(record: TableRecord, name: str) -> Composed:
    return SQL("ALTER TABLE {} DETACH PARTITION {}").format(logical(record), relation(name))


def comment(kind: str, name: Composable, text: str) -> Composed:
    return SQL("COMMENT ON {} {} IS {}").format(SQL(kind), name, Literal(text))


def parent_oid(connection: Connection[Any], record: TableRecord) -> int | None:
    """The oid of the logical table on this node; None if there is none."""
    found = connection.execute(
        "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'p'",
        (record.schema, record.table),
    ).fetchone()
    return None if found is None else int(found[0])


def hash_condition(record: TableRecord, shard: int, oid: int) -> Composed:
    """The partition constraint of a shard on the node where the logical table has this oid."""
    key = SQL(", ").join(map(Identifier, record.key))
    return SQL("satisfies_hash_partition({}::oid, {}, {}, {})").format(
        Literal(str(oid)), Literal(len(record.shards)), Literal(shard), key
    )


def add_hash_check(record: TableRecord, shard: int, oid: int) -> Composed:
    """Add the partition constraint as a CHECK to a shard table that is not attached. PostgreSQL then attaches
    it without a scan. Add it while the table is empty."""
    return SQL("ALTER TABLE {} ADD CONSTRAINT {} CHECK ({})").format(
        relation(names.shard_table(record.table, shard)),
        Identifier(names.hash_check(record.table, shard)),
        hash_condition(record, shard, oid),
    )


def drop_hash_check(record: TableRecord, shard: int) -> Composed:
    """After the attach, which adds the same constraint."""
    return SQL("ALTER TABLE {} DROP CONSTRAINT IF EXISTS {}").format(
        relation(names.shard_table(record.table, shard)), Identifier(names.hash_check(record.table, shard))
    )


def guard(record: TableRecord, shard: int) -> list[Composed]:
    """Refuse the writes of ordinary sessions to a copy that is not the primary. The apply worker of a
    subscription has `session_replication_role = replica`, for which the trigger does not fire."""
    return [guard_table(relation(names.shard_table(record.table, shard)))]


def guard_table(table: Composable) -> Composed:
    """Refuse writes to a table by its name. A trigger for each row would make the copy of a subscription
    insert row by row. Writes through a parent do not fire the trigger of its partition."""
    return SQL(
        "CREATE OR REPLACE TRIGGER {} BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {}"
        " FOR EACH STATEMENT EXECUTE FUNCTION {}()"
    ).format(Identifier(names.GUARD), table, relation(names.GUARD))


def unguard(record: TableRecord, shard: int) -> list[Composed]:
    """Allow the writes of ordinary sessions: the copy becomes the primary."""
    table = relation(names.shard_table(record.table, shard))
    return [SQL("DROP TRIGGER IF EXISTS {} ON {}").format(Identifier(names.GUARD), table)]


def ensure_schema(connection: Connection[Any]) -> None:
    """Create the schema of shards and the function of the guard, if they do not exist."""
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (names.SCHEMA,)).fetchone()
    if found is None:
        connection.execute(SQL("CREATE SCHEMA IF NOT EXISTS {}").format(Identifier(names.SCHEMA)))
    missing = "SELECT to_regprocedure(%s) IS NULL"
    if connection.execute(missing, (f"{names.SCHEMA}.{names.GUARD}()",)).fetchone() == (True,):
        connection.execute(
            SQL(
                "CREATE OR REPLACE FUNCTION {}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'this copy of the shard is not the primary: %', TG_TABLE_NAME"
                " USING ERRCODE = 'read_only_sql_transaction'; END $$"
            ).format(relation(names.GUARD))
        )


def drop_schema_if_empty(connection: Connection[Any]) -> None:
    """Drop the schema of shards when no table is left in it and this role owns it."""
    empty = connection.execute(
        "SELECT 1 FROM pg_namespace n WHERE n.nspname = %s AND pg_has_role(n.nspowner, 'USAGE')"
        " AND NOT EXISTS (SELECT 1 FROM pg_class c WHERE c.relnamespace = n.oid)",
        (names.SCHEMA,),
    ).fetchone()
    if empty is not None:
        connection.execute(SQL("DROP FUNCTION IF EXISTS {}()").format(relation(names.GUARD)))
        connection.execute(SQL("DROP SCHEMA IF EXISTS {}").format(Identifier(names.SCHEMA)))


def ensure_servers(connection: Connection[Any], nodes: Nodes, peers: Iterable[str]) -> None:
    """Create or correct the foreign servers and the user mappings for these nodes. Call it in the transaction
    that creates routes, since a server without routes may be dropped at any time."""
    connection.execute("CREATE EXTENSION IF NOT EXISTS postgres_fdw SCHEMA public")
    for peer in peers:
        server = names.server_name(peer)
        name = Identifier(server)
        how = {"fetch_size": str(FETCH_SIZE), "batch_size": str(FETCH_SIZE), **nodes.server_options(peer)}
        create = SQL("CREATE SERVER IF NOT EXISTS {} FOREIGN DATA WRAPPER postgres_fdw").format(name)
        found = _options(connection, "SELECT srvoptions FROM pg_foreign_server WHERE srvname = %s", server)
        if found is None:
            connection.execute(create)
        _set_options(connection, SQL("ALTER SERVER {}").format(name), found or {}, how)
        user = nodes.mapping_options(peer)
        found = _options(
            connection,
            "SELECT coalesce(umoptions, '{}') FROM pg_user_mappings"
            " WHERE srvname = %s AND usename = current_user",
            server,
        )
        mapping = SQL("{} USER MAPPING {} FOR CURRENT_USER SERVER {}")
        if found is None:
            connection.execute(mapping.format(SQL("CREATE"), SQL("IF NOT EXISTS"), name))
        _set_options(connection, mapping.format(SQL("ALTER"), SQL(""), name), found or {}, user)


def drop_unused_servers(connection: Connection[Any]) -> None:
    """Drop the foreign servers of this role that no foreign table uses."""
    unused = connection.execute(
        "SELECT s.srvname FROM pg_foreign_server s"
        " WHERE s.srvname ^@ %s AND pg_has_role(s.srvowner, 'USAGE')"
        " AND NOT EXISTS (SELECT 1 FROM pg_foreign_table t WHERE t.ftserver = s.oid)",
        (names.SERVER_PREFIX,),
    ).fetchall()
    for (server,) in unused:
        connection.execute(SQL("DROP SERVER IF EXISTS {} CASCADE").format(Identifier(server)))


def _options(connection: Connection[Any], query: str, server: str) -> dict[str, str] | None:
    found = connection.execute(query.encode(), (server,)).fetchone()
    if found is None:
        return None
    return dict(option.split("=", 1) for option in found[0] or ())


def _set_options(
    connection: Connection[Any], alter: Composed, found: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    changed = [(name, value) for name, value in wanted.items() if found.get(name) != value]
    parts = [
        SQL("{} {} {}").format(SQL("SET" if name in found else "ADD"), Identifier(name), Literal(value))
        for name, value in changed
    ] + [SQL("DROP {}").format(Identifier(name)) for name in found if name not in wanted]
    if parts:
        connection.execute(SQL("{} OPTIONS ({})").format(alter, SQL(", ").join(parts)))
