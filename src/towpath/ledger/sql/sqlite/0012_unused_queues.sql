-- Queues that upkeep has found without jobs, settings and parts, and since when: see core.views.QUEUE_KEPT. A row for a queue
-- with jobs or settings means nothing. A process that deletes jobs without deleting such rows must not write any more.
CREATE TABLE towpath_unused (
    name  TEXT    PRIMARY KEY,
    since INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_unused_since ON towpath_unused (since, name);
UPDATE towpath_meta SET min_schema = 12;
