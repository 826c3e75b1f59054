-- Schedules, breakers and depths to warn at are found by the prefix of their notes: each depth becomes a note, and the notes with
-- the names of the others are deleted. A process that needs these notes must not write any more.
INSERT INTO towpath_note (key, value, version, fence)
SELECT 'warn-depth/' || d.key, CAST(CAST(d.value AS TEXT) AS BLOB), n.version, n.fence
FROM towpath_note n, json_each(CAST(n.value AS TEXT)) d WHERE n.key = 'towpath/warn-depths';
DELETE FROM towpath_note WHERE key IN ('towpath/schedules', 'towpath/breakers', 'towpath/warn-depths');
UPDATE towpath_meta SET min_schema = 11;
