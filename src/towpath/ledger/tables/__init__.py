"""The common code of the table ledgers: one set of rules over named statements."""
