"""Bytes that attack the framing, the paths and the patience of the server: 4xx or a closed connection, never
5xx, no warning in the log, and nothing is kept."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.support.levels import levels, returned, server_context
from tests.support.waiting import until
from tests.support.wire import MULTIPART, Remote, Wire, form, receipt
from towpath.http import server

HEAD = b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"queue":"a"}'
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def no_trace(local: Remote, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every test leaves the server as it was, and its log without a warning."""
    before = levels(local)
    yield
    assert local.post("/healthz").status == 200
    returned(local, before)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def answer_and_end(local: Remote, data: bytes) -> list[int]:
    """The statuses of the answers until the server closes the connection."""
    found = []
    with local.connect() as wire:
        wire.send(data)
        try:
            while True:
                found.append(wire.answer().status)
        except (EOFError, ConnectionResetError):
            return found


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: identity, chunked\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 13\r\n\r\n" + CHUNKS,
        HEAD + b"Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        HEAD + b"Content-Length: 13\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 13, 13\r\n\r\n" + BODY,
        HEAD + b"Content-Length: +13\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 0xd\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 1 3\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
        HEAD + b"Content-Length: \r\n\r\n",
        HEAD + b"X-A: 1\r\n  Transfer-Encoding: chunked\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X-A: 1\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X-A: 1\rContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X-A: a\0b\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b": x\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"Host: y\r\nContent-Length: 13\r\n\r\n" + BODY,
        CHUNKED + b"d\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"0xd\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n" + BODY,
        CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"d\r\n" + BODY + b"0\r\n\r\n",
        b"POST /v1/queue/stats HTTP/1.1\nHost: x\nContent-Length: 13\n\n" + BODY,
        b"POST /v1/queue/stats HTTP/1.1\r\nContent-Length: 13\r\n\r\n" + BODY,
        b"POST /v1/queue/stats HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        b"Content-Length: 13\r\n\r\n" + BODY,
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"post /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST http://evil HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST \\v1\\queue\\stats HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/queue/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST ?queue=a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100,
    ],
)
def test_framing_that_a_proxy_may_read_otherwise(
    local: Remote, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """One answer, and the connection ends: the bytes behind it are no second request."""
    monkeypatch.setattr(server, "LINGER", 0.05)
    assert answer_and_end(local, data + HEALTH) == [400]


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + CHUNKS,
        CHUNKED + b"d;a=b\r\n" + BODY + b"\r\n0;c\r\n\r\n",
        CHUNKED + b"d;" + b"a" * 200_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"d\r\n" + BODY + b"\r\n0\r\nX-Trailer: 1\r\nHost: y\r\n\r\n",
        HEAD + b"Transfer-Encoding: CHUNKED\r\n\r\n" + CHUNKS,
        HEAD + b"Content-Length: 13\r\n\r\n" + BODY,
        b"\r\n\r\n" + HEAD + b"Content-Length: 13\r\n\r\n" + BODY,
        b"POST http://evil/v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n" + BODY,
    ],
)
def test_unusual_requests_that_are_valid(local: Remote, data: bytes) -> None:
    with local.connect() as wire:
        wire.send(data + HEALTH)
        assert wire.answer().json["queue"] == "a"
        assert wire.answer().status == 200


@pytest.mark.parametrize(
    "path",
    [
        "//v1/queue/stats",
        "/v1//queue/stats",
        "/v1/queue/stats/",
        "/v1/./queue/stats",
        "/v1/../v1/queue/stats",
        "/v1/%2e%2e/v1/queue/stats",
        "/v1/queue/%2E/stats",
        "/v1/queue/..%2fqueue/stats",
        "/v1%2Fqueue%2Fstats",
        "/v1/queue%5cstats",
        "/v1/queue/stat%73",
        "/v1/queue/stats%00",
        "/v1/queue/stats%0d%0aX:1",
        "/v1/queue/stats;a=b",
        "/%ff",
        "/%",
        "/%zz",
        "*",
        "/{path}",
        "/" + "a/" * 20_000 + "a",
        "/.." * 10_000,
    ],
)
def test_other_spellings_of_a_path(local: Remote, path: str) -> None:
    answer = local.post(path, BODY)
    assert (answer.status, answer.body) == (404, b"404 page not found\n")


def test_requests_that_do_not_wait_for_answers(local: Remote, queue: str) -> None:
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x"))
    with local.connect() as wire:
        for _ in range(20):
            wire.request("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
            wire.request("/v1/queue/ack", b"{}")
        for _ in range(20):
            assert wire.answer().status == 200
            assert wire.answer().error == "missing_fields"
    assert local.app.queue(queue).stats().counts.ready == 20


def waits(local: Remote, queue: str) -> None:
    until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 1)


@pytest.mark.parametrize("call", ["dequeue", "subscribe"])
@pytest.mark.parametrize("then", [HEALTH, HEALTH * 3, HEALTH[:10], HEAD + b"Content-Length: 9999\r\n\r\nx"])
def test_a_client_that_leaves_a_wait_with_requests_behind_it(
    local: Remote, queue: str, call: str, then: bytes
) -> None:
    """The wait ends and takes no message."""
    with local.connect() as wire:
        wire.request(f"/v1/queue/{call}", json.dumps({"queue": queue, "owner": "me"}).encode())
        waits(local, queue)
        wire.send(then)
        assert local.post("/healthz").status == 200
    until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 0)


@pytest.mark.parametrize(
    "then",
    [
        HEALTH * (server.MAX_AHEAD // len(HEALTH) + 2),
        HEAD + b"Content-Length: 999999\r\n\r\n" + b"x" * 70_000,
    ],
)
def test_too_many_bytes_behind_a_wait(local: Remote, queue: str, then: bytes) -> None:
    with local.connect() as wire:
        wire.request("/v1/queue/dequeue", json.dumps({"queue": queue, "owner": "me"}).encode())
        waits(local, queue)
        wire.send(then)
        assert wire.closed()


@pytest.mark.parametrize("then", [b"GARBAGE\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n", b"\0"])
def test_a_fault_behind_a_wait_is_no_answer_to_it(local: Remote, queue: str, then: bytes) -> None:
    with local.connect() as wire:
        wire.request("/v1/queue/dequeue", json.dumps({"queue": queue, "owner": "me"}).encode())
        waits(local, queue)
        wire.send(then)
        assert wire.closed()


def test_a_head_that_arrives_byte_by_byte(local: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not prolong the time for a head."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with local.connect() as wire:
        wire.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: ")

        def refused() -> bool:
            try:
                wire.send(b"a")
            except OSError:
                return True
            return False

        until(refused)


def exchanges(queue: str) -> list[bytes]:
    """An enqueue, and a dequeue and a subscribe of another queue, which is empty."""
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x"))
    demand = json.dumps({"queue": f"{queue}-empty", "owner": "me"}).encode()
    heads = [
        ("enqueue", f"Content-Type: {MULTIPART}\r\n", body),
        ("dequeue", "", demand),
        ("subscribe", "", demand),
    ]
    return [
        f"POST /v1/queue/{call} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(content)}\r\n\r\n".encode()
        + content
        for call, more, content in heads
    ]


def leave(wire: Wire, reset: bool) -> None:
    if reset:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.socket.close()


@pytest.mark.parametrize("number", range(3))
def test_clients_that_leave_after_every_byte_of_a_request(local: Remote, queue: str, number: int) -> None:
    before = levels(local)
    data = exchanges(queue)[number]
    for size in range(len(data) + 1):
        with local.connect() as wire:
            wire.send(data[:size])
            leave(wire, reset=size % 2 == 1)
    returned(local, before)
    local.enqueue(f"{queue}-empty", b"kept")
    message = local.take(f"{queue}-empty")
    assert message["attempts"] == 1
    assert local.call("queue/ack", **receipt(message)).status == 200


@pytest.mark.parametrize("call", ["dequeue", "subscribe"])
def test_clients_that_leave_after_every_byte_of_an_answer(local: Remote, queue: str, call: str) -> None:
    """No message is lost, whether the server has noticed the end or not."""
    before = levels(local)
    demand = {"queue": queue, "owner": "me", "visibility_timeout_seconds": 600}
    for number in range(40):
        local.enqueue(queue, b"x")
        with local.connect() as wire:
            wire.request(f"/v1/queue/{call}", json.dumps(demand).encode())
            wire.read(1 + number * 20)
            leave(wire, reset=number % 2 == 1)
        until(lambda: levels(local).consumers == before.consumers, explain=lambda: levels(local))
        counts = local.app.queue(queue).stats().counts
        assert counts.ready + counts.running == number + 1
    while (answer := local.dequeue(queue)).status == 200:
        pass
    assert answer.error == "waiting"
    server_context(local).held.clear()


def test_half_closed_connections(local: Remote, queue: str) -> None:
    """A client that ends its side is answered or closed, and does not wait on."""
    for data in exchanges(queue):
        with local.connect() as wire:
            wire.send(data)
            wire.socket.shutdown(socket.SHUT_WR)
            while wire.socket.recv(65_536):
                pass


PART = b'--B\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
META = PART % (b"meta", b'{"queue":"hostile"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--B--\r\n",
        b"--C\r\n\r\n--C--\r\n",
        META,
        META + b"--B",
        META + PART % (b"payload", b"x"),
        META + PART % (b"payload", b"x") + b"--B-",
        META.replace(b"\r\n", b"\n"),
        META.replace(b"form-data", b"attachment") + b"--B--\r\n",
        META.replace(b"Content-Disposition", b"X-Other") + b"--B--\r\n",
        META.replace(b'{"queue"', b'{"queue\xff"') + PART % (b"payload", b"x") + b"--B--\r\n",
        META.replace(b"hostile", b"\xff\xfe") + PART % (b"payload", b"x") + b"--B--\r\n",
        PART % (b"meta", b"[" * 60_000) + PART % (b"payload", b"x") + b"--B--\r\n",
        PART % (b"meta", b'{"queue":"hostile","attributes":' + b'{"a":' * 5_000) + b"--B--\r\n",
        PART % (b"meta", b"x" * 70_000) + PART % (b"payload", b"x") + b"--B--\r\n",
        (PART % (b"other", b"x")) * 1_000 + b"--B--\r\n",
        b"--B\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\nx\r\n--B--\r\n",
        b"--B\r\nContent-Disposition: form-data; name=" + b"x" * 50_000 + b"\r\n\r\nx\r\n--B--\r\n",
        b"--B\r\nContent-Length: -1\r\nContent-Disposition: form-data; name=meta\r\n\r\nx\r\n--B--\r\n",
        b"--B\r\nContent-Length: 99\r\nContent-Disposition: form-data; name=meta\r\n\r\nx\r\n--B--\r\n",
        b"preamble" * 10_000 + META,
    ],
)
def test_malformed_multipart(local: Remote, body: bytes) -> None:
    answer = local.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
    assert answer.status == 400
    assert answer.error in ("multipart_error", "invalid_body", "missing_queue")
    assert local.app.queue("hostile").stats().counts.ready == 0


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "multipart/related",
        'multipart/related; boundary=""',
        "multipart/related; boundary=" + "b" * 300,
        "multipart/related; boundary=\x80",
        "multipart/related; boundary=a b",
        "multipart/related" + "; a=b" * 5_000,
    ],
)
def test_content_types_without_a_boundary(local: Remote, content_type: str) -> None:
    answer = local.post("/v1/queue/enqueue", META, {"Content-Type": content_type})
    assert (answer.status, answer.error) in ((400, "invalid_content_type"), (400, "multipart_error"))


ATTACKS = (
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 60_000,
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000,
    b'POST /v1/queue/dequeue HTTP/1.1\r\nHost: x\r\nContent-Length: 25\r\n\r\n{"queue":"a","owner":"me"}'
    + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000,
    b"POST /v1/queue/enqueue HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/related; boundary=B\r\n"
    b'Content-Length: 999999\r\n\r\n--B\r\nContent-Disposition: form-data; name="payload"\r\n\r\n'
    + b"x"
    * 200_000,
    b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + b"[" * 60_000,
    b"\xff" * 60_000,
)


def test_attacks_leave_no_objects_behind(local: Remote) -> None:
    before = levels(local)
    counts = []
    for _ in range(4):
        wires = [local.connect() for _ in range(60)]
        for number, wire in enumerate(wires):
            with contextlib.suppress(OSError):
                wire.send(ATTACKS[number % len(ATTACKS)])
        for wire in wires:
            wire.socket.close()
        returned(local, before)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] <= 1.1 * counts[1], counts
