"""Bulk commands: cancel, retry, purge and count the jobs of a selection, in bounded steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from towpath.core import checks
from towpath.core.commands import Cancel, Canceled, Purge, Purged, Revive, Revived, Selector
from towpath.core.job import State
from towpath.core.views import Query
from towpath.errors import UnknownJob
from towpath.http.access import Right
from towpath.http.api.common import Moment, check_right, pattern_of
from towpath.http.audit import audit
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import bad_body
from towpath.ledger import queues_matching
from towpath.runtime.engine import Engine

MAX_IDS = 1000
STEP, MAX_STEPS = 1000, 100
"""Jobs of one command, and commands of one request: other commits go between them."""
MAX_COUNT = 100_000
"""Jobs that a dry run counts one by one."""
_TEXTS = ("part", "kind", "group", "parent", "key")


class SelectedJobs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The jobs with these ids, or all jobs that match every given field. `all` selects every job. `dry_run`
    changes nothing and counts."""

    ids: Annotated[list[str], Meta(max_length=MAX_IDS)] = []
    queue: str = ""
    namespace: str = ""
    part: str = ""
    kind: str = ""
    group: str = ""
    parent: str = ""
    generation: int | None = None
    key: str = ""
    created_before: Moment | None = None
    finished_before: Moment | None = None
    all: bool = False
    dry_run: bool = False

    def describe(self) -> str:
        """The selection for the audit log."""
        names = ("queue", "namespace", *_TEXTS, "generation", "created_before", "finished_before")
        given = [f"{name}={value}" for name in names if (value := getattr(self, name)) not in (None, "")]
        return f"{len(self.ids)} ids" if self.ids else ", ".join(given) or "all"


class RefusedJob(msgspec.Struct):
    id: str
    why: str


class BulkResult(msgspec.Struct, kw_only=True):
    """`count`: the jobs that were changed, or with `dry_run` the jobs that match. `requested`: the running
    jobs that were asked to stop. `more`: further jobs match; send the request again."""

    dry_run: bool = False
    count: int
    requested: int = 0
    refused: list[RefusedJob] = []
    more: bool = False


async def _selector(
    context: ServerContext, exchange: Exchange, selection: SelectedJobs, states: tuple[State, ...]
) -> Selector:
    """The selector of a request, after the check of the rights to all its queues. Raises a `Problem`, and
    `UnknownJob` before any change."""
    queue = pattern_of(selection.queue, selection.namespace)
    fields = {name: getattr(selection, name) or None for name in _TEXTS}
    fields["generation"] = selection.generation
    created, finished = (
        None if at is None else checks.moment(at, "time")
        for at in (selection.created_before, selection.finished_before)
    )
    fields |= {"created_before": created, "finished_before": finished}
    narrowed = queue or any(value is not None for value in fields.values())
    if bool(selection.ids) + bool(narrowed) + selection.all != 1:
        raise bad_body("select jobs by ids, by fields such as queue and kind, or all of them with all=true")
    selector = Selector(ids=tuple(selection.ids), queue=queue or None, states=states, **fields)
    if selection.ids:
        found = await context.read(context.engine.ledger.get_many, selection.ids, bodies=False)
        if missing := [id for id in selection.ids if id not in found]:
            raise UnknownJob(id=missing[0])
        for stored in {job.queue for job in found.values()}:
            check_right(exchange.principal, Right.ADMIN, stored)
    else:
        check_right(exchange.principal, Right.ADMIN, queue)
    return selector


Change = Callable[[Engine, Selector], Awaitable[BulkResult]]


async def change_selected(
    context: ServerContext, exchange: Exchange, action: str, states: tuple[State, ...], change: Change
) -> None:
    """Answer a request with a selection: change its jobs in these states, or count them."""
    selection = await exchange.request(SelectedJobs)
    where = await _selector(context, exchange, selection, states)
    if selection.dry_run:
        result = await context.read(_count, context, where)
    else:
        result = await change(context.engine, where)
        which = " or ".join(states)
        audit(exchange, action, f"{which} jobs ({selection.describe()})", result.count + result.requested)
    await exchange.answer(result)


class _Step(NamedTuple):
    changed: int
    requested: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    more: bool = False


async def cancel_all(engine: Engine, where: Selector) -> BulkResult:
    async def step() -> _Step:
        answer = await engine.acall(Cancel(where=where, limit=STEP))
        assert isinstance(answer, Canceled)
        return _Step(answer.canceled, answer.requested, more=answer.more)

    return await _repeated(step)


async def revive_all(engine: Engine, where: Selector) -> BulkResult:
    async def step() -> _Step:
        answer = await engine.acall(Revive(where=where, limit=STEP))
        assert isinstance(answer, Revived)
        return _Step(answer.revived, 0, answer.refused, answer.more)

    return await _repeated(step)


async def purge_all(engine: Engine, where: Selector) -> BulkResult:
    async def step() -> _Step:
        answer = await engine.acall(Purge(where=where, limit=STEP))
        assert isinstance(answer, Purged)
        return _Step(answer.purged, more=answer.more)

    return await _repeated(step)


async def _repeated(step: Callable[[], Awaitable[_Step]]) -> BulkResult:
    """Apply the command until no job matches. Refused jobs match again, so it ends when a step changes
    none."""
    count = requested = 0
    refused: dict[str, str] = {}
    more = True
    for _ in range(MAX_STEPS):
        done = await step()
        count, requested = count + done.changed, requested + done.requested
        refused.update(done.refused)
        more = done.more
        if not more or not (done.changed or done.requested):
            break
    listed = [RefusedJob(id, why) for id, why in refused.items()]
    return BulkResult(count=count, requested=requested, refused=listed, more=more)


def _count(context: ServerContext, where: Selector) -> BulkResult:
    """How many jobs match, without a change."""
    ledger = context.engine.ledger
    if where.ids:
        found = ledger.get_many(where.ids, bodies=False).values()
        return BulkResult(dry_run=True, count=sum(where.matches(job) for job in found))
    names = ("states", "queue", *_TEXTS, "generation", "created_before")
    if all(getattr(where, name) is None for name in (*names[2:], "finished_before")):
        views = queues_matching(ledger, where.queue or "*")
        states = where.states or tuple(State)
        return BulkResult(
            dry_run=True, count=sum(getattr(view.counts, state) for view in views for state in states)
        )
    fields = {name: getattr(where, name) for name in names}
    count, page = 0, None
    while count < MAX_COUNT:
        answer = ledger.find(Query(**fields, bodies=False, limit=1000, page=page))
        count += sum(where.matches(job) for job in answer.jobs)
        page = answer.next
        if page is None:
            break
    return BulkResult(dry_run=True, count=count, more=page is not None)
