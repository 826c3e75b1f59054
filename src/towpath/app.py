"""The front door: an `App` holds the tasks and the engine of a program. The engine opens the ledger on first
use."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from towpath.clock import Clock
from towpath.core.commands import Result
from towpath.core.limits import Bounds
from towpath.core.schedule import Schedule, every_of
from towpath.errors import InvalidInput
from towpath.escapes import without_password
from towpath.events import Bus
from towpath.ledger import Ledger
from towpath.operations import breakers
from towpath.operations.bandwidth import Bandwidth
from towpath.operations.schedules import CronOptions, Scheduled, Scheduler, Schedules, make_schedule
from towpath.operations.service import ActiveSettings, RunOptions, Service
from towpath.operations.startup import import_included
from towpath.operations.workers import Workers
from towpath.runtime.engine import Engine, in_thread, same_as
from towpath.settings import Settings, resolve
from towpath.tasks.codec import decode
from towpath.tasks.compose import Batch, Chain, Group, Then, existing_group
from towpath.tasks.handles import GroupHandle, JobHandle, acancel_key, cancel_key, id_of
from towpath.tasks.hooks import Hooks
from towpath.tasks.mistakes import APP_METHODS, no_attribute, without_times
from towpath.tasks.options import TaskOptions
from towpath.tasks.outcomes import Span
from towpath.tasks.task import AsyncTask, Call, Decorator, Registry, Task, make_task

if TYPE_CHECKING:
    from towpath.operations.progress import KindHistory, LiveProgress, Snapshot
    from towpath.queues.message import Queue
    from towpath.testing.app import Testing

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """Durable work in one ledger: `App("sqlite:///work.db")`, `App("memory://")`, or `App()` for the URL of
    the settings.

    Safe from any number of threads and event loops. `with app:` (or `async with`) closes it at the end; a
    forked child opens a ledger of its own. `name` is part of the owner of its claims. `priorities` are names
    for priorities (`{"urgent": -10}`), beside `high` 0, `normal` 5 and `low` 10 or instead of them; smaller
    runs sooner. `include` names the modules that define tasks of this app (`["shop.tasks", "shop.*.tasks"]`):
    a worker imports them when it starts. See `docs/projects.md`.

    `ledger` is an opened ledger, instead of a URL. The caller closes it, after the app: `app.close()` does
    not. `hooks` surround the work of its workers and the attempts at its jobs."""

    def __init__(
        self,
        url: str | None = None,
        *,
        ledger: Ledger | None = None,
        name: str | None = None,
        clock: Clock | None = None,
        priorities: Mapping[str, int] | None = None,
        hooks: Hooks | None = None,
        include: Sequence[str] | None = None,
    ) -> None:
        if url is not None and ledger is not None:
            message = "App(...) takes a URL or an opened ledger, not both: leave out the URL or ledger=..."
            raise InvalidInput(field="url", value="...", expected="left out beside a ledger", message=message)
        if hooks is not None and not isinstance(hooks, Hooks):
            raise InvalidInput(field="hooks", value=hooks, expected="a Hooks object: hooks = Hooks()")
        given = {"name": name, "priorities": priorities, "include": include}
        self._configuration = ActiveSettings(resolve(url, given), clock)
        settings = self.settings
        place = settings.url if ledger is None else type(ledger).__name__
        self.engine = Engine(place, settings.name, clock, ledger, settings.priorities)
        """The open ledger, its committer and the services built on them. For the rooms of this package."""
        self._registry = Registry(self.engine, hooks)
        self._live: LiveProgress | None = None
        self.engine.due.append(Scheduler(self.engine).due)

    def __repr__(self) -> str:
        return f"<App {without_password(self.engine.url)}>"

    if not TYPE_CHECKING:  # with it, a type checker would accept every attribute

        def __getattr__(self: Any, name: str) -> Any:
            raise no_attribute(self, "an App", name, APP_METHODS)

    @property
    def url(self) -> str:
        """The URL of the ledger. It may contain a password."""
        return self.engine.url

    @property
    def ledger(self) -> Ledger:
        """The ledger; opens it."""
        return self.engine.ledger

    @property
    def bus(self) -> Bus:
        """The events of this process: `app.bus.subscribe(JobSettled, listener)`."""
        return self.engine.bus

    @property
    def settings(self) -> Settings:
        """The settings in use. A reload replaces them."""
        return self._configuration.settings

    @property
    def bandwidth(self) -> Bandwidth:
        """The limits of the settings (`[bandwidth]`); without any, streams pass unlimited. A reload changes
        them."""
        return self._configuration.bandwidth

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """The tasks by their names, which are the kinds of their jobs."""
        return self._registry.tasks

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(self, function: None = None, /, **options: Unpack[TaskOptions]) -> Decorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Make a function a task: `@app.task`, or `@app.task(queue="mail", max_attempts=5)`; see
        `TaskOptions`."""
        if function is None:
            return lambda function: self._add_task(make_task(self._registry, function, options))
        return self._add_task(make_task(self._registry, function, options))

    def _add_task(self, task: Task[P, R]) -> Task[P, R]:
        """Let the workers of this app run the jobs of a task."""
        breakers.check_together(self.tasks.values(), task)
        self._registry.add_task(task)
        return task

    def queue(self, name: str) -> Queue:
        """A queue: its limits, pause and counts, and messages by hand (put, get, ack, nack)."""
        from towpath.queues.message import Queue

        return Queue(self.engine, name)

    def resource(self, name: str, *, min: int = 1, max: int = 64) -> None:
        """Declare a service that tasks use (`@app.task(resource=name)`): each worker adapts how many of these
        jobs run at once, within these bounds. See `docs/flow.md`."""
        self._registry.add_resource(name, Bounds(min, max))

    def cron(self, expression: str, **options: Unpack[CronOptions]) -> Scheduled:
        """Run a task (or a function, which becomes one) at these times: `@app.cron("*/5 * * * *",
        tz="Europe/Vienna")`."""
        if callable(expression):
            raise without_times(expression, "cron", '@app.cron("*/5 * * * *")')
        return lambda function: self._declare(
            function, lambda task: make_schedule(task, options, cron=expression)
        )

    def every(self, interval: Span, **options: Unpack[CronOptions]) -> Scheduled:
        """Run a task (or a function, which becomes one) every so many seconds."""
        if callable(interval):
            raise without_times(interval, "every", "@app.every(60)")
        every = every_of(interval)
        return lambda function: self._declare(
            function, lambda task: make_schedule(task, options, every=every)
        )

    def _declare(self, function: Callable[..., Any], make: Callable[[Task[..., Any]], Schedule]) -> Any:
        task = function if isinstance(function, Task) else self.task(function)
        self._registry.add_schedule(make(task))
        return task

    @property
    def schedules(self) -> Schedules:
        """The schedules in the ledger: read and change them while workers run."""
        return Schedules(self.engine, self._plain_arguments)

    @property
    def breakers(self) -> breakers.BreakerControls:
        """The circuit breakers in the ledger: read them, open and close them by hand."""
        return breakers.BreakerControls(self.engine)

    def _plain_arguments(self, kind: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments as the JSON they are stored as, checked if the task is known here."""
        if kind not in self.tasks:
            return args
        plain: dict[str, Any] = decode(self.tasks[kind].of(**args).payload)
        return plain

    def job(self, id: str | JobHandle[Any]) -> JobHandle[Any]:
        """A handle on an existing job. Its result is plain JSON."""
        return JobHandle(self.engine, id_of(id), self._registry)

    def batch(self, on: Any = None) -> Batch:
        """`with app.batch():` makes all enqueues inside one append: all or nothing, one commit. With `on`, a
        connection of yours to the ledger's database, the append is part of its transaction."""
        return Batch(self.engine, on)

    def chain(self, *calls: Call[Any]) -> JobHandle[Any]:
        """Run calls in sequence, each when the one before it is done; returns the handle of the last."""
        chain = Chain(self.engine, calls)
        return chain.handle(self.engine.call(chain.command))

    @same_as(chain)
    async def achain(self, *calls: Call[Any]) -> JobHandle[Any]:
        chain = Chain(self.engine, calls)
        return chain.handle(await self.engine.acall(chain.command))

    def group(
        self,
        calls: Iterable[Call[R]] | None = None,
        then: Then | None = None,
        on_failure: Literal["continue", "abort", "stop"] = "continue",
        id: str | None = None,
    ) -> GroupHandle[R]:
        """Run calls concurrently, and `then` when all have ended. When one fails, `abort` cancels the others,
        `stop` only the waiting ones. Without calls: a handle on the existing group `id`; its results are
        plain JSON."""
        if calls is None:
            return existing_group(self._registry, id, then)
        group = Group(self._registry, id, on_failure)
        answers: list[Result] = [
            each for step in group.commands(calls, then) for each in self.engine.call_all(step)
        ]
        return group.handle(answers)

    @same_as(group)
    async def agroup(
        self,
        calls: Iterable[Call[R]] | None = None,
        then: Then | None = None,
        on_failure: Literal["continue", "abort", "stop"] = "continue",
        id: str | None = None,
    ) -> GroupHandle[R]:
        if calls is None:
            return existing_group(self._registry, id, then)
        group = Group(self._registry, id, on_failure)
        answers: list[Result] = [
            each for step in group.commands(calls, then) for each in await self.engine.acall_all(step)
        ]
        return group.handle(answers)

    def cancel(self, key: str) -> int:
        """Cancel the jobs with this key: waiting jobs end now, a running job is asked to stop. Returns how
        many were canceled or asked; jobs that have finished, or were asked before, do not count."""
        return cancel_key(self.engine, key)

    @same_as(cancel)
    async def acancel(self, key: str) -> int:
        return await acancel_key(self.engine, key)

    def progress(self, group: str | GroupHandle[Any] | None = None) -> Snapshot:
        """The running jobs of this process, their progress, and how many jobs wait, without a query. The
        measurement starts with the first call."""
        from towpath.operations.progress import LiveProgress

        if self._live is None or self._live.bus is not self.bus:
            self._live = LiveProgress(self.engine)
        return self._live.snapshot(None if group is None else id_of(group))

    def show_progress(
        self,
        transfers: Mapping[str, str] | None = None,
        *,
        group: str | GroupHandle[Any] | None = None,
        file: IO[str] | None = None,
    ) -> AbstractContextManager[None]:
        """`with app.show_progress({"fetch": "downloading"}):` shows the progress live on a terminal (`file`,
        else stderr). `transfers` maps the kinds with progress in bytes to their labels."""
        from towpath.operations.display import shown

        return shown(lambda: self.progress(group), transfers or {}, file)

    def history(self, group: str | GroupHandle[Any] | None = None) -> tuple[KindHistory, ...]:
        """Count the jobs in the ledger by kind and state, whichever process ran them. Reads all of them."""
        from towpath.operations.progress import history

        return history(self.ledger, None if group is None else id_of(group))

    ahistory = in_thread(history)

    @property
    def workers(self) -> Workers:
        """The workers on this ledger, in any process, and their lanes: list, pause, resume and drain them."""
        return Workers(self.engine, self.settings.lanes)

    def run(self, **options: Unpack[RunOptions]) -> None:
        """Run a worker until SIGINT or SIGTERM: the first lets running jobs finish, the second ends the
        process at once. With `burst=True` also until no job is running or could run now."""
        self._service(options).run()

    async def arun(self, **options: Unpack[RunOptions]) -> None:
        """Run a worker on this event loop until the coroutine is cancelled, or the `burst` is over."""
        await self._service(options).arun()

    def _service(self, options: RunOptions) -> Service:
        return Service(self._registry, self._configuration, options)

    def testing(self, *, database: bool = False, provided: Mapping[Any, Any] | None = None) -> Testing:
        """For unit tests: inside, this app's tasks run inline on a fresh memory ledger with a clock that you
        move. With `database` it is a SQLite ledger in a temporary file: slower, and `current().commit` works
        as in production. `provided` are values by type (`{Engine: engine}`): they replace the
        values of the hooks, which are not called."""
        from towpath.testing.app import Testing

        import_included(self.settings.include)
        return Testing(self, self._registry, database, provided or {})

    def close(self) -> None:
        """Deliver the pending events, commit the waiting commands, then close the ledger, unless it was given
        as `ledger`. Later calls raise `LedgerClosed`."""
        self.engine.close()

    aclose = in_thread(close)

    def __enter__(self) -> Self:
        self.engine.reopen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
