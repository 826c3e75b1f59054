"""A handler that runs, and why it may be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from towpath.core.commands import MAX_BULK, Settle, Settled
from towpath.core.job import Claim, Done, Job, Outcome, Reason, Retry, State
from towpath.errors import LedgerClosed, LostClaim, Refused, TowpathError
from towpath.escapes import get_logger
from towpath.events import JobSettled, LeaseLost
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine
from towpath.runtime.worker.executors import ProcessPool
from towpath.runtime.worker.options import EndedClaim, RunnableAttempt
from towpath.runtime.worker.prefetch import ClaimCounts


class HandlerRun:
    """A handler that is running, or was told to stop and still is."""

    __slots__ = ("asked", "attempt", "claim", "late", "over", "started", "stuck", "task", "timer")

    def __init__(self, claim: Claim, attempt: RunnableAttempt) -> None:
        self.claim = claim
        self.attempt = attempt
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = time.monotonic()
        self.asked: Reason | None = None
        self.late = False
        self.over = False
        self.stuck = False
        """It did not stop within the grace time after its timeout."""


class TimedOut(Exception):
    """The handler ran longer than its task allows."""


def run_in_process(run: HandlerRun, processes: ProcessPool | None) -> Settle:
    """Run the handler in another process; what it says at its end."""
    assert processes is not None
    answer: list[Settle] = []

    def heard(message: bytes) -> bool:
        settle = run.attempt.heard(message)
        if settle is not None:
            answer.append(settle)
        return settle is not None

    processes.run((run.claim.id, run.claim.fence), run.attempt.request(), heard)
    return answer[0]


async def wait_until(event: asyncio.Event, so: Callable[[], bool], seconds: float) -> None:
    """Wait for the event unless it is `so` already, at most this long."""
    event.clear()
    if not so():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)


log = get_logger("towpath.worker")

MAX_SETTLES = min(500, MAX_BULK)
"""Settles that stay together: a batch has room for others beside them."""


class SettleSender:
    """`add` and `send` belong to the worker's loop; `call` calls a function there, from the committing
    thread. `answered` is called in the committing thread after every hand-over that was answered, with the
    seconds it took."""

    def __init__(
        self,
        engine: Engine,
        account: ClaimCounts,
        call: Callable[..., None],
        answered: Callable[[float], None],
        failed: Callable[[TowpathError], None],
    ) -> None:
        self._engine = engine
        self._account = account
        account.leaving = lambda: engine.committer.settles_in_batch(self)
        self._call = call
        self._on_answers = answered
        self._failed = failed
        self._ends: list[EndedClaim] = []
        self._added = 0
        self._called = self._called_and_settled = 0
        """The same for claims whose handler was called."""
        self._lost: set[tuple[str, int]] = set()
        """Claims whose loss was told before they were settled: it is told once."""

    @property
    def unsettled(self) -> int:
        """Claims that ended and whose settle is not answered."""
        return self._added - self._account.settled

    @property
    def ended(self) -> int:
        """Those of them whose handler was called: a killed process has these run again."""
        return self._called - self._called_and_settled

    @property
    def waiting(self) -> Sequence[EndedClaim]:
        """Those that were not handed over yet."""
        return self._ends

    def add(
        self, settle: Settle, job: Job, spent: float = 0.0, attempt: RunnableAttempt | None = None
    ) -> None:
        self._added += 1
        if attempt is not None:
            self._called += 1
        self._ends.append((settle, job, spent, attempt))

    def send(self) -> None:
        ends, self._ends = self._ends, []
        self._engine.leases.drop_all([(settle.id, settle.fence) for settle, _, _, _ in ends])
        for start in range(0, len(ends), MAX_SETTLES):
            self._post(ends[start : start + MAX_SETTLES])

    def lost(self, job: Job) -> None:
        """The lease of a job was lost while it ran."""
        self._lost.add((job.id, job.fence))
        self._tell_lost(job)

    def _tell_lost(self, job: Job) -> None:
        if self._engine.bus.wants(LeaseLost):
            self._engine.bus.publish(LeaseLost(job.id, job.kind, job.queue, job.attempts, job.owner or ""))

    def _post(self, ends: Sequence[EndedClaim], again: bool = False) -> None:
        called = len(ends) if again else sum([attempt is not None for _, _, _, attempt in ends])
        heard = partial(self._heard, ends, called, time.monotonic())
        try:
            self._engine.committer.post_settles([settle for settle, _, _, _ in ends], heard, self)
        except LedgerClosed as error:
            self._account.settled += len(ends)
            self._called_and_settled += called
            self._failed(error)

    def _heard(
        self, ends: Sequence[EndedClaim], called: int, posted: float, replies: Sequence[Reply]
    ) -> None:
        """In the committing thread: what became of them."""
        loud = self._engine.bus.wants(JobSettled)
        again: list[EndedClaim] = []
        for (settle, job, spent, attempt), reply in zip(ends, replies, strict=True):
            if type(reply) is Settled:
                if type(settle.outcome) is not Done:
                    _log_settled(job, settle.outcome, reply)
                if loud:
                    self._engine.bus.publish(_event(settle, job, spent, reply))
            elif isinstance(reply, Refused) and not isinstance(reply, LostClaim) and attempt is not None:
                # What the handler wanted along with its end was refused: the attempt failed. A second refusal
                # is left to the lease.
                again.append((attempt.refused(reply), job, spent, None))
            else:
                self._troubled(settle, job, reply)
        # Replies come one bunch after the other, under the commit lock.
        self._account.settled += len(ends) - len(again)
        self._called_and_settled += called - len(again)
        if again:
            self._call(self._post, again, True)
        self._on_answers(time.monotonic() - posted)

    def _troubled(self, settle: Settle, job: Job, reply: Reply) -> None:
        if isinstance(reply, LostClaim):
            log.warning(
                "job %s: its lease was lost before it was settled; somebody else has it or had it", settle.id
            )
            if (settle.id, settle.fence) not in self._lost:
                self._tell_lost(job)
            self._lost.discard((settle.id, settle.fence))
        elif isinstance(reply, TowpathError):
            log.error("job %s could not be settled, its lease will run out: %s", settle.id, reply)
            self._failed(reply)


def _event(settle: Settle, job: Job, spent: float, reply: Settled) -> JobSettled:
    outcome: Any = settle.outcome
    error = getattr(outcome, "error", None)
    name = str(type(outcome).__struct_config__.tag)
    return JobSettled(
        job.kind, job.queue, reply.state, name, max(0.0, spent), job.attempts, job.id, error, job.group
    )


def _log_settled(job: Job, outcome: Outcome, reply: Settled) -> None:
    """Nothing dies silently: failures are in the log, with the first line of what was said."""
    said = (getattr(outcome, "error", None) or "").partition("\n")[0]
    if reply.state is State.FAILED:
        log.error("job %s (%s) failed for good at attempt %d: %s", job.id, job.kind, job.attempts, said)
    elif isinstance(outcome, Retry):
        log.info(
            "job %s (%s) failed at attempt %d and will be tried again: %s",
            job.id,
            job.kind,
            job.attempts,
            said,
        )
    elif reply.state is State.CANCELED:
        log.info("job %s (%s) was canceled: %s", job.id, job.kind, said)
