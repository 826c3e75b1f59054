"""Peek and search messages without leasing them; list, replay and purge dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towpath.core.checks import optional_utc, utc
from towpath.core.job import FAILED, Job, Reason, State
from towpath.core.views import Query
from towpath.http.access import Right
from towpath.http.api.common import (
    JobArguments,
    NamespaceArguments,
    check_right,
    pattern_of,
    queue_of,
    shown_body,
    with_bodies,
)
from towpath.http.api.selection import (
    BulkResult,
    SelectedJobs,
    change_selected,
    purge_all,
    revive_all,
)
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.messages import attributes_of
from towpath.http.problems import bad_argument
from towpath.http.table import Route


class MessageArguments(JobArguments, forbid_unknown_fields=True, kw_only=True):
    namespace: Annotated[str, Meta(description="Namespace of the queue.")] = ""


class DeadArguments(JobArguments, forbid_unknown_fields=True, kw_only=True):
    queue: Annotated[str, Meta(description="Queue, or pattern with `*`.")] = ""
    namespace: Annotated[str, Meta(description="Namespace of the queue.")] = ""


class MessageItem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A stored message or job. `failures` counts failed attempts and lost leases. With `bodies=true` and a
    payload of at most 64 KiB it has its attributes, error and payload: a JSON value, text or base64, as
    `payload_encoding` states."""

    message_id: str
    queue: str
    state: State
    reason: Reason
    kind: str = ""
    part: str | None = None
    key: str | None = None
    priority: int
    attempts: int
    max_attempts: int
    failures: int
    created_at: datetime
    ready_at: datetime
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    lease_until: datetime | None = None
    owner: str | None = None
    correlation_id: str | None = None
    payload_content_type: str
    payload_bytes: int
    attributes: dict[str, Any] | UnsetType | None = UNSET
    error: str | UnsetType | None = UNSET
    payload: Any | UnsetType = UNSET
    payload_encoding: str | UnsetType = UNSET


class MessagePage(msgspec.Struct, kw_only=True):
    messages: list[MessageItem]
    next_cursor: str | None


class MessageSearchRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    @property
    def routes(self) -> tuple[Route, ...]:
        names = ("invalid_namespace",)
        return (
            Route(
                method="GET",
                path="/v1/queues/{queue}/messages",
                handler=self.peek,
                summary="The messages of a queue that match, without leasing them; newest first.",
                tag="queues",
                right=Right.CONSUME,
                arguments=MessageArguments,
                response=MessagePage,
                errors=names,
            ),
            Route(
                method="GET",
                path="/v1/dead",
                handler=self.list_dead,
                summary="Dead letters: messages and jobs that failed for good; newest first.",
                tag="dead letters",
                right=Right.CONSUME,
                arguments=DeadArguments,
                response=MessagePage,
                errors=names,
            ),
            Route(
                method="POST",
                path="/v1/dead/replay",
                handler=self.replay,
                summary="Retry dead letters by ids or by a filter; `dry_run` counts them.",
                tag="dead letters",
                right=Right.ADMIN,
                request=SelectedJobs,
                response=BulkResult,
                errors=(*names, "unknown_job"),
            ),
            Route(
                method="POST",
                path="/v1/dead/purge",
                handler=self.purge,
                summary="Delete dead letters by ids or by a filter; `dry_run` counts them.",
                tag="dead letters",
                right=Right.ADMIN,
                request=SelectedJobs,
                response=BulkResult,
                errors=(*names, "unknown_job"),
            ),
        )

    async def peek(self, exchange: Exchange) -> None:
        arguments = exchange.query(MessageArguments)
        name = queue_of(exchange, Right.CONSUME, NamespaceArguments(namespace=arguments.namespace))
        await self._answer(exchange, arguments.query(name), arguments.bodies)

    async def list_dead(self, exchange: Exchange) -> None:
        arguments = exchange.query(DeadArguments)
        if arguments.state:
            raise bad_argument("state is failed for all dead letters: leave it out")
        queue = pattern_of(arguments.queue, arguments.namespace)
        check_right(exchange.principal, Right.CONSUME, queue)
        query = msgspec.structs.replace(arguments.query(queue), states=(FAILED,))
        await self._answer(exchange, query, arguments.bodies)

    async def replay(self, exchange: Exchange) -> None:
        await change_selected(self._context, exchange, "replay", (FAILED,), revive_all)

    async def purge(self, exchange: Exchange) -> None:
        await change_selected(self._context, exchange, "purge", (FAILED,), purge_all)

    async def _answer(self, exchange: Exchange, query: Query, bodies: bool) -> None:
        page = await self._context.read(self._context.engine.ledger.find, query)
        whole = await self._context.read(with_bodies, self._context, page.jobs) if bodies else {}
        found = [_item(whole.get(job.id, job), job.id in whole) for job in page.jobs]
        await exchange.answer(MessagePage(messages=found, next_cursor=page.next))


def _item(job: Job, bodies: bool) -> MessageItem:
    names = ("queue", "state", "reason", "kind", "part", "key", "priority", "attempts", "max_attempts")
    fields: dict[str, Any] = {name: getattr(job, name) for name in (*names, "owner", "correlation_id")}
    times = ("expires_at", "finished_at", "lease_until")
    fields |= {name: optional_utc(getattr(job, name)) for name in times}
    if bodies:
        fields |= {"attributes": attributes_of(job.headers), "error": job.error, **shown_body(job)}
    return MessageItem(
        **fields,
        message_id=job.id,
        failures=job.failures + job.losses,
        created_at=utc(job.created_at),
        ready_at=utc(job.ready_at),
        payload_content_type=job.content_type,
        payload_bytes=job.size,
    )
