"""Received messages: the payload as it arrives, and the settlement. Coroutines, as in `calls`; the classes
for users are in `messages`."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any

import msgspec

from towpath.errors import BadResponse, InvalidInput, ServerAway, TowpathError
from towpath.http.client import requests
from towpath.http.client.frames import Frame, Malformed, MessageEnd, MessageHead, MessageParser, boundary_in
from towpath.http.client.requests import DeliveryReceipt, Span
from towpath.http.client.transport import Incoming, Outgoing
from towpath.http.wire import AckResponse, ExtendResponse, NackResponse

if TYPE_CHECKING:
    from towpath.http.client.calls import Calls

EAGER = 64 * 1024
"""A payload of up to so many bytes is read with its message: its connection is free for the next call."""
SPOOL = 4 * 1024 * 1024
"""Bytes of a payload that are kept in memory when it must be stored; more are in a temporary file."""
UNKNOWN_LEASE = 30.0


class MessageStream:
    """The messages of one response."""

    def __init__(self, calls: Calls, request: Outgoing, response: Incoming) -> None:
        self.calls = calls
        self._request, self._response = request, response
        self._parser: MessageParser | None = None
        self._frames: list[Frame] = []
        self._current: HeldDelivery | None = None
        self._is_single = False

    async def next(self) -> HeldDelivery | None:
        """The next message as soon as its meta part has arrived; None at the end of the document. The payload
        of the message before, as far as it was not read, is stored first."""
        if self._current is not None:
            await self._current.store()
            self._current = None
        frame = await self._frame()
        if frame is None:
            await self.close()
            return None
        if not isinstance(frame, MessageHead):
            raise self._bad("a payload without a message")
        self._current = HeldDelivery(self, frame)
        if frame.size <= EAGER:
            await self._current.store()
        return self._current

    async def single(self) -> HeldDelivery | None:
        """The message of a document of one."""
        self._is_single = True
        try:
            found = await self.next()
            if found is None:
                raise self._bad("no message")
            return found
        except BaseException:
            await self.abandon()
            raise

    async def piece(self) -> bytes:
        """The next piece of the current payload; empty at its end."""
        frame = await self._frame()
        if isinstance(frame, MessageEnd):
            if self._is_single:
                # The rest of the document: the connection is free when it was read.
                while await self._frame() is not None:
                    pass
                await self.close()
            return b""
        if not isinstance(frame, bytes):
            raise self._bad("a payload without an end")
        return frame

    async def _frame(self) -> Frame | None:
        try:
            if self._parser is None:
                self._parser = MessageParser(boundary_in(self._response.headers.get("content-type", "")))
            while not self._frames:
                if self._parser.ended:
                    await self._drain()
                    return None
                data = await self._response.piece()
                if not data:
                    self._parser.finish()
                self._frames += self._parser.feed(data)
        except Malformed as error:
            await self.abandon()
            raise self._bad(str(error)) from None
        except ServerAway:
            await self.abandon()
            raise
        return self._frames.pop(0)

    async def _drain(self) -> None:
        """Read what follows the document: nothing, or the error of a server that failed in the middle."""
        size = 0
        while data := await self._response.piece():
            size += len(data)
            if size > EAGER:
                break

    def _bad(self, why: str) -> BadResponse:
        return BadResponse(call=self._request.call, server=self.calls.server, why=why)

    async def close(self) -> None:
        await self._response.close()

    async def abandon(self) -> None:
        with contextlib.suppress(ServerAway):
            await self._response.close()


class HeldDelivery:
    """A received message. `ends` is the end of its lease by `time.monotonic`."""

    def __init__(self, stream: MessageStream, head: MessageHead) -> None:
        self.view, self.size = head
        self.receipt = DeliveryReceipt.of(head.view)
        self.lease = float(head.view.visibility_timeout_seconds or UNKNOWN_LEASE)
        self.ends = time.monotonic() + self.lease
        self.settled: str | None = None
        """The verb that settled it."""
        self.settling = False
        """An ack or nack was sent, and its answer is awaited."""
        self.lost: TowpathError | None = None
        """Why the lease is lost."""
        self._stream: MessageStream | None = stream
        self.calls = stream.calls
        self._content: bytes | None = None
        self._spool: SpooledTemporaryFile[bytes] | None = None
        self._left = head.size
        self._begun = False

    @property
    def _blocking(self) -> Any:
        return self.calls.transport.blocking

    async def piece(self) -> bytes:
        """The next piece of the payload; empty at its end."""
        self._begun = True
        if self._content is not None:
            piece, self._content = self._content, b""
            return piece
        if self._spool is not None:
            data: bytes = await self._blocking(self._spool.read, EAGER)
            return data
        if self._stream is None:
            if self._left:
                raise InvalidInput(
                    field="payload",
                    value=self.receipt.message_id,
                    expected="read before the message is settled",
                )
            return b""
        piece = await self._stream.piece()
        self._left -= len(piece)
        if not piece:
            self._stream = None
        return piece

    async def read(self) -> bytes:
        """The whole payload. It stays in memory, so that it can be read again."""
        if self._content is None or self._begun:
            if self._begun:
                raise InvalidInput(
                    field="payload", value="read in pieces", expected="read as a whole, or in pieces once"
                )
            pieces = []
            while piece := await self.piece():
                pieces.append(piece)
            self._content, self._begun = b"".join(pieces), False
        return self._content

    async def store(self) -> None:
        """Take the payload out of the stream: small ones into memory, others into a temporary file."""
        if self._stream is None:
            return
        if self.settled is not None:
            while await self._stream.piece():
                pass
            self._stream = None
            return
        if self.size <= EAGER and not self._begun:
            await self.read()
            return
        spool: SpooledTemporaryFile[bytes] = SpooledTemporaryFile(SPOOL)  # noqa: SIM115 - `discard` closes it
        while piece := await self._stream.piece():
            await self._blocking(spool.write, piece)
        await self._blocking(spool.seek, 0)
        self._stream, self._spool, self._left = None, spool, 0

    async def save(self, path: str | os.PathLike[str]) -> int:
        """Write the payload to a new file or over an old one; return its size. The file is complete, or it is
        not there: the payload is written beside it first."""
        folder, name = os.path.split(os.path.abspath(path))
        part = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.part")
        size = 0
        file = await self._blocking(open, part, "xb")
        try:
            try:
                while piece := await self.piece():
                    size += await self._blocking(file.write, piece)
            finally:
                await self._blocking(file.close)
            await self._blocking(os.replace, part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        return size

    async def ack(self) -> None:
        await self._settle("ack", requests.ack(self.receipt))

    async def nack(self, delay: Span = 0.0, reason: str | None = None, defer: bool = False) -> None:
        await self._settle("nack", requests.nack(self.receipt, delay, reason, defer))

    async def extend(self, seconds: Span | None = None) -> ExtendResponse:
        self.check_open()
        started = time.monotonic()
        answer = await self.calls.extend(self.receipt, seconds)
        if answer.visibility_timeout_seconds > 0:
            self.lease = float(answer.visibility_timeout_seconds)
        self.ends = started + self.lease
        self.receipt = msgspec.structs.replace(
            self.receipt, meta_etag=answer.meta_etag or self.receipt.meta_etag
        )
        return answer

    def check_open(self) -> None:
        """Raise if the message was settled."""
        if self.settled is not None:
            raise InvalidInput(
                field="message",
                value=self.receipt.message_id,
                expected=f"open; its {self.settled} was sent before",
            )
        if self.lost is not None:
            raise self.lost

    async def _settle(self, verb: str, request: Outgoing) -> None:
        """Send the receipt, then give up what was not read of the payload."""
        self.check_open()
        self.settling = True
        try:
            await self.calls.json(request, AckResponse if verb == "ack" else NackResponse)
        finally:
            self.settling = False
        self.settled = verb
        if self._stream is not None and self._stream._is_single:
            await self._stream.abandon()
            self._stream = None
        self.discard()

    def discard(self) -> None:
        """Delete the stored payload."""
        if self._spool is not None:
            self._spool.close()
            self._spool, self._content = None, b""
