"""From a claim to its settle: the worker, its buffer, lanes, prefetch and executors."""
