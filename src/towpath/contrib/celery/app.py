"""Celery apps and tasks on an App of Towpath."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import Any, cast, overload

from towpath import App, Cancel, Fail, Snooze, current
from towpath import Retry as RetryJob
from towpath import Task as TowpathTask
from towpath.contrib.celery.canvas import Signature
from towpath.contrib.celery.options import (
    CONF_USED,
    TASK_OPTIONS,
    CeleryOption,
    CeleryRetry,
    MaxRetriesExceededError,
    aware,
    check_options,
    priority_of,
    seconds_until,
)
from towpath.contrib.celery.results import (
    AsyncResult,
    EagerResult,
    current_app,
    has_current_app,
    set_current_app,
)
from towpath.escapes import get_logger

log = get_logger("towpath.contrib.celery")

DEFAULT_RETRY_DELAY = 180
DEFAULT_MAX_RETRIES = 3
UNLIMITED = 1_000_000
"""`max_attempts` of every job: the bridge counts retries as Celery does, and ends a job by `Fail`."""

_shared: dict[str, CeleryTask] = {}
_request: ContextVar[Request | None] = ContextVar("towpath_celery_request", default=None)
"""The call that runs in this thread."""


class Request:
    """`self.request`: the job that runs here, in Celery's words."""

    def __init__(
        self, task: CeleryTask, job: Any = None, arguments: tuple[Any, Any] = ((), {}), retries: int = 0
    ) -> None:
        self.task = task.name
        self.id: str | None = None if job is None else job.id
        self.retries: int = retries if job is None else job.failures
        self.args, self.kwargs = arguments
        self.correlation_id: str | None = None if job is None else job.correlation_id
        self.parent_id: str | None = None if job is None else job.parent
        self.hostname: str | None = None if job is None else job.owner
        self.delivery_info = {} if job is None else {"routing_key": job.queue, "priority": job.priority}
        self.called_directly = job is None
        self.is_eager = False


class CeleryTask:
    """A Celery task. `towpath` is the task of Towpath that runs it."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        name = options.get("name") or f"{function.__module__}.{function.__qualname__}"
        check_options(f"task {name}", options, TASK_OPTIONS)
        update_wrapper(self, function)
        self.name: str = name
        self.run = function
        self.options = dict(options)
        self.max_retries: int | None = options.get("max_retries", DEFAULT_MAX_RETRIES)
        self.default_retry_delay: float = options.get("default_retry_delay", DEFAULT_RETRY_DELAY)
        self._app: Celery | None = None
        self._towpath: TowpathTask[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<@task: {self.name}>"

    @property
    def app(self) -> Celery:
        return self._app or current_app()

    @property
    def towpath(self) -> TowpathTask[..., Any]:
        if self._towpath is None:
            self.app._adopt(self)
        assert self._towpath is not None
        return self._towpath

    @property
    def request(self) -> Request:
        request = _request.get()
        return request if request is not None and request.task == self.name else Request(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it here, without the ledger."""
        return self.run(self, *args, **kwargs) if self.options.get("bind") else self.run(*args, **kwargs)

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        return self.signature(args, kwargs, **options).apply_async()

    def apply(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **_: Any
    ) -> AsyncResult:
        """Run it here with its retries, without waiting between them."""
        given = (tuple(args), dict(kwargs or {}))
        retries = 0
        while True:
            request = Request(self, None, given, retries)
            request.is_eager = True
            token = _request.set(request)
            try:
                return EagerResult(self(*given[0], **given[1]), None)
            except CeleryRetry:
                retries += 1
            except Exception as error:
                if not self._retries(error, retries):
                    return EagerResult(None, error)
                retries += 1
            finally:
                _request.reset(token)

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """A call for a chain, group or chord; it gets the result before it as its first argument."""
        return Signature(self, args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """A call that ignores the result before it."""
        return Signature(self, args, kwargs, immutable=True)

    def signature(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        immutable: bool = False,
        **options: Any,
    ) -> Signature:
        return Signature(self, tuple(args or ()), dict(kwargs or {}), immutable, options)

    subtask = signature

    def retry(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> CeleryRetry:
        """Raise the exception that makes the job run again; after `max_retries` raise `exc` instead."""
        if args is not None or kwargs is not None:
            raise CeleryOption(
                field="retry: args",
                value=args or kwargs,
                expected="self.apply_async(...) for other arguments",
            )
        throw = options.pop("throw", True)
        check_options("retry", options, frozenset())
        limit = self.max_retries if max_retries is None else max_retries
        retries = self.request.retries
        if limit is not None and retries >= limit:
            raise exc or MaxRetriesExceededError(
                f"{self.name} was retried {retries} times; max_retries={limit}"
            )
        wait = (
            seconds_until(eta)
            if eta is not None
            else self.default_retry_delay
            if countdown is None
            else countdown
        )
        again = CeleryRetry("" if exc is None else f"{type(exc).__name__}: {exc}", after=wait)
        if throw:
            raise again from exc
        return again

    def AsyncResult(self, id: str) -> AsyncResult:
        return self.app.AsyncResult(id)

    def _retries(self, error: Exception, retries: int) -> bool:
        """Does `autoretry_for` cover the error, and is a retry left?"""
        covered = isinstance(error, tuple(self.options.get("autoretry_for", ())))
        excluded = isinstance(error, tuple(self.options.get("dont_autoretry_for", ())))
        limit = self.options.get("retry_kwargs", {}).get("max_retries", self.max_retries)
        return covered and not excluded and (limit is None or retries < limit)

    def _backoff(self, retries: int) -> float:
        """Seconds before the next automatic retry."""
        backoff = self.options.get("retry_backoff", False)
        if not backoff:
            waits = self.options.get("retry_kwargs", {}).get("countdown", self.default_retry_delay)
            return float(waits)
        wait = min(float(backoff) * 2**retries, float(self.options.get("retry_backoff_max", 600)))
        return random.uniform(0, wait) if self.options.get("retry_jitter", True) else wait

    def _run_job(self, args: list[Any], kwargs: dict[str, Any], takes: int = 0) -> Any:
        """The handler of Towpath. `takes` 1 puts the result of the previous job in front of the arguments, 2
        the list of the results of all previous jobs."""
        job = current()
        if takes:
            results = job.results()
            args = [results if takes == 2 else results[0], *args]
        token = _request.set(Request(self, job.record, (args, kwargs)))
        try:
            value = self(*args, **kwargs)
        except (RetryJob, Fail, Snooze, Cancel):
            raise
        except Exception as error:
            if self._retries(error, job.record.failures):
                raise RetryJob(
                    f"{type(error).__name__}: {error}", after=self._backoff(job.record.failures)
                ) from error
            raise Fail(f"{type(error).__name__}: {error}") from error
        finally:
            _request.reset(token)
        return None if self.options.get("ignore_result") else value


class crontab:
    """A cron expression in Celery's words."""

    def __init__(
        self,
        minute: str | int = "*",
        hour: str | int = "*",
        day_of_week: str | int = "*",
        day_of_month: str | int = "*",
        month_of_year: str | int = "*",
    ) -> None:
        self.expression = f"{minute} {hour} {day_of_month} {month_of_year} {day_of_week}"


class Configuration(dict[str, Any]):
    """`app.conf`: settings as keys and as attributes. A setting that Towpath does not use is logged once."""

    def __init__(self, app: Celery) -> None:
        super().__init__()
        self._app = app

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name == "beat_schedule":
            self._app._entries = dict(value)
            self._app._declare_entries()
        elif name not in CONF_USED:
            log.info("Celery setting %s is not used: docs/coming-from.md lists the settings that are", name)

    def update(self, *given: Any, **settings: Any) -> None:
        for name, value in dict(*given, **settings).items():
            self[name] = value


class Celery:
    """A Celery app. `towpath` is the App that has its tasks. `broker` and `backend` are used if they are the
    URL of a ledger; otherwise `url`, else the settings (TOWPATH_URL, towpath.toml)."""

    def __init__(
        self,
        main: str = "",
        broker: str | None = None,
        backend: str | None = None,
        include: Sequence[str] = (),
        *,
        url: str | None = None,
        **settings: Any,
    ) -> None:
        self.main = main
        schemes = ("sqlite:", "memory:", "postgresql:", "postgres:")
        ledger = url or next((each for each in (broker, backend) if each and each.startswith(schemes)), None)
        if broker and ledger != broker and url is None:
            log.warning(
                "broker %s is not used: the ledger is %s",
                broker.partition(":")[0],
                ledger or "from the settings",
            )
        self.towpath = App(ledger) if ledger else App()
        self.tasks: dict[str, CeleryTask] = {}
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._include = list(include)
        self.conf = Configuration(self)
        self.conf.update(settings)
        set_current_app(self)
        for task in _shared.values():
            self._adopt(task)

    def __repr__(self) -> str:
        return f"<Celery {self.main} on {self.towpath!r}>"

    @overload
    def task(self, function: Callable[..., Any], /) -> CeleryTask: ...

    @overload
    def task(self, **options: Any) -> Callable[[Callable[..., Any]], CeleryTask]: ...

    def task(self, *given: Any, **options: Any) -> Any:
        """`@app.task` and `@app.task(...)`."""

        def decorate(function: Callable[..., Any]) -> CeleryTask:
            task = CeleryTask(function, options)
            self._adopt(task)
            return task

        return decorate(given[0]) if given else decorate

    def autodiscover_tasks(self, packages: Iterable[str] = (), related_name: str = "tasks", **_: Any) -> None:
        """Import `package.tasks` of each package that has it."""
        for package in packages:
            name = f"{package}.{related_name}"
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise

    def config_from_object(self, source: Any, namespace: str = "", **_: Any) -> None:
        """Read settings from a module, its name, or an object; with `namespace="CELERY"` only the names
        that begin with `CELERY_`."""
        found = importlib.import_module(source) if isinstance(source, str) else source
        prefix = f"{namespace}_" if namespace else ""
        for name in dir(found):
            if name.startswith(prefix) and not name.startswith("__"):
                key = name.removeprefix(prefix)
                if key.lower() == key or namespace:
                    self.conf[key.lower()] = getattr(found, name)

    def send_task(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        if name not in self.tasks:
            expected = f"a task that is imported here ({', '.join(sorted(self.tasks)) or 'none is'})"
            raise CeleryOption(field="send_task", value=name, expected=expected)
        return self.tasks[name].apply_async(args, kwargs, **options)

    def signature(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Signature:
        return Signature(self.tasks[name], args, kwargs)

    def AsyncResult(self, id: str) -> AsyncResult:
        return AsyncResult(id, self)

    def set_default(self) -> None:
        set_current_app(self)

    set_current = set_default

    def worker_main(self, argv: Sequence[str] | None = None) -> None:
        raise CeleryOption(
            field="worker_main", value=argv, expected="`towpath worker module:app`, or app.towpath.run()"
        )

    def close(self) -> None:
        self.towpath.close()

    def _adopt(self, task: CeleryTask) -> None:
        """Register a task with the App. A second task of the same name stands for the first."""
        if task.name in self.tasks:
            task._app, task._towpath = self, self.tasks[task.name].towpath
            return
        options = task.options

        def handler(args: list[Any], kwargs: dict[str, Any], takes: int = 0) -> Any:
            return task._run_job(args, kwargs, takes)

        handler.__doc__ = task.__doc__
        given: dict[str, Any] = {"name": task.name, "max_attempts": UNLIMITED}
        if (queue := options.get("queue") or self._routed(task.name)) is not None:
            given["queue"] = queue
        if (limit := options.get("time_limit", self.conf.get("task_time_limit"))) is not None:
            given["timeout"] = limit
        if (rank := options.get("priority", self.conf.get("task_default_priority"))) is not None:
            given["priority"] = priority_of(rank)
        task._app = self
        self.tasks[task.name] = task
        task._towpath = self.towpath.task(**given)(handler)
        self._declare_entries()

    def _routed(self, name: str) -> str | None:
        """The queue by `task_routes` (exact names and `package.*`), else the default queue."""
        routes = self.conf.get("task_routes") or {}
        for pattern, route in routes.items() if isinstance(routes, Mapping) else ():
            if pattern == name or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                queue = route if isinstance(route, str) else route.get("queue")
                return cast("str | None", queue)
        return cast("str | None", self.conf.get("task_default_queue"))

    def _call_options(self, task: CeleryTask, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one call in Towpath's words."""
        options: dict[str, Any] = {}
        expires = given.get("expires", task.options.get("expires"))
        if "countdown" in given and given["countdown"] is not None:
            options["delay"] = given["countdown"]
        if given.get("eta") is not None:
            options["at"] = aware(given["eta"])
        if expires is not None:
            options["ttl"] = seconds_until(expires) if isinstance(expires, datetime) else expires
        if given.get("priority") is not None:
            options["priority"] = priority_of(given["priority"])
        for ours, theirs in (("queue", "queue"), ("id", "task_id"), ("timeout", "time_limit")):
            if given.get(theirs) is not None:
                options[ours] = given[theirs]
        if "queue" not in options and "queue" not in task.options and (queue := self._routed(task.name)):
            options["queue"] = queue
        return options

    def _declare_entries(self) -> None:
        """Declare the entries of `beat_schedule` with tasks that are registered by now."""
        for name, entry in list(self._entries.items()):
            task = self.tasks.get(entry["task"])
            if task is None or task._towpath is None:
                continue
            del self._entries[name]
            check_options(f"beat entry {name}", entry.get("options", {}), frozenset())
            args = {"args": list(entry.get("args", ())), "kwargs": dict(entry.get("kwargs", {}))}
            when = entry["schedule"]
            if isinstance(when, crontab):
                zone = self.conf.get("timezone")
                more: dict[str, Any] = {"tz": zone} if zone else {}
                self.towpath.cron(when.expression, name=name, args=args, **more)(task._towpath)
            else:
                span = when if isinstance(when, timedelta) else timedelta(seconds=float(when))
                self.towpath.every(span, name=name, args=args)(task._towpath)


@overload
def shared_task(function: Callable[..., Any], /) -> CeleryTask: ...


@overload
def shared_task(**options: Any) -> Callable[[Callable[..., Any]], CeleryTask]: ...


def shared_task(*given: Any, **options: Any) -> Any:
    """`@shared_task`: a task of whatever Celery app the program makes."""

    def decorate(function: Callable[..., Any]) -> CeleryTask:
        task = CeleryTask(function, options)
        _shared[task.name] = task
        if has_current_app():
            current_app()._adopt(task)
        return task

    return decorate(given[0]) if given else decorate


def signature(
    task: str | Signature, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Signature:
    return task if isinstance(task, Signature) else current_app().signature(task, args, kwargs)
