"""Conditions on jobs as SQL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import apsw
import msgspec

from towpath.core.commands import Selector
from towpath.core.job import Job, State
from towpath.core.views import Query, page_seq
from towpath.ledger.relational.db import HEADERS, array
from towpath.ledger.sqlite.jobs import SLOTS, as_json


class Where:
    """Collects conditions that must all hold, and their arguments."""

    def __init__(self) -> None:
        self.terms: list[str] = ["1"]
        self.args: list[Any] = []

    def add(self, term: str, *args: Any) -> None:
        self.terms.append(term)
        self.args += args

    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?', value)

    def queue(self, pattern: str | None) -> None:
        if pattern is not None and "*" in pattern:
            # Names have no other wildcard of GLOB in them.
            self.add("j.queue GLOB ?", pattern)
        else:
            self.equal(queue=pattern)

    def states(self, states: tuple[State, ...]) -> None:
        # Spelled out, so that the partial indexes can serve.
        if len(states) == 1:
            self.add(f"j.state = '{states[0]}'")
        elif states:
            self.add("j.state IN (" + ", ".join(f"'{state}'" for state in states) + ")")

    @property
    def sql(self) -> str:
        return " AND ".join(self.terms)


def of_selector(selector: Selector) -> Where:
    where = Where()
    if selector.ids:
        where.add("j.id IN (SELECT value FROM json_each(?))", array(selector.ids))
    where.queue(selector.queue)
    where.equal(part=selector.part, group=selector.group, key=selector.key, kind=selector.kind)
    where.states(selector.states)
    if selector.created_before is not None:
        where.add("j.created_at < ?", selector.created_before)
    if selector.finished_before is not None:
        where.add("j.finished_at < ?", selector.finished_before)
    return where


def of_query(query: Query) -> Where:
    where = Where()
    where.queue(query.queue)
    where.equal(
        part=query.part,
        kind=query.kind,
        group=query.group,
        key=query.key,
        owner=query.owner,
        correlation_id=query.correlation_id,
    )
    where.states(query.states)
    if query.created_from is not None:
        where.add("j.created_at >= ?", query.created_from)
    if query.created_before is not None:
        where.add("j.created_at < ?", query.created_before)
    if query.header is not None:
        header = "(SELECT CAST(data AS TEXT) FROM towpath_body WHERE slot = j.seq * ? + ?)"
        name, value = query.header
        # The name is compared as a value: a JSON path would have to quote it.
        where.add(
            f"EXISTS (SELECT 1 FROM json_each({header}) h WHERE h.key = ? AND h.atom = ?)", SLOTS, HEADERS * 1024, name, value
        )
    if query.page is not None:
        where.add("j.seq > ?" if query.oldest_first else "j.seq < ?", page_seq(query.page))
    return where


def matching(db: apsw.Connection, selector: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
    where = of_selector(selector)
    where.states(tuple(states))
    if unasked:
        where.add("(j.state <> 'running' OR j.cancel_requested IS NULL)")
    return _jobs(db, "towpath_job j", where, "ASC", limit)


def find(db: apsw.Connection, query: Query, limit: int) -> list[Job]:
    return _jobs(db, "towpath_job j " + _index(query), of_query(query), "ASC" if query.oldest_first else "DESC", limit)


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
