"""A command on its way to the ledger, and whoever waits for its answer: a thread, a coroutine, or a callback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence

from towpath.core.commands import Append, Command, Result
from towpath.errors import TowpathError
from towpath.ledger import Answer

Reply = Answer | TowpathError
"""What becomes of a command: a result, a refusal, or the error that the ledger as a whole ended in."""


class Ticket:
    """`patient` ones (settle, renew, progress) survive a ledger that is busy or gone for a while; the others fail with it."""

    __slots__ = ("command", "patient", "reply")

    def __init__(self, command: Command, patient: bool = False) -> None:
        self.command = command
        self.patient = patient
        self.reply: Reply | None = None

    @property
    def weight(self) -> int:
        """How much of a batch it fills."""
        return len(self.command.specs) if isinstance(self.command, Append) else 1


class ThreadTicket(Ticket):
    """For a thread that blocks."""

    __slots__ = ("_answered",)

    def __init__(self, command: Command, patient: bool = False) -> None:
        super().__init__(command, patient)
        self._answered = threading.Lock()
        self._answered.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        """True once there is an answer; may be asked again."""
        if not self._answered.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False
        self._answered.release()
        return True

    def wake(self) -> None:
        self._answered.release()


class TaskTicket(Ticket):
    """For a coroutine on an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, command: Command, patient: bool = False) -> None:
        super().__init__(command, patient)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()


class CallTicket(Ticket):
    """For a function that is called with the reply, in the thread that committed. It must be quick and must not raise."""

    __slots__ = ("call",)

    def __init__(self, command: Command, call: Callable[[Reply], None], patient: bool = True) -> None:
        super().__init__(command, patient)
        self.call = call


def outcome(reply: Reply | None) -> Result:
    """The result, or the error raised."""
    assert reply is not None
    if isinstance(reply, TowpathError):
        raise reply
    return reply


def deliver(tickets: Sequence[Ticket], replies: Iterable[Reply]) -> None:
    """Give every ticket its reply. An event loop is woken once, however many of its coroutines are answered."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for ticket, reply in zip(tickets, replies, strict=True):
        ticket.reply = reply
        if isinstance(ticket, ThreadTicket):
            ticket.wake()
        elif isinstance(ticket, CallTicket):
            ticket.call(reply)
        elif isinstance(ticket, TaskTicket):
            by_loop.setdefault(ticket.loop, []).append(ticket.future)
    for loop, futures in by_loop.items():
        wake_all(loop, futures)


def wake_all(loop: asyncio.AbstractEventLoop, futures: Sequence[asyncio.Future[None]]) -> None:
    try:
        loop.call_soon_threadsafe(_set_all, futures)
    except RuntimeError:
        # The loop is closed: nobody is waiting any more, and what was committed stays committed.
        return


def _set_all(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
