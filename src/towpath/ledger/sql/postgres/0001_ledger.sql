-- The ledger. "towpath" stands for its schema. Times are microseconds. Text is compared by bytes.

-- bounded: the queues that have a capacity.
CREATE TABLE towpath.meta (
    one        int PRIMARY KEY CHECK (one = 1),
    schema     int NOT NULL,
    min_schema int NOT NULL,
    bounded    text[] COLLATE "C" NOT NULL DEFAULT '{}'
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO towpath.meta VALUES (1, 0, 1);

-- Counters that only grow, outside of transactions: every commit would wait for the lock of a row.
CREATE SEQUENCE towpath.job_seq;
CREATE SEQUENCE towpath.version_seq;
CREATE SEQUENCE towpath.last_time MINVALUE 0 START 0;

-- The small columns of a job, in the order of core.job.COLUMNS. Some change with every claim and settle,
-- and none of those is in an index: such an update stays on its page and changes no index. (So half of
-- every page is left free.) Tables of their own below replace indexes on these columns; the transaction
-- that has locked the row of the job writes them.
-- sourced: another row depends on the job, or did. complete: when the job was appended, it had no row in
-- `body`. payload: a small payload; as the last column it is not logged again when the row changes. There
-- are no CHECKs: the server reads them again for every statement, which costs a single append a quarter of
-- its time. `towpath ledger check` has them.
CREATE TABLE towpath.job (
    id               text COLLATE "C" NOT NULL UNIQUE,
    seq              bigint PRIMARY KEY,
    queue            text COLLATE "C" NOT NULL,
    part             text COLLATE "C",
    kind             text COLLATE "C" NOT NULL,
    priority         int    NOT NULL,
    state            text COLLATE "C" NOT NULL,
    reason           text COLLATE "C" NOT NULL,
    ready_at         bigint NOT NULL,
    expires_at       bigint,
    attempts         int    NOT NULL DEFAULT 0,
    failures         int    NOT NULL DEFAULT 0,
    losses           int    NOT NULL DEFAULT 0,
    max_attempts     int    NOT NULL,
    max_losses       int    NOT NULL,
    fence            bigint NOT NULL DEFAULT 0,
    owner            text COLLATE "C",
    lease_until      bigint,
    lease_len        bigint,
    settled_fence    bigint NOT NULL DEFAULT 0,
    settled_as       text COLLATE "C",
    cancel_requested text COLLATE "C",
    timeout          bigint,
    retention        bigint,
    purge_at         bigint,
    waits            int    NOT NULL,
    "group"          text COLLATE "C",
    parent           text COLLATE "C",
    generation       bigint NOT NULL,
    key              text COLLATE "C",
    key_policy       text COLLATE "C",
    progress_done    bigint,
    progress_total   bigint,
    correlation_id   text COLLATE "C",
    created_at       bigint NOT NULL,
    started_at       bigint,
    finished_at      bigint,
    size             bigint NOT NULL,
    content_type     text COLLATE "C" NOT NULL,
    sourced          boolean NOT NULL DEFAULT false,
    complete         boolean NOT NULL DEFAULT false,
    payload          bytea
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_group       ON towpath.job ("group") WHERE "group" IS NOT NULL;
CREATE INDEX job_key         ON towpath.job (key) WHERE key IS NOT NULL;
CREATE INDEX job_correlation ON towpath.job (correlation_id) WHERE correlation_id IS NOT NULL;

-- Scheduled jobs (ripe 0) and ready jobs: without a part and ready since the append (1), all others (2).
-- See `ready_scan`. part: '' for none.
CREATE TABLE towpath.turn (
    seq        bigint PRIMARY KEY,
    queue      text COLLATE "C" NOT NULL,
    part       text COLLATE "C" NOT NULL,
    priority   int      NOT NULL,
    ready_at   bigint   NOT NULL,
    expires_at bigint,
    ripe       smallint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX turn_ready     ON towpath.turn (queue, part, ripe, priority, seq, ready_at) WHERE ripe > 0;
CREATE INDEX turn_scheduled ON towpath.turn (queue, ready_at, seq) WHERE ripe = 0;

-- Unfinished jobs that expire.
CREATE TABLE towpath.expiry (
    at  bigint NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (at, seq)
);

-- Ends of leases: one row per claim or renewal. A row without a running job is deleted by `stale`.
CREATE TABLE towpath.lease (
    until bigint   NOT NULL,
    seqs  bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lease_until ON towpath.lease (until);

-- Finished jobs by the time of their deletion: one row per batch that ended jobs.
CREATE TABLE towpath.past (
    queue    text COLLATE "C" NOT NULL,
    purge_at bigint   NOT NULL,
    n        bigint   GENERATED ALWAYS AS IDENTITY,
    seqs     bigint[] NOT NULL,
    PRIMARY KEY (queue, purge_at, n)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Failed jobs.
CREATE TABLE towpath.dead (
    queue text COLLATE "C" NOT NULL,
    seq   bigint NOT NULL,
    PRIMARY KEY (queue, seq)
);

-- Payload 0, headers 1, result 2, error 3, cursor 4: never touched by claim or settle.
CREATE TABLE towpath.body (
    seq  bigint   NOT NULL,
    what smallint NOT NULL,
    data bytea    NOT NULL,
    PRIMARY KEY (seq, what)
);

CREATE VIEW towpath.body_now AS
SELECT seq, what, data FROM towpath.body UNION ALL SELECT seq, 0::smallint, payload FROM towpath.job WHERE payload IS NOT NULL;

CREATE TABLE towpath.edge (
    src        bigint  NOT NULL,
    dst        bigint  NOT NULL,
    run_anyway boolean NOT NULL,
    PRIMARY KEY (src, dst)
);
CREATE INDEX edge_dst ON towpath.edge (dst, src);

CREATE TABLE towpath.gate (
    src        text COLLATE "C" NOT NULL,
    dst        bigint  NOT NULL,
    run_anyway boolean NOT NULL,
    PRIMARY KEY (src, dst)
);
CREATE INDEX gate_dst ON towpath.gate (dst, src);

CREATE TABLE towpath."group" (
    id         text COLLATE "C" PRIMARY KEY,
    state      text COLLATE "C" NOT NULL CHECK (state IN ('open', 'sealed', 'aborting', 'closed')),
    outcome    text COLLATE "C" CHECK (outcome IN ('done', 'failed', 'canceled')),
    on_failure text COLLATE "C" NOT NULL CHECK (on_failure IN ('continue', 'abort')),
    total      bigint NOT NULL,
    unfinished bigint NOT NULL CHECK (unfinished >= 0),
    done       bigint NOT NULL,
    failed     bigint NOT NULL,
    canceled   bigint NOT NULL,
    superseded bigint NOT NULL,
    created_at bigint NOT NULL,
    closed_at  bigint,
    paused     smallint NOT NULL CHECK (paused IN (0, 1)),
    why        text,
    CHECK ((state = 'closed') = (outcome IS NOT NULL) AND (outcome IS NULL) = (closed_at IS NULL)),
    CHECK (total = unfinished + done + failed + canceled + superseded)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX group_closed ON towpath."group" (closed_at) WHERE state = 'closed';

-- The callbacks of a group. A table of its own, because the counters of the group change with every
-- member.
CREATE TABLE towpath."then" (
    id    text COLLATE "C" PRIMARY KEY,
    specs text NOT NULL
);

CREATE TABLE towpath.key (
    namespace text COLLATE "C" NOT NULL,
    key       text COLLATE "C" NOT NULL,
    id        text COLLATE "C" NOT NULL,
    seq       bigint NOT NULL,
    until     bigint NOT NULL,
    runner    bigint,
    PRIMARY KEY (namespace, key)
);
CREATE INDEX key_until ON towpath.key (until) WHERE until > 0;

-- Counts as of the last fold; later changes are in towpath.tally. loose: ready jobs without a part.
-- folded: the tallies of transactions before this id are in the counts, and deleted.
-- listed: the queue had jobs or settings. Otherwise the row exists for its parts, or as a lock.
CREATE TABLE towpath.queue (
    name        text COLLATE "C" PRIMARY KEY,
    blocked     bigint NOT NULL DEFAULT 0,
    scheduled   bigint NOT NULL DEFAULT 0,
    ready       bigint NOT NULL DEFAULT 0,
    running     bigint NOT NULL DEFAULT 0,
    done        bigint NOT NULL DEFAULT 0,
    failed      bigint NOT NULL DEFAULT 0,
    canceled    bigint NOT NULL DEFAULT 0,
    loose       bigint NOT NULL DEFAULT 0,
    paused      smallint NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    why         text,
    capacity    bigint,
    cap         bigint,
    rate_count  bigint,
    rate_period bigint,
    rate_burst  bigint,
    next_at     bigint NOT NULL DEFAULT 0,
    retention   bigint,
    keep        bigint,
    served      bigint NOT NULL DEFAULT 0,
    clock       bigint NOT NULL DEFAULT 0,
    folded      bigint NOT NULL DEFAULT 0,
    listed      boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE towpath.part (
    queue       text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    ready       bigint NOT NULL DEFAULT 0,
    running     bigint NOT NULL DEFAULT 0,
    paused      smallint NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    why         text,
    cap         bigint,
    rate_count  bigint,
    rate_period bigint,
    rate_burst  bigint,
    next_at     bigint NOT NULL DEFAULT 0,
    weight      bigint NOT NULL DEFAULT 1 CHECK (weight > 0),
    served      bigint NOT NULL DEFAULT 0,
    configured  smallint NOT NULL DEFAULT 0 CHECK (configured IN (0, 1)),
    PRIMARY KEY (queue, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX part_open ON towpath.part (queue, served, name)
    WHERE ready > 0 AND paused = 0 AND (cap IS NULL OR running < cap);
CREATE INDEX part_held ON towpath.part (next_at) WHERE ready > 0;
CREATE INDEX part_idle ON towpath.part (queue, name) WHERE ready = 0 AND running = 0 AND configured = 0;

-- The changes of one transaction to the counts of a queue or part. Rows are only inserted, so that no
-- transaction waits for another.
-- active: a job of the part was ready or running during the transaction.
CREATE TABLE towpath.tally (
    queue     text COLLATE "C" NOT NULL,
    part      text COLLATE "C",
    xid       bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint),
    blocked   bigint NOT NULL,
    scheduled bigint NOT NULL,
    ready     bigint NOT NULL,
    running   bigint NOT NULL,
    done      bigint NOT NULL,
    failed    bigint NOT NULL,
    canceled  bigint NOT NULL,
    active    boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tally_queue ON towpath.tally (queue, xid);

-- The present counts.
CREATE VIEW towpath.queue_now AS
SELECT n.name, coalesce(q.blocked, 0) + t.blocked AS blocked, coalesce(q.scheduled, 0) + t.scheduled AS scheduled,
    coalesce(q.ready, 0) + t.ready AS ready, coalesce(q.running, 0) + t.running AS running, coalesce(q.done, 0) + t.done AS done,
    coalesce(q.failed, 0) + t.failed AS failed, coalesce(q.canceled, 0) + t.canceled AS canceled,
    coalesce(q.loose, 0) + t.loose AS loose, coalesce(q.paused, 0) AS paused, q.why, q.capacity, q.cap, q.rate_count,
    q.rate_period, q.rate_burst, coalesce(q.next_at, 0) AS next_at, q.retention, q.keep, coalesce(q.served, 0) AS served,
    coalesce(q.clock, 0) AS clock, coalesce(q.folded, 0) AS folded
FROM (SELECT name FROM towpath.queue WHERE listed UNION SELECT queue FROM towpath.tally) n
LEFT JOIN towpath.queue q ON q.name = n.name
CROSS JOIN LATERAL (
    SELECT coalesce(sum(a.blocked), 0)::bigint AS blocked, coalesce(sum(a.scheduled), 0)::bigint AS scheduled,
        coalesce(sum(a.ready), 0)::bigint AS ready, coalesce(sum(a.running), 0)::bigint AS running,
        coalesce(sum(a.done), 0)::bigint AS done, coalesce(sum(a.failed), 0)::bigint AS failed,
        coalesce(sum(a.canceled), 0)::bigint AS canceled,
        coalesce(sum(a.ready) FILTER (WHERE a.part IS NULL), 0)::bigint AS loose
    FROM towpath.tally a WHERE a.queue = n.name AND a.xid >= coalesce(q.folded, 0)) t;

CREATE VIEW towpath.part_now AS
SELECT n.queue, n.name, coalesce(p.ready, 0) + t.ready AS ready, coalesce(p.running, 0) + t.running AS running,
    coalesce(p.paused, 0) AS paused, p.why,
    CASE WHEN p.name IS NULL AND starts_with(n.name, 'serial:') THEN 1 ELSE p.cap END AS cap,
    p.rate_count, p.rate_period, p.rate_burst, coalesce(p.next_at, 0) AS next_at, coalesce(p.weight, 1) AS weight,
    coalesce(p.served, 0) AS served, coalesce(p.configured, 0) AS configured
FROM (SELECT queue, name FROM towpath.part
      UNION SELECT queue, part FROM towpath.tally WHERE part IS NOT NULL AND active) n
LEFT JOIN towpath.part p ON p.queue = n.queue AND p.name = n.name
LEFT JOIN towpath.queue q ON q.name = n.queue
CROSS JOIN LATERAL (
    SELECT coalesce(sum(a.ready), 0)::bigint AS ready, coalesce(sum(a.running), 0)::bigint AS running
    FROM towpath.tally a WHERE a.queue = n.queue AND a.part = n.name AND a.xid >= coalesce(q.folded, 0)) t;

CREATE TABLE towpath.note (
    key        text COLLATE "C" PRIMARY KEY,
    value      bytea  NOT NULL,
    version    bigint NOT NULL,
    fence      bigint NOT NULL,
    expires_at bigint
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX note_expires ON towpath.note (expires_at) WHERE expires_at IS NOT NULL;

-- Writes one note. `written` is NULL if a process that knows this schema must not write. It is a function,
-- because the note must be read after the lock was taken.
CREATE FUNCTION towpath.put_note(
    name text, content bytea, expect bigint, ttl bigint, known bigint, at bigint,
    OUT now bigint, OUT version bigint, OUT fence bigint, OUT written boolean
) LANGUAGE plpgsql AS $$
DECLARE
    next bigint;
BEGIN
    IF (SELECT m.min_schema > known FROM towpath.meta m) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock('towpath.meta'::regclass::oid::bigint);
    SELECT greatest(l.last_value, coalesce(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)) INTO now
    FROM towpath.last_time l;
    SELECT n.version, n.fence INTO version, fence FROM towpath.note n
    WHERE n.key = name AND (n.expires_at IS NULL OR n.expires_at > now);
    version := coalesce(version, 0);
    written := expect IS NULL OR expect = version;
    IF NOT written THEN
        RETURN;
    END IF;
    next := nextval('towpath.version_seq');
    version := next;
    fence := coalesce(fence, next);
    INSERT INTO towpath.note AS n (key, value, version, fence, expires_at) VALUES (name, content, next, put_note.fence, now + ttl)
    ON CONFLICT (key) DO UPDATE
    SET value = excluded.value, version = excluded.version, fence = excluded.fence, expires_at = excluded.expires_at;
    PERFORM setval('towpath.last_time', now);
END $$;

-- The remains of a deleted job, or of an id that was refused because of another (alias).
CREATE TABLE towpath.tombstone (
    id            text COLLATE "C" PRIMARY KEY,
    seq           bigint NOT NULL,
    state         text COLLATE "C" NOT NULL,
    settled_fence bigint NOT NULL,
    alias         text COLLATE "C",
    until         bigint NOT NULL
);
CREATE INDEX tombstone_until ON towpath.tombstone (until);

-- Results by token, so that every command may be applied twice.
CREATE TABLE towpath.reply (
    token  text COLLATE "C" PRIMARY KEY,
    answer text   NOT NULL,
    until  bigint NOT NULL
);
CREATE INDEX reply_until ON towpath.reply (until);

-- Appends of user transactions with keys, dependencies or groups. The next batch applies them, in this
-- order.
-- failure: the error of an append that cannot be applied.
CREATE TABLE towpath.inbox (
    seq     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ids     text[] COLLATE "C" NOT NULL,
    specs   text   NOT NULL,
    failure text
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX inbox_new ON towpath.inbox (seq) WHERE failure IS NULL;

-- While a commit function runs, this table has a row with which COMMIT fails.
CREATE TABLE towpath.guest (
    one int REFERENCES towpath.meta (one) DEFERRABLE INITIALLY DEFERRED
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
