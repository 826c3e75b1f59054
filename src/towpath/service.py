"""An app at work: its schedules written down, its ledger looked after, its jobs run, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict

from towpath import breakers
from towpath.attempts import Attempt, serve
from towpath.core import checks, lanes
from towpath.core.adaptive import Bounds
from towpath.core.commands import Settle
from towpath.core.job import Claim
from towpath.core.lanes import Lane
from towpath.core.schedule import Schedule
from towpath.errors import InvalidInput, TowpathError
from towpath.runtime import forks
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
    itself once nothing in its queues is running or could run now. With `lanes` (by name, the first is preferred), these have
    the queues."""

    queues: tuple[str, ...] | None
    lanes: Mapping[str, Lane] | None
    concurrency: int | None
    lease: float | None
    grace: float | None
    burst: bool


class Staff(Office, breakers.Staff, ScheduleHost, Protocol):
    """What running an app needs of it."""

    settings: Settings
    resources: dict[str, Bounds]
    declared: dict[str, Schedule]
    workers: list[Worker]

    def attend(self) -> None: ...


def worker_options(app: Staff, given: Mapping[str, Any]) -> WorkerOptions:
    """The options given, else the settings; without lanes and queues, the queues that the tasks name."""
    chosen = {name: getattr(app.settings, name) for name in ("queues", "concurrency", "lease", "grace", "lanes")}
    told = {name: value for name, value in given.items() if value is not None and name != "burst"}
    if told.get("queues") and "lanes" not in told:
        # Whoever names the queues of a worker wants no lanes of the settings.
        chosen["lanes"] = {}
    chosen |= told
    if chosen["lanes"]:
        if told.get("queues"):
            raise InvalidInput(field="queues", value=told["queues"], expected="nothing: the lanes have the queues")
        lanes.check(chosen["lanes"])
        queues = tuple(queue for lane in chosen["lanes"].values() for queue in lane.queues)
    else:
        queues = tuple(chosen["queues"]) or tuple(sorted({task.queue for task in app.tasks.values()})) or ("*",)
    return WorkerOptions(**{**chosen, "queues": queues, **resource_options(app, queues)})


def resource_options(app: Staff, queues: Sequence[str]) -> dict[str, Any]:
    """What the worker must know of the resources that the tasks use. A queue with such a task has only these, so that what may
    not start is never claimed."""
    needs = {task.kind: task.resource for task in app.tasks.values() if task.resource is not None}
    for kind, name in needs.items():
        if name not in app.resources:
            expected = f"one that app.resource(...) declares: {', '.join(app.resources) or 'none yet'}"
            raise InvalidInput(field=f"resource of {kind}", value=name, expected=expected)
    sources = {app.tasks[kind].queue: name for kind, name in needs.items() if not app.tasks[kind].routed}
    for task in app.tasks.values():
        owner = sources.get(task.queue, task.resource)
        if owner != task.resource and not task.routed:
            expected = f"a queue of its own: tasks with resource {owner} are in {task.queue} too"
            raise InvalidInput(field=f"queue of {task.kind}", value=task.queue, expected=expected)
    for pattern in queues:
        covered = next((queue for queue in sources if pattern != queue and checks.matches(pattern, queue)), None)
        if covered is not None:
            expected = f"names instead of a pattern: {covered} is claimed apart, for resource {sources[covered]}"
            raise InvalidInput(field="queues", value=pattern, expected=expected)
    return {"needs": needs, "sources": sources, "resources": {name: app.resources[name] for name in needs.values()}}


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

    def _attempt(self, claim: Claim) -> Attempt | Settle | None:
        task = self._app.tasks.get(claim.job.kind)
        if task is None or task.breaker is None:
            return None if task is None else Attempt(self._app, claim, task)
        return breakers.attempt(self._app, claim, task)

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
        await asyncio.to_thread(breakers.declare, self._app)
        if self._burst:
            # What a schedule has due belongs to the burst; the caretaker may come too late for it.
            await asyncio.to_thread(Scheduler(self._app).due, self._app.clock.now())
        self._app.attend()
        working = asyncio.create_task(self._worker.run())
        self._app.workers.append(self._worker)
        try:
            # With its first step it can be stopped.
            await asyncio.sleep(0)
            self._began = True
            if self._stopped:
                self._worker.stop()
            await working
        finally:
            self._app.workers.remove(self._worker)
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def run(self) -> None:
        """The same in this thread, with an event loop of its own. In the main thread SIGINT and SIGTERM stop it: the first
        lets running jobs finish for the time of grace, the second leaves at once."""

        with _signals(self.stop, self._worker.patience), _event_loop() as loop:
            loop.run_until_complete(self.arun())


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop as that of `asyncio.run`, but one that does not wait for ever for what will not be cancelled."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        try:
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=0.5))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _signals(stop: Callable[[], None], patience: float) -> Iterator[None]:
    """In the main thread: SIGINT and SIGTERM call `stop`; the second one, or `patience` seconds after the first, ends the process.

    The signal itself only writes a byte. A thread of its own reads it, because the event loop may be what is stuck.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: _write(writes, number)) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    listener = threading.Thread(target=_listen, args=(reads, stop, patience), name="towpath-signals", daemon=True)
    listener.start()
    try:
        # The pipe is shared with forked children: their signals must not stop us.
        with forks.undone_in_children(restore):
            yield
    finally:
        restore()
        _write(writes, 0)
        listener.join()
        os.close(reads)
        os.close(writes)


def _write(pipe: int, number: int) -> None:
    os.write(pipe, bytes([number]))


def _listen(pipe: int, stop: Callable[[], None], patience: float) -> None:
    """0 is the end."""
    if (first := os.read(pipe, 1)[0]) == 0:
        return
    heard = time.monotonic()
    name = signal.Signals(first).name
    log.warning("%s: no new jobs are taken; running ones may finish. The same again leaves at once.", name)
    stop()
    while (left := heard + patience - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            continue
        if (number := os.read(pipe, 1)[0]) == 0:
            return
        if time.monotonic() - heard >= ECHO:
            # The ledger is consistent at every instant; what runs now is run again when its lease is over.
            os._exit(128 + number)
    log.critical(
        "the worker did not end within %g s: a handler blocks its event loop. It leaves, its jobs will run again.", patience
    )
    os._exit(128 + first)
