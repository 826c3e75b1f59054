"""Tests of your own tasks: `with app.testing() as bench`. A new memory ledger, a manual clock, and handlers
that run inline.

No job runs by itself, and no call sleeps: `drain()` runs the ready jobs; `advance(seconds)` moves the clock
and runs every retry, delayed job and schedule that is due on the way, so that a month takes milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from inspect import Parameter
from pathlib import Path
from typing import Any

import apsw

from towpath.app import App
from towpath.clock import Clock
from towpath.core import checks
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.commands import Claimed, Command, Progress, Result, Settle, Settled, Upkeep, Upkept, Want
from towpath.core.job import ClaimedJob, Done, Job, Release, State
from towpath.core.views import GroupView, Query
from towpath.errors import InvalidInput, Refused, Unsupported, shortened
from towpath.events import Bus
from towpath.ledger import Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.operations import breakers
from towpath.operations.schedules import Scheduler, store_schedules
from towpath.runtime.caretaker import Due
from towpath.runtime.commit.committer import Committer, Demand
from towpath.runtime.commit.pending import Reply, outcome
from towpath.runtime.completion import CompletionWatcher, Report
from towpath.runtime.engine import Components
from towpath.tasks.active_hooks import ActiveHooks, ThreadedHooks, is_used
from towpath.tasks.attempt import Attempt
from towpath.tasks.hooks import Hook, JobFailure
from towpath.tasks.task import Registry, Task
from towpath.testing.clock import ManualClock

OWNER = "bench"
LEASE = checks.DAY


class Testing(contextlib.AbstractContextManager["Bench"], contextlib.AbstractAsyncContextManager["Bench"]):
    """The object of `app.testing()`. `with` calls async hooks, and async handlers that use hooks, on the loop
    of a thread; `async with` calls them on the running loop."""

    def __init__(self, app: App, registry: Registry, database: bool, provided: Mapping[Any, Any]) -> None:
        self._app, self._registry, self._database, self._provided = app, registry, database, provided
        self._hooked = bool(provided) or is_used(registry)

    def __enter__(self) -> Bench:
        self._sync = self._entered()
        return self._sync.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._sync.__exit__(*error)

    async def __aenter__(self) -> Bench:
        self._async = self._aentered()
        return await self._async.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._async.__aexit__(*error)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Bench]:
        with _bench(self._app, self._registry, self._database) as bench:
            if not self._hooked:
                yield bench
                return
            with contextlib.closing(ThreadedHooks(self._registry, self._provided)) as hooks:
                bench.hooks = hooks.active
                yield bench

    @contextlib.asynccontextmanager
    async def _aentered(self) -> AsyncIterator[Bench]:
        with _bench(self._app, self._registry, self._database) as bench:
            if not self._hooked:
                yield bench
                return
            bench.hooks = ActiveHooks(self._registry, "async", self._provided)
            await bench.hooks.open()
            try:
                yield bench
            finally:
                await bench.hooks.close()


@contextlib.contextmanager
def _bench(app: App, registry: Registry, database: bool) -> Iterator[Bench]:
    """Give the engine of the app a new ledger and a manual clock, until the end of the block."""
    engine = registry.engine
    clock = ManualClock()
    with contextlib.ExitStack() as stack:
        ledger: Ledger = _database(stack, clock) if database else MemoryLedger(clock)
        committer = InlineCommitter(ledger, engine.bus)
        components = InlineComponents(ledger, committer, OWNER, InlineWatch(ledger))
        stack.callback(components.close)
        # One event loop, created on first use: a loop per drain would cost more than most jobs.
        runner = stack.enter_context(contextlib.closing(asyncio.Runner()))
        stack.enter_context(engine.substituted(components, clock))
        store_schedules(engine, registry.schedules)
        breakers.declare(registry)
        bench = Bench(app, registry, clock, runner)
        stack.callback(bench.close)
        yield bench


def _database(stack: contextlib.ExitStack, clock: Clock) -> Ledger:
    from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="towpath-"))
    return SqliteLedger(Path(folder) / "work.db", SqliteOptions(synchronous="normal"), clock)


class Bench:
    """The app under test, its clock, and its ledger for reads."""

    def __init__(self, app: App, registry: Registry, clock: ManualClock, runner: asyncio.Runner) -> None:
        self.app = app
        self._registry = registry
        self._engine = registry.engine
        self._runner = runner
        self.clock = clock
        self._scheduler = Scheduler(registry.engine)
        self._chance = random.Random(0).random
        self._by_hand: set[str] = set()
        self.hooks: ActiveHooks | None = None
        self._connection: apsw.Connection | None = None

    @property
    def database(self) -> apsw.Connection:
        """With `app.testing(database=True)`: a connection to the ledger's file, to create your tables and
        read your rows."""
        from towpath.ledger.sqlite.ledger import SqliteLedger

        if not isinstance(self.ledger, SqliteLedger):
            raise Unsupported(what="there is no database behind it; use app.testing(database=True)")
        if self._connection is None:
            self._connection = apsw.Connection(str(self.ledger.path))
        return self._connection

    def close(self) -> None:
        """Close the connection of `database`. The end of the `with` block of `app.testing()` does so too."""
        if self._connection is not None:
            self._connection.close()

    @property
    def ledger(self) -> Ledger:
        return self.app.ledger

    def drain(self) -> int:
        """Run all ready jobs, and the jobs that become ready meanwhile, until none is ready; return the
        number of attempts."""
        _refuse_inside_a_loop("drain")
        ran = 0
        while claims := self._claim():
            for claim in claims:
                attempt = self._attempt(claim)
                if isinstance(attempt, Settle):
                    self._engine.call(attempt)
                else:
                    for call in self._settle(attempt, self._run(attempt)):
                        self._call(*call)
            ran += len(claims)
        return ran

    def _run(self, attempt: Attempt) -> Settle:
        if not attempt.task.is_async:
            return attempt.run()
        try:
            return self._runner.get_loop().run_until_complete(attempt.arun())
        except asyncio.CancelledError as error:
            return attempt.ended(error)

    async def adrain(self) -> int:
        ran = 0
        while claims := self._claim():
            for claim in claims:
                attempt = self._attempt(claim)
                if isinstance(attempt, Settle):
                    await self._engine.acall(attempt)
                else:
                    for call in self._settle(attempt, await attempt.arun()):
                        await self._acall(*call)
            ran += len(claims)
        return ran

    def advance(self, seconds: float | timedelta) -> int:
        """Move the clock: at each time at which a job or schedule is due, apply upkeep, fire and drain;
        return the number of attempts."""
        ran = self.drain()
        for _ in self._moments(checks.micros(seconds, "seconds")):
            ran += self.drain()
        return ran

    async def aadvance(self, seconds: float | timedelta) -> int:
        ran = await self.adrain()
        for _ in self._moments(checks.micros(seconds, "seconds")):
            ran += await self.adrain()
        return ran

    def jobs(self, task: Task[..., Any] | None = None, *, state: State | str | None = None) -> list[Job]:
        """All jobs of the ledger, in the order in which they were enqueued."""
        if task is not None:
            _check_task(task, "jobs")
        found: list[Job] = []
        states = () if state is None else (_state(state),)
        query = Query(kind=None if task is None else task.kind, states=states, oldest_first=True, limit=1000)
        while True:
            page = self.ledger.find(query)
            found += page.jobs
            if page.next is None:
                return found
            query = Query(kind=query.kind, states=states, oldest_first=True, limit=1000, page=page.next)

    def assert_enqueued(self, task: Task[..., Any], **arguments: Any) -> Job:
        """Assert that a job of this task has these arguments, in any state and with any other arguments;
        return the first one."""
        _check_task(task, "assert_enqueued", arguments)
        jobs = self.jobs(task)
        for job in jobs:
            if _fits(task, job, arguments):
                return job
        seen = "\n".join(f"  {job.payload.decode('utf-8', 'replace')} ({job.state})" for job in jobs[:20])
        raise AssertionError(
            f"no job of {task.kind} with {arguments}; there are {len(jobs)}:\n{seen}".rstrip(":\n")
        )

    def assert_not_enqueued(self, task: Task[..., Any], **arguments: Any) -> None:
        """Assert that there is no such job."""
        _check_task(task, "assert_not_enqueued", arguments)
        fitting = [job for job in self.jobs(task) if _fits(task, job, arguments)]
        if fitting:
            raise AssertionError(
                f"{len(fitting)} jobs of {task.kind} with {arguments}, the first is {fitting[0].id}"
            )

    def _moments(self, span: int) -> Iterator[int]:
        """Move the clock to each time within the span at which something is due, and to its end; yield each
        time."""
        target = self.clock.now() + span
        while (due := self._apply_due()) is not None and due <= target:
            self.clock.set(max(due, self.clock.now() + 1))
            self._apply_due()
            yield self.clock.now()
        if self.clock.now() < target:
            self.clock.set(target)
            self._apply_due()
            yield target

    def _apply_due(self) -> int | None:
        """Apply the upkeep that is due and fire due schedules; return the time of the next."""
        upkept = self._engine.call(Upkeep())
        assert isinstance(upkept, Upkept)
        while upkept.more:
            upkept = self._engine.call(Upkeep())
            assert isinstance(upkept, Upkept)
        fires = self._scheduler.due(self.clock.now())
        return min(
            (
                due
                for due in (
                    upkept.next_due,
                    fires,
                    self._engine.components.breaker_upkeep.due(self.clock.now()),
                )
                if due is not None
            ),
            default=None,
        )

    def _claim(self) -> list[ClaimedJob]:
        while True:
            claims = self._claim_once()
            messages = [claim for claim in claims if not claim.job.kind]
            for claim in messages:
                # A message that is consumed by hand: its queue is not claimed from now on.
                self._by_hand.add(claim.job.queue)
                self._engine.call(Settle(claim.id, claim.fence, Release()))
            if not messages or len(messages) < len(claims):
                return [claim for claim in claims if claim.job.kind]

    def _claim_once(self) -> Sequence[ClaimedJob]:
        wants: Sequence[Want] = [Want("*")]
        if self._by_hand:
            wants = [Want(name) for name in self.ledger.queues() if name not in self._by_hand]
        if not wants:
            return ()
        answer = self._engine.call(ClaimCommand(owner=OWNER, wants=tuple(wants), lease=LEASE))
        assert isinstance(answer, Claimed)
        return answer.claims

    def _attempt(self, claim: ClaimedJob) -> Attempt | Settle:
        task = (self.hooks or self.app.tasks).get(claim.job.kind)
        built_in: Attempt | None = None
        if task is None:
            built_in = self._registry.built_in(claim, self.hooks or self.app.tasks)
        if built_in is not None:
            return built_in
        if task is None:
            self._engine.call(Settle(claim.id, claim.fence, Release()))
            known = ", ".join(sorted(self.app.tasks)) or "none"
            expected = f"the name of a task of this app ({known})"
            raise InvalidInput(field=f"the kind of job {claim.id}", value=claim.job.kind, expected=expected)
        if task.breaker is not None:
            return breakers.attempt(self._registry, claim, task, self._chance)
        return Attempt(self._registry, claim, task, self._chance)

    def _call(self, hook: Hook, failure: JobFailure) -> None:
        assert self.hooks is not None
        self.hooks.failures.call(hook, failure)

    async def _acall(self, hook: Hook, failure: JobFailure) -> None:
        assert self.hooks is not None
        if self.hooks.failures.loop is asyncio.get_running_loop():
            await self.hooks.failures.acall(hook, failure)
        else:
            self._call(hook, failure)

    def _settle(self, attempt: Attempt, settle: Settle) -> list[tuple[Hook, JobFailure]]:
        """Settle; return the hooks to call for a failure."""
        try:
            settled = self._engine.call(settle)
        except Refused as refused:
            settle = attempt.refused(refused)
            settled = self._engine.call(settle)
        if isinstance(attempt.error, KeyboardInterrupt):
            raise attempt.error
        if self.hooks is None or type(settle.outcome) is Done:
            return []
        assert isinstance(settled, Settled)
        return self.hooks.failures.calls(settle, attempt.claim.job, settled, attempt.error)


class InlineComponents(Components):
    """Components without a caretaker: `advance` does its work."""

    def start_caretaker(self, clock: Clock, due: Due) -> None:
        """Does nothing: there is no thread."""


class InlineCommitter(Committer):
    """Commits each command at once, in the calling thread."""

    def __init__(self, ledger: Ledger, bus: Bus) -> None:
        super().__init__(ledger, bus=bus)
        self._one = threading.RLock()

    def start(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> bool:
        """Does nothing: every command is committed when its call returns."""
        return True

    def call(self, command: Command, bounded: bool = True) -> Result:
        with self._one:
            [answer] = self._apply([command])
            self.kick()
        return outcome(answer)

    async def acall(self, command: Command) -> Result:
        return self.call(command)

    def post(
        self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None], retried: bool = True
    ) -> None:
        with self._one:
            call(self._apply(commands))
            self.kick()

    def post_settles(
        self, settles: Sequence[Settle], call: Callable[[Sequence[Reply]], None], sender: object
    ) -> None:
        self.post(settles, call)

    def post_progress(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        self.post([progress], lambda replies: call(replies[0]))

    def add_demand(self, demand: Demand) -> None:
        with self._one:
            self._demands.append(demand)
            self.kick()

    def kick(self) -> None:
        with self._one:
            for demand in list(self._demands):
                claim = demand.wanted()
                if claim is not None:
                    [answer] = self._apply([claim])
                    assert isinstance(answer, Claimed)
                    demand.taken(answer)


class InlineWatch(CompletionWatcher):
    """No other thread runs jobs, so a wait would never end: an unfinished job raises TimeoutError at once."""

    def job(self, id: str, timeout: float | None = None, report: Report | None = None) -> Job:
        job = self._finished(id)
        if job is None:
            raise TimeoutError(
                f"{self._ledger.explain(id)}; in app.testing() nothing runs by itself: drain() or advance()"
                " first"
            )
        return job

    async def ajob(self, id: str, timeout: float | None = None, report: Report | None = None) -> Job:
        return self.job(id, timeout)

    def group(self, id: str, timeout: float | None = None, report: Report | None = None) -> GroupView:
        view = self._closed_group(id)
        if view is None:
            raise TimeoutError(
                f"group {id} is not closed; in app.testing() nothing runs by itself: drain() or advance()"
                " first"
            )
        return view

    async def agroup(self, id: str, timeout: float | None = None, report: Report | None = None) -> GroupView:
        return self.group(id, timeout)


def _check_task(task: object, verb: str, arguments: Collection[str] = ()) -> None:
    """Raise if this is no task, or if it has no parameter of one of these names."""
    if not isinstance(task, Task):
        message = f"bench.{verb} takes a task: write bench.{verb}(task), not bench.{verb}({shortened(task)})"
        raise InvalidInput(field="task", value=task, expected="a task", message=message)
    known = task.codec.parameters
    if not any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        for name in arguments:
            if name not in known:
                raise checks.unknown("parameter", name, known, f"task {task.kind}")


def _state(given: str) -> State:
    try:
        return State(given)
    except ValueError:
        raise checks.unknown("state", given, list(State), "a job") from None


def _fits(task: Task[..., Any], job: Job, arguments: dict[str, Any]) -> bool:
    named = task.codec.full(task.codec.named(job.payload))
    for each in task.codec.parameters.values():
        if each.kind is Parameter.VAR_KEYWORD:
            named |= named.pop(each.name, {})
    return all(name in named and named[name] == value for name, value in arguments.items())


def _refuse_inside_a_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{name}() cannot run inside an event loop; use `await bench.a{name}()`")
