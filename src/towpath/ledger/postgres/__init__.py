"""The ledger for many machines: PostgreSQL 14 or newer."""

from towpath.ledger.postgres.ledger import PostgresLedger as PostgresLedger
