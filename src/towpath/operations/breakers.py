"""Circuit breakers: `@app.task(breaker="platform-x")`, `with towpath.breaker("x"):` inside a handler, and
`app.breakers`.

A task with a breaker waits in a gate of its own: the part `breaker:<name>` of its queue, or the whole queue
if its jobs have parts already. While the breaker is open the gate is shut for the whole fleet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from towpath.core import breaker as rules
from towpath.core import checks
from towpath.core.breaker import BREAKERS, Breaker, Phase, Record
from towpath.core.breaker import BreakerStatus as BreakerStatus
from towpath.core.breaker import breaker_status as breaker_status
from towpath.core.commands import Settle
from towpath.core.job import ClaimedJob, Done, Job, Outcome, Reason, Release, RetryOutcome
from towpath.core.retry import Chance
from towpath.errors import InvalidInput
from towpath.runtime.breakers import Breakers, Place
from towpath.runtime.engine import Engine
from towpath.tasks import outcomes
from towpath.tasks.attempt import Attempt
from towpath.tasks.context import current
from towpath.tasks.outcomes import Span
from towpath.tasks.task import Registry, Task

Tasks = Mapping[str, Task[..., Any]]


def breaker(which: str | Breaker, /) -> BreakerGuard:
    """Guards a call inside a handler: `with towpath.breaker("x"):` (or `async with`). An exception of the
    block counts as a failure. While the breaker is open the block is not entered: the job waits and runs
    again, without spending an attempt. A name must be the breaker of a task of the app; a `Breaker` may be
    any."""
    return BreakerGuard(which)


class BreakerGuard:
    """One call through a breaker."""

    def __init__(self, which: str | Breaker) -> None:
        self._job = current()
        self._engine = self._job.engine
        self._breaker = which if isinstance(which, Breaker) else _named(which, self._job.tasks)
        self._began = 0

    def __enter__(self) -> None:
        now = self._now()
        again = self._breakers.admit(self._breaker, now)
        if again is not None:
            raise outcomes.BreakerOpen(self._breaker.name, (again - now) / checks.SECOND)
        self._began = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = self._now()
        if error is None or _counts(error) or self._too_late(error):
            self._breakers.report(self._breaker, None, error is None, self._began, now)
        else:
            self._breakers.give_back(self._breaker, self._began, now)

    async def __aenter__(self) -> None:
        if self._breakers.phase(self._breaker, self._now()) is Phase.HALF_OPEN:
            # Whether there is a probe left is asked of the ledger.
            await asyncio.to_thread(self.__enter__)
        else:
            self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _now(self) -> int:
        """The current time, but not before the claim of the job in the ledger's time: a local clock may be
        set back, the ledger's never goes back."""
        return max(self._engine.clock.now(), self._job.record.started_at or 0)

    def _too_late(self, error: BaseException) -> bool:
        """True if the handler was stopped by its timeout: the called service did not respond."""
        return (
            isinstance(error, asyncio.CancelledError | outcomes.StopRequested)
            and self._job.asked is Reason.EXPIRED
        )

    @property
    def _breakers(self) -> Breakers:
        return self._engine.components.breakers


def _counts(error: BaseException) -> bool:
    """True if the error is a failure of the called service. `Snooze`, `Cancel` and `Fail` are decisions of
    the handler about its job, and a throttling service is not down."""
    if not isinstance(error, Exception) or outcomes.throttling(error) is not None:
        return False
    return isinstance(error, outcomes.Retry) or not isinstance(error, outcomes.Control)


def _named(name: object, tasks: Tasks) -> Breaker:
    known = {task.breaker.name: task.breaker for task in tasks.values() if task.breaker is not None}
    if not isinstance(name, str) or name not in known:
        names = ", ".join(sorted(known)) or "there is none"
        raise InvalidInput(
            field="breaker",
            value=name,
            expected=f"the breaker of a task of this app ({names}), or a Breaker(...)",
        )
    return known[name]


# Tasks with a breaker


def check_together(tasks: Iterable[Task[..., Any]], new: Task[..., Any]) -> None:
    """Check that tasks with the same breaker name have the same settings, and that a queue that a breaker
    shuts has no other tasks."""
    for other in tasks:
        if other.breaker is not None and new.breaker is not None and other.breaker.name == new.breaker.name:
            if other.breaker != new.breaker:
                expected = f"set as at task {other.kind}: {other.breaker}"
                raise InvalidInput(field="breaker", value=new.breaker, expected=expected)
        elif other.queue == new.queue and (other.shuts_queue or new.shuts_queue):
            message = (
                f"tasks {other.kind} and {new.kind} share queue {new.queue}: a task with part= and breaker= "
                "needs a queue of its own, because its breaker shuts the whole queue"
            )
            raise InvalidInput(
                field="breaker",
                value=(new.breaker or other.breaker),
                expected="on its own queue",
                message=message,
            )


def declare(registry: Registry) -> None:
    """Store the breakers of the tasks in the ledger. A worker does it when it starts."""
    places: dict[Breaker, set[Place]] = {}
    for task in registry.tasks.values():
        if task.breaker is not None:
            places.setdefault(task.breaker, set()).add(
                (task.queue, None if task.shuts_queue else task.breaker.part)
            )
    for each, found in places.items():
        engine = registry.engine
        engine.components.breakers.declare(each, sorted(found, key=str), engine.clock.now())


def attempt(
    registry: Registry, claim: ClaimedJob, task: Task[..., Any], chance: Chance = random.random
) -> Attempt | Settle:
    """The attempt at a job of a task with a breaker, or the settle that releases the job because the breaker
    has opened."""
    engine = registry.engine
    job, now, breakers = claim.job, engine.clock.now(), engine.components.breakers
    report = _Report(engine, task, job, now)
    if not breakers.is_clear(report.breaker, now):
        away = breakers.held(report.breaker, report.place, report.began, now)
        if away is not None:
            return Settle(job.id, job.fence, Release(away))
    return Attempt(registry, claim, task, chance, report)


class _Report:
    """Reports the outcome of an attempt to the breaker of its task. There is one for every job: nothing is
    looked up before it is needed."""

    __slots__ = ("_engine", "_job", "_task", "began", "breaker")

    def __init__(self, engine: Engine, task: Task[..., Any], job: Job, now: int) -> None:
        assert task.breaker is not None
        self._engine = engine
        self._task = task
        self._job = job
        self.breaker = task.breaker
        self.began = now if job.started_at is None else job.started_at

    def __call__(self, outcome: Outcome) -> None:
        ok = type(outcome) is Done
        if not ok and type(outcome) is not RetryOutcome:
            return
        now, breakers = self._engine.clock.now(), self._engine.components.breakers
        if not (ok and breakers.is_clear(self.breaker, now)):
            breakers.report(self.breaker, self.place, ok, self.began, now)

    @property
    def place(self) -> Place | None:
        """The gate that admitted the job."""
        job, task = self._job, self._task
        if job.part == self.breaker.part:
            return job.queue, job.part
        return (job.queue, None) if task.shuts_queue and job.queue == task.queue else None


# By hand


All = list[BreakerStatus]


class BreakerControls:
    """`app.breakers`: the breakers in the ledger: read them, open and close them by hand. An unknown name
    raises `InvalidInput`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def list(self) -> All:
        """All breakers, by name."""
        now = self._engine.clock.now()
        return [breaker_status(record, now) for record in self._engine.components.breakers.all()]

    async def alist(self) -> All:
        return await asyncio.to_thread(self.list)

    def phase(self, name: str) -> Phase:
        """The phase of the breaker now."""
        record, _ = self._engine.components.breakers.read(name)
        return self._known(name, record).status.phase(self._engine.clock.now())

    async def aphase(self, name: str) -> Phase:
        return await asyncio.to_thread(self.phase, name)

    def open(self, name: str, why: str = "", for_: Span | None = None) -> BreakerStatus:
        """Open a breaker by hand: for so many seconds, then it is half open; or until `close`."""
        checks.text("why", why, 500)
        now = self._engine.clock.now()
        until = checks.FOREVER if for_ is None else now + checks.micros(for_, "for_")
        reason = f"by hand: {why}" if why else "by hand"
        return self._edit(
            name, lambda old: replace(old, status=rules.opened(old.breaker, old.status, now, reason, until))
        )

    async def aopen(self, name: str, why: str = "", for_: Span | None = None) -> BreakerStatus:
        return await asyncio.to_thread(self.open, name, why, for_)

    def close(self, name: str) -> BreakerStatus:
        """Close a breaker and reset its failures."""
        now = self._engine.clock.now()
        return self._edit(name, lambda old: replace(old, status=rules.closed(old.status, now, "by hand")))

    async def aclose(self, name: str) -> BreakerStatus:
        return await asyncio.to_thread(self.close, name)

    def reset(self, name: str) -> None:
        """Close a breaker and delete its record, settings included: a worker that has it declares it
        again."""
        self._known(name, self._engine.components.breakers.forget(name, self._engine.clock.now()))

    async def areset(self, name: str) -> None:
        await asyncio.to_thread(self.reset, name)

    def _edit(self, name: str, change: Callable[[Record], Record]) -> BreakerStatus:
        now = self._engine.clock.now()
        edited = self._known(name, self._engine.components.breakers.edit(name, change, now))
        return breaker_status(edited, now)

    def _known(self, name: str, record: Record | None) -> Record:
        if record is None:
            names = ", ".join(BREAKERS.names(self._engine.ledger)[:20]) or "there is none"
            raise InvalidInput(field="breaker", value=name, expected=f"the name of a breaker ({names})")
        return record
