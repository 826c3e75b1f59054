"""The raw limit of a PostgreSQL: one small table with a sensible index, driven by hand-written psycopg
statements in one loop.

Claims are leases with a fence, finished rows stay where they are. No dependencies, keys, groups, parts,
counters or checks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

import psycopg

QUEUE = "q"
Row = tuple[uuid.UUID, str, int, bytes]

_TABLE = """
CREATE TABLE raw_job (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL UNIQUE,
    queue text COLLATE "C" NOT NULL,
    priority smallint NOT NULL, state text NOT NULL DEFAULT 'ready', payload bytea NOT NULL,
    attempts int NOT NULL DEFAULT 0,
    fence bigint NOT NULL DEFAULT 0, owner text, lease_until timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz, finished_at timestamptz
) WITH (fillfactor = 80);
CREATE INDEX raw_ready ON raw_job (queue, priority, seq) WHERE state = 'ready';
CREATE INDEX raw_lease ON raw_job (lease_until) WHERE state = 'running'
"""
_COLUMNS = "id, queue, priority, payload"
_INSERT = f"INSERT INTO raw_job ({_COLUMNS}) VALUES (%s, %s, %s, %s)"
_COPY = f"COPY raw_job ({_COLUMNS}) FROM STDIN"
_CLAIM = """
UPDATE raw_job SET state = 'running', attempts = attempts + 1, fence = fence + 1, owner = 'raw',
    started_at = clock_timestamp(),
lease_until = clock_timestamp() + interval '30 s'
WHERE seq = ANY (ARRAY(
    SELECT seq FROM raw_job WHERE queue = %s AND state = 'ready' ORDER BY priority,
        seq LIMIT %s FOR UPDATE SKIP LOCKED
)) RETURNING seq, fence, payload
"""
_SETTLE = """
UPDATE raw_job SET state = 'done', owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
FROM unnest(%s::bigint[], %s::bigint[]) AS held (seq, fence)
WHERE raw_job.seq = held.seq AND raw_job.fence = held.fence AND state = 'running'
"""


class Raw:
    def __init__(self, url: str) -> None:
        self._db = psycopg.connect(url, autocommit=True)
        self._db.execute(_TABLE)

    def rows(self, count: int, payload: bytes = b"x" * 100) -> list[Row]:
        return [(uuid.uuid4(), QUEUE, 5, payload) for _ in range(count)]

    def append_each(self, rows: Iterable[Row]) -> None:
        """A commit for every row."""
        for row in rows:
            self._db.execute(_INSERT, row, prepare=True)

    def append(self, rows: Sequence[Row]) -> None:
        """All in one COPY and one commit."""
        with self._db.cursor().copy(_COPY) as copy:
            for row in rows:
                copy.write_row(row)

    def append_all(self, batches: Iterable[Sequence[Row]]) -> None:
        for rows in batches:
            self.append(rows)

    def settle_and_claim(self, held: Sequence[tuple[int, int]], n: int) -> list[tuple[int, int]]:
        """One commit for both."""
        with self._db.transaction():
            if held:
                self._db.execute(
                    _SETTLE, ([seq for seq, _ in held], [fence for _, fence in held]), prepare=True
                )
            if not n:
                return []
            found = self._db.execute(_CLAIM, (QUEUE, n), prepare=True, binary=True).fetchall()
        return [(seq, fence) for seq, fence, _ in found]

    def done(self, jobs: int) -> None:
        """Claim and settle so many, 100 at a time."""
        held: list[tuple[int, int]] = []
        for _ in range(jobs // 100):
            held = self.settle_and_claim(held, 100)
            assert len(held) == 100
        self.settle_and_claim(held, 0)

    def close(self) -> None:
        self._db.close()
