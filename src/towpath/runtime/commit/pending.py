"""Commands on their way to the ledger, and whoever waits for the answers: a thread, a coroutine, or a
callback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from towpath.core.commands import Append, Command, Progress, Renew, Result, Settle
from towpath.errors import TowpathError
from towpath.ledger import Answer

Reply = Answer | TowpathError
"""What becomes of a command: a result, a refusal, or the error that the ledger as a whole ended in."""

T = TypeVar("T")

_EARLY = (Settle, Renew, Progress)
EARLY, APPENDS, OTHERS = range(3)
"""What a command is to the committer: of these the first tell of what is held already, and only the second
wait for room."""


def command_class(command: Command) -> int:
    return APPENDS if type(command) is Append else EARLY if isinstance(command, _EARLY) else OTHERS


def _weight(command: Command) -> int:
    return len(command.specs) if type(command) is Append else 1


class Pending:
    """Commands that stay together, in this order. `patient` ones survive a ledger that is busy or gone for a
    while; the others fail with it. `early` ones tell of what is held already and go before everything new.
    `room` is how many specs they would append, `weight` how much of a batch they fill."""

    __slots__ = ("commands", "early", "patient", "room", "weight")

    def __init__(self, commands: Sequence[Command], patient: bool = False) -> None:
        self.commands = commands
        self.patient = patient
        self.early = isinstance(commands[0], _EARLY)
        self.room = (
            0
            if self.early
            else sum([len(command.specs) for command in commands if isinstance(command, Append)])
        )
        self.weight = max(self.room, len(commands))

    def drop_cancelled(self) -> None:
        """Leave out the commands for which nobody waits any more."""


class PendingCall(Pending):
    """For a thread that blocks for one command. There is one for every call, so it is measured the short
    way."""

    __slots__ = ("_answered", "reply")

    def __init__(self, command: Command) -> None:
        self.commands = (command,)
        self.patient = False
        self.weight = _weight(command)
        self.room = self.weight if type(command) is Append else 0
        self.early = isinstance(command, _EARLY)
        self.reply: Reply | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def wait(self) -> None:
        """Until there is an answer. Once."""
        self._answered.acquire()

    def wake(self) -> None:
        self._answered.release()


class PendingLoopCalls(Pending):
    """For coroutines of one event loop, each of which waits for one command. All commands are of one sort."""

    __slots__ = ("futures", "loop", "sort")

    commands: list[Command]

    def __init__(self, loop: asyncio.AbstractEventLoop, sort: int) -> None:
        self.commands, self.patient, self.early = [], False, sort == EARLY
        self.room = self.weight = 0
        self.loop, self.sort = loop, sort
        self.futures: list[asyncio.Future[Reply]] = []

    def add(self, command: Command) -> asyncio.Future[Reply]:
        """What will be its answer."""
        # Not by the loop's own method, which costs three times as much.
        future: asyncio.Future[Reply] = asyncio.Future(loop=self.loop)
        self._add(command, future)
        return future

    def _add(self, command: Command, future: asyncio.Future[Reply]) -> None:
        self.commands.append(command)
        self.futures.append(future)
        weight = _weight(command)
        self.weight += weight
        if self.sort == APPENDS:
            self.room += weight

    def takes(self, command: Command, most: int) -> bool:
        """Is there room for it, if the ticket may have the weight of `most`?"""
        return self.weight + _weight(command) <= most

    def drop_cancelled(self) -> None:
        all_of_them = list(zip(self.commands, self.futures, strict=True))
        self.commands, self.futures, self.room, self.weight = [], [], 0, 0
        for command, future in all_of_them:
            if not future.cancelled():
                self._add(command, future)


class GatheredCalls(threading.local):
    """What the coroutines of this thread's event loop will hand over at the end of its turn, by sort."""

    def __init__(self) -> None:
        self.tickets: list[PendingLoopCalls | None] = [None, None, None]


class PendingPost(Pending):
    """For a function that is called with the replies, in the thread that committed. It must be quick and must
    not raise. `sender` is the worker's outbox, if these are its settles."""

    __slots__ = ("call", "sender")

    def __init__(
        self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None], patient: bool = True
    ) -> None:
        super().__init__(commands, patient)
        self.call = call
        self.sender: object = None


class PendingProgress:
    """The newest progress of each running job that waits for a commit. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], tuple[Progress, Callable[[Reply], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        key = progress.id, progress.fence
        older = self._waiting.get(key)
        self._waiting[key] = (progress if older is None else _merged(older[0], progress)), call

    def before(self, ticket: Pending) -> PendingPost | None:
        """Those of the jobs that the ticket settles: they go before it."""
        settled = [(command.id, command.fence) for command in ticket.commands if type(command) is Settle]
        return self._take([key for key in settled if key in self._waiting])

    def ticket(self, most: int) -> PendingPost | None:
        """Those that have waited longest, at most so many."""
        return self._take(list(islice(self._waiting, most)))

    def _take(self, keys: Sequence[tuple[str, int]]) -> PendingPost | None:
        if not keys:
            return None
        taken = [self._waiting.pop(key) for key in keys]

        def call(replies: Sequence[Reply]) -> None:
            for (_, each), reply in zip(taken, replies, strict=True):
                each(reply)

        return PendingPost([progress for progress, _ in taken], call)


def _merged(older: Progress, newer: Progress) -> Progress:
    return Progress(
        newer.id,
        newer.fence,
        older.done if newer.done is None else newer.done,
        older.total if newer.total is None else newer.total,
        older.cursor if newer.cursor is None else newer.cursor,
    )


def outcome(reply: Reply | None) -> Result:
    """The result, or the error raised."""
    assert reply is not None
    if isinstance(reply, TowpathError):
        raise reply
    return reply


def deliver(tickets: Sequence[Pending], replies: Sequence[Reply]) -> None:
    """Give every ticket its replies. An event loop is woken once, however many of its coroutines are
    answered."""
    if len(tickets) == 1 and type(tickets[0]) is PendingCall:
        tickets[0].reply = replies[0]
        tickets[0].wake()
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Reply]]] = {}
    at = 0
    for ticket in tickets:
        own = replies[at : at + len(ticket.commands)]
        at += len(own)
        if isinstance(ticket, PendingLoopCalls):
            by_loop.setdefault(ticket.loop, []).extend(zip(ticket.futures, own, strict=True))
        elif isinstance(ticket, PendingCall):
            ticket.reply = own[0]
            ticket.wake()
        elif isinstance(ticket, PendingPost):
            ticket.call(own)
    for loop, answered in by_loop.items():
        resolve_futures(loop, answered)


def resolve_futures(loop: asyncio.AbstractEventLoop, answered: Sequence[tuple[asyncio.Future[T], T]]) -> None:
    """Give futures of a loop what they wait for, from any thread."""
    try:
        loop.call_soon_threadsafe(_set_all, answered)
    except RuntimeError:
        # The loop is closed: nobody is waiting any more, and what was committed stays committed.
        return


def _set_all(answered: Sequence[tuple[asyncio.Future[T], T]]) -> None:
    for future, value in answered:
        if not future.done():
            future.set_result(value)
