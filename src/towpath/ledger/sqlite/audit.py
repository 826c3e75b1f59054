"""The whole state: `check` recounts it, `dump` returns it."""

from __future__ import annotations

from typing import Any

import apsw

from towpath.core.blobs import HEADER
from towpath.core.history import HISTORY
from towpath.core.job import Job
from towpath.core.views import NoteView
from towpath.ledger.sqlite import rows as jobs
from towpath.ledger.sqlite.rows import SLOTS
from towpath.ledger.sqlite.statements import named, one, rows
from towpath.ledger.tables import reads
from towpath.ledger.tables.append import decode_then
from towpath.ledger.tables.database import HEADERS
from towpath.ledger.tables.transaction import GroupRow, PartRow, QueueRow

# Each statement returns the inconsistent rows; the sentence is formatted with their columns. Rows that a
# CHECK constraint forbids are not checked here.
_CHECKS: tuple[tuple[str, str], ...] = (
    (
        "queue {} counts {} {} but has {}",
        """SELECT name, n, state, real FROM (
            SELECT q.name, s.value AS state, CASE s.value WHEN 'blocked' THEN blocked WHEN 'scheduled'
                THEN scheduled
                WHEN 'ready' THEN ready WHEN 'running' THEN running WHEN 'done' THEN done WHEN 'failed'
                    THEN failed
                ELSE canceled END AS n,
                (SELECT count(*) FROM towpath_job j WHERE j.queue = q.name AND j.state = s.value) AS real
            FROM towpath_queue q,
                json_each('["blocked","scheduled","ready","running","done","failed","canceled"]') s)
           WHERE n <> real""",
    ),
    (
        "queue {} counts {} ready jobs without a part but has {}",
        """SELECT name, loose, (SELECT count(*) FROM towpath_job j WHERE j.queue = q.name
            AND j.state = 'ready' AND part IS NULL)
           AS real FROM towpath_queue q WHERE loose <> real""",
    ),
    (
        "queue {} has jobs but no row",
        "SELECT DISTINCT queue FROM towpath_job WHERE queue NOT IN (SELECT name FROM towpath_queue)",
    ),
    (
        "part {} of {} counts {} ready and {} running, but has {} and {}",
        """SELECT name, queue, ready, running, r, u FROM (SELECT p.*,
            (SELECT count(*) FROM towpath_job j WHERE j.queue = p.queue AND j.part = p.name
                AND j.state = 'ready') AS r,
            (SELECT count(*) FROM towpath_job j WHERE j.queue = p.queue AND j.part = p.name
                AND j.state = 'running') AS u
            FROM towpath_part p) WHERE ready <> r OR running <> u""",
    ),
    (
        "part {} of {} has active jobs but no row",
        """SELECT DISTINCT part, queue FROM towpath_job j WHERE part IS NOT NULL
            AND state IN ('ready', 'running')
           AND NOT EXISTS (SELECT 1 FROM towpath_part p WHERE p.queue = j.queue AND p.name = j.part)""",
    ),
    (
        "job {} waits for {} but has {} open dependencies",
        """SELECT id, waits, real FROM (SELECT j.id, j.waits,
            (SELECT count(*) FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src WHERE e.dst = j.seq
                AND s.state NOT IN ('done', 'failed', 'canceled'))
            + (SELECT count(*) FROM towpath_gate g JOIN towpath_group o ON o.id = g.src
                AND o.state <> 'closed' WHERE g.dst = j.seq)
            + EXISTS (SELECT 1 FROM towpath_group g WHERE g.id = j."group" AND g.state = 'open') AS real
            FROM towpath_job j WHERE j.state = 'blocked') WHERE waits <> real""",
    ),
    (
        "job {} is {} though its dependency {} is {}",
        """SELECT j.id, j.state, s.id, s.state FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src
           JOIN towpath_job j ON j.seq = e.dst WHERE e.run_anyway = 0
               AND j.state IN ('blocked', 'scheduled', 'ready')
           AND s.state IN ('failed', 'canceled')""",
    ),
    (
        "edge {} -> {} has no job at one end",
        """SELECT src, dst FROM towpath_edge WHERE src NOT IN (SELECT seq FROM towpath_job)
           OR dst NOT IN (SELECT seq FROM towpath_job)""",
    ),
    (
        "gate {} -> {} belongs to an unknown group or an unknown job",
        """SELECT src, dst FROM towpath_gate WHERE dst NOT IN (SELECT seq FROM towpath_job)
            OR src NOT IN (SELECT id FROM towpath_group)""",
    ),
    (
        "job {} is {} though group {} is {}",
        """SELECT j.id, j.state, o.id, o.outcome FROM towpath_gate g JOIN towpath_group o ON o.id = g.src
            AND o.state = 'closed'
           JOIN towpath_job j ON j.seq = g.dst AND j.state IN ('blocked', 'scheduled', 'ready')
           WHERE g.run_anyway = 0 AND coalesce(g.outcome, 'done') <> o.outcome""",
    ),
    (
        "group {} is closed and counts {} unfinished",
        """SELECT id, unfinished FROM towpath_group WHERE state = 'closed' AND unfinished > 0""",
    ),
    (
        "the proxy for {} in group {} is counted as {}, and its job is {}",
        """SELECT p.id, p.grp, p.counted, coalesce(j.state, 'gone') FROM towpath_proxy p
            LEFT JOIN towpath_job j ON j.seq = p.job
           LEFT JOIN towpath_group g ON g.id = p.grp WHERE g.id IS NULL
           OR (p.counted = 'unfinished' AND (j.seq IS NULL OR j.state IN ('done', 'failed', 'canceled')))
           OR (p.counted <> 'unfinished' AND g.state IN ('open', 'sealed')
               AND j.state NOT IN ('done', 'failed', 'canceled'))""",
    ),
    (
        "names of dependencies are left of job number {}",
        "SELECT DISTINCT dst FROM towpath_name WHERE dst NOT IN (SELECT seq FROM towpath_job)",
    ),
    (
        "group {} counts {} unfinished but has {}",
        """SELECT id, unfinished, real FROM (SELECT g.id, g.unfinished, (SELECT count(*) FROM towpath_job j
            WHERE j."group" = g.id AND j.state IN ('blocked', 'scheduled', 'ready', 'running'))
            + (SELECT count(*) FROM towpath_proxy p WHERE p.grp = g.id AND p.counted = 'unfinished') AS real
                FROM towpath_group g)
           WHERE unfinished <> real""",
    ),
    (
        "group {} is {} with nothing unfinished",
        "SELECT id, state FROM towpath_group WHERE state IN ('sealed', 'aborting') AND unfinished = 0",
    ),
    (
        "group {} counts fewer finished members than it has",
        """SELECT id FROM towpath_group g WHERE done < (SELECT count(*) FROM towpath_job j
            WHERE j."group" = g.id AND j.state = 'done')
           OR failed < (SELECT count(*) FROM towpath_job j WHERE j."group" = g.id AND j.state = 'failed')
           OR canceled + superseded < (SELECT count(*) FROM towpath_job j WHERE j."group" = g.id
               AND j.state = 'canceled')""",
    ),
    (
        "job {} is in no known group",
        """SELECT id FROM towpath_job
           WHERE "group" IS NOT NULL AND "group" NOT IN (SELECT id FROM towpath_group)""",
    ),
    (
        "job {} waits in group {}, which is aborting",
        """SELECT j.id, g.id FROM towpath_job j JOIN towpath_group g ON g.id = j."group"
        WHERE g.state = 'aborting' AND j.state IN ('blocked', 'scheduled', 'ready')""",
    ),
    (
        "key {} of {} is held by {}, which is finished or gone",
        """SELECT k.key, k.namespace, k.id FROM towpath_key k LEFT JOIN towpath_job j ON j.seq = k.seq
           WHERE k.until = 0 AND (j.seq IS NULL OR j.state IN ('done', 'failed', 'canceled'))""",
    ),
    (
        "job {} should hold its key {}",
        """SELECT id, key FROM towpath_job j WHERE key_policy IN ('unique', 'replace')
           AND state IN ('blocked', 'scheduled', 'ready') AND cancel_requested IS NULL
           AND NOT EXISTS (SELECT 1 FROM towpath_key k WHERE k.seq = j.seq)""",
    ),
    (
        "attempt {} is left of job number {}",
        "SELECT number, seq FROM towpath_attempt WHERE seq NOT IN (SELECT seq FROM towpath_job)",
    ),
    (
        "attempt {} of job {} is none of the last of {}",
        f"""SELECT a.number, j.id, j.attempts FROM towpath_attempt a JOIN towpath_job j ON j.seq = a.seq
           WHERE a.number > j.attempts + 1 - a.counted OR a.number < j.attempts - {HISTORY}
           OR a.ended_at < a.started_at""",
    ),
    (
        "body {} has no job",
        "SELECT slot FROM towpath_body b WHERE b.slot / 8192 NOT IN (SELECT seq FROM towpath_job)",
    ),
    (
        "blob {} has no chunks",
        """SELECT id FROM towpath_blob b
           WHERE NOT EXISTS (SELECT 1 FROM towpath_chunk c WHERE c.blob = b.id)""",
    ),
    (
        "blob {} has {} bytes, its job number {} has {}",
        """SELECT id, n, job, size FROM (SELECT b.id, b.job, coalesce(j.size, 0) AS size,
            (SELECT sum(length(c.data)) FROM towpath_chunk c WHERE c.blob = b.id) AS n
            FROM towpath_blob b LEFT JOIN towpath_job j ON j.seq = b.job WHERE b.job IS NOT NULL)
           WHERE n IS NOT size""",
    ),
    (
        "chunk {} of blob {} is left",
        "SELECT number, blob FROM towpath_chunk WHERE blob NOT IN (SELECT id FROM towpath_blob)",
    ),
    (
        "job number {} does not have the blob {} of its header",
        f"""SELECT seq, named FROM (SELECT slot / {SLOTS} AS seq, CASE slot % {SLOTS}
            WHEN {HEADERS * 1024} THEN CAST(data AS TEXT) ->> '$."{HEADER}"' END AS named FROM towpath_body)
           WHERE named IS NOT NULL AND NOT EXISTS (SELECT 1 FROM towpath_blob b
               JOIN towpath_job j ON j.seq = b.job WHERE b.job = seq AND named = b.id || ' ' || j.size)""",
    ),
    (
        "job {} also has a tombstone",
        "SELECT id FROM towpath_tombstone WHERE id IN (SELECT id FROM towpath_job)",
    ),
    (
        "next_seq is {} but there is a job {}",
        "SELECT next_seq, (SELECT max(seq) FROM towpath_job) AS top FROM towpath_meta WHERE next_seq <= top",
    ),
)


def check(db: apsw.Connection) -> list[str]:
    return [sentence.format(*row) for sentence, sql in _CHECKS for row in db.execute(sql)]


def dump(db: apsw.Connection) -> dict[str, Any]:
    found = rows(
        db,
        f"SELECT json_group_array({jobs.as_json()}) FROM (SELECT * FROM towpath_job ORDER BY seq) j",
        (),
        Job,
    )
    jobs.fill(db, found)
    next_seq, next_version, last = one(db, "SELECT next_seq, next_version, last FROM towpath_meta")
    edges = [
        (src, dst, bool(anyway))
        for src, dst, anyway in db.execute("SELECT * FROM towpath_edge ORDER BY 1, 2")
    ]
    gated = "SELECT src, dst, run_anyway, coalesce(outcome, '') FROM towpath_gate ORDER BY 1, 2"
    gates = [(src, dst, bool(anyway), outcome) for src, dst, anyway, outcome in db.execute(gated)]
    thens = {
        str(id): decode_then(str(specs)) for id, specs in db.execute("SELECT id, specs FROM towpath_then")
    }
    tombstones = (
        "SELECT id, seq, state, settled_fence, coalesce(alias, ''), until FROM towpath_tombstone ORDER BY id"
    )
    return {
        "jobs": found,
        "attempts": [
            (seq, number, bool(counted), *rest)
            for seq, number, counted, *rest in db.execute("SELECT * FROM towpath_attempt ORDER BY 1, 2, 3")
        ],
        "edges": edges,
        "gates": gates,
        "proxies": list(db.execute("SELECT id, seq, grp, job, counted FROM towpath_proxy ORDER BY id")),
        "names": list(db.execute("SELECT dst, id, src FROM towpath_name ORDER BY 1, 2")),
        "groups": [
            (reads.group_view(row), thens.get(row.id, {}))
            for row in rows(db, named("all_groups"), (), GroupRow)
        ],
        "keys": list(
            db.execute("SELECT namespace, key, id, seq, until, runner FROM towpath_key ORDER BY 1, 2")
        ),
        "notes": [NoteView(*row) for row in db.execute("SELECT * FROM towpath_note ORDER BY key")],
        "queues": [
            (reads.queue_view(row, None), row.served, row.clock)
            for row in rows(db, named("all_queues"), (), QueueRow)
        ],
        "parts": [
            (reads.part_view(row), bool(row.configured))
            for row in rows(db, named("parts_of_queue"), (None,), PartRow)
        ],
        "tombstones": list(db.execute(tombstones)),
        "replies": list(db.execute("SELECT token, until FROM towpath_reply ORDER BY token")),
        "blobs": list(db.execute("SELECT id, job, until FROM towpath_blob ORDER BY id")),
        "chunks": list(db.execute("SELECT blob, number, data FROM towpath_chunk ORDER BY blob, number")),
        "next_seq": next_seq,
        "next_version": next_version,
        "last": last,
    }
