-- Results by token, so that every command may be applied twice. An index on correlation ids.
CREATE TABLE towpath_reply (
    token  TEXT    PRIMARY KEY,
    answer TEXT    NOT NULL,
    until  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX towpath_reply_until ON towpath_reply (until);
CREATE INDEX towpath_job_correlation ON towpath_job (correlation_id) WHERE correlation_id IS NOT NULL;
