"""Operating a fleet: schedules, workers, breakers, progress, bandwidth and maintenance of a ledger."""
