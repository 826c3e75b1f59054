"""The front door. An `App` knows the tasks and where the ledger is; it opens the ledger when it is first
needed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from towpath.clock import Clock
from towpath.core import checks
from towpath.core.commands import Result
from towpath.core.limits import Bounds
from towpath.core.schedule import Schedule, every_of
from towpath.errors import InvalidInput
from towpath.operations import breakers
from towpath.operations.bandwidth import Bandwidth
from towpath.operations.schedules import CronOptions, Scheduled, Scheduler, Schedules, make_schedule
from towpath.operations.service import RunOptions, Service
from towpath.operations.steering import Steering
from towpath.runtime.caretaker import DepthMonitor
from towpath.runtime.worker.worker import Worker
from towpath.settings import resolve
from towpath.tasks.codec import decode
from towpath.tasks.compose import Batch, Chain, Group, Then
from towpath.tasks.handles import GroupHandle, JobHandle
from towpath.tasks.options import TaskOptions
from towpath.tasks.outcomes import Span
from towpath.tasks.task import AsyncTask, Call, Decorator, Task, make_task

if TYPE_CHECKING:
    from towpath.queues.message import Queue
    from towpath.testing.app import Bench

P = ParamSpec("P")
R = TypeVar("R")


class App(Steering):
    """Durable work in one ledger: `App("sqlite:///work.db")`, `App("memory://")`, or `App()` for what the
    settings say.

    Safe from any number of threads and event loops. `with app:` (or `async with`) closes it at the end; a
    forked child opens a ledger of its own. `name` is how it appears as the owner of what it runs.
    `priorities` are names for priorities (`{"urgent": -10}`), beside `high` 0, `normal` 5 and `low` 10 or
    instead of them; smaller runs sooner."""

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str | None = None,
        clock: Clock | None = None,
        priorities: Mapping[str, int] | None = None,
    ) -> None:
        self.settings = resolve(url, {"name": name, "priorities": priorities})
        super().__init__(self.settings.url, self.settings.name, clock)
        self.priorities = self.settings.priorities
        self.tasks: dict[str, Task[..., Any]] = {}
        """The tasks by their names, which are the kinds of their jobs."""
        self.declared: dict[str, Schedule] = {}
        """The schedules that the code declares. A worker writes them down when it starts."""
        self.local_workers: list[Worker] = []
        """The workers that run in this process."""
        self.bandwidth = Bandwidth(clock=clock, **self.settings.bandwidth)
        """The limits of the settings (`[bandwidth]`), without any if there are none: wrap streams with it. A
        reload changes it."""
        self.resources: dict[str, Bounds] = {}
        """The services whose load its workers watch, by name."""
        self._scheduler = Scheduler(self)
        self._depths = DepthMonitor(self)

    def __repr__(self) -> str:
        return f"<App {self.url}>"

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
            return lambda function: self.add_task(make_task(self, function, options))
        return self.add_task(make_task(self, function, options))

    def add_task(self, task: Task[P, R]) -> Task[P, R]:
        """Let jobs of its kind be run by this app's workers. `task` does it."""
        if task.kind in self.tasks:
            raise InvalidInput(
                field="name", value=task.kind, expected="a name that no other task of this app has"
            )
        breakers.check_together(self.tasks.values(), task)
        self.tasks[task.kind] = task
        return task

    def queue(self, name: str) -> Queue:
        """A queue: its limits, pause and counts, and messages by hand (put, get, ack, nack)."""
        from towpath.queues.message import Queue

        return Queue(self, name)

    def resource(self, name: str, *, min: int = 1, max: int = 64) -> None:
        """Declare a service that tasks use (`@app.task(resource=name)`): each worker learns how many of them
        it takes at once, within these bounds. See `docs/flow.md`."""
        checks.name("resource", name)
        if name in self.resources:
            raise InvalidInput(
                field="resource", value=name, expected="a name that no other resource of this app has"
            )
        self.resources[name] = Bounds(min, max)

    def cron(self, expression: str, **options: Unpack[CronOptions]) -> Scheduled:
        """Run a task (or a function, which becomes one) at these times: `@app.cron("*/5 * * * *",
        tz="Europe/Vienna")`."""
        return lambda function: self._declare(
            function, lambda task: make_schedule(task, options, cron=expression)
        )

    def every(self, interval: Span, **options: Unpack[CronOptions]) -> Scheduled:
        """Run a task (or a function, which becomes one) every so many seconds."""
        every = every_of(interval)
        return lambda function: self._declare(
            function, lambda task: make_schedule(task, options, every=every)
        )

    def _declare(self, function: Callable[..., Any], make: Callable[[Task[..., Any]], Schedule]) -> Any:
        task = function if isinstance(function, Task) else self.task(function)
        schedule = make(task)
        if schedule.name in self.declared:
            raise InvalidInput(
                field="name", value=schedule.name, expected="a name that no other schedule of this app has"
            )
        self.declared[schedule.name] = schedule
        return task

    @property
    def schedules(self) -> Schedules:
        """The schedules in the ledger, to look at and to change while work goes on."""
        return Schedules(self, self._plain_arguments)

    @property
    def breakers(self) -> breakers.Desk:
        """The circuit breakers in the ledger, to look at and to open and close by hand."""
        return breakers.Desk(self)

    def _plain_arguments(self, kind: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments as the JSON they are stored as, checked if the task is known here."""
        if kind not in self.tasks:
            return args
        plain: dict[str, Any] = decode(self.tasks[kind].of(**args).payload)
        return plain

    def job(self, id: str) -> JobHandle[Any]:
        """A handle on a job that is already there. Its result is plain JSON."""
        return JobHandle(self, id, lambda data: None if data is None else decode(data))

    def batch(self, on: Any = None) -> Batch:
        """`with app.batch():` makes all enqueues inside one append: all or nothing, one commit. With `on`, a
        connection of yours to the ledger's database, it is part of the transaction there."""
        return Batch(self, on)

    def chain(self, *calls: Call[Any]) -> JobHandle[Any]:
        """Run calls one after the other, each when the one before it is done; the handle of the last."""
        chain = Chain(self, calls)
        return chain.handle(self.call(chain.command))

    async def achain(self, *calls: Call[Any]) -> JobHandle[Any]:
        chain = Chain(self, calls)
        return chain.handle(await self.acall(chain.command))

    def group(
        self,
        calls: Iterable[Call[R]],
        then: Then | None = None,
        on_failure: Literal["continue", "abort"] = "continue",
        id: str | None = None,
    ) -> GroupHandle[R]:
        """Run calls side by side, and `then` when all have ended. `abort` cancels the rest when one fails."""
        group = Group(self, id, on_failure)
        answers: list[Result] = [each for step in group.commands(calls, then) for each in self.call_all(step)]
        return group.handle(answers)

    async def agroup(
        self,
        calls: Iterable[Call[R]],
        then: Then | None = None,
        on_failure: Literal["continue", "abort"] = "continue",
        id: str | None = None,
    ) -> GroupHandle[R]:
        group = Group(self, id, on_failure)
        answers: list[Result] = [
            each for step in group.commands(calls, then) for each in await self.acall_all(step)
        ]
        return group.handle(answers)

    def run(self, **options: Unpack[RunOptions]) -> None:
        """Be a worker until SIGINT or SIGTERM: the first lets running jobs finish, the second leaves at once.
        With `burst=True` also until there is nothing left to run now."""
        Service(self, options).run()

    async def arun(self, **options: Unpack[RunOptions]) -> None:
        """Be a worker on this event loop until the coroutine is cancelled, or the `burst` is over."""
        await Service(self, options).arun()

    def _due(self, now: int) -> int | None:
        times = (self._scheduler.due(now), self._depths.due(now), self.parts.rounds.due(now))
        return min((time for time in times if time is not None), default=None)

    def testing(self, *, database: bool = False) -> AbstractContextManager[Bench]:
        """For unit tests: inside, this app's tasks run inline on a fresh memory ledger with a clock that you
        move. With `database` it is a SQLite ledger in a temporary file: slower, and `current().commit` works
        as in production."""
        from towpath.testing.app import bench

        return bench(self, database)
