-- Groups that stop after a failure, the reason `stopped`, and done jobs that a person marked or skipped.
-- A process that cannot read these values must not write any more. All stored rows meet the wider CHECK: they are not scanned.
ALTER TABLE towpath."group" DROP CONSTRAINT group_on_failure_check,
    ADD CONSTRAINT group_on_failure_check CHECK (on_failure IN ('continue', 'abort', 'stop')) NOT VALID;
UPDATE towpath.meta SET min_schema = 9;
