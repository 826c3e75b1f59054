"""The ledger in memory, for one process."""

from towpath.ledger.memory.ledger import MemoryLedger as MemoryLedger
