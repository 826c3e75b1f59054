"""The backend for the Tasks framework of Django."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import connections, transaction

from towpath import Task as TowpathTask
from towpath import new_id
from towpath.commands import utc
from towpath.contrib.django import configuration
from towpath.contrib.django.bridge import DjangoApp, known_task, register, shared_app
from towpath.contrib.django.compat import (
    BaseTaskBackend,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    task_backends,
    task_enqueued,
)
from towpath.contrib.django.results import (
    StoredCall,
    aware,
    has_history,
    new_result,
    result_of,
    shown,
    stored_call,
    to_rank,
)
from towpath.errors import InvalidInput, UnknownJob


class TowpathBackend(BaseTaskBackend):
    """`"BACKEND": "towpath.contrib.django.TowpathBackend"`. See docs/frameworks/django.md for its OPTIONS."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    @property
    def app(self) -> DjangoApp:
        """The App of this alias. Raises DjangoOption if its settings are wrong."""
        url = configuration.ledger_url(self.alias, self.options)
        return shared_app(self.alias, self._make_app, url)

    def _make_app(self) -> DjangoApp:
        url = configuration.checked_url(self.alias, self.options, self.queues)
        return DjangoApp(self.alias, url, self.options, self.queues, type(self))

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        try:
            configuration.checked_url(self.alias, self.options, self.queues)
        except InvalidInput as error:
            return [checks.Error(str(error), id="towpath.E001")]
        return []

    def validate_task(self, task: Task) -> None:
        super().validate_task(task)
        register(task)

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Store a job. With `database`, inside `transaction.atomic`: in that transaction."""
        self.validate_task(task)
        result = new_result(task, new_id(), args, kwargs, self.alias)
        database = configuration.commit_database(self.options)
        if database is None:
            self._enqueue(result)
        else:
            transaction.on_commit(lambda: self._enqueue(result), using=database)
        return result

    def _enqueue(self, result: TaskResult) -> None:
        app = self.app
        job = self._task_of(app, result)
        if (connection := self._open_transaction(app)) is not None:
            job = job.options(on=connection)
        job.enqueue(_call_of(result))
        self._enqueued(app, result)

    async def aenqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """The same. Coroutines see the transactions of Django in the thread of its synchronous code only."""
        if "database" in self.options or configuration.commit_database(self.options) is not None:
            return await super().aenqueue(task, args, kwargs)
        self.validate_task(task)
        result = new_result(task, new_id(), args, kwargs, self.alias)
        app = self.app
        await self._task_of(app, result).aenqueue(_call_of(result))
        await sync_to_async(self._enqueued)(app, result)
        return result

    def _task_of(self, app: DjangoApp, result: TaskResult) -> TowpathTask[..., Any]:
        """The task of Towpath with the options of this call."""
        task = result.task
        options: dict[str, Any] = {"id": result.id, "queue": task.queue_name}
        if task.run_after is not None:
            options["at"] = aware(task.run_after)
        return app.tasks[task.module_path].options(priority=to_rank(task.priority), **options)

    def _open_transaction(self, app: DjangoApp) -> Any:
        """Django's connection to the ledger's database, if a transaction is open on it."""
        database = self.options.get("database")
        # In `app.testing()` the ledger is another one.
        if database is None or not app.ledger.capabilities.remote:
            return None
        connection = connections[database]
        autocommit = (
            connection.settings_dict["AUTOCOMMIT"] if connection.connection is None else connection.autocommit
        )
        if autocommit and not connection.in_atomic_block:
            return None
        connection.ensure_connection()
        connection.validate_no_broken_transaction()
        return connection

    def _enqueued(self, app: DjangoApp, result: TaskResult) -> None:
        object.__setattr__(result, "enqueued_at", shown(utc(app.engine.clock.now())))
        task_enqueued.send(type(self), task_result=result)

    def get_result(self, result_id: str) -> TaskResult:
        """Raises TaskResultDoesNotExist if this alias has enqueued no job with this id."""
        try:
            handle = self.app.job(str(result_id))
            job = handle.record()
            history = handle.history() if has_history(job) else ()
        except UnknownJob as error:
            raise TaskResultDoesNotExist(result_id) from error
        task = known_task(job.kind)
        call = None if task is None else stored_call(job)
        if task is None or call is None or call.backend != self.alias:
            raise TaskResultDoesNotExist(result_id)
        return result_of(task, job, call, history)

    async def aget_result(self, result_id: str) -> TaskResult:
        return await sync_to_async(self.get_result, thread_sensitive=False)(result_id)


def _call_of(result: TaskResult) -> StoredCall:
    run_after = result.task.run_after
    return StoredCall(
        args=result.args,
        kwargs=result.kwargs,
        backend=result.backend,
        run_after=None if run_after is None else aware(run_after).isoformat(),
    )


def towpath_app(alias: str = "default") -> DjangoApp:
    """The App of an alias of TASKS: its jobs, queues and workers, and `testing()` and `run()` in tests."""
    if alias not in task_backends.settings:
        expected = f"an alias in TASKS ({', '.join(task_backends.settings)})"
        raise configuration.DjangoOption(field="backend", value=alias, expected=expected)
    backend = task_backends[alias]
    if not isinstance(backend, TowpathBackend):
        kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
        expected = "towpath.contrib.django.TowpathBackend"
        raise configuration.wrong(alias, "BACKEND", kind, expected)
    return backend.app
