"""Logical replication of one shard table: publication, slot and subscription. Every function is idempotent,
and none runs in a transaction with another: a slot cannot be created in a transaction that has written."""

from __future__ import annotations

import time
from contextlib import suppress

import psycopg
from psycopg import sql

from towpath.apps.shards.session import NodeSession, compose
from towpath.errors import TowpathError

_POLL = 0.05
_SLOT_TIMES = 2
"""A slot waits for all transactions that were open when its creation began."""
_INACTIVE_SECONDS = 10.0


class ReplicationBroken(TowpathError):
    """Publication, slot or subscription are not as the step needs them."""

    sentence = "replication {name} on node {node}: {why}"
    retryable = True


def create_publication(source: NodeSession, name: str, table: tuple[str, str]) -> None:
    """Publish a table."""
    if not publishes(source, name, table):
        if source.value("SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = %s", [name]):
            source.run(compose("ALTER PUBLICATION {name} SET TABLE ONLY {table}", name=name, table=table))
        else:
            source.run(compose("CREATE PUBLICATION {name} FOR TABLE ONLY {table}", name=name, table=table))


def publishes(source: NodeSession, name: str, table: tuple[str, str]) -> bool:
    statement = (
        "SELECT 1 FROM pg_catalog.pg_publication_tables"
        " WHERE pubname = %s AND schemaname = %s AND tablename = %s"
    )
    return source.value(statement, [name, *table]) is not None


def drop_publication(source: NodeSession, name: str) -> None:
    source.run(compose("DROP PUBLICATION IF EXISTS {name}", name=name))


def create_slot(source: NodeSession, name: str) -> None:
    """Create a slot, or adopt the slot of this name: after a lost reply it exists already."""
    if not slot_exists(source, name):
        statement = "SELECT 1 FROM pg_catalog.pg_create_logical_replication_slot(%s, 'pgoutput')"
        source.run(statement, [name], times=_SLOT_TIMES)


def slot_exists(source: NodeSession, name: str) -> bool:
    """Whether the slot exists and is usable; a slot of another plug-in or database is refused."""
    rows = source.run(
        "SELECT plugin, database = current_database(), coalesce(wal_status, '')"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
        [name],
    )
    if rows and (rows[0][0] != "pgoutput" or not rows[0][1] or rows[0][2] == "lost"):
        why = "a slot of this name has another plug-in or database, or its WAL is lost"
        raise ReplicationBroken(name=name, node=source.node, why=why)
    return bool(rows)


def drop_slot(source: NodeSession, name: str) -> None:
    """Drop a slot. Its walsender is ended first, because a dead subscriber may still hold it."""
    end = time.monotonic() + _INACTIVE_SECONDS
    statement = (
        "SELECT active_pid, pg_terminate_backend(active_pid) FROM pg_catalog.pg_replication_slots"
        " WHERE slot_name = %s"
    )
    while rows := source.run(statement, [name]):
        if rows[0][0] is None:
            with suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                source.run("SELECT pg_catalog.pg_drop_replication_slot(%s)", [name])
        if time.monotonic() > end:
            why = "a walsender uses the slot again and again; drop the subscription first"
            raise ReplicationBroken(name=name, node=source.node, why=why)
        time.sleep(_POLL)


def create_subscription(
    target: NodeSession,
    name: str,
    conninfo: str,
    *,
    publication: str,
    slot: str,
    table: tuple[str, str],
) -> None:
    """Subscribe to a publication through an existing slot, and copy the rows first."""
    if subscribed(target, name, table):
        return
    drop_subscription(target, name)
    subscribe_statement(target, name, conninfo, publication=publication, slot=slot, copy=True)
    if not subscribed(target, name, table):
        why = "the subscription has no table; is the publication there?"
        raise ReplicationBroken(name=name, node=target.node, why=why)


def subscribe_statement(
    target: NodeSession, name: str, conninfo: str, *, publication: str, slot: str, copy: bool
) -> None:
    """Create a subscription; it may be in a transaction, since it creates no slot. It receives only changes
    that were written on the publisher itself. The connection string is a literal of the statement: it is
    neither logged nor stored by Towpath."""
    statement = compose(
        "CREATE SUBSCRIPTION {name} CONNECTION {conninfo} PUBLICATION {publication}"
        " WITH (create_slot = false, slot_name = {slot}, copy_data = {copy}, origin = none)",
        name=name,
        conninfo=sql.Literal(conninfo),
        publication=publication,
        slot=slot,
        copy=sql.SQL("true" if copy else "false"),
    )
    target.run(statement)


def subscribed(target: NodeSession, name: str, table: tuple[str, str]) -> bool:
    """Whether the subscription has the table: on a missing publication, CREATE SUBSCRIPTION succeeds and
    replicates nothing."""
    return state_of(target, name, table) is not None


def state_of(target: NodeSession, name: str, table: tuple[str, str]) -> str | None:
    """The state of the table in the subscription, such as `d` (copy) or `r` (ready); None if it is not in
    it."""
    statement = (
        "SELECT r.srsubstate::text FROM pg_catalog.pg_subscription_rel r"
        " JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid"
        " WHERE s.subname = %s AND r.srrelid = to_regclass(%s)"
    )
    found: str | None = target.value(statement, [name, qualified(table)])
    return found


DROP_STATEMENTS = (
    "ALTER SUBSCRIPTION {name} DISABLE",
    "ALTER SUBSCRIPTION {name} SET (slot_name = NONE)",
    "DROP SUBSCRIPTION {name}",
)
"""To be run in one transaction: they drop a subscription without its slot."""


def drop_subscription(target: NodeSession, name: str) -> None:
    """Drop a subscription without its slot: the publisher may be down."""
    exists = "SELECT 1 FROM pg_catalog.pg_subscription WHERE subname = %s"
    if target.value(exists, [name]) is not None:
        with target.transaction():
            for statement in DROP_STATEMENTS:
                target.run(compose(statement, name=name))


def sync_slots(source: NodeSession) -> list[tuple[str, str, str]]:
    """The slots of table synchronisation: name, oid of the subscription, system identifier of its server."""
    statement = (
        "SELECT slot_name, split_part(slot_name, '_', 2), split_part(slot_name, '_', 5)"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name ~ '^pg_[0-9]+_sync_[0-9]+_[0-9]+$'"
    )
    return source.run(statement)


def subscriptions(node: NodeSession) -> tuple[str, set[str]]:
    """The system identifier of a server and the oids of all its subscriptions."""
    ((identifier, found),) = node.run(
        "SELECT system_identifier::text, ARRAY(SELECT oid::text FROM pg_catalog.pg_subscription)"
        " FROM pg_catalog.pg_control_system()"
    )
    return identifier, set(found)


def position(source: NodeSession) -> str:
    """The position in the WAL after all that was committed so far; it is flushed, so that walsenders send
    it."""
    if source.version >= 170_000:
        statement = "SELECT pg_catalog.pg_logical_emit_message(false, 'towpath', '', true)::text"
    else:
        statement = "SELECT pg_catalog.pg_logical_emit_message(false, 'towpath', '')::text"
    lsn: str = source.value(statement)
    return lsn


def lag(source: NodeSession, slot: str) -> int | None:
    """Bytes of WAL that the subscriber has not confirmed; None if there is no slot."""
    statement = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn)::bigint"
        " FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    )
    found: int | None = source.value(statement, [slot])
    return found


def await_position(source: NodeSession, slots: list[str], lsn: str, seconds: float) -> float:
    """Wait until the subscribers of all slots have confirmed a position; return the seconds. Raises
    `ReplicationBroken` when the time is over."""
    begun = time.monotonic()
    statement = (
        "SELECT count(*) FROM pg_catalog.pg_replication_slots"
        " WHERE slot_name = ANY (%s) AND confirmed_flush_lsn >= %s::pg_lsn"
    )
    while source.value(statement, [slots, lsn]) < len(slots):
        if time.monotonic() - begun > seconds:
            why = f"position {lsn} is not confirmed within {seconds:g} s"
            raise ReplicationBroken(name=", ".join(slots), node=source.node, why=why)
        time.sleep(0.005)
    return time.monotonic() - begun


def qualified(table: tuple[str, str]) -> str:
    """The quoted name of a relation, for `to_regclass`."""
    return sql.Identifier(*table).as_string(None)
