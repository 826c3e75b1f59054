"""Commands that wait for a commit, and where their replies go: a thread, coroutines of an event loop, or a
callback."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from towpath.core.commands import Append, Command, Progress, Renew, Result, Settle
from towpath.errors import TowpathError
from towpath.ledger import Answer

Reply = Answer | TowpathError
"""The reply to a command: a result, a refusal, or the error that the whole batch failed with."""
Replied = Callable[[Sequence[Reply]], None]
"""Called with the replies to posted commands, in the committing thread. Must be quick and must not raise."""

T = TypeVar("T")

MAX_BATCH = 1000
"""Commands (an append counts its specs) per batch. A larger append gets a batch of its own."""
MIN_PROGRESSES = 100
"""Progress commands that a batch has room for, however many settles wait."""
MIN_OTHERS = 100
"""The same for commands that neither settle, renew nor append, such as the caretaker's commands. Without
this room they would delay the append behind them by a batch."""

_EARLY = (Settle, Renew, Progress)
EARLY, APPENDS, OTHERS = range(3)
"""The classes of commands. EARLY commands (settle, renew, progress) concern claims that exist and go before
all others; only APPENDS wait for back-pressure."""


def command_class(command: Command) -> int:
    return APPENDS if type(command) is Append else EARLY if isinstance(command, _EARLY) else OTHERS


def _weight(command: Command) -> int:
    return len(command.specs) if type(command) is Append else 1


class Pending:
    """Commands that stay together, in this order. If the ledger is unavailable, `retried` commands are kept
    and retried; others get the error. `room` is the number of specs that the commands append, `weight` their
    share of a batch."""

    __slots__ = ("commands", "early", "retried", "room", "weight")

    def __init__(self, commands: Sequence[Command], retried: bool = False) -> None:
        self.commands = commands
        self.retried = retried
        self.early = isinstance(commands[0], _EARLY)
        self.room = (
            0
            if self.early
            else sum([len(command.specs) for command in commands if isinstance(command, Append)])
        )
        self.weight = max(self.room, len(commands))

    def drop_cancelled(self) -> None:
        """Remove the commands of cancelled callers."""


class PendingCall(Pending):
    """One command of a thread that blocks for its reply. Created for every call, so it computes its sizes
    without the base class."""

    __slots__ = ("_answered", "reply")

    def __init__(self, command: Command) -> None:
        self.commands = (command,)
        self.retried = False
        self.weight = _weight(command)
        self.room = self.weight if type(command) is Append else 0
        self.early = isinstance(command, _EARLY)
        self.reply: Reply | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def wait(self) -> None:
        """Block until `wake`. May be called once."""
        self._answered.acquire()

    def wake(self) -> None:
        self._answered.release()


class PendingLoopCalls(Pending):
    """Commands of one class, each awaited by a coroutine of the same event loop."""

    __slots__ = ("futures", "kind", "loop")

    commands: list[Command]

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: int) -> None:
        self.commands, self.retried, self.early = [], False, kind == EARLY
        self.room = self.weight = 0
        self.loop, self.kind = loop, kind
        self.futures: list[asyncio.Future[Reply]] = []

    def add(self, command: Command) -> asyncio.Future[Reply]:
        """The future of its reply."""
        # `loop.create_future` costs three times as much.
        future: asyncio.Future[Reply] = asyncio.Future(loop=self.loop)
        self._add(command, future)
        return future

    def _add(self, command: Command, future: asyncio.Future[Reply]) -> None:
        self.commands.append(command)
        self.futures.append(future)
        weight = _weight(command)
        self.weight += weight
        if self.kind == APPENDS:
            self.room += weight

    def takes(self, command: Command, most: int) -> bool:
        """True if the command fits into a total weight of `most`."""
        return self.weight + _weight(command) <= most

    def drop_cancelled(self) -> None:
        before = list(zip(self.commands, self.futures, strict=True))
        self.commands, self.futures, self.room, self.weight = [], [], 0, 0
        for command, future in before:
            if not future.cancelled():
                self._add(command, future)


class GatheredCalls(threading.local):
    """By command class: the commands that this thread's event loop adds to the queue at the end of its
    iteration."""

    def __init__(self) -> None:
        self.by_class: list[PendingLoopCalls | None] = [None, None, None]


class PendingPost(Pending):
    """Commands with a function that is called with their replies. `sender` is set for the settles of a
    worker."""

    __slots__ = ("call", "sender")

    def __init__(self, commands: Sequence[Command], call: Replied, retried: bool = True) -> None:
        super().__init__(commands, retried)
        self.call = call
        self.sender: object = None


class PendingForeign(PendingPost):
    """Commands of another process, a client of this one. That process records its claims itself: this one
    must not take them for claims with a lost reply."""

    __slots__ = ()


class PendingProgress(dict[tuple[str, int], tuple[Progress, Callable[[Reply], None]]]):
    """The newest progress of each running job that waits for a commit, by job id and fence."""

    def add(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        key = progress.id, progress.fence
        older = self.get(key)
        self[key] = (progress if older is None else _merged(older[0], progress)), call

    def before(self, pending: Pending) -> PendingPost | None:
        """Take out the progress of the jobs that these commands settle: it must be applied before them."""
        settled = [(command.id, command.fence) for command in pending.commands if type(command) is Settle]
        return self._take([key for key in settled if key in self])

    def oldest(self, most: int) -> PendingPost | None:
        """Take out the progress that has waited longest, of at most `most` jobs."""
        return self._take(list(islice(self, most)))

    def _take(self, keys: Sequence[tuple[str, int]]) -> PendingPost | None:
        if not keys:
            return None
        taken = [self.pop(key) for key in keys]

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


class CommitQueue:
    """All commands that wait for a commit. Order of a batch: EARLY commands, then progress, then all others.

    Not thread-safe: the committer's state lock guards it. The deques are public because only their own truth
    value, computed in C, cannot be interrupted by a signal."""

    def __init__(self, max_backlog: int) -> None:
        self._max_backlog = max_backlog
        self._backlog = 0
        """Specs of the appends in `later`."""
        self.early: deque[Pending] = deque()
        self.progress = PendingProgress()
        self.later: deque[Pending] = deque()
        self.blocked: deque[Pending] = deque()
        """Appends that wait, in their order, until the backlog has room. Empty while the backlog is empty."""
        self.unbounded = False
        """While the committer closes, appends do not wait for room."""

    def add(self, pending: Pending, bounded: bool) -> bool:
        """False if back-pressure holds it back; only `bounded` appends wait."""
        room = pending.room
        if (
            bounded
            and room
            and (self.blocked or (self._backlog + room > self._max_backlog and not self._has_room(pending)))
        ):
            self.blocked.append(pending)
            return False
        if pending.early and self.progress and (last := self.progress.before(pending)) is not None:
            self.early.append(last)
        (self.early if pending.early else self.later).append(pending)
        self._backlog += room
        return True

    def take(self) -> list[Pending]:
        """Take out the next batch, in its order, and let blocked appends in that have room now."""
        taken: list[Pending] = []
        weight = 0
        while self.early and (not taken or weight + self.early[0].weight <= MAX_BATCH):
            taken.append(self.early.popleft())
            weight += taken[-1].weight
        if progress := self.progress.oldest(max(MIN_PROGRESSES, MAX_BATCH - weight)):
            taken.append(progress)
            weight += progress.weight
        # However many settles wait, the first append is taken, and a few commands without specs before it.
        others, appended = 0, False
        while self.later:
            pending = self.later[0]
            least = not appended if pending.room else others < MIN_OTHERS
            if not least and weight + pending.weight > MAX_BATCH:
                break
            taken.append(self.later.popleft())
            weight += pending.weight
            self._backlog -= pending.room
            if pending.room:
                appended = True
            else:
                others += pending.weight
        while self.blocked and self._has_room(self.blocked[0]):
            pending = self.blocked.popleft()
            pending.drop_cancelled()
            if pending.commands:
                self.later.append(pending)
                self._backlog += pending.room
        return taken

    def put_back(self, batch: Sequence[Pending]) -> None:
        """Put commands back in front, in their order."""
        for pending in reversed(batch):
            (self.early if pending.early else self.later).appendleft(pending)
            self._backlog += pending.room

    def clear(self) -> list[Pending]:
        """Take out all commands, except progress."""
        left = [*self.early, *self.later, *self.blocked]
        for queue in (self.early, self.later, self.blocked):
            queue.clear()
        return left

    def _has_room(self, pending: Pending) -> bool:
        return self.unbounded or self._backlog == 0 or self._backlog + pending.room <= self._max_backlog


def ignore(replies: Sequence[Reply]) -> None:
    """The callback of commands that may fail: a lease or a time to live has the same effect later."""


def outcome(reply: Reply | None) -> Result:
    """The result, or the error raised."""
    assert reply is not None
    if isinstance(reply, TowpathError):
        raise reply
    return reply


def deliver(batch: Sequence[Pending], replies: Sequence[Reply]) -> None:
    """Pass the replies to their callers. Each event loop is woken once."""
    if len(batch) == 1 and type(batch[0]) is PendingCall:
        batch[0].reply = replies[0]
        batch[0].wake()
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Reply]]] = {}
    at = 0
    for pending in batch:
        own = replies[at : at + len(pending.commands)]
        at += len(own)
        if isinstance(pending, PendingLoopCalls):
            by_loop.setdefault(pending.loop, []).extend(zip(pending.futures, own, strict=True))
        elif isinstance(pending, PendingCall):
            pending.reply = own[0]
            pending.wake()
        elif isinstance(pending, PendingPost):
            pending.call(own)
    for loop, answered in by_loop.items():
        resolve_futures(loop, answered)


def resolve_futures(loop: asyncio.AbstractEventLoop, answered: Sequence[tuple[asyncio.Future[T], T]]) -> None:
    """Set the results of futures of a loop, from any thread."""
    try:
        loop.call_soon_threadsafe(_set_all, answered)
    except RuntimeError:
        # The loop is closed, so no coroutine waits; the commit stands.
        return


def _set_all(answered: Sequence[tuple[asyncio.Future[T], T]]) -> None:
    for future, value in answered:
        if not future.done():
            future.set_result(value)
