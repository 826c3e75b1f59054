"""`check` recounts every counter and compares every derived table with the jobs; `dump` returns the whole
state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec
from psycopg.abc import Query as PgQuery

from towpath.core.blobs import HEADER
from towpath.core.history import HISTORY
from towpath.core.job import Job
from towpath.core.lifecycle import REASONS
from towpath.core.views import NoteView
from towpath.ledger.postgres.rows import Connection, PostgresDb
from towpath.ledger.postgres.statements import AGAIN, JOB, Statements
from towpath.ledger.tables import reads
from towpath.ledger.tables.append import decode_then
from towpath.ledger.tables.database import HEADERS
from towpath.ledger.tables.transaction import GroupRow, PartRow, QueueRow

_UNFINISHED = "('blocked', 'scheduled', 'ready', 'running')"
_FINISHED = "('done', 'failed', 'canceled')"


class Side(NamedTuple):
    """A table that is derived from the jobs: its expected rows and its rows, both by job, and the statement
    that fills it."""

    should: str
    has: str
    make: str


_TURN = "seq, queue, part, priority, ready_at, expires_at"
_TURN_OF = "seq, queue, coalesce(part, ''), priority, ready_at, expires_at"
_SOME = "(SELECT *, row_number() OVER (ORDER BY seq) / 200 AS chunk FROM towpath.job"
SIDE: Mapping[str, Side] = {
    "turn": Side(
        f"SELECT {_TURN_OF}, {AGAIN} FROM towpath.job WHERE state IN ('ready', 'scheduled')",
        f"SELECT {_TURN}, CASE ripe WHEN 1 THEN 2 ELSE ripe END FROM towpath.turn",
        f"""INSERT INTO towpath.turn ({_TURN}, ripe) SELECT {_TURN_OF}, {AGAIN} FROM towpath.job
            WHERE state IN ('ready', 'scheduled') ORDER BY seq""",
    ),
    "expiry": Side(
        f"SELECT expires_at, seq FROM towpath.job WHERE expires_at IS NOT NULL AND state IN {_UNFINISHED}",
        "SELECT at, seq FROM towpath.expiry",
        f"""INSERT INTO towpath.expiry SELECT expires_at, seq FROM towpath.job
            WHERE expires_at IS NOT NULL AND state IN {_UNFINISHED}""",
    ),
    "lease": Side(
        "SELECT lease_until, seq FROM towpath.job WHERE state = 'running'",
        "SELECT until, unnest(seqs) AS seq FROM towpath.lease",
        f"""INSERT INTO towpath.lease SELECT lease_until, array_agg(seq)
            FROM {_SOME} WHERE state = 'running') s GROUP BY lease_until, chunk""",
    ),
    "past": Side(
        "SELECT queue, purge_at, seq FROM towpath.job WHERE purge_at IS NOT NULL",
        "SELECT queue, purge_at, unnest(seqs) AS seq FROM towpath.past",
        f"""INSERT INTO towpath.past (queue, purge_at, seqs) SELECT queue, purge_at, array_agg(seq)
            FROM {_SOME} WHERE purge_at IS NOT NULL) s
            GROUP BY queue, purge_at, chunk ORDER BY queue, purge_at""",
    ),
    "dead": Side(
        "SELECT queue, seq FROM towpath.job WHERE state = 'failed'",
        "SELECT queue, seq FROM towpath.dead",
        "INSERT INTO towpath.dead SELECT queue, seq FROM towpath.job WHERE state = 'failed'",
    ),
}

_REASONS = "\n    ".join(
    "WHEN '{}' THEN reason IN ('{}')".format(state, "', '".join(sorted(reasons)))
    for state, reasons in REASONS.items()
)
_CONSISTENT = f"""CASE state
    {_REASONS}
    ELSE false END
    AND (state = 'blocked') = (waits > 0) AND (state = 'running') = (owner IS NOT NULL)
    AND (owner IS NULL) = (lease_until IS NULL)
    AND (state IN {_FINISHED}) = (finished_at IS NOT NULL)
    AND settled_fence <= fence AND attempts >= 0 AND waits >= 0"""
_UNSOURCED = "NOT sourced AND seq IN (SELECT src FROM towpath.edge UNION SELECT job FROM towpath.proxy)"

# Each statement returns inconsistent rows; the sentence is formatted with their columns. Rows that a CHECK
# constraint forbids are not checked here.
_CHECKS: tuple[tuple[str, str], ...] = (
    (
        "job {} is {} {} with owner {}, waits {}, attempts {}, fence {}, settled {} and finished {}, "
        "which is impossible",
        f"""SELECT id, state, reason, owner, waits, attempts, fence, settled_fence, finished_at
            FROM towpath.job WHERE NOT ({_CONSISTENT})""",
    ),
    (
        "queue {} counts {} {} but has {}",
        """SELECT q.name, c.n, c.state, coalesce(r.n, 0) FROM towpath.queue_now q
           CROSS JOIN LATERAL (
               VALUES ('blocked', blocked), ('scheduled', scheduled), ('ready', ready), ('running', running),
                   ('done', done), ('failed', failed), ('canceled', canceled)) AS c (state, n)
           LEFT JOIN (SELECT queue, state, count(*) AS n FROM towpath.job GROUP BY queue, state) r
               ON r.queue = q.name AND r.state = c.state
           WHERE c.n <> coalesce(r.n, 0)""",
    ),
    (
        "queue {} counts {} ready jobs without a part but has {}",
        """SELECT q.name, q.loose, coalesce(r.n, 0) FROM towpath.queue_now q
           LEFT JOIN (
               SELECT queue, count(*) AS n FROM towpath.job
               WHERE state = 'ready' AND part IS NULL GROUP BY queue) r
               ON r.queue = q.name WHERE q.loose <> coalesce(r.n, 0)""",
    ),
    (
        "queue {} has a capacity and is missing in the list of bounded queues",
        "SELECT name FROM towpath.queue, towpath.meta WHERE capacity IS NOT NULL AND name <> ALL (bounded)",
    ),
    (
        "queue {} has jobs but no row",
        "SELECT DISTINCT queue FROM towpath.job WHERE queue NOT IN (SELECT name FROM towpath.queue_now)",
    ),
    (
        "part {} of {} counts {} ready and {} running, but has {} and {}",
        """SELECT p.name, p.queue, p.ready, p.running, coalesce(r.ready, 0), coalesce(r.running, 0)
           FROM towpath.part_now p
           LEFT JOIN (SELECT queue, part, count(*) FILTER (WHERE state = 'ready') AS ready,
               count(*) FILTER (WHERE state = 'running') AS running
               FROM towpath.job WHERE part IS NOT NULL GROUP BY queue, part) r
               ON r.queue = p.queue AND r.part = p.name
           WHERE p.ready <> coalesce(r.ready, 0) OR p.running <> coalesce(r.running, 0)""",
    ),
    (
        "part {} of {} has active jobs but no row",
        """SELECT DISTINCT part, queue FROM towpath.job j
           WHERE part IS NOT NULL AND state IN ('ready', 'running')
           AND NOT EXISTS (SELECT 1 FROM towpath.part_now p WHERE p.queue = j.queue AND p.name = j.part)""",
    ),
    (
        "tallies of {} are older than its last fold",
        """SELECT DISTINCT q.name FROM towpath.tally t
           JOIN towpath.queue q ON q.name = t.queue AND t.xid < q.folded""",
    ),
    (
        "job {} waits for {} but has {} open dependencies",
        f"""SELECT id, waits, real FROM (SELECT j.id, j.waits,
            (SELECT count(*) FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src WHERE e.dst = j.seq
                AND s.state NOT IN {_FINISHED})
            + (SELECT count(*) FROM towpath.gate g
                JOIN towpath."group" o ON o.id = g.src AND o.state <> 'closed' WHERE g.dst = j.seq)
            + (EXISTS (SELECT 1 FROM towpath."group" g WHERE g.id = j."group" AND g.state = 'open'))::int
                AS real
            FROM towpath.job j WHERE j.state = 'blocked') w WHERE waits <> real""",
    ),
    (
        "job {} is {} though its dependency {} is {}",
        """SELECT j.id, j.state, s.id, s.state FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src
           JOIN towpath.job j ON j.seq = e.dst
           WHERE NOT e.run_anyway AND j.state IN ('blocked', 'scheduled', 'ready')
           AND s.state IN ('failed', 'canceled')""",
    ),
    (
        "edge {} -> {} has no job at one end",
        """SELECT src, dst FROM towpath.edge WHERE src NOT IN (SELECT seq FROM towpath.job)
           OR dst NOT IN (SELECT seq FROM towpath.job)""",
    ),
    (
        "gate {} -> {} belongs to an unknown group or an unknown job",
        """SELECT src, dst FROM towpath.gate WHERE dst NOT IN (SELECT seq FROM towpath.job)
           OR src NOT IN (SELECT id FROM towpath."group")""",
    ),
    (
        "job {} is {} though group {} is {}",
        """SELECT j.id, j.state, o.id, o.outcome FROM towpath.gate g
           JOIN towpath."group" o ON o.id = g.src AND o.state = 'closed'
           JOIN towpath.job j ON j.seq = g.dst AND j.state IN ('blocked', 'scheduled', 'ready')
           WHERE NOT g.run_anyway AND coalesce(g.outcome, 'done') <> o.outcome""",
    ),
    (
        "group {} is closed and counts {} unfinished",
        """SELECT id, unfinished FROM towpath."group" WHERE state = 'closed' AND unfinished > 0""",
    ),
    (
        "the proxy for {} in group {} is counted as {}, and its job is {}",
        """SELECT p.id, p.grp, p.counted, coalesce(j.state, 'gone') FROM towpath.proxy p
           LEFT JOIN towpath.job j ON j.seq = p.job
           LEFT JOIN towpath."group" g ON g.id = p.grp WHERE g.id IS NULL
           OR (p.counted = 'unfinished' AND (j.seq IS NULL OR j.state IN ('done', 'failed', 'canceled')))
           OR (p.counted <> 'unfinished' AND g.state IN ('open', 'sealed')
               AND j.state NOT IN ('done', 'failed', 'canceled'))""",
    ),
    (
        "names of dependencies are left of job number {}",
        "SELECT DISTINCT dst FROM towpath.name WHERE dst NOT IN (SELECT seq FROM towpath.job)",
    ),
    (
        "group {} counts {} unfinished but has {}",
        f"""SELECT id, unfinished, real FROM (SELECT g.id, g.unfinished, (SELECT count(*) FROM towpath.job j
            WHERE j."group" = g.id AND j.state IN {_UNFINISHED})
            + (SELECT count(*) FROM towpath.proxy p WHERE p.grp = g.id AND p.counted = 'unfinished') AS real
            FROM towpath."group" g) w WHERE unfinished <> real""",
    ),
    (
        "group {} is {} with nothing unfinished",
        """SELECT id, state FROM towpath."group" WHERE state IN ('sealed', 'aborting') AND unfinished = 0""",
    ),
    (
        "group {} counts fewer finished members than it has",
        """SELECT id FROM towpath."group" g LEFT JOIN LATERAL (
               SELECT count(*) FILTER (WHERE state = 'done') AS done,
               count(*) FILTER (WHERE state = 'failed') AS failed,
               count(*) FILTER (WHERE state = 'canceled') AS canceled
               FROM towpath.job j WHERE j."group" = g.id) r ON true
           WHERE g.done < r.done OR g.failed < r.failed OR g.canceled + g.superseded < r.canceled""",
    ),
    (
        "job {} is in no known group",
        """SELECT id FROM towpath.job WHERE "group" IS NOT NULL
           AND "group" NOT IN (SELECT id FROM towpath."group")""",
    ),
    (
        "job {} waits in group {}, which is aborting",
        """SELECT j.id, g.id FROM towpath.job j JOIN towpath."group" g ON g.id = j."group"
        WHERE g.state = 'aborting' AND j.state IN ('blocked', 'scheduled', 'ready')""",
    ),
    (
        "key {} of {} is held by {}, which is finished or gone",
        f"""SELECT k.key, k.namespace, k.id FROM towpath.key k LEFT JOIN towpath.job j ON j.seq = k.seq
           WHERE k.until = 0 AND (j.seq IS NULL OR j.state IN {_FINISHED})""",
    ),
    (
        "job {} should hold its key {}",
        """SELECT id, key FROM towpath.job j WHERE key_policy IN ('unique', 'replace')
           AND state IN ('blocked', 'scheduled', 'ready') AND cancel_requested IS NULL
           AND NOT EXISTS (SELECT 1 FROM towpath.key k WHERE k.seq = j.seq)""",
    ),
    (
        "attempt {} is left of job number {}",
        "SELECT number, seq FROM towpath.attempt WHERE seq NOT IN (SELECT seq FROM towpath.job)",
    ),
    (
        "attempt {} of job {} is none of the last of {}",
        f"""SELECT a.number, j.id, j.attempts FROM towpath.attempt a JOIN towpath.job j ON j.seq = a.seq
           WHERE a.number > j.attempts + 1 - a.counted OR a.number < j.attempts - {HISTORY}
           OR a.ended_at < a.started_at""",
    ),
    (
        "body {} {} has no job",
        "SELECT seq, what FROM towpath.body WHERE seq NOT IN (SELECT seq FROM towpath.job)",
    ),
    *(
        (
            f"job number {{}} is not in {name} as it should be",
            f"SELECT seq FROM ({side.should} EXCEPT ALL {side.has}) w",
        )
        for name, side in SIDE.items()
    ),
    *(
        (
            f"job number {{}} should not be in {name} as it is",
            f"SELECT seq FROM ({side.has} EXCEPT ALL {side.should}) w",
        )
        for name, side in SIDE.items()
        if name != "lease"
    ),
    (
        "job {} is not marked as the source of a dependency",
        f"SELECT id FROM towpath.job WHERE {_UNSOURCED}",
    ),
    (
        "blob {} has no chunks",
        """SELECT id FROM towpath.blob b
           WHERE NOT EXISTS (SELECT 1 FROM towpath.chunk c WHERE c.blob = b.id)""",
    ),
    (
        "blob {} has {} bytes, its job number {} has {}",
        """SELECT id, n, job, size FROM (SELECT b.id, b.job, j.size,
            (SELECT sum(octet_length(c.data)) FROM towpath.chunk c WHERE c.blob = b.id) AS n
            FROM towpath.blob b LEFT JOIN towpath.job j ON j.seq = b.job WHERE b.job IS NOT NULL) x
           WHERE n IS DISTINCT FROM size""",
    ),
    (
        "chunk {} of blob {} is left",
        "SELECT number, blob FROM towpath.chunk WHERE blob NOT IN (SELECT id FROM towpath.blob)",
    ),
    (
        "job number {} does not have the blob {} of its header",
        f"""SELECT seq, named FROM (SELECT seq, convert_from(data, 'UTF8')::json ->> '{HEADER}' AS named
            FROM towpath.body WHERE what = {HEADERS}) x
           WHERE named IS NOT NULL AND NOT EXISTS (SELECT 1 FROM towpath.blob b
               JOIN towpath.job j ON j.seq = b.job WHERE b.job = x.seq AND named = b.id || ' ' || j.size)""",
    ),
    (
        "job {} also has a tombstone",
        "SELECT id FROM towpath.tombstone WHERE id IN (SELECT id FROM towpath.job)",
    ),
    (
        "append {} of the inbox cannot be applied: {}",
        "SELECT seq, failure FROM towpath.inbox WHERE failure IS NOT NULL",
    ),
    (
        "next_seq is {} but there is a job {}",
        """SELECT s.last_value + s.is_called::int, j.top
           FROM towpath.job_seq s, (SELECT max(seq) AS top FROM towpath.job) j
           WHERE s.last_value + s.is_called::int <= j.top""",
    ),
)


def derive(connection: Connection, statements: Statements) -> None:
    """Fill the tables and columns that are derived from jobs, dependencies and queues."""
    sourced = f"UPDATE towpath.job SET sourced = true WHERE {_UNSOURCED}"
    bounded = (
        "UPDATE towpath.meta SET bounded = ARRAY(SELECT name FROM towpath.queue WHERE capacity IS NOT NULL)"
    )
    for text in (*(side.make for side in SIDE.values()), sourced, bounded):
        connection.execute(cast(PgQuery, statements.place(text)))


def check(connection: Connection, statements: Statements) -> list[str]:
    asked = [(sentence, cast(PgQuery, statements.place(text))) for sentence, text in _CHECKS]
    return [sentence.format(*row) for sentence, query in asked for row in connection.execute(query)]


def dump(db: PostgresDb, statements: Statements) -> dict[str, Any]:
    def ask(text: str) -> list[tuple[Any, ...]]:
        return db.execute(statements.place(text)).fetchall()

    jobs = msgspec.convert(ask(f"SELECT {JOB} FROM towpath.job j ORDER BY seq"), list[Job])
    db.fill(jobs)
    ((next_seq, next_version, last),) = ask(
        """SELECT s.last_value + s.is_called::int, v.last_value + v.is_called::int, t.last_value
           FROM towpath.job_seq s, towpath.version_seq v, towpath.last_time t"""
    )
    thens = {str(id): decode_then(specs) for id, specs in ask('SELECT id, specs FROM towpath."then"')}
    return {
        "jobs": jobs,
        "attempts": ask(
            """SELECT seq, number, counted = 1, started_at, ended_at, owner, outcome, error
               FROM towpath.attempt ORDER BY 1, 2, 3"""
        ),
        "edges": ask("SELECT src, dst, run_anyway FROM towpath.edge ORDER BY 1, 2"),
        "gates": ask("SELECT src, dst, run_anyway, coalesce(outcome, '') FROM towpath.gate ORDER BY 1, 2"),
        "proxies": ask("SELECT id, seq, grp, job, counted FROM towpath.proxy ORDER BY id"),
        "names": ask("SELECT dst, id, src FROM towpath.name ORDER BY 1, 2"),
        "groups": [
            (reads.group_view(row), thens.get(row.id, {})) for row in db.rows("all_groups", (), GroupRow)
        ],
        "keys": ask("SELECT namespace, key, id, seq, until, runner FROM towpath.key ORDER BY 1, 2"),
        "notes": [
            NoteView(*row)
            for row in ask("SELECT key, value, version, fence, expires_at FROM towpath.note ORDER BY key")
        ],
        "queues": [
            (reads.queue_view(row, None), row.served, row.clock)
            for row in db.rows("all_queues", (), QueueRow)
        ],
        "parts": [
            (reads.part_view(row), bool(row.configured))
            for row in db.rows("parts_of_queue", (None,), PartRow)
        ],
        "tombstones": ask(
            """SELECT id, seq, state, settled_fence, coalesce(alias, ''), until
               FROM towpath.tombstone ORDER BY id"""
        ),
        "replies": ask("SELECT token, until FROM towpath.reply ORDER BY token"),
        "blobs": ask("SELECT id, job, until FROM towpath.blob ORDER BY id"),
        "chunks": ask("SELECT blob, number, data FROM towpath.chunk ORDER BY blob, number"),
        "next_seq": next_seq,
        "next_version": next_version,
        "last": last,
    }
