"""The parts with threads and timers: group commit, heartbeats, delivery of claims to waiters, upkeep."""
