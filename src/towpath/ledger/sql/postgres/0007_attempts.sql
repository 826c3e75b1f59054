-- The last attempts of a job that did not end done: see core.lifecycle.end_attempt. counted: 0 for a claim that was given back
-- without an attempt. A process that deletes jobs without their attempts must not write any more.
CREATE TABLE towpath.attempt (
    seq        bigint NOT NULL,
    number     bigint NOT NULL,
    counted    smallint NOT NULL CHECK (counted IN (0, 1)),
    started_at bigint NOT NULL,
    ended_at   bigint NOT NULL,
    owner      text COLLATE "C" NOT NULL,
    outcome    text COLLATE "C" NOT NULL,
    error      text,
    PRIMARY KEY (seq, number, counted)
);
UPDATE towpath.meta SET min_schema = 7;
