"""A running server: uvicorn with httptools and uvloop, its limits for strangers, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from towpath.app import App
from towpath.errors import TowpathError
from towpath.escapes import get_logger
from towpath.http.authentication import CERTIFICATE
from towpath.http.certificates import ClientCertificate, client_certificate
from towpath.http.context import ServerContext
from towpath.http.exchange import CONNECTION, Scope
from towpath.http.health import HealthRoutes
from towpath.http.options import ServerOptions, address_of, bind
from towpath.http.rates import LOCAL, PeerConnections, peer_of
from towpath.http.routes import application
from towpath.http.tls import ServerTls

log = get_logger("towpath.http")

MAX_HEAD = 64 * 1024
"""Bytes of a request line with its headers."""
HEADER_FRAMING = 4
"""Bytes of a header besides its name and value: a colon, a space, CR and LF."""
MAX_AHEAD = 64 * 1024
"""Bytes of further requests that a client may send before the answer to the current one."""
OWN_FILES = 1_000
"""Open files of the ledger and the process, besides the connections of clients."""
HANDSHAKE_SECONDS = 10.0
"""A client has so long for the TLS handshake."""
REQUEST_SECONDS = 30.0
"""A client has so long to send the head of a request, and so long between two pieces of its body."""
WRITE_SECONDS = 120.0
"""A connection is closed if its client reads nothing of a response for this time."""
IDLE_SECONDS = 120
"""A connection without a request is closed after this time."""
LINGER = 1.0
"""Seconds between the answer to a request that cannot be read and the end of its connection. A close at once
would reset the connection before the client has read the answer."""
FINISH_SECONDS = 5
"""Seconds that requests may take after the drain."""
DRAIN_POLL, DRAIN_CHECK = 0.05, 0.5
"""Seconds between two looks at the held messages, and between two reads of them: another server may have
taken the receipt."""
TICKS = 10
"""uvicorn calls `on_tick` ten times a second."""
_NO_HOST = re.compile(rb"[^A-Za-z0-9.:_\[\]%~-]")


class HttpServer:
    """Serves an app until `stop`. The socket is bound when the object is made; `address` is its URL. Raises
    `InvalidInput` or `OSError` if it cannot listen there."""

    def __init__(self, app: App, options: ServerOptions | None = None) -> None:
        self._app = app
        self.options = options or ServerOptions()
        tls = self.options.tls
        self._tls = None if tls is None else ServerTls(tls, required=not self.options.require_token)
        self._socket = bind(self.options)
        self.address = address_of(self._socket, secure=tls is not None)
        self._runner: DrainingServer | None = None

    def run(self, started: Callable[[], None] | None = None) -> bool:
        """Serve in this thread. In the main thread, the first SIGINT or SIGTERM stops it, and the second one
        ends it at once. `started` is called when connections are accepted. False if a second signal ended
        the drain."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove_socket)
            allow_files(self.options.max_connections + OWN_FILES)
            context = ServerContext(self._app.engine, self.options, self._tls)
            stack.callback(context.close)
            health = HealthRoutes(self._app, context)
            stack.callback(health.close)
            self._app.engine.start_caretaker()
            config = ServerConfig(
                application(context, health, self._app),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                # The handlers log errors; uvicorn logs an error only for a client that has disconnected.
                log_level="critical",
                access_log=False,
                server_header=False,
                # Any client can write the headers of a proxy.
                proxy_headers=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=FINISH_SECONDS,
            )
            config.options = self.options
            config.peers = PeerConnections(self.options.max_peer_connections)
            self._runner = DrainingServer(config, context, self._tls, started)
            self._runner.run(sockets=[self._socket])
            return not self._runner.force_exit

    def stop(self) -> None:
        """Drain, then end `run`. Safe from any thread."""
        if self._runner is not None:
            self._runner.stop()

    def _remove_socket(self) -> None:
        self._socket.close()
        if self.address.startswith("unix://"):
            Path(self.address.removeprefix("unix://")).unlink(missing_ok=True)


class ServerConfig(uvicorn.Config):
    """The configuration that a protocol of uvicorn gets, with the limits of connections."""

    options: ServerOptions
    peers: PeerConnections


def allow_files(count: int) -> None:
    """Raise the limit of open files to this, as far as the system allows: its usual default is 1024."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < count:
            allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


class DrainingServer(uvicorn.Server):
    """The first request to stop begins the drain: `/readyz` fails, waits end, and the messages that consumers
    hold may be acknowledged. The second one ends the server at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        context: ServerContext,
        tls: ServerTls | None,
        started: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._context = context
        self._tls = tls
        self._started = started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._tls is None:
            await super().startup(sockets)
        else:
            await self._start_tls(self._loop, self._tls, sockets or [])
        if self._stopping:
            self._begin()
        elif self._started is not None:
            self._started()

    async def _start_tls(
        self, loop: asyncio.AbstractEventLoop, tls: ServerTls, sockets: list[socket.socket]
    ) -> None:
        """As the base class, which has no limit for the time of the handshake and makes its own context."""

        def create_protocol() -> asyncio.Protocol:
            return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

        self.servers = [
            await loop.create_server(
                create_protocol,
                sock=each,
                ssl=tls.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                backlog=self.config.backlog,
            )
            for each in sockets
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if self._tls is not None and counter % TICKS == 0:
            self._tls.refresh()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping:
            self.should_exit = self.force_exit = True
        else:
            self.stop()

    def stop(self) -> None:
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._run_drain())

    async def _run_drain(self) -> None:
        context = self._context
        context.drain()
        end = time.monotonic() + context.options.drain_grace
        checked = 0.0
        while time.monotonic() < end and (context.consumers.total or context.holds_messages()):
            await asyncio.sleep(DRAIN_POLL)
            if time.monotonic() >= checked + DRAIN_CHECK:
                with contextlib.suppress(TowpathError):  # without its ledger the server waits for the grace
                    await context.forget_settled()
                checked = time.monotonic()
        self.should_exit = True


class LimitedProtocol(HttpToolsProtocol):
    """The HTTP protocol of uvicorn, with limits for strangers: the size of the head of a request, the time to
    send it and to go on with its body, the time to read a response, and the number of connections. httptools
    and uvicorn have none. The certificate of the client is put into the scope of each request."""

    config: ServerConfig
    _parsed = 0
    """Bytes of the head that were parsed."""
    _unparsed = 0
    """Bytes received since the head began; counted until it is complete."""
    _in_head = True
    _owed: float | None = None
    """Since when the server waits for the rest of a request."""
    _check: asyncio.TimerHandle | None = None
    _refused = False
    _unsent: int | None = None
    """Bytes in the buffer at the last check of a connection that is closing."""
    _unwritten = 0
    """Bytes in the buffer when the progress of the client was checked last."""
    _write_check: asyncio.TimerHandle | None = None
    _certificate: ClientCertificate | None = None
    _peer = LOCAL
    _running: RequestResponseCycle | None = None
    """The request whose handler runs, or the last one. `cycle` of the base class is the last request that was
    read: another one if the client does not wait for answers."""
    _ahead = 0
    """Bytes received since a request waits for the end of another one."""
    _fault = "this is not a valid HTTP request"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owed = self.loop.time()
        self._check = self.loop.call_later(REQUEST_SECONDS, self._check_progress)
        self._certificate = _peer_certificate(transport)
        self._peer = peer_of(self.client)
        few = self.config.peers.opened(self._peer)
        if not few or len(self.connections) > self.config.options.max_connections:
            self._refuse("503 Service Unavailable", "too_many_connections", "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._check, self._write_check):
            if timer is not None:
                timer.cancel()
        self.config.peers.closed(self._peer)
        self._end_running()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unwritten = self.transport.get_write_buffer_size()
        self._write_check = self.loop.call_later(WRITE_SECONDS, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_check is not None:
            self._write_check.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # Else the piece has the rest of the current request too, which is not counted.
        is_further = self._owed is None or bool(self.pipeline)
        super().data_received(data)
        self._ahead = self._ahead + len(data) if is_further and self.pipeline else 0
        if self._ahead > MAX_AHEAD:
            self.transport.abort()
        if self._in_head and not self._refused:
            self._unparsed += len(data)
            if self._unparsed > MAX_HEAD:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._certificate is not None:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]
        self._parsed = self._unparsed = 0
        self._in_head = True
        self._owed = self.loop.time()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + HEADER_FRAMING)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._owed = self.loop.time()
        self._check_framing()
        super().on_headers_complete()
        if self.pipeline:
            # The base class pauses reading, so the end of the connection would not be noticed.
            self.flow.resume_reading()

    def _check_framing(self) -> None:
        """Refuse the requests whose end a proxy may see at another place than this server."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._fault = "the HTTP version must be 1.1 or 1.0"
        elif len(hosts) > 1 or (version == "1.1" and not hosts) or any(map(_NO_HOST.search, hosts)):
            self._fault = "the request must have one header Host, with a host and a port"
        elif codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            self._fault = "the only transfer coding is chunked, with HTTP/1.1"
        elif self.parser.should_upgrade():
            self._fault = "the server speaks HTTP/1.1 only: leave out the header Upgrade"
        else:
            return
        raise httptools.HttpParserError(self._fault)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        scope: Scope = cycle.scope
        scope[CONNECTION] = self
        super()._start_asgi_task(cycle, app)

    @property
    def left(self) -> bool:
        """The client of the running request has closed the connection."""
        return self._running is not None and self._running.disconnected

    def _end_running(self) -> None:
        """End the running request as if its client had left. The base class ends the last one only."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def on_body(self, body: bytes) -> None:
        self._owed = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._owed = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by the base class for a request that is not HTTP."""
        if max(self._parsed, self._unparsed) > MAX_HEAD:
            detail = f"the request line and the headers have more than {MAX_HEAD} bytes"
            self._refuse("431 Request Header Fields Too Large", "headers_too_large", detail)
        else:
            self._refuse("400 Bad Request", "invalid_request", self._fault)

    def _refuse(self, status: str, code: str, detail: str) -> None:
        self._refused = True
        running = self._running
        if running is not None and not running.response_complete:
            if running.response_started or not running.more_body:
                # The fault is in a later request; this answer would be taken for that of the running one.
                self.transport.close()
                return
            self._end_running()
        body = f'{{"error":"{code}","detail":"{detail}"}}\n'
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n\r\n{body}".encode()
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEAD:
            raise httptools.HttpParserError("the head is too large")

    def _check_progress(self) -> None:
        before, self._unsent = self._unsent, None
        if self.transport.is_closing():
            # The connection ends when the client has read the last bytes, which it may never do.
            self._unsent = self.transport.get_write_buffer_size()
            if before is not None and self._unsent >= before:
                self.transport.abort()
                return
        late = self._owed is not None and self.loop.time() >= self._owed + REQUEST_SECONDS
        # A flow that is paused has unread data: then the server is slow, not the client.
        if late and not self.flow.read_paused:
            self.transport.close()
        self._check = self.loop.call_later(REQUEST_SECONDS, self._check_progress)

    def _check_reader(self) -> None:
        before, self._unwritten = self._unwritten, self.transport.get_write_buffer_size()
        if self._unwritten >= before:
            log.info("%s reads nothing of its response; its connection is closed", self._peer)
            self.transport.abort()
        else:
            self._write_check = self.loop.call_later(WRITE_SECONDS, self._check_reader)


def _peer_certificate(transport: asyncio.Transport) -> ClientCertificate | None:
    tls = transport.get_extra_info("ssl_object")
    der = None if tls is None else tls.getpeercert(binary_form=True)
    return None if der is None else client_certificate(der)
