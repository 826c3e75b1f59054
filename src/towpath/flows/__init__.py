"""Shapes of work on the ledger: plans."""
