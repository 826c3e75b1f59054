"""The ledger over HTTP, for the processes whose URL is this server (`ledger/remote`).

A request is a batch of commands, a read, or the wait for a commit. The server keeps no record of its
clients: claims and leases are in the ledger, and the wait for a version of another server process returns at
once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from towpath.core import checks
from towpath.core.commands import Command
from towpath.errors import InvalidInput, LedgerClosed, LedgerError, Refused, TowpathError
from towpath.http.access import Right
from towpath.http.context import ServerContext, draining
from towpath.http.exchange import Exchange
from towpath.http.problems import Disconnected, Problem
from towpath.http.table import Media, Route
from towpath.ledger import Answer
from towpath.ledger.remote import messages
from towpath.ledger.remote.messages import (
    MAX_BODY,
    MAX_COMMANDS,
    MAX_WAIT,
    READS,
    TEST_READS,
    ApplyResponse,
    ServerVersion,
    UnknownFormat,
    WaitResponse,
)
from towpath.runtime.commit.pending import Reply, resolve_futures

Serve = Callable[[bytes], Awaitable[bytes]]


def ledger_routes(context: ServerContext) -> tuple[Route, ...]:
    routes = LedgerRoutes(context)
    post = partial(
        Route,
        method="POST",
        tag="ledger",
        right=Right.ADMIN,
        request=Media(messages.CONTENT_TYPE, "A request of the format of `towpath.ledger.remote`."),
        response=Media(messages.CONTENT_TYPE, "The answer in the same format."),
        error_type=messages.CONTENT_TYPE,
        errors=("unsupported_format", "payload_too_large", "shutdown_draining"),
    )
    return (
        post(path="/v1/ledger/apply", handler=routes.apply, summary="Apply a batch of commands."),
        post(path="/v1/ledger/read", handler=routes.read, summary="Read the ledger."),
        post(path="/v1/ledger/wait", handler=routes.wait, summary="Wait for a commit."),
    )


class LedgerRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._server = secrets.token_hex(8)
        """Names this process in versions."""

    async def apply(self, exchange: Exchange) -> None:
        await self._serve(exchange, self._apply)

    async def read(self, exchange: Exchange) -> None:
        await self._serve(exchange, self._read)

    async def wait(self, exchange: Exchange) -> None:
        await self._serve(exchange, partial(self._wait, exchange))

    async def _serve(self, exchange: Exchange, serve: Serve) -> None:
        """Answer 200 with a value, or another status with an error of the ledger."""
        exchange.principal.check(Right.ADMIN)
        body = await exchange.body(MAX_BODY, _too_large)
        status = 200
        try:
            answer = await serve(body)
        except UnknownFormat as error:
            raise Problem(400, "unsupported_format", str(error)) from None
        except LedgerClosed:
            raise  # of the server, which stops; the ledger of the client stays open
        except TowpathError as error:
            status, answer = _status(error), messages.pack(messages.error_message(error))
        headers = [(b"content-type", messages.CONTENT_TYPE.encode())]
        await exchange.send(
            status, [*headers, (b"x-correlation-id", exchange.own_correlation().encode())], answer
        )

    async def _apply(self, body: bytes) -> bytes:
        request = messages.apply_request(body)
        commands, now = request.commands, request.now
        checks.whole("len(commands)", len(commands), 0, MAX_COMMANDS)
        repeats = self._engine.ledger.repeats
        answers: Sequence[Answer] = ()
        version = None
        if now is not None:
            answers, version = await self._context.read(self._apply_at, commands, now)
        elif commands:
            answers, version = await self._commit(commands)
        repeated = self._engine.ledger.repeats != repeats
        found = [messages.error_message(each) if isinstance(each, Refused) else each for each in answers]
        return messages.pack(ApplyResponse(found, version, repeated))

    async def _commit(self, commands: Sequence[Command]) -> tuple[Sequence[Answer], ServerVersion | None]:
        """Commit together with the commands of all other clients."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[Sequence[Reply], ServerVersion | None]] = loop.create_future()

        def receive(replies: Sequence[Reply]) -> None:
            resolve_futures(loop, [(answered, (replies, self._version()))])

        self._engine.committer.post_foreign(commands, receive)
        replies, version = await answered
        answers: list[Answer] = []
        for reply in replies:
            if isinstance(reply, TowpathError) and not isinstance(reply, Refused):
                raise reply
            answers.append(reply)
        return answers, version

    def _apply_at(self, commands: Sequence[Command], now: int) -> tuple[list[Answer], ServerVersion | None]:
        self._check_for_tests("now")
        return self._engine.ledger.apply(commands, now), self._version()

    def _version(self) -> ServerVersion | None:
        """The version after a commit. None if it cannot be read; the commit stands."""
        try:
            return ServerVersion(self._server, self._engine.ledger.version())
        except LedgerError:
            return None

    async def _read(self, body: bytes) -> bytes:
        request = messages.read_request(body)
        read = READS.get(request.name)
        if read is None:
            raise InvalidInput(field="name", value=request.name, expected=f"one of {', '.join(READS)}")
        if request.name in TEST_READS:
            self._check_for_tests(request.name)
        function = getattr(self._engine.ledger, request.name)
        return messages.pack_value(await self._context.read(function, **read.arguments(request.arguments)))

    def _check_for_tests(self, field: str) -> None:
        if not self._context.options.for_tests:
            raise InvalidInput(field=field, value="given", expected="left out: it is for tests of ledgers")

    async def _wait(self, exchange: Exchange, body: bytes) -> bytes:
        request = messages.wait_request(body)
        self._context.refuse_when_draining()
        version = await self._context.read(self._version)
        seen = request.seen.get(self._server, -1)
        if version is not None and version.number <= seen and request.seconds > 0:
            number = await self._next_version(exchange, seen, min(request.seconds, MAX_WAIT))
            version = ServerVersion(self._server, number)
        if version is None:
            raise Problem(503, "unavailable", "the ledger is unavailable; try again", retry_after=1)
        return messages.pack(WaitResponse(version, self._engine.ledger.capabilities.durable))

    async def _next_version(self, exchange: Exchange, seen: int, seconds: float) -> int:
        """The version as soon as it is larger than `seen`, or after these seconds."""
        changed = asyncio.ensure_future(self._changed(seen, seconds))
        gone = asyncio.ensure_future(exchange.disconnected())
        drained = asyncio.ensure_future(self._context.drained.wait())
        waits = (changed, gone, drained)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                return changed.result()
            raise Disconnected if gone.done() else draining()
        finally:
            for each in waits:
                each.cancel()

    async def _changed(self, seen: int, seconds: float) -> int:
        loop, watch = asyncio.get_running_loop(), self._engine.watch
        end = loop.time() + seconds
        version = seen
        # The watching thread may be behind the version that an apply has answered.
        while version <= seen and (left := end - loop.time()) > 0:
            found = await watch.changed(version, left)
            assert found is not None
            version = found
        return max(version, seen)


def _status(error: TowpathError) -> int:
    if isinstance(error, InvalidInput):
        return 400
    if isinstance(error, Refused):
        return 409
    return 503 if error.retryable else 500


def _too_large() -> Problem:
    return Problem(413, "payload_too_large", f"the body has more than {MAX_BODY} bytes")
