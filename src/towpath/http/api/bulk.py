"""enqueueMany and ackMany: many messages in one request and one commit."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towpath.core.checks import MAX_NAME, storable
from towpath.core.commands import Append, Appended, Settle
from towpath.core.job import Spec
from towpath.errors import InvalidInput, LostClaim, Refused, TowpathError
from towpath.http.access import Right
from towpath.http.context import HeldMessage, ServerContext
from towpath.http.exchange import Exchange
from towpath.http.messages import spec_of
from towpath.http.problems import Problem, bad_body, problem_of
from towpath.http.receipts import held_by, held_or_problem, mismatch
from towpath.http.table import Route
from towpath.http.wire import AckRequest, EnqueueMeta, QueueName, correlation_of
from towpath.queues import receipts
from towpath.queues.blobs import StoredPayload
from towpath.queues.receipts import Receipt
from towpath.tasks.new_jobs import new_id

MAX_ITEMS = 1000
MAX_BODY = 8 * 1024 * 1024
"""Bytes of the JSON of many messages, jobs or receipts."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class NewMessage(EnqueueMeta, forbid_unknown_fields=True, kw_only=True):
    """A message of `enqueueMany`. Its payload is one of `payload_json`, `payload_text` and `payload_base64`,
    or empty."""

    payload_json: Any | UnsetType = UNSET
    payload_text: str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    correlation_id: str = ""

    def payload(self) -> tuple[bytes, str]:
        """The bytes and their content type if the message names none. Raises a `Problem`."""
        given = [name for name in _PAYLOADS if getattr(self, name) is not UNSET]
        if len(given) > 1:
            raise bad_body(f"{' and '.join(given)} exclude each other: give one of them")
        if self.payload_json is not UNSET:
            return msgspec.json.encode(self.payload_json), JSON
        if isinstance(self.payload_text, str):
            return self.payload_text.encode(errors="surrogatepass"), TEXT
        if isinstance(self.payload_base64, str):
            try:
                return base64.b64decode(self.payload_base64, validate=True), ""
            except (binascii.Error, ValueError) as error:
                raise bad_body(f"payload_base64 is not base64: {error}") from None
        return b"", ""


_PAYLOADS = ("payload_json", "payload_text", "payload_base64")


class EnqueueManyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`namespace` and `queue` are for the messages that name none."""

    namespace: str = ""
    queue: str = ""
    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=MAX_ITEMS)]


class EnqueuedMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`duplicate`: another message holds the `dedupe_key`; `message_id` is its id."""

    namespace: str
    queue: str
    message_id: str
    payload_bytes: int
    correlation_id: str
    duplicate: bool = False


class EnqueueManyResponse(msgspec.Struct, kw_only=True):
    messages: list[EnqueuedMessage]


class MessageReceipt(AckRequest, forbid_unknown_fields=True, kw_only=True):
    """The fields of a delivery that identify it."""

    message_id: Annotated[str, Meta(min_length=1)]
    lease_id: Annotated[str, Meta(min_length=1)]


class AckManyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`namespace` and `queue` are for the receipts that name none."""

    namespace: str = ""
    queue: str = ""
    receipts: Annotated[list[MessageReceipt], Meta(min_length=1, max_length=MAX_ITEMS)]


class AckResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`error` and `detail` if the message was not acknowledged."""

    message_id: str
    acked: bool
    error: str = ""
    detail: str = ""


class AckManyResponse(msgspec.Struct, kw_only=True):
    """`results` are in the order of the receipts."""

    acked: int
    results: list[AckResult]


class BulkRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine
        names = ("invalid_namespace", "invalid_queue", "missing_queue")
        self.routes = (
            Route(
                method="POST",
                path="/v1/queue/enqueueMany",
                handler=self.enqueue_many,
                summary=f"Store up to {MAX_ITEMS} messages, all or none, in one commit.",
                tag="messages",
                right=Right.PRODUCE,
                request=EnqueueManyRequest,
                response=EnqueueManyResponse,
                errors=(*names, "throttled", "shutdown_draining"),
            ),
            Route(
                method="POST",
                path="/v1/queue/ackMany",
                handler=self.ack_many,
                summary=f"Acknowledge up to {MAX_ITEMS} messages in one commit; each has its own result.",
                tag="messages",
                right=Right.CONSUME,
                request=AckManyRequest,
                response=AckManyResponse,
                errors=names,
            ),
        )

    async def enqueue_many(self, exchange: Exchange) -> None:
        self._context.refuse_when_draining()
        request = await exchange.request(EnqueueManyRequest, MAX_BODY)
        made = [self._message(exchange, request, n) for n in range(len(request.messages))]
        answer = await self._engine.acall(Append(tuple([spec for _, spec in made])))
        assert isinstance(answer, Appended)
        found = [
            EnqueuedMessage(
                namespace=name.namespace,
                queue=name.queue,
                message_id=placed.id,
                payload_bytes=len(spec.payload),
                correlation_id=spec.correlation_id or "",
                duplicate=placed.id != spec.id,
            )
            for (name, spec), placed in zip(made, answer.jobs, strict=True)
        ]
        await exchange.answer(EnqueueManyResponse(messages=found))

    def _message(
        self, exchange: Exchange, request: EnqueueManyRequest, number: int
    ) -> tuple[QueueName, Spec]:
        message = request.messages[number]
        name = self._context.queue(message.namespace or request.namespace, message.queue or request.queue)
        exchange.principal.check(Right.PRODUCE, name.namespace, name.queue)
        try:
            payload, content_type = message.payload()
            message.payload_content_type = message.payload_content_type or content_type
            correlation = correlation_of(message.correlation_id) or exchange.own_correlation()
            stored = StoredPayload(payload, None, len(payload))
            return name, spec_of(new_id(), name, message, stored, correlation, self._engine.priorities)
        except InvalidInput as error:
            raise bad_body(f"messages[{number}]: {error}") from None
        except Problem as problem:
            raise Problem(
                problem.status, problem.code, f"messages[{number}]: {problem.envelope.detail}"
            ) from None

    async def ack_many(self, exchange: Exchange) -> None:
        request = await exchange.request(AckManyRequest, MAX_BODY)
        names = [
            self._context.queue(each.namespace or request.namespace, each.queue or request.queue)
            for each in request.receipts
        ]
        for name in set(names):
            exchange.principal.check(Right.CONSUME, name.namespace, name.queue)
        asked = request.receipts
        found = await self._held(names, asked)
        problems = await self._settle(asked, found)
        results = [_result(each, problem) for each, problem in zip(asked, problems, strict=True)]
        await exchange.answer(AckManyResponse(acked=sum(each.acked for each in results), results=results))

    async def _held(self, names: list[QueueName], asked: list[MessageReceipt]) -> list[HeldMessage | Problem]:
        """For each receipt its message, or why it cannot be acknowledged. The messages that this server has
        not delivered are read in one read."""
        cached = [held_by(self._context, name, each) for name, each in zip(names, asked, strict=True)]
        ids = {
            each.message_id
            for each, message in zip(asked, cached, strict=True)
            if message is None and len(each.message_id) <= MAX_NAME and storable(each.message_id)
        }
        jobs = await self._context.read(self._engine.ledger.get_many, list(ids), bodies=False) if ids else {}
        return [
            message or held_or_problem(jobs.get(each.message_id), name, each)
            for name, each, message in zip(names, asked, cached, strict=True)
        ]

    async def _settle(
        self, asked: list[MessageReceipt], found: list[HeldMessage | Problem]
    ) -> list[Problem | None]:
        """Settle the messages in one batch. For each receipt None, or why it failed."""
        settles: list[Settle] = []
        for request, held in zip(asked, found, strict=True):
            if isinstance(held, HeldMessage):
                stateful = held.has_state or bool(request.state_lease_id)
                settles.append(receipts.ack(Receipt(held.id, held.fence), stateful=stateful))
                self._context.held.pop(held.id, None)
        replies = await self._engine.aapply(settles) if settles else []
        settled = (_problem(settle, reply) for settle, reply in zip(settles, replies, strict=True))
        return [next(settled) if isinstance(held, HeldMessage) else held for held in found]


def _problem(settle: Settle, reply: Any) -> Problem | None:
    try:
        if isinstance(reply, TowpathError):
            raise reply
        receipts.settled(settle, reply)
    except LostClaim:
        return mismatch("the lease is lost")
    except Refused as error:
        return problem_of(error)
    return None


def _result(receipt: MessageReceipt, problem: Problem | None) -> AckResult:
    if problem is None:
        return AckResult(message_id=receipt.message_id, acked=True)
    return AckResult(
        message_id=receipt.message_id, acked=False, error=problem.code, detail=problem.envelope.detail
    )
