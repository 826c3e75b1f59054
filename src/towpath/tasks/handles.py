"""Handles on jobs and groups, as `enqueue` returns them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from towpath.core.checks import utc
from towpath.core.commands import (
    Abort,
    Appended,
    Cancel,
    Canceled,
    Result,
    Revive,
    Revived,
    Seal,
    Selector,
    Unseal,
)
from towpath.core.explain import Explanation, cause_of
from towpath.core.history import AttemptOutcome, AttemptRecord
from towpath.core.ids import callback_id
from towpath.core.job import CANCELED, DONE, FINISHED, Job, Reason, Spec, State
from towpath.core.views import (
    MAX_PAGE,
    GroupStatus,
    JobStatus,
    Query,
    Readable,
)
from towpath.errors import (
    InvalidInput,
    JobCanceled,
    JobFailed,
    NotRevivable,
    Refused,
    UnknownGroup,
    UnknownJob,
    WaitInHandler,
)
from towpath.escapes import get_logger
from towpath.fleet import explained
from towpath.ledger import Ledger
from towpath.runtime.completion import Report
from towpath.runtime.engine import Engine, in_thread, same_as
from towpath.tasks.codec import Values, group_status, job_status
from towpath.tasks.mistakes import JOB_METHODS, no_attribute
from towpath.tasks.new_jobs import running

log = get_logger("towpath.worker")

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class AttemptView(Readable):
    """An attempt that did not end done. `error` is its failure with its traceback. `counted` is False for a
    claim that a worker gave back without an attempt (released, refused): the next one has its number. An
    entry `marked` or `skipped` is the decision of a person, `worker`, with its reason as `error`."""

    number: int
    outcome: AttemptOutcome
    started_at: datetime
    ended_at: datetime
    worker: str
    error: str | None
    counted: bool


class JobHandle(Generic[R_co]):
    """A job in the ledger. It holds only the `id`: `app.job(id)` makes a handle at any time."""

    __slots__ = ("_engine", "_values", "id")
    is_group: ClassVar[bool] = False

    def __init__(self, engine: Engine, id: str, values: Values) -> None:
        self.id = id
        self._engine = engine
        self._values = values

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    if not TYPE_CHECKING:  # with it, a type checker would accept every attribute

        def __getattr__(self: Any, name: str) -> Any:
            raise no_attribute(self, "a job handle", name, JOB_METHODS)

    def result(self, timeout: float | None = None, *, wait_inside: bool = False) -> R_co:
        """Wait until the job has finished and return its result. Raises JobFailed, JobCanceled, TimeoutError
        after `timeout` seconds, or InvalidInput if the result does not fit the task's return annotation.
        Inside a handler: WaitInHandler, except with `wait_inside` or `timeout=0`."""
        return self._value(self._wait(timeout, wait_inside))

    @same_as(result)
    async def aresult(self, timeout: float | None = None, *, wait_inside: bool = False) -> R_co:
        job = await self._await(timeout, wait_inside)
        # Only how a dependency failed is read from the ledger, which must not block the event loop.
        return (
            await asyncio.to_thread(self._value, job) if job.reason is Reason.DEPENDENCY else self._value(job)
        )

    def finished(self, timeout: float | None = None, *, wait_inside: bool = False) -> JobStatus:
        """Wait until the job has finished, however it ended."""
        return job_status(self._wait(timeout, wait_inside), self._values)

    @same_as(finished)
    async def afinished(self, timeout: float | None = None, *, wait_inside: bool = False) -> JobStatus:
        return job_status(await self._await(timeout, wait_inside), self._values)

    def status(self) -> JobStatus:
        """The job as it is now: times as datetimes, arguments and result as values. Raises UnknownJob."""
        return job_status(self.record(), self._values)

    astatus = in_thread(status)

    def record(self) -> Job:
        """The record of the job as the ledger stores it, with times in microseconds. Raises UnknownJob."""
        job = self._engine.ledger.get(self.id)
        if job is None:
            raise UnknownJob(id=self.id)
        return job

    arecord = in_thread(record)

    def history(self) -> list[AttemptView]:
        """The last attempts of the job that did not end done, oldest first: each with its outcome, times,
        worker and error. Raises UnknownJob."""
        ledger = self._engine.ledger
        found = ledger.attempts(self.id)
        if not found and not ledger.get_many([self.id], bodies=False):
            raise UnknownJob(id=self.id)
        return [_attempt_view(end) for end in found]

    ahistory = in_thread(history)

    def explain(self) -> Explanation:
        """Explain why the job does not run; `str()` of it is one sentence."""
        return explained(self._engine.ledger, self.id, self._engine.clock.now())

    aexplain = in_thread(explain)

    def cancel(self) -> bool:
        """Cancel a waiting job, ask a running job to stop. False: the job has finished, or was asked
        before."""
        return _touched(self._engine.call(Cancel(where=Selector(ids=(self.id,)))))

    @same_as(cancel)
    async def acancel(self) -> bool:
        return _touched(await self._engine.acall(Cancel(where=Selector(ids=(self.id,)))))

    def retry(self) -> None:
        """Revive a failed or canceled job. Raises NotRevivable."""
        _revived(self.id, self._engine.call(Revive(where=Selector(ids=(self.id,)))))

    @same_as(retry)
    async def aretry(self) -> None:
        _revived(self.id, await self._engine.acall(Revive(where=Selector(ids=(self.id,)))))

    def _value(self, job: Job) -> R_co:
        value: R_co = value_of(self._engine.ledger, job, self._values.decode_result)
        return value

    def _wait(self, timeout: float | None, wait_inside: bool) -> Job:
        return self._engine.watch.job(self.id, timeout, _inside(f"job {self.id}", timeout, wait_inside))

    async def _await(self, timeout: float | None, wait_inside: bool) -> Job:
        report = _inside(f"job {self.id}", timeout, wait_inside)
        return await self._engine.watch.ajob(self.id, timeout, report)


def _inside(what: str, timeout: float | None, wait_inside: bool) -> Report | None:
    """Raise WaitInHandler in a handler, in whatever thread, task or process it runs: a handler that waits
    holds its slot, and if all slots wait for jobs, none is left to run them. With `wait_inside`: the function
    that logs a wait that lasts. A `timeout` of 0 does not wait."""
    if (batch := open_collector.get()) and any(what == f"job {spec.id}" for spec in batch.specs):
        message = f"{what} is enqueued at the end of its batch: wait for it after the block of app.batch()"
        raise InvalidInput(field="job", value=what, expected="a job that is enqueued", message=message)
    here = running.get()
    if here is None or (timeout is not None and not timeout):
        return None
    job = here.record
    if not wait_inside:
        raise WaitInHandler(id=job.id, kind=job.kind, what=what)
    return lambda reason: log.warning(
        "job %s (%s) holds its slot while it waits: %s", job.id, job.kind, reason
    )


def _attempt_view(end: AttemptRecord) -> AttemptView:
    times = utc(end.started_at), utc(end.ended_at)
    return AttemptView(end.number, end.outcome, *times, end.owner, end.error, end.counted)


def value_of(ledger: Ledger, job: Job, decode: Callable[[bytes | None], Any]) -> Any:
    """The result of a finished job, or its end as an exception. An unfinished job is a member of an aborted
    group, which does not wait for the jobs that represent its members."""
    if job.state is DONE:
        # A job that a person marked or skipped may have no result, whatever its task returns.
        return None if job.result is None and job.reason else decode(job.result)
    if job.state is CANCELED or job.state not in FINISHED:
        raise JobCanceled(
            id=job.id, reason=job.reason.value if job.state is CANCELED else Reason.ABORTED.value
        )
    error, culprit = job.error, None
    if job.reason is Reason.DEPENDENCY:
        error, culprit = _error_and_culprit(ledger, job)
    raise JobFailed(id=job.id, reason=job.reason.value, error=error, culprit=culprit)


def _error_and_culprit(ledger: Ledger, job: Job) -> tuple[str | None, str | None]:
    """The error and the id of the job that failed first."""
    try:
        [id] = ledger.explain(job.id).by
    except (Refused, ValueError):
        return job.error, None
    found = ledger.get(id)
    return (job.error, None) if found is None else (cause_of(found), id)


def id_of(given: str | JobHandle[Any] | GroupHandle[Any]) -> str:
    """The id of a job or group that is given as an id or as a handle."""
    if isinstance(given, str):
        return given
    if not isinstance(given, JobHandle | GroupHandle):
        raise InvalidInput(field="id", value=given, expected="the id of a job or group, or its handle")
    return given.id


def cancel_key(engine: Engine, key: str) -> int:
    """Cancel the jobs with this key; how many were canceled or asked to stop."""
    count = 0
    while True:
        touched, more = _count(engine.call(_by_key(key)))
        count += touched
        if not more:
            return count


async def acancel_key(engine: Engine, key: str) -> int:
    count = 0
    while True:
        touched, more = _count(await engine.acall(_by_key(key)))
        count += touched
        if not more:
            return count


def _by_key(key: str) -> Cancel:
    return Cancel(where=Selector(key=key))


def _count(answer: Result) -> tuple[int, bool]:
    assert isinstance(answer, Canceled)
    return answer.canceled + answer.requested, answer.more


def _touched(answer: Result) -> bool:
    return _count(answer)[0] > 0


def _revived(id: str, answer: Result) -> None:
    assert isinstance(answer, Revived)
    if answer.refused:
        raise NotRevivable(id=id, why=answer.refused[0][1])
    if not answer.revived:
        raise UnknownJob(id=id)


class BranchHandle(JobHandle[R_co]):
    """The job that follows a group if the group ends with one outcome. The job exists from then on. Waiting
    for it waits for the group first, and raises JobCanceled if the group ends with another outcome."""

    __slots__ = ("_group", "_outcome")

    def __init__(self, group: GroupHandle[Any], outcome: str, values: Values) -> None:
        super().__init__(group._engine, callback_id(group.id, outcome), values)
        self._group = group
        self._outcome = outcome

    def _wait(self, timeout: float | None, wait_inside: bool) -> Job:
        left = Deadline(timeout)
        self._follows(self._group.closed(timeout, wait_inside=wait_inside))
        return super()._wait(left.seconds(), wait_inside)

    async def _await(self, timeout: float | None, wait_inside: bool) -> Job:
        left = Deadline(timeout)
        self._follows(await self._group.aclosed(timeout, wait_inside=wait_inside))
        return await super()._await(left.seconds(), wait_inside)

    def _follows(self, group: GroupStatus) -> None:
        if group.outcome != self._outcome:
            raise JobCanceled(id=self.id, reason=f"its group ended {group.outcome}")


class Deadline:
    """A timeout that is shared by several waits."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class GroupHandle(Generic[R_co]):
    """A group of jobs. `jobs` are its members as they were enqueued; empty for a handle by id. `then` is the
    job that follows the group however it ends, if there is one; `branches` are the jobs that follow one
    outcome, by outcome."""

    is_group: ClassVar[bool] = True

    def __init__(
        self,
        engine: Engine,
        id: str,
        jobs: Sequence[JobHandle[R_co]] = (),
        then: JobHandle[Any] | None = None,
        *,
        values: Values,
    ) -> None:
        self.id = id
        self.jobs = tuple(jobs)
        self.then = then
        self.branches: Mapping[str, JobHandle[Any]] = {}
        self._engine = engine
        self._values = values

    def __repr__(self) -> str:
        return f"<group {self.id}>"

    def status(self) -> GroupStatus:
        """The state of the group, with the exact counts of its members. Raises UnknownGroup."""
        view = self._engine.ledger.group(self.id)
        if view is None:
            raise UnknownGroup(group=self.id)
        return group_status(view)

    astatus = in_thread(status)

    def result(self, timeout: float | None = None, *, wait_inside: bool = False) -> list[R_co]:
        """Wait until the group is closed and return the results in the order of the jobs. Raises the first
        failure or cancellation. Inside a handler: WaitInHandler, except with `wait_inside` or `timeout=0`."""
        self.closed(timeout, wait_inside=wait_inside)
        return self._results()

    @same_as(result)
    async def aresult(self, timeout: float | None = None, *, wait_inside: bool = False) -> list[R_co]:
        await self.aclosed(timeout, wait_inside=wait_inside)
        return await asyncio.to_thread(self._results)

    def closed(self, timeout: float | None = None, *, wait_inside: bool = False) -> GroupStatus:
        """Wait until the group is closed, however it ended."""
        report = _inside(f"group {self.id}", timeout, wait_inside)
        return group_status(self._engine.watch.group(self.id, timeout, report))

    @same_as(closed)
    async def aclosed(self, timeout: float | None = None, *, wait_inside: bool = False) -> GroupStatus:
        report = _inside(f"group {self.id}", timeout, wait_inside)
        return group_status(await self._engine.watch.agroup(self.id, timeout, report))

    def cancel(self, *, stop: bool = False) -> None:
        """Cancel the waiting jobs, ask the running jobs to stop, and close the group. With `stop` the running
        jobs are not interrupted, and none of them is retried."""
        self._engine.call(Abort(self.id, stop))

    @same_as(cancel)
    async def acancel(self, *, stop: bool = False) -> None:
        await self._engine.acall(Abort(self.id, stop))

    def retry(self) -> int:
        """Revive the failed and canceled jobs of the group; return how many. The group is open again until
        they have ended: `then`, the branches and the dependents follow its new outcome."""
        self.status()
        revived = 0
        while True:
            answer = self._engine.call(
                Revive(where=Selector(group=self.id, states=(State.FAILED, State.CANCELED)))
            )
            assert isinstance(answer, Revived)
            revived += answer.revived
            # Refused jobs match again.
            if not answer.more or not answer.revived:
                return revived

    aretry = in_thread(retry)

    def pause(self, why: str | None = None) -> None:
        """Waiting jobs of the group do not start until `resume`; running jobs continue, and wait as well
        after a retry."""
        self._engine.call(Unseal(self.id, why))

    @same_as(pause)
    async def apause(self, why: str | None = None) -> None:
        await self._engine.acall(Unseal(self.id, why))

    def resume(self) -> None:
        """Resume a paused group."""
        self._engine.call(Seal(self.id))

    @same_as(resume)
    async def aresume(self) -> None:
        await self._engine.acall(Seal(self.id))

    def _results(self) -> list[R_co]:
        ledger = self._engine.ledger
        if self.jobs:
            found = jobs_of(ledger, [each.id for each in self.jobs])
            return [each._value(job) for each, job in zip(self.jobs, found, strict=True)]
        return [value_of(ledger, job, self._values.decode_result) for job in members(ledger, self.id)]


def members(ledger: Ledger, group: str) -> list[Job]:
    """Every job of a group in the order of its append. A member that was refused for its key is represented
    by the job that holds the key."""
    found: list[Job] = []
    page: str | None = None
    while True:
        answer = ledger.find(Query(group=group, oldest_first=True, limit=1000, page=page))
        found += answer.jobs
        page = answer.next
        if page is None:
            break
    winners = ledger.winners(group=group)
    if not winners:
        return found
    jobs = jobs_of(ledger, [winner.winner or winner.id for winner in winners])
    places = [(job.seq, job) for job in found] + list(
        zip([winner.place for winner in winners], jobs, strict=True)
    )
    return [job for _, job in sorted(places, key=lambda entry: entry[0])]


def jobs_of(ledger: Ledger, ids: Sequence[str]) -> list[Job]:
    """These jobs in this order. Raises UnknownJob."""
    found: dict[str, Job] = {}
    for start in range(0, len(ids), MAX_PAGE):
        found |= ledger.get_many(ids[start : start + MAX_PAGE])
    if missing := [id for id in ids if id not in found]:
        raise UnknownJob(id=missing[0])
    return [found[id] for id in ids]


class Collector:
    """Collects specs for one append. Its handles have their final ids after `placed`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.specs: list[Spec] = []
        self._handles: list[JobHandle[Any]] = []

    def collect(self, spec: Spec, values: Values) -> JobHandle[Any]:
        handle: JobHandle[Any] = JobHandle(self.engine, spec.id, values)
        self.specs.append(spec)
        self._handles.append(handle)
        return handle

    def placed(self, answer: Result) -> None:
        for handle, id in zip(self._handles, ids_of(answer), strict=True):
            handle.id = id


def ids_of(answer: Result) -> list[str]:
    """The ids in the result of an append: of the specs, or of the jobs that already held their keys."""
    assert isinstance(answer, Appended)
    return [placed.id for placed in answer.jobs]


open_collector: ContextVar[Collector | None] = ContextVar("towpath_collecting", default=None)


def collecting(engine: Engine) -> Collector | None:
    """The open batch of this context for this engine."""
    collector = open_collector.get()
    return collector if collector is not None and collector.engine is engine else None
