"""Conditions on jobs as SQL."""

from __future__ import annotations

from typing import Any

from towpath.core.commands import Selector
from towpath.core.job import State
from towpath.core.views import Query, page_seq
from towpath.ledger.relational.db import HEADERS, array


class Where:
    """Collects conditions that must all hold, and their arguments. `?` in a condition is the next argument."""

    def __init__(self) -> None:
        self.terms: list[str] = ["true"]
        self.args: list[Any] = []

    def add(self, term: str, *args: Any) -> None:
        for arg in args:
            self.args.append(arg)
            term = term.replace("?", f"${len(self.args)}", 1)
        self.terms.append(term)

    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?::text', value)

    def queue(self, pattern: str | None) -> None:
        if pattern is not None and "*" in pattern:
            self.add(
                "j.queue LIKE ?::text", pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
            )
        else:
            self.equal(queue=pattern)

    def states(self, states: tuple[State, ...]) -> None:
        # Spelled out, so that the partial indexes can serve.
        if states:
            self.add("j.state IN (" + ", ".join(f"'{state}'" for state in states) + ")")

    @property
    def sql(self) -> str:
        return " AND ".join(self.terms)


def of_selector(selector: Selector) -> Where:
    where = Where()
    if selector.ids:
        where.add("j.id = ANY (ARRAY(SELECT json_array_elements_text(?::json)))", array(selector.ids))
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
        headers = "(SELECT convert_from(data, 'UTF8')::json FROM towpath.body WHERE seq = j.seq AND what = ?)"
        where.add(f"{headers} ->> ?::text = ?::text", HEADERS, *query.header)
    if query.page is not None:
        where.add("j.seq > ?" if query.oldest_first else "j.seq < ?", page_seq(query.page))
    return where
