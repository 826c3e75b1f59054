-- Schedules, breakers and depths to warn at are found by the prefix of their notes: each depth becomes a note, and the notes with
-- the names of the others are deleted. A process that needs these notes must not write any more.
INSERT INTO towpath.note (key, value, version, fence)
SELECT 'warn-depth/' || d.key, convert_to(d.value, 'UTF8'), n.version, n.fence
FROM towpath.note n CROSS JOIN LATERAL json_each_text(convert_from(n.value, 'UTF8')::json) d WHERE n.key = 'towpath/warn-depths';
DELETE FROM towpath.note WHERE key IN ('towpath/schedules', 'towpath/breakers', 'towpath/warn-depths');
UPDATE towpath.meta SET min_schema = 11;
