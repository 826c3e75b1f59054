-- The jobs of a parent in the order of their numbers, of one generation or of all. Jobs without a parent are not in it.
CREATE INDEX job_parent ON towpath.job (parent, seq, generation) WHERE parent IS NOT NULL;
