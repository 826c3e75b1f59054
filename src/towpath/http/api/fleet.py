"""Schedules, workers, lanes and breakers of the fleet."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towpath.app import App
from towpath.core.breaker import BreakerStatus
from towpath.core.fleet import LaneView
from towpath.core.schedule import ScheduleStatus
from towpath.http.access import Right
from towpath.http.api.common import PageArguments, known_name, page_of_names
from towpath.http.api.groups import PauseReason
from towpath.http.audit import audit
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Problem
from towpath.http.table import Route


class SchedulePage(msgspec.Struct, kw_only=True):
    schedules: list[ScheduleStatus]
    next_cursor: str | None


class ScheduleChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields to change: `cron` or `every` (seconds), the time zone, the policy for missed times, the
    arguments of its jobs."""

    cron: str | UnsetType = UNSET
    every: float | UnsetType = UNSET
    tz: str | UnsetType = UNSET
    missed: Literal["skip", "once", "all"] | UnsetType = UNSET
    args: dict[str, Any] | UnsetType = UNSET


class Removed(msgspec.Struct, kw_only=True):
    name: str
    removed: bool


class Triggered(msgspec.Struct, kw_only=True):
    """`id` is the id of the new job."""

    name: str
    id: str


class LimitItem(msgspec.Struct, kw_only=True):
    """The limit of a worker for a resource or a lane."""

    name: str
    queues: list[str]
    limit: int
    running: int
    until: str | None


class WorkerItem(msgspec.Struct, kw_only=True):
    """The last report of a worker, at most 10 s old."""

    name: str
    owner: str
    host: str
    pid: int
    queues: list[str]
    concurrency: int
    running: int
    started_at: str
    seen_at: str
    paused: bool
    draining: bool
    why: str | None
    lanes: list[LaneView]
    limits: list[LimitItem]


class WorkerPage(msgspec.Struct, kw_only=True):
    """`paused`: the pauses in force, names or patterns, each with its reason."""

    workers: list[WorkerItem]
    paused: dict[str, str | None]
    next_cursor: str | None


class WorkersChanged(msgspec.Struct, kw_only=True):
    """The owners of the affected workers, and the pauses in force."""

    workers: list[str]
    paused: dict[str, str | None]


class LanePage(msgspec.Struct, kw_only=True):
    lanes: list[LaneView]
    next_cursor: str | None


class LaneChanged(msgspec.Struct, kw_only=True):
    name: str
    paused: bool


class BreakerPage(msgspec.Struct, kw_only=True):
    breakers: list[BreakerStatus]
    next_cursor: str | None


class BreakerOpening(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`seconds` until probes may run; without it until it is closed by hand."""

    why: Annotated[str, Meta(max_length=500)] = ""
    seconds: Annotated[float, Meta(ge=0)] | UnsetType = UNSET


class ScheduleRoutes:
    def __init__(self, app: App) -> None:
        self._schedules = app.schedules

    @property
    def routes(self) -> tuple[Route, ...]:
        one = partial(Route, path="/v1/schedules/{name}", tag="fleet", errors=("unknown_name",))
        post = partial(one, method="POST", right=Right.ADMIN, response=ScheduleStatus)
        return (
            Route(
                method="GET",
                path="/v1/schedules",
                handler=self.list_schedules,
                summary="The schedules, by name.",
                tag="fleet",
                right=Right.CONSUME,
                arguments=PageArguments,
                response=SchedulePage,
            ),
            one(
                method="GET",
                handler=self.show_schedule,
                summary="One schedule.",
                right=Right.CONSUME,
                response=ScheduleStatus,
            ),
            one(
                method="PATCH",
                handler=self.set_schedule,
                summary="Change a schedule, until the program declares other values.",
                right=Right.ADMIN,
                request=ScheduleChange,
                response=ScheduleStatus,
            ),
            one(
                method="DELETE",
                handler=self.remove_schedule,
                summary="Delete a schedule; a program that declares it stores it again.",
                right=Right.ADMIN,
                response=Removed,
            ),
            post(
                path="/v1/schedules/{name}/pause",
                handler=self.pause_schedule,
                summary="Enqueue no job of a schedule until it is resumed.",
            ),
            post(
                path="/v1/schedules/{name}/resume",
                handler=self.resume_schedule,
                summary="Resume a schedule at its next time.",
            ),
            post(
                path="/v1/schedules/{name}/trigger",
                handler=self.trigger_schedule,
                summary="Enqueue one job of a schedule now.",
                response=Triggered,
                errors=("unknown_name", "throttled"),
            ),
        )

    async def list_schedules(self, exchange: Exchange) -> None:
        arguments = _page(exchange)
        found = {each.name: each for each in await self._schedules.alist()}
        page, cursor = page_of_names(list(found), arguments)
        await exchange.answer(SchedulePage(schedules=[found[name] for name in page], next_cursor=cursor))

    async def show_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange, Right.CONSUME)
        with known_name("schedule", name):
            await exchange.answer(await self._schedules.aget(name))

    async def set_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange)
        change = await exchange.request(ScheduleChange)
        given = {each: getattr(change, each) for each in change.__struct_fields__}
        given = {each: value for each, value in given.items() if value is not UNSET}
        with known_name("schedule", name):
            status = await self._schedules.aset(name, **given)
        audit(exchange, f"set {', '.join(given) or 'nothing'} of", f"schedule {name}")
        await exchange.answer(status)

    async def remove_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("schedule", name):
            await self._schedules.aremove(name)
        audit(exchange, "remove", f"schedule {name}")
        await exchange.answer(Removed(name=name, removed=True))

    async def pause_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("schedule", name):
            status = await self._schedules.apause(name)
        audit(exchange, "pause", f"schedule {name}")
        await exchange.answer(status)

    async def resume_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("schedule", name):
            status = await self._schedules.aresume(name)
        audit(exchange, "resume", f"schedule {name}")
        await exchange.answer(status)

    async def trigger_schedule(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("schedule", name):
            id = await self._schedules.atrigger(name)
        audit(exchange, "trigger", f"schedule {name}", 1)
        await exchange.answer(Triggered(name=name, id=id))


class FleetRoutes:
    def __init__(self, context: ServerContext, app: App) -> None:
        self._context = context
        self._app = app

    @property
    def routes(self) -> tuple[Route, ...]:
        return (*self._worker_routes(), *self._breaker_routes())

    def _worker_routes(self) -> tuple[Route, ...]:
        read = partial(Route, method="GET", tag="fleet", right=Right.CONSUME, arguments=PageArguments)
        post = partial(Route, method="POST", tag="fleet", right=Right.ADMIN, response=WorkersChanged)
        lane = partial(post, response=LaneChanged, errors=("unknown_name",))
        return (
            read(
                path="/v1/workers",
                handler=self.list_workers,
                summary="The running workers by their last reports, and the pauses in force.",
                response=WorkerPage,
            ),
            post(
                path="/v1/workers/{name}/pause",
                handler=self.pause_workers,
                summary="Workers of a name or pattern start no jobs until they are resumed.",
                request=PauseReason,
            ),
            post(
                path="/v1/workers/{name}/resume",
                handler=self.resume_workers,
                summary="Lift the pauses of a name or pattern.",
                errors=("unknown_name",),
            ),
            post(
                path="/v1/workers/{name}/drain",
                handler=self.drain_workers,
                summary="Workers of a name or pattern finish their running jobs and end.",
                errors=("unknown_name",),
            ),
            read(
                path="/v1/lanes",
                handler=self.list_lanes,
                summary="The lanes of running workers, and paused lanes.",
                response=LanePage,
            ),
            lane(
                path="/v1/lanes/{name}/pause",
                handler=self.pause_lane,
                summary="Start no job of a lane until it is resumed.",
                request=PauseReason,
            ),
            lane(path="/v1/lanes/{name}/resume", handler=self.resume_lane, summary="Resume a paused lane."),
        )

    def _breaker_routes(self) -> tuple[Route, ...]:
        post = partial(
            Route,
            method="POST",
            tag="fleet",
            right=Right.ADMIN,
            response=BreakerStatus,
            errors=("unknown_name",),
        )
        return (
            Route(
                method="GET",
                path="/v1/breakers",
                handler=self.list_breakers,
                summary="The circuit breakers, by name.",
                tag="fleet",
                right=Right.CONSUME,
                arguments=PageArguments,
                response=BreakerPage,
            ),
            post(
                path="/v1/breakers/{name}/open",
                handler=self.open_breaker,
                summary="Open a breaker: its jobs do not start.",
                request=BreakerOpening,
            ),
            post(
                path="/v1/breakers/{name}/close",
                handler=self.close_breaker,
                summary="Close a breaker and clear its failures.",
            ),
            post(
                path="/v1/breakers/{name}/reset",
                handler=self.reset_breaker,
                summary="Close a breaker and delete it; a worker that uses it declares it again.",
                response=Removed,
            ),
        )

    async def list_workers(self, exchange: Exchange) -> None:
        arguments = _page(exchange)
        workers = self._app.workers
        found = {each.owner: each for each in await workers.alist()}
        page, cursor = page_of_names(list(found), arguments)
        items = [msgspec.convert(found[owner].as_dict(), WorkerItem) for owner in page]
        await exchange.answer(WorkerPage(workers=items, paused=await workers.apaused(), next_cursor=cursor))

    async def pause_workers(self, exchange: Exchange) -> None:
        name = _named(exchange)
        why = (await exchange.request(PauseReason)).why or None
        affected = [each.owner for each in await self._app.workers.apause(name, why)]
        await self._workers_changed(exchange, "pause", name, affected)

    async def resume_workers(self, exchange: Exchange) -> None:
        name = _named(exchange)
        lifted = await self._app.workers.aresume(name)
        if not lifted:
            raise Problem(404, "unknown_name", f"there is no pause of {name}")
        await self._workers_changed(exchange, "resume", name, list(lifted))

    async def drain_workers(self, exchange: Exchange) -> None:
        name = _named(exchange)
        affected = [each.owner for each in await self._app.workers.adrain(name)]
        if not affected:
            raise Problem(404, "unknown_name", f"there is no worker {name}")
        await self._workers_changed(exchange, "drain", name, affected)

    async def _workers_changed(self, exchange: Exchange, action: str, name: str, affected: list[str]) -> None:
        audit(exchange, action, f"workers {name}", len(affected))
        answer = WorkersChanged(workers=affected, paused=await self._app.workers.apaused())
        await exchange.answer(answer)

    async def list_lanes(self, exchange: Exchange) -> None:
        arguments = _page(exchange)
        found = {each.name: each for each in await self._app.workers.lanes.alist()}
        page, cursor = page_of_names(list(found), arguments)
        await exchange.answer(LanePage(lanes=[found[name] for name in page], next_cursor=cursor))

    async def pause_lane(self, exchange: Exchange) -> None:
        name = _named(exchange)
        why = (await exchange.request(PauseReason)).why or None
        with known_name("lane", name):
            await self._app.workers.lanes.apause(name, why)
        audit(exchange, "pause", f"lane {name}")
        await exchange.answer(LaneChanged(name=name, paused=True))

    async def resume_lane(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("lane", name):
            await self._app.workers.lanes.aresume(name)
        audit(exchange, "resume", f"lane {name}")
        await exchange.answer(LaneChanged(name=name, paused=False))

    async def list_breakers(self, exchange: Exchange) -> None:
        arguments = _page(exchange)
        found = {each.name: each for each in await self._app.breakers.alist()}
        page, cursor = page_of_names(list(found), arguments)
        items = [found[name] for name in page]
        await exchange.answer(BreakerPage(breakers=items, next_cursor=cursor))

    async def open_breaker(self, exchange: Exchange) -> None:
        name = _named(exchange)
        opening = await exchange.request(BreakerOpening)
        seconds = None if opening.seconds is UNSET else opening.seconds
        with known_name("breaker", name):
            record = await self._app.breakers.aopen(name, opening.why, seconds)
        audit(exchange, "open", f"breaker {name}")
        await exchange.answer(record)

    async def close_breaker(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("breaker", name):
            record = await self._app.breakers.aclose(name)
        audit(exchange, "close", f"breaker {name}")
        await exchange.answer(record)

    async def reset_breaker(self, exchange: Exchange) -> None:
        name = _named(exchange)
        with known_name("breaker", name):
            await self._app.breakers.areset(name)
        audit(exchange, "reset", f"breaker {name}")
        await exchange.answer(Removed(name=name, removed=True))


def _page(exchange: Exchange) -> PageArguments:
    """The arguments of a list of the fleet, which belongs to no queue."""
    arguments = exchange.query(PageArguments)
    exchange.principal.check(Right.CONSUME)
    return arguments


def _named(exchange: Exchange, right: Right = Right.ADMIN) -> str:
    """The name in the path, after the check of the right."""
    exchange.principal.check(right)
    return exchange.path["name"]
