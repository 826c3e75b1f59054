"""The record of a job as a `TaskResult` of Django."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from traceback import format_exception
from typing import Any

import msgspec
from django.conf import settings
from django.utils import timezone

from towpath import Job, State
from towpath.commands import utc
from towpath.contrib.django.compat import (
    TASK_MAX_PRIORITY,
    TASK_MIN_PRIORITY,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
)

STATUS: Mapping[State, TaskResultStatus] = {
    State.RUNNING: TaskResultStatus.RUNNING,
    State.DONE: TaskResultStatus.SUCCESSFUL,
    State.FAILED: TaskResultStatus.FAILED,
    State.CANCELED: TaskResultStatus.FAILED,
}
"""All other states are READY: the job waits for its first or for another attempt."""
NORMAL = 5
"""The rank of priority 0. Django runs the larger number sooner, Towpath the smaller one."""
UNKNOWN_WORKER = "unknown"
"""The ledger keeps the workers of the running and of the failed attempts only."""
_FAILED = ("retried", "failed", "lost")
_CLASS = re.compile(r"([\w.]+)(?::|$)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


class StoredCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of a job: a call of a task, and the alias of the backend that enqueued it."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    backend: str = "default"
    run_after: str | None = None


class _Payload(msgspec.Struct, frozen=True):
    call: StoredCall


def stored_call(job: Job) -> StoredCall | None:
    """The call of a job; None if no backend of Django has enqueued it."""
    try:
        return msgspec.json.decode(job.payload, type=_Payload).call
    except msgspec.DecodeError:
        return None


def to_rank(priority: int) -> int:
    return NORMAL - priority


def from_rank(rank: int) -> int:
    return int(max(TASK_MIN_PRIORITY, min(TASK_MAX_PRIORITY, NORMAL - rank)))


def moment(micros: int | None) -> datetime | None:
    """A time of the ledger as Django's `timezone.now()` returns it: naive without USE_TZ."""
    if micros is None:
        return None
    return shown(utc(micros))


def shown(time: datetime) -> datetime:
    naive: datetime = time if settings.USE_TZ else timezone.make_naive(time)
    return naive


def aware(time: datetime) -> datetime:
    """A `run_after` with its time zone."""
    found: datetime = timezone.make_aware(time) if timezone.is_naive(time) else time
    return found


def new_result(task: Task, id: str, args: Any, kwargs: Any, backend: str) -> TaskResult:
    """The result of a call that is about to be enqueued."""
    return TaskResult(
        task=task,
        id=id,
        status=TaskResultStatus.READY,
        enqueued_at=None,
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[],
        worker_ids=[],
    )


def result_of(task: Task, job: Job, call: StoredCall, history: Sequence[Any]) -> TaskResult:
    """`history` are the attempts that did not end done."""
    status = STATUS.get(job.state, TaskResultStatus.READY)
    counted = [each for each in history if each.counted]
    result = TaskResult(
        task=replace(
            task,
            priority=from_rank(job.priority),
            queue_name=job.queue,
            backend=call.backend,
            run_after=None if call.run_after is None else shown(datetime.fromisoformat(call.run_after)),
        ),
        id=job.id,
        status=status,
        enqueued_at=moment(job.created_at),
        started_at=shown(counted[0].started_at) if counted else moment(job.started_at),
        last_attempted_at=moment(job.started_at),
        finished_at=moment(job.finished_at),
        args=call.args,
        kwargs=call.kwargs,
        backend=call.backend,
        errors=[error_of(each.error) for each in counted if each.outcome in _FAILED],
        worker_ids=[each.worker for each in counted],
    )
    if job.state in (State.RUNNING, State.DONE):
        result.worker_ids.append(job.owner or UNKNOWN_WORKER)
    if status == TaskResultStatus.FAILED and not result.errors:
        result.errors.append(_ended_without_attempt(job))
    if job.state is State.DONE and job.result is not None:
        object.__setattr__(result, "_return_value", msgspec.json.decode(job.result))
    return result


def has_history(job: Job) -> bool:
    """Whether an attempt may have ended other than done."""
    return job.fence > 1 or (job.fence == 1 and job.state not in (State.RUNNING, State.DONE))


def error_of(text: str | None) -> TaskError:
    """The stored error of an attempt: a line that begins with the class, then the traceback. A text without a
    traceback is the reason that a handler gave with `Fail`."""
    if text is None:
        return TaskError(
            exception_class_path="towpath.errors.LostClaim",
            traceback="the worker ended, or lost its connection to the ledger, while it ran the task",
        )
    found = _CLASS.match(text)
    begin = text.find(_TRACEBACK)
    if found is None or (begin < 0 and not found[1].startswith("towpath.")):
        return TaskError(exception_class_path="towpath.Fail", traceback=text)
    path = found[1] if "." in found[1] else f"builtins.{found[1]}"
    return TaskError(exception_class_path=path, traceback=text[max(begin, 0) :])


def failure_of(error: BaseException) -> TaskError:
    """The error of the attempt that ends now, with its traceback."""
    kind = type(error)
    return TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
        traceback="".join(format_exception(error)),
    )


def _ended_without_attempt(job: Job) -> TaskError:
    name = "JobCanceled" if job.state is State.CANCELED else "JobFailed"
    reason = f"{job.state}: {job.reason}" + (f", {job.error}" if job.error else "")
    return TaskError(exception_class_path=f"towpath.errors.{name}", traceback=reason)
