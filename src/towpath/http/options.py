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
from towpath.errors import InvalidInput

DEFAULT_LISTEN = "127.0.0.1:9341"
_MIN_CONSUMERS, _MAX_CONSUMERS = 128, 4096
_LISTEN = "host:port, [address]:port or unix:///path/of/socket"


def default_consumers() -> int:
    """64 for each CPU, from 128 to 4096."""
    return min(_MAX_CONSUMERS, max(_MIN_CONSUMERS, 64 * (os.cpu_count() or 1)))


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Spans are seconds. `max_consumers` is the number of requests that wait for messages at once.
    `visibility` is the lease of a message if the consumer asks for none, `max_visibility` the longest that a
    consumer may ask for. For `drain_grace` seconds after the first signal to stop, consumers may still
    acknowledge the messages that they hold. `max_payload` is the most bytes of a payload."""

    listen: str = DEFAULT_LISTEN
    default_namespace: str = "default"
    max_consumers: int = msgspec.field(default_factory=default_consumers)
    visibility: int = 30
    max_visibility: int = 1800
    drain_grace: float = 10.0
    max_payload: int = 1024**3

    def __post_init__(self) -> None:
        checks.whole("max_consumers", self.max_consumers, 1, 1_000_000)
        checks.whole("visibility", self.visibility, 1, 86_400)
        checks.whole("max_visibility", self.max_visibility, self.visibility, 86_400)
        checks.micros(self.drain_grace, "drain_grace")
        checks.whole("max_payload", self.max_payload, 0, MAX_BLOB)


def bind(listen: str) -> socket.socket:
    """The listening socket. Raises `InvalidInput` for an address that is wrong or not loopback, `OSError` if
    the system refuses it."""
    if listen.startswith("unix:"):
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
        message = (
            f"listen is {listen}, which other machines can reach. The server has no authentication yet: "
            "listen on 127.0.0.1, [::1] or a unix socket"
        )
        raise InvalidInput(field="listen", value=listen, expected="a loopback address", message=message)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix://{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


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
