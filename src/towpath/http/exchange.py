"""One request and its response, over ASGI. Every size that a stranger chooses has a limit here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from towpath.http.access import NOBODY, Principal
from towpath.http.problems import Disconnected, Headers, Problem, bad_argument, bad_body
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
CONNECTION = "towpath.connection"
"""The key of a scope for the connection of the request: an object with `left`."""
MAX_ARGUMENTS = 32
"""Arguments of a query string."""
MAX_WRITE = 256 * 1024
"""Bytes of one write."""
DISCARDED, LATE_DISCARDED, DISCARD_SECONDS = 4 * 1024 * 1024, 64 * 1024 * 1024, 2.0
"""Of a body that is not wanted, so many bytes are read before and after the answer: a client that still
writes would otherwise get a reset connection instead of the answer."""


class Exchange:
    """`correlation` is the usable correlation id of the request, or empty."""

    __slots__ = (
        "_arguments",
        "_receive",
        "_send",
        "complete",
        "correlation",
        "extra",
        "path",
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
        self.path: Mapping[str, str] = {}
        """The parameters in the path."""
        self.principal: Principal = NOBODY
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
            self._arguments = dict(reversed(self._pairs(keep_blank=False)))
        return self._arguments.get(name, "")

    def query(self, kind: type[R]) -> R:
        """The query string as arguments of this type; a list is written with commas. An argument that is
        unknown, repeated or wrong is refused."""
        pairs = self._pairs(keep_blank=True)
        if len(dict(pairs)) < len(pairs):
            raise bad_argument("an argument is given twice: a list is written with commas")
        lists = {field.encode_name for field in msgspec.structs.fields(kind) if field.default == ()}
        found = {name: text.split(",") if name in lists else text for name, text in pairs}
        try:
            return msgspec.convert(found, kind, strict=False)
        except msgspec.ValidationError as error:
            raise bad_argument(str(error)) from None

    def _pairs(self, keep_blank: bool) -> list[tuple[str, str]]:
        query = self.scope["query_string"].decode("latin-1")
        try:
            return (
                parse_qsl(query, keep_blank, max_num_fields=MAX_ARGUMENTS, errors="strict") if query else []
            )
        except ValueError:
            raise bad_body(f"the query string has invalid UTF-8 or over {MAX_ARGUMENTS} fields") from None

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

    async def request(self, kind: type[R], limit: int = MAX_JSON) -> R:
        """The JSON body of a request that lockd does not have: it must have the media type of JSON, so that
        no page in a browser can send it without a permission. An empty body is an object without fields. A
        large body is decoded off the event loop."""
        media = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if media not in ("", "application/json"):
            detail = f"the content type is {media}; it must be application/json"
            raise Problem(415, "unsupported_media_type", detail)
        body = await self.body(limit, lambda: _over(limit))
        return await asyncio.to_thread(decode, body, kind) if len(body) > MAX_JSON else decode(body, kind)

    async def discard(self, limit: int) -> None:
        """Read the rest of a body that is not wanted, at most so many bytes."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                async for piece in self.chunks():
                    size += len(piece)
                    if size > limit:
                        return

    @property
    def left(self) -> bool:
        """The server of this package has noticed that the client has closed the connection. Other servers
        answer it with `disconnected` only."""
        connection = self.scope.get(CONNECTION)
        return connection is not None and bool(connection.left)

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
        """Waits while the client reads too slowly. A large piece is written in several: TLS encrypts a piece
        as a whole, and only the next one waits."""
        at = 0
        while len(piece) - at > MAX_WRITE:
            body = piece[at : at + MAX_WRITE]
            await self._pass({"type": "http.response.body", "body": body, "more_body": True})
            at += MAX_WRITE
        await self._pass({"type": "http.response.body", "body": piece[at:], "more_body": more})

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

    async def answer(self, value: object, status: int = 200, headers: Headers | None = None) -> None:
        """Answer with JSON."""
        correlation = (b"x-correlation-id", self.own_correlation().encode())
        found = [(b"content-type", b"application/json"), correlation, *(headers or ())]
        await self.send(status, found, encode(value))

    async def refuse(self, problem: Problem) -> None:
        """Answer with an error. A client that still writes a large body gets the answer too, because the body
        is read on meanwhile."""
        if not self.complete:
            await self.discard(DISCARDED)
        problem.close = not self.complete
        body = encode(problem.envelope)
        correlation = (b"x-correlation-id", self.own_correlation().encode())
        length = (b"content-length", str(len(body)).encode())
        await self.start(problem.status, [*problem.headers(), correlation, length])
        await self.write(body, more=not self.complete)
        if not self.complete:
            with contextlib.suppress(Disconnected):
                await self.discard(LATE_DISCARDED)
            await self.write(b"", more=False)


def _over(limit: int) -> Problem:
    return Problem(413, "body_too_large", f"the body has more than {limit} bytes")


def _too_large() -> Problem:
    return bad_body(f"the JSON has more than {MAX_JSON} bytes")
