"""Group commit: the committer, the commands that wait for it, and what follows from a batch."""
