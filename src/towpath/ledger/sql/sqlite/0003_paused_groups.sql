-- Whether a group is open because it was paused, and the reason.
ALTER TABLE towpath_group ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
ALTER TABLE towpath_group ADD COLUMN why TEXT;
