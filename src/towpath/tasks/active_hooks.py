"""The hooks of an app at work in one process: lifespans are open, tasks have functions that call them.

A task without middleware and without provided parameters keeps its own function, so that its attempts cost
what they cost without hooks."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial, update_wrapper
from typing import Any, Literal, TypeVar

from towpath.core.commands import Settle, Settled
from towpath.core.job import FailOutcome, Job, RetryOutcome, State
from towpath.core.views import MAX_PAGE
from towpath.errors import HookFailed, InvalidInput
from towpath.escapes import get_logger
from towpath.events import JobsLost
from towpath.events.delivery import Delivery
from towpath.runtime.worker.executors import ThreadPool
from towpath.tasks.context import current
from towpath.tasks.handles import JobHandle
from towpath.tasks.hooks import Hook, HookPlan, Hooks, JobFailure, Provider, pick
from towpath.tasks.task import Registry, Task

log = get_logger("towpath.worker")

T = TypeVar("T")
Place = Literal["worker", "sync", "async"]
"""Where handlers are called: as a worker does; all outside of the event loop of the hooks; all on it."""
CLOSE_SECONDS = 10.0
"""Seconds that all lifespans together get to stop."""
Handler = Callable[[Mapping[Any, Any]], Any]
"""Called with all values, by type; returns the result, or its coroutine."""
Ended = tuple[Any, BaseException | None]
Middle = tuple[contextvars.Context, Mapping[Any, Any], asyncio.Future[Ended]]


# One attempt


class HookedHandler:
    """A handler inside its middleware. `values` are the values of the process, by type."""

    def __init__(
        self,
        task: Task[..., Any],
        layers: list[Provider],
        needs: Mapping[str, Any],
        values: Mapping[Any, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._function, self._is_async = task.function, task.is_async
        self._layers, self._needs, self._values = layers, needs, values
        self._loop = loop
        self._any_async = any(layer.hook.is_async for layer in layers)

    async def on_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The call, all of it on the event loop."""

        async def handler(values: Mapping[Any, Any]) -> Any:
            result = self._function(*args, **kwargs, **pick(self._needs, values))
            return await result if self._is_async else result

        return await self._asurround(0, self._values, handler)

    def off_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The call in this thread. Async parts run on the event loop meanwhile."""
        if self._is_async:
            return asyncio.run_coroutine_threadsafe(self.on_loop(*args, **kwargs), self._loop).result()

        def handler(values: Mapping[Any, Any]) -> Any:
            return self._function(*args, **kwargs, **pick(self._needs, values))

        return self._bridge(handler) if self._any_async else self._surround(0, self._values, handler)

    def _surround(self, at: int, values: Mapping[Any, Any], handler: Handler) -> Any:
        if at == len(self._layers):
            return handler(values)
        layer = self._layers[at]
        generator = layer.call(values, current())
        value = _first(generator, layer.hook)
        try:
            result = self._surround(at + 1, _with(values, layer, value), handler)
        except BaseException as error:
            return _throw(generator, error, layer.hook)
        _last(generator, result, layer.hook)
        return result

    async def _asurround(self, at: int, values: Mapping[Any, Any], handler: Handler) -> Any:
        if at == len(self._layers):
            return await handler(values)
        layer = self._layers[at]
        generator, hook = layer.call(values, current()), layer.hook
        value = await _afirst(generator, hook) if hook.is_async else _first(generator, hook)
        try:
            result = await self._asurround(at + 1, _with(values, layer, value), handler)
        except BaseException as error:
            if hook.is_async:
                return await _athrow(generator, error, hook)
            return _throw(generator, error, hook)
        if hook.is_async:
            await _alast(generator, result, hook)
        else:
            _last(generator, result, hook)
        return result

    def _bridge(self, handler: Handler) -> Any:
        """Middleware on the loop, the handler in this thread: one coroutine enters and leaves all layers, and
        waits in the middle for the handler."""
        reached: Future[Middle | None] = Future()

        async def middle(values: Mapping[Any, Any]) -> Any:
            ended: asyncio.Future[Ended] = self._loop.create_future()
            reached.set_result((contextvars.copy_context(), values, ended))
            result, error = await ended
            if error is not None:
                raise error
            return result

        surrounded = asyncio.run_coroutine_threadsafe(self._asurround(0, self._values, middle), self._loop)
        surrounded.add_done_callback(lambda _: None if reached.done() else reached.set_result(None))
        found = reached.result()
        if found is not None:
            context, values, ended = found
            result, failure = None, None
            try:
                result = context.run(handler, values)
            except BaseException as error:
                failure = error
            self._loop.call_soon_threadsafe(
                lambda: None if ended.done() else ended.set_result((result, failure))
            )
        return surrounded.result()


def _with(values: Mapping[Any, Any], layer: Provider, value: Any) -> Mapping[Any, Any]:
    return values if layer.provides is None else {**values, layer.provides: value}


def _first(generator: Any, hook: Hook) -> Any:
    try:
        return next(generator)
    except StopIteration:
        raise _no_yield(hook) from None


def _last(generator: Any, result: Any, hook: Hook) -> None:
    try:
        generator.send(result)
    except StopIteration:
        return
    generator.close()
    raise _second_yield(hook)


def _throw(generator: Any, error: BaseException, hook: Hook) -> None:
    """Raise the error at the `yield`. Returns if the generator handles it and ends."""
    try:
        generator.throw(error)
    except StopIteration:
        return
    generator.close()
    raise _second_yield(hook)


async def _afirst(generator: Any, hook: Hook) -> Any:
    try:
        return await anext(generator)
    except StopAsyncIteration:
        raise _no_yield(hook) from None


async def _alast(generator: Any, result: Any, hook: Hook) -> None:
    try:
        await generator.asend(result)
    except StopAsyncIteration:
        return
    await generator.aclose()
    raise _second_yield(hook)


async def _athrow(generator: Any, error: BaseException, hook: Hook) -> None:
    try:
        await generator.athrow(error)
    except StopAsyncIteration:
        return
    await generator.aclose()
    raise _second_yield(hook)


def _no_yield(hook: Hook) -> RuntimeError:
    return RuntimeError(f"{hook.what} returned before its `yield`")


def _second_yield(hook: Hook) -> RuntimeError:
    return RuntimeError(f"{hook.what} has more than one `yield`")


# Failures


class FailureHooks:
    """Calls `on_failure` and `on_dead`: the task's hooks first, then the app's hooks, in a thread of their
    own. A hook that raises is logged. Raises InvalidInput if a hook needs a type that has no provider."""

    def __init__(self, registry: Registry, plan: HookPlan, values: Mapping[Any, Any]) -> None:
        self._registry, self._plan, self._values = registry, plan, values
        self._providers: dict[Hook, Provider] = {}
        self._delivery = Delivery("failure hooks")
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where async hooks run."""
        self._unsubscribe: Callable[[], None] | None = None
        places: list[Hooks | Task[..., Any]] = [registry.hooks, *registry.tasks.values()]
        for place in places:
            for hook in (*place.failure_hooks, *place.dead_hooks):
                self._provider(hook)

    @property
    def pending(self) -> bool:
        """Is a hook queued, or being called?"""
        return self._delivery.pending

    def then(self, call: Callable[[], object]) -> None:
        """Call the function after the hooks of the failures so far."""
        self._delivery.put(call, always=True)

    def watch_losses(self) -> None:
        """From now on, also call `on_dead` for jobs that this process takes back and that become dead letters
        by that."""
        self._unsubscribe = self._registry.engine.bus.subscribe(JobsLost, self._lost)

    def _lost(self, event: JobsLost) -> None:
        """In the delivery thread of the bus. The first worker of a process handles an event for all of
        them."""
        registry = self._registry
        if registry.hooks.last_lost is event:
            return
        registry.hooks.last_lost = event
        for start in range(0, len(event.ids), MAX_PAGE):
            for job in registry.engine.ledger.get_many(event.ids[start : start + MAX_PAGE]).values():
                hooks = self._hooks(job.kind, False, True) if job.kind in registry.tasks else []
                text = f"its lease was lost; losses: {job.losses}"
                for call in self._called_with(hooks, job, text, None, True):
                    self._delivery.put(partial(self.call, *call))

    def report(self, settle: Settle, job: Job, settled: Settled, error: BaseException | None) -> None:
        """In any thread, after an outcome was stored that is not a success."""
        for call in self.calls(settle, job, settled, error):
            self._delivery.put(partial(self.call, *call))

    def calls(
        self, settle: Settle, job: Job, settled: Settled, error: BaseException | None
    ) -> list[tuple[Hook, JobFailure]]:
        """The hooks to call for the outcome of an attempt."""
        failed = isinstance(settle.outcome, RetryOutcome | FailOutcome)
        dead = settled.state is State.FAILED
        text = getattr(settle.outcome, "error", None) or ""
        return self._called_with(self._hooks(job.kind, failed, dead), job, text, error, dead)

    def _hooks(self, kind: str, failed: bool, dead: bool) -> list[Hook]:
        places: list[Hooks | Task[..., Any]] = [self._registry.hooks]
        if (task := self._registry.tasks.get(kind)) is not None:
            places.insert(0, task)
        hooks = [hook for place in places for hook in (place.failure_hooks if failed else ())]
        return hooks + [hook for place in places for hook in (place.dead_hooks if dead else ())]

    def _called_with(
        self, hooks: list[Hook], job: Job, text: str, error: BaseException | None, dead: bool
    ) -> list[tuple[Hook, JobFailure]]:
        if not hooks:
            return []
        engine, task = self._registry.engine, self._registry.tasks.get(job.kind)
        handle: JobHandle[Any] = JobHandle(engine, job.id, self._registry if task is None else task)
        failure = JobFailure(handle, job.kind, job.queue, job.attempts, text, error, dead)
        return [(hook, failure) for hook in hooks]

    def call(self, hook: Hook, failure: JobFailure) -> None:
        """Call a hook, not on the loop."""
        if hook.is_async:
            assert self.loop is not None
            asyncio.run_coroutine_threadsafe(self.acall(hook, failure), self.loop).result()
            return
        try:
            self._provider(hook).call(self._values, failure)
        except Exception:
            self._log(hook, failure)

    async def acall(self, hook: Hook, failure: JobFailure) -> None:
        """Call a hook on the loop."""
        try:
            result = self._provider(hook).call(self._values, failure)
            if hook.is_async:
                await result
        except Exception:
            self._log(hook, failure)

    def _log(self, hook: Hook, failure: JobFailure) -> None:
        log.exception("%s failed for job %s (%s)", hook.what, failure.job.id, failure.kind)

    def _provider(self, hook: Hook) -> Provider:
        provider = self._providers.get(hook)
        if provider is None:
            provider = self._providers[hook] = self._plan.failure_hook(hook)
        return provider

    def close(self) -> None:
        """Call what is queued."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._delivery.close(CLOSE_SECONDS)


# One process


def is_used(registry: Registry) -> bool:
    """True if the program has hooks, or a task needs any."""
    return bool(registry.hooks) or any(task.uses_hooks for task in registry.tasks.values())


class ActiveHooks:
    """The hooks of one worker, process or test: `open` and `close` belong to one event loop. Before `open`
    the hooks and all tasks are checked; raises InvalidInput."""

    def __init__(
        self, registry: Registry, place: Place = "worker", replaced: Mapping[Any, Any] | None = None
    ) -> None:
        self._registry = registry
        self._place = place
        self._plan = HookPlan(registry.hooks, replaced or {})
        self._values: dict[Any, Any] = dict(replaced or {})
        self._tasks: dict[str, Task[..., Any]] = {}
        for task in registry.tasks.values():
            self._plan.needs(task)
        self.failures = FailureHooks(registry, self._plan, self._values)

    @classmethod
    def of(cls, registry: Registry) -> ActiveHooks | None:
        """The hooks for a worker; None if the program has none and no task needs any."""
        return cls(registry) if is_used(registry) else None

    def get(self, kind: str) -> Task[..., Any] | None:
        """The task of this name, with a function that calls the hooks if it needs any."""
        task = self._tasks.get(kind)
        if task is None and (found := self._registry.tasks.get(kind)) is not None:
            task = self._tasks[kind] = self._hooked(found)
        return task

    def _hooked(self, task: Task[..., Any]) -> Task[..., Any]:
        if task.mode == "process" and self._place == "worker":
            return task
        on_loop = self._place == "async" or (self._place == "worker" and task.mode == "loop")
        try:
            needs = self._plan.needs(task)
        except InvalidInput as error:
            # The task was declared after the start.
            return failing(task, error)
        layers = self._plan.layers(needs.values())
        if not (needs or layers):
            return task
        handler = HookedHandler(task, layers, needs, self._values, self._loop)
        call = handler.on_loop if on_loop else handler.off_loop
        hooked = copy.copy(task)
        hooked.function = update_wrapper(partial(call), task.function)
        hooked.is_async, hooked.mode = on_loop, "loop" if on_loop else "thread"
        return hooked

    async def open(self) -> None:
        """Start the lifespans in order. If one fails, the earlier ones are stopped; raises HookFailed."""
        self._loop = self.failures.loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._threads = ThreadPool(1, self._loop)
        opened: asyncio.Future[None] = self._loop.create_future()
        self._lifespans_task = self._loop.create_task(self._live(opened), name="towpath-lifespans")
        try:
            await opened
        except BaseException as error:
            if not isinstance(error, HookFailed):
                self._lifespans_task.cancel()
            await asyncio.wait([self._lifespans_task])
            self._threads.close()
            raise
        if self._place == "worker":
            self.failures.watch_losses()

    async def close(self) -> None:
        """Call the hooks of the last failures, then stop the lifespans in reverse order. A failure is logged,
        and the others are stopped all the same."""
        await asyncio.to_thread(self.failures.close)
        self._closing.set()
        await asyncio.wait([self._lifespans_task])
        self._threads.close()

    async def _live(self, opened: asyncio.Future[None]) -> None:
        """One task starts and stops all lifespans: a cancel scope must be left in the task that entered
        it."""
        started: list[tuple[Hook, Any]] = []
        failed: HookFailed | None = None
        try:
            await self._start_all(started)
            if not opened.done():
                opened.set_result(None)
            await self._closing.wait()
        except HookFailed as error:
            failed = error
        finally:
            due = self._loop.time() + CLOSE_SECONDS
            for hook, generator in reversed(started):
                await self._stop(hook, generator, due)
        if failed is not None and not opened.done():
            opened.set_exception(failed)

    async def _start_all(self, started: list[tuple[Hook, Any]]) -> None:
        for provider in self._plan.lifespans:
            hook = provider.hook
            try:
                generator = provider.call(self._values)
                # Before its start, which may be cancelled and go on in its thread. One that has failed has
                # nothing left to stop.
                started.append((hook, generator))
                value = await self._start(hook, generator)
            except Exception as error:
                log.error("%s failed", hook.what, exc_info=error)
                raise HookFailed(hook=hook.what, error=f"{type(error).__name__}: {error}") from error
            if provider.provides is not None:
                self._values[provider.provides] = value

    async def _start(self, hook: Hook, generator: Any) -> Any:
        if hook.is_async:
            return await _afirst(generator, hook)
        return await self._in_thread(lambda: _first(generator, hook))

    async def _stop(self, hook: Hook, generator: Any, due: float) -> None:
        try:
            async with asyncio.timeout_at(due):
                if hook.is_async:
                    await _alast(generator, None, hook)
                else:
                    await self._in_thread(lambda: _last(generator, None, hook))
        except TimeoutError:
            log.error("%s did not stop within %g s", hook.what, CLOSE_SECONDS)
        except Exception:
            log.exception("%s failed at its stop", hook.what)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Call in the one thread of the sync lifespans: some values belong to the thread that made them."""
        ended: asyncio.Future[T] = self._loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(value) if error is None else ended.set_exception(error)

        self._threads.submit(call, done)
        return await ended


def failing(task: Task[..., Any], error: Exception) -> Task[..., Any]:
    """The task with a function that raises the error."""

    def function(*args: Any, **kwargs: Any) -> None:
        raise error

    failed = copy.copy(task)
    failed.function, failed.is_async = function, False
    return failed


class ThreadedHooks:
    """The hooks of a process without an event loop of its own (a task with `process=True`, a test). Async
    hooks and async handlers run on the loop of a thread."""

    def __init__(self, registry: Registry, replaced: Mapping[Any, Any] | None = None) -> None:
        self.active = ActiveHooks(registry, "sync", replaced)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="towpath-hooks", daemon=True)
        self._thread.start()
        try:
            self._run(self.active.open())
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        self._run(self.active.close())
        self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
