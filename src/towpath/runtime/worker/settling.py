"""The settles of a worker: posted in batches, counted until they are committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from towpath.core.commands import MAX_BULK, Settle, Settled
from towpath.core.job import Done, Job
from towpath.errors import LedgerClosed, LostClaim, Refused, TowpathError
from towpath.escapes import get_logger
from towpath.events import JobSettled, LeaseLost
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine
from towpath.runtime.worker.job_log import JobLog
from towpath.runtime.worker.options import EndedClaim, RunnableAttempt
from towpath.runtime.worker.prefetch import ClaimCounts

log = get_logger("towpath.worker")

OnEnd = Callable[[Settle, Job, Settled, BaseException | None], None]
MAX_SETTLES = min(500, MAX_BULK)
"""Settles that are posted together: a batch has room for others beside them."""


class SettleSender:
    """`add` and `send` belong to the worker's loop; `call` calls a function there, from the committing
    thread. `committed` is called in the committing thread after every post that was answered, with its
    duration in seconds. `failed` is called with the error of a settle that failed."""

    def __init__(
        self,
        engine: Engine,
        counts: ClaimCounts,
        call: Callable[..., None],
        committed: Callable[[float], None],
        failed: Callable[[TowpathError], None],
        running: Callable[[], int],
    ) -> None:
        self._engine = engine
        self.log = JobLog(lambda: self._called_and_settled, running, engine.clock.now)
        self._counts = counts
        self.ended_badly: OnEnd | None = None
        """Called in the committing thread for each stored outcome that is not a success."""
        counts.leaving = lambda: engine.committer.settles_in_batch(self)
        self._call = call
        self._on_committed = committed
        self._failed = failed
        self._waiting: list[EndedClaim] = []
        self._added = 0
        self._called = self._called_and_settled = 0
        """Claims with a call of the handler: the number added, and the number settled."""
        self._lost: set[tuple[str, int]] = set()
        """Claims with a loss that was published before their settle: it is published once."""

    @property
    def unsettled(self) -> int:
        """Claims that ended without a committed settle."""
        return self._added - self._counts.settled

    @property
    def ended(self) -> int:
        """The unsettled claims with a call of the handler: if the process is killed, these jobs run again."""
        return self._called - self._called_and_settled

    @property
    def waiting(self) -> Sequence[EndedClaim]:
        """The settles that are not posted yet."""
        return self._waiting

    def add(
        self, settle: Settle, job: Job, spent: float = 0.0, attempt: RunnableAttempt | None = None
    ) -> None:
        self._added += 1
        if attempt is not None:
            self._called += 1
        self._waiting.append((settle, job, spent, attempt))

    def send(self) -> None:
        ends, self._waiting = self._waiting, []
        self._engine.leases.drop_all([(settle.id, settle.fence) for settle, _, _, _ in ends])
        for start in range(0, len(ends), MAX_SETTLES):
            self._post(ends[start : start + MAX_SETTLES])

    def lost(self, job: Job) -> None:
        """The lease of a job was lost while it ran."""
        self._lost.add((job.id, job.fence))
        self._publish_lost(job)

    def _publish_lost(self, job: Job) -> None:
        if self._engine.bus.wants(LeaseLost):
            self._engine.bus.publish(LeaseLost(job.id, job.kind, job.queue, job.attempts, job.owner or ""))

    def _post(self, ends: Sequence[EndedClaim], again: bool = False) -> None:
        called = len(ends) if again else sum([attempt is not None for _, _, _, attempt in ends])
        replied = partial(self._replied, ends, called, again, time.monotonic())
        try:
            self._engine.committer.post_settles([settle for settle, _, _, _ in ends], replied, self)
        except LedgerClosed as error:
            self._counts.settled += len(ends)
            self._called_and_settled += called
            self._failed(error)

    def _replied(
        self, ends: Sequence[EndedClaim], called: int, again: bool, posted: float, replies: Sequence[Reply]
    ) -> None:
        """In the committing thread."""
        publishes, lines = self._engine.bus.wants(JobSettled), self.log.lines
        refused: list[EndedClaim] = []
        for (settle, job, spent, attempt), reply in zip(ends, replies, strict=True):
            if type(reply) is Settled:
                if type(settle.outcome) is not Done:
                    error = None if attempt is None else attempt.error
                    self.log.ended(job, settle.outcome, reply, spent, error)
                    if self.ended_badly is not None:
                        self.ended_badly(settle, job, reply, error)
                elif lines:
                    self.log.done(job, spent)
                if publishes:
                    self._engine.bus.publish(_event(settle, job, spent, reply))
            elif again or attempt is None or isinstance(reply, LostClaim) or not isinstance(reply, Refused):
                self._settle_failed(settle, job, reply)
            else:
                # The ledger refused a part of the settle, so the attempt failed. After a second refusal the
                # lease expires.
                refused.append((attempt.refused(reply), job, spent, attempt))
        # Replies are delivered one post after the other, under the commit lock.
        self._counts.settled += len(ends) - len(refused)
        self._called_and_settled += called - len(refused)
        if refused:
            self._call(self._post, refused, True)
        self._on_committed(time.monotonic() - posted)

    def _settle_failed(self, settle: Settle, job: Job, reply: Reply) -> None:
        if isinstance(reply, LostClaim):
            log.warning(
                "job %s (%s): its lease was lost before it was settled; it has been or will be run again",
                settle.id,
                job.kind,
            )
            if (settle.id, settle.fence) not in self._lost:
                self._publish_lost(job)
            self._lost.discard((settle.id, settle.fence))
        elif isinstance(reply, TowpathError):
            log.error(
                "job %s (%s) could not be settled and will run again when its lease expires: %s",
                settle.id,
                job.kind,
                reply,
            )
            self._failed(reply)


def _event(settle: Settle, job: Job, spent: float, reply: Settled) -> JobSettled:
    outcome: Any = settle.outcome
    error = getattr(outcome, "error", None)
    name = str(type(outcome).__struct_config__.tag)
    return JobSettled(
        job.kind, job.queue, reply.state, name, max(0.0, spent), job.attempts, job.id, error, job.group
    )
