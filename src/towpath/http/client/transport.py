"""Two transports below one protocol logic: httpx2 with threads that wait, and httpx2 on an event loop.

The calls of the client are coroutines. With `SyncTransport` no coroutine ever suspends, so `drive` runs it to
its end without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec

from towpath.errors import ServerAway
from towpath.http.client.connection import ClientSettings, Endpoint

T = TypeVar("T")
PIECE = 256 * 1024
"""Bytes that are read from a file at once."""
MAX_CONNECTIONS = 200
KEEPALIVE_SECONDS = 30.0
"""Seconds for which an idle connection is kept. The server closes one after 120 s."""


class Upload(Protocol):
    """A body that is sent piece by piece."""

    async def next(self) -> bytes:
        """The next piece; empty at the end."""
        ...

    def rewind(self) -> bool:
        """Start again; False if that is not possible."""
        ...


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `wait` is the time that the server may take until it answers, besides the timeout; None: the
    time between two pieces of the response has no limit. `repeatable`: a second request does no harm."""

    call: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | Upload = b""
    wait: float | None = 0.0
    repeatable: bool = True


class Incoming(Protocol):
    """A response whose body is read piece by piece."""

    status: int
    headers: httpx2.Headers

    async def piece(self) -> bytes:
        """The next piece; empty at the end."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    suspends: bool
    """Its coroutines suspend: they need an event loop."""

    async def send(self, endpoint: int, request: Outgoing) -> Incoming:
        """The response when its headers have arrived. Raises `ServerAway`."""
        ...

    async def blocking(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that reads or writes a file."""
        ...

    async def pause(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


def drive(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine above a `SyncTransport`."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise AssertionError("a coroutine above a SyncTransport has suspended")


@contextlib.contextmanager
def _translated(request: Outgoing, endpoint: Endpoint) -> Iterator[None]:
    """Errors of httpx2 as ours."""
    try:
        yield
    except httpx2.HTTPError as error:
        unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        late = isinstance(error, httpx2.TimeoutException)
        why = f"{type(error).__name__}: the time is over" if late else str(error) or type(error).__name__
        raise ServerAway(call=request.call, server=endpoint.name, why=why, sent=not unsent) from error
    except httpx2.StreamError as error:
        why = f"the response was closed: {type(error).__name__}"
        raise ServerAway(call=request.call, server=endpoint.name, why=why) from error


def _socket_options() -> list[tuple[int, int, int]]:
    """Probes that notice a dead server on a connection that is silent for a long time."""
    found = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if sys.platform == "linux":
        found += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        ]
    return found


def _arguments(settings: ClientSettings, endpoint: Endpoint) -> dict[str, Any]:
    """Of a transport of httpx2. Without TLS no trust store is loaded."""
    return {
        "verify": False if settings.tls is None else settings.tls,
        "trust_env": False,
        "uds": endpoint.socket,
        "limits": httpx2.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_SECONDS,
        ),
        "socket_options": None if endpoint.socket else _socket_options(),
    }


def _request(settings: ClientSettings, endpoint: Endpoint, request: Outgoing, content: Any) -> httpx2.Request:
    headers = [("User-Agent", "towpath"), ("Accept-Encoding", "identity"), *request.headers]
    if settings.token is not None:
        headers.append(("Authorization", f"Bearer {settings.token}"))
    seconds = settings.timeout
    read = None if request.wait is None else request.wait + seconds
    timeout = {"connect": seconds, "pool": seconds, "write": seconds, "read": read}
    url = endpoint.url + request.path
    return httpx2.Request("POST", url, headers=headers, content=content, extensions={"timeout": timeout})


class _SyncIncoming:
    def __init__(self, response: httpx2.Response, request: Outgoing, endpoint: Endpoint) -> None:
        self.status, self.headers = response.status_code, response.headers
        self._response, self._request, self._endpoint = response, request, endpoint
        self._pieces = response.iter_raw()

    async def piece(self) -> bytes:
        with _translated(self._request, self._endpoint):
            return next(self._pieces, b"")

    async def close(self) -> None:
        with _translated(self._request, self._endpoint):
            self._response.close()


class SyncTransport:
    suspends = False

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._transports = [httpx2.HTTPTransport(**_arguments(settings, each)) for each in settings.endpoints]

    async def send(self, endpoint: int, request: Outgoing) -> Incoming:
        place = self._settings.endpoints[endpoint]
        content = request.body if isinstance(request.body, bytes) else self._content(request.body)
        with _translated(request, place):
            built = _request(self._settings, place, request, content)
            response = self._transports[endpoint].handle_request(built)
        return _SyncIncoming(response, request, place)

    @staticmethod
    def _content(upload: Upload) -> Iterator[bytes]:
        while piece := drive(upload.next()):
            yield piece

    async def blocking(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        for transport in self._transports:
            transport.close()


class _AsyncIncoming:
    def __init__(self, response: httpx2.Response, request: Outgoing, endpoint: Endpoint) -> None:
        self.status, self.headers = response.status_code, response.headers
        self._response, self._request, self._endpoint = response, request, endpoint
        self._pieces = response.aiter_raw()

    async def piece(self) -> bytes:
        with _translated(self._request, self._endpoint):
            return await anext(self._pieces, b"")

    async def close(self) -> None:
        with _translated(self._request, self._endpoint):
            await self._response.aclose()


class AsyncTransport:
    suspends = True

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._transports = [
            httpx2.AsyncHTTPTransport(**_arguments(settings, each)) for each in settings.endpoints
        ]

    async def send(self, endpoint: int, request: Outgoing) -> Incoming:
        place = self._settings.endpoints[endpoint]
        content = request.body if isinstance(request.body, bytes) else self._content(request.body)
        with _translated(request, place):
            built = _request(self._settings, place, request, content)
            response = await self._transports[endpoint].handle_async_request(built)
        return _AsyncIncoming(response, request, place)

    @staticmethod
    async def _content(upload: Upload) -> AsyncIterator[bytes]:
        while piece := await upload.next():
            yield piece

    async def blocking(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        for transport in self._transports:
            await transport.aclose()
