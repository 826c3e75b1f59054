-- A group that is open because it was paused, and why.
ALTER TABLE towpath_group ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
ALTER TABLE towpath_group ADD COLUMN why TEXT;
