"""Group commit. While one batch is written, the next one gathers; a command never waits for others to come.

The thread that holds the commit lock leads a batch: it takes all waiting commands, applies them in one
transaction and delivers the replies. The leader is the committer's own thread, or a blocking caller that
finds no leader. Order of a batch: settle, renew, progress; append and all others; the claims of the standing
demand last, so that a job that was just appended or released is claimed in the same commit.

If the ledger is unavailable, the engine's own commands (`retried`) are kept and retried; other callers get
the error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from towpath.core.commands import Claim, Claimed, Command, Progress, Result, Settle
from towpath.errors import LedgerClosed, LedgerError, NestedCall, QueueFull, TowpathError
from towpath.escapes import get_logger
from towpath.events import BatchFailed, Bus
from towpath.ledger import Answer, Ledger
from towpath.runtime.commit import feedback
from towpath.runtime.commit.feedback import Outage, ReceivedClaims, RetryHints
from towpath.runtime.commit.pending import (
    MAX_BATCH,
    CommitQueue,
    GatheredCalls,
    Pending,
    PendingCall,
    PendingForeign,
    PendingLoopCalls,
    PendingPost,
    Reply,
    command_class,
    deliver,
    ignore,
)

log = get_logger("towpath.committer")

T = TypeVar("T")

MAX_BACKLOG = 10_000
"""Specs of appends that may wait for a commit before further appends are held back."""
CLOSE_TIMEOUT = 5.0
"""Seconds that a batch with a commit function may take while the committer closes. After that the batch is
abandoned."""
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts while the ledger is unavailable; the last value repeats."""


class Demand(Protocol):
    """A consumer of jobs. Both methods are called by the leader of a batch, under the commit lock."""

    def wanted(self) -> Claim | None:
        """The claim to add to the batch."""
        ...

    def taken(self, reply: Claimed | TowpathError) -> None:
        """The reply to that claim. A fatal error is passed to every demand, once or twice."""
        ...


class Committer:
    """Start it with `with` or `start()`. Safe from any number of threads and event loops."""

    def __init__(self, ledger: Ledger, max_backlog: int = MAX_BACKLOG, bus: Bus | None = None) -> None:
        self._ledger = ledger
        self.bus = bus or Bus()
        """Receives the events of each commit."""
        self._gathered, self._max_gathered = GatheredCalls(), min(max_backlog, MAX_BATCH)
        # A signal must not leave a lock half taken. Only `with` on the lock itself, which is C, is safe from
        # that (that of a Condition is not), and an RLock stores its owner.
        self._commit = threading.RLock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """The committer's thread waits on it."""
        self._queue = CommitQueue(max_backlog)
        self.batch: Sequence[Pending] = ()
        """The batch that is being applied, for the standing demand; under the commit lock."""
        self._demands: list[Demand] = []
        self._kicked = False
        self._idle = False
        """The thread waits, and has not been notified."""
        self._several_callers = False
        """The last batch had several callers. Then the next blocking caller does not lead: the others would
        wait for a commit of its one command."""
        self._has_foreign = False
        """A client has posted commands."""
        self._closing = False
        self._failures = 0
        self.batch_seconds = 0.0
        """Duration of the last batch."""
        self._applying: int | None = None
        """The thread that is inside `ledger.apply`. Commit functions run there."""
        self._commands: Sequence[Command] = ()
        """The commands that are being applied."""
        self._batches = 0
        self.outage = Outage()
        self._retry_hints = RetryHints(ledger)
        self._claims = ReceivedClaims(ledger)
        self._thread = threading.Thread(target=self._run, name="towpath-committer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Commit the waiting commands, then stop. Later calls raise `LedgerClosed`. False if a commit
        function does not return within `CLOSE_TIMEOUT`; the ledger must not be closed then."""
        self.refuse_nested()
        for gathered in self._gathered.by_class:
            if gathered is not None:
                self._add_gathered(gathered)
        with self._lock:
            self._closing = self._queue.unbounded = True
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
                    "a commit function has not returned for %g s: its transaction is abandoned and its job "
                    "will run again",
                    CLOSE_TIMEOUT,
                )
                return False

    def _leads(self) -> bool:
        """Does this thread lead a batch? It may post commands even while the committer closes: a claim
        without a taker must be released."""
        return self._commit._is_owned()  # type: ignore[attr-defined, no-any-return]

    # Callers

    def call(self, command: Command, bounded: bool = True) -> Result:
        """Block until the command is durable; return its result or raise its error. An interrupt does not
        revoke the command. An append that is not `bounded` does not wait for room in the backlog."""
        if self._commit._is_owned():  # type: ignore[attr-defined]
            raise NestedCall(path="the engine")
        if (reply := self._lead_alone(command)) is not None:
            return self.answer(reply)
        pending = PendingCall(command)
        with self._lock:
            self._add(pending, bounded)
        pending.wait()
        return self.answer(pending.reply)

    async def acall(self, command: Command) -> Result:
        """`call` for a coroutine. If the last batch had several callers, the commands of one event loop are
        gathered and added once per iteration: otherwise the first would get a commit of its own, for which
        the others wait."""
        if self._commit._is_owned():  # type: ignore[attr-defined]
            raise NestedCall(path="the engine")
        loop, kind = asyncio.get_running_loop(), command_class(command)
        pending = self._gathered.by_class[kind]
        if pending is not None and not (pending.loop is loop and pending.takes(command, self._max_gathered)):
            self._add_gathered(pending)
            pending = None
        if pending is not None:
            return self.answer(await pending.add(command))
        pending = PendingLoopCalls(loop, kind)
        answer = pending.add(command)
        if self._several_callers:
            loop.call_soon(self._add_gathered, pending)
            self._gathered.by_class[kind] = pending
        else:
            self._add_loop_calls(pending)
        return self.answer(await answer)

    def _add_gathered(self, pending: PendingLoopCalls) -> None:
        """Add the gathered commands, unless they have been added."""
        if self._gathered.by_class[pending.kind] is pending:
            self._gathered.by_class[pending.kind] = None
            self._add_loop_calls(pending)

    def _add_loop_calls(self, pending: PendingLoopCalls) -> None:
        try:
            with self._lock:
                self._add(pending, bounded=True)
        except LedgerClosed as error:
            deliver((pending,), [error] * len(pending.commands))

    def post(
        self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None], retried: bool = True
    ) -> None:
        """Add commands of the engine's own, which stay together; never blocks. The function is called with
        their replies in the committing thread."""
        self.refuse_nested()
        with self._lock:
            self._add(PendingPost(commands, call, retried), bounded=False)

    def post_foreign(self, commands: Sequence[Command], call: Callable[[Sequence[Reply]], None]) -> None:
        """`post` for the commands of a client, which is another process. Not retried: the client does
        that."""
        with self._lock:
            self._add(PendingForeign(commands, call, retried=False), bounded=False)
            self._has_foreign = True

    def refuse_nested(self) -> None:
        """Raise `NestedCall` in a commit function: the thread that would reply is the caller itself."""
        # The lock is checked too: a signal may have left `_applying` set.
        if self._applying == threading.get_ident() and self._leads():
            raise NestedCall(path="the engine")

    def post_settles(
        self, settles: Sequence[Settle], call: Callable[[Sequence[Reply]], None], sender: object
    ) -> None:
        """`post` for the settles of a worker."""
        self.refuse_nested()
        pending = PendingPost(settles, call)
        pending.sender = sender
        with self._lock:
            self._add(pending, bounded=False)

    def settles_in_batch(self, sender: object) -> int:
        """How many settles of this sender are in the batch that is being applied."""
        return sum(
            [
                len(pending.commands)
                for pending in self.batch
                if type(pending) is PendingPost and pending.sender is sender
            ]
        )

    def post_progress(self, progress: Progress, call: Callable[[Reply], None]) -> None:
        """Add the progress of a running job; never blocks. Newer progress of the same job replaces it until
        it is committed, unless it has notes."""
        self.refuse_nested()
        with self._lock:
            if progress.notes:
                self._add(PendingPost((progress,), lambda replies: call(replies[0])), bounded=False)
                return
            if self._closing and not self._leads():
                raise LedgerClosed(path="the engine")
            self._queue.progress.add(progress, call)
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
        """Apply a batch soon, even an empty one: there may be jobs for the standing demand."""
        with self._lock:
            self._kicked = True
            self._work.notify()

    def answer(self, reply: Reply | None) -> Result:
        """Return the result, or raise the error. `QueueFull` gets a measured `retry_after`."""
        if isinstance(reply, TowpathError):
            raise self._retry_hints.hinted(reply) if isinstance(reply, QueueFull) else reply
        assert reply is not None
        return reply

    # The queue; under the state lock

    def _add(self, pending: Pending, bounded: bool) -> None:
        if self._closing and not self._leads():
            raise LedgerClosed(path="the engine")
        if self._queue.add(pending, bounded):
            self._wake()

    def _wake(self) -> None:
        if self._idle:
            # In this order: a signal between the two must not leave a sleeping thread marked as notified.
            self._work.notify()
            self._idle = False

    def _take(self) -> list[Pending]:
        taken = self._queue.take()
        self._kicked = False
        self._several_callers = (
            sum([len(pending.commands) if type(pending) is PendingLoopCalls else 1 for pending in taken]) > 1
        )
        return taken

    def _put_back(self, batch: Sequence[Pending]) -> None:
        with self._lock:
            self._queue.put_back(batch)
            self._kicked = True
            self._work.notify()

    # Leading a batch

    def _lead_alone(self, command: Command) -> Reply | None:
        """Lead a batch of this one command if there is no other leader and no other caller: this saves the
        switch to another thread. None if the command has to be queued. Never on the thread of an event
        loop."""
        if self._several_callers or asyncio._get_running_loop() is not None:
            return None
        queue = self._queue
        try:
            if not self._commit.acquire(blocking=False):
                return None
            with self._lock:
                if self._closing or self._failures or queue.early or queue.later or queue.progress:
                    return None
                self._kicked = False
            return self._lead_with_demand(command) if self._demands else self._lead_one(command)
        finally:
            # Not `_leads`: a signal can interrupt at the entry of a Python function.
            if self._commit._is_owned():  # type: ignore[attr-defined]
                self._commit.release()
            if queue.early or queue.later or queue.progress or self._kicked:
                with self._lock:
                    self._work.notify()

    def _lead_with_demand(self, command: Command) -> Reply | None:
        pending = PendingCall(command)
        self._lead((pending,))
        return pending.reply

    def _lead_one(self, command: Command) -> Reply | None:
        """Fast path without demand: a process that only enqueues."""
        try:
            (reply,) = self._apply((command,))
        except TowpathError as error:
            self._fail((pending := PendingCall(command),), error)
            return pending.reply
        except BaseException:
            self._put_back((PendingCall(command),))
            raise
        self.outage.over()
        if self._claims.read_due:
            self._release_unknown()
        return reply

    def _lead(self, batch: Sequence[Pending]) -> None:
        """Apply a batch and deliver its replies. On an interrupt the batch goes back to the queue: the thread
        will apply it, and every command may be applied twice."""
        self.batch = batch
        try:
            self._apply_and_deliver(batch)
        finally:
            self.batch = ()

    def _apply_and_deliver(self, batch: Sequence[Pending]) -> None:
        commands: list[Command] = []
        claiming: list[Demand] = []
        try:
            for pending in batch:
                commands += pending.commands
            own = len(commands)
            if self._demands and not self._closing:
                claiming = self._add_claims(commands)
            if not commands:
                if self._claims.read_due:
                    self._release_unknown()
                return
            answers = self._apply(commands)
            self._failures = 0
            self.outage.over()
            for demand, answer in zip(claiming, answers[own:], strict=True):
                assert isinstance(answer, Claimed | TowpathError)
                demand.taken(answer)
        except TowpathError as error:
            self._fail_demands(claiming, error)
            self._fail(batch, error)
            return
        except BaseException:
            self._fail_demands(claiming, LedgerError())
            self._put_back(batch)
            raise
        deliver(batch, answers)
        if self._claims.read_due:
            self._release_unknown()

    def _release_unknown(self) -> None:
        """Release the claims of a batch with a lost reply. If the ledger cannot be read now, a later batch
        retries."""
        with contextlib.suppress(TowpathError):
            if releases := self._claims.releases():
                log.warning("released %d claims: the ledger's reply to the claim was lost", len(releases))
                self.post(releases, ignore)

    def _add_claims(self, commands: list[Command]) -> list[Demand]:
        """Add the claims of the standing demand; return the demands that claim."""
        with self._lock:
            demands = list(self._demands)
        claims = [(demand, claim) for demand in demands if (claim := demand.wanted()) is not None]
        commands += [claim for _, claim in claims]
        return [demand for demand, _ in claims]

    @staticmethod
    def _fail_demands(demands: Sequence[Demand], error: TowpathError) -> None:
        for demand in demands:
            demand.taken(error)

    def _apply(self, commands: Sequence[Command]) -> list[Answer]:
        started = time.monotonic()
        try:
            self._applying, self._commands = threading.get_ident(), commands
            answers = self._ledger.apply(commands)
        except BaseException:
            self._claims.failed(self._own(commands))
            raise
        finally:
            self._applying, self._commands = None, ()
            self._batches += 1
        self.batch_seconds = time.monotonic() - started
        self._claims.applied(self._own(commands), self._own(answers))
        if feedback.has_listeners(self.bus):
            feedback.publish(self.bus, commands, answers, self.batch_seconds)
        return answers

    def _own(self, values: Sequence[T]) -> Sequence[T]:
        """Of the commands of a batch, or their answers: without those of clients."""
        if not self._has_foreign:
            return values
        own: list[T] = []
        at = 0
        for pending in self.batch:
            end = at + len(pending.commands)
            if type(pending) is not PendingForeign:
                own += values[at:end]
            at = end
        return [*own, *values[at:]]

    def _fail(self, batch: Sequence[Pending], error: TowpathError) -> None:
        commands = sum([len(pending.commands) for pending in batch])
        if error.retryable:
            self._failures += 1
            self.outage.noticed(error, 1)
        else:
            log.warning("a batch of %d commands failed: %s", commands, error)
        retried = [pending for pending in batch if pending.retried and error.retryable]
        others = [pending for pending in batch if not (pending.retried and error.retryable)]
        if self.bus.wants(BatchFailed):
            self.bus.publish(BatchFailed(commands, str(error), error.retryable))
        if error.fatal:
            # Also the demands without a claim in this batch: they would wait for ever.
            with self._lock:
                demands = list(self._demands)
            self._fail_demands(demands, error)
        self._put_back(retried)
        deliver(others, [error] * sum([len(pending.commands) for pending in others]))

    def _run(self) -> None:
        queue = self._queue
        while True:
            with self._lock:
                while not (queue.early or queue.later or queue.progress or self._kicked or self._closing):
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
                    # A defect. If this thread ended, no caller would ever get a reply.
                    self._failures += 1
                    log.exception("internal error in the committer; the batch is retried")
                if self._closing and self._failures >= len(PAUSES):
                    self._give_up()
                    return

    def _give_up(self) -> None:
        """The ledger stays unavailable while the committer closes: fail all waiting callers."""
        with self._lock:
            left = self._queue.clear()
        deliver(left, [LedgerClosed(path="the engine")] * sum([len(pending.commands) for pending in left]))
