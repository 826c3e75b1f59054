"""A proxy between a client and a PostgreSQL server that sees statements and injects faults at a chosen one.

A request is a simple query, or the messages of the extended protocol up to Sync. `statements` has the text of
every request in order. The fault of `Rule` is applied to the request with this number."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_RAISE = (
    b"DO $$ BEGIN RAISE query_canceled USING MESSAGE = 'canceling statement due to user request'; END $$\0"
)


class Fault(StrEnum):
    """The faults of one statement. `NONE` only records."""

    NONE = "none"
    WORKER = "worker killed"
    SERVER = "server killed"
    HANG = "connection hangs"
    CANCEL = "statement cancelled"
    ABORT = "plan aborted"
    LOST = "reply lost"


@dataclass
class Rule:
    """Apply `fault` to the statement number `at` (from 0) among those that `matches`. `hook` kills the worker
    or the server, or aborts the plan. `applied` is set when the rule has been used."""

    fault: Fault
    at: int
    hook: Callable[[], None] = lambda: None
    matches: Callable[[str], bool] = lambda text: True
    applied: threading.Event = field(default_factory=threading.Event)
    seen: int = 0

    def hit(self, text: str) -> bool:
        if self.applied.is_set() or not self.matches(text):
            return False
        self.seen += 1
        if self.seen - 1 != self.at:
            return False
        self.applied.set()
        return True


class PgProxy:
    """A proxy in front of one server, on a thread of its own."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.statements: list[str] = []
        self.rule: Rule | None = None
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def drop_all(self) -> None:
        """Close every connection, also those that hang."""
        asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._drop()

    async def _drop(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        first = await _startup(client, to_client)
        server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(_pump(server, to_client))
        try:
            to_server.write(first)
            await to_server.drain()
            if struct.unpack("!I", first[4:8])[0] == _CANCEL:
                return
            await self._requests(client, to_client, server, to_server, back)
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            to_server.close()

    async def _requests(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        back: asyncio.Task[None],
    ) -> None:
        while True:
            request, text = await _request(client, back)
            rule, hit = self.rule, False
            if text:
                self.statements.append(text)
                hit = rule is not None and rule.hit(text)
            if not hit or rule is None:
                to_server.write(request)
                await to_server.drain()
            elif rule.fault is Fault.HANG:
                await asyncio.Event().wait()
            elif rule.fault is Fault.CANCEL:
                to_server.write(_message(b"Q", _RAISE))
                await to_server.drain()
            elif rule.fault is Fault.ABORT:
                await asyncio.to_thread(rule.hook)
                to_server.write(request)
                await to_server.drain()
            elif rule.fault is Fault.SERVER:
                await asyncio.to_thread(rule.hook)
                return
            else:
                await _lose(server, to_server, request, back)
                await asyncio.to_thread(rule.hook)
                return


async def _startup(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> bytes:
    """The first message; encryption is refused."""
    while True:
        size = await client.readexactly(4)
        rest = await client.readexactly(struct.unpack("!I", size)[0] - 4)
        if struct.unpack("!I", rest[:4])[0] not in (_SSL, _GSS):
            return size + rest
        to_client.write(b"N")
        await to_client.drain()


async def _request(client: asyncio.StreamReader, back: asyncio.Task[None]) -> tuple[bytes, str]:
    """The next request and the text of its statement. Ends when the server has closed its side."""
    whole, text = b"", ""
    while True:
        reading = asyncio.create_task(_read(client))
        await asyncio.wait({reading, back}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            raise ConnectionResetError
        kind, body = reading.result()
        whole += _message(kind, body)
        if kind == b"Q":
            return whole, body.rstrip(b"\0").decode()
        if kind == b"P":
            text = body.split(b"\0")[1].decode()
        if kind not in b"PBDEHC":
            return whole, text


async def _read(stream: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind = await stream.readexactly(1)
    (size,) = struct.unpack("!I", await stream.readexactly(4))
    return kind, await stream.readexactly(size - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def _lose(
    server: asyncio.StreamReader, to_server: asyncio.StreamWriter, request: bytes, back: asyncio.Task[None]
) -> None:
    """Pass the request, read the whole answer and keep it."""
    back.cancel()
    await asyncio.gather(back, return_exceptions=True)
    to_server.write(request)
    await to_server.drain()
    while (await _read(server))[0] != b"Z":
        pass


async def _pump(server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await server.read(65_536):
            to_client.write(data)
            await to_client.drain()


@contextmanager
def proxied(port: int) -> Iterator[PgProxy]:
    """A proxy in front of the server at this port."""
    proxy = PgProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
