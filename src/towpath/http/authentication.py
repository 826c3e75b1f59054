"""Which client sends a request, and whether it may: tokens, certificates and the rate of requests.

A request with an Authorization header is one of its token, any other one of the certificate of its
connection. A request that is still answered when its token is revoked, or its certificate, ends within some
seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from towpath.errors import TowpathError
from towpath.escapes import get_logger
from towpath.http.access import UNRESTRICTED
from towpath.http.certificates import ClientCertificate
from towpath.http.exchange import Exchange
from towpath.http.options import ServerOptions
from towpath.http.problems import Problem
from towpath.http.rates import RequestRates, peer_of
from towpath.http.tls import ServerTls
from towpath.http.tokens import TokenRecord, TokenRecords, find_token, load_tokens
from towpath.runtime.engine import Engine

audit = get_logger("towpath.http.audit")

PUBLIC = frozenset({"/healthz", "/readyz"})
"""Paths without authentication."""
CERTIFICATE = "towpath.certificate"
"""The key of a request's scope for the `ClientCertificate` of its connection."""
REFRESH = 1.0
"""Seconds after which tokens are read again."""
MIN_PAUSE = 0.05
"""Seconds between two reads of the tokens at least, however many unknown tokens arrive."""
FAILURES_LOGGED = 10
"""Failed authentications that are logged in each `REFRESH`; the others are counted."""

Handler = Callable[[Exchange], Awaitable[None]]
Credential = TokenRecord | ClientCertificate


def refuse_foreign_page(exchange: Exchange) -> None:
    """Refuse the request of a web page that this server has not sent. Each page that the user of this machine
    opens could otherwise call a server on loopback: by its address, or by a name of the page's own that it
    resolves to loopback. Only browsers send these headers."""
    site, origin = exchange.header(b"sec-fetch-site"), exchange.header(b"origin")
    if site is None and origin is None:
        return
    host = exchange.header(b"host") or ""
    is_own = origin in (None, f"http://{host}", f"https://{host}") and site in (None, "same-origin", "none")
    if not (is_own and _is_loopback(host)):
        detail = "a server without authentication takes no requests of web pages from other origins"
        raise Problem(403, "forbidden", detail)


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class AccessControl:
    """Used on the event loop of the server only."""

    def __init__(self, engine: Engine, options: ServerOptions, tls: ServerTls | None = None) -> None:
        self._clock = engine.clock
        self._tokens = TokenCache(engine) if options.require_token else None
        self._tls = tls if options.verifies_clients else None
        self._rates = RequestRates(options.rate) if options.rate is not None else None
        self._is_open = not options.has_authentication
        self._running: dict[asyncio.Timeout, Credential] = {}
        """The requests that are being answered."""
        self._watch: asyncio.Task[None] | None = None
        self._failures = FailureLog()

    async def run(self, exchange: Exchange, path: str, handler: Handler) -> None:
        """Set the principal of the exchange and call the handler of the path. Raises a `Problem` if the
        client is unknown or sends too many requests."""
        if path in PUBLIC:
            await handler(exchange)
        elif self._is_open:
            refuse_foreign_page(exchange)
            self._spend(peer_of(exchange.scope.get("client")))
            exchange.principal = UNRESTRICTED
            await handler(exchange)
        else:
            credential = await self._authenticated(exchange)
            exchange.principal = credential.principal
            self._spend(credential.principal.name)
            await self._run(exchange, handler, credential)

    async def _authenticated(self, exchange: Exchange) -> Credential:
        try:
            return await self._credential(exchange)
        except Problem as problem:
            peer = peer_of(exchange.scope.get("client"))
            self._spend(peer)
            self._failures.add(peer, problem)
            raise

    async def _credential(self, exchange: Exchange) -> Credential:
        header = exchange.header(b"authorization")
        certificate: ClientCertificate | None = exchange.scope.get(CERTIFICATE)
        if self._tokens is not None and (header is not None or certificate is None):
            return await self._check_token(self._tokens, header)
        if certificate is None:
            raise _unauthorized("a client certificate is needed")
        if certificate.problem is not None:
            raise Problem(403, *certificate.problem)
        if not self._is_valid(certificate, {}):
            raise _unauthorized("the certificate is revoked or has expired")
        return certificate

    async def _check_token(self, tokens: TokenCache, header: str | None) -> TokenRecord:
        """The valid token of an Authorization header. Raises a `Problem`; its text has no part of the
        header."""
        scheme, _, text = (header or "").partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthorized("a token is needed: Authorization: Bearer tp_...")
        record = find_token(await tokens.current(), text.strip())
        if record is None:
            # It may be new.
            record = find_token(await tokens.fresh(), text.strip())
        if record is None:
            raise _unauthorized("the token is unknown or revoked")
        if not record.is_valid(self._clock.now()):
            raise _unauthorized(f"the token {record.id} has expired")
        return record

    async def _run(self, exchange: Exchange, handler: Handler, credential: Credential) -> None:
        async with asyncio.timeout(None) as limit:
            self._running[limit] = credential
            if self._watch is None:
                self._watch = asyncio.ensure_future(self._end_invalid())
            try:
                await handler(exchange)
            except asyncio.CancelledError:
                if limit.when() is not None:
                    raise _unauthorized("the token or certificate was revoked or has expired") from None
                raise
            finally:
                del self._running[limit]

    async def _end_invalid(self) -> None:
        """While requests run: end those of clients that have lost their rights."""
        try:
            while self._running:
                await asyncio.sleep(REFRESH)
                records: TokenRecords = {}
                if self._tokens is not None:
                    try:
                        records = await self._tokens.current()
                    except TowpathError:
                        continue  # the ledger is unavailable
                now = asyncio.get_running_loop().time()
                for limit, credential in list(self._running.items()):
                    if limit.when() is None and not self._is_valid(credential, records):
                        limit.reschedule(now)
        finally:
            self._watch = None

    def _is_valid(self, credential: Credential, records: TokenRecords) -> bool:
        if isinstance(credential, TokenRecord):
            return credential.id in records and credential.is_valid(self._clock.now())
        denied = self._tls is not None and credential.serial in self._tls.denylist
        return not denied and self._clock.now() < credential.not_after

    def _spend(self, client: str) -> None:
        if self._rates is not None:
            self._rates.spend(client, asyncio.get_running_loop().time())


class TokenCache:
    """The tokens in the ledger. If the ledger is unavailable, so are the tokens."""

    def __init__(self, engine: Engine) -> None:
        self._ledger = engine.ledger
        self._records: TokenRecords = {}
        self._read_at = -math.inf
        """When the read of the records began."""
        self._reading: asyncio.Future[None] | None = None

    async def current(self) -> TokenRecords:
        """At most `REFRESH` old."""
        return await self._since(asyncio.get_running_loop().time() - REFRESH)

    async def fresh(self) -> TokenRecords:
        """Read after this call. Unknown tokens wait for it, and all of them for the same read."""
        return await self._since(asyncio.get_running_loop().time())

    async def _since(self, time: float) -> TokenRecords:
        while self._read_at < time:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read())
            await asyncio.shield(self._reading)
        return self._records

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._read_at + MIN_PAUSE - loop.time()))
            started = loop.time()
            found = await asyncio.to_thread(load_tokens, self._ledger)
            if self._read_at > 0:
                _log_changes(self._records, found)
            self._records, self._read_at = found, started
        finally:
            self._reading = None


class FailureLog:
    """Logs failed authentications, a bounded number of lines each second."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._count = 0

    def add(self, peer: str, problem: Problem) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._begin + REFRESH:
            if self._count > FAILURES_LOGGED:
                audit.warning("%d more requests were refused", self._count - FAILURES_LOGGED)
            self._begin, self._count = now, 0
        self._count += 1
        if self._count <= FAILURES_LOGGED:
            audit.warning("a request from %s was refused: %s", peer, problem.envelope.detail)


def _log_changes(before: TokenRecords, after: TokenRecords) -> None:
    for id in after.keys() - before.keys():
        audit.info("token %s (%s) is accepted", id, after[id].name)
    for id in before.keys() - after.keys():
        audit.info("token %s (%s) is not accepted any more", id, before[id].name)


def _unauthorized(detail: str) -> Problem:
    return Problem(401, "unauthorized", detail)
