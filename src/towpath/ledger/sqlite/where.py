"""Conditions on jobs in SQLite's words."""

from __future__ import annotations

from collections.abc import Iterable

import apsw
import msgspec

from towpath.core.commands import Selector
from towpath.core.job import Job, State
from towpath.core.views import Query
from towpath.ledger.sqlite.jobs import SLOTS, as_json
from towpath.ledger.tables.database import HEADERS, array
from towpath.ledger.tables.reads import Where


class SqliteWhere(Where):
    def ids(self, ids: tuple[str, ...]) -> None:
        self.add("j.id IN (SELECT value FROM json_each(?))", array(ids))

    def like(self, pattern: str) -> None:
        # Names have no other wildcard of GLOB in them.
        self.add("j.queue GLOB ?", pattern)

    def header(self, name: str, value: str) -> None:
        headers = "(SELECT CAST(data AS TEXT) FROM towpath_body WHERE slot = j.seq * ? + ?)"
        # The name is compared as a value: a JSON path would have to quote it.
        term = f"EXISTS (SELECT 1 FROM json_each({headers}) h WHERE h.key = ? AND h.atom = ?)"
        self.add(term, SLOTS, HEADERS * 1024, name, value)


def matching(db: apsw.Connection, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
    where = SqliteWhere()
    where.match(selector)
    where.states(tuple(states))
    if unasked:
        where.add("(j.state <> 'running' OR j.cancel_requested IS NULL)")
    return _jobs(db, "towpath_job j", where, "ASC", limit)


def find(db: apsw.Connection, query: Query, limit: int) -> list[Job]:
    where = SqliteWhere()
    where.ask(query)
    return _jobs(db, "towpath_job j " + _index(query), where, "ASC" if query.oldest_first else "DESC", limit)


def _index(query: Query) -> str:
    """Dead letters and running jobs are few among many; left alone, SQLite walks the whole table in the order asked for."""
    if query.states == (State.FAILED,):
        return "INDEXED BY towpath_job_failed"
    return "INDEXED BY towpath_job_leased" if query.states == (State.RUNNING,) else ""


def _jobs(db: apsw.Connection, table: str, where: Where, order: str, limit: int) -> list[Job]:
    sql = (
        f"SELECT json_group_array({as_json()}) FROM (SELECT * FROM {table} WHERE {where.sql} ORDER BY j.seq {order} LIMIT ?) j"
    )
    ((found,),) = db.execute(sql, (*where.args, limit))
    return msgspec.json.decode(found, type=list[Job])
