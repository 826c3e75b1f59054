"""Servers that break the protocol: each call ends with a clear error, within its time, without a leak."""

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.surfaces import answer, scripted
from tests.support.waiting import WAIT, until
from towpath.errors import BadResponse, CallFailed, NotAllowed, ServerAway, ServerBusy, TowpathError
from towpath.http.client import DeliveryReceipt

RECEIPT = DeliveryReceipt(queue="q", message_id="1", lease_id="l", meta_etag="e")
DOCUMENT = "Content-Type: multipart/related; boundary=B"
VIEW = (
    b'{"message":{"queue":"q","message_id":"1","attempts":1,"max_attempts":5,"not_visible_until_unix":1,'
    b'"visibility_timeout_seconds":30,"payload_bytes":3,"lease_id":"l","lease_expires_at_unix":1,'
    b'"fencing_token":1,"meta_etag":"e"}}'
)


def message(payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return (
        b'--B\r\nContent-Disposition: form-data; name="meta"\r\n\r\n%b\r\n--B\r\n'
        b'Content-Disposition: form-data; name="payload"\r\nContent-Length: %d\r\n\r\n%b'
        % (VIEW, size, payload)
    )


def forever(connection: socket.socket) -> None:
    """Send nothing until the client closes the connection."""
    connection.recv(1)


def endless(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return send


def stalled(head: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        forever(connection)

    return send


JSON_CALLS: dict[str, Callable[[Any], object]] = {
    "stats": lambda client: client.stats("q"),
    "ack": lambda client: client.ack(RECEIPT),
    "extend": lambda client: client.extend(RECEIPT, 5),
    "enqueue": lambda client: client.enqueue("q", b"1"),
    "acquire": lambda client: client.locks.acquire("k", wait=0),
}
HUGE = 5 * 1024 * 1024
ANSWERS: dict[str, tuple[Any, type[TowpathError]]] = {
    "nothing": (b"", ServerAway),
    "garbage": (b"\x00\xff\r\n\r\n", ServerAway),
    "half a status line": (b"HTTP/1.1 20", ServerAway),
    "not JSON": (answer("200 OK", b"<html>"), BadResponse),
    "wrong JSON": (answer("200 OK", b'{"acked":"yes"}'), BadResponse),
    "a list": (answer("200 OK", b"[]"), BadResponse),
    "invalid UTF-8": (answer("200 OK", b'{"queue":"\xff"}'), BadResponse),
    "deep JSON": (answer("200 OK", b"[" * 200_000), BadResponse),
    "truncated": (answer("200 OK", b"{", length=100), ServerAway),
    "an empty answer": (answer("200 OK"), BadResponse),
    "a redirect": (answer("302 Found", b"", "Location: http://127.0.0.1:1/"), BadResponse),
    "huge headers": (answer("200 OK", b"{}", *[f"X-{n}: {'x' * 4000}" for n in range(60)]), ServerAway),
    "too large": (answer("200 OK", b" " * HUGE), BadResponse),
    "endless": (endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65_536), BadResponse),
    "a proxy": (answer("502 Bad Gateway", b"<html>bad\x1b[2Jgateway"), ServerBusy),
    "an error without a code": (answer("404 Not Found", b"404 page not found"), CallFailed),
    "an error that is endless": (endless(b"HTTP/1.1 500 E\r\n\r\n", b"x" * 65_536), CallFailed),
    "an informational status": (b"HTTP/1.1 199 X\r\n\r\n" * 3, ServerAway),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", BadResponse),
    "a compressed answer": (answer("200 OK", b"\x1f\x8b\x08", "Content-Encoding: gzip"), BadResponse),
}


@pytest.mark.parametrize("call", JSON_CALLS)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_to_calls(connect: Callable[..., Any], name: str, call: str) -> None:
    script, kind = ANSWERS[name]
    with scripted(script) as server, pytest.raises(kind) as caught:
        JSON_CALLS[call](connect(server.address, timeout=10))
    text = str(caught.value)
    assert text.startswith(call)
    assert len(text) < 700
    assert "\x1b" not in text


DOCUMENTS: dict[str, Any] = {
    "not multipart": answer("200 OK", b"{}", "Content-Type: application/json"),
    "no boundary": answer("200 OK", b"", "Content-Type: multipart/related"),
    "an empty document": answer("200 OK", b"--B--\r\n", DOCUMENT),
    "no document": answer("200 OK", b"", DOCUMENT),
    "a truncated payload": answer("200 OK", message(b"abc", 1000), DOCUMENT),
    "a truncated connection": answer("200 OK", message(b"abc"), DOCUMENT, length=10_000),
    "a payload that is longer": answer("200 OK", message(b"abcd", 3) + b"\r\n--B--\r\n", DOCUMENT),
    "endless meta": endless(
        f"HTTP/1.1 200 OK\r\n{DOCUMENT}\r\n\r\n".encode() + message(b"")[:60], b"x" * 65_536
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_messages(connect: Callable[..., Any], name: str) -> None:
    with scripted(DOCUMENTS[name]) as server, pytest.raises((BadResponse, ServerAway)) as caught:
        connect(server.address, timeout=10).dequeue("q").read()
    assert str(caught.value).startswith("dequeue")


def test_a_broken_stream_ends_with_an_error_after_its_messages(connect: Callable[..., Any]) -> None:
    with scripted(answer("200 OK", message(b"abc") + b"\r\n--B", DOCUMENT, length=9999)) as server:
        messages = connect(server.address, timeout=10).subscribe("q")
        assert next(messages).read() == b"abc"
        with pytest.raises((BadResponse, ServerAway)):
            next(messages)


@pytest.mark.parametrize(
    "script",
    [forever, stalled(b"HTTP/1.1 200 OK\r\nX: "), stalled(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")],
    ids=["no answer", "half of the headers", "half of the body"],
)
def test_a_silent_server_is_given_up(connect: Callable[..., Any], script: Any) -> None:
    with scripted(script) as server:
        started = time.monotonic()
        with pytest.raises(ServerAway, match="the time is over"):
            connect(server.address, timeout=1.0).stats("q")
        assert 0.9 < time.monotonic() - started < WAIT / 2


def test_a_slow_body_is_given_up(connect: Callable[..., Any]) -> None:
    """Each piece arrives in time, the whole does not."""
    stopped = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")
        while not stopped.wait(0.1):
            connection.sendall(b" ")

    with scripted(trickle) as server:
        started = time.monotonic()
        with pytest.raises(ServerAway, match="too slowly"):
            connect(server.address, timeout=1.0).stats("q")
        assert time.monotonic() - started < WAIT / 2
        stopped.set()


def test_a_server_that_does_not_wait_is_not_asked_without_end(connect: Callable[..., Any]) -> None:
    waiting = answer("409 Conflict", b'{"error":"waiting","retry_after_seconds":20}')
    end = answer("401 Unauthorized", b'{"error":"unauthorized"}')
    with scripted(waiting, waiting, end) as server:
        started = time.monotonic()
        with pytest.raises(NotAllowed):
            connect(server.address).dequeue("q", wait=None)
        assert time.monotonic() - started >= 1.0
        assert len(server.requests) == 3
    with scripted(waiting) as server:
        assert connect(server.address).dequeue("q", wait=30) is None
        assert len(server.requests) == 2


def test_a_payload_that_stalls_is_given_up(connect: Callable[..., Any]) -> None:
    head = f"HTTP/1.1 200 OK\r\n{DOCUMENT}\r\n\r\n".encode() + message(b"abc", 1_000_000)
    with scripted(stalled(head)) as server:
        found = connect(server.address, timeout=1.0).dequeue("q")
        with pytest.raises(ServerAway, match="the time is over"):
            found.read()


@pytest.mark.parametrize(
    "script",
    [
        answer("200 OK", b"", "Content-Type: text/plain"),
        answer("200 OK", b"event: queue_watch\ndata: []\n\n", "Content-Type: text/event-stream"),
        endless(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: x" * 1000),
    ],
)
def test_events_that_are_wrong(connect: Callable[..., Any], script: Any) -> None:
    with scripted(script) as server, pytest.raises(BadResponse):
        next(connect(server.address, timeout=10).watch("q"))


def test_a_large_payload_is_not_held_in_memory(connect: Callable[..., Any], tmp_path: Path) -> None:
    pieces, piece = 48, b"x" * 1024 * 1024
    head = f"HTTP/1.1 200 OK\r\n{DOCUMENT}\r\n\r\n".encode() + message(b"", pieces * len(piece))
    got: list[int] = []

    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(pieces):
            connection.sendall(piece)
        connection.sendall(b"\r\n--B--\r\n")

    def take(connection: socket.socket) -> None:
        size, end = 0, b""
        while not end.endswith(b"0\r\n\r\n") and (data := connection.recv(65_536)):
            size, end = size + len(data), (end + data)[-5:]
        got.append(size)
        connection.sendall(answer("413 Too Large", b'{"error":"payload_too_large"}'))

    tracemalloc.start()
    try:
        with scripted(send) as server:
            assert connect(server.address).dequeue("q").save(tmp_path / "out") == pieces * len(piece)
        with scripted(take, read=False) as server, pytest.raises(CallFailed, match="payload_too_large"):
            connect(server.address).enqueue("q", (piece for _ in range(pieces)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got[0] > pieces * len(piece)
    assert peak < 12 * len(piece)


def test_no_connection_is_left_open(connect: Callable[..., Any]) -> None:
    """Broken responses of each kind close their connection."""
    with scripted(
        answer("200 OK", message(b"abc", 1_000_000), DOCUMENT, length=10_000_000), keep=True
    ) as server:
        client = connect(server.address, timeout=1.0)
        with pytest.raises(ServerAway):
            client.dequeue("q").read()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with pytest.raises(ServerAway):
                client.dequeue("q").read()
        # The server of this process keeps its side of each connection.
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
