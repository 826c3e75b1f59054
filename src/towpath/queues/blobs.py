"""Payloads of any size: written chunk by chunk before their message, and read chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from towpath.core.blobs import CHUNK, MAX_BLOB, JobBlob, PutChunk, blob_of
from towpath.core.blobs import without_blob as without_blob
from towpath.core.checks import MAX_PAYLOAD
from towpath.core.job import Job
from towpath.errors import Described, InvalidInput, UnusableBlob
from towpath.tasks.new_jobs import new_id

INLINE: Final = 256 * 1024
"""A streamed payload of at most so many bytes is stored inline, in the commit of its message."""

Put = Callable[[PutChunk], Awaitable[asyncio.Future[Any]]]
"""Begins to commit a chunk, as soon as there is room for it, and returns the future of its result."""
Read = Callable[[str, int], bytes | None]


class StoredPayload(NamedTuple):
    """A payload that is inline, or in a blob with all of its chunks stored."""

    inline: bytes
    blob: str | None
    size: int

    def fields(self) -> dict[str, Any]:
        """The fields of its spec."""
        if self.blob is None:
            return {"payload": self.inline}
        # A large payload does not outlive the ack of its message by the retention of the queue.
        return {"blob": self.blob, "blob_size": self.size, "retention": 0}


def _too_large(limit: int) -> Exception:
    return InvalidInput(field="payload", value=Described("longer"), expected=f"at most {limit} bytes")


class _Cutter:
    """Cuts a stream of at most `limit` bytes into chunks. A longer one raises `too_large(limit)`."""

    def __init__(self, limit: int, too_large: Callable[[int], Exception]) -> None:
        self._limit, self._too_large = limit, too_large
        self._blob: str | None = None
        self._held: list[bytes] = []
        self._held_size = 0
        self._number = 0
        self._size = 0

    def add(self, piece: object) -> Iterator[PutChunk]:
        """The chunks that the piece completes."""
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidInput(field="payload", value=piece, expected="a stream of bytes")
        data = bytes(piece)
        self._size += len(data)
        if self._size > self._limit:
            raise self._too_large(self._limit)
        while self._held_size + len(data) >= CHUNK:
            rest = CHUNK - self._held_size
            self._held.append(data[:rest])
            yield self._cut()
            data = data[rest:]
        if data:
            self._held.append(data)
            self._held_size += len(data)

    def _cut(self) -> PutChunk:
        self._blob = self._blob or new_id()
        command = PutChunk(self._blob, self._number, b"".join(self._held))
        self._held, self._held_size, self._number = [], 0, self._number + 1
        return command

    def end(self) -> tuple[PutChunk | None, StoredPayload]:
        """The last chunk, if any, and the payload that is stored with it."""
        if not self._number and self._held_size <= INLINE:
            return None, StoredPayload(b"".join(self._held), None, self._size)
        last = self._cut() if self._held else None
        return last, StoredPayload(b"", self._blob, self._size)


def store(pieces: Iterable[object], put: Callable[[PutChunk], object]) -> StoredPayload:
    cutter = _Cutter(MAX_BLOB, _too_large)
    for piece in pieces:
        for chunk in cutter.add(piece):
            put(chunk)
    last, stored = cutter.end()
    if last is not None:
        put(last)
    return stored


async def astore(
    pieces: AsyncIterable[object],
    put: Put,
    limit: int = MAX_BLOB,
    too_large: Callable[[int], Exception] = _too_large,
) -> StoredPayload:
    """As `store`. While a chunk is committed, the next one is read."""
    cutter = _Cutter(limit, too_large)
    pending: asyncio.Future[Any] | None = None
    try:
        async for piece in pieces:
            for chunk in cutter.add(piece):
                if pending is not None:
                    await pending
                pending = await put(chunk)
        last, stored = cutter.end()
        if pending is not None:
            await pending
        if last is not None:
            pending = await put(last)
            await pending
        return stored
    finally:
        if pending is not None and not pending.cancel() and not pending.cancelled():
            pending.exception()  # the error that ends this upload may be another one


def chunks_of(blob: JobBlob, read: Read) -> Iterator[bytes]:
    """The payload in order."""
    number = done = 0
    while done < blob.size:
        data = _found(blob, number, read(blob.id, number))
        number, done = number + 1, done + len(data)
        yield data
        del data  # before the next one is read


async def achunks_of(blob: JobBlob, read: Read) -> AsyncIterator[bytes]:
    """As `chunks_of`, with each read in a thread."""
    number = done = 0
    while done < blob.size:
        data = _found(blob, number, await asyncio.to_thread(read, blob.id, number))
        number, done = number + 1, done + len(data)
        yield data
        del data  # before the next one is read


def _found(blob: JobBlob, number: int, data: bytes | None) -> bytes:
    if data is None:
        raise UnusableBlob(blob=blob.id, why=f"chunk {number} is deleted, with its job")
    return data


class Chunks:
    """The payload of a job in pieces, for `for` and `async for`."""

    def __init__(self, job: Job, read: Read) -> None:
        self._inline = (job.payload,) if job.payload else ()
        self._blob = blob_of(job.headers)
        self._read = read

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._inline) if self._blob is None else chunks_of(self._blob, self._read)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._inline:
            yield piece
        if self._blob is not None:
            async for chunk in achunks_of(self._blob, self._read):
                yield chunk


def is_large(job: Job) -> bool:
    """Is its payload larger than one piece may be?"""
    return job.size > MAX_PAYLOAD


def whole(job: Job, read: Read) -> bytes:
    """The payload of a job in one piece. Raises `InvalidInput` if it is large."""
    if is_large(job):
        message = f"the payload has {job.size} bytes, too many for one piece; read it by chunks()"
        expected = f"at most {MAX_PAYLOAD} bytes"
        raise InvalidInput(field="payload", value=job.size, expected=expected, message=message)
    return b"".join(Chunks(job, read))


def stream_of(payload: object) -> Iterator[object] | None:
    """The pieces of a binary file or an iterator; None for any other payload."""
    if callable(read := getattr(payload, "read", None)):
        return iter(lambda: read(CHUNK), b"")
    return payload if isinstance(payload, Iterator) else None


def astream_of(payload: object) -> AsyncIterator[object] | None:
    """As `stream_of`; an async iterator is a stream too."""
    if isinstance(payload, AsyncIterator):
        return payload
    pieces = stream_of(payload)
    return None if pieces is None else _in_threads(pieces)


async def _in_threads(pieces: Iterator[object]) -> AsyncIterator[object]:
    end = object()
    while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
        yield piece
