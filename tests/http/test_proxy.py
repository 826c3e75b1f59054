"""The configuration of examples/deploy behind a real nginx."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.waiting import until
from tests.support.wire import MULTIPART, Remote, Wire, form, receipt

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx")

AROUND = """daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{ access_log off; {paths} {server} }}
"""
PATHS = " ".join(
    f"{name}_temp_path {{folder}}/{name};" for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
)


@pytest.fixture
def nginx(local: Remote, tmp_path: Path) -> Iterator[str]:
    """The address of nginx before the server, with the file of the page except for its port and HTTPS."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (ROOT / "examples" / "deploy" / "nginx.conf").read_text("utf-8")
    text = text.replace("127.0.0.1:9341", local.address.removeprefix("http://"))
    text = re.sub(r"ssl_certificate\w* .*;", "", text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}"))
    content = AROUND.format(folder=tmp_path, paths=PATHS.format(folder=tmp_path), server=text)
    (tmp_path / "nginx.conf").write_text(content, "utf-8")
    with running(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")], port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stderr=subprocess.PIPE)

    def listens() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield
    finally:
        process.terminate()
        process.communicate()


def test_messages_through_nginx(local: Remote, nginx: str, queue: str) -> None:
    body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"x" * 3_000_000))
    with Wire(nginx) as wire:
        wire.request("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
        assert wire.answer().json["payload_bytes"] == 3_000_000
        wire.request("/v1/queue/dequeue", json.dumps({"queue": queue, "owner": "me"}).encode())
        [(message, payload)] = wire.answer().messages()
        assert len(payload) == 3_000_000
        wire.request("/v1/queue/ack", json.dumps(receipt(message)).encode())
        assert wire.answer().json["acked"] is True
        for path in ("/healthz", "/metrics", "/v1//queue/stats", "/v1/queue%2fstats"):
            wire.request(path)
            assert wire.answer().status == 404, path


@pytest.mark.parametrize("call", ["dequeue", "subscribe"])
def test_waits_through_nginx(local: Remote, nginx: str, queue: str, call: str) -> None:
    """Each message arrives at once, and the wait ends when the client leaves."""
    with Wire(nginx) as wire:
        wire.request(f"/v1/queue/{call}", json.dumps({"queue": queue, "owner": "me"}).encode())
        until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 1)
        local.enqueue(queue, b"one")
        assert b"200 OK" in wire.read_until(b"one\r\n")
    with Wire(nginx) as wire:
        wire.request(f"/v1/queue/{call}", json.dumps({"queue": queue, "owner": "me"}).encode())
        until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 1)
    until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 0)
    local.enqueue(queue, b"two")
    assert local.take(queue)["attempts"] == 1


def test_events_through_nginx(local: Remote, nginx: str, queue: str) -> None:
    with Wire(nginx) as wire:
        wire.request("/v1/queue/watch", json.dumps({"queue": queue}).encode())
        wire.read_until(b'"available":false')
        local.enqueue(queue, b"one")
        wire.read_until(b'"available":true')
