"""Messages with payloads from files and iterators, which are stored and read chunk by chunk."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from msgspec.structs import replace

from tests.support.shell import Shell
from tests.support.streams import blocks
from tests.support.waiting import WAIT
from towpath import App
from towpath.commands import PutChunk, Spec, Upkeep
from towpath.core.blobs import CHUNK, HEADER
from towpath.core.checks import MAX_PAYLOAD
from towpath.errors import InvalidInput, UnusableBlob
from towpath.queues.blobs import INLINE
from towpath.queues.message import Message


def got(app: App) -> Message:
    message = app.queue("orders").get()
    assert message is not None
    return message


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, CHUNK, 2 * CHUNK + 3])
def test_a_file(app: App, size: int) -> None:
    content = b"".join(blocks(size))
    app.queue("orders").put(io.BytesIO(content), headers={"h": "1"})
    message = got(app)
    assert (message.payload, message.record.size) == (content, size)
    assert dict(message.headers) == {"h": "1"}
    assert message.content_type == "application/octet-stream"
    assert b"".join(message.chunks()) == content
    assert (HEADER in message.record.headers) == (size > INLINE)
    message.ack()


def test_an_iterator_of_any_pieces(app: App) -> None:
    pieces: list[Any] = [b"a" * (2 * CHUNK + 5), b"", bytearray(b"b"), memoryview(b"c" * CHUNK)]
    app.queue("orders").put(iter(pieces))
    message = got(app)
    assert message.payload == b"".join(pieces)
    assert [len(chunk) for chunk in message.chunks()] == [CHUNK, CHUNK, CHUNK, 6]


@pytest.mark.parametrize("kind", ["file", "iterator", "async iterator"])
def test_the_async_form(app: App, kind: str) -> None:
    size = 2 * CHUNK + 9
    content = b"".join(blocks(size))

    async def stream() -> AsyncIterator[bytes]:
        for block in blocks(size):
            yield block

    async def main() -> None:
        payloads: dict[str, Any] = {
            "file": io.BytesIO(content),
            "iterator": blocks(size),
            "async iterator": stream(),
        }
        await app.queue("orders").aput(payloads[kind])
        async with await app.queue("orders").aget(wait=None) as message:
            assert b"".join([chunk async for chunk in message.chunks()]) == content
            await message.aack()

    asyncio.run(main())


def test_json_and_text_of_a_streamed_payload(app: App) -> None:
    app.queue("orders").put(iter([b'{"a": "', b"x" * INLINE, b'"}']), content_type="application/json")
    message = got(app)
    assert message.json()["a"] == "x" * INLINE
    assert message.text().startswith('{"a": "xxx')
    assert message.content_type == "application/json"


def test_a_stream_of_anything_but_bytes(app: App) -> None:
    with pytest.raises(InvalidInput, match="payload is 'text'; it must be a stream of bytes"):
        app.queue("orders").put(iter(["text"]))
    with pytest.raises(InvalidInput, match="a stream of bytes"):
        app.queue("orders").put(io.StringIO("text"))
    assert app.queue("orders").get() is None


def test_an_error_of_the_stream_leaves_no_message(app: App) -> None:
    def broken() -> Iterator[bytes]:
        yield b"1" * (2 * CHUNK)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        app.queue("orders").put(broken())
    assert app.queue("orders").get() is None
    assert len(app.ledger.dump()["chunks"]) == 2


def test_an_error_of_an_async_stream_leaves_no_message(app: App) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"1" * (2 * CHUNK)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(app.queue("orders").aput(broken()))
    assert app.queue("orders").get() is None


@pytest.mark.ledgers("memory", "sqlite")
def test_a_payload_that_is_too_large_for_one_piece(app: App) -> None:
    app.queue("orders").put(blocks(MAX_PAYLOAD + 1))
    message = got(app)
    with pytest.raises(InvalidInput, match=r"the payload has 16777217 bytes, .* read it by chunks"):
        _ = message.payload
    assert sum(map(len, message.chunks())) == MAX_PAYLOAD + 1


@pytest.mark.ledgers("memory", "sqlite")
def test_a_payload_that_is_deleted_while_it_is_read(app: App) -> None:
    app.queue("orders").configure(retention=0)
    app.queue("orders").put(blocks(3 * CHUNK))
    message = got(app)
    chunks = iter(message.chunks())
    next(chunks)
    message.ack()
    app.engine.call(Upkeep())
    with pytest.raises(UnusableBlob, match="chunk 1 is deleted, with its job"):
        next(chunks)


@pytest.mark.ledgers("sqlite", "postgres")
def test_a_stream_is_not_part_of_a_user_transaction(app: App, url: str) -> None:
    """On SQLite the open transaction would exclude the commits of the chunks."""
    wrong = pytest.raises(InvalidInput, match=r"on is .*; it must be left out beside a stream")
    with closing(_connection(url)) as connection:
        with wrong:
            app.queue("orders").put(blocks(1), on=connection)
        with wrong:
            asyncio.run(app.queue("orders").aput(blocks(1), on=connection))


@pytest.mark.ledgers("sqlite", "postgres")
def test_a_user_transaction_may_name_a_blob(app: App, url: str) -> None:
    ledger: Any = app.ledger
    app.engine.call(PutChunk("b", 0, b"12"))
    spec = Spec(id="a", queue="orders", blob="b", blob_size=2)
    with closing(_connection(url)) as connection:
        connection.execute("BEGIN")
        with pytest.raises(UnusableBlob, match="chunk 1 is missing"):
            ledger.append_on(connection, [replace(spec, blob_size=3)])
        ledger.append_on(connection, [spec])
        connection.execute("ROLLBACK")
        assert app.queue("orders").get() is None
        connection.execute("BEGIN")
        ledger.append_on(connection, [spec])
        connection.execute("COMMIT")
    message = app.queue("orders").get(wait=WAIT)
    assert message is not None
    assert message.payload == b"12"


def _connection(url: str) -> Any:
    if url.startswith("postgresql:"):
        return psycopg.connect(url, autocommit=True)
    return apsw.Connection(url.removeprefix("sqlite:///"))


def test_the_commands_show_a_streamed_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    with App(shell.url) as app:
        app.queue("orders").put(iter([b"x" * (INLINE + 1)]))
        id = app.queue("orders").put(blocks(MAX_PAYLOAD + 1))
    first = shell("get", "orders").out
    assert "x" * 100 in first
    assert HEADER not in first
    assert f"{MAX_PAYLOAD + 1} bytes" in shell("get", "orders").out
    assert f"{MAX_PAYLOAD + 1} bytes" in shell("jobs", "show", id).out
