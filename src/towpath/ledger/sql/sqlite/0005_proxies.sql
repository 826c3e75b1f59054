-- A member of a group that was refused because of its key, and the job that represents it. seq: its
-- position among the members. counted: the counter of the group that includes it.
CREATE TABLE towpath_proxy (
    id      TEXT    PRIMARY KEY,
    seq     INTEGER NOT NULL,
    grp     TEXT    NOT NULL,
    job     INTEGER NOT NULL,
    counted TEXT    NOT NULL CHECK (counted IN ('unfinished', 'done', 'failed', 'canceled', 'superseded'))
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_proxy_group ON towpath_proxy (grp, seq);
CREATE INDEX towpath_proxy_job ON towpath_proxy (job);

-- The id by which a job (dst) names a dependency, where another job (src) represents it.
CREATE TABLE towpath_name (
    dst INTEGER NOT NULL,
    id  TEXT    NOT NULL,
    src INTEGER NOT NULL,
    PRIMARY KEY (dst, id)
) STRICT, WITHOUT ROWID;

-- The outcome that a callback of a group follows. Gates are kept after the end of their group, which may
-- be reopened: an older process would delete them, so it must not write any more.
ALTER TABLE towpath_gate ADD COLUMN outcome TEXT;
UPDATE towpath_meta SET min_schema = 5;
-- A closed group whose member was revived waits for this member from now on.
UPDATE towpath_group SET state = 'sealed', outcome = NULL, closed_at = NULL WHERE state = 'closed' AND unfinished > 0;
