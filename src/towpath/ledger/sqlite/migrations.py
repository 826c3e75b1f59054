"""Numbered schema migrations. A step and its record are one transaction. There is no downgrade: restore a
backup instead."""

from __future__ import annotations

from pathlib import Path

import apsw

from towpath.errors import NotALedger
from towpath.ledger.sqlite.statements import one
from towpath.ledger.tables import database, transfer


def steps() -> tuple[str, ...]:
    return database.steps("sqlite")


def migrate(db: apsw.Connection, path: Path) -> int:
    """Migrate the file to this version's schema. Returns the schema that it had before, 0 for none. Of
    several processes that call this at once, one migrates."""
    done = _schema(db, path)
    if done >= len(steps()):
        return done
    try:
        db.execute("BEGIN IMMEDIATE")
        done = _schema(db, path)
        for number, step in enumerate(steps()[done:], done + 1):
            db.execute(step)
            db.execute("UPDATE towpath_meta SET schema = ?", (number,))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return done


def _schema(db: apsw.Connection, path: Path) -> int:
    if one(db, "SELECT 1 FROM sqlite_schema WHERE name = 'towpath_meta'") is None:
        if one(db, "SELECT 1 FROM sqlite_schema WHERE name LIKE 'towpath\\_%' ESCAPE '\\'") is not None:
            raise NotALedger(path=str(path), why="it has towpath_ tables but no towpath_meta")
        return 0
    schema, min_schema = one(db, "SELECT schema, min_schema FROM towpath_meta")
    check_schema(path, schema, min_schema)
    return int(schema)


def check_schema(path: Path, schema: int, min_schema: int) -> None:
    transfer.check_schema(str(path), schema, min_schema, len(steps()))
