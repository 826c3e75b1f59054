-- The ledger. Every table has a prefix, so that the user's own tables can be in the same file.
-- Times are microseconds. Text is compared by bytes.

CREATE TABLE towpath_meta (
    one          INTEGER PRIMARY KEY CHECK (one = 1),
    schema       INTEGER NOT NULL,
    min_schema   INTEGER NOT NULL,
    next_seq     INTEGER NOT NULL,
    next_version INTEGER NOT NULL,
    last         INTEGER NOT NULL
) STRICT;
INSERT INTO towpath_meta VALUES (1, 0, 1, 1, 1, 0);

-- The small columns of a job, in the order of core.job.COLUMNS. They change with every claim and settle.
CREATE TABLE towpath_job (
    id               TEXT    NOT NULL UNIQUE,
    seq              INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    part             TEXT,
    kind             TEXT    NOT NULL,
    priority         INTEGER NOT NULL,
    state            TEXT    NOT NULL,
    reason           TEXT    NOT NULL,
    ready_at         INTEGER NOT NULL,
    expires_at       INTEGER,
    attempts         INTEGER NOT NULL,
    failures         INTEGER NOT NULL,
    losses           INTEGER NOT NULL,
    max_attempts     INTEGER NOT NULL,
    max_losses       INTEGER NOT NULL,
    fence            INTEGER NOT NULL,
    owner            TEXT,
    lease_until      INTEGER,
    lease_len        INTEGER,
    settled_fence    INTEGER NOT NULL,
    settled_as       TEXT,
    cancel_requested TEXT,
    timeout          INTEGER,
    retention        INTEGER,
    purge_at         INTEGER,
    waits            INTEGER NOT NULL,
    "group"          TEXT,
    parent           TEXT,
    generation       INTEGER NOT NULL,
    key              TEXT,
    key_policy       TEXT,
    progress_done    INTEGER,
    progress_total   INTEGER,
    correlation_id   TEXT,
    created_at       INTEGER NOT NULL,
    started_at       INTEGER,
    finished_at      INTEGER,
    size             INTEGER NOT NULL,
    content_type     TEXT    NOT NULL,
    -- Comparisons, not IN: a list of three or more is a table that SQLite builds for every statement, 4 µs a job.
    CHECK (CASE state
        WHEN 'ready'     THEN reason = '' OR reason = 'retry' OR reason = 'snoozed' OR reason = 'released' OR reason = 'lost'
                           OR reason = 'revived'
        WHEN 'running'   THEN reason = ''
        WHEN 'done'      THEN reason = ''
        WHEN 'blocked'   THEN reason = '' OR reason = 'revived'
        WHEN 'scheduled' THEN reason = 'delay' OR reason = 'retry' OR reason = 'snoozed' OR reason = 'refused'
                           OR reason = 'released' OR reason = 'revived'
        WHEN 'failed'    THEN reason = 'exhausted' OR reason = 'fatal' OR reason = 'lost' OR reason = 'expired'
                           OR reason = 'dependency'
        WHEN 'canceled'  THEN reason = 'requested' OR reason = 'handler' OR reason = 'superseded' OR reason = 'aborted'
                           OR reason = 'dependency'
        ELSE 0 END),
    CHECK ((state = 'blocked') = (waits > 0)),
    CHECK ((state = 'running') = (owner IS NOT NULL) AND (owner IS NULL) = (lease_until IS NULL)),
    CHECK ((state = 'done' OR state = 'failed' OR state = 'canceled') = (finished_at IS NOT NULL)),
    CHECK (settled_fence <= fence AND attempts >= 0 AND waits >= 0)
) STRICT;
-- ready_at is in the index so that the oldest ready job of a queue is found without a read of the table.
CREATE INDEX towpath_job_ready     ON towpath_job (queue, priority, seq, ready_at) WHERE state = 'ready' AND part IS NULL;
CREATE INDEX towpath_job_parted    ON towpath_job (queue, part, priority, seq, ready_at) WHERE state = 'ready' AND part IS NOT NULL;
CREATE INDEX towpath_job_scheduled ON towpath_job (queue, ready_at) WHERE state = 'scheduled';
CREATE INDEX towpath_job_leased    ON towpath_job (lease_until) WHERE state = 'running';
CREATE INDEX towpath_job_expiring  ON towpath_job (expires_at)
    WHERE expires_at IS NOT NULL AND state IN ('blocked', 'scheduled', 'ready');
CREATE INDEX towpath_job_purgeable ON towpath_job (queue, purge_at) WHERE purge_at IS NOT NULL;
CREATE INDEX towpath_job_failed    ON towpath_job (queue) WHERE state = 'failed';
CREATE INDEX towpath_job_group     ON towpath_job ("group") WHERE "group" IS NOT NULL;
CREATE INDEX towpath_job_key       ON towpath_job (key) WHERE key IS NOT NULL;

-- Payload, headers, result, error, cursor: never touched by claim or settle.
-- slot = seq * 8192 + what * 1024 + n: part n (at most 1 MiB) of payload 0, headers 1, result 2, error 3, cursor 4.
CREATE TABLE towpath_body (
    slot INTEGER PRIMARY KEY,
    data BLOB NOT NULL
) STRICT;

CREATE TABLE towpath_edge (
    src        INTEGER NOT NULL,
    dst        INTEGER NOT NULL,
    run_anyway INTEGER NOT NULL CHECK (run_anyway IN (0, 1)),
    PRIMARY KEY (src, dst)
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_edge_dst ON towpath_edge (dst, src, run_anyway);

CREATE TABLE towpath_gate (
    src        TEXT    NOT NULL,
    dst        INTEGER NOT NULL,
    run_anyway INTEGER NOT NULL CHECK (run_anyway IN (0, 1)),
    PRIMARY KEY (src, dst)
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_gate_dst ON towpath_gate (dst, src);

CREATE TABLE towpath_group (
    id         TEXT    PRIMARY KEY,
    state      TEXT    NOT NULL CHECK (state IN ('open', 'sealed', 'aborting', 'closed')),
    outcome    TEXT    CHECK (outcome IN ('done', 'failed', 'canceled')),
    on_failure TEXT    NOT NULL CHECK (on_failure IN ('continue', 'abort')),
    total      INTEGER NOT NULL,
    unfinished INTEGER NOT NULL CHECK (unfinished >= 0),
    done       INTEGER NOT NULL,
    failed     INTEGER NOT NULL,
    canceled   INTEGER NOT NULL,
    superseded INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    closed_at  INTEGER,
    CHECK ((state = 'closed') = (outcome IS NOT NULL) AND (outcome IS NULL) = (closed_at IS NULL)),
    CHECK (total = unfinished + done + failed + canceled + superseded)
) STRICT, WITHOUT ROWID;

CREATE INDEX towpath_group_closed ON towpath_group (closed_at) WHERE state = 'closed';

-- The callbacks of a group. A table of its own, because the counters of the group change with every
-- member.
CREATE TABLE towpath_then (
    id    TEXT PRIMARY KEY,
    specs TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE towpath_key (
    namespace TEXT    NOT NULL,
    key       TEXT    NOT NULL,
    id        TEXT    NOT NULL,
    seq       INTEGER NOT NULL,
    until     INTEGER NOT NULL,
    runner    INTEGER,
    PRIMARY KEY (namespace, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_key_until ON towpath_key (until) WHERE until > 0;

-- Exact counts per state, updated in the transaction that changes them. loose: ready jobs without a part.
CREATE TABLE towpath_queue (
    name        TEXT    PRIMARY KEY,
    blocked     INTEGER NOT NULL CHECK (blocked >= 0),
    scheduled   INTEGER NOT NULL CHECK (scheduled >= 0),
    ready       INTEGER NOT NULL CHECK (ready >= 0),
    running     INTEGER NOT NULL CHECK (running >= 0),
    done        INTEGER NOT NULL CHECK (done >= 0),
    failed      INTEGER NOT NULL CHECK (failed >= 0),
    canceled    INTEGER NOT NULL CHECK (canceled >= 0),
    loose       INTEGER NOT NULL CHECK (loose BETWEEN 0 AND ready),
    paused      INTEGER NOT NULL CHECK (paused IN (0, 1)),
    why         TEXT,
    capacity    INTEGER,
    cap         INTEGER,
    rate_count  INTEGER,
    rate_period INTEGER,
    rate_burst  INTEGER,
    next_at     INTEGER NOT NULL,
    retention   INTEGER,
    keep        INTEGER,
    served      INTEGER NOT NULL,
    clock       INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE towpath_part (
    queue       TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    ready       INTEGER NOT NULL CHECK (ready >= 0),
    running     INTEGER NOT NULL CHECK (running >= 0),
    paused      INTEGER NOT NULL CHECK (paused IN (0, 1)),
    why         TEXT,
    cap         INTEGER,
    rate_count  INTEGER,
    rate_period INTEGER,
    rate_burst  INTEGER,
    next_at     INTEGER NOT NULL,
    weight      INTEGER NOT NULL CHECK (weight > 0),
    served      INTEGER NOT NULL,
    configured  INTEGER NOT NULL CHECK (configured IN (0, 1)),
    PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;
-- A part whose cap is reached is not in the index, so that claims do not scan it.
CREATE INDEX towpath_part_open ON towpath_part (queue, served, name)
    WHERE ready > 0 AND paused = 0 AND (cap IS NULL OR running < cap);
CREATE INDEX towpath_part_held ON towpath_part (next_at) WHERE ready > 0;
CREATE INDEX towpath_part_idle ON towpath_part (queue, name) WHERE ready = 0 AND running = 0 AND configured = 0;

CREATE TABLE towpath_note (
    key        TEXT    PRIMARY KEY,
    value      BLOB    NOT NULL,
    version    INTEGER NOT NULL,
    fence      INTEGER NOT NULL,
    expires_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_note_expires ON towpath_note (expires_at) WHERE expires_at IS NOT NULL;

-- The remains of a deleted job, or of an id that was refused because of another (alias).
CREATE TABLE towpath_tombstone (
    id            TEXT    PRIMARY KEY,
    seq           INTEGER NOT NULL,
    state         TEXT    NOT NULL,
    settled_fence INTEGER NOT NULL,
    alias         TEXT,
    until         INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_tombstone_until ON towpath_tombstone (until);
