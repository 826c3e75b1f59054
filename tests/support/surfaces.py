"""The client for coroutines, called as the client that blocks: one test for both surfaces. And servers that
break the protocol."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from tests.support.waiting import WAIT


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


class AsSync:
    """Runs the coroutines of an object on an event loop of its own, and wraps their results."""

    def __init__(self, wrapped: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._wrapped, self._loop = wrapped, loop

    def _result(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(_awaited(value))
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self._result(value(*args, **kwargs))
        is_ours = type(value).__module__.startswith("towpath.http.client.")
        if inspect.isasyncgen(value) or (is_ours and type(value).__name__.startswith("Async")):
            return AsSync(value, self._loop)
        return value

    def __repr__(self) -> str:
        return repr(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return self._result(getattr(self._wrapped, name))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._result(self._wrapped.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        self._result(self._wrapped.__aenter__())
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._result(self._wrapped.__aexit__(kind, error, trace))


Script = Callable[[socket.socket], object]


def request_of(connection: socket.socket) -> bytes:
    """One request with a Content-Length, or chunked."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65_536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(65_536)
    else:
        at = lower.find(b"content-length: ")
        size = int(lower[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
        while len(body) < size:
            body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Scripted:
    """`requests` has the bytes of each request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[bytes] = []


@contextmanager
def scripted(*answers: bytes | Script, keep: bool = False, read: bool = True) -> Iterator[Scripted]:
    """A server that reads a request from each connection, answers with the next of these bytes, the last one
    again and again, and then closes it; with `keep` it stays open. Not `read`: the script reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    found = Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}")
    stopped = threading.Event()
    open_ones: list[socket.socket] = []

    def serve() -> None:
        number = 0
        while not stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(WAIT)
            script = answers[min(number, len(answers) - 1)]
            number += 1
            try:
                if read:
                    found.requests.append(request_of(connection))
                if isinstance(script, bytes):
                    connection.sendall(script)
                else:
                    script(connection)
            except OSError:
                pass
            if keep:
                open_ones.append(connection)
            else:
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        # An accept that waits is not ended by closing its socket.
        socket.create_connection(listener.getsockname()).close()
        thread.join(WAIT)
        listener.close()
        for each in open_ones:
            each.close()
