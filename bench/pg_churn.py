"""Does a PostgreSQL ledger slow down with what is over? Ratios to a ledger that was empty, in turns in the
same run.

    python bench/pg_churn.py [--finished N] [--read N] [--rounds N] [--dir DIR]

`finished`: beside 5,000,000 finished jobs. `reader`: in a database with an open transaction
since before 300,000 jobs went through it, so that nothing of them could be swept. Jobs completed per second
by one worker process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import psycopg
from measure import Alternating, Report
from workload import QUEUE, BenchApp

from towpath.core.commands import SetQueue
from towpath.testing.postgres import Server, place

TARGETS = {"finished": 0.7, "reader": 0.7}
CHUNK = 250_000
JOBS = 6_000

_FILL = f"""
WITH s AS MATERIALIZED (SELECT nextval('towpath.job_seq') AS seq, n FROM generate_series(1, %(n)s) n), j AS (
    INSERT INTO towpath.job (id, seq, queue, kind, priority, state, reason, ready_at, attempts,
    max_attempts, max_losses, fence,
        lease_len, settled_fence, settled_as, purge_at, waits, generation, created_at, started_at,
        finished_at, size, content_type)
    SELECT 'old-' || seq, seq, '{QUEUE}', 'bench.noop', 5, 'done', '', 1, 1, 20, 5, 1, 30000000, 1, 'done',
        9e15::bigint, 0, 0, 1, 2, 3,
        100, 'application/json'
    FROM s
), b AS (
    INSERT INTO towpath.body SELECT seq, 0, %(payload)s::bytea FROM s
), p AS (
    INSERT INTO towpath.past (queue, purge_at, seqs) SELECT '{QUEUE}', 9e15::bigint,
        array_agg(seq) FROM s GROUP BY n / 200
)
INSERT INTO towpath.tally (queue, blocked, scheduled, ready, running, done, failed,
canceled) VALUES ('{QUEUE}', 0, 0, 0, 0, %(n)s, 0, 0)
"""


def fill(url: str, count: int) -> None:
    """So many finished jobs, as if they had been."""
    with psycopg.connect(url, autocommit=True) as connection:
        for start in range(0, count, CHUNK):
            connection.execute(_FILL, {"n": min(CHUNK, count - start), "payload": b"x" * 100})
        connection.execute("VACUUM (ANALYZE) towpath.job")


def pass_through(ours: BenchApp, count: int) -> None:
    for start in range(0, count, 30_000):
        ours.complete(min(30_000, count - start), ours.noop)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--finished", type=int, default=5_000_000)
    parser.add_argument(
        "--read", type=int, default=300_000, help="jobs that go through beside the open transaction"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where to put the server (default: a temporary directory)")
    options = parser.parse_args()
    with place(options.dir) as folder, Server.start(folder / "server", fsync=True) as server:
        urls = {name: server.create_database() for name in ("empty", *TARGETS)}
        with (
            BenchApp(urls["empty"]) as empty,
            BenchApp(urls["finished"]) as finished,
            BenchApp(urls["reader"]) as reader,
        ):
            for ours in (empty, finished, reader):
                ours.app.ledger.apply([SetQueue(queue=QUEUE, keep=10**9)])
            fill(urls["finished"], options.finished)
            with psycopg.connect(urls["reader"]) as connection:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                connection.execute("SELECT count(*) FROM towpath.job")
                pass_through(reader, options.read)
                sides = {"empty": empty, "finished": finished, "reader": reader}
                runs = {name: partial(ours.complete, JOBS, ours.noop) for name, ours in sides.items()}
                found = Alternating(options.rounds, runs, 600.0)
                assert connection.execute("SELECT count(*) FROM towpath.job").fetchone() == (0,)
    report = Report(TARGETS)
    for name in TARGETS:
        report.ratio(name, found[name], found["empty"])
    print(json.dumps({"ratios": report.ratios}))


if __name__ == "__main__":
    main()
