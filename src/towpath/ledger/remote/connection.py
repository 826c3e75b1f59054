"""The URL of a server, and requests to it over connections that are kept open. Safe from any thread."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from towpath.errors import InvalidInput, LedgerAway, LedgerClosed, LedgerError, NotALedger, StoreFailed
from towpath.escapes import without_password
from towpath.ledger.remote.messages import CONTENT_TYPE, unpack_error

TOKEN: Final = "TOWPATH_TOKEN"
TIMEOUT: Final = 30.0
"""Seconds for the answer to a request."""
PAUSES: Final = (0.05, 0.25)
"""Seconds before the second and the third attempt of a request whose connection failed. After that the error
is raised; the engine repeats its own commands as it does while PostgreSQL is down."""
MAX_IDLE: Final = 8
"""Idle connections that are kept."""
MAX_AGE: Final = 60.0
"""Seconds after which an idle connection is not used again: servers and proxies close idle connections."""
MAX_ERROR: Final = 1000
"""Characters of an answer that is not ours in the message of an error."""

_AWAY: Final = frozenset({429, 502, 503, 504})
_OPTIONS: Final = frozenset({"timeout", "token_file", "ca", "cert", "key"})
_EXPECTED: Final = (
    "http://host:port, https://host:port or unix:///path/of/socket, optionally with ?"
    + "=&".join(sorted(_OPTIONS))
)


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is, and how to reach it. `place` is the URL without secrets. `path` is the prefix of its
    paths behind a proxy. `unix` is the path of its socket, or empty."""

    place: str
    host: str = "localhost"
    port: int = 0
    path: str = ""
    unix: str = ""
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""
    timeout: float = TIMEOUT


def options_of(url: str) -> RemoteOptions:
    """Raises `InvalidInput` for a URL that names no server."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        place = f"{parts.scheme}://***@{parts.netloc.rpartition('@')[2]}"
        expected = f"without a user: the token is read from {TOKEN} or from the file of ?token_file="
        raise InvalidInput(field="url", value=place, expected=expected)
    try:
        pairs: dict[str, Any] = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        timeout = float(pairs.pop("timeout", TIMEOUT))
        port = parts.port
    except ValueError:
        raise _wrong(url) from None
    tls = parts.scheme == "https"
    has_place = parts.path.startswith("/") and not parts.netloc if parts.scheme == "unix" else parts.hostname
    if not (has_place and pairs.keys() <= _OPTIONS and 0.1 <= timeout <= 3600) or parts.fragment:
        raise _wrong(url)
    if not tls and pairs.keys() & {"ca", "cert", "key"}:
        raise InvalidInput(field="url", value=url, expected="an https:// URL beside ca, cert and key")
    place = url.partition("?")[0]
    if parts.scheme == "unix":
        return RemoteOptions(place=place, unix=unquote(parts.path), timeout=timeout, **pairs)
    return RemoteOptions(
        place=place,
        host=parts.hostname or "",
        port=port or (443 if tls else 80),
        path=parts.path.rstrip("/"),
        tls=tls,
        timeout=timeout,
        **pairs,
    )


def _wrong(url: str) -> InvalidInput:
    return InvalidInput(field="url", value=without_password(url), expected=_EXPECTED)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class RequestFailed(Exception):
    """A connection failed, or the server is unavailable. `ambiguous`: the server may have received the
    request and may apply it. `late`: the time of the request was used up."""

    def __init__(self, why: str, ambiguous: bool, late: bool = False) -> None:
        super().__init__(why)
        self.why, self.ambiguous, self.late = why, ambiguous, late


class Connections:
    """Connections to one server. Each request uses an idle one or opens a new one."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._tls = _tls_context(options) if options.tls else None
        self._headers = {"content-type": CONTENT_TYPE, "accept": CONTENT_TYPE, **_authorization(options)}
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._used: set[http.client.HTTPConnection] = set()
        self._closed = threading.Event()

    def send(self, path: str, body: bytes, seconds: float | None = None) -> bytes:
        """Send a request once and return the body of the answer 200. `seconds` replaces the time for the
        answer. Raises `RequestFailed`, or the error that the server has answered."""
        connection, reused = self._take(self._options.timeout if seconds is None else seconds)
        try:
            if not reused:
                self._connect(connection)
            status, kind, answer = self._exchange(connection, path, body)
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection)
        if status == 200 and kind == CONTENT_TYPE:
            return answer
        raise self._error(status, kind, answer)

    def close(self) -> None:
        """End all requests. Later ones raise `LedgerClosed`."""
        with self._lock:
            self._closed.set()
            used, idle = list(self._used), self._idle
            self._idle = []
        for connection in used:
            _shut_down(connection)
        for _, connection in idle:
            connection.close()

    def check_open(self) -> None:
        if self._closed.is_set():
            raise LedgerClosed(path=self._options.place)

    def pause(self, seconds: float) -> None:
        """Sleep; `close` ends it."""
        self._closed.wait(seconds)
        self.check_open()

    def _take(self, seconds: float) -> tuple[http.client.HTTPConnection, bool]:
        """An open connection and True, or a new one and False."""
        oldest = time.monotonic() - MAX_AGE
        with self._lock:
            self.check_open()
            while self._idle:
                since, connection = self._idle.pop()
                if since >= oldest:
                    self._used.add(connection)
                    connection.timeout = seconds
                    connection.sock.settimeout(seconds)
                    return connection, True
                connection.close()
            connection = self._new(seconds)
            self._used.add(connection)
            return connection, False

    def _new(self, seconds: float) -> http.client.HTTPConnection:
        options = self._options
        if options.unix:
            return _UnixConnection(options.unix, seconds)
        if self._tls is not None:
            return http.client.HTTPSConnection(options.host, options.port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(options.host, options.port, timeout=seconds)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            self._check_fatal(error)
            raise RequestFailed(
                _reason(error), ambiguous=False, late=isinstance(error, TimeoutError)
            ) from error

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: bytes
    ) -> tuple[int, str, bytes]:
        try:
            connection.request("POST", self._options.path + path, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._check_fatal(error)
            if isinstance(error, TimeoutError):
                why = f"no answer within {connection.timeout:g} s"
                raise RequestFailed(why, ambiguous=True, late=True) from error
            raise RequestFailed(_reason(error), ambiguous=True) from error
        return response.status, response.headers.get_content_type(), answer

    def _check_fatal(self, error: BaseException) -> None:
        """Raise if `close` or a certificate caused the error: then no retry helps."""
        self.check_open()
        place = self._options.place
        if isinstance(error, ssl.SSLCertVerificationError):
            raise NotALedger(path=place, why=f"its certificate: {error.verify_message}") from error
        if isinstance(error, ssl.SSLError) and "CERTIFICATE" in (error.reason or ""):
            why = f"it refuses the certificate of this client: {_reason(error)}"
            raise NotALedger(path=place, why=why) from error

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._used.discard(connection)
            if connection.sock is not None and len(self._idle) < MAX_IDLE and not self._closed.is_set():
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._used.discard(connection)
        connection.close()

    def _error(self, status: int, kind: str, answer: bytes) -> Exception:
        place = self._options.place
        if kind == CONTENT_TYPE and status != 200:
            error = unpack_error(answer)
            return error if not isinstance(error, LedgerClosed) else RequestFailed(str(error), ambiguous=True)
        code, detail = _problem(answer)
        if status in _AWAY:
            # A proxy that answers 502 or 504 may have passed the request on.
            return RequestFailed(f"{status} {detail}", ambiguous=status in (502, 504))
        if status in (401, 403):
            return NotALedger(path=place, why=f"{detail} (set {TOKEN}, or ?token_file= in the URL)")
        if status == 200 or status in (404, 405):
            return NotALedger(path=place, why=f"it answers {status} and is not a Towpath server")
        if code == "unsupported_format":
            return NotALedger(path=place, why=f"{detail}; use the same version of Towpath on both sides")
        return StoreFailed(path=place, error=f"the server answers {status}: {detail}")


def away(options: RemoteOptions, error: RequestFailed) -> LedgerError:
    return LedgerAway(path=options.place, why=error.why)


def _authorization(options: RemoteOptions) -> Mapping[str, str]:
    token = os.environ.get(TOKEN, "")
    if options.token_file:
        try:
            token = Path(options.token_file).read_text("utf-8")
        except (OSError, ValueError) as error:
            expected = f"the path of a file that can be read ({_reason(error)})"
            raise InvalidInput(field="token_file", value=options.token_file, expected=expected) from None
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        source = f"the file {options.token_file}" if options.token_file else TOKEN
        raise InvalidInput(field="token", value="...", expected=f"printable ASCII, in {source}")
    return {"authorization": f"Bearer {token}"} if token else {}


def _tls_context(options: RemoteOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.cert:
            context.load_cert_chain(options.cert, options.key or None)
    except (OSError, ValueError) as error:
        files = ", ".join(filter(None, [options.ca, options.cert, options.key]))
        expected = f"PEM files that can be read ({_reason(error)})"
        raise InvalidInput(field="ca, cert, key", value=files, expected=expected) from None
    return context


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _problem(answer: bytes) -> tuple[str, str]:
    """(code, detail) of an answer with an error of the server; ("", the text) of another one."""
    try:
        found = msgspec.json.decode(answer, type=dict[str, object])
        return str(found["error"]), str(found.get("detail") or found["error"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return "", answer[:MAX_ERROR].decode("utf-8", "replace").strip() or "without a reason"


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """End a request of another thread, which closes the connection."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
