"""The parsers of streams, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.http.client.frames import (
    MAX_EVENT,
    MAX_HEAD,
    MAX_META,
    EventParser,
    Malformed,
    MessageEnd,
    MessageHead,
    MessageParser,
    boundary_in,
)
from towpath.http.multipart import MessageWriter
from towpath.http.wire import DequeueResponse, MessageView


def view(id: str, size: int) -> MessageView:
    return MessageView(
        queue="q",
        message_id=id,
        attempts=1,
        max_attempts=5,
        not_visible_until_unix=1,
        visibility_timeout_seconds=30,
        payload_bytes=size,
        lease_id="l",
        lease_expires_at_unix=1,
        fencing_token=1,
        meta_etag="e",
    )


def parsed(parser: MessageParser, pieces: list[bytes]) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for piece in pieces:
        for frame in parser.feed(piece):
            if isinstance(frame, MessageHead):
                found.append((frame.view.message_id, b""))
            elif not isinstance(frame, MessageEnd):
                found[-1] = (found[-1][0], found[-1][1] + frame)
    return found


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(1, 400))
def test_documents_of_the_server_in_pieces_of_any_size(payloads: list[bytes], size: int) -> None:
    writer = MessageWriter()
    # The boundary inside a payload is data: its length decides.
    payloads = [payload + writer.after_payload() for payload in payloads]
    document = writer.document(
        [(DequeueResponse(message=view(str(n), len(data))), data) for n, data in enumerate(payloads)]
    )
    if not payloads:
        document = f"--{writer.boundary}--\r\n".encode()
    pieces = [document[at : at + size] for at in range(0, len(document), size)]
    parser = MessageParser(boundary_in(writer.content_type.decode()))
    assert parsed(parser, pieces) == [(str(n), data) for n, data in enumerate(payloads)]
    parser.finish()


def part(name: str, body: bytes, **headers: object) -> bytes:
    lines = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    return f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n{lines}\r\n'.encode() + body


META = part("meta", b'{"message":%b}\n\r\n' % json.dumps({
    "queue": "q", "message_id": "1", "attempts": 1, "max_attempts": 5, "not_visible_until_unix": 1,
    "visibility_timeout_seconds": 1, "payload_bytes": 3, "lease_id": "l", "lease_expires_at_unix": 1,
    "fencing_token": 1, "meta_etag": "e",
}).encode())  # fmt: skip


def test_a_message_is_complete_before_the_next_delimiter() -> None:
    """As lockd writes it: nothing follows the payload until the next message."""
    parser = MessageParser(b"B")
    frames = list(parser.feed(META + part("payload", b"a\r\n", content_length=3)))
    assert isinstance(frames[-1], MessageEnd)
    frames = list(
        parser.feed(b"\r\n" + META + part("payload", b"", content_length=0) + b"\r\n--B--\r\n trailing")
    )
    assert len(frames) == 2
    parser.finish()


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"garbage!", "delimiter is missing"),
        (b"--C\r\n\r\n", "delimiter is missing"),
        (b"--Bxx", "not followed by a line end"),
        (part("payload", b""), "not the expected meta"),
        (part("other", b""), "not the expected meta"),
        (b"--B\r\n\r\n\r\n", "not the expected meta"),
        (META + META, "not the expected payload"),
        (META + b"--B--\r\n", "without the payload"),
        (part("meta", b"{}\r\n--B\r\n"), "not that of a message"),
        (part("meta", b'\xff{"message"\r\n--B\r\n'), "not that of a message"),
        (part("meta", b"[" * 100_000 + b"\r\n--B\r\n"), "not that of a message"),
        (META + part("payload", b"abc"), "Content-Length"),
        (META + part("payload", b"abc", content_length=-1), "Content-Length"),
        (META + part("payload", b"abc", content_length=2**64), "Content-Length"),
        (META + part("payload", b"abc", content_length="3, 4"), "Content-Length"),
        (META + part("payload", b"abcd\r\n--B", content_length=3), "Content-Length may be wrong"),
        (META + part("payload", b"abc\r\n--B\r\n", content_length=4), "Content-Length may be wrong"),
        (b"--B\r\nX: " + b"x" * MAX_HEAD, "more than"),
        (part("meta", b"x" * (MAX_META + 100)), "more than"),
    ],
)
def test_documents_that_are_malformed(document: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        list(MessageParser(b"B").feed(document))


@pytest.mark.parametrize("document", [b"", b"--B", META, META + part("payload", b"ab", content_length=3)])
def test_documents_that_are_truncated(document: bytes) -> None:
    parser = MessageParser(b"B")
    list(parser.feed(document))
    with pytest.raises(Malformed, match="connection ended"):
        parser.finish()


@pytest.mark.parametrize(
    "content_type", ["", "text/html", "multipart/related", "multipart/x; boundary=", "x; boundary=B"]
)
def test_content_types_without_a_boundary(content_type: str) -> None:
    with pytest.raises(Malformed, match="boundary"):
        boundary_in(content_type)


def test_boundaries() -> None:
    assert boundary_in('Multipart/Related; type="a"; boundary="x y"') == b"x y"
    assert boundary_in("multipart/related; boundary=abc; charset=x") == b"abc"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events(end: bytes, size: int) -> None:
    lines = [
        b": keepalive",
        b"",
        b"id: 1",
        b"event: queue_watch",
        b"data: {}",
        b"",
        b"data:a",
        b"data: b",
        b"",
        b"",
    ]
    stream = end.join(lines)
    parser = EventParser()
    found: list[Any] = []
    for at in range(0, len(stream), size):
        found += parser.feed(stream[at : at + size])
    assert found == [("queue_watch", b"{}"), ("message", b"a\nb")]


def test_an_endless_event() -> None:
    with pytest.raises(Malformed, match="more than"):
        list(EventParser().feed(b"data: " + b"x" * MAX_EVENT))
