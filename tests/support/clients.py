"""Servers as processes, and clients that share an event loop: thousands of connections in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tests.support.processes import WatchedProcess, command
from tests.support.shell import Shell
from tests.support.waiting import WAIT
from tests.support.wire import MULTIPART, Answer, form, receipt, split_message

BROKEN = (ConnectionError, asyncio.IncompleteReadError)
"""The errors of a connection that has ended before the answer was complete."""


class ServerProcess:
    """A `towpath serve`. The first use of `address` waits until it listens."""

    def __init__(self, watched: WatchedProcess) -> None:
        self.watched = watched
        self.pid = watched.process.pid

    @cached_property
    def address(self) -> str:
        found: str = json.loads(self.watched.until('"address"'))["address"]
        return found

    def files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident(self) -> int:
        """Resident memory in kB."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        [found] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
        return int(found)


@contextmanager
def served(folder: Path, url: str, *options: str) -> Iterator[ServerProcess]:
    """A server on the ledger, which must not print a traceback."""
    arguments = ("serve", "--store", url, "--listen", "127.0.0.1:0", "--json", *options)
    with command(Shell(folder), *arguments) as watched:
        yield ServerProcess(watched)


class Client:
    """A keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: str) -> Self:
        host, _, port = address.removeprefix("http://").rpartition(":")
        async with asyncio.timeout(WAIT):
            return cls(*await asyncio.open_connection(host, int(port)))

    def close(self) -> None:
        self._writer.close()

    def send(self, path: str, body: bytes, content_type: str = "application/json") -> None:
        head = f"POST /v1/queue/{path} HTTP/1.1\r\nHost: test\r\nContent-Type: {content_type}\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def answer(self) -> Answer:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
        body = await self._reader.readexactly(int(headers["content-length"]))
        return Answer(int(lines[0].split()[1]), headers, body)

    async def enqueue(self, queue: str, payload: bytes) -> Answer:
        body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", payload))
        self.send("enqueue", body, MULTIPART)
        return await self.answer()

    async def dequeue(self, queue: str, **fields: Any) -> Answer:
        self.send("dequeue", json.dumps({"queue": queue, "owner": "me", **fields}).encode())
        return await self.answer()

    async def ack(self, message: Mapping[str, Any]) -> Answer:
        self.send("ack", json.dumps(receipt(message)).encode())
        return await self.answer()

    async def stream(self, queue: str, **fields: Any) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """The messages of a subscription as they arrive."""
        self.send("subscribe", json.dumps({"queue": queue, "owner": "me", **fields}).encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        line = b"--" + head.partition(b"boundary=")[2].partition(b"\r\n")[0]
        data = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            data += (await self._reader.readexactly(size + 2))[:-2]
            while data.count(line) >= 3:
                meta, payload, data = split_message(data, line)
                yield meta, payload
