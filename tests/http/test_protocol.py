"""What strangers send: every request is answered with 4xx or closed, never with 5xx."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import MULTIPART, Remote, form, serving
from towpath import App
from towpath.http import server


def test_health(remote: Remote) -> None:
    for path in ("/healthz", "/readyz"):
        answer = remote.post(path)
        assert (answer.status, answer.body) == (200, b"")


def test_metrics(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    answer = remote.post("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert b'towpath_queue_depth{queue="%s",state="ready"} 1.0\n' % queue.encode() in answer.body
    assert b"process_resident_memory_bytes" in answer.body


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/queue/Enqueue", "/v1/queue/../../etc/passwd", "/%2e%2e/x"])
def test_unknown_paths(local: Remote, path: str) -> None:
    answer = local.post(path)
    assert (answer.status, answer.body) == (404, b"404 page not found\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /healthz HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (
            b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            400,
        ),
        (
            b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/queue/stats HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1_000_000, 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 30_000 + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    ],
)
def test_requests_that_cannot_be_read(local: Remote, data: bytes, status: int) -> None:
    with local.connect() as wire:
        wire.send(data)
        found, headers = wire.head()
        assert found == status
        assert headers["connection"] == "close"
        assert json.loads(wire.read(int(headers["content-length"])))["error"]
        assert wire.closed()
    assert local.post("/healthz").status == 200


def test_a_bad_host(local: Remote) -> None:
    answer = local.post("/healthz", headers={"Host": "a/b\\c"})
    assert answer.status == 400


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/queue/dequeue HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/queue/enqueue HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/related; boundary=B\r\n"
        b'Content-Length: 999\r\n\r\n--B\r\nContent-Disposition: form-data; name="payload"\r\n\r\nhalf',
        b"POST /v1/queue/dequeue HTTP/1.1\r\nHost: x\r\nContent-Le",
    ],
)
def test_clients_that_leave_in_the_middle(local: Remote, head: bytes) -> None:
    files = _open_files()
    for _ in range(5):
        with local.connect() as wire:
            wire.send(head)
    assert local.post("/healthz").status == 200
    until(lambda: _open_files() <= files, explain=_open_files)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\n",
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    ],
)
def test_clients_that_are_too_slow(local: Remote, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.05)
    with local.connect() as wire:
        wire.send(data)
        assert wire.closed()


@pytest.mark.parametrize("limit", ["max_connections", "max_peer_connections"])
def test_too_many_connections(limit: str) -> None:
    with App("memory://") as app, serving(app, **{limit: 1}) as remote:
        with remote.connect() as held:
            held.request("/healthz")
            assert held.answer().status == 200
            with remote.connect() as wire:
                status, headers = wire.head()
                assert (status, headers["connection"]) == (503, "close")
        until(lambda: remote.post("/healthz").status == 200)


def test_a_client_that_does_not_read_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.1)
    with App("memory://") as app, serving(app) as remote:
        remote.enqueue("large", b"x" * 16_000_000)
        with remote.connect() as wire:
            wire.request("/v1/queue/dequeue", b'{"queue":"large","owner":"me"}')
            until(lambda: not remote.connections())


def test_a_client_that_does_not_read_the_last_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are too few to pause the handler, and the connection is closing."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    with App("memory://") as app, serving(app) as remote:
        remote.enqueue("small", b"x" * 50_000)
        # The buffers of the system are smaller than the response. Connections inherit that of the server.
        remote.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.settimeout(WAIT)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, _, port = remote.address.removeprefix("http://").rpartition(":")
            client.connect((host, int(port)))
            body = b'{"queue":"small","owner":"me"}'
            head = b"POST /v1/queue/dequeue HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(1) == b"H"
            until(lambda: not remote.connections())


def test_one_connection_for_many_requests(local: Remote, queue: str) -> None:
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x"))
    with local.connect() as wire:
        for _ in range(3):
            wire.request("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
            assert wire.answer().status == 200
            wire.request("/v1/queue/ack", b"{}")
            assert wire.answer().error == "missing_fields"
            wire.request("/v1/queue/enqueue", b"x" * 100_000, {"Content-Type": MULTIPART})
            assert wire.answer().error == "multipart_error"
    assert len(local.dequeue(queue, page_size=10).messages()) == 3


def test_clients_that_do_not_wait_for_the_answer(
    local: Remote, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x"))
    for _ in range(50):
        with local.connect() as wire:
            wire.request("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
            wire.request("/v1/queue/ack", b"{}")
            # The connection is reset, not closed.
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert local.post("/healthz").status == 200
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_expect_continue(local: Remote, queue: str) -> None:
    """As curl does with larger bodies."""
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x"))
    with local.connect() as wire:
        wire.request(
            "/v1/queue/enqueue",
            b"",
            {"Content-Type": MULTIPART, "Expect": "100-continue", "Content-Length": str(len(body))},
        )
        assert wire.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(body)
        assert wire.answer().status == 200


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://HOST"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example:9341", "Origin": "http://evil.example:9341"}, 403),
        ({"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Host": "[::1]:80", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "[bad", "Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
def test_requests_of_web_pages(local: Remote, headers: dict[str, str], status: int) -> None:
    """A page that the user of this machine opens must not reach a server without authentication."""
    host = local.address.removeprefix("http://")
    sent = {name: value.replace("HOST", host) for name, value in {"Host": host, **headers}.items()}
    assert local.post("/v1/queue/stats", b'{"queue":"a"}', sent).status == status
