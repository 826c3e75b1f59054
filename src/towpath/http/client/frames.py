"""Parsers for streams of the server: the multipart document of messages, and server-sent events. They take
bytes and return what is complete; nothing here reads or waits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from towpath.http.wire import DequeueResponse, MessageView

MAX_META = 1024 * 1024
"""Bytes of the meta part: attributes of 64 KiB, with escapes."""
MAX_HEAD = 16 * 1024
"""Bytes of the headers of a part."""
MAX_EVENT = 64 * 1024
MAX_SIZE = 2**63 - 1
_BOUNDARY = re.compile(r"""boundary=(?:"([^"\r\n]{1,200})"|([^;,\s"]{1,200}))""", re.IGNORECASE)
_GAP = re.compile(rb"\r?\n\r?\n")
_NAME = re.compile(rb"""form-data\s*;.*?\bname="?([a-z]+)"?""", re.IGNORECASE)


class Malformed(Exception):
    """The bytes do not follow the protocol."""


class MessageHead(NamedTuple):
    """The beginning of a message. `size` bytes of payload follow."""

    view: MessageView
    size: int


class MessageEnd:
    """The end of a payload."""


END: Final = MessageEnd()
Frame = MessageHead | bytes | MessageEnd


def boundary_in(content_type: str) -> bytes:
    """The boundary of a multipart response. Raises `Malformed`."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/") or found is None:
        raise Malformed(f"its content type is {content_type[:100]!r}, not multipart with a boundary")
    return (found[1] or found[2]).encode("latin-1")


class MessageParser:
    """Parts `meta` and `payload` in turn. A payload ends by its Content-Length, so that a message is complete
    before the delimiter of the next one arrives."""

    def __init__(self, boundary: bytes) -> None:
        self._line = b"--" + boundary
        self._buffer = bytearray()
        self._step = self._delimiter
        self._expected = b"meta"
        self._view: MessageView | None = None
        self._left = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes complete. Raises `Malformed`."""
        self._buffer += data
        while not self.ended:
            frame, goes_on = self._step()
            if frame is not None:
                yield frame
            if not goes_on:
                return

    def finish(self) -> None:
        """The connection has ended. Raises `Malformed` unless the document is complete."""
        if not self.ended:
            raise Malformed("the connection ended inside the document of messages")

    def _delimiter(self) -> tuple[Frame | None, bool]:
        """`--boundary` and the end of its line; before it the line end that belongs to the delimiter."""
        start = 2 if self._buffer.startswith(b"\r\n") else 0
        end = start + len(self._line)
        if len(self._buffer) < end + 2:
            seen = bytes(self._buffer[:end])
            if not ((b"\r\n" + self._line).startswith(seen) or self._line.startswith(seen)):
                raise Malformed("a delimiter is missing behind a part; its Content-Length may be wrong")
            return None, False
        if self._buffer[start:end] != self._line:
            raise Malformed("a delimiter is missing behind a part; its Content-Length may be wrong")
        after = bytes(self._buffer[end : end + 2])
        if after == b"--":
            if self._expected != b"meta":
                raise Malformed("the document ends without the payload of its last message")
            self.ended = True
            return None, False
        if after != b"\r\n":
            raise Malformed("a delimiter is not followed by a line end")
        # The line end stays: headers may be absent, and `\r\n\r\n` ends them.
        del self._buffer[:end]
        self._step = self._head
        return None, True

    def _head(self) -> tuple[Frame | None, bool]:
        at = self._buffer.find(b"\r\n\r\n")
        if at > MAX_HEAD or (at < 0 and len(self._buffer) > MAX_HEAD):
            raise Malformed(f"the headers of a part have more than {MAX_HEAD} bytes")
        if at < 0:
            return None, False
        headers = _headers(bytes(self._buffer[:at]))
        del self._buffer[: at + 4]
        name = _NAME.match(headers.get(b"content-disposition", b""))
        if name is None or name[1] != self._expected:
            raise Malformed(f"a part is not the expected {self._expected.decode()}")
        if self._expected == b"meta":
            self._expected, self._step = b"payload", self._meta
            return None, True
        assert self._view is not None
        self._expected, self._step = b"meta", self._payload
        self._left = _length(headers.get(b"content-length"))
        return MessageHead(self._view, self._left), True

    def _meta(self) -> tuple[Frame | None, bool]:
        at = self._buffer.find(b"\r\n" + self._line)
        if at > MAX_META or (at < 0 and len(self._buffer) > MAX_META + len(self._line) + 2):
            raise Malformed(f"the meta part has more than {MAX_META} bytes")
        if at < 0:
            return None, False
        try:
            self._view = msgspec.json.decode(bytes(self._buffer[:at]), type=DequeueResponse).message
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"the meta part is not that of a message: {error}") from None
        del self._buffer[:at]
        self._step = self._delimiter
        return None, True

    def _payload(self) -> tuple[Frame | None, bool]:
        if self._left == 0:
            self._step = self._delimiter
            return END, True
        piece = bytes(self._buffer[: self._left])
        if not piece:
            return None, False
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        return piece, True


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = [line.partition(b":") for line in head.split(b"\r\n") if line]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _length(text: bytes | None) -> int:
    if text is None or re.fullmatch(rb"[0-9]{1,19}", text) is None or int(text) > MAX_SIZE:
        raise Malformed("a payload part has no valid Content-Length")
    return int(text)


class EventParser:
    """Server-sent events; comments are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """(name, data) of each event that these bytes complete. Raises `Malformed`."""
        self._buffer += data
        while (gap := _GAP.search(self._buffer)) is not None:
            lines = bytes(self._buffer[: gap.start()]).splitlines()
            del self._buffer[: gap.end()]
            fields = [line.partition(b":") for line in lines if not line.startswith(b":")]
            content = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
            if content:
                names = [value.strip() for name, _, value in fields if name == b"event"]
                yield (names[-1].decode("latin-1") if names else "message"), b"\n".join(content)
        if len(self._buffer) > MAX_EVENT:
            raise Malformed(f"an event has more than {MAX_EVENT} bytes")
