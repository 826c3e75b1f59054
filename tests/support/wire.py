"""A client of the HTTP server that writes and reads bytes on a socket, and a server in a thread."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlencode

import msgspec

from tests.support.waiting import WAIT
from towpath import App, commands
from towpath.http.options import ServerOptions
from towpath.http.server import HttpServer
from towpath.testing import ManualClock

MULTIPART = "multipart/related; boundary=B"


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.body.endswith(b"\n")
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code of an error, whose envelope is checked."""
        assert self.status >= 400, self
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-correlation-id"]
        assert self.json.keys() <= {
            "error",
            "detail",
            "current_version",
            "current_etag",
            "retry_after_seconds",
            "next_step",
        }
        assert self.headers.get("retry-after", "0") == str(self.json.get("retry_after_seconds", 0))
        code: str = self.json["error"]
        return code

    def messages(self) -> list[tuple[dict[str, Any], bytes]]:
        """The messages of a multipart document, read by the length of each payload."""
        kind, _, boundary = self.headers["content-type"].partition("; boundary=")
        assert kind == "multipart/related"
        found = []
        rest = self.body
        line = f"--{boundary}".encode()
        while rest != line + b"--\r\n":
            meta, payload, rest = split_message(rest, line)
            found.append((meta, payload))
        return found


def split_message(data: bytes, line: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """(meta, payload, rest) of a document that begins with a delimiter. The rest begins with the next one."""
    before, head, text = _split_part(data, line)
    assert before == b"", before
    assert head["content-disposition"].startswith('form-data; name="meta"')
    assert list(head) == ["content-disposition", "content-type"]
    meta, _, rest = text.partition(b"\n\r\n" + line)
    _, head, rest = _split_part(line + rest, line)
    assert head["content-disposition"].startswith('form-data; name="payload"')
    assert list(head) == ["content-disposition", "content-length", "content-type"]
    size = int(head["content-length"])
    assert rest[size : size + 2] == b"\r\n"
    return json.loads(meta)["message"], rest[:size], rest[size + 2 :]


def _split_part(data: bytes, line: bytes) -> tuple[bytes, dict[str, str], bytes]:
    before, _, rest = data.partition(line + b"\r\n")
    head, _, rest = rest.partition(b"\r\n\r\n")
    pairs = [each.split(": ", 1) for each in head.decode().split("\r\n")]
    return before, {name.lower(): value for name, value in pairs}, rest


class Wire:
    """A connection. `tls` is for an address with https."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        if address.startswith("unix://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(WAIT)
            self.socket.connect(address.removeprefix("unix://"))
        else:
            host, _, port = address.partition("://")[2].rpartition(":")
            self.socket = socket.create_connection((host.strip("[]"), int(port)), WAIT)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> None:
        fields = {"Host": "test", "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def read(self, n: int) -> bytes:
        while len(self._buffer) < n:
            self._more()
        taken, self._buffer = self._buffer[:n], self._buffer[n:]
        return taken

    def read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._more()
        at = self._buffer.index(end) + len(end)
        taken, self._buffer = self._buffer[:at], self._buffer[at:]
        return taken

    def _more(self) -> None:
        piece = self.socket.recv(65_536)
        if not piece:
            raise EOFError(self._buffer)
        self._buffer += piece

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self.read_until(b"\r\n\r\n").decode().split("\r\n")
        assert lines[0].startswith("HTTP/1.1 "), lines[0]
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(self.read_until(b"\r\n"), 16)
        data = self.read(size)
        assert self.read(2) == b"\r\n"
        return data

    def answer(self) -> Answer:
        status, headers = self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while piece := self.chunk():
                body += piece
        else:
            body = self.read(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    def closed(self) -> bool:
        """Whether the server closes the connection; waits for it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def form(*parts: tuple[str, bytes], end: bytes = b"\r\n--B--\r\n") -> bytes:
    """A multipart body with these named parts, as the client of lockd writes it."""
    return (
        b"".join(
            b'%s--B\r\nContent-Disposition: form-data; name="%s"\r\nContent-Type: x/y\r\n\r\n%s'
            % (b"\r\n" if number else b"", name.encode(), content)
            for number, (name, content) in enumerate(parts)
        )
        + end
    )


class Remote:
    """A server as its clients see it. Each call has a connection of its own, with the certificate in `tls`,
    and the headers in `headers`."""

    def __init__(self, app: App, server: HttpServer) -> None:
        self.app = app
        self.server = server
        self.address = server.address
        self.tls: ssl.SSLContext | None = None
        self.headers: Mapping[str, str] = {}

    def client(self, token: str = "", tls: ssl.SSLContext | None = None) -> Remote:
        """The same server for another client."""
        other = Remote(self.app, self.server)
        other.tls = tls or self.tls
        other.headers = {"Authorization": f"Bearer {token}"} if token else {}
        return other

    def connect(self) -> Wire:
        return Wire(self.address, self.tls)

    def connections(self) -> list[str]:
        """The peers of the established connections to the server, of IPv4."""
        port = int(self.address.rpartition(":")[2])
        with open("/proc/net/tcp", encoding="ascii") as table:
            rows = [line.split() for line in table]
        return [row[2] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]

    def post(self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        with self.connect() as wire:
            wire.request(path, body, {**self.headers, **(headers or {})})
            return wire.answer()

    def ask(self, method: str, path: str, body: Any = None, **arguments: Any) -> Answer:
        """A request to `/v1/...` with a JSON body, if one is given, and arguments in the query string."""
        query = f"?{urlencode(arguments)}" if arguments else ""
        content = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        with self.connect() as wire:
            wire.request(f"/v1/{path}{query}", content, {**self.headers, **headers}, method)
            return wire.answer()

    def call(self, path: str, **fields: Any) -> Answer:
        """A JSON request to `/v1/...`."""
        return self.post(f"/v1/{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"})

    def enqueue(self, queue: str, payload: bytes = b"", **meta: Any) -> dict[str, Any]:
        body = form(("meta", json.dumps({"queue": queue, **meta}).encode() + b"\n"), ("payload", payload))
        answer = self.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.json
        return found

    def dequeue(self, queue: str, **fields: Any) -> Answer:
        return self.call("queue/dequeue", **{"queue": queue, "owner": "me", "wait_seconds": -1, **fields})

    def take(self, queue: str, **fields: Any) -> dict[str, Any]:
        """The only message that is ready."""
        answer = self.dequeue(queue, **fields)
        assert answer.status == 200, answer
        [(meta, _)] = answer.messages()
        return meta


def receipt(message: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The fields by which a client acknowledges a message."""
    names = ("namespace", "queue", "message_id", "lease_id", "txn_id", "fencing_token", "meta_etag")
    return {name: message[name] for name in names} | more


def lose_leases(remote: Remote, clock: ManualClock, seconds: float) -> None:
    """Advance the clock so far that the leases that end within `seconds` are lost. The ledger takes the first
    advance for a jump of the clock, which extends them once."""
    for _ in range(2):
        clock.advance(seconds)
        remote.app.engine.call(commands.Upkeep())


@contextmanager
def serving(app: App, **options: Any) -> Iterator[Remote]:
    server = HttpServer(app, ServerOptions(**{"listen": "127.0.0.1:0", "drain_grace": 0.0, **options}))
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(started.set,))
    thread.start()
    try:
        assert started.wait(WAIT)
        yield Remote(app, server)
    finally:
        server.stop()
        thread.join(WAIT)
        assert not thread.is_alive()
