"""Queues and their parts: list, show, pause, resume and limit them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towpath.core.views import Counts, QueueView
from towpath.http.access import Right
from towpath.http.api.common import (
    Moment,
    NamespaceArguments,
    PageArguments,
    may_see,
    page_of_names,
    place_of,
    queue_of,
)
from towpath.http.audit import audit
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Problem, bad_body
from towpath.http.table import Route
from towpath.http.wire import namespace_name
from towpath.queues.message import Queue
from towpath.queues.queue import BaseGate, PartStatus, QueueStatus, queue_status, warn_depth, warn_depths


class QueueArguments(PageArguments, forbid_unknown_fields=True, kw_only=True):
    prefix: Annotated[str, Meta(description="Beginning of the name.")] = ""
    namespace: Annotated[str, Meta(description="Only queues of this namespace.")] = ""


class PartArguments(PageArguments, forbid_unknown_fields=True, kw_only=True):
    namespace: Annotated[str, Meta(description="Namespace of the queue.")] = ""
    prefix: Annotated[str, Meta(description="Beginning of the name of the part.")] = ""


class QueueItem(msgspec.Struct, kw_only=True):
    """A queue at one moment. `retention` is seconds; no job starts before `next_at`."""

    name: str
    counts: Counts
    oldest_ready: datetime | None
    paused: bool
    why: str | None
    capacity: int | None
    warn_depth: int | None
    cap: int | None
    rate: str | None
    next_at: datetime | None
    retention: float | None
    keep: int | None


class QueuePage(msgspec.Struct, kw_only=True):
    queues: list[QueueItem]
    next_cursor: str | None


class PartItem(msgspec.Struct, kw_only=True):
    """A part of a queue at one moment."""

    queue: str
    name: str
    ready: int
    running: int
    paused: bool
    why: str | None
    cap: int | None
    rate: str | None
    next_at: datetime | None
    weight: int
    capacity: int | None
    append_rate: str | None
    append_at: datetime | None


class PartPage(msgspec.Struct, kw_only=True):
    parts: list[PartItem]
    next_cursor: str | None


class QueueChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings to change; null removes a limit. Rates are written as `100/m` or `10/s:20`, spans are
    seconds."""

    paused: bool | UnsetType = UNSET
    why: str | UnsetType | None = UNSET
    cap: int | UnsetType | None = UNSET
    rate: str | UnsetType | None = UNSET
    not_before: Moment | UnsetType = UNSET
    capacity: int | UnsetType | None = UNSET
    warn_depth: int | UnsetType | None = UNSET
    retention: float | UnsetType | None = UNSET
    keep: int | UnsetType | None = UNSET


class PartChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings to change, as for a queue."""

    paused: bool | UnsetType = UNSET
    why: str | UnsetType | None = UNSET
    cap: int | UnsetType | None = UNSET
    rate: str | UnsetType | None = UNSET
    not_before: Moment | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    capacity: int | UnsetType | None = UNSET
    append_rate: str | UnsetType | None = UNSET


class QueueAdminRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine

    @property
    def routes(self) -> tuple[Route, ...]:
        name = ("invalid_namespace",)
        one = partial(Route, path="/v1/queues/{queue}", tag="queues", arguments=NamespaceArguments)
        return (
            Route(
                method="GET",
                path="/v1/queues",
                handler=self.list_queues,
                summary="The queues that the client may read, by name, with counts and settings.",
                tag="queues",
                right=Right.CONSUME,
                arguments=QueueArguments,
                response=QueuePage,
                errors=name,
            ),
            one(
                method="GET",
                handler=self.show,
                summary="One queue: exact counts and settings.",
                right=Right.CONSUME,
                response=QueueItem,
                errors=(*name, "unknown_queue"),
            ),
            one(
                method="PATCH",
                handler=self.change,
                summary="Pause or resume a queue, set its limits. A new queue is created.",
                right=Right.ADMIN,
                request=QueueChange,
                response=QueueItem,
                errors=name,
            ),
            Route(
                method="GET",
                path="/v1/queues/{queue}/parts",
                handler=self.list_parts,
                summary="The parts of a queue with ready or running jobs or settings, by name.",
                tag="queues",
                right=Right.CONSUME,
                arguments=PartArguments,
                response=PartPage,
                errors=name,
            ),
            Route(
                method="PATCH",
                path="/v1/queues/{queue}/parts/{part}",
                handler=self.change_part,
                summary="Pause or resume a part of a queue, set its limits.",
                tag="queues",
                right=Right.ADMIN,
                arguments=NamespaceArguments,
                request=PartChange,
                response=PartItem,
                errors=name,
            ),
        )

    async def list_queues(self, exchange: Exchange) -> None:
        arguments = exchange.query(QueueArguments)
        space = namespace_name(arguments.namespace) if arguments.namespace else None
        views, depths = await self._read()
        names = [
            name
            for name in views
            if _is_named(name, space, arguments.prefix) and may_see(exchange.principal, name)
        ]
        page, cursor = page_of_names(names, arguments)
        queues = [_item(queue_status(views[name]), depths.get(name)) for name in page]
        await exchange.answer(QueuePage(queues=queues, next_cursor=cursor))

    async def show(self, exchange: Exchange) -> None:
        name = queue_of(exchange, Right.CONSUME, exchange.query(NamespaceArguments))
        ledger = self._engine.ledger
        view, depth = await self._context.read(lambda: (ledger.queue(name), warn_depth(ledger, name)))
        if view is None:
            raise Problem(404, "unknown_queue", f"there is no queue {name}")
        await exchange.answer(_item(queue_status(view), depth))

    async def change(self, exchange: Exchange) -> None:
        name = queue_of(exchange, Right.ADMIN, exchange.query(NamespaceArguments))
        given = _given(await exchange.request(QueueChange))
        queue = Queue(self._engine, name)
        limits = _limits(given)
        if limits:
            await queue.aconfigure(**limits)
        await _pause(queue, given)
        audit(exchange, _words(given), f"queue {name}")
        await exchange.answer(_item(await queue.astats(), await queue.awarn_depth()))

    async def list_parts(self, exchange: Exchange) -> None:
        arguments = exchange.query(PartArguments)
        name = queue_of(exchange, Right.CONSUME, NamespaceArguments(namespace=arguments.namespace))
        parts = {each.name: each for each in await Queue(self._engine, name).aparts()}
        found = [each for each in parts if each.startswith(arguments.prefix)]
        page, cursor = page_of_names(found, arguments)
        await exchange.answer(PartPage(parts=[_part(parts[each]) for each in page], next_cursor=cursor))

    async def change_part(self, exchange: Exchange) -> None:
        name = queue_of(exchange, Right.ADMIN, exchange.query(NamespaceArguments))
        given = _given(await exchange.request(PartChange))
        part = Queue(self._engine, name).part(exchange.path["part"])
        limits = _limits(given)
        if limits:
            await part.aconfigure(**limits)
        await _pause(part, given)
        audit(exchange, _words(given), f"part {part.name} of queue {name}")
        await exchange.answer(_part(await part.astats()))

    async def _read(self) -> tuple[dict[str, QueueView], dict[str, int]]:
        ledger = self._engine.ledger
        return await self._context.read(lambda: (ledger.queues(), warn_depths(ledger)))


def _is_named(name: str, namespace: str | None, prefix: str) -> bool:
    if namespace is None:
        return name.startswith(prefix)
    place = place_of(name)
    return place.namespace == namespace and place.queue.startswith(prefix)


def _given(change: QueueChange | PartChange) -> dict[str, Any]:
    found = {name: getattr(change, name) for name in change.__struct_fields__}
    if found["paused"] is False and found["why"] is not UNSET:
        raise bad_body("why has no effect with paused=false: leave it out")
    return {name: value for name, value in found.items() if value is not UNSET}


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The limits among the changes. The reason belongs to the pause, if there is one."""
    pause = ("paused", "why") if "paused" in given else ()
    return {name: value for name, value in given.items() if name not in pause}


async def _pause(gate: BaseGate, given: Mapping[str, Any]) -> None:
    if given.get("paused") is True:
        await gate.apause(given.get("why"))
    elif "paused" in given:
        await gate.aresume()


def _words(given: Mapping[str, Any]) -> str:
    """The changes for the audit log."""
    return "set " + (", ".join(f"{name}={value}" for name, value in given.items()) or "nothing of")


def _item(status: QueueStatus, depth: int | None) -> QueueItem:
    fields = {name: getattr(status, name) for name in QueueItem.__struct_fields__ if name != "warn_depth"}
    return QueueItem(**fields | {"rate": _rate(status.rate), "warn_depth": depth})


def _part(status: PartStatus) -> PartItem:
    fields = {name: getattr(status, name) for name in PartItem.__struct_fields__}
    return PartItem(**fields | {"rate": _rate(status.rate), "append_rate": _rate(status.append_rate)})


def _rate(rate: object) -> str | None:
    return None if rate is None else str(rate)
