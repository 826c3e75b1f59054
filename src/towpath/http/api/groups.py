"""Groups: create, list, show, wait for, abort, retry, pause and resume them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from towpath.app import App
from towpath.core import checks
from towpath.core.job import State
from towpath.core.results import GroupState
from towpath.core.views import GroupQuery, GroupStatus
from towpath.errors import UnknownGroup
from towpath.http.access import Right
from towpath.http.api.bulk import MAX_BODY
from towpath.http.api.common import PLAIN, PageArguments, named_arguments
from towpath.http.api.jobs import WaitArguments
from towpath.http.api.new_jobs import MAX_JOBS, NewJob, NewJobs
from towpath.http.api.waiting import LongPolls
from towpath.http.audit import audit
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import bad_body
from towpath.http.table import Route
from towpath.tasks.codec import group_status
from towpath.tasks.handles import GroupHandle
from towpath.tasks.task import Call

Outcome = Literal["done", "failed", "canceled"]


class GroupArguments(PageArguments, forbid_unknown_fields=True, kw_only=True):
    state: Annotated[tuple[GroupState, ...], Meta(description="States.")] = ()
    outcome: Annotated[tuple[State, ...], Meta(description="Outcomes: done, failed, canceled.")] = ()
    prefix: Annotated[str, Meta(description="Beginning of the id.")] = ""
    ascending: Annotated[bool, Meta(description="In the order of the ids, so the oldest first.")] = False


class AbortArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stop: Annotated[bool, Meta(description="Let running jobs end; cancel only the waiting jobs.")] = False


class NewGroup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Jobs that run concurrently. `then` runs when all have ended, whatever their outcome; instead of it,
    `branches` has a job for an outcome of the group. The ids of the jobs are derived from the id of the
    group, so that the request may be repeated."""

    calls: Annotated[list[NewJob], Meta(min_length=1, max_length=MAX_JOBS)]
    then: NewJob | None = None
    branches: dict[Outcome, NewJob] = {}
    on_failure: Literal["continue", "abort", "stop"] = "continue"
    id: Annotated[str, Meta(max_length=200)] = ""


class GroupCreated(msgspec.Struct, kw_only=True):
    """`jobs` are the ids of the members; `branches` the ids of the jobs that an outcome creates."""

    id: str
    jobs: list[str]
    then: str | None
    branches: dict[str, str]


class GroupListPage(msgspec.Struct, kw_only=True):
    groups: list[GroupStatus]
    next_cursor: str | None


class GroupRetried(msgspec.Struct, kw_only=True):
    id: str
    revived: int


class PauseReason(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    why: Annotated[str, Meta(max_length=1000)] = ""


class GroupRoutes:
    def __init__(self, context: ServerContext, app: App, polls: LongPolls) -> None:
        self._context = context
        self._engine = context.engine
        self._app = app
        self._polls = polls
        self._new = NewJobs(app)

    @property
    def routes(self) -> tuple[Route, ...]:
        return (*self._collection(), *self._changes())

    def _collection(self) -> tuple[Route, ...]:
        read = partial(Route, method="GET", tag="groups", right=Right.CONSUME)
        return (
            Route(
                method="POST",
                path="/v1/groups",
                handler=self.create,
                summary=f"Enqueue up to {MAX_JOBS} jobs as a group, and a job that follows it.",
                tag="groups",
                right=Right.PRODUCE,
                request=NewGroup,
                response=GroupCreated,
                errors=(
                    "unknown_dependency",
                    "dependency_cycle",
                    "group_closed",
                    "throttled",
                    "shutdown_draining",
                ),
            ),
            read(
                path="/v1/groups",
                handler=self.list_groups,
                summary="The groups that match; the last ids first.",
                arguments=GroupArguments,
                response=GroupListPage,
            ),
            read(
                path="/v1/groups/{id}",
                handler=self.show,
                summary="A group, with the exact counts of its jobs; `wait` waits for its end.",
                arguments=WaitArguments,
                response=GroupStatus,
                responses={202: "The group is not closed yet, and `wait` was given."},
                errors=("unknown_group", "queue_busy"),
            ),
        )

    def _changes(self) -> tuple[Route, ...]:
        unknown = ("unknown_group",)
        change = partial(
            Route, method="POST", tag="groups", right=Right.ADMIN, response=GroupStatus, errors=unknown
        )
        return (
            change(
                path="/v1/groups/{id}/abort",
                handler=self.abort,
                summary="Cancel the waiting jobs of a group, ask the running jobs to stop.",
                arguments=AbortArguments,
            ),
            change(
                path="/v1/groups/{id}/retry",
                handler=self.retry,
                summary="Retry the failed and canceled jobs of a group.",
                response=GroupRetried,
            ),
            change(
                path="/v1/groups/{id}/pause",
                handler=self.pause,
                summary="Start no job of a group until it is resumed.",
                request=PauseReason,
                errors=(*unknown, "group_closed"),
            ),
            change(
                path="/v1/groups/{id}/resume",
                handler=self.resume,
                summary="Resume a paused group.",
                errors=(*unknown, "group_closed"),
            ),
        )

    async def create(self, exchange: Exchange) -> None:
        self._context.refuse_when_draining()
        new = await exchange.request(NewGroup, MAX_BODY)
        if new.then is not None and new.branches:
            raise bad_body("then and branches exclude each other: give one of them")
        calls = [self._call(exchange, each, f"calls[{n}]") for n, each in enumerate(new.calls)]
        then: Any = {
            outcome: self._call(exchange, each, f"branches.{outcome}")
            for outcome, each in new.branches.items()
        } or None
        if new.then is not None:
            then = self._call(exchange, new.then, "then")
        group = await self._app.agroup(calls, then, new.on_failure, new.id or None)
        answer = GroupCreated(
            id=group.id,
            jobs=[job.id for job in group.jobs],
            then=None if group.then is None else group.then.id,
            branches={outcome: job.id for outcome, job in group.branches.items()},
        )
        await exchange.answer(answer)

    def _call(self, exchange: Exchange, new: NewJob, place: str) -> Call[Any]:
        for name in ("id", "group"):
            if getattr(new, name) is not UNSET:
                raise bad_body(f"{place}: {name} follows from the group: leave it out")
        return self._new.call(exchange, new, place)[0]

    async def list_groups(self, exchange: Exchange) -> None:
        arguments = exchange.query(GroupArguments)
        exchange.principal.check(Right.CONSUME)
        with named_arguments():
            query = GroupQuery(
                states=arguments.state,
                outcomes=arguments.outcome,
                prefix=arguments.prefix,
                descending=not arguments.ascending,
                limit=arguments.limit,
                page=arguments.cursor or None,
            )
        page = await self._context.read(self._engine.ledger.groups, query)
        found = [group_status(view) for view in page.groups]
        await exchange.answer(GroupListPage(groups=found, next_cursor=page.next))

    async def show(self, exchange: Exchange) -> None:
        arguments = exchange.query(WaitArguments)
        status = await self._status(exchange, Right.CONSUME)
        if status.state is not GroupState.CLOSED and arguments.wait > 0:
            ended = partial(self._engine.watch.until_ended, status.id, True, arguments.wait)
            await self._polls.wait(exchange, ended)
            status = await self._status(exchange, Right.CONSUME)
        waits = arguments.wait > 0 and status.state is not GroupState.CLOSED
        await exchange.answer(status, 202 if waits else 200)

    async def abort(self, exchange: Exchange) -> None:
        arguments = exchange.query(AbortArguments)
        group = await self._group(exchange)
        await group.acancel(stop=arguments.stop)
        await self._changed(exchange, "stop" if arguments.stop else "abort", group)

    async def retry(self, exchange: Exchange) -> None:
        group = await self._group(exchange)
        revived = await group.aretry()
        audit(exchange, "retry", f"group {group.id}", revived)
        await exchange.answer(GroupRetried(id=group.id, revived=revived))

    async def pause(self, exchange: Exchange) -> None:
        group = await self._group(exchange)
        why = (await exchange.request(PauseReason)).why
        await group.apause(why or None)
        await self._changed(exchange, "pause", group)

    async def resume(self, exchange: Exchange) -> None:
        group = await self._group(exchange)
        await group.aresume()
        await self._changed(exchange, "resume", group)

    async def _changed(self, exchange: Exchange, action: str, group: GroupHandle[Any]) -> None:
        audit(exchange, action, f"group {group.id}")
        await exchange.answer(await group.astatus())

    async def _group(self, exchange: Exchange) -> GroupHandle[Any]:
        """The existing group in the path, for a change. A group may have jobs of any queue."""
        status = await self._status(exchange, Right.ADMIN)
        return GroupHandle(self._engine, status.id, values=PLAIN)

    async def _status(self, exchange: Exchange, right: Right) -> GroupStatus:
        exchange.principal.check(right)
        id = exchange.path["id"]
        if len(id) > checks.MAX_NAME or not checks.storable(id):
            raise UnknownGroup(group=id)
        return await GroupHandle[Any](self._engine, id, values=PLAIN).astatus()
