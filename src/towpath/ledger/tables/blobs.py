"""Blobs: their chunks are put, linked to jobs by appends, and swept."""

from __future__ import annotations

from towpath.core.blobs import BLOB_TTL, SWEPT_CHUNKS, BlobFact, PutChunk, check_put
from towpath.core.results import ChunkPut
from towpath.errors import UnusableBlob
from towpath.ledger.tables.database import Db, array
from towpath.ledger.tables.reads import chunk
from towpath.ledger.tables.transaction import Transaction


def put_chunk(tx: Transaction, command: PutChunk) -> ChunkPut:
    blob, number, data = command.blob, command.number, command.data
    held = tx.db.rows("hold_blobs", (array([blob]),), tuple[str, int | None])
    job = held[0][1] if held else None
    stored = chunk(tx.db, blob, number) if held else None
    check_put(command, job, stored)
    if job is None:
        tx.wrote = True
        if not tx.db.count("touch_blob", (blob, tx.now + BLOB_TTL)):
            # Another process has put the first chunk and appended the job since.
            raise UnusableBlob(blob=blob, why="another job has it")
        if stored is None:
            tx.db.put("chunk", [(blob, number, data)])
    return ChunkPut(blob, number)


def blob_facts(db: Db, ids: set[str], statement: str = "hold_blobs") -> dict[str, BlobFact]:
    """The blobs with these ids. `hold_blobs` locks them until the end of the transaction, so that no chunk is
    swept."""
    if not ids:
        return {}
    jobs = dict(db.rows(statement, (array(sorted(ids)),), tuple[str, int | None]))
    chunks: dict[str, list[tuple[int, int]]] = {id: [] for id in jobs}
    for id, number, length in db.rows("chunk_lengths", (array(jobs),), tuple[str, int, int]):
        chunks[id].append((number, length))
    return {id: BlobFact(job, chunks[id]) for id, job in jobs.items()}


def sweep_blobs(tx: Transaction, limit: int) -> int:
    """Delete at most `limit` chunks of blobs without a job that are due, and the blobs without chunks.
    Returns the number of chunks."""
    most = min(limit, SWEPT_CHUNKS)
    count = tx.db.count("sweep_chunks", (tx.now, most)) if most else 0
    if count:
        tx.wrote = True
        # The blobs of the deleted chunks are the first in the order of the sweep.
        tx.db.run("sweep_blobs", (tx.now, count))
    return count
