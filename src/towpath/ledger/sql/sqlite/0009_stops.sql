-- Groups that stop after a failure, the reason `stopped`, and done jobs that a person marked or skipped.
-- A process that cannot read these values must not write any more.

-- As in 0004 the text of the CHECKs is changed in place; the new index changes the version of the schema.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(replace(sql,
    'WHEN ''done''      THEN reason = ''''', 'WHEN ''done''      THEN reason = '''' OR reason = ''marked'' OR reason = ''skipped'''),
    'OR reason = ''aborted''', 'OR reason = ''aborted'' OR reason = ''stopped''')
WHERE type = 'table' AND name = 'towpath_job';
UPDATE sqlite_schema SET sql = replace(sql, '(''continue'', ''abort'')', '(''continue'', ''abort'', ''stop'')')
WHERE type = 'table' AND name = 'towpath_group';
PRAGMA writable_schema = RESET;

DROP INDEX towpath_group_closed;
CREATE INDEX towpath_group_closed ON towpath_group (closed_at) WHERE state = 'closed';
UPDATE towpath_meta SET min_schema = 9;
