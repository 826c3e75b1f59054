"""Tests of your own tasks: `with app.testing() as bench`. A fresh memory ledger, a clock that you move,
everything inline.

Nothing runs by itself and nothing sleeps: `drain()` runs what is ready, `advance(seconds)` lets time pass
with every retry, delay and schedule in it, so that a month takes milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw

from towpath.app import App
from towpath.clock import Clock
from towpath.core import checks
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.commands import Claimed, Command, Progress, Result, Settle, Upkeep, Upkept, Want
from towpath.core.job import ClaimedJob, Job, Release, State
from towpath.core.views import GroupView, Query
from towpath.errors import InvalidInput, Refused, Unsupported
from towpath.events import Bus
from towpath.ledger import Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.operations import breakers
from towpath.operations.schedules import Scheduler, store_schedules
from towpath.runtime.caretaker import Due
from towpath.runtime.commit.committer import Committer, Demand
from towpath.runtime.commit.pending import Reply, outcome
from towpath.runtime.completion import CompletionWatcher
from towpath.runtime.engine import Components
from towpath.tasks.attempt import Attempt
from towpath.tasks.registry import Registry
from towpath.tasks.task import Task
from towpath.testing.clock import ManualClock

OWNER = "bench"
LEASE = checks.DAY


@contextlib.contextmanager
def bench(app: App, registry: Registry, database: bool = False) -> Iterator[Bench]:
    """Give the engine of the app a fresh ledger and a clock that you move, until the end of the block."""
    engine = registry.engine
    clock = ManualClock()
    with contextlib.ExitStack() as stack:
        ledger: Ledger = _database(stack, clock) if database else MemoryLedger(clock)
        committer = InlineCommitter(ledger, engine.bus)
        components = InlineComponents(ledger, committer, OWNER, InlineWatch(ledger))
        stack.callback(components.close)
        # One event loop for all, made when it is needed: one for each drain would cost more than most jobs.
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
    """The app under test. `clock` is its time; `ledger` may be read as any other."""

    def __init__(self, app: App, registry: Registry, clock: ManualClock, runner: asyncio.Runner) -> None:
        self.app = app
        self._registry = registry
        self._engine = registry.engine
        self._runner = runner
        self.clock = clock
        self._scheduler = Scheduler(registry.engine)
        self._chance = random.Random(0).random
        self._by_hand: set[str] = set()
        self._connection: apsw.Connection | None = None

    @property
    def database(self) -> apsw.Connection:
        """With `app.testing(database=True)`: a connection to the ledger's file, to make your tables and to
        look at your rows."""
        from towpath.ledger.sqlite.ledger import SqliteLedger

        if not isinstance(self.ledger, SqliteLedger):
            raise Unsupported(what="there is no database behind it; use app.testing(database=True)")
        if self._connection is None:
            self._connection = apsw.Connection(str(self.ledger.path))
        return self._connection

    def close(self) -> None:
        """Close the connection that `database` gave. Leaving the `with` of `app.testing()` does it."""
        if self._connection is not None:
            self._connection.close()

    @property
    def ledger(self) -> Ledger:
        return self.app.ledger

    def drain(self) -> int:
        """Run everything that is ready, and what becomes ready by it, until nothing is; how many attempts
        that took."""
        _refuse_inside_a_loop("drain")
        ran = 0
        while claims := self._claim():
            for claim in claims:
                attempt = self._attempt(claim)
                if isinstance(attempt, Settle):
                    self._engine.call(attempt)
                else:
                    self._settle(attempt, self._run(attempt))
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
                    self._settle(attempt, await attempt.arun())
            ran += len(claims)
        return ran

    def advance(self, seconds: float | timedelta) -> int:
        """Let time pass: at every moment at which something is due, do what is due and drain; how many
        attempts that took."""
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
        """The jobs there are, in the order in which they were enqueued."""
        found: list[Job] = []
        states = () if state is None else (State(state),)
        query = Query(kind=None if task is None else task.kind, states=states, oldest_first=True, limit=1000)
        while True:
            page = self.ledger.find(query)
            found += page.jobs
            if page.next is None:
                return found
            query = Query(kind=query.kind, states=states, oldest_first=True, limit=1000, page=page.next)

    def assert_enqueued(self, task: Task[..., Any], **arguments: Any) -> Job:
        """There is a job of this task with these arguments, whatever its others and its state; the first
        one."""
        jobs = self.jobs(task)
        for job in jobs:
            if _fits(task, job, arguments):
                return job
        seen = "\n".join(f"  {job.payload.decode('utf-8', 'replace')} ({job.state})" for job in jobs[:20])
        raise AssertionError(
            f"no job of {task.kind} with {arguments}; there are {len(jobs)}:\n{seen}".rstrip(":\n")
        )

    def assert_not_enqueued(self, task: Task[..., Any], **arguments: Any) -> None:
        """There is no such job."""
        fitting = [job for job in self.jobs(task) if _fits(task, job, arguments)]
        if fitting:
            raise AssertionError(
                f"{len(fitting)} jobs of {task.kind} with {arguments}, the first is {fitting[0].id}"
            )

    def _moments(self, span: int) -> Iterator[int]:
        """Every moment within the span at which something is due, the clock being there, and the end."""
        target = self.clock.now() + span
        while (due := self._tend()) is not None and due <= target:
            self.clock.set(max(due, self.clock.now() + 1))
            self._tend()
            yield self.clock.now()
        if self.clock.now() < target:
            self.clock.set(target)
            self._tend()
            yield target

    def _tend(self) -> int | None:
        """Wake, expire, reap, purge and fire what is due; when the next is."""
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
                # Somebody's to get by hand. Its queue is left alone from now on.
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
        task = self.app.tasks.get(claim.job.kind)
        if task is None:
            self._engine.call(Settle(claim.id, claim.fence, Release()))
            known = ", ".join(sorted(self.app.tasks)) or "none"
            expected = f"the name of a task of this app ({known})"
            raise InvalidInput(field=f"the kind of job {claim.id}", value=claim.job.kind, expected=expected)
        if task.breaker is not None:
            return breakers.attempt(self._registry, claim, task, self._chance)
        return Attempt(self._registry, claim, task, self._chance)

    def _settle(self, attempt: Attempt, settle: Settle) -> None:
        try:
            self._engine.call(settle)
        except Refused as refused:
            self._engine.call(attempt.refused(refused))
        if isinstance(attempt.error, KeyboardInterrupt):
            raise attempt.error


class InlineComponents(Components):
    """Nothing happens by itself: `advance` does the work of the caretaker."""

    def start_caretaker(self, clock: Clock, due: Due) -> None:
        """There is none."""


class InlineCommitter(Committer):
    """Commits each command in the thread that brings it, at once."""

    def __init__(self, ledger: Ledger, bus: Bus) -> None:
        super().__init__(ledger, bus=bus)
        self._one = threading.RLock()

    def start(self) -> None:
        """There is no thread."""

    def close(self) -> bool:
        """There is nothing to wait for."""
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
    """Nobody else is at work, so waiting would be for ever: what is not finished now is a TimeoutError."""

    def job(self, id: str, timeout: float | None = None) -> Job:
        job = self._finished(id)
        if job is None:
            raise TimeoutError(
                f"{self._ledger.explain(id)}; in app.testing() nothing runs by itself: drain() or advance()"
                " first"
            )
        return job

    async def ajob(self, id: str, timeout: float | None = None) -> Job:
        return self.job(id, timeout)

    def group(self, id: str, timeout: float | None = None) -> GroupView:
        view = self._closed_group(id)
        if view is None:
            raise TimeoutError(
                f"group {id} is not closed; in app.testing() nothing runs by itself: drain() or advance()"
                " first"
            )
        return view

    async def agroup(self, id: str, timeout: float | None = None) -> GroupView:
        return self.group(id, timeout)


def _fits(task: Task[..., Any], job: Job, arguments: dict[str, Any]) -> bool:
    named = task.codec.full(task.codec.named(job.payload))
    return all(name in named and named[name] == value for name, value in arguments.items())


def _refuse_inside_a_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{name}() cannot run inside an event loop; use `await bench.a{name}()`")
