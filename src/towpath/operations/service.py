"""A worker of an app as a service: its options, what it declares at its start, reload and stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from msgspec import UNSET
from msgspec.structs import replace

from towpath.clock import Clock
from towpath.core import checks, lanes
from towpath.core.checks import matches
from towpath.core.commands import SetQueue, Settle
from towpath.core.job import ClaimedJob
from towpath.core.lanes import FLOWS, NODES, Lane
from towpath.core.limits import interval_of
from towpath.core.schedule import Schedule
from towpath.core.views import PartView, QueueView
from towpath.errors import InvalidInput, LedgerClosed, TowpathError
from towpath.escapes import get_logger
from towpath.ledger import Ledger, queues_matching
from towpath.operations import breakers
from towpath.operations.bandwidth import Bandwidth
from towpath.operations.schedules import Scheduler, from_settings, remove, store_schedules
from towpath.operations.startup import (
    Startup,
    UnknownKinds,
    import_included,
    log_startup,
    warn_at_start,
)
from towpath.operations.workers import AGAIN, Instructions, Registration
from towpath.queues.queue import set_limits
from towpath.runtime.worker.options import WorkerOptions
from towpath.runtime.worker.signals import signals
from towpath.runtime.worker.worker import Worker
from towpath.settings import BANDWIDTH, Settings, merged, resolve
from towpath.tasks.active_hooks import CLOSE_SECONDS, ActiveHooks
from towpath.tasks.attempt import Attempt, serve
from towpath.tasks.task import Registry

log = get_logger("towpath.worker")


def is_idle(ledger: Ledger, queues: str, now: int, held: str = "") -> bool:
    """True if a burst worker has nothing to wait for in these queues, after an empty claim. Running jobs,
    here or elsewhere, may spawn jobs or be retried, and jobs held by a rate limit start soon; scheduled jobs,
    blocked jobs and jobs held back by hand (also all jobs of the queues `held`) do not count."""
    return not any(
        view.counts.running or (view.counts.ready and _comes(ledger, view, now, held))
        for view in queues_matching(ledger, queues)
    )


def _comes(ledger: Ledger, view: QueueView, now: int, held: str) -> bool:
    if _held(view, now) or (held and matches(held, view.name)):
        return False
    waiting = sum(part.ready for part in ledger.parts(view.name).values() if _held(part, now))
    return view.counts.ready > waiting


def _held(view: QueueView | PartView, now: int) -> bool:
    """True if the gate is shut by hand: no start sets `next_at` that far ahead (see `core.limits.spend`)."""
    soon = now if view.rate is None else now + interval_of(view.rate)
    return view.paused or view.cap == 0 or view.next_at > soon


RELOADED = ("queues", "concurrency", "lease", "grace", "lanes")
"""The settings of a worker that a reload may change."""


_OF_SERVICE = ("burst", "announce", "deploy_window", "process_setup")
"""Options that are not options of the worker."""


class RunOptions(TypedDict, total=False):
    """The options of `app.run(...)`. None, or an omitted option, means the setting. `lease` and `grace` are
    seconds. `burst`: end when no job of its queues is running or could run now. `lanes` (by name, the
    preferred one first) replace `queues`. `deploy_window`: seconds for which a job with unfit arguments
    waits for a worker with other code. `announce` is called with a `Startup` when the worker has started;
    without it one line is logged. `process_setup` (a function at the top level of a module) is called in
    each process for tasks with `process=True`, after the import of the first task."""

    queues: tuple[str, ...] | None
    lanes: Mapping[str, Lane] | None
    concurrency: int | None
    lease: float | None
    grace: float | None
    deploy_window: float | None
    burst: bool
    announce: Callable[[Startup], None] | None
    process_setup: Callable[[], object] | None


class ActiveSettings:
    """The settings in use and the bandwidth limits made of them. A reload replaces them."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.bandwidth = Bandwidth(clock=clock, **settings.bandwidth)


def worker_options(registry: Registry, settings: Settings, given: Mapping[str, Any]) -> WorkerOptions:
    """The given options, else the settings; without lanes and queues, the queues that the tasks name."""
    chosen = {name: getattr(settings, name) for name in RELOADED}
    for name in given.keys() - RunOptions.__annotations__.keys():
        hint = "use concurrency" if name in ("workers", "threads", "processes") else ""
        raise checks.unknown("option", name, RunOptions.__annotations__, "app.run", hint)
    explicit = {name: value for name, value in given.items() if value is not None and name not in _OF_SERVICE}
    if isinstance(explicit.get("queues"), str):
        expected = "a list of queue names or patterns"
        raise InvalidInput(field="queues", value=explicit["queues"], expected=expected)
    if explicit.get("queues") and "lanes" not in explicit:
        # Queues named by the caller replace the lanes of the settings.
        chosen["lanes"] = {}
    chosen |= explicit
    if chosen["lanes"]:
        if explicit.get("queues"):
            message = "a worker takes queues or lanes, not both: the lanes name the queues"
            raise InvalidInput(
                field="queues", value=explicit["queues"], expected="left out beside lanes", message=message
            )
        lanes.check(chosen["lanes"])
        queues = tuple(queue for lane in chosen["lanes"].values() for queue in lane.queues)
    else:
        queues = (
            tuple(chosen["queues"])
            or tuple(sorted({task.queue for task in registry.tasks.values()}))
            or ("*",)
        )
    if not chosen["lanes"] and any(queue.startswith(NODES) for queue in queues):
        # An agent of plans claims their coordinators at once, at the price of the fast path of one queue.
        queues = tuple(dict.fromkeys((*queues, FLOWS)))
    beside = "" if any(matches(queue, FLOWS) for queue in queues) else FLOWS
    return WorkerOptions(
        **{**chosen, "queues": queues, "beside": beside, **resource_options(registry, queues)}
    )


def resource_options(registry: Registry, queues: Sequence[str]) -> dict[str, Any]:
    """The options for the resources of the tasks. A queue with such a task has no other tasks, so that a job
    that may not start is never claimed."""
    needs = {task.kind: task.resource for task in registry.tasks.values() if task.resource is not None}
    for kind, name in needs.items():
        if name not in registry.resources:
            expected = f"one that app.resource(...) declares: {', '.join(registry.resources) or 'none yet'}"
            raise InvalidInput(field=f"resource of {kind}", value=name, expected=expected)
    sources = {
        registry.tasks[kind].queue: name for kind, name in needs.items() if not registry.tasks[kind].routed
    }
    for task in registry.tasks.values():
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
        "resources": {name: registry.resources[name] for name in needs.values()},
    }


class Service:
    """One worker of an app. `arun` ends after `stop()`, which is safe from any thread and signal handler, or
    when its burst is over.

    After every commit it reads whether it is paused or asked to end."""

    def __init__(self, registry: Registry, configuration: ActiveSettings, options: RunOptions) -> None:
        self._registry = registry
        self._engine = registry.engine
        self._configuration = configuration
        self._given = options
        self._burst = options.get("burst", False)
        self._burst_over = False
        self._announce = options.get("announce") or log_startup
        import_included(configuration.settings.include)
        self._unknown = UnknownKinds(registry)
        self._set_deploy_window(configuration.settings)
        self._chosen = worker_options(registry, configuration.settings, options)
        self._hooks = ActiveHooks.of(registry)
        self._tasks = self._hooks or registry.tasks
        self._worker = Worker(
            self._engine,
            self._attempt,
            self._chosen,
            partial(serve, setup=options.get("process_setup")),
            self._check_burst if self._burst else None,
            None if self._hooks is None else self._hooks.failures.report,
        )
        if not self._burst:  # which waits for no job that no task here can run
            self._worker.leave(self._unknown.kinds)
        self._began = False
        self._stopped = False
        self._instructions = Instructions()
        self._paused = False
        self._paused_lanes: frozenset[str] = frozenset()
        self._reloading = threading.Lock()
        self.stale = True

    def _set_deploy_window(self, settings: Settings) -> None:
        given = self._given.get("deploy_window")
        window = settings.deploy_window if given is None else given
        self._registry.deploy_window = checks.micros(window, "deploy_window")

    def _attempt(self, claim: ClaimedJob) -> Attempt | Settle | None:
        task = self._tasks.get(claim.job.kind)
        if task is None:
            attempt: Attempt | None = self._registry.built_in(claim, self._tasks)
            return self._unknown.refuse(claim) if attempt is None else attempt
        if task.breaker is None:
            return Attempt(self._registry, claim, task)
        return breakers.attempt(self._registry, claim, task)

    def stop(self) -> None:
        """Claim no more jobs and let running jobs finish. Before its start: end directly after the start."""
        self._stopped = True
        if self._began:
            self._worker.stop()

    def _check_burst(self) -> None:
        """In the committing thread, after an empty claim: end the worker if the burst is over. If not, the
        next empty claim checks again."""
        if self._stopped:
            return
        lanes, paused = self._chosen.lanes, self._instructions.lanes
        held = ",".join(queue for name, lane in lanes.items() if name in paused for queue in lane.queues)
        try:
            queues = ",".join((*self._chosen.queues, FLOWS))
            over = is_idle(self._engine.ledger, queues, self._engine.clock.now(), held)
        except LedgerClosed:
            # The worker was stopped and its app closed while this batch was applied.
            return
        except TowpathError as error:
            log.warning("cannot check whether the burst is over: %s", error)
            return
        if over and self._engine.bus.pending:
            # A listener may enqueue. The kick causes another claim.
            self._engine.bus.then(self._engine.committer.kick)
        elif over and self._hooks is not None and (self._hooks.failures.pending or self._worker.held.ended):
            # A hook of a failure may enqueue too. The replies to the settles of this batch come after it.
            self._hooks.failures.then(self._engine.committer.kick)
        elif over and not self._stopped:
            self._burst_over = True
            # The loop may be closed already.
            with contextlib.suppress(RuntimeError):
                self.stop()

    def refresh(self) -> None:
        """Read the instructions. Runs in the caretaker's thread."""
        instructions = self._registration.instructions()
        if instructions != self._instructions:
            self._instructions = instructions
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._follow, instructions)

    def _follow(self, instructions: Instructions) -> None:
        paused = instructions.paused_by is not None
        if paused:
            log.warning(
                "worker paused (%s): %s. Running jobs continue; no new jobs start.",
                instructions.paused_by,
                instructions.why or "no reason given",
            )
        elif self._paused:
            log.warning("worker resumed")
        self._paused = paused
        self._worker.pause(paused)
        self._follow_lanes(instructions.lanes)
        if instructions.drain:
            log.warning("worker drained on request: no new jobs are claimed; running jobs may finish")
            self.stop()
        self._report(draining=instructions.drain)

    def _follow_lanes(self, lanes: Mapping[str, str | None]) -> None:
        paused = self._mine(lanes)
        for name in sorted(paused - self._paused_lanes):
            log.info(
                "lane %s is paused: %s. Running jobs continue; its slots are lent to other lanes.",
                name,
                lanes[name] or "no reason given",
            )
        for name in sorted(self._paused_lanes - paused):
            log.info("lane %s resumed", name)
        self._paused_lanes = paused
        self._worker.pause_lanes(lanes.keys())

    def _mine(self, lanes: Mapping[str, str | None]) -> frozenset[str]:
        return frozenset(lanes.keys() & self._chosen.lanes.keys())

    def _report(self, draining: bool = False) -> None:
        with contextlib.suppress(TowpathError):
            self._registration.report(
                queues=self._chosen.queues,
                concurrency=self._chosen.concurrency,
                running=len(self._worker.running),
                draining=draining or self._stopped,
                lanes=self._worker.buffer.lanes,
                limits=self._worker.buffer.limits,
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
        """The limits that a service has set to zero for a time: a change is reported at once."""
        return [limit.name for limit in self._worker.buffer.limits if limit.until is not None]

    def _store_declarations(self) -> None:
        """Store the declared schedules, limits and breakers before the first claim. The registration is last:
        a registered worker continues through an outage of the ledger."""
        store_schedules(
            self._engine,
            {
                **self._registry.schedules,
                **from_settings(self._registry.tasks, self._configuration.settings.schedules),
            },
        )
        self._store_nodes(self._configuration.settings)
        for limits in self._configuration.settings.limits.values():
            set_limits(self._engine, limits.setting, limits.warn_depth)
        breakers.declare(self._registry)
        self._registration.register()
        self._instructions = self._registration.instructions()

    def _store_nodes(self, settings: Settings) -> None:
        """Store the concurrency of the nodes of plans as the caps of their queues."""
        for node in settings.nodes.values():
            set_limits(self._engine, SetQueue(queue=node.queue, cap=node.concurrency), UNSET)

    async def arun(self) -> None:
        if self._hooks is None:
            await self._work()
            return
        await self._hooks.open()
        try:
            await self._work()
        finally:
            await self._hooks.close()

    @property
    def _stop_seconds(self) -> float:
        """Seconds after `stop()` by which `arun` has returned, unless a handler blocks the event loop."""
        return self._worker.stop_seconds + (0 if self._hooks is None else CLOSE_SECONDS)

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        warn_at_start(self._registry, self._chosen.queues)
        self._registration = Registration(self._engine, self._engine.owner)
        await asyncio.to_thread(self._store_declarations)
        if self._burst:
            # Due schedules belong to the burst; the caretaker may fire them too late for it.
            await asyncio.to_thread(
                Scheduler(self._engine).fire_all, self._engine.clock.now(), lambda: self._stopped
            )
        self._follow(self._instructions)
        refresher = self._engine.components.refresher
        refresher.add(self)
        self._engine.start_caretaker()
        working = asyncio.create_task(self._worker.run())
        self._engine.local_workers.append(self._worker)
        reporting = asyncio.create_task(self._keep_reporting())
        try:
            # After its first step the worker can be stopped.
            await asyncio.sleep(0)
            self._began = True
            self._announce(Startup.of(self._registry, self._chosen, self._configuration.settings.schedules))
            if self._stopped:
                self._worker.stop()
            await working
        finally:
            self._engine.local_workers.remove(self._worker)
            refresher.remove(self)
            reporting.cancel()
            with contextlib.suppress(TowpathError):
                self._registration.unregister()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
        if self._burst_over:  # after the lines of the last jobs
            log.info(
                "the burst is over: no job of %s is running or could run now", ",".join(self._chosen.queues)
            )
        if self._engine.bus.pending:
            await asyncio.to_thread(self._engine.bus.flush)

    def reload(self) -> None:
        """Read the settings again and apply them, without interrupting jobs. Invalid settings are logged, and
        the last valid ones stay. Safe from any thread."""
        with self._reloading:
            try:
                found = resolve(None)
                chosen = worker_options(self._registry, found, self._given)
                declared = from_settings(self._registry.tasks, found.schedules)
                self._apply(found, declared)
            except TowpathError as error:
                log.error("settings not reloaded, the last valid ones stay in use: %s", error)
                return
            self._chosen = chosen
            self._set_deploy_window(found)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._change, chosen)

    def _apply(self, found: Settings, declared: Mapping[str, Schedule]) -> None:
        """Store the settings of the fleet. A limit or a schedule that the settings no longer have is
        lifted."""
        before = self._configuration.settings
        self._store_nodes(found)
        for queue in sorted(before.limits.keys() | found.limits.keys()):
            limits = merged(queue, before.limits.get(queue), found.limits.get(queue))
            set_limits(self._engine, limits.setting, limits.warn_depth)
        store_schedules(self._engine, declared)
        for name in before.schedules.keys() - found.schedules.keys() - self._registry.schedules.keys():
            with contextlib.suppress(InvalidInput):
                remove(self._engine, name)
        self._configuration.bandwidth.set(**{**BANDWIDTH, **found.bandwidth})
        kept = {
            name: getattr(found, name)
            for name in (*RELOADED, "deploy_window", "limits", "schedules", "bandwidth", "nodes")
        }
        self._configuration.settings = replace(
            before, **kept, origins={**before.origins, **{name: found.origins[name] for name in kept}}
        )

    def _change(self, chosen: WorkerOptions) -> None:
        self._worker.change(chosen)
        self._follow_lanes(self._instructions.lanes)
        log.warning(
            "settings reloaded: queues %s, concurrency %d", ",".join(chosen.queues), chosen.concurrency
        )
        self._report()

    def run(self) -> None:
        """Run in this thread, with an event loop of its own. In the main thread SIGINT and SIGTERM stop the
        worker: the first lets running jobs finish for the grace period, the second ends the process at once.
        SIGHUP calls `reload`."""
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("app.run() would block the event loop that runs here: use `await app.arun()`")
        with signals(self.stop, self.reload, lambda: self._stop_seconds), _event_loop() as loop:
            loop.run_until_complete(self.arun())


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop like that of `asyncio.run`, with a bounded wait for tasks that ignore their
    cancellation."""
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
