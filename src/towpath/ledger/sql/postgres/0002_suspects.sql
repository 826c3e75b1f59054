-- Ready suspects, jobs that lost their lease twice or more, have ripe 3: a claim that takes none does not
-- scan them.
UPDATE towpath.turn t SET ripe = 3 FROM towpath.job j WHERE j.seq = t.seq AND j.losses >= 2 AND t.ripe > 0;
CREATE INDEX turn_suspect ON towpath.turn (queue, part, priority, seq) WHERE ripe = 3;
