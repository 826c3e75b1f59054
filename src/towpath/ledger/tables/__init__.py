"""What every ledger made of tables shares: one set of rules over named statements."""
