"""How a batch begins: one read for all that most batches need."""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import msgspec

from towpath.core.job import Spec
from towpath.core.lifecycle import Jumps
from towpath.ledger.sqlite.db import SqliteDb, named, one
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import Batch, Ground, QueueRow

_queue_rows = msgspec.json.Decoder(list[QueueRow]).decode


def begin(connection: apsw.Connection, now: int, jumps: Jumps, first: Sequence[Spec] = ()) -> Batch:
    """`first`: specs that the batch begins with. What their append must know is read along."""
    args = (array({spec.queue for spec in first}), array([spec.id for spec in first]))
    schema, least, seq, version, last, queues, known = one(connection, named("begin_batch"), args)
    ground = Ground(schema, least, seq, version, last, _queue_rows(queues) if first else [], bool(known))
    return Batch(SqliteDb(connection), now, jumps, ground, first)
