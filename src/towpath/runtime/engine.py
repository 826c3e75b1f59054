"""The engine of a process: the open ledger, its committer, and the services built on them. Opened on first
use.

After a fork the child has nothing open: its next use opens a ledger of its own. The child keeps the objects
of its parent untouched, because closing a copy of a database connection can destroy what the parent
writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.commands import Command, Result
from towpath.core.job import PRIORITIES
from towpath.errors import Forked, LedgerClosed
from towpath.escapes import without_password
from towpath.events import Bus
from towpath.ledger import Ledger, open_ledger
from towpath.runtime.breakers import Breakers, BreakerUpkeep
from towpath.runtime.caretaker import Caretaker, DepthMonitor, Due
from towpath.runtime.claims.dispatcher import Dispatcher
from towpath.runtime.claims.leases import Leases, Refresher
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply, resolve_futures
from towpath.runtime.completion import CompletionWatcher
from towpath.runtime.notes import Document

if TYPE_CHECKING:
    from towpath.runtime.worker.worker import Worker

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def in_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """The async form of a method that waits for the ledger: it runs in a thread, and the event loop goes
    on."""

    @wraps(method)
    async def form(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    form.__name__, form.__qualname__ = f"a{method.__name__}", f"{method.__qualname__} (async)"
    return form


def same_as(method: Callable[..., Any]) -> Callable[[F], F]:
    """Give an async form the docstring of the method that it is the form of."""

    def described(form: F) -> F:
        form.__doc__ = method.__doc__
        return form

    return described


class Components:
    """The objects of an open engine. `owner` names this incarnation of the process in every claim.

    `close` closes the ledger only if it is `owned`, that is, if the engine opened it."""

    def __init__(
        self,
        ledger: Ledger,
        committer: Committer,
        owner: str,
        watch: CompletionWatcher | None = None,
        owned: bool = True,
    ) -> None:
        self.ledger = ledger
        self.committer = committer
        self.owner = owner
        self.leases = Leases(committer, ledger)
        self.refresher = Refresher()
        self.refresher.add(self.leases)
        self.dispatcher = Dispatcher(committer, owner)
        self.refresher.add(self.dispatcher)
        self.watch = watch or CompletionWatcher(ledger)
        self.breakers = Breakers(ledger, committer)
        self.breaker_upkeep = BreakerUpkeep(self.breakers)
        self.depths = DepthMonitor(ledger, committer.bus)
        self._owned = owned
        self._caretaker: Caretaker | None = None
        self._starting = threading.Lock()

    def start_caretaker(self, clock: Clock, due: Due) -> None:
        """Start the caretaker of this process, unless it runs."""
        with self._starting:
            if self._caretaker is None:
                self.ledger.owners.announce(self.owner)
                self._caretaker = Caretaker(
                    self.ledger, self.committer, self.owner, clock, due, self.refresher.run
                )
                self._caretaker.start()

    def close(self) -> None:
        if self._caretaker is not None:
            self._caretaker.close()
        self.watch.close()
        self.leases.close()
        self.dispatcher.close()
        if self.committer.close() and self._owned:
            self.ledger.close()


class Engine:
    """The engine that all rooms above use. Safe from any number of threads and event loops. After `close` it
    may be entered again with `with`.

    With `ledger`, an opened one, the engine uses it and never closes it. A forked child cannot use it."""

    def __init__(
        self,
        url: str,
        name: str | None = None,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        priorities: Mapping[str, int] = PRIORITIES,
    ) -> None:
        checks.optional_text("name", name, 200)
        self.url = url
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.priorities = priorities
        """The names that a priority may have."""
        self.bus = Bus()
        self.due: list[Due] = []
        """Called by the caretaker: each does what is due at the given time and returns the time of its next
        call, or None."""
        self.local_workers: list[Worker] = []
        """The workers that run in this process."""
        self._given = ledger
        self._pid = os.getpid()
        self._components: Components | None = None
        self._closed = False
        self._opening = threading.Lock()
        _engines.add(self)

    @property
    def components(self) -> Components:
        """The objects of the open engine; opens it."""
        return self._components or self._open()

    @property
    def ledger(self) -> Ledger:
        return self.components.ledger

    @property
    def committer(self) -> Committer:
        return self.components.committer

    @property
    def dispatcher(self) -> Dispatcher:
        return self.components.dispatcher

    @property
    def leases(self) -> Leases:
        return self.components.leases

    @property
    def watch(self) -> CompletionWatcher:
        return self.components.watch

    @property
    def owner(self) -> str:
        """The owner of its claims: the name (or host and process) and a random incarnation."""
        return self.components.owner

    def call(self, command: Command) -> Result:
        """Commit a command and return its result, or raise its refusal."""
        return (self._components or self._open()).committer.call(command)

    def acall(self, command: Command) -> Coroutine[Any, Any, Result]:
        """The same for a coroutine."""
        return (self._components or self._open()).committer.acall(command)

    def call_all(self, commands: Sequence[Command], retried: bool = False) -> list[Result]:
        """Commit several commands in this order and in one batch; return their results. The first refusal is
        raised, after all were applied. `retried`: while the ledger is unavailable, wait until it is back."""
        replies: list[Reply] = []
        answered = threading.Event()

        def receive(found: Sequence[Reply]) -> None:
            replies.extend(found)
            answered.set()

        self.components.committer.post(commands, receive, retried)
        answered.wait()
        return [self.components.committer.answer(reply) for reply in replies]

    async def acall_all(self, commands: Sequence[Command], retried: bool = False) -> list[Result]:
        replies = await self.aapply(commands, retried)
        return [self.components.committer.answer(reply) for reply in replies]

    async def aapply(self, commands: Sequence[Command], retried: bool = False) -> Sequence[Reply]:
        """Commit several commands in this order and in one batch; return the results and errors."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Sequence[Reply]] = loop.create_future()

        def receive(replies: Sequence[Reply]) -> None:
            resolve_futures(loop, [(answered, replies)])

        self.components.committer.post(commands, receive, retried)
        return await answered

    @property
    def transactional(self) -> bool:
        """True if a function of the user can be part of the transaction that settles a job."""
        return self.ledger.capabilities.transactional

    def document(self, key: str, ttl: int | None = None) -> Document:
        """A JSON document in a note."""
        return Document(self.components.ledger, self.components.committer, key, ttl)

    def start_caretaker(self) -> None:
        """Start the caretaker (upkeep, schedules, commits of other processes), unless it runs."""
        self.components.start_caretaker(self.clock, self._due)

    def _due(self, now: int) -> int | None:
        components = self.components
        times = [due(now) for due in (*self.due, components.depths.due, components.breaker_upkeep.due)]
        return min((time for time in times if time is not None), default=None)

    @contextlib.contextmanager
    def substituted(self, components: Components, clock: Clock) -> Iterator[None]:
        """Use these components and this clock until the end of the block; the open ones stay open. For
        tests."""
        before = self._components, self.clock, self._closed
        self._components, self.clock = components, clock
        try:
            yield
        finally:
            self._components, self.clock, self._closed = before

    def close(self) -> None:
        """Deliver the pending events, commit the waiting commands, then close the ledger. Later calls raise
        `LedgerClosed`."""
        if self._components is not None:
            self._components.committer.refuse_nested()
            # While the ledger is open, so that a listener may still enqueue.
            self.bus.flush()
        with self._opening:
            components, self._components = self._components, None
            self._closed = True
        if components is not None:
            components.close()
            self.bus.close()

    def reopen(self) -> None:
        """After `close`: let the next use open the ledger again."""
        self._closed = False

    def __enter__(self) -> Self:
        self.reopen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Components:
        with self._opening:
            if self._components is None:
                if self._closed:
                    raise LedgerClosed(path=without_password(self.url))
                if self._given is not None and self._pid != os.getpid():
                    raise Forked(path=without_password(self.url), opener=self._pid)
                name = self.name or f"{socket.gethostname()}:{os.getpid()}"
                ledger = self._given or open_ledger(self.url, self.clock)
                committer = Committer(ledger, bus=self.bus)
                committer.start()
                owner = f"{name}#{secrets.token_hex(4)}"
                self._components = Components(ledger, committer, owner, owned=self._given is None)
            return self._components

    def _after_fork(self) -> None:
        self._opening = threading.Lock()
        self.bus = Bus()
        if self._components is not None:
            _left_to_the_parent.append(self._components)
            self._components = None


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_left_to_the_parent: list[Components] = []


def _after_fork() -> None:
    for engine in list(_engines):
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
