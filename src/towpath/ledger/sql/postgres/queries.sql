-- Named statements of the PostgreSQL ledger, with the same names as in the SQLite ledger. "towpath" stands
-- for the schema. {job} is the columns of a job j without bodies; {taken} is the same with the values
-- after a claim. Lists are JSON text.
-- "first:" names a statement that runs before this one, with the same arguments. (In READ COMMITTED a
-- statement sees the rows that were committed before it began. Rows that must be read after a lock was
-- waited for are read by a second statement.)

-- name: begin_batch
SELECT m.schema, m.min_schema, s.last_value + s.is_called::int, v.last_value + v.is_called::int, t.last_value,
    {clock},
    EXISTS (SELECT 1 FROM towpath.job WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json))))
        OR EXISTS (SELECT 1 FROM towpath.tombstone
            WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))),
    EXISTS (SELECT 1 FROM towpath.inbox WHERE failure IS NULL),
    EXISTS (SELECT 1 FROM towpath.expiry WHERE at <= greatest(t.last_value, coalesce($3::bigint, {clock}))),
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
    (SELECT json_agg(json_build_array({queue_counts}))::text
    FROM json_array_elements_text($2::json) v {counted}), EXISTS (SELECT 1 FROM towpath.turn WHERE ripe = 3),
    EXISTS (SELECT 1 FROM towpath.part WHERE capacity IS NOT NULL OR append_count IS NOT NULL)
FROM towpath.meta m, towpath.job_seq s, towpath.version_seq v, towpath.last_time t;

-- name: lock_relations
-- A batch that holds the relations waits for no other lock for long: see `locks.RowsTaken`. The wait for
-- the relations has its own limit.
SELECT set_config('lock_timeout', $2::text, true),
    pg_advisory_xact_lock('towpath.meta'::regclass::oid::bigint), set_config('lock_timeout', $1::text, true);

-- name: stalled
-- The seconds for which a session has been waiting for the relations.
SELECT extract(epoch FROM clock_timestamp() - min(waitstart))::float8 FROM pg_locks
WHERE locktype = 'advisory' AND NOT granted AND objsubid = 1 AND classid = 0
    AND objid = 'towpath.meta'::regclass::oid
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: try_relations
SELECT pg_try_advisory_xact_lock('towpath.meta'::regclass::oid::bigint),
    set_config('lock_timeout', $1::text, true);

-- name: next_version
SELECT last_value + is_called::int FROM towpath.version_seq;

-- name: write_version
SELECT setval('towpath.version_seq', $1::bigint);

-- name: append_one
-- As append_plain, for one spec with a small payload: a sixth less CPU of the server.
-- $1 to $14 the fields of the spec, $15 the time or NULL, $16 the payload
WITH t AS MATERIALIZED (
    SELECT greatest(l.last_value, coalesce($15::bigint, {clock})) AS now
    FROM towpath.last_time l, towpath.meta m
    WHERE m.min_schema <= {known} AND NOT $2::text = ANY (m.bounded)
        AND NOT EXISTS (SELECT 1 FROM towpath.job WHERE id = $1::text)
        AND NOT EXISTS (SELECT 1 FROM towpath.tombstone WHERE id = $1::text)
), s AS MATERIALIZED (
    SELECT {number} AS seq, t.now, $1::text AS id, $2::text AS queue, $3::text AS kind, $4::int AS priority,
        coalesce($6::bigint, t.now + $5::bigint) AS due, $7::int AS max_attempts, $8::int AS max_losses,
        $9::bigint AS timeout, $10::bigint AS retention, $11::text AS parent, $12::bigint AS generation,
        $13::text AS correlation_id, $14::text AS content_type, $16::bytea AS payload
    FROM t
), {plain_rows}, c AS (
    INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled)
    SELECT queue, NULL, 0, (due > now)::int, (due <= now)::int, 0, 0, 0, 0 FROM s
)
SELECT (SELECT setval('towpath.last_time', now) FROM t), seq FROM s;

-- name: append_plain
-- Inserts plain specs, with or without a delay. Returns the time and the number of each. Returns no row if
-- an id is known, a queue has a capacity or the schema is too new.
-- $1 specs, $2 the time or NULL, $3 payloads
WITH v AS MATERIALIZED (
    SELECT * FROM ROWS FROM (
        json_to_recordset($1::json) AS (id text, queue text, kind text, priority int, delay bigint,
            ready_at bigint, max_attempts int, max_losses int, timeout bigint, retention bigint, parent text,
            generation bigint, correlation_id text, content_type text),
        unnest($3::bytea[])) AS v (id, queue, kind, priority, delay, ready_at, max_attempts, max_losses,
            timeout, retention, parent, generation, correlation_id, content_type, payload)
), t AS MATERIALIZED (
    SELECT greatest(l.last_value, coalesce($2::bigint, {clock})) AS now
    FROM towpath.last_time l, towpath.meta m
    WHERE m.min_schema <= {known} AND NOT EXISTS (SELECT 1 FROM v WHERE v.queue = ANY (m.bounded))
        AND NOT EXISTS (SELECT 1 FROM v JOIN towpath.job j ON j.id = v.id)
        AND NOT EXISTS (SELECT 1 FROM v JOIN towpath.tombstone d ON d.id = v.id)
), s AS MATERIALIZED (
    SELECT {number} AS seq, t.now, v.*, coalesce(v.ready_at, t.now + v.delay) AS due FROM t, v
), {plain_rows}, b AS (
    INSERT INTO towpath.body (seq, what, data) SELECT seq, 0, payload FROM s WHERE length(payload) > {small}
), c AS (
    INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled)
    SELECT queue, NULL, 0, count(*) FILTER (WHERE due > now), count(*) FILTER (WHERE due <= now), 0, 0, 0, 0
        FROM s GROUP BY queue
)
SELECT (SELECT setval('towpath.last_time', now) FROM t), seq FROM s;

-- name: begin_many
-- Runs before a COPY of plain specs. Returns the time, and whether one of the ids may be known. Returns no
-- row if a queue has a capacity or the schema is too new.
-- $1 queues, $2 and $3 the least and the greatest id, $4 the schema version of this process, $5 the time
-- or NULL
SELECT greatest(l.last_value, coalesce($5::bigint, {clock})), EXISTS (SELECT 1 FROM towpath.job
    WHERE id BETWEEN $2::text AND $3::text)
    OR EXISTS (SELECT 1 FROM towpath.tombstone WHERE id BETWEEN $2::text AND $3::text)
FROM towpath.last_time l, towpath.meta m
WHERE m.min_schema <= $4::bigint AND NOT EXISTS (
    SELECT 1 FROM towpath.queue WHERE name = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
        AND capacity IS NOT NULL);

-- name: any_known
SELECT EXISTS (SELECT 1 FROM towpath.job WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json))))
    OR EXISTS (SELECT 1 FROM towpath.tombstone
        WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json))));

-- name: enter_many
-- Runs after the COPY: inserts the turns and the counts, and sets the time.
-- $1 (first, last, queue, priority, ready_at, ripe) of each run of numbers, $2 the time
WITH r AS MATERIALIZED (
    SELECT (v->>0)::bigint AS first, (v->>1)::bigint AS last, v->>2 AS queue, (v->>3)::int AS priority,
        (v->>4)::bigint AS ready_at, (v->>5)::smallint AS ripe
    FROM json_array_elements($1::json) v
), w AS (
    INSERT INTO towpath.turn (seq, queue, part, priority, ready_at, ripe)
    SELECT generate_series(first, last), queue, '', priority, ready_at, ripe FROM r
), c AS (
    INSERT INTO towpath.tally (queue, blocked, scheduled, ready, running, done, failed, canceled)
    SELECT queue, 0, coalesce(sum(last - first + 1) FILTER (WHERE ripe = 0), 0),
        coalesce(sum(last - first + 1) FILTER (WHERE ripe = 1), 0), 0, 0, 0, 0
    FROM r GROUP BY queue
)
SELECT setval('towpath.last_time', greatest($2::bigint, (SELECT last_value FROM towpath.last_time)));

-- name: insert_jobs
-- Inserts jobs of any kind, with their bodies and all derived rows, on a connection of the ledger or of
-- the user. (Text is sent as bytes, because the encoding of the user's connection may differ.) Returns the
-- numbers of the jobs with new ids.
-- The user's connection runs `insert_waiting_jobs`, the same text without the rows of finished jobs: the
-- user's role needs no rights for them.
-- $1 jobs, $2 (number, what) of each body, $3 the bodies, $4 whether to count the jobs in a tally
WITH new AS (
    INSERT INTO towpath.job ({columns}, complete, payload)
    SELECT {columns}, complete, payload
        FROM json_populate_recordset(NULL::towpath.job, convert_from($1::bytea, 'UTF8')::json)
    ON CONFLICT (id) DO NOTHING
        RETURNING seq, queue, part, priority, ready_at, expires_at{finished_column}, state
), turns AS (
    INSERT INTO towpath.turn (seq, queue, part, priority, ready_at, expires_at, ripe)
    SELECT seq, queue, coalesce(part, ''), priority, ready_at, expires_at, {ripe} FROM new
        WHERE state IN ('ready', 'scheduled')
), expiries AS (
    INSERT INTO towpath.expiry (at, seq) SELECT expires_at, seq FROM new
    WHERE expires_at IS NOT NULL AND state NOT IN ('done', 'failed', 'canceled')
){finished_rows}, bodies AS (
    INSERT INTO towpath.body (seq, what, data)
    SELECT (v.place->>0)::bigint, (v.place->>1)::smallint, b.data
    FROM json_array_elements(convert_from($2::bytea, 'UTF8')::json) WITH ORDINALITY v (place, n)
    JOIN unnest($3::bytea[]) WITH ORDINALITY b (data, n) ON b.n = v.n
    WHERE (v.place->>0)::bigint IN (SELECT seq FROM new)
), counted AS (
    INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled,
        active)
    SELECT queue, part, 0, count(*) FILTER (WHERE state = 'scheduled'),
        count(*) FILTER (WHERE state = 'ready'), 0, 0, 0, 0, bool_or(state = 'ready')
    FROM new WHERE convert_from($4::bytea, 'UTF8')::boolean GROUP BY queue, part
)
SELECT seq FROM new;

-- name: source
UPDATE towpath.job SET sourced = true
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint)) AND NOT sourced;

-- name: close_batch
-- Inserts the counts and sets the time.
WITH c AS (
    INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled,
        active)
    SELECT v->>0, v->>1, (v->>2)::bigint, (v->>3)::bigint, (v->>4)::bigint, (v->>5)::bigint, (v->>6)::bigint,
        (v->>7)::bigint, (v->>8)::bigint, (v->>9)::boolean
    FROM json_array_elements($1::json) v
)
SELECT setval('towpath.last_time', greatest($2::bigint, (SELECT last_value FROM towpath.last_time)));

-- name: quiet_until
-- The time at which the next upkeep is due; NULL if none is. -1: now, because there are counts to fold,
-- leases, or appends in the inbox.
-- $1 KEEP, $2 the time or NULL, $3 RETENTION, $4 the schema version of this process, $5 QUEUE_KEPT
SELECT t.now, CASE WHEN m.min_schema > $4::bigint OR EXISTS (SELECT 1 FROM towpath.tally)
        OR EXISTS (SELECT 1 FROM towpath.lease) OR EXISTS (SELECT 1 FROM towpath.inbox
            WHERE failure IS NULL) THEN -1 ELSE (SELECT min(at) FROM (
    {expiring}
    UNION ALL
    SELECT min((SELECT min(t.ready_at) FROM towpath.turn t WHERE t.queue = q.name AND t.ripe = 0))
        FROM towpath.queue q WHERE q.scheduled > 0
    UNION ALL
    SELECT min((SELECT min(p.purge_at) FROM towpath.past p WHERE p.queue = q.name))
        FROM towpath.queue q WHERE q.done + q.canceled > 0
    UNION ALL
    SELECT -1 FROM towpath.queue WHERE done + canceled > coalesce(keep, $1::bigint)
    UNION ALL
    SELECT min(until) FROM towpath.tombstone
    UNION ALL
    SELECT min(until) FROM towpath.reply
    UNION ALL
    SELECT min(until) FROM towpath.blob WHERE job IS NULL
    UNION ALL
    SELECT min(expires_at) FROM towpath.note WHERE expires_at IS NOT NULL
    UNION ALL
    SELECT min(until) FROM towpath.key WHERE until > 0
    UNION ALL
    SELECT min(next_at) FROM towpath.part WHERE ready > 0 AND next_at > t.now
    UNION ALL
    SELECT min(next_at) FROM towpath.queue WHERE ready > 0 AND next_at > t.now
    UNION ALL
    SELECT min(next_at) FROM towpath.part WHERE ready = 0 AND running = 0 AND configured = 0
        AND next_at <= t.now
    UNION ALL
    SELECT -1 FROM towpath."group" g WHERE g.state = 'closed' AND g.closed_at <= t.now - $3::bigint
        AND NOT EXISTS (SELECT 1 FROM towpath.job j WHERE j."group" = g.id)
    UNION ALL
    SELECT -1 FROM towpath.queue q WHERE {unused} AND q.next_at <= t.now AND NOT EXISTS (
        SELECT 1 FROM towpath.unused u WHERE u.name = q.name AND u.since > t.now - $5::bigint)
) due) END
FROM towpath.meta m, (SELECT greatest(last_value, coalesce($2::bigint, {clock})) AS now
    FROM towpath.last_time) t;

-- name: snapshot
-- Differs after every commit of any process.
SELECT pg_current_snapshot()::text;

-- name: last
SELECT last_value, {clock} FROM towpath.last_time;

-- name: take_seqs
-- Takes $1 numbers and returns the first and the last. Other transactions may have taken some in between.
SELECT min(n), max(n) FROM (SELECT {number} AS n FROM generate_series(1, $1::bigint)) s;

-- name: queues_by_name
SELECT {queue_counts} FROM json_array_elements_text($1::json) v {counted};

-- name: all_queues
-- Each with the time since when its longest-waiting ready job could have run.
SELECT {queue_shown} FROM towpath.queue_now q ORDER BY q.name;

-- name: one_queue
SELECT {queue_shown} FROM towpath.queue_now q WHERE q.name = $1::text;

-- name: live_queues
SELECT name FROM towpath.queue_now WHERE ready > 0 OR scheduled > 0;

-- name: make_queues
INSERT INTO towpath.queue (name) SELECT v FROM json_array_elements_text($1::json) v ORDER BY v COLLATE "C"
    ON CONFLICT DO NOTHING;

-- name: lock_queues
SELECT name FROM towpath.queue WHERE name = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY name FOR UPDATE;

-- name: try_queues
SELECT name FROM towpath.queue WHERE name = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY name
FOR UPDATE SKIP LOCKED;

-- name: set_queues
WITH v AS MATERIALIZED (
    SELECT * FROM json_to_recordset($1::json) AS v (name text, paused smallint, why text, capacity bigint,
        cap bigint, rate_count bigint, rate_period bigint, rate_burst bigint, next_at bigint,
        retention bigint, keep bigint, served bigint, clock bigint)
), b AS (
    UPDATE towpath.meta m SET bounded = ARRAY(
        SELECT unnest(m.bounded) EXCEPT SELECT name FROM v UNION SELECT name FROM v
            WHERE capacity IS NOT NULL)
    WHERE EXISTS (SELECT 1 FROM v WHERE (v.capacity IS NOT NULL) <> (v.name = ANY (m.bounded)))
)
UPDATE towpath.queue q SET paused = v.paused, why = v.why, capacity = v.capacity, cap = v.cap,
    rate_count = v.rate_count, rate_period = v.rate_period, rate_burst = v.rate_burst, next_at = v.next_at,
    retention = v.retention, keep = v.keep, served = v.served, clock = v.clock, listed = true
FROM v WHERE q.name = v.name;

-- name: set_parts
INSERT INTO towpath.part (queue, name, paused, why, cap, rate_count, rate_period, rate_burst, next_at, weight,
    served, configured, capacity, append_count, append_period, append_burst, append_at)
SELECT queue, name, paused, why, cap, rate_count, rate_period, rate_burst, next_at, weight, served,
    configured, capacity, append_count, append_period, append_burst, append_at
FROM json_to_recordset($1::json) AS v (queue text, name text, paused smallint, why text, cap bigint,
    rate_count bigint, rate_period bigint, rate_burst bigint, next_at bigint, weight bigint, served bigint,
    configured smallint, capacity bigint, append_count bigint, append_period bigint, append_burst bigint,
    append_at bigint)
ON CONFLICT (queue, name) DO UPDATE SET paused = excluded.paused, why = excluded.why, cap = excluded.cap,
    rate_count = excluded.rate_count, rate_period = excluded.rate_period, rate_burst = excluded.rate_burst,
    next_at = excluded.next_at, weight = excluded.weight, served = excluded.served,
    configured = excluded.configured, capacity = excluded.capacity, append_count = excluded.append_count,
    append_period = excluded.append_period, append_burst = excluded.append_burst,
    append_at = excluded.append_at;

-- name: tally
INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled, active)
SELECT v->>0, v->>1, (v->>2)::bigint, (v->>3)::bigint, (v->>4)::bigint, (v->>5)::bigint, (v->>6)::bigint,
    (v->>7)::bigint, (v->>8)::bigint, (v->>9)::boolean
FROM json_array_elements($1::json) v;

-- name: tallied
-- Queues with at least $1 tallies, and all queues with parts: a part may be idle once it is counted.
SELECT queue FROM (
    (SELECT queue FROM towpath.tally GROUP BY queue HAVING count(*) >= $1::bigint)
    UNION SELECT queue FROM towpath.part) q ORDER BY queue;

-- name: fold
-- Adds all visible tallies to the counts of queues that this batch has locked. Tallies of running
-- transactions are at or after the horizon, and stay.
WITH gone AS (
    DELETE FROM towpath.tally t USING towpath.queue q
    WHERE q.name = ANY (ARRAY(SELECT json_array_elements_text($1::json))) AND t.queue = q.name
        AND t.xid >= q.folded
    RETURNING t.queue, t.part, t.blocked, t.scheduled, t.ready, t.running, t.done, t.failed, t.canceled,
        t.active
), parts AS (
    INSERT INTO towpath.part AS p (queue, name, ready, running, cap)
    SELECT queue, part, sum(ready), sum(running), CASE WHEN starts_with(part, 'serial:') THEN 1 END
    FROM gone WHERE part IS NOT NULL AND active GROUP BY queue, part
    ON CONFLICT (queue, name) DO UPDATE
        SET ready = p.ready + excluded.ready, running = p.running + excluded.running
), sums AS (
    SELECT queue, sum(blocked) AS blocked, sum(scheduled) AS scheduled, sum(ready) AS ready,
        sum(running) AS running, sum(done) AS done, sum(failed) AS failed, sum(canceled) AS canceled,
        coalesce(sum(ready) FILTER (WHERE part IS NULL), 0) AS loose
    FROM gone GROUP BY queue
)
UPDATE towpath.queue q SET blocked = q.blocked + s.blocked, scheduled = q.scheduled + s.scheduled,
    ready = q.ready + s.ready, running = q.running + s.running, done = q.done + s.done,
    failed = q.failed + s.failed, canceled = q.canceled + s.canceled, loose = q.loose + s.loose,
    folded = $2::bigint, listed = true
FROM sums s WHERE q.name = s.queue;

-- name: horizon
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint;

-- name: parts_by_name
SELECT p.queue, p.name, p.ready, p.running, p.paused, p.why, p.cap, p.rate_count, p.rate_period, p.rate_burst,
    p.next_at, p.weight, p.served, p.configured, p.capacity, p.append_count, p.append_period, p.append_burst,
    p.append_at
FROM json_array_elements($1::json) v JOIN towpath.part_now p ON p.queue = v->>0 AND p.name = v->>1;

-- name: parts_of_queue
SELECT queue, name, ready, running, paused, why, cap, rate_count, rate_period, rate_burst, next_at, weight,
    served, configured, capacity, append_count, append_period, append_burst, append_at
FROM towpath.part_now WHERE $1::text IS NULL OR queue = $1::text ORDER BY queue, name;

-- name: waiting_parts
-- The number of blocked and scheduled jobs of these parts.
SELECT v->>0, v->>1,
    (SELECT count(*) FROM towpath.turn t WHERE t.queue = v->>0 AND t.part = v->>1 AND t.part > ''
    AND t.ripe = 0)
    + (SELECT count(*) FROM towpath.job j WHERE j.queue = v->>0 AND j.part = v->>1 AND j.part IS NOT NULL
        AND j.waits > 0)
FROM json_array_elements($1::json) v;

-- name: open_parts
-- The parts from which a job can be claimed now, the least recently served first. Parts with folded counts
-- are found by the index, the others one by one.
WITH recent AS (
    SELECT t.part, sum(t.ready)::bigint AS ready, sum(t.running)::bigint AS running
    FROM towpath.tally t
    WHERE t.queue = $1::text AND t.part IS NOT NULL
        AND t.xid >= coalesce((SELECT folded FROM towpath.queue WHERE name = $1::text), 0)
    GROUP BY t.part
)
SELECT queue, name, ready, running, paused, why, cap, rate_count, rate_period, rate_burst, next_at, weight,
    served, configured, capacity, append_count, append_period, append_burst, append_at
FROM (
    (SELECT p.* FROM towpath.part p
     WHERE p.queue = $1::text AND p.ready > 0 AND p.paused = 0 AND (p.cap IS NULL OR p.running < p.cap)
         AND p.next_at <= $2::bigint
        AND NOT EXISTS (SELECT 1 FROM recent r WHERE r.part = p.name)
     ORDER BY p.served, p.name LIMIT $3::bigint)
    UNION ALL
    SELECT p.* FROM (
        SELECT $1::text AS queue, r.part AS name, coalesce(p.ready, 0) + r.ready AS ready,
            coalesce(p.running, 0) + r.running AS running, coalesce(p.paused, 0::smallint) AS paused, p.why,
            CASE WHEN p.name IS NULL AND starts_with(r.part, 'serial:') THEN 1 ELSE p.cap END AS cap,
            p.rate_count, p.rate_period, p.rate_burst, coalesce(p.next_at, 0) AS next_at,
            coalesce(p.weight, 1) AS weight, coalesce(p.served, 0) AS served,
            coalesce(p.configured, 0::smallint) AS configured, p.capacity, p.append_count, p.append_period,
            p.append_burst, coalesce(p.append_at, 0) AS append_at
        FROM recent r LEFT JOIN towpath.part p ON p.queue = $1::text AND p.name = r.part) p
    WHERE p.ready > 0 AND p.paused = 0 AND (p.cap IS NULL OR p.running < p.cap) AND p.next_at <= $2::bigint) o
ORDER BY served, name COLLATE "C" LIMIT $3::bigint;

-- name: groups_by_id
SELECT id, state, outcome, on_failure, total, unfinished, done, failed, canceled, superseded, created_at,
    closed_at, paused, why
FROM towpath."group" WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: groups_after
-- Groups from id $1 and after $2, before $3, in one of the states $4,
-- with one of the outcomes $5 (NULL: any).
SELECT id, state, outcome, on_failure, total, unfinished, done, failed, canceled, superseded, created_at,
    closed_at, paused, why
FROM towpath."group"
WHERE id >= $1::text AND id > $2::text AND id < $3::text
    AND state IN (SELECT json_array_elements_text($4::json))
    AND ($5::json IS NULL OR outcome IN (SELECT json_array_elements_text($5::json)))
ORDER BY id LIMIT $6::bigint;

-- name: groups_before
-- Groups from id $1 and before $2, the last first, in one of the states $3,
-- with one of the outcomes $4 (NULL: any).
SELECT id, state, outcome, on_failure, total, unfinished, done, failed, canceled, superseded, created_at,
    closed_at, paused, why
FROM towpath."group"
WHERE id >= $1::text AND id < $2::text
    AND state IN (SELECT json_array_elements_text($3::json))
    AND ($4::json IS NULL OR outcome IN (SELECT json_array_elements_text($4::json)))
ORDER BY id DESC LIMIT $5::bigint;

-- name: all_groups
SELECT id, state, outcome, on_failure, total, unfinished, done, failed, canceled, superseded, created_at,
    closed_at, paused, why
FROM towpath."group" ORDER BY id;

-- name: known_ids
-- first: lock_known
SELECT j.id, j.seq, j.state, 0, NULL FROM towpath.job j
    WHERE j.id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
UNION ALL
SELECT t.id, t.seq, t.state, 1, t.alias FROM towpath.tombstone t
WHERE t.id = ANY (ARRAY(SELECT json_array_elements_text($1::json))) AND NOT EXISTS (SELECT 1
    FROM towpath.job j WHERE j.id = t.id)
UNION ALL
SELECT p.id, p.job, coalesce(w.state, 'done'), 1, w.id FROM towpath.proxy p
    LEFT JOIN towpath.job w ON w.seq = p.job
WHERE p.id = ANY (ARRAY(SELECT json_array_elements_text($1::json))) AND NOT EXISTS (SELECT 1
    FROM towpath.job j WHERE j.id = p.id)
    AND NOT EXISTS (SELECT 1 FROM towpath.tombstone t WHERE t.id = p.id);

-- name: lock_known
-- Waits for the settle of a dependency, or locks the dependency so that its settle sees the edge.
SELECT 1 FROM towpath.job WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY seq FOR SHARE;

-- name: key_holders
-- first: lock_holders
SELECT k.namespace, k.key, k.id, k.seq, j.state, k.until,
    (SELECT r.seq FROM towpath.job r WHERE r.seq = k.runner AND r.state = 'running')
FROM json_array_elements($1::json) v JOIN towpath.key k ON k.namespace = v->>0 AND k.key = v->>1
LEFT JOIN towpath.job j ON j.seq = k.seq;

-- name: lock_holders
-- Locks the holders and the running jobs that they wait for: no other batch claims or settles them.
SELECT 1 FROM towpath.job WHERE seq IN (
    SELECT s FROM json_array_elements($1::json) v JOIN towpath.key k ON k.namespace = v->>0 AND k.key = v->>1
    CROSS JOIN LATERAL (VALUES (k.seq), (k.runner)) AS h (s)) ORDER BY seq FOR UPDATE;

-- name: downstream
-- All unfinished jobs and groups that wait for a group (1, id, NULL) or a job (0, NULL, id), directly or
-- not. For a closed group: the jobs and groups that would wait again if it were reopened. A replaced job
-- leaves its own group.
WITH RECURSIVE down (seq, grp) AS (
    SELECT CASE WHEN $1::int = 0 THEN (SELECT seq FROM towpath.job WHERE id = $3::text) END,
        $2::text COLLATE "C"
    UNION
    SELECT * FROM (
        WITH d AS (SELECT * FROM down)
        SELECT e.dst, NULL::text COLLATE "C" FROM d JOIN towpath.edge e ON e.src = d.seq
            JOIN towpath.job j ON j.seq = e.dst AND j.state = 'blocked'
        UNION ALL
        SELECT g.dst, NULL FROM d JOIN towpath.gate g ON g.src = d.grp
            JOIN towpath.job j ON j.seq = g.dst AND j.state IN ('blocked', 'scheduled', 'ready')
        UNION ALL
        SELECT NULL, g.id FROM d JOIN towpath.job j ON j.seq = d.seq AND j.id IS DISTINCT FROM $3::text
            JOIN towpath."group" g ON g.id = j."group" AND g.state <> 'closed'
        UNION ALL
        SELECT NULL, g.id FROM d JOIN towpath.proxy p ON p.job = d.seq AND p.counted = 'unfinished'
            JOIN towpath."group" g ON g.id = p.grp AND g.state <> 'closed') step
)
SELECT (SELECT id FROM towpath.job WHERE seq = d.seq), d.grp FROM down d
    WHERE d.seq IS NOT NULL OR d.grp IS NOT NULL;

-- name: ask_to_stop
UPDATE towpath.job SET cancel_requested = $1::text
WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($2::json)::bigint)) AND state = 'running'
    AND coalesce(cancel_requested, 'stopped') = 'stopped';

-- name: lock_members
-- Locks the members: no other batch claims or settles them until the group is changed.
SELECT $1::text FROM towpath.job
    WHERE "group" = $2::text AND state IN ('blocked', 'scheduled', 'ready', 'running')
ORDER BY seq FOR UPDATE;

-- name: ask_members_to_stop
-- first: lock_members
-- A request to stop that interrupts the handler replaces one that does not.
UPDATE towpath.job SET cancel_requested = $1::text WHERE "group" = $2::text AND state = 'running'
    AND (cancel_requested IS NULL OR (cancel_requested = 'stopped' AND $1::text <> 'stopped'));

-- name: waiting_members
SELECT seq FROM towpath.job WHERE "group" = $1::text AND state IN ('blocked', 'scheduled', 'ready');

-- name: sealed_members
SELECT seq, queue, part, ready_at, waits, 1 FROM towpath.job WHERE "group" = $1::text AND state = 'blocked';

-- name: one_more_wait
-- first: lock_own_members
UPDATE towpath.job SET waits = waits + 1 WHERE "group" = $1::text AND state = 'blocked';

-- name: lock_own_members
SELECT 1 FROM towpath.job WHERE "group" = $1::text AND state IN ('blocked', 'scheduled', 'ready', 'running')
ORDER BY seq FOR UPDATE;

-- name: members_that_could_run
SELECT seq, queue, part, state FROM towpath.job
    WHERE "group" = $1::text AND (state = 'scheduled' OR state = 'ready');

-- name: hold
WITH u AS (
    UPDATE towpath.job SET state = 'blocked', reason = '', waits = 1
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint)) RETURNING seq
)
DELETE FROM towpath.turn t USING u WHERE t.seq = u.seq;

-- name: move_edges
WITH u AS (
    UPDATE towpath.edge e SET src = (v->>1)::bigint FROM json_array_elements($1::json) v
        WHERE e.src = (v->>0)::bigint
    RETURNING e.src
)
UPDATE towpath.job SET sourced = true WHERE seq IN (SELECT src FROM u) AND NOT sourced;

-- name: move_names
UPDATE towpath.name n SET src = (v->>1)::bigint FROM json_array_elements($1::json) v
    WHERE n.src = (v->>0)::bigint
    AND EXISTS (SELECT 1 FROM towpath.edge e WHERE e.src = (v->>0)::bigint AND e.dst = n.dst);

-- name: name_moved
-- Runs before the edges move. The dependents refer to the older job (v 0) by its id; from now on the newer
-- job (v 1) represents it.
INSERT INTO towpath.name (dst, id, src)
SELECT e.dst, j.id, (v->>1)::bigint FROM json_array_elements($1::json) v
    JOIN towpath.edge e ON e.src = (v->>0)::bigint
JOIN towpath.job j ON j.seq = e.src
ON CONFLICT (dst, id) DO UPDATE SET src = excluded.src;

-- name: move_proxies
WITH u AS (
    UPDATE towpath.proxy p SET job = (v->>1)::bigint FROM json_array_elements($1::json) v
    WHERE p.job = (v->>0)::bigint AND p.counted = 'unfinished' RETURNING p.job
)
UPDATE towpath.job SET sourced = true WHERE seq IN (SELECT job FROM u) AND NOT sourced;

-- name: proxies_of
SELECT id, grp, job, counted FROM towpath.proxy
    WHERE job = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: proxies_in
SELECT id, grp, job, counted FROM towpath.proxy WHERE grp = $1::text;

-- name: count_proxies
UPDATE towpath.proxy SET counted = $1::text WHERE id = ANY (ARRAY(SELECT json_array_elements_text($2::json)));

-- name: winners_in
SELECT p.id, p.seq, j.id, p.counted FROM towpath.proxy p LEFT JOIN towpath.job j ON j.seq = p.job
    WHERE p.grp = $1::text ORDER BY p.seq;

-- name: winners_for
SELECT n.id, 0, s.id, '' FROM towpath.job d JOIN towpath.name n ON n.dst = d.seq
    LEFT JOIN towpath.job s ON s.seq = n.src
WHERE d.id = $1::text ORDER BY n.id;

-- name: delete_keys
DELETE FROM towpath.key k USING json_array_elements($1::json) v WHERE k.namespace = v->>0 AND k.key = v->>1;

-- name: free_keys
DELETE FROM towpath.key k USING json_array_elements($2::json) v
WHERE k.until <= $1::bigint AND k.namespace = v->>0 AND k.key = v->>1 AND k.seq = (v->>2)::bigint;

-- name: live_holder
SELECT k.id FROM towpath.key k JOIN towpath.job j ON j.seq = k.seq
WHERE k.namespace = $1::text AND k.key = $2::text AND k.seq <> $3::bigint
    AND j.state IN ('blocked', 'scheduled', 'ready', 'running');

-- name: due_jobs
SELECT j.seq, j.part FROM towpath.turn t JOIN towpath.job j ON j.seq = t.seq
WHERE t.queue = $1::text AND t.ripe = 0 AND t.ready_at <= $2::bigint AND j.state = 'scheduled'
ORDER BY t.ready_at, t.seq LIMIT $3::bigint FOR UPDATE OF j SKIP LOCKED;

-- name: take
WITH u AS (
    UPDATE towpath.job SET state = 'running', reason = '', attempts = attempts + 1, fence = fence + 1,
        owner = $1::text, lease_until = $2::bigint, lease_len = $3::bigint, started_at = $4::bigint
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($5::json)::bigint)) RETURNING seq
), d AS (
    DELETE FROM towpath.turn t USING u WHERE t.seq = u.seq
)
INSERT INTO towpath.lease (until, seqs) SELECT $2::bigint, array_agg(seq) FROM {some_of} u) s GROUP BY chunk;

-- name: settle_done
WITH u AS (
    UPDATE towpath.job SET state = 'done', reason = '', finished_at = $1::bigint, purge_at = $2::bigint,
        owner = NULL, lease_until = NULL, settled_fence = fence, settled_as = 'done'
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($3::json)::bigint))
        RETURNING seq, queue, state, purge_at, expires_at
), {over}
SELECT 1;

-- name: settle_again
WITH u AS (
    UPDATE towpath.job j SET state = v->>1, reason = v->>2, attempts = (v->>3)::int, failures = (v->>4)::int,
        ready_at = coalesce((v->>5)::bigint, j.ready_at), owner = NULL, lease_until = NULL,
        settled_fence = fence, settled_as = v->>1
    FROM json_array_elements($1::json) v WHERE j.seq = (v->>0)::bigint
    RETURNING j.seq, j.queue, j.part, j.priority, j.ready_at, j.expires_at, j.state, j.losses
)
{turns};

-- name: settle_over
WITH u AS (
    UPDATE towpath.job j SET state = v->>1, reason = v->>2, attempts = (v->>3)::int, failures = (v->>4)::int,
        purge_at = (v->>5)::bigint, finished_at = $1::bigint, owner = NULL, lease_until = NULL,
        settled_fence = fence, settled_as = v->>1
    FROM json_array_elements($2::json) v WHERE j.seq = (v->>0)::bigint
        RETURNING j.seq, j.queue, j.state, j.purge_at, j.expires_at
), {over}
SELECT 1;

-- name: settle_end
-- The columns that only a settle writes; the next statement ends the job.
UPDATE towpath.job SET attempts = $1::int, failures = $2::int, settled_fence = fence, settled_as = $3::text
WHERE seq = $4::bigint;

-- name: end_jobs
WITH u AS (
    UPDATE towpath.job SET state = $1::text, reason = $2::text, finished_at = $3::bigint,
        purge_at = $4::bigint, waits = 0, owner = NULL, lease_until = NULL
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($5::json)::bigint))
        RETURNING seq, queue, state, purge_at, expires_at
), w AS (
    DELETE FROM towpath.turn t USING u WHERE t.seq = u.seq
), {over}
SELECT 1;

-- name: doomed
-- All blocked jobs that need one of these jobs to succeed, directly or not.
WITH RECURSIVE doomed (seq) AS (
    SELECT e.dst FROM json_array_elements_text($1::json) v JOIN towpath.edge e ON e.src = v::bigint
        AND NOT e.run_anyway
        JOIN towpath.job j ON j.seq = e.dst AND j.state = 'blocked'
    UNION
    SELECT e.dst FROM doomed d JOIN towpath.edge e ON e.src = d.seq AND NOT e.run_anyway
        JOIN towpath.job j ON j.seq = e.dst AND j.state = 'blocked'
)
SELECT seq FROM doomed;

-- name: dependents
SELECT j.seq, j.queue, j.part, j.ready_at, j.waits, w.over FROM (
    SELECT e.dst, count(*) AS over FROM json_array_elements_text($1::json) v
        JOIN towpath.edge e ON e.src = v::bigint
    GROUP BY e.dst) w
JOIN towpath.job j ON j.seq = w.dst AND j.state = 'blocked';

-- name: lower_waits
UPDATE towpath.job j SET waits = waits - (v->>1)::int FROM json_array_elements($1::json) v
    WHERE j.seq = (v->>0)::bigint;

-- name: unblock
WITH u AS (
    UPDATE towpath.job SET waits = 0, state = $1::text, reason = $2::text
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($3::json)::bigint))
    RETURNING seq, queue, part, priority, ready_at, expires_at, state, losses
)
{turns};

-- name: gates_met
SELECT j.seq, j.queue, j.part, j.ready_at, j.waits, 1
FROM towpath.gate g JOIN towpath.job j ON j.seq = g.dst AND j.state = 'blocked'
WHERE (g.run_anyway OR coalesce(g.outcome, 'done') = $1::text) AND g.src = $2::text;

-- name: gates_shut
SELECT j.seq FROM towpath.gate g JOIN towpath.job j ON j.seq = g.dst AND j.state = 'blocked'
WHERE NOT g.run_anyway AND coalesce(g.outcome, 'done') <> $1::text AND g.src = $2::text;

-- name: delete_gates
DELETE FROM towpath.gate g USING json_array_elements($1::json) v
    WHERE g.src = v->>0 AND g.dst = (v->>1)::bigint;

-- name: gates_of
SELECT src, run_anyway::int, outcome FROM towpath.gate WHERE dst = $1::bigint ORDER BY src;

-- name: gates_to
SELECT dst, run_anyway::int FROM towpath.gate WHERE src = $1::text;

-- name: dead_member
-- The first member, failed ones before canceled ones, that must be revived before the group can succeed.
SELECT id FROM (
    SELECT id, seq, state FROM towpath.job WHERE "group" = $1::text AND state IN ('failed', 'canceled')
        AND reason <> 'superseded'
    UNION ALL
    SELECT j.id, j.seq, j.state FROM towpath.proxy p JOIN towpath.job j ON j.seq = p.job
    WHERE p.grp = $1::text AND j.state IN ('failed', 'canceled') AND j.reason <> 'superseded') m
ORDER BY state <> 'failed', seq LIMIT 1;

-- name: tombstone
SELECT settled_fence, state FROM towpath.tombstone
    WHERE id = $1::text AND alias IS NULL AND settled_fence > 0;

-- name: held_pairs
SELECT j.seq, j.id, j.fence, j.cancel_requested FROM json_array_elements($1::json) v
JOIN towpath.job j ON j.id = v->>0 WHERE j.state = 'running' AND j.fence = (v->>1)::bigint
ORDER BY j.seq FOR UPDATE OF j;

-- name: held_job
SELECT seq, cancel_requested FROM towpath.job WHERE id = $1::text AND fence = $2::bigint AND state = 'running'
    FOR UPDATE;

-- name: renew
WITH u AS (
    UPDATE towpath.job SET lease_until = $1::bigint, lease_len = $2::bigint
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($3::json)::bigint)) RETURNING seq
)
INSERT INTO towpath.lease (until, seqs) SELECT $1::bigint, array_agg(seq) FROM {some_of} u) s GROUP BY chunk;

-- name: progress
UPDATE towpath.job SET progress_done = coalesce($1::bigint, progress_done),
    progress_total = coalesce($2::bigint, progress_total)
WHERE seq = $3::bigint;

-- name: live_notes
SELECT n.key, n.version, n.fence FROM towpath.note n
WHERE n.key = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    AND (n.expires_at IS NULL OR n.expires_at > $2::bigint);

-- name: delete_notes
DELETE FROM towpath.note WHERE key = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: bad_dependency
SELECT s.id, s.state FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src
WHERE e.dst = $1::bigint AND NOT e.run_anyway AND s.state IN ('failed', 'canceled') ORDER BY s.seq LIMIT 1;

-- name: open_waits
-- first: lock_dependencies
SELECT count(*) FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src
WHERE e.dst = $1::bigint AND s.state NOT IN ('done', 'failed', 'canceled');

-- name: lock_dependencies
SELECT 1 FROM towpath.job WHERE seq IN (SELECT src FROM towpath.edge WHERE dst = $1::bigint)
    ORDER BY seq FOR SHARE;

-- name: drop_met_edges
DELETE FROM towpath.edge e WHERE src = $1::bigint
AND EXISTS (SELECT 1 FROM towpath.job j
    WHERE j.seq = e.dst AND j.state NOT IN ('done', 'failed', 'canceled'));

-- name: revive
WITH o AS MATERIALIZED (
    SELECT seq, queue, purge_at FROM towpath.job WHERE seq = $5::bigint
), u AS (
    UPDATE towpath.job SET state = $1::text, reason = $2::text, waits = $3::int, failures = 0, losses = 0,
        cancel_requested = NULL, finished_at = NULL, purge_at = NULL, expires_at = CASE
        WHEN expires_at <= $4::bigint THEN NULL ELSE expires_at END
    WHERE seq = $5::bigint RETURNING seq, queue, part, priority, ready_at, expires_at, state, losses
), e AS (
    INSERT INTO towpath.expiry (at, seq) SELECT expires_at, seq FROM u WHERE expires_at IS NOT NULL
), {no_more_over}
{turns} WHERE state <> 'blocked';

-- name: revivable_dependents
SELECT DISTINCT e.dst FROM json_array_elements_text($1::json) v JOIN towpath.edge e ON e.src = v::bigint
    AND NOT e.run_anyway
JOIN towpath.job j ON j.seq = e.dst WHERE j.state IN ('failed', 'canceled') AND j.reason = 'dependency';

-- name: delete_out_edges
DELETE FROM towpath.edge WHERE src = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: delete_in_edges
DELETE FROM towpath.edge WHERE dst = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: delete_gates_of
DELETE FROM towpath.gate WHERE dst = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: delete_names
DELETE FROM towpath.name WHERE dst = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: delete_attempts
DELETE FROM towpath.attempt WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: end_attempts
INSERT INTO towpath.attempt (seq, number, counted, started_at, ended_at, owner, outcome, error)
SELECT j.seq, j.attempts, (v->>1)::smallint, j.started_at, $1::bigint, j.owner, v->>2, v->>3
FROM json_array_elements($2::json) v JOIN towpath.job j ON j.seq = (v->>0)::bigint
ON CONFLICT (seq, number, counted) DO UPDATE
    SET started_at = excluded.started_at, ended_at = excluded.ended_at, owner = excluded.owner,
        outcome = excluded.outcome, error = excluded.error;

-- name: forget_attempts
DELETE FROM towpath.attempt a USING json_array_elements($1::json) v
WHERE a.seq = (v->>0)::bigint AND a.number <= (v->>1)::bigint;

-- name: attempts_of
SELECT a.number, a.counted = 1, a.started_at, a.ended_at, a.owner, a.outcome, a.error
FROM towpath.job j JOIN towpath.attempt a ON a.seq = j.seq WHERE j.id = $1::text ORDER BY a.number, a.counted;

-- name: delete_bodies
DELETE FROM towpath.body WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: delete_jobs
WITH o AS (
    DELETE FROM towpath.job WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint))
        RETURNING seq, queue, purge_at
), {no_more_over}
SELECT 1;

-- name: count_losses
UPDATE towpath.job SET losses = losses + 1
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint));

-- name: give_back
WITH u AS (
    UPDATE towpath.job j SET state = v->>1, reason = 'lost', ready_at = coalesce((v->>2)::bigint, j.ready_at),
        owner = NULL, lease_until = NULL
    FROM json_array_elements($1::json) v WHERE j.seq = (v->>0)::bigint
    RETURNING j.seq, j.queue, j.part, j.priority, j.ready_at, j.expires_at, j.state, j.losses
)
{turns};

-- name: expired_jobs
SELECT j.seq FROM towpath.expiry e JOIN towpath.job j ON j.seq = e.seq
WHERE e.at <= $1::bigint AND j.state IN ('blocked', 'scheduled', 'ready')
ORDER BY e.at, e.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED;

-- name: queues_with_due
SELECT q.name FROM towpath.queue_now q WHERE q.scheduled > 0 AND EXISTS (
    SELECT 1 FROM towpath.turn t WHERE t.queue = q.name AND t.ripe = 0 AND t.ready_at <= $1::bigint)
ORDER BY q.name;

-- name: queues_with_purgeable
SELECT q.name FROM towpath.queue_now q WHERE q.done + q.canceled > 0 AND EXISTS (
    SELECT 1 FROM towpath.past p WHERE p.queue = q.name AND p.purge_at <= $1::bigint)
ORDER BY q.name;

-- name: queues_too_full
SELECT name, done + canceled, coalesce(keep, $1::bigint) FROM towpath.queue_now
WHERE done + canceled > coalesce(keep, $2::bigint) ORDER BY name;

-- name: purgeable_jobs
-- The first rows of `past` with $4 jobs in total, and all rows with the same time as the last of them.
WITH RECURSIVE walk (purge_at, n, seqs, jobs) AS (
    (SELECT p.purge_at, p.n, p.seqs, cardinality(p.seqs) FROM towpath.past p
     WHERE p.queue = $1::text AND ($2::bigint IS NULL OR p.purge_at <= $3::bigint)
         ORDER BY p.purge_at, p.n LIMIT 1)
    UNION ALL
    SELECT p.purge_at, p.n, p.seqs, w.jobs + cardinality(p.seqs) FROM walk w CROSS JOIN LATERAL (
        SELECT * FROM towpath.past p
            WHERE p.queue = $1::text AND ($2::bigint IS NULL OR p.purge_at <= $3::bigint)
            AND (p.purge_at, p.n) > (w.purge_at, w.n) ORDER BY p.purge_at, p.n LIMIT 1) p
    WHERE w.jobs < $4::bigint OR p.purge_at = w.purge_at
)
SELECT j.seq FROM walk w CROSS JOIN LATERAL unnest(w.seqs) s JOIN towpath.job j ON j.seq = s
WHERE j.purge_at = w.purge_at ORDER BY w.purge_at, j.seq LIMIT $4::bigint FOR UPDATE OF j SKIP LOCKED;

-- name: sweep_tombstones
-- ARRAY() is evaluated once. `id IN (SELECT ... LIMIT)` may be evaluated once per row, and each time finds
-- further rows.
DELETE FROM towpath.tombstone WHERE until <= $1::bigint
AND id = ANY (ARRAY(SELECT id FROM towpath.tombstone WHERE until <= $1::bigint
    ORDER BY until, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED));

-- name: sweep_replies
DELETE FROM towpath.reply WHERE until <= $1::bigint
AND token = ANY (ARRAY(
    SELECT token FROM towpath.reply WHERE until <= $1::bigint
        ORDER BY until, token LIMIT $2::bigint FOR UPDATE SKIP LOCKED));

-- name: sweep_notes
DELETE FROM towpath.note WHERE expires_at <= $1::bigint AND key = ANY (ARRAY(
    SELECT key FROM towpath.note WHERE expires_at IS NOT NULL AND expires_at <= $1::bigint
        ORDER BY expires_at, key LIMIT $2::bigint FOR UPDATE SKIP LOCKED));

-- name: closed_windows
-- Keys with an ended window, and whether an unfinished job still holds them.
SELECT k.namespace, k.key, (EXISTS (SELECT 1 FROM towpath.job j WHERE j.seq = k.seq
    AND j.state NOT IN ('done', 'failed', 'canceled')))::int
FROM towpath.key k WHERE k.until > 0 AND k.until <= $1::bigint
    ORDER BY k.until, k.namespace, k.key LIMIT $2::bigint;

-- name: close_windows
UPDATE towpath.key k SET until = 0 FROM json_array_elements($1::json) v
    WHERE k.namespace = v->>0 AND k.key = v->>1;

-- name: sweep_parts
WITH i AS MATERIALIZED (
    SELECT p.queue, p.name FROM towpath.part p JOIN towpath.queue q ON q.name = p.queue
    WHERE p.ready = 0 AND p.running = 0 AND p.configured = 0 AND p.next_at <= $1::bigint
        AND NOT EXISTS (SELECT 1 FROM towpath.tally t WHERE t.queue = p.queue AND t.part = p.name
            AND t.xid >= q.folded)
    ORDER BY p.queue, p.name LIMIT $2::bigint FOR UPDATE OF q SKIP LOCKED)
DELETE FROM towpath.part d USING i
WHERE d.queue = i.queue AND d.name = i.name AND d.ready = 0 AND d.running = 0 AND d.configured = 0;

-- name: unused_queues
-- Queues that are unused at $2 and have been unused since $1, locked: without the lock another batch could
-- set one meanwhile.
SELECT q.name FROM towpath.unused u JOIN towpath.queue q ON q.name = u.name
WHERE u.since <= $1::bigint AND {unused} AND q.next_at <= $2::bigint
    AND NOT EXISTS (SELECT 1 FROM towpath.tally t WHERE t.queue = q.name)
ORDER BY u.since, u.name LIMIT $3::bigint FOR UPDATE OF q SKIP LOCKED;

-- name: note_unused
INSERT INTO towpath.unused (name, since) SELECT q.name, $1::bigint FROM towpath.queue q
WHERE {unused} AND q.next_at <= $1::bigint
    AND NOT EXISTS (SELECT 1 FROM towpath.unused u WHERE u.name = q.name)
    AND NOT EXISTS (SELECT 1 FROM towpath.tally t WHERE t.queue = q.name)
ON CONFLICT DO NOTHING;

-- name: delete_queues
DELETE FROM towpath.queue WHERE name = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: delete_unused
DELETE FROM towpath.unused WHERE name = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: sweep_groups
DELETE FROM towpath."group" WHERE id = ANY (ARRAY(
    SELECT g.id FROM towpath."group" g WHERE g.state = 'closed' AND g.closed_at <= $1::bigint
    AND NOT EXISTS (SELECT 1 FROM towpath.job j WHERE j."group" = g.id)
        ORDER BY g.closed_at, g.id LIMIT $2::bigint));

-- name: sweep_thens
DELETE FROM towpath."then" t WHERE NOT EXISTS (SELECT 1 FROM towpath."group" g WHERE g.id = t.id);

-- name: sweep_gates
DELETE FROM towpath.gate t WHERE NOT EXISTS (SELECT 1 FROM towpath."group" g WHERE g.id = t.src);

-- name: sweep_proxies
DELETE FROM towpath.proxy t WHERE NOT EXISTS (SELECT 1 FROM towpath."group" g WHERE g.id = t.grp);

-- name: hold_blobs
SELECT id, job FROM towpath.blob WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY id FOR UPDATE;

-- name: seen_blobs
-- As hold_blobs, without a lock.
SELECT id, job FROM towpath.blob WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: chunk_lengths
SELECT blob, number, octet_length(data) FROM towpath.chunk
    WHERE blob = ANY (ARRAY(SELECT json_array_elements_text($1::json))) ORDER BY blob, number;

-- name: touch_blob
INSERT INTO towpath.blob (id, job, until) VALUES ($1::text, NULL, $2::bigint)
ON CONFLICT (id) DO UPDATE SET until = excluded.until WHERE towpath.blob.job IS NULL;

-- name: read_chunk
SELECT data FROM towpath.chunk WHERE blob = $1::text AND number = $2::bigint;

-- name: free_blobs
UPDATE towpath.blob SET job = NULL, until = $1::bigint
    WHERE job = ANY (ARRAY(SELECT json_array_elements_text($2::json)::bigint));

-- name: sweep_chunks
-- The lock on the blob excludes an append that takes it.
WITH b AS MATERIALIZED (
    SELECT id, until FROM towpath.blob WHERE job IS NULL AND until <= $1::bigint
        ORDER BY until, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED
), d AS MATERIALIZED (
    SELECT c.blob, c.number FROM b CROSS JOIN LATERAL (
        SELECT blob, number FROM towpath.chunk WHERE blob = b.id ORDER BY number LIMIT $2::bigint) c
    ORDER BY b.until, b.id, c.number LIMIT $2::bigint
)
DELETE FROM towpath.chunk c USING d WHERE c.blob = d.blob AND c.number = d.number;

-- name: sweep_blobs
DELETE FROM towpath.blob WHERE id = ANY (ARRAY(
    SELECT b.id FROM (SELECT id FROM towpath.blob WHERE job IS NULL AND until <= $1::bigint
        ORDER BY until, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED) b
    WHERE NOT EXISTS (SELECT 1 FROM towpath.chunk c WHERE c.blob = b.id)));

-- name: then_of
SELECT specs FROM towpath."then" WHERE id = $1::text;

-- name: next_lease
-- The first lease row with a running job. (Rows before it are stale.)
SELECT (SELECT l.until + 1 FROM towpath.lease l WHERE EXISTS (
    SELECT 1 FROM unnest(l.seqs) s JOIN towpath.job j ON j.seq = s
        WHERE j.state = 'running' AND j.lease_until = l.until)
    ORDER BY l.until LIMIT 1);

-- name: stale
-- Deletes the lease rows before the first one with a running job.
DELETE FROM towpath.lease WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM towpath.lease WHERE until < coalesce((
        SELECT l.until FROM towpath.lease l WHERE EXISTS (
            SELECT 1 FROM unnest(l.seqs) s JOIN towpath.job j ON j.seq = s
                WHERE j.state = 'running' AND j.lease_until = l.until)
        ORDER BY l.until LIMIT 1), 9223372036854775807)
    FOR UPDATE SKIP LOCKED));

-- name: next_lease_after_jump
SELECT min(greatest(lease_until + 1, coalesce((
    SELECT max((g->>0)::bigint + lease_len) FROM json_array_elements($2::json) g
    WHERE $1::bigint < (g->>0)::bigint + lease_len AND 2 * (g->>1)::bigint > lease_len
    AND lease_until > (g->>0)::bigint - (g->>1)::bigint), 0)))
FROM {running};

-- name: next_due
SELECT min(at) FROM (
    {expiring}
    UNION ALL
    SELECT min((SELECT min(t.ready_at) FROM towpath.turn t WHERE t.queue = q.name AND t.ripe = 0))
        FROM towpath.queue_now q WHERE q.scheduled > 0
    UNION ALL
    SELECT min((SELECT min(p.purge_at) FROM towpath.past p WHERE p.queue = q.name))
        FROM towpath.queue_now q WHERE q.done + q.canceled > 0
    UNION ALL
    SELECT $1::bigint FROM towpath.queue_now WHERE done + canceled > coalesce(keep, $2::bigint)
    UNION ALL
    SELECT min(until) FROM towpath.tombstone
    UNION ALL
    SELECT min(until) FROM towpath.reply
    UNION ALL
    SELECT min(until) FROM towpath.blob WHERE job IS NULL
    UNION ALL
    SELECT min(expires_at) FROM towpath.note WHERE expires_at IS NOT NULL
    UNION ALL
    SELECT min(until) FROM towpath.key WHERE until > 0
    UNION ALL
    SELECT min(next_at) FROM towpath.part_now WHERE ready > 0 AND next_at > $1::bigint
    UNION ALL
    SELECT min(next_at) FROM towpath.queue_now WHERE ready > 0 AND next_at > $1::bigint
) due;

-- name: read_reply
SELECT answer FROM towpath.reply WHERE token = $1::text;

-- name: write_reply
INSERT INTO towpath.reply (token, answer, until) VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (token) DO UPDATE SET answer = excluded.answer, until = excluded.until;

-- name: read_note
SELECT n.key, n.value, n.version, n.fence, n.expires_at FROM towpath.note n, towpath.last_time l
WHERE n.key = $1::text AND (n.expires_at IS NULL
    OR n.expires_at > greatest(l.last_value, coalesce($2::bigint, {clock})));

-- name: notes_after
-- Notes from key $1 and after $2, before $3, at the time $4 (NULL: now).
SELECT n.key, encode(n.value, 'hex'), n.version, n.fence, n.expires_at
FROM towpath.note n, towpath.last_time l
WHERE n.key >= $1::text AND n.key > $2::text AND n.key < $3::text AND (n.expires_at IS NULL
    OR n.expires_at > greatest(l.last_value, coalesce($4::bigint, {clock})))
ORDER BY n.key LIMIT $5::bigint;

-- name: edges_into
-- Edges to the job $1 behind the position ($2 dst, $3 of_group, $4 seq, $5 name): see `core.edges`.
SELECT dst, of_group, seq, src, id, run_anyway FROM ({edges} d.id = $1::text {gates} d.id = $1::text) e
WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT $6::bigint;

-- name: edges_into_group
-- Edges to the members of the group $1, as in edges_into.
SELECT dst, of_group, seq, src, id, run_anyway FROM (
    {edges} d."group" = $1::text AND d.seq >= $2::bigint
    {gates} d."group" = $1::text AND d.seq >= $2::bigint) e
WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT $6::bigint;

-- name: edges_out_of
-- Edges from the job $1, as in edges_into.
SELECT dst, of_group, seq, src, id, run_anyway FROM ({edges} s.id = $1::text) e
WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT $6::bigint;

-- name: edges_out_of_group
-- Edges from the group $1, as in edges_into.
SELECT dst, of_group, seq, src, id, run_anyway FROM ({gate_rows} g.src = $1::text) e
WHERE {behind} ORDER BY dst, of_group, seq, name LIMIT $6::bigint;

-- name: put_note
SELECT now, version, fence, written
    FROM towpath.put_note($1::text, $2::bytea, $3::bigint, $4::bigint, $5::bigint, $6::bigint);

-- name: anything
-- Whether a claim from these queues, each with its spans, may find a job. (LIMIT keeps the planner from
-- changing the order of the joins.)
-- $1 queues and spans, $2 the schema version of this process, $3 the time or NULL, $4 whether it takes
-- suspects
SELECT t.now, m.min_schema > $2::bigint OR EXISTS (SELECT 1 FROM towpath.inbox WHERE failure IS NULL)
    OR EXISTS (SELECT 1 FROM json_array_elements($1::json) v CROSS JOIN LATERAL (
        (SELECT 1 FROM json_array_elements(v->1) s CROSS JOIN LATERAL (
            SELECT 1 FROM towpath.turn w WHERE w.queue = v->>0 AND w.part = '' AND w.ripe = 1
            AND (w.priority, w.seq) > ((s->>0)::int, (s->>1)::bigint) AND w.priority < (s->>2)::int LIMIT 1) f
                LIMIT 1)
        UNION ALL
        (SELECT 1 FROM towpath.turn w WHERE w.queue = v->>0 AND w.part = '' AND w.ripe = 2 LIMIT 1)
        UNION ALL
        (SELECT 1 FROM towpath.turn w WHERE w.queue = v->>0 AND w.part > '' AND w.ripe = 2 LIMIT 1)
        UNION ALL
        (SELECT 1 FROM towpath.turn w WHERE w.queue = v->>0 AND w.ripe = 3 AND $4::boolean LIMIT 1)
        UNION ALL
        (SELECT 1 FROM towpath.turn w
            WHERE w.queue = v->>0 AND w.ripe = 0 AND w.ready_at <= t.now LIMIT 1)) w)
    OR EXISTS (SELECT 1 FROM towpath.expiry e JOIN towpath.job j ON j.seq = e.seq
        WHERE e.at <= t.now AND j.state <> 'running')
FROM towpath.meta m, (SELECT greatest(last_value, coalesce($3::bigint, {clock})) AS now
    FROM towpath.last_time) t;

-- name: open_dependencies
SELECT s.id FROM towpath.edge e JOIN towpath.job s ON s.seq = e.src
WHERE e.dst = $1::bigint AND s.state NOT IN ('done', 'failed', 'canceled') ORDER BY s.seq LIMIT $2::bigint;

-- name: open_groups
SELECT g.src FROM towpath.gate g JOIN towpath."group" o ON o.id = g.src AND o.state <> 'closed'
WHERE g.dst = $1::bigint ORDER BY g.src LIMIT $2::bigint;

-- name: culprit
-- The first-ended job among the causes of an end by dependency.
WITH RECURSIVE up (seq) AS (
    SELECT $1::bigint
    UNION
    SELECT s.seq FROM up u JOIN towpath.job d ON d.seq = u.seq AND d.reason = 'dependency'
        CROSS JOIN LATERAL (
        SELECT m.seq FROM towpath.edge e JOIN towpath.job m ON m.seq = e.src
        WHERE e.dst = d.seq AND NOT e.run_anyway AND m.state = d.state
        UNION ALL
        SELECT m.seq FROM towpath.gate g JOIN towpath.job m ON m."group" = g.src
        WHERE g.dst = d.seq AND NOT g.run_anyway AND m.state = d.state) s
)
SELECT j.id FROM up u JOIN towpath.job j ON j.seq = u.seq WHERE j.reason <> 'dependency'
    ORDER BY j.finished_at, j.seq LIMIT 1;

-- name: running_jobs
SELECT id FROM {running} AND queue = $1::text AND ($2::text IS NULL OR part = $2::text)
    ORDER BY seq LIMIT $3::bigint;

-- name: ahead_loose
SELECT least($4::bigint, sum(n))::bigint FROM (VALUES (1), (2), (3)) r (ripe) CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT 1 FROM towpath.turn t WHERE t.queue = $1::text AND t.part = '' AND t.ripe > 0
            AND t.ripe = r.ripe
        AND (t.priority, t.seq) < ($2::int, $3::bigint) LIMIT $4::bigint) a) c;

-- name: ahead_parted
SELECT count(*) FROM (
    SELECT 1 FROM (VALUES (2), (3)) r (ripe) JOIN towpath.turn t ON t.ripe = r.ripe
    WHERE t.queue = $1::text AND t.part = $2::text AND t.ripe > 0
        AND (t.priority, t.seq) < ($3::int, $4::bigint) LIMIT $5::bigint) a;

-- name: by_seq
SELECT {job} FROM towpath.job j WHERE j.seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint))
ORDER BY j.seq FOR UPDATE;

-- name: by_id
SELECT {job} FROM towpath.job j WHERE j.id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY j.seq FOR UPDATE;

-- name: read_by_id
SELECT {job} FROM towpath.job j WHERE j.id = ANY (ARRAY(SELECT json_array_elements_text($1::json)));

-- name: read_by_prefix
SELECT {job} FROM towpath.job j WHERE j.id >= $1::text AND j.id < $2::text ORDER BY j.id LIMIT $3::bigint;

-- name: read_by_seq
SELECT {job} FROM towpath.job j WHERE j.seq = $1::bigint;

-- name: held
SELECT j.id, j.seq, j.queue, j.part, j.state, j.attempts, j.failures, j.losses, j.max_attempts, j.fence,
    j.settled_fence, j.settled_as, j.cancel_requested, j.retention, j."group", j.key, j.sourced::int
FROM towpath.job j WHERE j.id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
    ORDER BY j.seq FOR UPDATE;

-- name: settle_and_claim
-- Ends jobs that are held with these fences and affect no other job by their end, and claims from a queue
-- without limits. Applies both, or nothing and returns no row. (If another transaction changed one of the
-- rows meanwhile, which is rare, the statement divides by zero and so undoes itself.) It refuses if
-- something must be done first: appends in the inbox, expired or due jobs, turns of parts. The batch then
-- takes the general path.
-- $1 queue, $2 n, $3 owner, $4 lease, $5 whether jobs with a single attempt may be claimed, $6 spans, $7
-- the time or NULL, $8 ids, $9 fences, $10 results or an empty array, $11 RETENTION, $12 whether suspects
-- may be claimed (then it refuses if there are any), $13 whether to write the tally
WITH n AS MATERIALIZED (
    SELECT greatest(last_value, coalesce($7::bigint, {clock})) AS now FROM towpath.last_time
), t AS MATERIALIZED (
    -- min() of each table, so that the planner reads only its first row.
    SELECT n.now FROM n, towpath.meta m
    WHERE m.min_schema <= {known} AND NOT EXISTS (SELECT 1 FROM towpath.inbox WHERE failure IS NULL)
        AND coalesce((SELECT min(at) FROM towpath.expiry) > n.now, true)
        AND coalesce((SELECT min(w.ready_at) FROM towpath.turn w
            WHERE w.queue = $1::text AND w.ripe = 0) > n.now, true)
        AND NOT EXISTS (SELECT 1 FROM towpath.turn w WHERE w.queue = $1::text AND w.part > '' AND w.ripe = 2)
        AND NOT ($12::boolean AND EXISTS (SELECT 1 FROM towpath.turn w
            WHERE w.queue = $1::text AND w.ripe = 3))
        AND coalesce((SELECT q.paused = 0 AND q.cap IS NULL AND q.rate_count IS NULL AND q.next_at <= n.now
            FROM towpath.queue q WHERE q.name = $1::text), true)
), h AS MATERIALIZED (
    SELECT j.ctid AS at, j.seq, j.fence, j.queue, j.part, j.expires_at, v.result,
        t.now + coalesce(j.retention, (SELECT q.retention FROM towpath.queue q WHERE q.name = j.queue),
        $11::bigint) AS purge_at
    FROM t CROSS JOIN ROWS FROM (json_array_elements_text($8::json), json_array_elements_text($9::json),
        unnest($10::bytea[])) AS v (id, fence, result)
    JOIN towpath.job j ON j.id = v.id
    WHERE j.state = 'running' AND j.fence = v.fence::bigint AND NOT j.sourced AND j."group" IS NULL
        AND j.key IS NULL
    ORDER BY j.seq
), ok AS MATERIALIZED (
    SELECT now FROM t WHERE (SELECT count(*) FROM h) = json_array_length($8::json)
), u AS (
    UPDATE towpath.job j SET state = 'done', reason = '', finished_at = ok.now, purge_at = h.purge_at,
        owner = NULL, lease_until = NULL, settled_fence = j.fence, settled_as = 'done'
    FROM ok CROSS JOIN h WHERE j.ctid = h.at AND j.state = 'running' AND j.fence = h.fence AND NOT j.sourced
    RETURNING 1
), e AS (
    DELETE FROM towpath.expiry e USING ok CROSS JOIN h WHERE h.expires_at IS NOT NULL AND e.at = h.expires_at
        AND e.seq = h.seq
), p AS (
    INSERT INTO towpath.past (queue, purge_at, seqs)
    SELECT queue, purge_at, array_agg(seq) FROM {some_of} h CROSS JOIN ok) s GROUP BY queue, purge_at, chunk
), b AS (
    INSERT INTO towpath.body (seq, what, data) SELECT h.seq, 2, h.result FROM h CROSS JOIN ok
        WHERE h.result IS NOT NULL
    ON CONFLICT (seq, what) DO UPDATE SET data = excluded.data
), fresh AS MATERIALIZED (
    SELECT w.*, ok.now FROM ok CROSS JOIN json_array_elements($6::json) s CROSS JOIN LATERAL (
        SELECT j.ctid AS at, t.ctid AS turn, j.seq, j.priority, j.max_attempts, t.ripe
            FROM {loose} (t.expires_at IS NULL OR t.expires_at > ok.now) AND t.ripe = 1
            AND (t.priority, t.seq) > ((s->>0)::int, (s->>1)::bigint) AND t.priority < (s->>2)::int {best}) w
    LIMIT $2::bigint
), again AS MATERIALIZED (
    SELECT w.*, ok.now FROM ok CROSS JOIN LATERAL (
        SELECT j.ctid AS at, t.ctid AS turn, j.seq, j.priority, j.max_attempts, t.ripe
            FROM {loose} (t.expires_at IS NULL OR t.expires_at > ok.now) AND t.ripe = 2 {best}) w
), picked AS MATERIALIZED (
    SELECT * FROM (SELECT * FROM fresh UNION ALL SELECT * FROM again) w
        ORDER BY priority, seq LIMIT $2::bigint
), chosen AS MATERIALIZED (
    SELECT * FROM picked WHERE $5::boolean OR NOT EXISTS (SELECT 1 FROM picked WHERE max_attempts = 1)
), taken AS (
    UPDATE towpath.job j SET state = 'running', reason = '', attempts = j.attempts + 1, fence = j.fence + 1,
        owner = $3::text, lease_until = p.now + $4::bigint, lease_len = $4::bigint, started_at = p.now
    FROM chosen p WHERE j.ctid = p.at RETURNING {job}, p.ripe, j.complete, j.payload
), gone AS (
    DELETE FROM towpath.turn t USING chosen p WHERE t.ctid = p.turn RETURNING 1
), leased AS (
    INSERT INTO towpath.lease (until, seqs)
    SELECT now + $4::bigint, array_agg(seq) FROM {some_of} chosen) s GROUP BY now, chunk
), c AS (
    INSERT INTO towpath.tally (queue, part, blocked, scheduled, ready, running, done, failed, canceled,
        active)
    SELECT queue, part, 0, 0, sum(ready), sum(running), sum(done), 0, 0, true FROM (
        SELECT queue, part, 0 AS ready, -count(*) AS running, count(*) AS done FROM h CROSS JOIN ok
            GROUP BY queue, part
        UNION ALL
        SELECT $1::text, NULL, -count(*), count(*), 0 FROM chosen HAVING count(*) > 0) s
    WHERE $13::boolean GROUP BY queue, part
), done AS MATERIALIZED (
    SELECT ok.now, pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS oldest,
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS following, (SELECT count(*)
        FROM picked) AS picked, 1 / ((SELECT count(*) FROM u) = (SELECT count(*) FROM h)
            AND (SELECT count(*) FROM taken) = (SELECT count(*) FROM chosen)
            AND (SELECT count(*) FROM gone) = (SELECT count(*) FROM chosen))::int AS whole,
        CASE WHEN EXISTS (SELECT 1 FROM h) OR EXISTS (SELECT 1 FROM chosen)
            THEN setval('towpath.last_time', greatest(ok.now, (SELECT last_value FROM towpath.last_time))) END
    FROM ok
)
SELECT k.*, d.now, d.oldest, d.following, d.picked FROM done d LEFT JOIN taken k ON true
    ORDER BY k.priority, k.seq;

-- name: offer_loose
WITH fresh AS MATERIALIZED (
    SELECT {taken} FROM {loose} {live} t.ripe = 1 {best}
), again AS MATERIALIZED (
    SELECT {taken} FROM {loose} {live} t.ripe = 2 {best}
)
SELECT * FROM (SELECT * FROM fresh UNION ALL SELECT * FROM again) w ORDER BY priority, seq LIMIT $2::bigint;

-- name: offer_other
-- As offer_loose, without the jobs of the kinds $7.
WITH fresh AS MATERIALIZED (
    SELECT {taken} FROM {loose} {live} t.ripe = 1 AND {other} {best}
), again AS MATERIALIZED (
    SELECT {taken} FROM {loose} {live} t.ripe = 2 AND {other} {best}
)
SELECT * FROM (SELECT * FROM fresh UNION ALL SELECT * FROM again) w ORDER BY priority, seq LIMIT $2::bigint;

-- name: offer_parted
SELECT t.* FROM json_array_elements_text($7::json) p CROSS JOIN LATERAL (
    SELECT {taken} FROM towpath.turn t JOIN towpath.job j ON j.seq = t.seq
    WHERE t.queue = $1::text AND t.part = p AND t.ripe = 2
        AND (t.expires_at IS NULL OR t.expires_at > $3::bigint) AND j.state = 'ready'
    ORDER BY t.priority, t.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED) t;

-- name: suspects_of
-- Ready suspects of a queue, by part.
SELECT nullif(part, ''), count(*) FROM towpath.turn WHERE queue = $1::text AND ripe = 3 GROUP BY part;

-- name: offer_suspects
-- The best suspects of each part (NULL: without a part).
SELECT t.* FROM json_array_elements_text($7::json) p CROSS JOIN LATERAL (
    SELECT {taken} FROM towpath.turn t JOIN towpath.job j ON j.seq = t.seq
    WHERE t.queue = $1::text AND t.part = coalesce(p, '') AND t.ripe = 3
        AND (t.expires_at IS NULL OR t.expires_at > $3::bigint) AND j.state = 'ready'
    ORDER BY t.priority, t.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED) t;

-- name: wake
WITH u AS (
    UPDATE towpath.job SET state = 'ready', reason = CASE WHEN reason IN ({kept}) THEN reason ELSE '' END
    WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($1::json)::bigint)) RETURNING seq, losses
)
UPDATE towpath.turn t SET ripe = CASE WHEN u.losses < {suspect} THEN 2 ELSE 3 END FROM u WHERE t.seq = u.seq;

-- name: late_jobs
SELECT {job} FROM (SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease WHERE until < $1::bigint) l
JOIN towpath.job j ON j.seq = l.seq WHERE j.state = 'running' AND j.lease_until < $1::bigint
    AND NOT EXISTS (SELECT 1 FROM json_array_elements($2::json) g
        WHERE $1::bigint < (g->>0)::bigint + j.lease_len AND 2 * (g->>1)::bigint > j.lease_len
        AND j.lease_until > (g->>0)::bigint - (g->>1)::bigint)
ORDER BY j.lease_until, j.seq LIMIT $3::bigint FOR UPDATE OF j SKIP LOCKED;

-- name: orphaned_jobs
SELECT {job} FROM (SELECT DISTINCT unnest(seqs) AS seq FROM towpath.lease) l
JOIN towpath.job j ON j.seq = l.seq
WHERE j.state = 'running' AND j.owner = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
ORDER BY j.seq LIMIT $2::bigint FOR UPDATE OF j SKIP LOCKED;

-- name: created_from
SELECT created_at FROM towpath.job WHERE seq >= $1::bigint ORDER BY seq LIMIT 1;

-- name: lock_old
SELECT $1::int FROM towpath.job WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($2::json)::bigint))
ORDER BY seq FOR UPDATE SKIP LOCKED;

-- name: hasten
-- first: lock_old
WITH u AS (
    UPDATE towpath.job SET priority = $1::int WHERE state = 'ready' AND seq IN (
        SELECT seq FROM towpath.job WHERE seq = ANY (ARRAY(SELECT json_array_elements_text($2::json)::bigint))
        ORDER BY seq FOR UPDATE SKIP LOCKED)
    RETURNING seq
)
UPDATE towpath.turn t SET priority = $1::int, ripe = greatest(t.ripe, 2) FROM u WHERE t.seq = u.seq;

-- name: old_loose
-- Of each priority after $2, the ready jobs up to seq $3 that are ready since $4.
WITH RECURSIVE level (ripe, p) AS (
    SELECT r.ripe, (SELECT min(priority) FROM towpath.turn t
        WHERE t.queue = $1::text AND t.ripe > 0 AND t.ripe = r.ripe AND t.part = '' AND t.priority > $2::int)
    FROM (VALUES (1), (2)) r (ripe)
    UNION ALL
    SELECT level.ripe, (SELECT min(priority) FROM towpath.turn t
        WHERE t.queue = $1::text AND t.ripe > 0 AND t.ripe = level.ripe AND t.part = ''
            AND t.priority > level.p)
    FROM level WHERE level.p IS NOT NULL)
SELECT t.seq FROM level JOIN towpath.turn t ON t.queue = $1::text AND t.ripe > 0 AND t.ripe = level.ripe
    AND t.part = ''
    AND t.priority = level.p AND t.seq <= $3::bigint AND t.ready_at <= $4::bigint
ORDER BY t.priority, t.seq LIMIT $5::bigint;

-- name: old_parted
WITH RECURSIVE level (part, p) AS (
    SELECT s.name, (SELECT min(priority) FROM towpath.turn
        WHERE queue = $1::text AND part = s.name AND ripe = 2 AND priority > $2::int)
    FROM towpath.part_now s WHERE s.queue = $1::text AND s.ready > 0
    UNION ALL
    SELECT level.part, (SELECT min(priority) FROM towpath.turn
        WHERE queue = $1::text AND part = level.part AND ripe = 2 AND priority > level.p)
    FROM level WHERE level.p IS NOT NULL)
SELECT t.seq FROM level JOIN towpath.turn t ON t.queue = $1::text AND t.part = level.part AND t.ripe = 2
    AND t.priority = level.p AND t.seq <= $3::bigint AND t.ready_at <= $4::bigint
ORDER BY t.part, t.priority, t.seq LIMIT $5::bigint;

-- name: old_suspects
SELECT seq FROM towpath.turn WHERE queue = $1::text AND ripe = 3 AND priority > $2::int AND seq <= $3::bigint
    AND ready_at <= $4::bigint
ORDER BY part, priority, seq LIMIT $5::bigint;

-- name: drain_inbox
DELETE FROM towpath.inbox WHERE seq = ANY (ARRAY(
    SELECT seq FROM towpath.inbox WHERE failure IS NULL ORDER BY seq LIMIT $1::bigint FOR UPDATE SKIP LOCKED))
RETURNING seq, specs;

-- name: spoil_inbox
INSERT INTO towpath.inbox (seq, ids, specs, failure) OVERRIDING SYSTEM VALUE
    VALUES ($1::bigint, '{}', $2::text, $3::text);

-- name: server
-- Identifies the running server and the ledger in it. A copy of the database elsewhere has other values.
SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    'towpath.meta'::regclass::oid::bigint, (SELECT oid::bigint FROM pg_catalog.pg_database
    WHERE datname = current_database());

-- name: seen_ids
-- The committed facts about ids, read without locks. 2: the id is in the inbox.
SELECT j.id, j.seq, j.state, 0, NULL FROM towpath.job j
    WHERE j.id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
UNION ALL
SELECT t.id, t.seq, t.state, 1, t.alias FROM towpath.tombstone t
WHERE t.id = ANY (ARRAY(SELECT json_array_elements_text($1::json))) AND NOT EXISTS (SELECT 1
    FROM towpath.job j WHERE j.id = t.id)
UNION ALL
SELECT v, 0, 'blocked', 2, NULL FROM json_array_elements_text($1::json) v
WHERE EXISTS (SELECT 1 FROM towpath.inbox i WHERE v = ANY (i.ids))
    AND NOT EXISTS (SELECT 1 FROM towpath.job j WHERE j.id = v) AND NOT EXISTS (SELECT 1
        FROM towpath.tombstone t WHERE t.id = v);

-- name: seen_holders
SELECT k.namespace, k.key, k.id, k.seq, j.state, k.until, NULL::bigint
FROM json_array_elements($1::json) v JOIN towpath.key k ON k.namespace = v->>0 AND k.key = v->>1
LEFT JOIN towpath.job j ON j.seq = k.seq;

-- Statements for a connection of the user, which may have other settings: text is sent as bytes, and only
-- numbers are returned. The first one reads only tables that no user transaction writes. Jobs, tallies and
-- the inbox are read only where it is necessary: two serializable transactions that read and write there
-- would conflict.

-- name: user_begin
SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    'towpath.meta'::regclass::oid::bigint, (SELECT oid::bigint FROM pg_catalog.pg_database
    WHERE datname = current_database()), m.schema::bigint, m.min_schema::bigint, t.last_value, {clock},
    (EXISTS (SELECT 1 FROM towpath.tombstone
        WHERE id IN (SELECT json_array_elements_text(convert_from($1::bytea, 'UTF8')::json))))::int::bigint,
    (EXISTS (SELECT 1 FROM towpath.queue WHERE capacity IS NOT NULL
        AND name IN (SELECT json_array_elements_text(convert_from($2::bytea, 'UTF8')::json))))::int::bigint
FROM towpath.meta m, towpath.last_time t;

-- name: user_rooms
SELECT v.n, q.capacity, q.blocked + q.scheduled + q.ready + t.waiting
FROM json_array_elements_text(convert_from($1::bytea, 'UTF8')::json) WITH ORDINALITY v (name, n)
JOIN towpath.queue q ON q.name = v.name AND q.capacity IS NOT NULL
CROSS JOIN LATERAL (SELECT coalesce(sum(a.blocked + a.scheduled + a.ready), 0)::bigint AS waiting
    FROM towpath.tally a WHERE a.queue = q.name AND a.xid >= q.folded) t;

-- name: user_seqs
SELECT min(n), max(n) FROM (SELECT {number} AS n
    FROM generate_series(1, convert_from($1::bytea, 'UTF8')::bigint)) s;

-- name: user_known
-- The ids that this transaction sees, and the numbers of their jobs.
SELECT v.n, j.seq FROM json_array_elements_text(convert_from($1::bytea, 'UTF8')::json) WITH ORDINALITY v (id,
    n)
JOIN towpath.job j ON j.id = v.id
UNION ALL
SELECT v.n, 0 FROM json_array_elements_text(convert_from($1::bytea, 'UTF8')::json) WITH ORDINALITY v (id, n)
WHERE EXISTS (SELECT 1 FROM towpath.inbox i WHERE v.id = ANY (i.ids)) AND NOT EXISTS (SELECT 1
    FROM towpath.job j WHERE j.id = v.id);

-- name: user_inbox
INSERT INTO towpath.inbox (ids, specs)
SELECT ARRAY(SELECT json_array_elements_text(convert_from($1::bytea, 'UTF8')::json)),
    convert_from($2::bytea, 'UTF8')
RETURNING seq;

-- name: user_end
-- Advances ledger time and sends the notification, at the latest when this transaction commits.
SELECT setval('towpath.last_time', greatest(convert_from($1::bytea, 'UTF8')::bigint, (SELECT last_value
    FROM towpath.last_time))), length(pg_notify(convert_from($2::bytea, 'UTF8'), '')::text)::bigint;
