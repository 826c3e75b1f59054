"""Conditions on jobs in PostgreSQL's words."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from towpath.ledger.relational.db import HEADERS, array
from towpath.ledger.relational.where import Where


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
