-- Suspects, jobs that lost their lease twice or more, return after a delay and have an index of their own.

-- A scheduled job may have the reason `lost`. A CHECK does not affect the stored rows, so its text is
-- changed in place, as the documentation of ALTER TABLE describes; the new indexes below change the
-- version of the schema.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql,
    'WHEN ''scheduled'' THEN reason = ''delay'' OR', 'WHEN ''scheduled'' THEN reason = ''delay'' OR reason = ''lost'' OR')
WHERE type = 'table' AND name = 'towpath_job';
PRAGMA writable_schema = RESET;

DROP INDEX towpath_job_ready;
DROP INDEX towpath_job_parted;
CREATE INDEX towpath_job_ready ON towpath_job (queue, priority, seq, ready_at)
    WHERE state = 'ready' AND part IS NULL AND losses < 2;
CREATE INDEX towpath_job_parted ON towpath_job (queue, part, priority, seq, ready_at)
    WHERE state = 'ready' AND part IS NOT NULL AND losses < 2;
CREATE INDEX towpath_job_suspect ON towpath_job (queue, part, priority, seq, ready_at) WHERE state = 'ready' AND losses >= 2;
