"""The settings of a server, and where it may listen."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

import msgspec

from towpath.core import checks
from towpath.core.blobs import MAX_BLOB
from towpath.core.limits import Rate
from towpath.errors import InvalidInput
from towpath.http.tls import TlsFiles

DEFAULT_LISTEN = "127.0.0.1:9341"
_MIN_CONSUMERS, _MAX_CONSUMERS = 128, 4096
_LISTEN = "host:port, [address]:port or unix:///path/of/socket"


LEAST_POLL = 0.01


def default_consumers() -> int:
    """64 for each CPU, from 128 to 4096."""
    return min(_MAX_CONSUMERS, max(_MIN_CONSUMERS, 64 * (os.cpu_count() or 1)))


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Spans are seconds. `max_consumers` is the number of requests that wait for messages at once.
    `visibility` is the lease of a message if the consumer asks for none, `max_visibility` the longest that a
    consumer may ask for. For `drain_grace` seconds after the first signal to stop, consumers may still
    acknowledge the messages that they hold. `acquire_block` is the longest wait of an acquire that leaves it
    to the server.

    A commit wakes the requests that wait. As a safety net they also claim at an interval: `poll_interval` for
    a ledger on a server or without `watch`, else `resilient_poll_interval` (0: never), each with a random
    share of `poll_jitter` more.

    With `tls` the server speaks TLS; with the CA of its clients it takes their certificates. With
    `require_token` a request needs a token, or a certificate if the server takes them. Without TLS, tokens
    are sent in the clear: `insecure_http` allows that beyond loopback. `rate` limits the requests of each
    client, None not at all; `max_peer_connections` the connections of each address, None not at all.

    `max_payload` is the most bytes of a payload. `for_tests` lets clients of `/v1/ledger` give the time of
    commands and read a dump; the suite of ledgers needs both."""

    listen: str = DEFAULT_LISTEN
    default_namespace: str = "default"
    max_consumers: int = msgspec.field(default_factory=default_consumers)
    visibility: int = 30
    max_visibility: int = 1800
    drain_grace: float = 10.0
    poll_interval: float = 3.0
    poll_jitter: float = 0.5
    resilient_poll_interval: float = 300.0
    watch: bool = True
    max_payload: int = 1024**3
    acquire_block: int = 60
    tls: TlsFiles | None = None
    require_token: bool = False
    insecure_http: bool = False
    rate: Rate | None = None
    max_connections: int = 10_000
    max_peer_connections: int | None = None
    for_tests: bool = False

    def __post_init__(self) -> None:
        checks.whole("max_consumers", self.max_consumers, 1, 1_000_000)
        checks.whole("visibility", self.visibility, 1, 86_400)
        checks.whole("max_visibility", self.max_visibility, self.visibility, 86_400)
        for name in ("drain_grace", "poll_interval", "poll_jitter", "resilient_poll_interval"):
            checks.micros(getattr(self, name), name)
        if self.poll_interval < LEAST_POLL:
            expected = f"at least {LEAST_POLL} s"
            raise InvalidInput(field="poll_interval", value=self.poll_interval, expected=expected)
        checks.whole("max_payload", self.max_payload, 0, MAX_BLOB)
        checks.whole("acquire_block", self.acquire_block, 1, 86_400)
        checks.whole("max_connections", self.max_connections, 1, 1_000_000)
        checks.optional_whole("max_peer_connections", self.max_peer_connections, 1, 1_000_000)

    @property
    def verifies_clients(self) -> bool:
        """Whether the server takes the certificates of clients."""
        return self.tls is not None and self.tls.verifies_clients

    @property
    def has_authentication(self) -> bool:
        return self.require_token or self.verifies_clients


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket. Raises `InvalidInput` for an address that is wrong or that the options do not
    allow, `OSError` if the system refuses it."""
    listen = options.listen
    if listen.startswith("unix:"):
        if options.tls is not None:
            raise InvalidInput(field="listen", value=listen, expected="a TCP address, because TLS is on")
        return _bind_unix(Path(listen.removeprefix("unix:").removeprefix("//")))
    host, port = _host_and_port(listen)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise InvalidInput(
            field="listen", value=listen, expected=f"an address of this host: {_LISTEN}"
        ) from None
    addresses = [str(address[0]) for *_, address in found]
    if not all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses):
        _check_exposed(options)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _check_exposed(options: ServerOptions) -> None:
    """Other machines can reach the address. Raises `InvalidInput` unless clients authenticate."""
    where = f"listen is {options.listen}, which other machines can reach"
    if not options.has_authentication:
        message = (
            f"{where}, and the server has no authentication. Give --bundle FILE for client certificates "
            "(towpath auth new), or --require-token with TLS, or listen on 127.0.0.1, [::1] or a unix socket"
        )
    elif options.tls is None and not options.insecure_http:
        message = (
            f"{where}, and tokens would be sent without encryption. Give --bundle or --tls-cert and "
            "--tls-key; behind a proxy that speaks TLS, --insecure-http"
        )
    else:
        return
    raise InvalidInput(field="listen", value=options.listen, expected="a loopback address", message=message)


def address_of(sock: socket.socket, secure: bool = False) -> str:
    """The URL of a bound socket."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix://{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if secure else 'http'}://{host}:{name[1]}"


def _host_and_port(listen: str) -> tuple[str | None, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidInput(field="listen", value=listen, expected=_LISTEN)
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise InvalidInput(field="listen", value=listen, expected=_LISTEN)
    return host.removeprefix("[").removesuffix("]") or None, int(port)


def _bind_unix(path: Path) -> socket.socket:
    """A socket that only this user can use. A socket that no process listens on is replaced."""
    if not path.is_absolute():
        raise InvalidInput(field="listen", value=f"unix://{path}", expected="an absolute path")
    _check_folder(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        if _is_stale(path):
            path.unlink()
        sock.bind(str(path))
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and "too long" in str(error):
            raise InvalidInput(field="listen", value=str(path), expected="a shorter path") from None
        raise
    finally:
        os.umask(mask)
    return sock


def _check_folder(folder: Path) -> None:
    """In a folder where others may rename files, another user could replace the socket."""
    found = folder.stat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        message = f"{folder} is writable for other users, who could replace the socket: chmod go-w {folder}"
        raise InvalidInput(field="listen", value=str(folder), expected="a private folder", message=message)


def _is_stale(path: Path) -> bool:
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
