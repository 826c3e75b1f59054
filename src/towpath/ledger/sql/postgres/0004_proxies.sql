-- A member of a group that was refused because of its key, and the job that represents it. seq: its
-- position among the members. counted: the counter of the group that includes it.
CREATE TABLE towpath.proxy (
    id      text COLLATE "C" PRIMARY KEY,
    seq     bigint NOT NULL,
    grp     text COLLATE "C" NOT NULL,
    job     bigint NOT NULL,
    counted text COLLATE "C" NOT NULL CHECK (counted IN ('unfinished', 'done', 'failed', 'canceled', 'superseded'))
);
CREATE INDEX proxy_group ON towpath.proxy (grp, seq);
CREATE INDEX proxy_job ON towpath.proxy (job);

-- The id by which a job (dst) names a dependency, where another job (src) represents it.
CREATE TABLE towpath.name (
    dst bigint NOT NULL,
    id  text COLLATE "C" NOT NULL,
    src bigint NOT NULL,
    PRIMARY KEY (dst, id)
);

-- The outcome that a callback of a group follows. Gates are kept after the end of their group, which may
-- be reopened: an older process would delete them, so it must not write any more.
ALTER TABLE towpath.gate ADD COLUMN outcome text COLLATE "C";
UPDATE towpath.meta SET min_schema = 4;
-- A closed group whose member was revived waits for this member from now on.
UPDATE towpath."group" SET state = 'sealed', outcome = NULL, closed_at = NULL WHERE state = 'closed' AND unfinished > 0;
