"""The routes ack, nack and extend, for a message that a consumer holds."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import MAX_LEASE, Settle
from towpath.core.job import FINISHED, RUNNING, Job
from towpath.errors import LostClaim
from towpath.http.access import Right
from towpath.http.context import HeldMessage, ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Problem, bad_body, first_missing
from towpath.http.wire import (
    AckRequest,
    AckResponse,
    ExtendRequest,
    ExtendResponse,
    NackRequest,
    NackResponse,
    QueueName,
    lease_ids,
)
from towpath.queues import receipts
from towpath.queues.receipts import Receipt

ReceiptRequest = AckRequest | ExtendRequest


class ReceiptRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine

    async def ack(self, exchange: Exchange) -> None:
        request = await exchange.json(AckRequest, required=True)
        held = await self._held(exchange, request)
        stateful = held.has_state or bool(request.state_lease_id)
        await self._settle(held, request, receipts.ack(Receipt(held.id, held.fence), stateful=stateful))
        await exchange.reply(AckResponse(acked=True, correlation_id=held.correlation_id), held.correlation_id)

    async def nack(self, exchange: Exchange) -> None:
        request = await exchange.json(NackRequest, required=True)
        delay, error, defer = _nack_options(request)
        held = await self._held(exchange, request, with_etag=True)
        await self._settle(held, request, receipts.nack(Receipt(held.id, held.fence), delay, error, defer))
        if not delay:
            self._engine.dispatcher.returned(held.queue)
        answer = NackResponse(
            requeued=True,
            meta_etag=lease_ids(held.id, held.fence).state_lease,
            correlation_id=held.correlation_id,
        )
        await exchange.reply(answer, held.correlation_id)

    async def extend(self, exchange: Exchange) -> None:
        request = await exchange.json(ExtendRequest, required=True)
        held = await self._held(exchange, request, with_etag=True)
        lease = request.extend_by_seconds * SECOND if request.extend_by_seconds > 0 else held.lease
        lease = min(lease, MAX_LEASE)
        receipt = Receipt(held.id, held.fence)
        try:
            answer = receipts.extended(receipt, await self._engine.acall(receipts.extend(receipt, lease)))
        except LostClaim:
            raise await self._lost(held, request) from None
        if held.id in self._context.held:
            self._context.held[held.id] = replace(held, lease=lease, until=answer.until)
        until = answer.until // SECOND
        response = ExtendResponse(
            lease_expires_at_unix=until,
            visibility_timeout_seconds=lease // SECOND,
            meta_etag=lease_ids(held.id, held.fence).meta_etag,
            state_lease_expires_at_unix=until if request.state_lease_id else 0,
            correlation_id=held.correlation_id,
        )
        await exchange.reply(response, held.correlation_id)

    async def _settle(self, held: HeldMessage, request: ReceiptRequest, command: Settle) -> None:
        self._context.held.pop(held.id, None)
        try:
            receipts.settled(command, await self._engine.acall(command))
        except LostClaim:
            raise await self._lost(held, request) from None

    async def _held(
        self, exchange: Exchange, request: ReceiptRequest, with_etag: bool = False
    ) -> HeldMessage:
        """The message that the request names, if the client holds it. Raises a `Problem`."""
        fields = [
            ("queue", request.queue),
            ("message_id", request.message_id),
            ("lease_id", request.lease_id),
        ]
        if with_etag:
            fields.append(("meta_etag", request.meta_etag))
        first_missing("missing_fields", fields)
        name = self._context.queue(request.namespace or exchange.argument("namespace"), request.queue)
        exchange.principal.check(Right.CONSUME, name.namespace, name.queue)
        held = held_by(self._context, name, request) or await self._read(name, request)
        if with_etag and request.meta_etag != lease_ids(held.id, held.fence).meta_etag:
            raise Problem(409, "cas_mismatch", "meta_etag is outdated: message metadata changed")
        return held

    async def _read(self, name: QueueName, request: ReceiptRequest) -> HeldMessage:
        """The message of the request, from the ledger. Raises a `Problem`."""
        id = request.message_id
        known = len(id) <= checks.MAX_NAME and checks.storable(id)
        jobs = await self._context.read(self._engine.ledger.get_many, [id], bodies=False) if known else {}
        found = held_or_problem(jobs.get(id), name, request)
        if isinstance(found, Problem):
            raise found
        return found

    async def _lost(self, held: HeldMessage, request: ReceiptRequest) -> Problem:
        """The problem of a receipt after its lease has ended in the ledger."""
        self._context.held.pop(held.id, None)
        name = self._context.queue(request.namespace, request.queue)
        try:
            await self._read(name._replace(stored=held.queue), request)
        except Problem as problem:
            return problem
        return mismatch("the lease is lost")


def held_by(context: ServerContext, name: QueueName, request: ReceiptRequest) -> HeldMessage | None:
    """The message that this server has delivered with this receipt. The message may have been delivered again
    by another server: a cached lease refuses nothing."""
    held = context.held.get(request.message_id)
    fits = held is not None and held.queue == name.stored and _fits(held.fence, request)
    return held if fits else None


def held_or_problem(job: Job | None, name: QueueName, request: ReceiptRequest) -> HeldMessage | Problem:
    """The message of a receipt by its record in the ledger, or why the client does not hold it."""
    if job is None or job.queue != name.stored:
        return Problem(404, "not_found", "message not found")
    if job.state in FINISHED:
        return Problem(404, "not_found", "message already removed")
    if not _fits(job.fence, request):
        return mismatch("the message was delivered again, or its lease is another one")
    if job.state is not RUNNING:
        if job.settled_fence == job.fence and not isinstance(request, ExtendRequest):
            return Problem(409, "cas_mismatch", "message metadata changed: it was returned to its queue")
        return mismatch("the lease is over: the message is in its queue again")
    return HeldMessage.of(job)


def _fits(fence: int, request: ReceiptRequest) -> bool:
    """Whether the request has the ids of the delivery with this fence."""
    ids = lease_ids(request.message_id, fence)
    return (
        request.lease_id == ids.lease
        and request.fencing_token in (0, fence)
        and request.txn_id in ("", ids.txn)
        and request.state_lease_id in ("", ids.state_lease)
        and request.state_fencing_token in (0, fence)
    )


def mismatch(detail: str) -> Problem:
    return Problem(409, "queue_message_lease_mismatch", detail)


def _nack_options(request: NackRequest) -> tuple[int, str | None, bool]:
    """Delay in microseconds, error and whether it is a defer."""
    intent = request.intent.strip().lower() or "failure"
    if intent not in ("failure", "defer"):
        raise Problem(400, "invalid_nack_intent", "intent must be failure or defer")
    if intent == "defer" and request.last_error is not None:
        raise Problem(400, "invalid_nack_last_error", "last_error is for the intent failure")
    delay = max(0, request.delay_seconds) * SECOND
    if delay > checks.FOREVER:
        raise bad_body(f"delay_seconds must be at most {checks.FOREVER // SECOND}")
    error = None if request.last_error is None else msgspec.json.encode(request.last_error).decode()
    return delay, error, intent == "defer"
