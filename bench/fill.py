"""Insert large sets of jobs by plain SQL, a million in seconds. `check()` accepts the result.

python bench/fill.py FILE QUEUE "ready 1000000" "scheduled 1000" ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import apsw

_SERIES = """
WITH RECURSIVE series (value) AS (VALUES (:first) UNION ALL SELECT value + 1 FROM series WHERE value < :last)
"""
_JOBS = f"""
{_SERIES} INSERT INTO towpath_job (id, seq, queue, part, kind, priority, state, reason, ready_at, attempts,
    failures, losses, max_attempts, max_losses, fence, owner, lease_until, lease_len, settled_fence, waits,
    generation, key, key_policy, created_at, started_at, size, content_type)
SELECT printf('00000000-0000-8000-8000-%012d', value), value, :queue, :part, 'bench', 5, :state, :reason,
    :ready_at, :attempts, 0, 0, 20, 5, :attempts, :owner, :lease, :lease, 0, :waits,
    0, :key, :policy, 1, NULL, 100, 'application/json'
FROM series
"""
_BODIES = f"{_SERIES} INSERT INTO towpath_body (slot, data) SELECT value * 8192, zeroblob(100) FROM series"
_EDGES = f"{_SERIES} INSERT INTO towpath_edge (src, dst, run_anyway) SELECT :root, value, 0 FROM series"
_QUEUE = """
INSERT INTO towpath_queue (name, blocked, scheduled, ready, running, done, failed, canceled, loose, paused,
    next_at, served, clock)
VALUES (:queue, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING
"""
FAR = 4_000_000_000_000_000


def ready(path: Path, queue: str, count: int) -> None:
    _fill(path, queue, count, state="ready")


def scheduled(path: Path, queue: str, count: int) -> None:
    _fill(path, queue, count, state="scheduled", reason="delay", ready_at=FAR)


def blocked(path: Path, queue: str, count: int) -> None:
    """All of them depend on one job that does not finish."""
    db = _open(path)
    root = _next(db)
    db.close()
    _fill(path, queue, 1, state="scheduled", reason="delay", ready_at=FAR)
    _fill(path, queue, count, state="blocked", waits=1)
    db = _open(path)
    db.execute(_EDGES, {"root": root, "first": root + 1, "last": root + count})
    db.close()


def serial(path: Path, queue: str, count: int) -> None:
    """`count` ready jobs of one serial key, and one of them running."""
    part = "serial:busy"
    db = _open(path)
    columns = "queue, name, ready, running, paused, cap, next_at, weight, served, configured"
    db.execute(
        f"INSERT INTO towpath_part ({columns}) VALUES (?, ?, ?, 1, 0, 1, 0, 1, 0, 0)", (queue, part, count)
    )
    db.close()
    keyed = {"part": part, "key": "busy", "policy": "serial"}
    _fill(path, queue, 1, state="running", attempts=1, owner="holder", lease=FAR, **keyed)
    _fill(path, queue, count, state="ready", **keyed)


def _fill(path: Path, queue: str, count: int, **columns: object) -> None:
    db = _open(path)
    first = _next(db)
    defaults: dict[str, object] = dict.fromkeys(("part", "owner", "lease", "key", "policy"))
    args = defaults | {"reason": "", "ready_at": 1, "attempts": 0, "waits": 0} | columns
    args |= {"queue": queue, "first": first, "last": first + count - 1}
    db.execute("BEGIN")
    db.execute(_QUEUE, args)
    db.execute(_JOBS, args)
    db.execute(_BODIES, args)
    loose = count if args["state"] == "ready" and args["part"] is None else 0
    state = args["state"]
    db.execute(
        f"UPDATE towpath_queue SET {state} = {state} + ?, loose = loose + ? WHERE name = ?",
        (count, loose, queue),
    )
    db.execute("UPDATE towpath_meta SET next_seq = ?", (first + count,))
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def _open(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path))
    # Filling is not measured, so it need not be durable.
    db.execute("PRAGMA synchronous=OFF; PRAGMA cache_size=-64000")
    return db


def _next(db: apsw.Connection) -> int:
    (number,) = next(db.execute("SELECT next_seq FROM towpath_meta"))
    return int(number)


if __name__ == "__main__":
    fillers = {"ready": ready, "scheduled": scheduled, "blocked": blocked, "serial": serial}
    for content in sys.argv[3:]:
        kind, _, count = content.partition(" ")
        fillers[kind](Path(sys.argv[1]), sys.argv[2], int(count))
