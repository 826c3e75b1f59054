"""Conditions on jobs in PostgreSQL's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from towpath.core.job import State
from towpath.ledger.tables.database import HEADERS, array
from towpath.ledger.tables.reads import Where


def jobs_in(states: Sequence[State]) -> tuple[str, str]:
    """The table of jobs, or a way to them by one that has only those, few among many; and their number there. (OFFSET keeps the
    planner from walking the jobs to look each up in the other table.)"""
    wanted = set(states)
    if wanted and wanted <= {State.READY, State.SCHEDULED}:
        few = "towpath.turn"
    elif wanted == {State.FAILED}:
        few = "towpath.dead"
    elif wanted == {State.RUNNING}:
        few = "(SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease)"
    else:
        return "towpath.job j", "j.seq"
    return f"{few} x CROSS JOIN LATERAL (SELECT * FROM towpath.job WHERE seq = x.seq OFFSET 0) j", "x.seq"


class PostgresWhere(Where):
    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?::text', value)

    def ids(self, ids: tuple[str, ...]) -> None:
        self.add("j.id = ANY (ARRAY(SELECT json_array_elements_text(?::json)))", array(ids))

    def like(self, pattern: str) -> None:
        plain = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        self.add("j.queue LIKE ?::text", plain.replace("*", "%"))

    def header(self, name: str, value: str) -> None:
        headers = "(SELECT convert_from(data, 'UTF8')::json FROM towpath.body WHERE seq = j.seq AND what = ?)"
        self.add(f"{headers} ->> ?::text = ?::text", HEADERS, name, value)

    @property
    def sql(self) -> str:
        numbers = count(1)
        return re.sub(r"\?", lambda _: f"${next(numbers)}", super().sql)
