"""The client of bench/server.py, which costs little, and its servers, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

HOST = "127.0.0.1"
PATIENCE = 60.0
"""Seconds after which a run counts as failed."""
SERVERS = Path(__file__).with_name("servers.py")
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """A program of bench/servers.py in a process of its own. `port` is the number that it prints first."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(SERVERS), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, number: int) -> float:
        """Write a number to the program and return the number that it prints."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return float(self._line())

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def cpu(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def request(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """The bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """A keep-alive connection. `answered` is called with the head and the body of each answer and returns the
    next request, or None at the end. The head is searched for one header and not parsed: the client is to
    cost little beside the server. With `stream`, `answered` is called with each piece that is received."""

    def __init__(self, answered: Callable[[bytes, bytes], bytes | None], stream: bool = False) -> None:
        self._answered = answered
        self._stream = stream
        self._buffer = b""
        self._needed = 0
        self._body_at = 0
        self._transport: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self.ended.cancel()
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server has closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._stream:
            self._answered(b"", data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        while len(self._buffer) >= self._needed and self._take():
            pass

    def _take(self) -> bool:
        """Take one answer from the buffer; False if it is not complete."""
        if not self._needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._body_at = end + 4
            at = self._buffer.find(b"content-length: ", 0, end + 2) + 16
            self._needed = self._body_at + int(self._buffer[at : self._buffer.index(b"\r", at)])
            if len(self._buffer) < self._needed:
                return False
        head, body = self._buffer[: self._body_at], self._buffer[self._body_at : self._needed]
        self._buffer, self._needed = self._buffer[self._needed :], 0
        try:
            if (following := self._answered(head, body)) is not None:
                self._transport.write(following)
            elif not self.ended.done():
                self.ended.set_result(None)
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
        return bool(self._buffer)


async def connect(
    port: int, answered: Callable[[bytes, bytes], bytes | None], stream: bool = False
) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(answered, stream), HOST, port)
    return connection


def checked(head: bytes, body: bytes) -> None:
    if not head.startswith(b"HTTP/1.1 20"):
        raise RuntimeError(f"unexpected answer: {head!r} {body!r}")
