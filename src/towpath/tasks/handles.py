"""Handles on jobs and groups, as `enqueue` returns them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

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
from towpath.core.explain import Explanation, blame
from towpath.core.job import CANCELED, DONE, FINISHED, Job, Reason, Spec
from towpath.core.views import MAX_PAGE, GroupView, Query
from towpath.errors import JobCanceled, JobFailed, NotRevivable, Refused, UnknownGroup, UnknownJob
from towpath.fleet import explained
from towpath.ledger import Ledger
from towpath.runtime.engine import Engine

R_co = TypeVar("R_co", covariant=True)
Decode = Callable[[bytes | None], Any]


class JobHandle(Generic[R_co]):
    """A job in the ledger. It holds only the `id`: `app.job(id)` makes a handle at any time."""

    __slots__ = ("_decode", "_engine", "id")

    def __init__(self, engine: Engine, id: str, decode: Decode) -> None:
        self.id = id
        self._engine = engine
        self._decode = decode

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def result(self, timeout: float | None = None) -> R_co:
        """Wait until the job has finished and return its result. Raises JobFailed, JobCanceled, TimeoutError
        after `timeout` seconds, or InvalidInput if the result does not fit the task's return annotation."""
        return self._value(self.finished(timeout))

    async def aresult(self, timeout: float | None = None) -> R_co:
        job = await self.afinished(timeout)
        # Only how a dependency failed is read from the ledger, which must not block the event loop.
        return (
            await asyncio.to_thread(self._value, job) if job.reason is Reason.DEPENDENCY else self._value(job)
        )

    def finished(self, timeout: float | None = None) -> Job:
        """Wait until the job has finished, however it ended."""
        return self._engine.watch.job(self.id, timeout)

    async def afinished(self, timeout: float | None = None) -> Job:
        return await self._engine.watch.ajob(self.id, timeout)

    def status(self) -> Job:
        """The current record of the job."""
        job = self._engine.ledger.get(self.id)
        if job is None:
            raise UnknownJob(id=self.id)
        return job

    def explain(self) -> Explanation:
        """Explain why the job does not run; `str()` of it is one sentence."""
        return explained(self._engine.ledger, self.id, self._engine.clock.now())

    def cancel(self) -> bool:
        """Cancel a waiting job, ask a running job to stop. False: the job has finished, or was asked
        before."""
        return _touched(self._engine.call(Cancel(where=Selector(ids=(self.id,)))))

    async def acancel(self) -> bool:
        return _touched(await self._engine.acall(Cancel(where=Selector(ids=(self.id,)))))

    def retry(self) -> None:
        """Revive a failed or canceled job. Raises NotRevivable."""
        _revived(self.id, self._engine.call(Revive(where=Selector(ids=(self.id,)))))

    async def aretry(self) -> None:
        _revived(self.id, await self._engine.acall(Revive(where=Selector(ids=(self.id,)))))

    def _value(self, job: Job) -> R_co:
        value: R_co = value_of(self._engine.ledger, job, self._decode)
        return value


def value_of(ledger: Ledger, job: Job, decode: Decode) -> Any:
    """The result of a finished job, or its end as an exception. An unfinished job is a member of an aborted
    group, which does not wait for the jobs that represent its members."""
    if job.state is DONE:
        return decode(job.result)
    if job.state is CANCELED or job.state not in FINISHED:
        raise JobCanceled(
            id=job.id, reason=job.reason.value if job.state is CANCELED else Reason.ABORTED.value
        )
    error, culprit = job.error, None
    if job.reason is Reason.DEPENDENCY:
        error, culprit = _blamed(ledger, job)
    raise JobFailed(id=job.id, reason=job.reason.value, error=error, culprit=culprit)


def _blamed(ledger: Ledger, job: Job) -> tuple[str | None, str | None]:
    """The error and the id of the job that failed first."""
    try:
        [id] = ledger.explain(job.id).by
    except (Refused, ValueError):
        return job.error, None
    found = ledger.get(id)
    return (job.error, None) if found is None else (blame(found), id)


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


class GroupHandle(Generic[R_co]):
    """A group of jobs. `jobs` are its members as they were enqueued, `then` the job that follows it, if there
    is one."""

    def __init__(
        self,
        engine: Engine,
        id: str,
        jobs: Sequence[JobHandle[R_co]] = (),
        then: JobHandle[Any] | None = None,
    ) -> None:
        self.id = id
        self.jobs = tuple(jobs)
        self.then = then
        self._engine = engine

    def __repr__(self) -> str:
        return f"<group {self.id}>"

    def status(self) -> GroupView:
        """The state of the group, with the exact counts of its members."""
        view = self._engine.ledger.group(self.id)
        if view is None:
            raise UnknownGroup(group=self.id)
        return view

    def result(self, timeout: float | None = None) -> list[R_co]:
        """Wait until the group is closed and return the results in the order of the jobs. Raises the first
        failure or cancellation."""
        self.closed(timeout)
        return self._values()

    async def aresult(self, timeout: float | None = None) -> list[R_co]:
        await self.aclosed(timeout)
        return self._values()

    def closed(self, timeout: float | None = None) -> GroupView:
        """Wait until the group is closed, however it ended."""
        return self._engine.watch.group(self.id, timeout)

    async def aclosed(self, timeout: float | None = None) -> GroupView:
        return await self._engine.watch.agroup(self.id, timeout)

    def cancel(self) -> None:
        """Cancel the waiting jobs, ask the running jobs to stop, and close the group."""
        self._engine.call(Abort(self.id))

    async def acancel(self) -> None:
        await self._engine.acall(Abort(self.id))

    def pause(self, why: str | None = None) -> None:
        """Waiting jobs of the group do not start until `resume`; running jobs continue, and wait as well
        after a retry."""
        self._engine.call(Unseal(self.id, why))

    async def apause(self, why: str | None = None) -> None:
        await self._engine.acall(Unseal(self.id, why))

    def resume(self) -> None:
        self._engine.call(Seal(self.id))

    async def aresume(self) -> None:
        await self._engine.acall(Seal(self.id))

    def _values(self) -> list[R_co]:
        found = jobs_of(self._engine.ledger, [each.id for each in self.jobs])
        return [each._value(job) for each, job in zip(self.jobs, found, strict=True)]


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

    def collect(self, spec: Spec, decode: Decode) -> JobHandle[Any]:
        handle: JobHandle[Any] = JobHandle(self.engine, spec.id, decode)
        self.specs.append(spec)
        self._handles.append(handle)
        return handle

    def placed(self, answer: Result) -> None:
        for handle, id in zip(self._handles, ids_of(answer), strict=True):
            handle.id = id


def ids_of(answer: Result) -> list[str]:
    """The ids in the result of an append: those of the specs, or of the jobs that already held their keys."""
    assert isinstance(answer, Appended)
    return [placed.id for placed in answer.jobs]


open_collector: ContextVar[Collector | None] = ContextVar("towpath_collecting", default=None)


def collecting(engine: Engine) -> Collector | None:
    """The open batch of this context for this engine."""
    collector = open_collector.get()
    return collector if collector is not None and collector.engine is engine else None
