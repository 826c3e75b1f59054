"""Jobs: enqueue, list, show, wait for a result, cancel, retry, explain, history."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from towpath.app import App
from towpath.core import checks
from towpath.core.commands import Append, Appended, Resolution, Resolve
from towpath.core.explain import Explanation
from towpath.core.job import FINISHED, Job, Reason, State
from towpath.core.views import JobStatus
from towpath.errors import UnknownJob
from towpath.http.access import Right
from towpath.http.api.bulk import MAX_BODY
from towpath.http.api.common import (
    PLAIN,
    JobArguments,
    check_right,
    pattern_of,
    status_of,
    with_bodies,
)
from towpath.http.api.new_jobs import MAX_JOBS, NewJob, NewJobs
from towpath.http.api.selection import (
    BulkResult,
    SelectedJobs,
    cancel_all,
    change_selected,
    purge_all,
    revive_all,
)
from towpath.http.api.waiting import LongPolls
from towpath.http.audit import audit
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import bad_argument
from towpath.http.table import Route
from towpath.tasks.codec import encode
from towpath.tasks.handles import AttemptView, JobHandle

MAX_WAIT = 300
"""Seconds of a long poll."""
MAX_WITH_BODIES = 100
_FINISHED = tuple(state for state in State if state in FINISHED)
_UNFINISHED = tuple(state for state in State if state not in FINISHED)


class JobListArguments(JobArguments, forbid_unknown_fields=True, kw_only=True):
    queue: Annotated[str, Meta(description="Queue, or pattern with `*`.")] = ""
    namespace: Annotated[str, Meta(description="Namespace of the queue.")] = ""


class WaitArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT, description="Seconds to wait for the end.")] = 0


class EnqueueJobsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    jobs: Annotated[list[NewJob], Meta(min_length=1, max_length=MAX_JOBS)]


class EnqueuedJob(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`duplicate`: another job holds the key; `id` is its id."""

    id: str
    queue: str
    kind: str
    duplicate: bool = False


class EnqueueJobsResponse(msgspec.Struct, kw_only=True):
    jobs: list[EnqueuedJob]


class JobPage(msgspec.Struct, kw_only=True):
    """Without `bodies=true`, and for a payload above 64 KiB, the jobs have no arguments, result, error,
    cursor and headers."""

    jobs: list[JobStatus]
    next_cursor: str | None


class JobResult(msgspec.Struct, kw_only=True):
    """The end of a job, or its state while it has not ended. `result` is that of a job in the state done."""

    id: str
    state: State
    reason: Reason
    result: Any
    error: str | None
    finished_at: datetime | None


class JobChange(msgspec.Struct, kw_only=True):
    """`changed` is false if the job has finished, or was asked to stop before."""

    id: str
    changed: bool
    state: State
    cancel_requested: Reason | None


class ResolveRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The decision of a person: `marked` if the effect of the job exists, `skipped` if it is not needed. `by`
    is the name of the person; without it, the name of the client."""

    outcome: Resolution
    why: Annotated[str, Meta(min_length=1, max_length=1000)]
    by: Annotated[str, Meta(max_length=checks.MAX_NAME)] = ""
    result: Any = None


class JobHistory(msgspec.Struct, kw_only=True):
    """The last attempts that did not end done, oldest first."""

    id: str
    attempts: list[AttemptView]


class JobRoutes:
    def __init__(self, context: ServerContext, app: App, polls: LongPolls) -> None:
        self._context = context
        self._engine = context.engine
        self._polls = polls
        self._new = NewJobs(app)

    @property
    def routes(self) -> tuple[Route, ...]:
        return (*self._collection(), *self._single(), *self._bulk())

    def _collection(self) -> tuple[Route, ...]:
        base = partial(Route, path="/v1/jobs", tag="jobs")
        return (
            base(
                method="POST",
                handler=self.enqueue,
                summary=f"Enqueue up to {MAX_JOBS} jobs, all or none, in one commit.",
                right=Right.PRODUCE,
                request=EnqueueJobsRequest,
                response=EnqueueJobsResponse,
                errors=(
                    "unknown_dependency",
                    "dependency_cycle",
                    "unknown_group",
                    "group_closed",
                    "throttled",
                    "shutdown_draining",
                ),
            ),
            base(
                method="GET",
                handler=self.list_jobs,
                summary="The jobs that match, newest first.",
                right=Right.CONSUME,
                arguments=JobListArguments,
                response=JobPage,
                errors=("invalid_namespace",),
            ),
        )

    def _single(self) -> tuple[Route, ...]:
        read = partial(Route, method="GET", tag="jobs", right=Right.CONSUME, errors=("unknown_job",))
        change = partial(Route, method="POST", tag="jobs", right=Right.ADMIN)
        return (
            read(
                path="/v1/jobs/{id}",
                handler=self.show,
                summary="Everything that is stored about a job.",
                response=JobStatus,
            ),
            read(
                path="/v1/jobs/{id}/result",
                handler=self.result,
                summary="The result of a job; `wait` waits for its end.",
                arguments=WaitArguments,
                response=JobResult,
                responses={202: "The job has not ended yet."},
                errors=("unknown_job", "queue_busy"),
            ),
            read(
                path="/v1/jobs/{id}/explanation",
                handler=self.explain,
                summary="Why the job does not run, in one sentence.",
                response=Explanation,
            ),
            read(
                path="/v1/jobs/{id}/history",
                handler=self.history,
                summary="The last attempts that did not end done.",
                response=JobHistory,
            ),
            change(
                path="/v1/jobs/{id}/cancel",
                handler=self.cancel,
                summary="Cancel a waiting job, ask a running job to stop.",
                response=JobChange,
                errors=("unknown_job",),
            ),
            change(
                path="/v1/jobs/{id}/retry",
                handler=self.retry,
                summary="Retry a failed or canceled job.",
                response=JobChange,
                errors=("unknown_job", "not_revivable"),
            ),
            change(
                path="/v1/jobs/{id}/resolve",
                handler=self.resolve,
                summary="Make a waiting, failed or canceled job done by the decision of a person.",
                request=ResolveRequest,
                response=JobStatus,
                errors=("unknown_job", "not_resolvable"),
            ),
        )

    def _bulk(self) -> tuple[Route, ...]:
        post = partial(
            Route,
            method="POST",
            tag="jobs",
            right=Right.ADMIN,
            request=SelectedJobs,
            response=BulkResult,
            errors=("unknown_job", "invalid_namespace"),
        )
        return (
            post(
                path="/v1/bulk/cancel",
                handler=self.cancel_many,
                summary="Cancel unfinished jobs by ids or by a filter.",
            ),
            post(
                path="/v1/bulk/retry",
                handler=self.retry_many,
                summary="Retry failed and canceled jobs by ids or by a filter.",
            ),
            post(
                path="/v1/bulk/purge",
                handler=self.purge_many,
                summary="Delete finished jobs by ids or by a filter.",
            ),
        )

    async def enqueue(self, exchange: Exchange) -> None:
        self._context.refuse_when_draining()
        request = await exchange.request(EnqueueJobsRequest, MAX_BODY)
        made = [self._new.call(exchange, new, f"jobs[{n}]") for n, new in enumerate(request.jobs)]
        specs = tuple([spec for _, spec in made])
        answer = await self._engine.acall(Append(specs))
        assert isinstance(answer, Appended)
        found = [
            EnqueuedJob(id=placed.id, queue=spec.queue, kind=spec.kind, duplicate=placed.id != spec.id)
            for spec, placed in zip(specs, answer.jobs, strict=True)
        ]
        await exchange.answer(EnqueueJobsResponse(jobs=found))

    async def list_jobs(self, exchange: Exchange) -> None:
        arguments = exchange.query(JobListArguments)
        if arguments.bodies and arguments.limit > MAX_WITH_BODIES:
            raise bad_argument(f"with bodies, limit must be at most {MAX_WITH_BODIES}")
        queue = pattern_of(arguments.queue, arguments.namespace)
        query = arguments.query(queue)
        check_right(exchange.principal, Right.CONSUME, queue)
        page = await self._context.read(self._engine.ledger.find, query)
        whole = await self._context.read(with_bodies, self._context, page.jobs) if arguments.bodies else {}
        found = [status_of(whole.get(job.id, job)) for job in page.jobs]
        await exchange.answer(JobPage(jobs=found, next_cursor=page.next))

    async def show(self, exchange: Exchange) -> None:
        await exchange.answer(status_of(await self._job(exchange, Right.CONSUME, bodies=True)))

    async def result(self, exchange: Exchange) -> None:
        arguments = exchange.query(WaitArguments)
        job = await self._job(exchange, Right.CONSUME)
        if job.state not in FINISHED and arguments.wait > 0:
            ended = partial(self._engine.watch.until_ended, job.id, False, arguments.wait)
            await self._polls.wait(exchange, ended)
        view = status_of(await self._job(exchange, Right.CONSUME, bodies=True))
        fields = {name: getattr(view, name) for name in JobResult.__struct_fields__}
        await exchange.answer(JobResult(**fields), 200 if view.state in FINISHED else 202)

    async def explain(self, exchange: Exchange) -> None:
        job = await self._job(exchange, Right.CONSUME)
        await exchange.answer(await self._handle(job).aexplain())

    async def history(self, exchange: Exchange) -> None:
        job = await self._job(exchange, Right.CONSUME)
        await exchange.answer(JobHistory(id=job.id, attempts=await self._handle(job).ahistory()))

    async def cancel(self, exchange: Exchange) -> None:
        job = await self._job(exchange, Right.ADMIN)
        changed = await self._handle(job).acancel()
        audit(exchange, "cancel", f"job {job.id}", int(changed))
        await self._changed(exchange, changed)

    async def retry(self, exchange: Exchange) -> None:
        job = await self._job(exchange, Right.ADMIN)
        await self._handle(job).aretry()
        audit(exchange, "retry", f"job {job.id}", 1)
        await self._changed(exchange, True)

    async def resolve(self, exchange: Exchange) -> None:
        job = await self._job(exchange, Right.ADMIN)
        request = await exchange.request(ResolveRequest)
        result = None if request.result is None else encode(request.result)
        by = request.by or exchange.principal.name
        await self._engine.acall(Resolve(job.id, request.outcome, request.why, by, result))
        audit(exchange, request.outcome, f"job {job.id}", 1)
        await self.show(exchange)

    async def cancel_many(self, exchange: Exchange) -> None:
        await change_selected(self._context, exchange, "cancel", _UNFINISHED, cancel_all)

    async def retry_many(self, exchange: Exchange) -> None:
        await change_selected(self._context, exchange, "retry", (State.FAILED, State.CANCELED), revive_all)

    async def purge_many(self, exchange: Exchange) -> None:
        await change_selected(self._context, exchange, "purge", _FINISHED, purge_all)

    async def _changed(self, exchange: Exchange, changed: bool) -> None:
        job = await self._job(exchange, Right.ADMIN)
        answer = JobChange(id=job.id, changed=changed, state=job.state, cancel_requested=job.cancel_requested)
        await exchange.answer(answer)

    def _handle(self, job: Job) -> JobHandle[Any]:
        return JobHandle(self._engine, job.id, PLAIN)

    async def _job(self, exchange: Exchange, right: Right, bodies: bool = False) -> Job:
        """The job in the path, after the check of the right to its queue."""
        id = exchange.path["id"]
        known = len(id) <= checks.MAX_NAME and checks.storable(id)
        read = self._engine.ledger.get_many
        job = (await self._context.read(read, [id], bodies=bodies)).get(id) if known else None
        if job is None:
            raise UnknownJob(id=id)
        check_right(exchange.principal, right, job.queue)
        return job
