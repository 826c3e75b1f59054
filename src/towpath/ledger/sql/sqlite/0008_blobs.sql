-- Payloads that are stored apart from their job, in chunks: see core.blobs. A blob without a job is swept from "until" on.
-- A process that deletes jobs without freeing their blobs must not write any more.
CREATE TABLE towpath_blob (
    id    TEXT NOT NULL PRIMARY KEY,
    job   INTEGER,
    until INTEGER NOT NULL,
    CHECK (job IS NULL OR until = 0)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX towpath_blob_job ON towpath_blob (job) WHERE job IS NOT NULL;
CREATE INDEX towpath_blob_until ON towpath_blob (until, id) WHERE job IS NULL;
CREATE TABLE towpath_chunk (
    blob   TEXT NOT NULL,
    number INTEGER NOT NULL,
    data   BLOB NOT NULL,
    UNIQUE (blob, number)
) STRICT;
UPDATE towpath_meta SET min_schema = 8;
