"""The columns of a new table, as PostgreSQL understands their definition: the text is used to create a
temporary table in a transaction that is rolled back, and the result is read from the system catalogues."""

from __future__ import annotations

from typing import Any

from psycopg import Connection, Error
from psycopg.sql import SQL, Identifier

from towpath.apps.shards.catalogue import Column
from towpath.errors import Described, InvalidInput

_PROBE = "towpath_columns_probe"

_COLUMNS = """
SELECT a.attname,
  format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attcollation <> t.typcollation
    THEN ' COLLATE ' || quote_ident(cn.nspname) || '.' || quote_ident(c.collname) ELSE '' END,
  a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attidentity <> '', a.attgenerated <> ''
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_collation c ON c.oid = a.attcollation
LEFT JOIN pg_namespace cn ON cn.oid = c.collnamespace
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_CONSTRAINTS = """
SELECT k.contype::text, pg_get_constraintdef(k.oid),
  ARRAY(SELECT a.attname FROM pg_attribute a WHERE a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey))
FROM pg_constraint k WHERE k.conrelid = %s::regclass AND k.contype <> 'n' ORDER BY k.conname
"""


def described(
    connection: Connection[Any], definition: str, key: tuple[str, ...]
) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """The columns and the constraints of a definition such as `id bigint, name text NOT NULL`. Without a
    PRIMARY KEY in it, the key is the primary key. Raises `InvalidInput` for what a sharded table cannot
    have. The connection must be in autocommit mode."""
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL search_path = public")
        probe = SQL("CREATE TEMP TABLE {} ({})").format(Identifier(_PROBE), SQL(definition))
        try:
            connection.cursor(binary=True).execute(probe)
        except Error as error:
            expected = f"column definitions of PostgreSQL: {str(error).splitlines()[0]}"
            raise _wrong(definition, expected) from None
        connection.execute("SET LOCAL search_path = ''")
        columns = connection.execute(_COLUMNS.encode(), (f"pg_temp.{_PROBE}",)).fetchall()
        constraints = connection.execute(_CONSTRAINTS.encode(), (f"pg_temp.{_PROBE}",)).fetchall()
    _check_columns(definition, columns, key)
    return (
        tuple(Column(name, type, not_null, default) for name, type, not_null, default, *_ in columns),
        _checked_constraints(definition, constraints, key),
    )


def _check_columns(definition: str, columns: list[tuple[Any, ...]], key: tuple[str, ...]) -> None:
    known = [name for name, *_ in columns]
    if not key or len(set(key)) != len(key) or not {*key} <= {*known}:
        raise InvalidInput(
            field="key", value=", ".join(key), expected=f"different columns of {', '.join(known) or 'none'}"
        )
    for name, _, _, default, identity, generated in columns:
        if identity or "nextval(" in (default or ""):
            raise _wrong(
                definition,
                f"without sequences ({name}): each node would have its own. Use uuid DEFAULT"
                " gen_random_uuid(), or values of the application",
            )
        if generated:
            raise _wrong(
                definition, f"without generated columns ({name}): logical replication does not copy them"
            )


def _checked_constraints(
    definition: str, constraints: list[tuple[Any, ...]], key: tuple[str, ...]
) -> tuple[str, ...]:
    found = []
    for kind, text, columns in constraints:
        if kind not in "puc":
            raise _wrong(definition, f"without foreign keys and exclusions: {text}")
        if kind in "pu" and not {*key} <= {*columns}:
            expected = f"with the key ({', '.join(key)}) in each PRIMARY KEY and UNIQUE: {text} is per shard"
            raise _wrong(definition, expected)
        found.append((kind, text))
    if not any(kind == "p" for kind, _ in found):
        quoted = ", ".join('"{}"'.format(name.replace('"', '""')) for name in key)
        found.append(("p", f"PRIMARY KEY ({quoted})"))
    order = {"p": 0, "u": 1, "c": 2}
    return tuple(text for _, text in sorted(found, key=lambda each: (order[each[0]], each[1])))


def _wrong(definition: str, expected: str) -> InvalidInput:
    return InvalidInput(field="columns", value=Described(repr(definition)), expected=expected)
