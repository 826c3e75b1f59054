"""Commands on their way to the ledger, and whoever waits for the answers: a thread, a coroutine, or a callback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from towpath.core.commands import Append, Command, Progress, Renew, Result, Settle
from towpath.errors import TowpathError
from towpath.ledger import Answer

Reply = Answer | TowpathError
"""What becomes of a command: a result, a refusal, or the error that the ledger as a whole ended in."""

T = TypeVar("T")

_EARLY = (Settle, Renew, Progress)


class Ticket:
    """Commands that stay together, in this order. `patient` ones survive a ledger that is busy or gone for a while; the others
    fail with it. `early` ones tell of what is held already and go before everything new. `room` is how many specs they would
    append, `weight` how much of a batch they fill."""

    __slots__ = ("commands", "early", "patient", "room", "weight")

    @property
    def abandoned(self) -> bool:
        """Nobody waits for it any more."""
        return False

    def __init__(self, commands: Sequence[Command], patient: bool = False) -> None:
        self.commands = commands
        self.patient = patient
        self.early = isinstance(commands[0], _EARLY)
        self.room = 0 if self.early else sum([len(command.specs) for command in commands if isinstance(command, Append)])
        self.weight = max(self.room, len(commands))


class _Lone(Ticket):
    """One command. There is one for every call from outside, so it is measured the short way."""

    __slots__ = ()

    def __init__(self, command: Command) -> None:
        self.commands = (command,)
        self.patient = False
        if type(command) is Append:
            self.early, self.room = False, len(command.specs)
        else:
            self.early, self.room = isinstance(command, _EARLY), 0
        self.weight = self.room or 1


class ThreadTicket(_Lone):
    """For a thread that blocks for one command."""

    __slots__ = ("_answered", "reply")

    def __init__(self, command: Command) -> None:
        super().__init__(command)
        self.reply: Reply | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def wait(self) -> None:
        """Until there is an answer. Once."""
        self._answered.acquire()

    def wake(self) -> None:
        self._answered.release()


class TaskTicket(_Lone):
    """For a coroutine that waits for one command."""

    __slots__ = ("future", "loop")

    def __init__(self, command: Command) -> None:
        _Lone.__init__(self, command)
        self.loop = asyncio.get_running_loop()
        # Not by the loop's own method, which costs three times as much.
        self.future: asyncio.Future[Reply] = asyncio.Future(loop=self.loop)

    @property
    def abandoned(self) -> bool:
        return self.future.cancelled()


class CallTicket(Ticket):
    """For a function that is called with the replies, in the thread that committed. It must be quick and must not raise."""

    __slots__ = ("call",)

    def __init__(self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None], patient: bool = True) -> None:
        super().__init__(commands, patient)
        self.call = call


def outcome(reply: Reply | None) -> Result:
    """The result, or the error raised."""
    assert reply is not None
    if isinstance(reply, TowpathError):
        raise reply
    return reply


def deliver(tickets: Sequence[Ticket], replies: Sequence[Reply]) -> None:
    """Give every ticket its replies. An event loop is woken once, however many of its coroutines are answered."""
    if len(tickets) == 1 and type(tickets[0]) is ThreadTicket:
        tickets[0].reply = replies[0]
        tickets[0].wake()
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Reply]]] = {}
    at = 0
    for ticket in tickets:
        if type(ticket) is TaskTicket:
            loop = ticket.loop
            if loop not in by_loop:
                by_loop[loop] = []
            by_loop[loop].append((ticket.future, replies[at]))
            at += 1
            continue
        if isinstance(ticket, ThreadTicket):
            ticket.reply = replies[at]
            ticket.wake()
        elif isinstance(ticket, CallTicket):
            ticket.call(replies[at : at + len(ticket.commands)])
        at += len(ticket.commands)
    for loop, answered in by_loop.items():
        tell_all(loop, answered)


def tell_all(loop: asyncio.AbstractEventLoop, answered: Sequence[tuple[asyncio.Future[T], T]]) -> None:
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
