"""The raw limit: the ledger's tables, columns and indexes, used by hand-written apsw statements in one loop.

Without checks and dependencies; the only counters are the counters of the queue, and the only fence is in a
WHERE clause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apsw
from msgspec.structs import astuple

from towpath.core.admission import admit
from towpath.core.facts import AppendFacts
from towpath.core.job import COLUMNS, Job, Spec
from towpath.ledger.sqlite.files import connect
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions

_COLUMNS = ", ".join(f'"{name}"' for name in COLUMNS)
_INSERT = f"INSERT INTO towpath_job ({_COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS))})"
_BODY = "INSERT INTO towpath_body (slot, data) VALUES (?, ?)"
_COUNT = """
UPDATE towpath_queue SET ready = ready + ?, loose = loose + ?, running = running + ?, done = done + ?
WHERE name = ?
"""
_META = "UPDATE towpath_meta SET next_seq = next_seq + ?, last = ?"
_BEST = f"""
SELECT {_COLUMNS}, (SELECT data FROM towpath_body WHERE slot = seq * 8192) FROM towpath_job
WHERE queue = ? AND state = 'ready' AND part IS NULL AND losses < 2 AND (expires_at IS NULL OR expires_at > ?)
ORDER BY priority, seq LIMIT ?
"""
_TAKE = """
UPDATE towpath_job SET state = 'running', reason = '', attempts = attempts + 1, fence = fence + 1, owner = ?,
lease_until = ?, lease_len = ?, started_at = ? WHERE seq = ?
"""
_DONE = """
UPDATE towpath_job SET state = 'done', reason = '', finished_at = ?, purge_at = ?, owner = NULL,
lease_until = NULL, settled_fence = fence, settled_as = 'done' WHERE seq = ? AND fence = ?
"""
_WIDTH = len(COLUMNS)


class Raw:
    def __init__(self, path: Path, queue: str) -> None:
        SqliteLedger(path).close()
        self.db: apsw.Connection = connect(path, SqliteOptions())
        self.db.execute("PRAGMA wal_autocheckpoint=2000")
        self.queue, self.now = queue, 1_000_000
        counts = "blocked, scheduled, ready, running, done, failed, canceled, loose"
        columns = f"name, {counts}, paused, next_at, served, clock"
        self.db.execute(
            f"INSERT INTO towpath_queue ({columns}) VALUES (?, 0,0,0,0,0,0,0,0,0,0,0,0)", (queue,)
        )
        self.next_seq = 1

    def rows(self, specs: Sequence[Spec]) -> list[Job]:
        jobs = admit(specs, AppendFacts(), self.now, self.next_seq).jobs
        self.next_seq += len(jobs)
        return jobs

    def append_each(self, batches: Iterable[Sequence[Job]]) -> None:
        for jobs in batches:
            self.append(jobs)

    def append(self, jobs: Sequence[Job]) -> None:
        db = self.db
        db.execute("BEGIN IMMEDIATE")
        db.executemany(_INSERT, (astuple(job)[:_WIDTH] for job in jobs))
        db.executemany(_BODY, ((job.seq * 8192, job.payload) for job in jobs))
        db.execute(_COUNT, (len(jobs), len(jobs), 0, 0, self.queue))
        db.execute(_META, (len(jobs), self.now))
        db.execute("COMMIT")

    def settle_and_claim(self, held: Sequence[tuple[int, int]], n: int) -> list[tuple[int, int]]:
        db, now = self.db, self.now
        db.execute("BEGIN IMMEDIATE")
        db.executemany(_DONE, ((now, now + 1, seq, fence) for seq, fence in held))
        found: list[Any] = db.execute(_BEST, (self.queue, now, n)).fetchall()
        db.executemany(_TAKE, (("raw", now + 10, 10, now, row[1]) for row in found))
        db.execute(_COUNT, (-len(found), -len(found), len(found) - len(held), len(held), self.queue))
        db.execute(_META, (0, now))
        db.execute("COMMIT")
        return [(row[1], row[15] + 1) for row in found]

    def close(self) -> None:
        self.db.close()
