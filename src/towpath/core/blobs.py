"""Blobs: payloads that are stored apart from their job, in chunks.

A blob has an id that the client makes. Its chunks are put before the append that names it; the append links
it to its job. A blob without a job is swept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from towpath.core import checks
from towpath.errors import InvalidInput, UnusableBlob

CHUNK = 1024 * 1024
"""The most bytes of a chunk."""
MAX_CHUNKS = 65_536
MAX_BLOB = MAX_CHUNKS * CHUNK
BLOB_TTL = checks.HOUR
"""A blob without a job is swept this long after its last chunk was put."""
SWEPT_CHUNKS = 64
"""The most chunks that one upkeep deletes: their pages are many more than the other rows of an upkeep."""
HEADER = "towpath-blob"
"""The header of a job with a blob. Only an admission writes it."""


class PutChunk(msgspec.Struct, frozen=True, gc=False, tag="put-chunk"):
    """Store a chunk of a blob that no job has yet. Numbers begin with 0. Safe to repeat: a chunk that exists
    with the same data stays as it is."""

    blob: str
    number: int
    data: bytes

    def __post_init__(self) -> None:
        checks.name("blob", self.blob)
        checks.whole("number", self.number, 0, MAX_CHUNKS - 1)
        checks.data("data", self.data, CHUNK)
        if not self.data:
            raise InvalidInput(field="data", value=self.data, expected=f"1 to {CHUNK} bytes")


class BlobRow(msgspec.Struct, frozen=True, gc=False):
    """`job` is the seq of the job that has the blob. Without a job the blob is swept from `until` on."""

    id: str
    job: int | None
    until: int


class BlobFact(NamedTuple):
    """A blob for an append: the seq of its job, and number and length of each chunk, ordered by number."""

    job: int | None
    chunks: Sequence[tuple[int, int]]


class JobBlob(NamedTuple):
    """The blob of a job."""

    id: str
    size: int


def check_blob(id: str, size: int, fact: BlobFact | None) -> None:
    """Raise `UnusableBlob` unless the blob is complete and has no job."""
    chunks = () if fact is None else fact.chunks
    if fact is not None and fact.job is not None:
        raise UnusableBlob(blob=id, why="another job has it")
    missing = next((n for n, (number, _) in enumerate(chunks) if number != n), len(chunks))
    found = sum([length for _, length in chunks])
    if missing < len(chunks) or found < size:
        why = f"chunk {missing} is missing; {size} bytes must be put before the append"
        raise UnusableBlob(blob=id, why=why)
    if found > size:
        raise UnusableBlob(blob=id, why=f"its chunks have {found} bytes, and the append names {size}")


def check_put(command: PutChunk, job: int | None, stored: bytes | None) -> None:
    """Raise `UnusableBlob` if the chunk cannot be put into a blob of this job; `stored` is the data of the
    chunk with this number."""
    if stored is not None and stored != command.data:
        raise UnusableBlob(blob=command.blob, why=f"chunk {command.number} has other data")
    if stored is None and job is not None:
        raise UnusableBlob(blob=command.blob, why="a job has it, so it gets no further chunks")


def header_of(id: str, size: int) -> str:
    return f"{id} {size}"


def blob_of(headers: Mapping[str, str]) -> JobBlob | None:
    """The blob of the job with these headers."""
    text = headers.get(HEADER)
    if text is None:
        return None
    id, _, size = text.partition(" ")
    return JobBlob(id, int(size))


def without_blob(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers as the producer gave them."""
    if HEADER not in headers:
        return headers
    return {name: value for name, value in headers.items() if name != HEADER}


def inconsistencies(
    jobs: Mapping[int, Mapping[str, str]], rows: Iterable[BlobRow], sizes: Mapping[str, int]
) -> Iterator[str]:
    """The violated invariants, from the headers of the jobs by seq and the bytes of the chunks by blob."""
    blobs = {row.id: row for row in rows}
    for id in sorted(blobs.keys() ^ sizes.keys()):
        yield f"blob {id} has no row or no chunks"
    for row in blobs.values():
        named = None if row.job is None else blob_of(jobs.get(row.job, {}))
        if row.job is not None and named != (row.id, sizes.get(row.id)):
            yield f"blob {row.id} differs from the header of its job number {row.job}"
    for seq, headers in jobs.items():
        named = blob_of(headers)
        if named is not None and (named.id not in blobs or blobs[named.id].job != seq):
            yield f"job number {seq} does not have the blob {named.id} of its header"
