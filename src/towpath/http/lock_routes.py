"""acquire, keepalive, release and describe: leases on keys."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from functools import partial

from towpath.core.checks import SECOND
from towpath.http import locks
from towpath.http.access import Right
from towpath.http.context import ServerContext
from towpath.http.documents import check_key, fencing_token, is_state_key, key_name
from towpath.http.exchange import Exchange
from towpath.http.locks import Applicant, Contended, LeaseClaim, LockName, LockRecord, LockRecords
from towpath.http.problems import Disconnected, Problem, bad_body
from towpath.http.wire import (
    AcquireRequest,
    AcquireResponse,
    DescribeResponse,
    KeepaliveRequest,
    KeepaliveResponse,
    ReleaseRequest,
    ReleaseResponse,
    is_txn,
)
from towpath.tasks.new_jobs import new_id

POLL = 0.5
"""Seconds after which a waiting acquire reads the key again: another server may have released it."""
MAX_OWNER = 200
NO_WAIT = -1


class LockRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._records = LockRecords(context)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """The acquires of this server that wait for a key, by its note."""

    async def acquire(self, exchange: Exchange) -> None:
        request = await exchange.json(AcquireRequest)
        self._context.refuse_when_draining()
        name = key_name(self._context, request.namespace, request.key.strip() or new_id())
        check_key(exchange, name)
        if is_state_key(name.key):
            raise Problem(400, "invalid_key", "the lease of a state is that of its message: dequeueWithState")
        if not request.owner.strip():
            raise Problem(400, "missing_owner", "owner must be given")
        if len(request.owner) > MAX_OWNER:
            raise bad_body(f"owner has more than {MAX_OWNER} characters")
        txn = (exchange.header(b"x-txn-id") or request.txn_id).strip()
        if txn and not is_txn(txn):
            raise Problem(400, "invalid_txn", "txn_id is not an xid")
        applicant = Applicant(
            request.owner + exchange.principal.suffix,
            self._ttl(request.ttl_seconds),
            txn or locks.new_xid(),
            request.if_not_exists,
        )
        record = await self._acquired(exchange, name, applicant, request.block_seconds)
        answer = AcquireResponse(
            namespace=name.namespace,
            lease_id=record.lease,
            txn_id=record.txn,
            key=name.key,
            owner=record.owner,
            expires_at_unix=record.expires_at // SECOND,
            version=record.version,
            state_etag=record.etag,
            fencing_token=record.fence,
            correlation_id=exchange.own_correlation(),
        )
        headers = [
            (b"x-fencing-token", str(record.fence).encode()),
            (b"x-key-version", str(record.version).encode()),
        ]
        await exchange.reply(answer, answer.correlation_id, headers)

    async def keepalive(self, exchange: Exchange) -> None:
        request = await exchange.json(KeepaliveRequest, required=True)
        name, claim = self._claimed(exchange, request)
        if is_state_key(name.key):
            detail = "the lease of a state is that of its message: use /v1/queue/extend"
            raise Problem(403, "queue_state_keepalive_unsupported", detail)
        ttl = self._ttl(request.ttl_seconds)
        record = await self._records.change(name, lambda old, now: locks.renew(old, claim, ttl, now))
        answer = KeepaliveResponse(expires_at_unix=record.expires_at // SECOND)
        headers = [(b"x-fencing-token", str(record.fence).encode())]
        await exchange.reply(answer, exchange.own_correlation(), headers)

    async def release(self, exchange: Exchange) -> None:
        request = await exchange.json(ReleaseRequest, required=True)
        name, claim = self._claimed(exchange, request)
        if not claim.txn:
            raise Problem(400, "missing_txn", "txn_id must be given")
        if not is_state_key(name.key):
            await self._release(name, claim, request.rollback)
        await exchange.reply(ReleaseResponse(released=True), exchange.own_correlation())

    async def describe(self, exchange: Exchange) -> None:
        key = exchange.argument("key")
        if not key.strip():
            raise Problem(400, "missing_key", "key must be given in the query string")
        name = key_name(self._context, exchange.argument("namespace"), key)
        check_key(exchange, name, Right.CONSUME)
        record = await self._records.load(name)
        answer = DescribeResponse(
            namespace=name.namespace,
            key=name.key,
            owner=record.owner,
            lease_id=record.lease,
            expires_at_unix=record.expires_at // SECOND,
            version=record.version,
            state_etag=record.etag,
            updated_at_unix=record.updated_at,
            metadata={},
        )
        await exchange.reply(answer, exchange.own_correlation())

    async def _acquired(
        self, exchange: Exchange, name: LockName, applicant: Applicant, block: int
    ) -> LockRecord:
        """The record with the lease of the applicant. Raises a `Problem` if it does not become free in
        time."""
        change = partial(_acquire, applicant)
        try:
            return await self._records.change(name, change)
        except Contended as contended:
            if block == NO_WAIT:
                raise self._held(contended.record) from None
        # Below -1 the client leaves the wait to the server.
        seconds = None if block == 0 else block if block > 0 else self._context.options.acquire_block
        released = asyncio.Event()
        waiting = self._waiting.setdefault(name.note, set())
        waiting.add(released)
        gone = asyncio.ensure_future(exchange.disconnected())
        gone.add_done_callback(lambda _: released.set())
        try:
            return await self._wait(name, change, released, gone, seconds)
        finally:
            gone.cancel()
            waiting.discard(released)
            if not waiting:
                self._waiting.pop(name.note, None)

    async def _wait(
        self,
        name: LockName,
        change: Callable[[LockRecord, int], LockRecord],
        released: asyncio.Event,
        gone: asyncio.Future[None],
        seconds: int | None,
    ) -> LockRecord:
        """Acquire as soon as the key is free. A release by another server is noticed by reading the key."""
        loop = asyncio.get_running_loop()
        end = math.inf if seconds is None else loop.time() + seconds
        while True:
            try:
                record = await self._records.change(name, change)
            except Contended as contended:
                if loop.time() >= end:
                    raise self._held(contended.record) from None
                left = contended.record.expires_at - self._context.engine.clock.now()
                pause = min(POLL, max(left / SECOND, 0.01), end - loop.time())
            else:
                if gone.done():
                    await self._release(name, LeaseClaim(record.lease, record.fence, None), rollback=True)
                    raise Disconnected
                return record
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await released.wait()
            released.clear()
            if gone.done():
                raise Disconnected
            self._context.refuse_when_draining()

    def _held(self, record: LockRecord) -> Problem:
        left = math.ceil((record.expires_at - self._context.engine.clock.now()) / SECOND)
        problem = Problem(409, "waiting", "lease already held", retry_after=max(1, left))
        return problem.versioned(record.version, record.etag)

    async def _release(self, name: LockName, claim: LeaseClaim, rollback: bool) -> None:
        await self._records.change(name, lambda old, now: locks.release(old, claim, rollback, now))
        for released in self._waiting.get(name.note, ()):
            released.set()

    def _claimed(
        self, exchange: Exchange, request: KeepaliveRequest | ReleaseRequest
    ) -> tuple[LockName, LeaseClaim]:
        """The key and the lease of a request. Raises a `Problem`."""
        if not request.key.strip():
            raise Problem(400, "missing_key", "key must be given")
        if not request.lease_id.strip():
            raise Problem(400, "missing_lease", "lease_id must be given")
        txn = (exchange.header(b"x-txn-id") or request.txn_id).strip()
        claim = LeaseClaim(request.lease_id.strip(), fencing_token(exchange), txn)
        name = key_name(self._context, request.namespace, request.key)
        check_key(exchange, name)
        return name, claim

    def _ttl(self, seconds: int) -> int:
        if seconds < 0:
            raise Problem(
                400, "invalid_ttl", "ttl_seconds must not be negative; 0 is the default of the server"
            )
        options = self._context.options
        return SECOND * (min(seconds, options.max_visibility) if seconds > 0 else options.visibility)


def _acquire(applicant: Applicant, record: LockRecord, now: int) -> LockRecord:
    return locks.acquire(record, applicant, now)
