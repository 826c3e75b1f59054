"""Group commit. While one batch is being synced the next one gathers; nobody waits for company.

Whoever holds the commit lock leads a batch: it takes everything that waits, applies it in one transaction and
answers. That is the committer's own thread, or a blocking caller that finds nobody leading. Order in a batch:
settle, renew, progress; append and the rest; the standing demand last, so that what was just appended or set
free is claimed in the same commit.

A command of the engine's own (`patient`) is kept while the ledger is busy or gone, and tried again; the
others get the error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from towpath.core.commands import Claim, Claimed, Command, Progress, Result, Settle
from towpath.errors import LedgerClosed, LedgerError, NestedCall, QueueFull, TowpathError
from towpath.escapes import get_logger
from towpath.events import BatchFailed, Bus
from towpath.ledger import Answer, Ledger
from towpath.runtime.commit import feedback
from towpath.runtime.commit.feedback import Outage, ReceivedClaims, RetryHints
from towpath.runtime.commit.pending import (
    GatheredCalls,
    Pending,
    PendingCall,
    PendingLoopCalls,
    PendingPost,
    PendingProgress,
    Reply,
    command_class,
    deliver,
)

log = get_logger("towpath.committer")

MAX_BATCH = 1000
"""Commands (an append counts its specs) per batch. An append that is larger goes alone."""
MAX_BACKLOG = 10_000
"""Appends from outside, by their specs, that may wait for a commit."""
CLOSE_TIMEOUT = 5.0
"""Seconds that a batch with a commit function may take while the committer closes. After that the batch is
abandoned."""
MIN_PROGRESSES = 100
"""Progress commands that a batch has room for, however many settles wait."""
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds to wait after a ledger that was busy or gone, the last one again and again."""


class Demand(Protocol):
    """Somebody who would take jobs now. Both are called by the leader of a batch, under the commit lock."""

    def wanted(self) -> Claim | None: ...

    def taken(self, reply: Claimed | TowpathError) -> None:
        """What came of it. An error that is fatal is told to all, once or twice."""
        ...


class Committer:
    """Start it with `with` or `start()`. Safe from any number of threads and event loops."""

    def __init__(self, ledger: Ledger, max_backlog: int = MAX_BACKLOG, bus: Bus | None = None) -> None:
        self._ledger = ledger
        self.bus = bus or Bus()
        """Where it tells what it has committed."""
        self._max_backlog = max_backlog
        self._gathering, self._most_together = GatheredCalls(), min(max_backlog, MAX_BATCH)
        # Of these locks an interrupt of a caller finds none half taken: only `with` on the lock itself, which
        # is C, is safe from it (a Condition's own is not), and an RLock knows its owner.
        self._commit = threading.RLock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Where the committer's thread waits."""
        self._first: deque[Pending] = deque()
        self._rest: deque[Pending] = deque()
        self._backlog = 0
        self._progresses = PendingProgress()
        self.batch: Sequence[Pending] = ()
        """The batch that is being applied, for the standing demand; under the commit lock."""
        self._outside: deque[Pending] = deque()
        """Appends that wait, in their order, until the backlog has room for them. There is none while it is
        empty."""
        self._demands: list[Demand] = []
        self._kicked = False
        self._idle = False
        """The thread waits for work, and nobody has told it of any."""
        self._company = False
        """The last batch was of several callers. The first of them to come again is not alone for long: if it
        led, the others would have to wait for a commit that is only its own."""
        self._closing = False
        self._failures = 0
        self.took = 0.0
        """Seconds of the last batch."""
        self._applying: int | None = None
        """The thread that is inside `ledger.apply`. Commit functions run there."""
        self._commands: Sequence[Command] = ()
        """The batch that is being applied."""
        self._batches = 0
        self.outage = Outage()
        self._drains = RetryHints(ledger)
        self._claims = ReceivedClaims(ledger)
        self._thread = threading.Thread(target=self._run, name="towpath-committer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Commit the waiting commands, then stop. Later calls raise `LedgerClosed`. False if a commit function does not return within
        `STUCK` seconds; the ledger must not be closed then."""
        self.refuse_nested()
        for gathered in self._gathering.tickets:
            if gathered is not None:
                self._hand_over(gathered)
        with self._lock:
            self._closing = True
            self._work.notify_all()
        if self._thread.is_alive() and not self._leads():
            return self._join()
        return True

    def _join(self) -> bool:
        while True:
            before = self._batches
            self._thread.join(CLOSE_TIMEOUT)
            if not self._thread.is_alive():
                return True
            if self._batches == before and any(
                type(each) is Settle and each.within is not None for each in self._commands
            ):
                log.critical(
                    "a commit function has not returned for %g s. Its transaction is abandoned, its job runs again.",
                    CLOSE_TIMEOUT,
                )
                return False

    def _leads(self) -> bool:
        """Does this thread lead a batch? What it says on the way still counts while the engine is being
        closed: a claim that nobody takes any more goes back."""
        return self._commit._is_owned()  # type: ignore[attr-defined, no-any-return]

    # Callers

    def call(self, command: Command, outside: bool = True) -> Result:
        """Block until the command is durable; its result, or its error raised. An interrupt does not take it
        back."""
        if self._commit._is_owned():  # type: ignore[attr-defined]
            raise NestedCall(path="the engine")
        if (reply := self._lead_alone(command)) is not None:
            return self.answer(reply)
        ticket = PendingCall(command)
        with self._lock:
            self._add(ticket, outside)
        ticket.wait()
        return self.answer(ticket.reply)

    async def acall(self, command: Command) -> Result:
        """The same for a coroutine. Those of an event loop that are not alone hand over together, once in a
        turn of the loop: the first of them would have a commit of its own otherwise, for which the others
        wait."""
        if self._commit._is_owned():  # type: ignore[attr-defined]
            raise NestedCall(path="the engine")
        loop, sort = asyncio.get_running_loop(), command_class(command)
        ticket = self._gathering.tickets[sort]
        if ticket is not None and not (ticket.loop is loop and ticket.takes(command, self._most_together)):
            self._hand_over(ticket)
            ticket = None
        if ticket is not None:
            return self.answer(await ticket.add(command))
        ticket = PendingLoopCalls(loop, sort)
        answer = ticket.add(command)
        if self._company:
            loop.call_soon(self._hand_over, ticket)
            self._gathering.tickets[sort] = ticket
        else:
            self._enter(ticket)
        return self.answer(await answer)

    def _hand_over(self, ticket: PendingLoopCalls) -> None:
        """What was gathered in this thread, if that was not done meanwhile."""
        if self._gathering.tickets[ticket.sort] is ticket:
            self._gathering.tickets[ticket.sort] = None
            self._enter(ticket)

    def _enter(self, ticket: PendingLoopCalls) -> None:
        try:
            with self._lock:
                self._add(ticket, outside=True)
        except LedgerClosed as error:
            deliver((ticket,), [error] * len(ticket.commands))

    def post(
        self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None], patient: bool = True
    ) -> None:
        """Hand over commands of the engine's own, which stay together; never waits. The function gets their
        replies in the committing thread."""
        self.refuse_nested()
        ticket = PendingPost(commands, call, patient)
        with self._lock:
            self._add(ticket, outside=False)

    def refuse_nested(self) -> None:
        """Raise `NestedCall` in a commit function: the thread that would answer is the caller itself."""
        # The lock too: an interrupt may have left the first one set.
        if self._applying == threading.get_ident() and self._leads():
            raise NestedCall(path="the engine")

    def post_settles(
        self, settles: Sequence[Settle], call: Callable[[Sequence[Reply]], None], sender: object
    ) -> None:
        """`post` for the settles of a worker."""
        self.refuse_nested()
        ticket = PendingPost(settles, call)
        ticket.sender = sender
        with self._lock:
            self._add(ticket, outside=False)

    def settles_in_batch(self, sender: object) -> int:
        """How many settles of this sender are in the batch that is being applied."""
        return sum(
            [
                len(ticket.commands)
                for ticket in self.batch
                if type(ticket) is PendingPost and ticket.sender is sender
            ]
        )

    def post_progress(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        """Hand over how far a running job is; never waits. A newer one of the same job takes its place until
        it is committed."""
        self.refuse_nested()
        with self._lock:
            if self._closing and not self._leads():
                raise LedgerClosed(path="the engine")
            self._progresses.add(progress, call)
            self._wake()

    def add_demand(self, demand: Demand) -> None:
        self.refuse_nested()
        with self._lock:
            self._demands.append(demand)
        self.kick()

    def drop_demand(self, demand: Demand) -> None:
        with self._lock:
            self._demands.remove(demand)

    def kick(self) -> None:
        """There may be something for the standing demand: look now."""
        with self._lock:
            self._kicked = True
            self._work.notify()

    def answer(self, reply: Reply | None) -> Result:
        """The result, or the error raised. A full queue says when to come back."""
        if isinstance(reply, TowpathError):
            raise self._drains.hinted(reply) if isinstance(reply, QueueFull) else reply
        assert reply is not None
        return reply

    # The queue of tickets; under the state lock

    def _has_room(self, ticket: Pending) -> bool:
        return self._closing or self._backlog == 0 or self._backlog + ticket.room <= self._max_backlog

    def _add(self, ticket: Pending, outside: bool) -> None:
        if self._closing and not self._leads():
            raise LedgerClosed(path="the engine")
        room = ticket.room
        if (
            outside
            and room
            and (self._outside or (self._backlog + room > self._max_backlog and not self._has_room(ticket)))
        ):
            self._outside.append(ticket)
            return
        if ticket.early and self._progresses and (last := self._progresses.before(ticket)) is not None:
            self._first.append(last)
        (self._first if ticket.early else self._rest).append(ticket)
        self._backlog += room
        self._wake()

    def _wake(self) -> None:
        if self._idle:
            # In this order: an interrupt between them must not leave a thread asleep that counts as told.
            self._work.notify()
            self._idle = False

    def _take(self) -> list[Pending]:
        """The next batch, in its order. Lets those in for whom there is room now."""
        taken: list[Pending] = []
        weight = 0
        for queue in (self._first, self._rest):
            # The first of each always has room: neither may wait for the other's queue to become empty.
            least = True
            while queue and (least or weight + queue[0].weight <= MAX_BATCH):
                least = False
                ticket = queue.popleft()
                taken.append(ticket)
                weight += ticket.weight
                self._backlog -= ticket.room
            if queue is self._first and (
                progress := self._progresses.ticket(max(MIN_PROGRESSES, MAX_BATCH - weight))
            ):
                taken.append(progress)
                weight += progress.weight
        self._kicked = False
        self._company = (
            sum([len(ticket.commands) if type(ticket) is PendingLoopCalls else 1 for ticket in taken]) > 1
        )
        while self._outside and self._has_room(self._outside[0]):
            ticket = self._outside.popleft()
            ticket.drop_cancelled()
            if ticket.commands:
                self._rest.append(ticket)
                self._backlog += ticket.room
        return taken

    def _put_back(self, tickets: Sequence[Pending]) -> None:
        with self._lock:
            for ticket in reversed(tickets):
                (self._first if ticket.early else self._rest).appendleft(ticket)
                self._backlog += ticket.room
            self._kicked = True
            self._work.notify()

    # Leading a batch

    def _lead_alone(self, command: Command) -> Reply | None:
        """A blocking caller leads if nobody does and nobody else is about: no hand-over to another thread.
        Never on an event loop's thread."""
        if self._company or asyncio._get_running_loop() is not None:
            return None
        try:
            if not self._commit.acquire(blocking=False):
                return None
            with self._lock:
                if self._closing or self._failures or self._first or self._rest or self._progresses:
                    return None
                self._kicked = False
            return self._lead_with_demand(command) if self._demands else self._lead_one(command)
        finally:
            # Not `_leads`: a call of our own is where an interrupt can come between.
            if self._commit._is_owned():  # type: ignore[attr-defined]
                self._commit.release()
            if self._first or self._rest or self._progresses or self._kicked:
                with self._lock:
                    self._work.notify()

    def _lead_with_demand(self, command: Command) -> Reply | None:
        ticket = PendingCall(command)
        self._lead((ticket,))
        return ticket.reply

    def _lead_one(self, command: Command) -> Reply | None:
        """The same where nobody waits for jobs, which is most of what a program does that only enqueues."""
        try:
            (reply,) = self._apply((command,))
        except TowpathError as error:
            self._fail((ticket := PendingCall(command),), error)
            return ticket.reply
        except BaseException:
            self._put_back((PendingCall(command),))
            raise
        self.outage.over()
        if self._claims.doubtful:
            self._release_unknown()
        return reply

    def _lead(self, batch: Sequence[Pending]) -> None:
        """Apply a batch and answer it. On an interrupt the batch goes back: the thread will do it, and no
        command minds being applied twice."""
        self.batch = batch
        try:
            self._apply_and_answer(batch)
        finally:
            self.batch = ()

    def _apply_and_answer(self, batch: Sequence[Pending]) -> None:
        commands: list[Command] = []
        asked: list[Demand] = []
        try:
            for ticket in batch:
                commands += ticket.commands
            own = len(commands)
            if self._demands and not self._closing:
                asked = self._ask(commands)
            if not commands:
                if self._claims.doubtful:
                    self._release_unknown()
                return
            answers = self._apply(commands)
            self._failures = 0
            self.outage.over()
            for demand, answer in zip(asked, answers[own:], strict=True):
                assert isinstance(answer, Claimed | TowpathError)
                demand.taken(answer)
        except TowpathError as error:
            self._tell(asked, error)
            self._fail(batch, error)
            return
        except BaseException:
            self._tell(asked, LedgerError())
            self._put_back(batch)
            raise
        deliver(batch, answers)
        if self._claims.doubtful:
            self._release_unknown()

    def _release_unknown(self) -> None:
        """Release the claims of a batch whose reply was lost. If the ledger cannot be read now, a later batch
        tries again."""
        with contextlib.suppress(TowpathError):
            if releases := self._claims.releases():
                log.warning("%d claims whose reply was lost are released", len(releases))
                self.post(releases, _ignore)

    def _ask(self, commands: list[Command]) -> list[Demand]:
        """Add what the standing demand wants with this batch; who asked."""
        with self._lock:
            asked = [(demand, claim) for demand in self._demands if (claim := demand.wanted()) is not None]
        commands += [claim for _, claim in asked]
        return [demand for demand, _ in asked]

    @staticmethod
    def _tell(asked: Sequence[Demand], error: TowpathError) -> None:
        for demand in asked:
            demand.taken(error)

    def _apply(self, commands: Sequence[Command]) -> list[Answer]:
        started = time.monotonic()
        try:
            self._applying, self._commands = threading.get_ident(), commands
            answers = self._ledger.apply(commands)
        except BaseException:
            self._claims.failed(commands)
            raise
        finally:
            self._applying, self._commands = None, ()
            self._batches += 1
        self.took = time.monotonic() - started
        self._claims.applied(commands, answers)
        if feedback.has_listeners(self.bus):
            feedback.publish(self.bus, commands, answers, self.took)
        return answers

    def _fail(self, batch: Sequence[Pending], error: TowpathError) -> None:
        if error.retryable:
            self._failures += 1
            self.outage.noticed(error, 1)
        else:
            log.warning("a batch of %d commands failed: %s", len(batch), error)
        patient = [ticket for ticket in batch if ticket.patient and error.retryable]
        others = [ticket for ticket in batch if not (ticket.patient and error.retryable)]
        if self.bus.wants(BatchFailed):
            self.bus.publish(BatchFailed(len(batch), str(error), error.retryable))
        if error.fatal:
            # Also those who wanted nothing just now: they would wait for ever.
            with self._lock:
                demands = list(self._demands)
            for demand in demands:
                demand.taken(error)
        self._put_back(patient)
        deliver(others, [error] * sum([len(ticket.commands) for ticket in others]))

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._first or self._rest or self._progresses or self._kicked or self._closing):
                    self._idle = True
                    self._work.wait()
                self._idle = False
                if self._failures and not self._closing:
                    self._work.wait(PAUSES[min(self._failures, len(PAUSES)) - 1])
            with self._commit:
                with self._lock:
                    batch = self._take()
                    if self._closing and not batch:
                        return
                try:
                    self._lead(batch)
                except Exception:
                    # A defect. Without this thread nobody would ever be answered again.
                    self._failures += 1
                    log.exception("the committer stumbled and goes on")
                if self._closing and self._failures >= len(PAUSES):
                    self._give_up()
                    return

    def _give_up(self) -> None:
        """The ledger stays away and we are told to stop: say so to all who wait."""
        with self._lock:
            left = [*self._first, *self._rest, *self._outside]
            for queue in (self._first, self._rest, self._outside):
                queue.clear()
        deliver(left, [LedgerClosed(path="the engine")] * sum([len(ticket.commands) for ticket in left]))


def _ignore(replies: Sequence[Reply]) -> None:
    """If a release fails, the lease runs out."""
