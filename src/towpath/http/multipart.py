"""Multipart framing: the parts of an enqueue as they arrive, and the document of delivered messages."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from towpath.http.problems import Problem
from towpath.http.wire import MAX_JSON, DequeueResponse, encode

MAX_PARTS = 16
_BOUNDARY = re.compile(r"[\x21-\x7e]{1,200}")
META, PAYLOAD = "meta", "payload"
_VALUE = re.compile(r"[\x20-\x7e]{1,255}")
BINARY: Final = "application/octet-stream"


def boundary_of(content_type: str | None) -> str:
    """The boundary of a multipart request. Raises a `Problem`."""
    kind, options = parse_options_header(content_type or "")
    if not kind.startswith("multipart/"):
        raise Problem(400, "invalid_content_type", "the content type must be multipart/related or form-data")
    boundary: str = options.get("boundary", "")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise Problem(400, "invalid_content_type", "the content type must have a boundary")
    return boundary


class EnqueueParts:
    """Reads the meta part, then the pieces of the payload: first `meta`, then `payload`. Reading stops behind
    the payload, so meta comes first."""

    def __init__(self, boundary: str, read: Callable[[], Awaitable[bytes | None]]) -> None:
        """`read` returns the next piece of the body, None at its end."""
        self._parser = PushMultipartParser(boundary, max_segment_count=MAX_PARTS)
        self._read = read
        self._parsed: Iterator[Any] = iter(())
        self._name: str | None = None

    async def meta(self) -> bytes:
        """The meta part; empty if there is none before the payload."""
        pieces: list[bytes] = []
        size = 0
        while self._name != PAYLOAD and (event := await self._event()) is not None:
            if self._name == META and isinstance(event, bytes):
                size += len(event)
                if size > MAX_JSON:
                    raise Problem(400, "invalid_body", f"meta has more than {MAX_JSON} bytes")
                pieces.append(event)
        return b"".join(pieces)

    async def payload(self) -> AsyncIterator[bytes]:
        """The pieces of the payload."""
        while self._name == PAYLOAD and isinstance(event := await self._event(), bytes):
            yield event

    async def _event(self) -> bytes | bool | None:
        """A piece of the part with the name `_name`; True at its beginning, False at its end; None at the end
        of the body."""
        try:
            while True:
                for event in self._parsed:
                    if isinstance(event, MultipartSegment):
                        self._name = event.name
                        return True
                    return False if event is None else bytes(event)
                piece = await self._read()
                if piece is None:
                    self._parser.close()
                    return None
                self._parsed = self._parser.parse(piece)
        except MultipartError as error:
            raise Problem(400, "multipart_error", str(error)) from None


class MessageWriter:
    """Writes messages as one multipart document. The delimiter follows each payload at once: a reader that
    waits for it gets every message without waiting for the next one."""

    def __init__(self) -> None:
        self.boundary = secrets.token_hex(30)
        self._line = f"--{self.boundary}".encode()
        self._is_first = True

    @property
    def content_type(self) -> bytes:
        return f"multipart/related; boundary={self.boundary}".encode()

    def message(self, meta: DequeueResponse, size: int, number: int | None = None) -> bytes:
        """The bytes before the payload. `number` is the place in a batch of several."""
        content_type = meta.message.payload_content_type
        if _VALUE.fullmatch(content_type) is None:
            content_type = BINARY
        named = (
            ("", "")
            if number is None
            else (f'; filename="meta-{number}.json"', f'; filename="payload-{number}"')
        )
        first, self._is_first = self._is_first, False
        return b"".join(
            (
                self._line if first else b"",
                b'\r\nContent-Disposition: form-data; name="meta"',
                named[0].encode(),
                b"\r\nContent-Type: application/json\r\n\r\n",
                encode(meta),
                b"\r\n",
                self._line,
                b'\r\nContent-Disposition: form-data; name="payload"',
                named[1].encode(),
                f"\r\nContent-Length: {size}\r\nContent-Type: {content_type}\r\n\r\n".encode(),
            )
        )

    def after_payload(self) -> bytes:
        return b"\r\n" + self._line

    def end(self) -> bytes:
        return b"--\r\n"

    def document(self, messages: Iterable[tuple[DequeueResponse, bytes]]) -> bytes:
        """A complete document."""
        found = list(messages)
        pieces: list[bytes] = []
        for number, (meta, payload) in enumerate(found):
            pieces += (self.message(meta, len(payload), number if len(found) > 1 else None), payload)
            pieces.append(self.after_payload())
        return b"".join([*pieces, self.end()])
