"""The contract of every ledger as tests, one class per topic. `towpath.testing.ledger_suite` puts them
together."""
