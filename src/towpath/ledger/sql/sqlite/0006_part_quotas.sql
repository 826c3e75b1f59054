-- Parts can limit appends: the number of waiting jobs, and the appends per time.
ALTER TABLE towpath_part ADD COLUMN capacity INTEGER;
ALTER TABLE towpath_part ADD COLUMN append_count INTEGER;
ALTER TABLE towpath_part ADD COLUMN append_period INTEGER;
ALTER TABLE towpath_part ADD COLUMN append_burst INTEGER;
ALTER TABLE towpath_part ADD COLUMN append_at INTEGER NOT NULL DEFAULT 0;
CREATE INDEX towpath_job_part_waits ON towpath_job (queue, part) WHERE part IS NOT NULL AND state IN ('blocked', 'scheduled');
