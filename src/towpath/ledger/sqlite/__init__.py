"""The embedded ledger: one SQLite file, any number of processes."""

from towpath.ledger.sqlite.ledger import SqliteLedger as SqliteLedger
from towpath.ledger.sqlite.ledger import SqliteOptions as SqliteOptions
