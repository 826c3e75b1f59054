"""Running a fleet: schedules, workers, breakers, progress, bandwidth and the care of a ledger."""
