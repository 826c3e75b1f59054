-- The time at which the lock of an owner was last taken. A start of the server frees only locks that were
-- taken before it.
ALTER TABLE towpath.owner ADD COLUMN taken_at timestamptz NOT NULL DEFAULT clock_timestamp();
