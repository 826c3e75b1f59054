-- When the lock of an owner was last taken. A lock that was taken since the start of the server was not freed by that start.
ALTER TABLE towpath.owner ADD COLUMN taken_at timestamptz NOT NULL DEFAULT clock_timestamp();
