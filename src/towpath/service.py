"""An app at work: its schedules written down, its ledger looked after, its jobs run, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypedDict

from towpath.attempts import Attempt, serve
from towpath.context import Host as RunningHost
from towpath.core.job import Claim
from towpath.core.schedule import Schedule
from towpath.errors import TowpathError
from towpath.runtime.office import Office, WorkerOptions
from towpath.runtime.rest import at_rest
from towpath.runtime.worker import Worker
from towpath.schedules import Host as ScheduleHost
from towpath.schedules import Scheduler
from towpath.settings import Settings
from towpath.timetable import write_down

log = logging.getLogger("towpath.worker")

ECHO = 0.5
"""Seconds in which a second signal is the same one again: a service manager tells all processes, and a parent its children."""


class RunOptions(TypedDict, total=False):
    """What `app.run(...)` takes. None, or nothing, means what the settings say. `lease` and `grace` are seconds. `burst`: end by
    itself once nothing in its queues is running or could run now."""

    queues: tuple[str, ...] | None
    concurrency: int | None
    lease: float | None
    grace: float | None
    burst: bool


class Staff(Office, RunningHost, ScheduleHost, Protocol):
    """What running an app needs of it."""

    settings: Settings
    declared: dict[str, Schedule]

    def attend(self) -> None: ...


def worker_options(app: Staff, given: Mapping[str, Any]) -> WorkerOptions:
    """The options given, else the settings; without queues, those that the tasks name."""
    chosen = {name: getattr(app.settings, name) for name in ("queues", "concurrency", "lease", "grace")}
    chosen |= {name: value for name, value in given.items() if value is not None and name != "burst"}
    queues = tuple(chosen["queues"]) or tuple(sorted({task.queue for task in app.tasks.values()})) or ("*",)
    return WorkerOptions(**{**chosen, "queues": queues})


class Service:
    """One worker of an app. `arun` ends after `stop()`, which any thread and a signal may call, or when its burst is over."""

    def __init__(self, app: Staff, options: RunOptions) -> None:
        self._app = app
        self._burst = options.get("burst", False)
        chosen = worker_options(app, options)
        self._queues = ",".join(chosen.queues)
        self._worker = Worker(app, self._attempt, chosen, serve, self._look_around if self._burst else None)
        self._began = False
        self._stopped = False

    def _attempt(self, claim: Claim) -> Attempt | None:
        task = self._app.tasks.get(claim.job.kind)
        return None if task is None else Attempt(self._app, claim, task)

    def stop(self) -> None:
        """Take no more, let what runs finish. Before it has begun: end as soon as it has."""
        self._stopped = True
        if self._began:
            self._worker.stop()

    def _look_around(self) -> None:
        """In the committing thread, after a claim that brought nothing: is the burst over? If not, another claim will ask."""
        try:
            over = at_rest(self._app.ledger, self._queues, self._app.clock.now())
        except TowpathError as error:
            log.warning("whether the burst is over cannot be seen now: %s", error)
            return
        if over and not self._stopped:
            log.info("nothing is running or could run now in %s: the burst is over", self._queues)
            # The loop may have been closed without a word to us.
            with contextlib.suppress(RuntimeError):
                self.stop()

    async def arun(self) -> None:
        await asyncio.to_thread(write_down, self._app, self._app.declared)
        if self._burst:
            # What a schedule has due belongs to the burst; the caretaker may come too late for it.
            await asyncio.to_thread(Scheduler(self._app).due, self._app.clock.now())
        self._app.attend()
        working = asyncio.create_task(self._worker.run())
        try:
            # With its first step it can be stopped.
            await asyncio.sleep(0)
            self._began = True
            if self._stopped:
                self._worker.stop()
            await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def run(self) -> None:
        """The same in this thread, with an event loop of its own. In the main thread SIGINT and SIGTERM stop it: the first
        lets running jobs finish for the time of grace, the second leaves at once."""

        async def main() -> None:
            with _signals(asyncio.get_running_loop(), self.stop):
                await self.arun()

        asyncio.run(main())


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[float] = []

    def heard(number: signal.Signals) -> None:
        if asked:
            if time.monotonic() - asked[0] < ECHO:
                return
            # The ledger is consistent at every instant; what runs now is run again when its lease is over.
            os._exit(128 + number)
        asked.append(time.monotonic())
        log.warning("%s: no new jobs are taken; running ones may finish. The same again leaves at once.", number.name)
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in numbers:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
