"""What is open in this process: the ledger, its committer, and those who work with them. Opened on first use.

After a fork the child has nothing open: its next use opens a ledger of its own. What the parent had open is
kept untouched in the child, because closing a copy of a database connection can destroy what the parent is
writing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.commands import Command, Result
from towpath.core.job import PRIORITIES
from towpath.errors import LedgerClosed
from towpath.events import Bus
from towpath.ledger import Ledger, open_ledger
from towpath.runtime.breakers import Breakers, BreakerUpkeep
from towpath.runtime.caretaker import Caretaker, Due
from towpath.runtime.claims.dispatcher import Dispatcher
from towpath.runtime.claims.leases import Leases, Refresher
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply, resolve_futures
from towpath.runtime.completion import CompletionWatcher
from towpath.runtime.notes import Document


class Parts:
    """Everything that is open. `owner` names this incarnation of the process in every claim."""

    def __init__(
        self, ledger: Ledger, committer: Committer, owner: str, watch: CompletionWatcher | None = None
    ) -> None:
        self.ledger = ledger
        self.committer = committer
        self.owner = owner
        self.leases = Leases(committer, ledger)
        self.lookout = Refresher()
        self.lookout.add(self.leases)
        self.dispatcher = Dispatcher(committer, owner)
        self.watch = watch or CompletionWatcher(ledger)
        self.breakers = Breakers(ledger, committer)
        self.rounds = BreakerUpkeep(self.breakers)
        self._caretaker: Caretaker | None = None
        self._attending = threading.Lock()

    def attend(self, clock: Clock, due: Due) -> None:
        """Have the ledger looked after from now on."""
        with self._attending:
            if self._caretaker is None:
                self.ledger.owners.announce(self.owner)
                self._caretaker = Caretaker(
                    self.ledger, self.committer, self.owner, clock, due, self.lookout.run
                )
                self._caretaker.start()

    def close(self) -> None:
        if self._caretaker is not None:
            self._caretaker.close()
        self.watch.close()
        self.leases.close()
        if self.committer.close():
            self.ledger.close()


class Engine:
    """Safe from any number of threads and event loops. After `close` it may be entered again with `with`."""

    def __init__(self, url: str, name: str | None = None, clock: Clock | None = None) -> None:
        checks.optional_text("name", name, 200)
        self.url = url
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.priorities: Mapping[str, int] = PRIORITIES
        """The names that a priority may have."""
        self.bus = Bus()
        self._parts: Parts | None = None
        self._closed = False
        self._opening = threading.Lock()
        _engines.add(self)

    @property
    def parts(self) -> Parts:
        """What is open; opens it."""
        return self._parts or self._open()

    @property
    def ledger(self) -> Ledger:
        return self.parts.ledger

    @property
    def committer(self) -> Committer:
        return self.parts.committer

    @property
    def dispatcher(self) -> Dispatcher:
        return self.parts.dispatcher

    @property
    def leases(self) -> Leases:
        return self.parts.leases

    @property
    def watch(self) -> CompletionWatcher:
        return self.parts.watch

    @property
    def owner(self) -> str:
        """Who claims: the name (or host and process) and a random incarnation."""
        return self.parts.owner

    def call(self, command: Command) -> Result:
        """Have a command committed; its result, or its refusal raised."""
        return (self._parts or self._open()).committer.call(command)

    def acall(self, command: Command) -> Coroutine[Any, Any, Result]:
        """The same for a coroutine."""
        return (self._parts or self._open()).committer.acall(command)

    def call_all(self, commands: Sequence[Command]) -> list[Result]:
        """Several commands, in this order and in one commit. The first refusal is raised, after all were
        tried."""
        replies: list[Reply] = []
        answered = threading.Event()

        def heard(found: Sequence[Reply]) -> None:
            replies.extend(found)
            answered.set()

        self.parts.committer.post(commands, heard, patient=False)
        answered.wait()
        return [self.parts.committer.answer(reply) for reply in replies]

    async def acall_all(self, commands: Sequence[Command]) -> list[Result]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Sequence[Reply]] = loop.create_future()

        def heard(replies: Sequence[Reply]) -> None:
            resolve_futures(loop, [(answered, replies)])

        self.parts.committer.post(commands, heard, patient=False)
        return [self.parts.committer.answer(reply) for reply in await answered]

    @property
    def transactional(self) -> bool:
        """Can a function of the user's be part of the transaction that settles a job?"""
        return self.ledger.capabilities.transactional

    def document(self, key: str, ttl: int | None = None) -> Document:
        """A JSON document in a note."""
        return Document(self.parts.ledger, self.parts.committer, key, ttl)

    def attend(self) -> None:
        """Have the ledger looked after (a caretaker: upkeep, schedules, other processes' commits). May be
        called again."""
        self.parts.attend(self.clock, self._due)

    def _due(self, now: int) -> int | None:
        """Do what an app has to do at `now`, and say when the next is due."""
        return None

    @contextlib.contextmanager
    def substituted(self, parts: Parts, clock: Clock) -> Iterator[None]:
        """Work with these parts and this clock until the end of the block; what was open before stays open.
        For tests."""
        before = self._parts, self.clock, self._closed
        self._parts, self.clock = parts, clock
        try:
            yield
        finally:
            self._parts, self.clock, self._closed = before

    def close(self) -> None:
        """Deliver the pending events, commit the waiting commands, then close the ledger. Later calls raise
        `LedgerClosed`."""
        if self._parts is not None:
            self._parts.committer.refuse_nested()
            # While the ledger is open, so that a listener may still enqueue.
            self.bus.flush()
        with self._opening:
            parts, self._parts = self._parts, None
            self._closed = True
        if parts is not None:
            parts.close()
            self.bus.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        self._closed = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _open(self) -> Parts:
        with self._opening:
            if self._parts is None:
                if self._closed:
                    raise LedgerClosed(path=self.url)
                who = self.name or f"{socket.gethostname()}:{os.getpid()}"
                ledger = open_ledger(self.url, self.clock)
                committer = Committer(ledger, bus=self.bus)
                committer.start()
                self._parts = Parts(ledger, committer, f"{who}#{secrets.token_hex(4)}")
            return self._parts

    def _after_fork(self) -> None:
        self._opening = threading.Lock()
        self.bus = Bus()
        if self._parts is not None:
            _left_to_the_parent.append(self._parts)
            self._parts = None


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_left_to_the_parent: list[Parts] = []


def _after_fork() -> None:
    for engine in list(_engines):
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
