-- Queues that upkeep has found without jobs, settings and parts, and since when: see core.views.QUEUE_KEPT. A row for a queue
-- with jobs or settings means nothing. A process that deletes jobs without deleting such rows, or that expects the rows of
-- queues to stay, must not write any more.
CREATE TABLE towpath.unused (
    name  text COLLATE "C" PRIMARY KEY,
    since bigint NOT NULL
);
CREATE INDEX unused_since ON towpath.unused (since, name);
UPDATE towpath.meta SET min_schema = 12;
