"""One request and its response, over ASGI. Every size that a stranger chooses has a limit here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from towpath.http.access import UNRESTRICTED, Principal
from towpath.http.problems import Disconnected, Headers, Problem, bad_body
from towpath.http.wire import MAX_JSON, correlation_of, decode, encode
from towpath.tasks.new_jobs import new_id

Scope = Any
"""A mapping; litestar and uvicorn have different types for it."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
R = TypeVar("R", bound=msgspec.Struct)

_CLOSED = "unable to perform operation on"
"""The beginning of the error of uvloop for a write to a connection that the client has closed, in the moment
before uvicorn notices it."""
MAX_ARGUMENTS = 32
"""Arguments of a query string."""
DISCARDED, DISCARD_SECONDS = 4 * 1024 * 1024, 2.0
"""Of a body that is too large, so many bytes are read before the answer: a client that still writes would
otherwise get a reset connection instead of the answer."""


class Exchange:
    """`correlation` is the usable correlation id of the request, or empty."""

    __slots__ = (
        "_arguments",
        "_receive",
        "_send",
        "complete",
        "correlation",
        "extra",
        "principal",
        "scope",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, extra: Headers) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self._arguments: dict[str, str] | None = None
        self.extra = extra
        """Headers of every response."""
        self.principal: Principal = UNRESTRICTED
        self.correlation = correlation_of(self.header(b"x-correlation-id"))
        self.complete = False
        """The body was read to its end."""
        self.started = False
        """The head of the response was sent."""

    def header(self, name: bytes) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    def own_correlation(self) -> str:
        """The correlation id of the request, or a new one."""
        self.correlation = self.correlation or new_id()
        return self.correlation

    def argument(self, name: str) -> str:
        """An argument of the query string, or empty."""
        if self._arguments is None:
            query = self.scope["query_string"].decode("latin-1")
            try:
                pairs = parse_qsl(query, max_num_fields=MAX_ARGUMENTS, errors="strict") if query else []
            except ValueError:
                raise bad_body(f"the query string has invalid UTF-8 or over {MAX_ARGUMENTS} fields") from None
            self._arguments = dict(reversed(pairs))
        return self._arguments.get(name, "")

    async def piece(self) -> bytes | None:
        """The next piece of the body, which is not empty; None at its end."""
        while not self.complete:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Disconnected
            self.complete = not event.get("more_body", False)
            piece: bytes = event.get("body", b"")
            if piece:
                return piece
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of the body."""
        while (piece := await self.piece()) is not None:
            yield piece

    async def body(self, limit: int, too_large: Callable[[], Problem]) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in self.chunks():
            size += len(piece)
            if size > limit:
                raise too_large()
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def json(self, kind: type[R], required: bool = False) -> R:
        """The JSON body as a request of this kind. An empty body is refused if it is `required`."""
        body = await self.body(MAX_JSON, _too_large)
        if required and not body.strip():
            raise bad_body("the body must be a JSON object")
        return decode(body, kind)

    async def discard(self) -> None:
        """Read the rest of a body that is not wanted, as far as it is small."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                async for piece in self.chunks():
                    size += len(piece)
                    if size > DISCARDED:
                        return

    async def disconnected(self) -> None:
        """Return when the client has closed the connection. The body was read before."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._pass(
            {"type": "http.response.start", "status": status, "headers": [*headers, *self.extra]}
        )

    async def write(self, piece: bytes, more: bool = True) -> None:
        """Waits while the client reads too slowly."""
        await self._pass({"type": "http.response.body", "body": piece, "more_body": more})

    async def _pass(self, event: dict[str, Any]) -> None:
        try:
            await self._send(event)
        except RuntimeError as error:
            if not str(error).startswith(_CLOSED):
                raise
            raise Disconnected from None

    async def send(self, status: int, headers: Headers, body: bytes = b"") -> None:
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.write(body, more=False)

    async def reply(
        self, value: msgspec.Struct, correlation: str = "", headers: Headers | None = None
    ) -> None:
        """Answer 200 with a JSON object."""
        found: Headers = [(b"content-type", b"application/json"), *(headers or ())]
        if correlation:
            found.append((b"x-correlation-id", correlation.encode()))
        await self.send(200, found, encode(value))

    async def refuse(self, problem: Problem) -> None:
        if not self.complete:
            await self.discard()
            problem.close = not self.complete
        headers = [*problem.headers(), (b"x-correlation-id", self.own_correlation().encode())]
        await self.send(problem.status, headers, encode(problem.envelope))


def _too_large() -> Problem:
    return bad_body(f"the JSON has more than {MAX_JSON} bytes")
