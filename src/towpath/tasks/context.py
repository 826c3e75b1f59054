"""The running job, for the handler that runs it: `towpath.current()`.

A worker makes a `Running` per attempt, enters it around the handler (`with running:`), calls `ask` when the
job is asked to stop, and takes the children, notes and functions of the handler for the settling transaction
(`outcome_extras`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import Token
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from towpath.core.commands import Note, Progress, Progressed
from towpath.core.job import STATE_TTL, ClaimedJob, Job, Reason, Spec, state_key
from towpath.core.lifecycle import interrupts
from towpath.core.views import JobStatus
from towpath.errors import InvalidInput, JobCanceled, JobFailed, LostClaim, NotInJob, Unsupported
from towpath.runtime.commit.pending import Reply
from towpath.runtime.notes import Document
from towpath.tasks import new_jobs
from towpath.tasks.codec import decode, decode_plain, encode, job_status, waited_for
from towpath.tasks.handles import JobHandle, jobs_of, members, value_of
from towpath.tasks.mistakes import no_call
from towpath.tasks.new_jobs import running
from towpath.tasks.outcomes import StopRequested
from towpath.tasks.task import Call, R, Registry, Task

V = TypeVar("V")
Extras = tuple[tuple[Spec, ...], tuple[Note, ...], Callable[[Any], object] | None]
"""Children, notes and the function for the transaction that settles the job."""
_lists_lock = threading.Lock()
"""Guards the lists of children and functions of all jobs: it is held for a moment, and most jobs have
neither."""


def _after_fork() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _lists_lock  # noqa: PLW0603
    _lists_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Poster(Protocol):
    """Receives the progress of a running job and calls back with the reply, unless a newer progress replaced
    it or the job was settled."""

    def post_progress(self, progress: Progress, call: Callable[[Reply], None], /) -> None: ...


class Stoppable:
    """The request to stop of a running job, and whether its handler has seen it."""

    __slots__ = ("_complete", "_seen", "asked", "lost")

    def __init__(self, asked: Reason | None) -> None:
        self.asked = asked if interrupts(asked) else None
        """The reason of the request to stop, if there is one."""
        self.lost = False
        """Another process holds the job: the ledger refuses every outcome of this attempt."""
        self._seen = self._complete = False

    @property
    def cancelled(self) -> bool:
        """True if the job is asked to stop or the claim is lost. A long handler checks this now and then. If
        the handler has read True and returns, the job is stopped and not done, unless the handler returns
        `finished(value)`. A group that stops after a failure does not ask its running members."""
        if self.asked is None and not self.lost:
            return False
        self._seen = True
        return True

    def check(self) -> None:
        """Raise `towpath.StopRequested` if `cancelled`."""
        if self.cancelled:
            raise StopRequested(self.asked or Reason.LOST)

    @overload
    def finished(self) -> None: ...

    @overload
    def finished(self, value: V) -> V: ...

    def finished(self, value: Any = None) -> Any:
        """`return current().finished(value)`: the work is complete, although the handler may have seen a
        request to stop."""
        self._complete = True
        return value

    # For the worker

    def ask(self, reason: Reason) -> None:
        """Set the request to stop, unless it is one that does not interrupt handlers."""
        if interrupts(reason):
            self.asked = self.asked or reason

    def interrupt(self) -> None:
        """The request to stop was raised inside the handler."""
        self._seen = True

    @property
    def stopped(self) -> bool:
        """True if a handler that returns now has stopped before its work was complete."""
        return self._seen and not self._complete

    def lose(self) -> None:
        """Mark the claim as lost."""
        self.lost = True


class Running(Stoppable):
    """One attempt at a job. Any thread of the handler may use it."""

    __slots__ = (
        "_cursor",
        "_functions",
        "_poster",
        "_registry",
        "_span",
        "_spawn",
        "_state",
        "_token",
        "at",
        "engine",
        "record",
        "task",
    )

    def __init__(
        self,
        registry: Registry,
        claim: ClaimedJob,
        task: Task[..., Any],
        span: AbstractContextManager[None] | None = None,
        poster: Poster | None = None,
    ) -> None:
        self.record: Job = claim.job
        """The record of the job at the time of the claim, as the ledger stores it."""
        self.task = task
        super().__init__(claim.job.cancel_requested)
        self._registry = registry
        self.engine = registry.engine
        self._poster = poster
        """Receives the progress instead of the committer, in the process of a task with `process=True`."""
        self._cursor = claim.job.cursor
        # Most handlers have neither, and every list that lives until the next commit is one more for the
        # garbage collector.
        self._spawn: dict[str, Spec] | None = None
        self._functions: list[Callable[[Any], object]] | None = None
        self._state: Document | None = None
        self._span = span
        self.at: tuple[int, int | None] | None = None
        """The last progress: done, and the total if it is known."""
        self._token: Token[new_jobs.CurrentJob | None] | None = None

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """The tasks of the app, by their names."""
        return self._registry.tasks

    @property
    def job(self) -> JobStatus:
        """The job at the time of the claim. Made at each access; `kind`, `queue`, `attempt` and the like cost
        less."""
        return job_status(self.record, self._registry)

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def kind(self) -> str:
        return self.record.kind

    @property
    def queue(self) -> str:
        return self.record.queue

    @property
    def headers(self) -> Mapping[str, str]:
        return self.record.headers

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self.record.attempts

    @property
    def fence(self) -> int:
        """Grows with every delivery. Pass it to the systems that you write to, so that they can refuse an
        older delivery."""
        return self.record.fence

    @property
    def correlation_id(self) -> str | None:
        return self.record.correlation_id

    @property
    def cursor(self) -> Any:
        """The last checkpoint, also of earlier attempts; None at the beginning."""
        return None if self._cursor is None else decode(self._cursor)

    @property
    def state(self) -> Document:
        """A JSON document (`value`, `version`, `save()`) that later attempts find as this one left it. It is
        deleted when the job is done."""
        if self._state is None:
            self._state = self.engine.document(state_key(self.id), STATE_TTL)
        return self._state

    def progress(self, done: int, total: int | None = None) -> None:
        """Report progress, for a transfer in bytes. Never waits; a progress that is replaced before its
        commit is not stored."""
        self.at = done, total
        self._post(Progress(self.id, self.fence, done, total))

    def checkpoint(self, cursor: Any) -> None:
        """Store the position from which the next attempt continues. Any JSON value. Never waits."""
        self._cursor = encode(cursor, "cursor")
        self._post(Progress(self.id, self.fence, cursor=self._cursor))

    def _post(self, progress: Progress) -> None:
        (self._poster or self.engine.committer).post_progress(progress, self.on_reply)

    def spawn(self, call: Call[R]) -> JobHandle[R]:
        """Add a child: it is enqueued in the transaction that settles this job as done, and not at all if the
        attempt fails."""
        if type(call) is not Call:
            raise no_call(call, "current().spawn")
        spec = call.spec()
        with _lists_lock:
            self._spawn = self._spawn or {}
            if spec.id in self._spawn:
                raise InvalidInput(
                    field="id", value=spec.id, expected="an id that no other child of this attempt has"
                )
            self._spawn[spec.id] = spec
        return JobHandle(call.task.engine, spec.id, call.task)

    def commit(self, function: Callable[[Any], object]) -> None:
        """Call `function(connection)` in the transaction that settles the job as done: your rows and ours, or
        neither. Needs a ledger with a database."""
        if self._poster is not None or not self.engine.transactional:
            raise Unsupported(
                what="run a function in the settle of this job, which needs a ledger with a database, "
                "in this process (in a test: app.testing(database=True))"
            )
        with _lists_lock:
            self._functions = self._functions or []
            self._functions.append(function)

    def results(self, *, errors: bool = False) -> list[Any]:
        """Return the results of the jobs that this job waited for, in the order of `after`; a group yields
        all of its members. A job that did not succeed raises JobFailed or JobCanceled, a result that does not
        fit its task's return annotation raises InvalidInput; with `errors` the exceptions are in the list
        instead."""
        return [self._value(job, errors) for job in self._awaited()]

    # For the worker

    def outcome_extras(self) -> Extras | None:
        """The children, notes and function of the handler; None if there are none."""
        if not (self._spawn or self._functions or self._state is not None or self.record.fence > 1):
            return None
        children = tuple((self._spawn or {}).values())
        notes = (
            (Note(key=state_key(self.id), value=None),)
            if self._state is not None or self.record.fence > 1
            else ()
        )
        return children, notes, self._within()

    def __enter__(self) -> Running:
        self._token = running.set(self)
        if self._span is not None:
            self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        running.reset(self._token)

    def _within(self) -> Callable[[Any], object] | None:
        if not self._functions:
            return None
        functions = tuple(self._functions)

        def within(connection: Any) -> None:
            try:
                for function in functions:
                    function(connection)
            except Exception:
                raise
            except BaseException as error:
                if (
                    isinstance(error, KeyboardInterrupt)
                    and threading.current_thread() is threading.main_thread()
                ):
                    raise
                # This is the committing thread of the process; a function must not end it.
                raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error

        return within

    def on_reply(self, reply: Reply) -> None:
        """In the committing thread: process the reply to a progress."""
        if isinstance(reply, Progressed) and reply.cancel is not None:
            self.ask(reply.cancel)
        elif isinstance(reply, LostClaim):
            self.lose()

    def _awaited(self) -> list[Job]:
        """The jobs that this job waited for. A job that was refused for its key, or superseded, is
        represented by the job that replaced it."""
        after = waited_for(self.record)
        ledger = self.engine.ledger
        names = {winner.id: winner.winner or winner.id for winner in ledger.winners(job=self.id)}
        jobs = iter(jobs_of(ledger, [names.get(each.id, each.id) for each in after if not each.group]))
        awaited: list[Job] = []
        for each in after:
            if each.group:
                awaited += members(ledger, each.id)
            else:
                awaited.append(next(jobs))
        return awaited

    def _value(self, job: Job, errors: bool) -> Any:
        task = self._registry.tasks.get(job.kind)
        try:
            return value_of(self.engine.ledger, job, decode_plain if task is None else task.decode_result)
        except (JobFailed, JobCanceled, InvalidInput) as error:
            if errors:
                return error
            raise


def current() -> Running:
    """The job that runs here. Raises NotInJob outside a handler."""
    found = running.get()
    if found is None:
        raise NotInJob()
    assert isinstance(found, Running)
    return found
