"""One attempt at a task of Django, in a worker: its context, its signals, and its connections to the
databases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from towpath import App, BreakerOpen, Cancel, Fail, Snooze, StopRequested, current
from towpath.contrib.django.compat import (
    Task,
    TaskContext,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from towpath.contrib.django.results import StoredCall, failure_of, has_history, moment, result_of

_WAITS_AGAIN = (Snooze, BreakerOpen, StopRequested)
"""Exceptions that end an attempt without a failure of the job."""


def run_task(app: App, task: Task, call: StoredCall, sender: type) -> Any:
    """Run a `def` in the thread of its attempt. `sender` is the class of the backend, as in the signals of
    Django's own backends."""
    close_connections()
    try:
        run = TaskRun(app, task, call, sender)
        try:
            value = normalize_json(task.func(*run.arguments, **call.kwargs))
        except BaseException as error:
            run.fail(error)
            raise
        run.succeed(value)
        return value
    finally:
        close_connections()


async def arun_task(app: App, task: Task, call: StoredCall, sender: type) -> Any:
    """Run an `async def` on the event loop. Its signals and connections belong to the thread in which Django
    runs the synchronous code of coroutines."""
    await sync_to_async(close_connections)()
    try:
        run = await sync_to_async(TaskRun)(app, task, call, sender)
        try:
            value = normalize_json(await task.func(*run.arguments, **call.kwargs))
        except Exception as error:
            await sync_to_async(run.fail)(error)
            raise
        await sync_to_async(run.succeed)(value)
        return value
    finally:
        await sync_to_async(close_connections)()


def close_connections() -> None:
    """Close the connections of this thread that are too old or broken, as Django does before and after a
    request. A connection with an open transaction stays open: in a test, the task runs inside it."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


class TaskRun:
    """The result of a running task, and its signals. A receiver that raises is logged by Django and changes
    nothing. The signal of the end is sent before the outcome is stored."""

    def __init__(self, app: App, task: Task, call: StoredCall, sender: type) -> None:
        self._running = current()
        self._sender = sender
        self._clock = app.engine.clock
        job = self._running.record
        history: Sequence[Any] = app.job(job.id).history() if has_history(job) else ()
        self._result: TaskResult = result_of(task, job, call, history)
        context = [TaskContext(task_result=self._result)] if task.takes_context else []
        self.arguments = [*context, *call.args]
        task_started.send_robust(sender, task_result=self._result)

    def succeed(self, value: Any) -> None:
        if self._running.stopped:
            # It returned because it was asked to stop: the job is canceled or runs again.
            return
        object.__setattr__(self._result, "_return_value", value)
        self._finish(TaskResultStatus.SUCCESSFUL)

    def fail(self, error: BaseException) -> None:
        """Only the last failure finishes the task; after another one it waits for its next attempt."""
        job = self._running.record
        last = isinstance(error, Cancel | Fail) or job.failures + 1 >= job.max_attempts
        if isinstance(error, _WAITS_AGAIN) or not last:
            return
        self._result.errors.append(failure_of(error))
        self._finish(TaskResultStatus.FAILED)

    def _finish(self, status: TaskResultStatus) -> None:
        object.__setattr__(self._result, "finished_at", moment(self._clock.now()))
        object.__setattr__(self._result, "status", status)
        task_finished.send_robust(self._sender, task_result=self._result)
