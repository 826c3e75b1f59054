"""A proxy between a client and an HTTP server that loses answers, as a network does, and can end TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from tests.support.waiting import WAIT


class Proxy:
    """Passes requests to `target` (host, port). `lose(path, n)`: the next n answers to requests for this path
    are received and not passed on. `lost` counts them. `heads` has the first bytes of each request."""

    def __init__(self, target: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = target, tls
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"{'https' if tls else 'http'}://localhost:{self._socket.getsockname()[1]}"
        self._lock = threading.Lock()
        self._path, self._left = b"", 0
        self.lost = 0
        self.heads: list[bytes] = []
        threading.Thread(target=self._run, daemon=True).start()

    def lose(self, path: str, n: int) -> None:
        with self._lock:
            self._path, self._left = path.encode(), n

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), closing(client):
            plain = client if self._tls is None else self._tls.wrap_socket(client, server_side=True)
            with closing(plain), closing(socket.create_connection(self._target, WAIT)) as server:
                plain.settimeout(WAIT)
                while request := plain.recv(65_536):
                    self.heads.append(request)
                    server.sendall(request)
                    if self._exchange(request, plain, server):
                        return

    def _exchange(self, request: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Pass the rest of the request and the answer. True if the answer is lost."""
        head, _, body = request.partition(b"\r\n\r\n")
        missing = _length(head) - len(body)
        while missing > 0:
            piece = client.recv(65_536)
            server.sendall(piece)
            missing -= len(piece)
        answer = server.recv(65_536)
        with self._lock:
            if self._left and self._path in head:
                self._left -= 1
                self.lost += 1
                return True
        head, _, body = answer.partition(b"\r\n\r\n")
        client.sendall(answer)
        missing = _length(head) - len(body)
        while missing > 0:
            piece = server.recv(65_536)
            client.sendall(piece)
            missing -= len(piece)
        return False


def _length(head: bytes) -> int:
    fields = [line.partition(b":") for line in head.split(b"\r\n")]
    return next((int(value) for name, _, value in fields if name.lower() == b"content-length"), 0)


@contextmanager
def proxied(address: str, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """A proxy in front of the server with this address."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with closing(Proxy((host, int(port)), tls)) as proxy:
        yield proxy
