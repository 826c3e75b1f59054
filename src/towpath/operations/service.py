"""The signals of a worker: two to stop it, one to have its settings read again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict

from msgspec.structs import replace

from towpath.core import checks, lanes
from towpath.core.checks import matches
from towpath.core.commands import Settle
from towpath.core.job import Claim
from towpath.core.lanes import Lane
from towpath.core.limits import Bounds
from towpath.core.schedule import Schedule
from towpath.core.views import PartView, QueueView
from towpath.errors import InvalidInput, LedgerClosed, TowpathError
from towpath.escapes import get_logger
from towpath.ledger import Ledger
from towpath.operations import breakers
from towpath.operations.bandwidth import Bandwidth
from towpath.operations.schedules import Host as ScheduleHost
from towpath.operations.schedules import Scheduler, from_settings, remove, write_down
from towpath.operations.workers import AGAIN, Badge, Orders
from towpath.queues.queue import set_limits
from towpath.runtime.engine import Parts
from towpath.runtime.worker import executors
from towpath.runtime.worker.options import Office, WorkerOptions
from towpath.runtime.worker.worker import Worker
from towpath.settings import BANDWIDTH, Settings, merged, resolve
from towpath.tasks.attempt import Attempt, serve

log = get_logger("towpath.worker")

ECHO = 0.5
"""Seconds in which a second signal is the same one again: a service manager tells all processes, and a parent
its children."""


@contextlib.contextmanager
def signals(
    stop: Callable[[], None], reload: Callable[[], None], patience: Callable[[], float]
) -> Iterator[None]:
    """In the main thread: SIGINT and SIGTERM call `stop`; the second one, or `patience()` seconds after the
    first, ends the process. SIGHUP calls `reload` in a thread of its own, unless it says that the terminal
    was closed: then it is a SIGTERM.

    The signal itself only writes a byte. A thread of its own reads it, because the event loop may be what is
    stuck. The interpreter writes it at once; so does our handler, but that is only called when the main
    thread comes to it, which may be never if it was just about to wait for something. It is there because
    others may take the interpreter's byte for themselves: asyncio does, for handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ears = _Ears(reads, stop, reload, patience)
    before = {
        number: signal.signal(number, lambda number, _: _write(writes, number | _LATE)) for number in numbers
    }
    woken = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def restore() -> None:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    listener = threading.Thread(target=ears.listen, name="towpath-signals", daemon=True)
    listener.start()
    try:
        # The pipe is shared with forked children: their signals must not stop us.
        with executors.undo_in_children(restore):
            yield
    finally:
        restore()
        _write(writes, 0)
        listener.join()
        os.close(reads)
        os.close(writes)


_LATE = 128
"""What the handler adds to the number of its signal."""


def _write(pipe: int, number: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(pipe, bytes([number]))


class _Ears:
    def __init__(
        self, pipe: int, stop: Callable[[], None], reload: Callable[[], None], patience: Callable[[], float]
    ) -> None:
        self._pipe, self._stop, self._reload, self._patience = pipe, stop, reload, patience
        self._terminal = os.isatty(0)
        self._early: Counter[int] = Counter()
        self._late: Counter[int] = Counter()

    def listen(self) -> None:
        """0 is the end."""
        while (first := self._next()) in (None, signal.SIGHUP):
            # Not here: a ledger that is stuck must not keep us from hearing a stop.
            if first is not None:
                threading.Thread(target=self._reload, name="towpath-reload", daemon=True).start()
        if not first:
            return
        heard = time.monotonic()
        name = signal.Signals(first).name
        log.warning(
            "%s: no new jobs are taken; running ones may finish. The same again leaves at once.", name
        )
        self._stop()
        while (left := heard + self._patience() - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], left)[0]:
                continue
            if (number := self._next()) == 0:
                return
            if number is not None and number != signal.SIGHUP and time.monotonic() - heard >= ECHO:
                # The ledger is consistent at every instant; what runs now is run again when its lease is
                # over.
                os._exit(128 + number)
        log.critical(
            "the worker did not end within %g s: a handler blocks its event loop. It leaves, its jobs will run again.",
            self._patience(),
        )
        os._exit(128 + first)

    def _next(self) -> int | None:
        """Which signal, 0 for the end. None if it is not one of ours, or one that we know of already."""
        byte = os.read(self._pipe, 1)[0]
        number = byte & ~_LATE
        if number == 0:
            return 0
        known = max(self._early[number], self._late[number])
        heard = self._late if byte & _LATE else self._early
        heard[number] += 1
        if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) or heard[number] <= known:
            return None
        closed = number == signal.SIGHUP and self._terminal and not os.isatty(0)
        return signal.SIGTERM if closed else number


def at_rest(ledger: Ledger, queues: str, now: int, held: str = "") -> bool:
    """After a claim that came back empty: is there nothing to wait for in these queues? What runs, here or
    elsewhere, may spawn more or be taken back from the dead, and what only waits for a rate comes soon; jobs
    for later, blocked ones and those that somebody holds back (also those in the queues `held`) do not
    count."""
    views = [view for view in ledger.queues().values() if matches(queues, view.name)]
    return not any(
        view.counts.running or (view.counts.ready and _comes(ledger, view, now, held)) for view in views
    )


def _comes(ledger: Ledger, view: QueueView, now: int, held: str) -> bool:
    if _held(view, now) or (held and matches(held, view.name)):
        return False
    waiting = sum(part.ready for part in ledger.parts(view.name).values() if _held(part, now))
    return view.counts.ready > waiting


def _held(view: QueueView | PartView, now: int) -> bool:
    """By hand: a time that is further ahead than any start can put it was set by somebody (see
    `core.limits.spend`)."""
    soon = now if view.rate is None else now + view.rate.interval
    return view.paused or view.cap == 0 or view.next_at > soon


RELOADED = ("queues", "concurrency", "lease", "grace", "lanes")
"""The settings of a worker that a reload may change."""


class RunOptions(TypedDict, total=False):
    """What `app.run(...)` takes. None, or nothing, means what the settings say. `lease` and `grace` are
    seconds. `burst`: end by itself once nothing in its queues is running or could run now. With `lanes` (by
    name, the first is preferred), these have the queues."""

    queues: tuple[str, ...] | None
    lanes: Mapping[str, Lane] | None
    concurrency: int | None
    lease: float | None
    grace: float | None
    burst: bool


class Staff(Office, breakers.Staff, ScheduleHost, Protocol):
    """What running an app needs of it."""

    settings: Settings
    bandwidth: Bandwidth
    resources: dict[str, Bounds]
    declared: dict[str, Schedule]
    local_workers: list[Worker]

    @property
    def parts(self) -> Parts: ...

    def attend(self) -> None: ...


def worker_options(app: Staff, given: Mapping[str, Any], settings: Settings | None = None) -> WorkerOptions:
    """The options given, else the settings; without lanes and queues, the queues that the tasks name."""
    chosen = {name: getattr(settings or app.settings, name) for name in RELOADED}
    told = {name: value for name, value in given.items() if value is not None and name != "burst"}
    if told.get("queues") and "lanes" not in told:
        # Whoever names the queues of a worker wants no lanes of the settings.
        chosen["lanes"] = {}
    chosen |= told
    if chosen["lanes"]:
        if told.get("queues"):
            raise InvalidInput(
                field="queues", value=told["queues"], expected="nothing: the lanes have the queues"
            )
        lanes.check(chosen["lanes"])
        queues = tuple(queue for lane in chosen["lanes"].values() for queue in lane.queues)
    else:
        queues = (
            tuple(chosen["queues"]) or tuple(sorted({task.queue for task in app.tasks.values()})) or ("*",)
        )
    return WorkerOptions(**{**chosen, "queues": queues, **resource_options(app, queues)})


def resource_options(app: Staff, queues: Sequence[str]) -> dict[str, Any]:
    """What the worker must know of the resources that the tasks use. A queue with such a task has only these,
    so that what may not start is never claimed."""
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
        covered = next(
            (queue for queue in sources if pattern != queue and checks.matches(pattern, queue)), None
        )
        if covered is not None:
            expected = (
                f"names instead of a pattern: {covered} is claimed apart, for resource {sources[covered]}"
            )
            raise InvalidInput(field="queues", value=pattern, expected=expected)
    return {
        "needs": needs,
        "sources": sources,
        "resources": {name: app.resources[name] for name in needs.values()},
    }


class Service:
    """One worker of an app. `arun` ends after `stop()`, which any thread and a signal may call, or when its
    burst is over.

    It is a looker as well: after every commit it reads whether it is paused or told to end."""

    def __init__(self, app: Staff, options: RunOptions) -> None:
        self._app = app
        self._given = options
        self._burst = options.get("burst", False)
        self._chosen = worker_options(app, options)
        self._worker = Worker(
            app, self._attempt, self._chosen, serve, self._look_around if self._burst else None
        )
        self._began = False
        self._stopped = False
        self._orders = Orders()
        self._paused = False
        self._paused_lanes: frozenset[str] = frozenset()
        self._reloading = threading.Lock()
        self.stale = True

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
        """In the committing thread, after a claim that brought nothing: is the burst over? If not, another
        claim will ask."""
        if self._stopped:
            return
        lanes, paused = self._chosen.lanes, self._orders.lanes
        held = ",".join(queue for name, lane in lanes.items() if name in paused for queue in lane.queues)
        try:
            over = at_rest(self._app.ledger, ",".join(self._chosen.queues), self._app.clock.now(), held)
        except LedgerClosed:
            # The worker was stopped and its app closed while this batch was under way.
            return
        except TowpathError as error:
            log.warning("whether the burst is over cannot be seen now: %s", error)
            return
        if over and self._app.bus.pending:
            # A listener may enqueue. The kick causes another claim.
            self._app.bus.then(self._app.committer.kick)
        elif over and not self._stopped:
            log.info(
                "nothing is running or could run now in %s: the burst is over", ",".join(self._chosen.queues)
            )
            # The loop may have been closed without a word to us.
            with contextlib.suppress(RuntimeError):
                self.stop()

    def refresh(self) -> None:
        """In the caretaker's thread."""
        orders = self._badge.orders()
        if orders != self._orders:
            self._orders = orders
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._obey, orders)

    def _obey(self, orders: Orders) -> None:
        paused = orders.paused_by is not None
        if paused:
            log.warning(
                "paused (%s): %s. What runs goes on; nothing new starts.",
                orders.paused_by,
                orders.why or "no reason given",
            )
        elif self._paused:
            log.warning("the pause is over")
        self._paused = paused
        self._worker.pause(paused)
        self._obey_lanes(orders.lanes)
        if orders.drain:
            log.warning("told to end: no new jobs are taken; running ones may finish")
            self.stop()
        self._report(draining=orders.drain)

    def _obey_lanes(self, lanes: Mapping[str, str | None]) -> None:
        paused = self._mine(lanes)
        for name in sorted(paused - self._paused_lanes):
            log.info(
                "lane %s is paused: %s. What runs goes on; its slots are lent.",
                name,
                lanes[name] or "no reason given",
            )
        for name in sorted(self._paused_lanes - paused):
            log.info("lane %s goes on", name)
        self._paused_lanes = paused
        self._worker.pause_lanes(lanes.keys())

    def _mine(self, lanes: Mapping[str, str | None]) -> frozenset[str]:
        return frozenset(lanes.keys() & self._chosen.lanes.keys())

    def _report(self, draining: bool = False) -> None:
        with contextlib.suppress(TowpathError):
            self._badge.report(
                queues=self._chosen.queues,
                concurrency=self._chosen.concurrency,
                running=len(self._worker.running),
                draining=draining or self._stopped,
                lanes=self._worker.intake.lanes,
                limits=self._worker.intake.limits,
            )

    async def _keep_reporting(self) -> None:
        while True:
            self._report()
            held = self._held_limits()
            for _ in range(AGAIN):
                await asyncio.sleep(1)
                if self._held_limits() != held:
                    break

    def _held_limits(self) -> list[str]:
        """Those for which nothing starts now, because a service said so: whoever asks should know it soon."""
        return [limit.name for limit in self._worker.intake.limits if limit.until is not None]

    def _write_down(self) -> None:
        """What the code declares and what the settings say, before the first job is taken."""
        write_down(
            self._app, {**self._app.declared, **from_settings(self._app.tasks, self._app.settings.schedules)}
        )
        for limits in self._app.settings.limits.values():
            set_limits(self._app, limits.setting, limits.warn_depth)
        self._badge.enter()
        self._orders = self._badge.orders()

    async def arun(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._badge = Badge(self._app, self._app.owner)
        await asyncio.to_thread(self._write_down)
        await asyncio.to_thread(breakers.declare, self._app)
        if self._burst:
            # What a schedule has due belongs to the burst; the caretaker may come too late for it.
            await asyncio.to_thread(
                Scheduler(self._app).fire_all, self._app.clock.now(), lambda: self._stopped
            )
        self._obey(self._orders)
        lookout = self._app.parts.lookout
        lookout.add(self)
        self._app.attend()
        working = asyncio.create_task(self._worker.run())
        self._app.local_workers.append(self._worker)
        reporting = asyncio.create_task(self._keep_reporting())
        try:
            # With its first step it can be stopped.
            await asyncio.sleep(0)
            self._began = True
            if self._stopped:
                self._worker.stop()
            await working
        finally:
            self._app.local_workers.remove(self._worker)
            lookout.remove(self)
            reporting.cancel()
            with contextlib.suppress(TowpathError):
                self._badge.leave()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
        if self._app.bus.pending:
            await asyncio.to_thread(self._app.bus.flush)

    def reload(self) -> None:
        """From any thread: read the settings again and work by them, without dropping anything. If they are
        wrong, the last good ones stay, and the log says why."""
        with self._reloading:
            try:
                found = resolve(None)
                chosen = worker_options(self._app, self._given, found)
                declared = from_settings(self._app.tasks, found.schedules)
                self._apply(found, declared)
            except TowpathError as error:
                log.error("the settings were not reloaded, the last good ones stay: %s", error)
                return
            self._chosen = chosen
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._change, chosen)

    def _apply(self, found: Settings, declared: Mapping[str, Schedule]) -> None:
        """What concerns the fleet. A limit or a schedule that the settings had and have no more is lifted."""
        before = self._app.settings
        for queue in sorted(before.limits.keys() | found.limits.keys()):
            limits = merged(queue, before.limits.get(queue), found.limits.get(queue))
            set_limits(self._app, limits.setting, limits.warn_depth)
        write_down(self._app, declared)
        for name in before.schedules.keys() - found.schedules.keys() - self._app.declared.keys():
            with contextlib.suppress(InvalidInput):
                remove(self._app, name)
        self._app.bandwidth.set(**{**BANDWIDTH, **found.bandwidth})
        kept = {name: getattr(found, name) for name in (*RELOADED, "limits", "schedules", "bandwidth")}
        self._app.settings = replace(
            before, **kept, origins={**before.origins, **{name: found.origins[name] for name in kept}}
        )

    def _change(self, chosen: WorkerOptions) -> None:
        self._worker.change(chosen)
        self._obey_lanes(self._orders.lanes)
        log.warning(
            "settings reloaded: queues %s, concurrency %d", ",".join(chosen.queues), chosen.concurrency
        )
        self._report()

    def run(self) -> None:
        """The same in this thread, with an event loop of its own. In the main thread SIGINT and SIGTERM stop
        it: the first lets running jobs finish for the time of grace, the second leaves at once. SIGHUP calls
        `reload`."""
        with signals(self.stop, self.reload, lambda: self._worker.patience), _event_loop() as loop:
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
