"""Conditions on jobs as SQL."""

from __future__ import annotations

from typing import Any

from towpath.core.commands import Selector
from towpath.core.job import State
from towpath.core.views import Query, page_seq


class Where:
    """Collects conditions that must all hold, and their arguments. `?` in a condition is the next argument."""

    def __init__(self) -> None:
        self.terms: list[str] = []
        self.args: list[Any] = []

    def add(self, term: str, *args: Any) -> None:
        self.terms.append(term)
        self.args += args

    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?', value)

    def ids(self, ids: tuple[str, ...]) -> None:
        raise NotImplementedError

    def like(self, pattern: str) -> None:
        """The queue's name has the form of the pattern, in which * is anything."""
        raise NotImplementedError

    def header(self, name: str, value: str) -> None:
        raise NotImplementedError

    def queue(self, pattern: str | None) -> None:
        if pattern is not None and "*" in pattern:
            self.like(pattern)
        else:
            self.equal(queue=pattern)

    def states(self, states: tuple[State, ...]) -> None:
        # Spelled out, so that the partial indexes can serve.
        if len(states) == 1:
            self.add(f"j.state = '{states[0]}'")
        elif states:
            self.add("j.state IN (" + ", ".join(f"'{state}'" for state in states) + ")")

    def match(self, selector: Selector) -> None:
        if selector.ids:
            self.ids(selector.ids)
        self.queue(selector.queue)
        self.equal(part=selector.part, group=selector.group, key=selector.key, kind=selector.kind)
        self.states(selector.states)
        if selector.created_before is not None:
            self.add("j.created_at < ?", selector.created_before)
        if selector.finished_before is not None:
            self.add("j.finished_at < ?", selector.finished_before)

    def ask(self, query: Query) -> None:
        self.queue(query.queue)
        self.equal(
            part=query.part,
            kind=query.kind,
            group=query.group,
            key=query.key,
            owner=query.owner,
            correlation_id=query.correlation_id,
        )
        self.states(query.states)
        if query.created_from is not None:
            self.add("j.created_at >= ?", query.created_from)
        if query.created_before is not None:
            self.add("j.created_at < ?", query.created_before)
        if query.header is not None:
            self.header(*query.header)
        if query.page is not None:
            self.add("j.seq > ?" if query.oldest_first else "j.seq < ?", page_seq(query.page))

    @property
    def sql(self) -> str:
        return " AND ".join(self.terms or ["1 = 1"])
