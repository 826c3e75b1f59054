"""Tables split into shards over several PostgreSQL servers: `towpath shards`. See `docs/shards.md`."""
