-- Parts can limit appends: the number of waiting jobs, and the appends per time.
ALTER TABLE towpath.part ADD COLUMN capacity bigint, ADD COLUMN append_count bigint, ADD COLUMN append_period bigint,
    ADD COLUMN append_burst bigint, ADD COLUMN append_at bigint NOT NULL DEFAULT 0;
CREATE INDEX part_quota ON towpath.part (queue) WHERE capacity IS NOT NULL OR append_count IS NOT NULL;
-- For the number of scheduled and blocked jobs of a part. `waits` changes only in blocked jobs.
CREATE INDEX turn_part_scheduled ON towpath.turn (queue, part) WHERE ripe = 0 AND part > '';
CREATE INDEX job_part_blocked ON towpath.job (queue, part) WHERE part IS NOT NULL AND waits > 0;
CREATE OR REPLACE VIEW towpath.part_now AS
SELECT n.queue, n.name, coalesce(p.ready, 0) + t.ready AS ready, coalesce(p.running, 0) + t.running AS running,
    coalesce(p.paused, 0) AS paused, p.why,
    CASE WHEN p.name IS NULL AND starts_with(n.name, 'serial:') THEN 1 ELSE p.cap END AS cap,
    p.rate_count, p.rate_period, p.rate_burst, coalesce(p.next_at, 0) AS next_at, coalesce(p.weight, 1) AS weight,
    coalesce(p.served, 0) AS served, coalesce(p.configured, 0) AS configured,
    p.capacity, p.append_count, p.append_period, p.append_burst, coalesce(p.append_at, 0) AS append_at
FROM (SELECT queue, name FROM towpath.part
      UNION SELECT queue, part FROM towpath.tally WHERE part IS NOT NULL AND active) n
LEFT JOIN towpath.part p ON p.queue = n.queue AND p.name = n.name
LEFT JOIN towpath.queue q ON q.name = n.queue
CROSS JOIN LATERAL (
    SELECT coalesce(sum(a.ready), 0)::bigint AS ready, coalesce(sum(a.running), 0)::bigint AS running
    FROM towpath.tally a WHERE a.queue = n.queue AND a.part = n.name AND a.xid >= coalesce(q.folded, 0)) t;
