"""The ledger of an HTTP server (`towpath serve`)."""
