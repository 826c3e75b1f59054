"""Numbered steps forward, under a lock: of many processes that start at once, one migrates and the others
find it done."""

from __future__ import annotations

from typing import cast

from psycopg import sql
from psycopg.abc import Query as PgQuery

from towpath.errors import NotALedger
from towpath.ledger.postgres.rows import Connection
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.tables import database, transfer

OLDEST = 14
"""The oldest server that has all we use."""


def steps() -> tuple[str, ...]:
    return database.steps("postgres")


def migrate(connection: Connection, statements: Statements, place: str) -> int:
    """Bring the schema up to this version; which it was before, 0 for none. Needs no right but to create it,
    or what is in it if somebody made it before."""
    check_server(place, connection.info.server_version)
    done = _schema(connection, statements, place)
    if done >= len(steps()):
        return done
    with connection.transaction():
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext(%s))", (f"towpath migration of {statements.schema}",)
        )
        done = _schema(connection, statements, place)
        if done == 0 and not _exists(connection, statements):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(statements.schema)))
        for number, step in enumerate(steps()[done:], done + 1):
            connection.execute(cast(PgQuery, statements.place(step)))
            connection.execute(cast(PgQuery, statements.place(f"UPDATE towpath.meta SET schema = {number}")))
    return done


def check_server(place: str, version: int) -> None:
    if version < OLDEST * 10_000:
        why = f"its server is PostgreSQL {version // 10_000}, and a ledger needs {OLDEST} or newer"
        raise NotALedger(path=place, why=why)


def is_there(connection: Connection, statements: Statements) -> bool:
    return "meta" in tables(connection, statements)


def tables(connection: Connection, statements: Statements) -> set[str]:
    found = connection.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'",
        (statements.schema,),
    ).fetchall()
    return {str(name) for (name,) in found}


def _exists(connection: Connection, statements: Statements) -> bool:
    return (
        connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (statements.schema,)).fetchone()
        is not None
    )


def _schema(connection: Connection, statements: Statements, place: str) -> int:
    names = tables(connection, statements)
    if "meta" not in names:
        if names:
            raise NotALedger(
                path=place, why=f"its schema {statements.schema} has tables, but no meta among them"
            )
        return 0
    found = connection.execute(
        cast(PgQuery, statements.place("SELECT schema, min_schema FROM towpath.meta"))
    ).fetchone()
    assert found is not None
    schema, least = found
    check_schema(place, schema, least)
    return int(schema)


def check_schema(place: str, schema: int, min_schema: int) -> None:
    transfer.check_schema(place, schema, min_schema, len(steps()))
