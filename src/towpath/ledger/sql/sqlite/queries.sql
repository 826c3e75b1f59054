-- Named statements of the SQLite ledger. A statement that lists rows returns a single JSON array (see
-- sqlite/statements.py). {job} is a job j as a JSON array of its columns without bodies; {taken} is the same
-- with the values after a claim; {held} is the part of it that a settle needs. {queue}, {part} and {group}
-- are a row of these tables as a JSON array.

-- name: begin_batch
-- The facts that most transactions need, in one step: the ledger's own row, the rows of the queues ?1, how
-- many of the ids ?2 are known, the jobs ?3 for their settles, and whether at ?4 a waiting job has expired or
-- a suspect is ready.
SELECT schema, min_schema, next_seq, next_version, last,
    (SELECT json_group_array({queue})
     FROM json_each(?1) v CROSS JOIN towpath_queue q ON q.name = v.value),
    (SELECT count(*) FROM json_each(?2) v WHERE EXISTS (SELECT 1 FROM towpath_job j WHERE j.id = v.value)
        OR EXISTS (SELECT 1 FROM towpath_tombstone t WHERE t.id = v.value)),
    (SELECT json_group_array({held}) FROM json_each(?3) v CROSS JOIN towpath_job j ON j.id = v.value),
    EXISTS (SELECT 1 FROM towpath_job WHERE expires_at IS NOT NULL
        AND state IN ('blocked', 'scheduled', 'ready') AND expires_at <= max(?4, last)),
    EXISTS (SELECT 1 FROM towpath_job INDEXED BY towpath_job_suspect WHERE state = 'ready' AND losses >= 2)
FROM towpath_meta;

-- name: append_start
-- The facts of a fast append: whether queue ?1 exists and has room for ?2 jobs, and whether an id from ?3 to
-- ?4 is known.
SELECT schema, min_schema, next_seq, next_version, last,
    (SELECT capacity IS NULL OR blocked + scheduled + ready + ?2 <= capacity FROM towpath_queue
        WHERE name = ?1),
    EXISTS (SELECT 1 FROM towpath_job WHERE id BETWEEN ?3 AND ?4)
        OR EXISTS (SELECT 1 FROM towpath_tombstone WHERE id BETWEEN ?3 AND ?4)
FROM towpath_meta;

-- name: any_known
SELECT EXISTS (SELECT 1 FROM json_each(?1) v WHERE EXISTS (SELECT 1 FROM towpath_job j WHERE j.id = v.value)
    OR EXISTS (SELECT 1 FROM towpath_tombstone t WHERE t.id = v.value));

-- name: append_claim_start
-- The facts of a fast append and claim of one spec, ?1 its queue and ?2 its id, at ?4: whether a claim from
-- the queues ?3 finds no other job, and whether the id is known.
SELECT schema, min_schema, next_seq, next_version, last,
    (SELECT (capacity IS NULL OR blocked + scheduled < capacity) AND paused = 0 AND cap IS NULL
        AND rate_count IS NULL
        AND next_at <= max(?4, last) FROM towpath_queue WHERE name = ?1)
    AND NOT EXISTS (SELECT 1 FROM json_each(?3) v CROSS JOIN towpath_queue q ON q.name = v.value
        WHERE q.ready > 0 OR (q.scheduled > 0 AND EXISTS (
            SELECT 1 FROM towpath_job j WHERE j.queue = q.name AND j.state = 'scheduled'
                AND j.ready_at <= max(?4, last))))
    AND NOT EXISTS (SELECT 1 FROM towpath_job
        WHERE expires_at IS NOT NULL AND state IN ('blocked', 'scheduled', 'ready')
            AND expires_at <= max(?4, last)),
    EXISTS (SELECT 1 FROM towpath_job WHERE id = ?2) OR EXISTS (SELECT 1 FROM towpath_tombstone WHERE id = ?2)
FROM towpath_meta;

-- name: finish_append
-- The counters of queue ?4 and the ledger's row, as one call: a lone enqueue waits for each call.
UPDATE towpath_queue SET ready = ready + ?1, loose = loose + ?1, scheduled = scheduled + ?2,
    running = running + ?3 WHERE name = ?4;
UPDATE towpath_meta SET next_seq = ?, next_version = ?, last = ?;

-- name: write_meta
UPDATE towpath_meta SET next_seq = ?, next_version = ?, last = ?;

-- name: queues_by_name
SELECT json_group_array({queue})
FROM json_each(?) v CROSS JOIN towpath_queue q ON q.name = v.value;

-- name: all_queues
-- Each with the time since when its longest-waiting ready job could have run.
SELECT json_group_array({queue_shown} ORDER BY name) FROM towpath_queue q;

-- name: one_queue
SELECT json_group_array({queue_shown}) FROM towpath_queue q WHERE name = ?;

-- name: live_queues
SELECT json_group_array(name) FROM towpath_queue WHERE ready > 0 OR scheduled > 0;

-- name: parts_by_name
SELECT json_group_array({part})
FROM json_each(?) v CROSS JOIN towpath_part p ON p.queue = v.value ->> 0 AND p.name = v.value ->> 1;

-- name: parts_of_queue
SELECT json_group_array({part} ORDER BY queue, name)
FROM towpath_part WHERE ?1 IS NULL OR queue = ?1;

-- name: waiting_parts
-- The number of blocked and scheduled jobs of these parts.
SELECT json_group_array(json_array(v.value ->> 0, v.value ->> 1, (
    SELECT count(*) FROM towpath_job WHERE queue = v.value ->> 0 AND part IS NOT NULL AND part = v.value ->> 1
        AND state IN ('blocked', 'scheduled'))))
FROM json_each(?) v;

-- name: open_parts
-- The parts from which a job can be claimed now, the least recently served first.
SELECT json_group_array({part})
FROM (SELECT * FROM towpath_part
      WHERE queue = ? AND ready > 0 AND paused = 0 AND (cap IS NULL OR running < cap) AND next_at <= ?
      ORDER BY served, name LIMIT ?);

-- name: groups_by_id
SELECT json_group_array({group})
FROM json_each(?) v CROSS JOIN towpath_group g ON g.id = v.value;

-- name: groups_after
-- Groups from id ?1 and after ?2, before ?3, in one of the states ?4,
-- with one of the outcomes ?5 (NULL: any).
SELECT json_group_array({group}) FROM (SELECT * FROM towpath_group
    WHERE id >= ?1 AND id > ?2 AND id < ?3 AND state IN (SELECT value FROM json_each(?4))
        AND (?5 IS NULL OR outcome IN (SELECT value FROM json_each(?5)))
    ORDER BY id LIMIT ?6) g;

-- name: groups_before
-- Groups from id ?1 and before ?2, the last first, in one of the states ?3,
-- with one of the outcomes ?4 (NULL: any).
SELECT json_group_array({group}) FROM (SELECT * FROM towpath_group
    WHERE id >= ?1 AND id < ?2 AND state IN (SELECT value FROM json_each(?3))
        AND (?4 IS NULL OR outcome IN (SELECT value FROM json_each(?4)))
    ORDER BY id DESC LIMIT ?5) g;

-- name: all_groups
SELECT json_group_array({group} ORDER BY g.id) FROM towpath_group g;

-- name: known_ids
SELECT json_group_array(json_array(id, seq, state, gone, alias)) FROM (
    SELECT j.id, j.seq, j.state, 0 AS gone, NULL AS alias FROM json_each(?1) v CROSS JOIN towpath_job j
        ON j.id = v.value
    UNION ALL
    SELECT t.id, t.seq, t.state, 1, t.alias FROM json_each(?1) v CROSS JOIN towpath_tombstone t
        ON t.id = v.value
    WHERE NOT EXISTS (SELECT 1 FROM towpath_job j WHERE j.id = t.id)
    UNION ALL
    SELECT p.id, p.job, coalesce(w.state, 'done'), 1, w.id FROM json_each(?1) v CROSS JOIN towpath_proxy p
        ON p.id = v.value
    LEFT JOIN towpath_job w ON w.seq = p.job
    WHERE NOT EXISTS (SELECT 1 FROM towpath_job j WHERE j.id = p.id)
        AND NOT EXISTS (SELECT 1 FROM towpath_tombstone t WHERE t.id = p.id));

-- name: key_holders
SELECT json_group_array(json_array(k.namespace, k.key, k.id, k.seq, j.state, k.until,
    (SELECT r.seq FROM towpath_job r WHERE r.seq = k.runner AND r.state = 'running')))
FROM json_each(?) v CROSS JOIN towpath_key k ON k.namespace = v.value ->> 0 AND k.key = v.value ->> 1
LEFT JOIN towpath_job j ON j.seq = k.seq;

-- name: downstream
-- All unfinished jobs and groups that wait for a group (1, id, NULL) or a job (0, NULL, id), directly or not.
-- For a closed group: the jobs and groups that would wait again if it were reopened. A replaced job leaves
-- its own group.
WITH RECURSIVE down (seq, grp) AS (
    SELECT CASE WHEN ?1 = 0 THEN (SELECT seq FROM towpath_job WHERE id = ?3) END, ?2
    UNION
    SELECT e.dst, NULL FROM down d CROSS JOIN towpath_edge e ON e.src = d.seq
        CROSS JOIN towpath_job j ON j.seq = e.dst AND j.state = 'blocked'
    UNION
    SELECT g.dst, NULL FROM down d CROSS JOIN towpath_gate g ON g.src = d.grp
        CROSS JOIN towpath_job j ON j.seq = g.dst AND j.state IN ('blocked', 'scheduled', 'ready')
    UNION
    SELECT NULL, g.id FROM down d CROSS JOIN towpath_job j ON j.seq = d.seq AND j.id IS NOT ?3
        CROSS JOIN towpath_group g ON g.id = j."group" AND g.state <> 'closed'
    UNION
    SELECT NULL, g.id FROM down d CROSS JOIN towpath_proxy p ON p.job = d.seq AND p.counted = 'unfinished'
        CROSS JOIN towpath_group g ON g.id = p.grp AND g.state <> 'closed'
)
SELECT json_group_array(json_array((SELECT id FROM towpath_job WHERE seq = d.seq), d.grp)) FROM down d
WHERE d.seq IS NOT NULL OR d.grp IS NOT NULL;

-- name: ask_to_stop
UPDATE towpath_job SET cancel_requested = ?
WHERE seq IN (SELECT value FROM json_each(?)) AND state = 'running'
    AND coalesce(cancel_requested, 'stopped') = 'stopped';

-- name: ask_members_to_stop
-- A request to stop that interrupts the handler replaces one that does not.
UPDATE towpath_job SET cancel_requested = ?1 WHERE "group" = ?2 AND state = 'running'
    AND (cancel_requested IS NULL OR (cancel_requested = 'stopped' AND ?1 <> 'stopped'));

-- name: waiting_members
SELECT json_group_array(seq) FROM towpath_job WHERE "group" = ?
    AND state IN ('blocked', 'scheduled', 'ready');

-- name: sealed_members
SELECT json_group_array(json_array(seq, queue, part, ready_at, waits, 1)) FROM towpath_job
WHERE "group" = ? AND state = 'blocked';

-- name: one_more_wait
UPDATE towpath_job SET waits = waits + 1 WHERE "group" = ? AND state = 'blocked';

-- name: members_that_could_run
SELECT json_group_array(json_array(seq, queue, part, state)) FROM towpath_job
WHERE "group" = ? AND (state = 'scheduled' OR state = 'ready');

-- name: hold
UPDATE towpath_job SET state = 'blocked', reason = '', waits = 1 WHERE seq IN (SELECT value
    FROM json_each(?));

-- name: move_edges
UPDATE towpath_edge SET src = v.value ->> 1 FROM json_each(?) v WHERE src = v.value ->> 0;

-- name: move_names
UPDATE towpath_name SET src = v.value ->> 1 FROM json_each(?) v WHERE src = v.value ->> 0
    AND dst IN (SELECT e.dst FROM towpath_edge e WHERE e.src = v.value ->> 0);

-- name: name_moved
-- Runs before the edges move. The dependents refer to the older job (v 0) by its id; from now on the newer
-- job (v 1) represents it.
INSERT OR REPLACE INTO towpath_name (dst, id, src)
SELECT e.dst, j.id, v.value ->> 1 FROM json_each(?) v CROSS JOIN towpath_edge e ON e.src = v.value ->> 0
CROSS JOIN towpath_job j ON j.seq = e.src;

-- name: move_proxies
UPDATE towpath_proxy SET job = v.value ->> 1 FROM json_each(?) v WHERE job = v.value ->> 0
    AND counted = 'unfinished';

-- name: proxies_of
SELECT json_group_array(json_array(p.id, p.grp, p.job, p.counted)) FROM json_each(?) v
    CROSS JOIN towpath_proxy p ON p.job = v.value;

-- name: proxies_in
SELECT json_group_array(json_array(id, grp, job, counted)) FROM towpath_proxy WHERE grp = ?;

-- name: count_proxies
UPDATE towpath_proxy SET counted = ? WHERE id IN (SELECT value FROM json_each(?));

-- name: winners_in
SELECT json_group_array(json_array(p.id, p.seq, j.id, p.counted) ORDER BY p.seq)
FROM towpath_proxy p LEFT JOIN towpath_job j ON j.seq = p.job WHERE p.grp = ?;

-- name: winners_for
SELECT json_group_array(json_array(n.id, 0, s.id, '') ORDER BY n.id)
FROM towpath_job d CROSS JOIN towpath_name n ON n.dst = d.seq LEFT JOIN towpath_job s ON s.seq = n.src
    WHERE d.id = ?;

-- name: delete_keys
DELETE FROM towpath_key WHERE (namespace, key) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?));

-- name: free_keys
DELETE FROM towpath_key WHERE until <= ? AND (namespace, key, seq) IN (
    SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?));

-- name: live_holder
SELECT k.id FROM towpath_key k JOIN towpath_job j ON j.seq = k.seq
WHERE k.namespace = ? AND k.key = ? AND k.seq <> ?
    AND j.state IN ('blocked', 'scheduled', 'ready', 'running');

-- name: due_jobs
SELECT json_group_array(json_array(seq, part)) FROM (
    SELECT seq, part FROM towpath_job WHERE queue = ? AND state = 'scheduled' AND ready_at <= ?
    ORDER BY ready_at, seq LIMIT ?);

-- name: take
UPDATE towpath_job SET state = 'running', reason = '', attempts = attempts + 1, fence = fence + 1, owner = ?,
    lease_until = ?, lease_len = ?, started_at = ?
WHERE seq IN (SELECT value FROM json_each(?));

-- name: settle_done
UPDATE towpath_job SET state = 'done', reason = '', finished_at = ?, purge_at = ?, owner = NULL,
    lease_until = NULL,
    settled_fence = fence, settled_as = 'done'
WHERE seq IN (SELECT value FROM json_each(?));

-- name: settle_again
UPDATE towpath_job SET state = v.value ->> 1, reason = v.value ->> 2, attempts = v.value ->> 3,
    failures = v.value ->> 4,
    ready_at = coalesce(v.value ->> 5, ready_at), owner = NULL, lease_until = NULL, settled_fence = fence,
    settled_as = v.value ->> 1
FROM json_each(?) v WHERE seq = v.value ->> 0;

-- name: settle_over
UPDATE towpath_job SET state = v.value ->> 1, reason = v.value ->> 2, attempts = v.value ->> 3,
    failures = v.value ->> 4,
    purge_at = v.value ->> 5, finished_at = ?, owner = NULL, lease_until = NULL, settled_fence = fence,
    settled_as = v.value ->> 1
FROM json_each(?) v WHERE seq = v.value ->> 0;

-- name: settle_end
-- The columns that only a settle writes; the next statement ends the job.
UPDATE towpath_job SET attempts = ?, failures = ?, settled_fence = fence, settled_as = ? WHERE seq = ?;

-- name: end_jobs
UPDATE towpath_job SET state = ?, reason = ?, finished_at = ?, purge_at = ?, waits = 0, owner = NULL,
    lease_until = NULL
WHERE seq IN (SELECT value FROM json_each(?));

-- name: doomed
-- All blocked jobs that need one of these jobs to succeed, directly or not.
WITH RECURSIVE doomed (seq) AS (
    SELECT e.dst FROM json_each(?) v CROSS JOIN towpath_edge e ON e.src = v.value AND e.run_anyway = 0
        CROSS JOIN towpath_job j ON j.seq = e.dst AND j.state = 'blocked'
    UNION
    SELECT e.dst FROM doomed d CROSS JOIN towpath_edge e ON e.src = d.seq AND e.run_anyway = 0
        CROSS JOIN towpath_job j ON j.seq = e.dst AND j.state = 'blocked'
)
SELECT json_group_array(seq) FROM doomed;

-- name: dependents
SELECT json_group_array(json_array(j.seq, j.queue, j.part, j.ready_at, j.waits, w.over)) FROM (
    SELECT e.dst, count(*) AS over FROM json_each(?) v CROSS JOIN towpath_edge e ON e.src = v.value
        GROUP BY e.dst) w
CROSS JOIN towpath_job j ON j.seq = w.dst AND j.state = 'blocked';

-- name: lower_waits
UPDATE towpath_job SET waits = waits - (v.value ->> 1) FROM json_each(?) v WHERE seq = v.value ->> 0;

-- name: unblock
UPDATE towpath_job SET waits = 0, state = ?, reason = ? WHERE seq IN (SELECT value FROM json_each(?));

-- name: gates_met
SELECT json_group_array(json_array(j.seq, j.queue, j.part, j.ready_at, j.waits, 1))
FROM towpath_gate g JOIN towpath_job j ON j.seq = g.dst AND j.state = 'blocked'
WHERE (g.run_anyway = 1 OR coalesce(g.outcome, 'done') = ?1) AND g.src = ?2;

-- name: gates_shut
SELECT json_group_array(j.seq) FROM towpath_gate g JOIN towpath_job j ON j.seq = g.dst AND j.state = 'blocked'
WHERE g.run_anyway = 0 AND coalesce(g.outcome, 'done') <> ?1 AND g.src = ?2;

-- name: delete_gates
DELETE FROM towpath_gate WHERE (src, dst) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?));

-- name: gates_of
SELECT json_group_array(json_array(src, run_anyway, outcome) ORDER BY src) FROM towpath_gate WHERE dst = ?;

-- name: gates_to
SELECT json_group_array(json_array(dst, run_anyway)) FROM towpath_gate WHERE src = ?;

-- name: dead_member
-- The first member, failed ones before canceled ones, that must be revived before the group can succeed.
SELECT id FROM (
    SELECT id, seq, state FROM towpath_job WHERE "group" = ?1 AND state IN ('failed', 'canceled')
        AND reason <> 'superseded'
    UNION ALL
    SELECT j.id, j.seq, j.state FROM towpath_proxy p JOIN towpath_job j ON j.seq = p.job
    WHERE p.grp = ?1 AND j.state IN ('failed', 'canceled') AND j.reason <> 'superseded')
ORDER BY state <> 'failed', seq LIMIT 1;

-- name: tombstone
SELECT settled_fence, state FROM towpath_tombstone WHERE id = ? AND alias IS NULL AND settled_fence > 0;

-- name: held_pairs
SELECT json_group_array(json_array(j.seq, j.id, j.fence, j.cancel_requested)) FROM json_each(?) v
CROSS JOIN towpath_job j ON j.id = v.value ->> 0 WHERE j.state = 'running' AND j.fence = v.value ->> 1;

-- name: held_job
SELECT seq, cancel_requested FROM towpath_job WHERE id = ? AND fence = ? AND state = 'running';

-- name: renew
UPDATE towpath_job SET lease_until = ?, lease_len = ? WHERE seq IN (SELECT value FROM json_each(?));

-- name: progress
UPDATE towpath_job SET progress_done = coalesce(?, progress_done), progress_total = coalesce(?,
    progress_total) WHERE seq = ?;

-- name: live_notes
SELECT json_group_array(json_array(n.key, n.version, n.fence)) FROM json_each(?) v CROSS JOIN towpath_note n
    ON n.key = v.value
WHERE n.expires_at IS NULL OR n.expires_at > ?;

-- name: delete_notes
DELETE FROM towpath_note WHERE key IN (SELECT value FROM json_each(?));

-- name: bad_dependency
SELECT s.id, s.state FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src
WHERE e.dst = ? AND e.run_anyway = 0 AND s.state IN ('failed', 'canceled') ORDER BY s.seq LIMIT 1;

-- name: open_waits
SELECT count(*) FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src
WHERE e.dst = ? AND s.state NOT IN ('done', 'failed', 'canceled');

-- name: drop_met_edges
DELETE FROM towpath_edge WHERE src = ? AND dst IN (
    SELECT seq FROM towpath_job j WHERE j.seq = dst AND j.state NOT IN ('done', 'failed', 'canceled'));

-- name: revive
UPDATE towpath_job SET state = ?, reason = ?, waits = ?, failures = 0, losses = 0, cancel_requested = NULL,
    finished_at = NULL, purge_at = NULL, expires_at = CASE WHEN expires_at <= ? THEN NULL ELSE expires_at END
WHERE seq = ?;

-- name: revivable_dependents
SELECT json_group_array(DISTINCT e.dst) FROM json_each(?) v CROSS JOIN towpath_edge e ON e.src = v.value
    AND e.run_anyway = 0
JOIN towpath_job j ON j.seq = e.dst WHERE j.state IN ('failed', 'canceled') AND j.reason = 'dependency';

-- name: delete_out_edges
DELETE FROM towpath_edge WHERE src IN (SELECT value FROM json_each(?));

-- name: delete_in_edges
DELETE FROM towpath_edge WHERE dst IN (SELECT value FROM json_each(?));

-- name: delete_gates_of
DELETE FROM towpath_gate WHERE dst IN (SELECT value FROM json_each(?));

-- name: delete_names
DELETE FROM towpath_name WHERE dst IN (SELECT value FROM json_each(?));

-- name: delete_attempts
DELETE FROM towpath_attempt WHERE seq IN (SELECT value FROM json_each(?));

-- name: end_attempts
INSERT OR REPLACE INTO towpath_attempt (seq, number, counted, started_at, ended_at, owner, outcome, error)
SELECT j.seq, j.attempts, v.value ->> 1, j.started_at, ?, j.owner, v.value ->> 2, v.value ->> 3
FROM json_each(?) v CROSS JOIN towpath_job j ON j.seq = v.value ->> 0;

-- name: forget_attempts
DELETE FROM towpath_attempt WHERE (seq, number, counted) IN (
    SELECT a.seq, a.number, a.counted FROM json_each(?) v CROSS JOIN towpath_attempt a
        ON a.seq = v.value ->> 0 AND a.number <= v.value ->> 1);

-- name: attempts_of
SELECT json_group_array(json_array(number, json(iif(counted, 'true', 'false')), started_at, ended_at, owner,
    outcome, error)) FROM (
    SELECT a.* FROM towpath_job j CROSS JOIN towpath_attempt a ON a.seq = j.seq WHERE j.id = ?
    ORDER BY a.number, a.counted);

-- name: delete_bodies
DELETE FROM towpath_body WHERE slot IN (
    SELECT b.slot FROM json_each(?) v CROSS JOIN towpath_body b ON b.slot BETWEEN v.value * 8192
        AND v.value * 8192 + 8191);

-- name: delete_jobs
DELETE FROM towpath_job WHERE seq IN (SELECT value FROM json_each(?));

-- name: count_losses
UPDATE towpath_job SET losses = losses + 1 WHERE seq IN (SELECT value FROM json_each(?));

-- name: give_back
UPDATE towpath_job SET state = v.value ->> 1, reason = 'lost', ready_at = coalesce(v.value ->> 2, ready_at),
    owner = NULL,
    lease_until = NULL
FROM json_each(?) v WHERE seq = v.value ->> 0;

-- name: expired_jobs
SELECT json_group_array(seq) FROM (
    SELECT seq FROM towpath_job
    WHERE expires_at IS NOT NULL AND state IN ('blocked', 'scheduled', 'ready') AND expires_at <= ?
    ORDER BY expires_at, seq LIMIT ?);

-- name: queues_with_due
SELECT json_group_array(name) FROM (
    SELECT q.name FROM towpath_queue q WHERE q.scheduled > 0 AND EXISTS (
        SELECT 1 FROM towpath_job j WHERE j.queue = q.name AND j.state = 'scheduled' AND j.ready_at <= ?)
    ORDER BY q.name);

-- name: queues_with_purgeable
SELECT json_group_array(name) FROM (
    SELECT q.name FROM towpath_queue q WHERE q.done + q.canceled > 0 AND EXISTS (
        SELECT 1 FROM towpath_job j WHERE j.queue = q.name AND j.purge_at IS NOT NULL AND j.purge_at <= ?)
    ORDER BY q.name);

-- name: queues_too_full
SELECT json_group_array(json_array(name, kept, keep)) FROM (
    SELECT name, done + canceled AS kept, coalesce(keep, ?) AS keep FROM towpath_queue
    WHERE done + canceled > coalesce(keep, ?) ORDER BY name);

-- name: purgeable_jobs
SELECT json_group_array(seq) FROM (
    SELECT seq FROM towpath_job WHERE queue = ? AND purge_at IS NOT NULL AND (? IS NULL OR purge_at <= ?)
    ORDER BY purge_at, seq LIMIT ?);

-- name: sweep_tombstones
DELETE FROM towpath_tombstone WHERE id IN (SELECT id FROM towpath_tombstone WHERE until <= ?
    ORDER BY until, id LIMIT ?);

-- name: sweep_replies
DELETE FROM towpath_reply WHERE token IN (SELECT token FROM towpath_reply WHERE until <= ?
    ORDER BY until, token LIMIT ?);

-- name: sweep_notes
DELETE FROM towpath_note WHERE key IN (
    SELECT key FROM towpath_note WHERE expires_at IS NOT NULL AND expires_at <= ?
        ORDER BY expires_at, key LIMIT ?);

-- name: closed_windows
-- Keys with an ended window, and whether an unfinished job still holds them.
SELECT json_group_array(json_array(namespace, key, held)) FROM (
    SELECT k.namespace, k.key, EXISTS (SELECT 1 FROM towpath_job j WHERE j.seq = k.seq
        AND j.state NOT IN ('done', 'failed', 'canceled')) AS held
    FROM towpath_key k WHERE k.until > 0 AND k.until <= ? ORDER BY k.until, k.namespace, k.key LIMIT ?);

-- name: close_windows
UPDATE towpath_key SET until = 0 WHERE (namespace, key) IN (SELECT value ->> 0, value ->> 1
    FROM json_each(?));

-- name: sweep_parts
DELETE FROM towpath_part WHERE (queue, name) IN (
    SELECT queue, name FROM towpath_part WHERE ready = 0 AND running = 0 AND configured = 0 AND next_at <= ?
    ORDER BY queue, name LIMIT ?);

-- name: unused_queues
-- Queues that are unused at ?2 and have been unused since ?1.
SELECT json_group_array(name) FROM (
    SELECT u.name FROM towpath_unused u JOIN towpath_queue q ON q.name = u.name
    WHERE u.since <= ?1 AND {unused} AND q.next_at <= ?2 ORDER BY u.since, u.name LIMIT ?3);

-- name: note_unused
INSERT INTO towpath_unused (name, since) SELECT q.name, ?1 FROM towpath_queue q
WHERE {unused} AND q.next_at <= ?1 AND NOT EXISTS (SELECT 1 FROM towpath_unused u WHERE u.name = q.name);

-- name: delete_queues
DELETE FROM towpath_queue WHERE name IN (SELECT value FROM json_each(?));

-- name: delete_unused
DELETE FROM towpath_unused WHERE name IN (SELECT value FROM json_each(?));

-- name: sweep_groups
DELETE FROM towpath_group WHERE id IN (
    SELECT g.id FROM towpath_group g WHERE g.state = 'closed' AND g.closed_at <= ?
    AND NOT EXISTS (SELECT 1 FROM towpath_job j WHERE j."group" = g.id) ORDER BY g.closed_at, g.id LIMIT ?);

-- name: sweep_thens
DELETE FROM towpath_then WHERE id NOT IN (SELECT id FROM towpath_group);

-- name: sweep_gates
DELETE FROM towpath_gate WHERE src NOT IN (SELECT id FROM towpath_group);

-- name: sweep_proxies
DELETE FROM towpath_proxy WHERE grp NOT IN (SELECT id FROM towpath_group);

-- name: hold_blobs
SELECT json_group_array(json_array(id, job)) FROM towpath_blob WHERE id IN (SELECT value FROM json_each(?));

-- name: chunk_lengths
SELECT json_group_array(json_array(blob, number, size)) FROM (
    SELECT blob, number, length(data) AS size FROM towpath_chunk
    WHERE blob IN (SELECT value FROM json_each(?)) ORDER BY blob, number);

-- name: touch_blob
INSERT INTO towpath_blob (id, job, until) VALUES (?, NULL, ?)
ON CONFLICT (id) DO UPDATE SET until = excluded.until WHERE job IS NULL;

-- name: read_chunk
SELECT data FROM towpath_chunk WHERE blob = ? AND number = ?;

-- name: free_blobs
UPDATE towpath_blob SET job = NULL, until = ? WHERE job IN (SELECT value FROM json_each(?));

-- name: sweep_chunks
DELETE FROM towpath_chunk WHERE rowid IN (
    SELECT c.rowid FROM towpath_blob b CROSS JOIN towpath_chunk c ON c.blob = b.id
    WHERE b.job IS NULL AND b.until <= ? ORDER BY b.until, b.id, c.number LIMIT ?);

-- name: sweep_blobs
DELETE FROM towpath_blob WHERE id IN (
    SELECT b.id FROM (SELECT id FROM towpath_blob WHERE job IS NULL AND until <= ?
        ORDER BY until, id LIMIT ?) b
    WHERE NOT EXISTS (SELECT 1 FROM towpath_chunk c WHERE c.blob = b.id));

-- name: then_of
SELECT specs FROM towpath_then WHERE id = ?;

-- name: next_lease
SELECT min(lease_until) + 1 FROM towpath_job WHERE state = 'running';

-- name: next_lease_after_jump
SELECT min(max(lease_until + 1, coalesce((
    SELECT max((g.value ->> 0) + lease_len) FROM json_each(?2) g
    WHERE ?1 < (g.value ->> 0) + lease_len AND 2 * (g.value ->> 1) > lease_len
    AND lease_until > (g.value ->> 0) - (g.value ->> 1)), 0)))
FROM towpath_job WHERE state = 'running';

-- name: next_due
SELECT min(at) FROM (
    SELECT min(expires_at) AS at FROM towpath_job WHERE expires_at IS NOT NULL
        AND state IN ('blocked', 'scheduled', 'ready')
    UNION ALL
    SELECT min((SELECT min(j.ready_at) FROM towpath_job j WHERE j.queue = q.name AND j.state = 'scheduled'))
        FROM towpath_queue q WHERE q.scheduled > 0
    UNION ALL
    SELECT min((SELECT min(j.purge_at) FROM towpath_job j WHERE j.queue = q.name AND j.purge_at IS NOT NULL))
        FROM towpath_queue q WHERE q.done + q.canceled > 0
    UNION ALL
    SELECT ?1 FROM towpath_queue WHERE done + canceled > coalesce(keep, ?2)
    UNION ALL
    SELECT min(until) FROM towpath_tombstone
    UNION ALL
    SELECT min(until) FROM towpath_reply
    UNION ALL
    SELECT min(until) FROM towpath_blob WHERE job IS NULL
    UNION ALL
    SELECT min(expires_at) FROM towpath_note WHERE expires_at IS NOT NULL
    UNION ALL
    SELECT min(until) FROM towpath_key WHERE until > 0
    UNION ALL
    SELECT min(next_at) FROM towpath_part WHERE ready > 0 AND next_at > ?1
    UNION ALL
    SELECT min(next_at) FROM towpath_queue WHERE ready > 0 AND next_at > ?1
);

-- name: read_reply
SELECT answer FROM towpath_reply WHERE token = ?;

-- name: write_reply
INSERT OR REPLACE INTO towpath_reply (token, answer, until) VALUES (?, ?, ?);

-- name: read_note
SELECT key, value, version, fence, expires_at FROM towpath_note WHERE key = ? AND (expires_at IS NULL
    OR expires_at > ?);

-- name: notes_after
-- Notes from key ?1 and after ?2, before ?3, at the time ?4.
SELECT json_group_array(json_array(key, hex(value), version, fence, expires_at)) FROM (
    SELECT * FROM towpath_note WHERE key >= ?1 AND key > ?2 AND key < ?3
        AND (expires_at IS NULL OR expires_at > ?4)
    ORDER BY key LIMIT ?5);

-- name: edges_into
-- Edges to the job ?1 behind the position (?2 dst, ?3 of_group, ?4 seq, ?5 name): see `core.edges`.
SELECT json_group_array({edge}) FROM (SELECT * FROM ({edges} d.id = ?1 {gates} d.id = ?1)
    WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT ?6);

-- name: edges_into_group
-- Edges to the members of the group ?1, as in edges_into.
SELECT json_group_array({edge}) FROM (SELECT * FROM (
    {edges} d."group" = ?1 AND d.seq >= ?2 {gates} d."group" = ?1 AND d.seq >= ?2)
    WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT ?6);

-- name: edges_out_of
-- Edges from the job ?1, as in edges_into.
SELECT json_group_array({edge}) FROM (SELECT * FROM ({edges} s.id = ?1)
    WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT ?6);

-- name: edges_out_of_group
-- Edges from the group ?1, as in edges_into.
SELECT json_group_array({edge}) FROM (SELECT * FROM ({gate_rows} g.src = ?1)
    WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT ?6);

-- name: open_dependencies
SELECT json_group_array(id) FROM (
    SELECT s.id FROM towpath_edge e JOIN towpath_job s ON s.seq = e.src
    WHERE e.dst = ? AND s.state NOT IN ('done', 'failed', 'canceled') ORDER BY s.seq LIMIT ?);

-- name: open_groups
SELECT json_group_array(src) FROM (SELECT g.src FROM towpath_gate g JOIN towpath_group o ON o.id = g.src
    AND o.state <> 'closed'
    WHERE g.dst = ? ORDER BY g.src LIMIT ?);

-- name: culprit
-- The first-ended job among the causes of an end by dependency.
WITH RECURSIVE up (seq) AS (
    SELECT ?1
    UNION
    SELECT s.seq FROM up u CROSS JOIN towpath_job d ON d.seq = u.seq AND d.reason = 'dependency'
        CROSS JOIN towpath_edge e ON e.dst = d.seq AND e.run_anyway = 0
        CROSS JOIN towpath_job s ON s.seq = e.src AND s.state = d.state
    UNION
    SELECT s.seq FROM up u CROSS JOIN towpath_job d ON d.seq = u.seq AND d.reason = 'dependency'
        CROSS JOIN towpath_gate g ON g.dst = d.seq AND g.run_anyway = 0
        CROSS JOIN towpath_job s ON s."group" = g.src AND s.state = d.state
)
SELECT json_group_array(id) FROM (
    SELECT j.id FROM up u CROSS JOIN towpath_job j ON j.seq = u.seq WHERE j.reason <> 'dependency'
    ORDER BY j.finished_at, j.seq LIMIT 1);

-- name: running_jobs
SELECT json_group_array(id) FROM (
    SELECT id FROM towpath_job INDEXED BY towpath_job_leased
    WHERE state = 'running' AND queue = ?1 AND (?2 IS NULL OR part = ?2)
    ORDER BY seq LIMIT ?3);

-- name: ahead_loose
SELECT count(*) FROM (
    SELECT 1 FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL AND losses < 2
        AND (priority, seq) < (?2, ?3)
    UNION ALL
    SELECT 1 FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL AND losses >= 2
        AND (priority, seq) < (?2, ?3)
    LIMIT ?4);

-- name: ahead_parted
SELECT count(*) FROM (
    SELECT 1 FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NOT NULL AND losses < 2
        AND part = ?2
        AND (priority, seq) < (?3, ?4)
    UNION ALL
    SELECT 1 FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND losses >= 2 AND part = ?2
        AND (priority, seq) < (?3, ?4)
    LIMIT ?5);

-- name: by_seq
SELECT json_group_array({job}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.seq = v.value;

-- name: by_id
SELECT json_group_array({job}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.id = v.value;

-- name: read_by_id
SELECT json_group_array({job}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.id = v.value;

-- name: read_by_prefix
SELECT json_group_array({job})
    FROM (SELECT * FROM towpath_job WHERE id >= ? AND id < ? ORDER BY id LIMIT ?) j;

-- name: read_by_seq
SELECT json_group_array({job}) FROM towpath_job j WHERE j.seq = ?;

-- name: held
SELECT json_group_array({held}) FROM json_each(?) v CROSS JOIN towpath_job j ON j.id = v.value;

-- name: offer_loose
SELECT json_group_array({taken}) FROM (
    SELECT * FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL AND losses < 2
    AND (expires_at IS NULL OR expires_at > ?3) ORDER BY priority, seq LIMIT ?2) j;

-- name: offer_other
-- As offer_loose, without the jobs of the kinds ?7.
SELECT json_group_array({taken}) FROM (
    SELECT * FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL AND losses < 2
    AND (expires_at IS NULL OR expires_at > ?3) AND kind NOT IN (SELECT value FROM json_each(?7))
    ORDER BY priority, seq LIMIT ?2) j;

-- name: offer_best
-- As offer_loose, with the payloads of at most ?7 bytes, and whether a job has other bodies.
SELECT json_group_array({taken}), CAST(group_concat(j.data, '') AS BLOB), json_group_array(j.more) FROM (
    SELECT o.*, b.data, EXISTS (SELECT 1 FROM towpath_body c
        WHERE c.slot BETWEEN o.seq * 8192 + (o.size <= ?7) AND o.seq * 8192 + 8191) AS more
    FROM (SELECT * FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL AND losses < 2
        AND (expires_at IS NULL OR expires_at > ?3) ORDER BY priority, seq LIMIT ?2) o
    LEFT JOIN towpath_body b ON b.slot = o.seq * 8192 AND o.size <= ?7) j;

-- name: offer_parted
SELECT json_group_array({taken}) FROM json_each(?7) p CROSS JOIN towpath_job j ON j.seq IN (
    SELECT seq FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NOT NULL AND losses < 2
        AND part = p.value
    AND (expires_at IS NULL OR expires_at > ?3) ORDER BY priority, seq LIMIT ?2);

-- name: suspects_of
-- Ready suspects (losses >= 2: see core.job.SUSPECT) of a queue, by part.
SELECT json_group_array(json_array(part, n)) FROM (
    SELECT part, count(*) AS n FROM towpath_job WHERE queue = ? AND state = 'ready' AND losses >= 2
        GROUP BY part);

-- name: offer_suspects
-- The best suspects of each part (NULL: without a part).
SELECT json_group_array({taken}) FROM json_each(?7) p CROSS JOIN towpath_job j ON j.seq IN (
    SELECT seq FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND losses >= 2 AND part IS p.value
    AND (expires_at IS NULL OR expires_at > ?3) ORDER BY priority, seq LIMIT ?2);

-- name: wake
UPDATE towpath_job SET state = 'ready', reason = CASE WHEN reason IN ({kept}) THEN reason ELSE '' END
WHERE seq IN (SELECT value FROM json_each(?));

-- name: late_jobs
SELECT json_group_array({job}) FROM (
    SELECT * FROM towpath_job WHERE state = 'running' AND lease_until < ?1
    AND NOT EXISTS (SELECT 1 FROM json_each(?2) g
        WHERE ?1 < (g.value ->> 0) + lease_len AND 2 * (g.value ->> 1) > lease_len
        AND lease_until > (g.value ->> 0) - (g.value ->> 1))
    ORDER BY lease_until, seq LIMIT ?3) j;

-- name: orphaned_jobs
SELECT json_group_array({job}) FROM (
    SELECT * FROM towpath_job INDEXED BY towpath_job_leased
    WHERE state = 'running' AND owner IN (SELECT value FROM json_each(?1)) ORDER BY seq LIMIT ?2) j;

-- name: created_from
SELECT created_at FROM towpath_job WHERE seq >= ? ORDER BY seq LIMIT 1;

-- name: hasten
UPDATE towpath_job SET priority = ? WHERE seq IN (SELECT value FROM json_each(?));

-- name: old_loose
-- Of each priority after ?2, the ready jobs up to seq ?3 that are ready since ?4.
WITH RECURSIVE level(p) AS (
    SELECT (SELECT min(priority) FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL
        AND losses < 2 AND priority > ?2)
    UNION ALL
    SELECT (SELECT min(priority) FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND part IS NULL
        AND losses < 2 AND priority > level.p)
    FROM level WHERE level.p IS NOT NULL)
SELECT json_group_array(seq) FROM (
    SELECT j.seq FROM level CROSS JOIN towpath_job j
    WHERE j.queue = ?1 AND j.state = 'ready' AND j.part IS NULL AND j.losses < 2 AND j.priority = level.p
        AND j.seq <= ?3
    AND j.ready_at <= ?4 ORDER BY j.priority, j.seq LIMIT ?5);

-- name: old_parted
WITH RECURSIVE level(part, p) AS (
    SELECT level.part, (SELECT min(priority) FROM towpath_job
        WHERE queue = ?1 AND state = 'ready' AND part IS NOT NULL AND losses < 2 AND part = level.part
            AND priority > ?2)
    FROM (SELECT name AS part FROM towpath_part WHERE queue = ?1 AND ready > 0) level
    UNION ALL
    SELECT level.part, (SELECT min(priority) FROM towpath_job
        WHERE queue = ?1 AND state = 'ready' AND part IS NOT NULL AND losses < 2 AND part = level.part
            AND priority > level.p)
    FROM level WHERE level.p IS NOT NULL)
SELECT json_group_array(seq) FROM (
    SELECT j.seq FROM level CROSS JOIN towpath_job j
    WHERE j.queue = ?1 AND j.state = 'ready' AND j.part IS NOT NULL AND j.losses < 2 AND j.part = level.part
        AND j.priority = level.p
    AND j.seq <= ?3 AND j.ready_at <= ?4 ORDER BY j.part, j.priority, j.seq LIMIT ?5);

-- name: old_suspects
SELECT json_group_array(seq) FROM (
    SELECT seq FROM towpath_job WHERE queue = ?1 AND state = 'ready' AND losses >= 2 AND priority > ?2
        AND seq <= ?3
    AND ready_at <= ?4 ORDER BY part, priority, seq LIMIT ?5);
