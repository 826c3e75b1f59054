-- Payloads that are stored apart from their job, in chunks: see core.blobs. A blob without a job is swept from "until" on.
-- A process that deletes jobs without freeing their blobs must not write any more.
CREATE TABLE towpath.blob (
    id    text COLLATE "C" PRIMARY KEY,
    job   bigint,
    until bigint NOT NULL,
    CHECK (job IS NULL OR until = 0)
);
CREATE UNIQUE INDEX blob_job ON towpath.blob (job) WHERE job IS NOT NULL;
CREATE INDEX blob_until ON towpath.blob (until, id) WHERE job IS NULL;
CREATE TABLE towpath.chunk (
    blob   text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    data   bytea NOT NULL,
    PRIMARY KEY (blob, number)
);
-- Large payloads are mostly compressed already.
ALTER TABLE towpath.chunk ALTER COLUMN data SET STORAGE EXTERNAL;
UPDATE towpath.meta SET min_schema = 8;
