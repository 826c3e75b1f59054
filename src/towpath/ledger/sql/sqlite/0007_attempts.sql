-- The last attempts of a job that did not end done: see core.lifecycle.end_attempt. counted: 0 for a claim that was given back
-- without an attempt. A process that deletes jobs without their attempts must not write any more.
CREATE TABLE towpath_attempt (
    seq        INTEGER NOT NULL,
    number     INTEGER NOT NULL,
    counted    INTEGER NOT NULL CHECK (counted IN (0, 1)),
    started_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL,
    owner      TEXT    NOT NULL,
    outcome    TEXT    NOT NULL,
    error      TEXT,
    PRIMARY KEY (seq, number, counted)
) STRICT, WITHOUT ROWID;
UPDATE towpath_meta SET min_schema = 7;
