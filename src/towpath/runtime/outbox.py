"""How attempts ended, on the way to the ledger: one hand-over for all that ended in a turn of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from towpath.core.commands import MAX_BULK, Settle, Settled
from towpath.core.job import Done, Job, Outcome, Retry, State
from towpath.errors import LedgerClosed, LostClaim, Refused, TowpathError
from towpath.escapes import get_logger
from towpath.events import JobSettled, LeaseLost
from towpath.runtime.office import Attempt, Office
from towpath.runtime.pace import Pace
from towpath.runtime.tickets import Reply

log = get_logger("towpath.worker")

AT_ONCE = min(500, MAX_BULK)
"""Settles that stay together: a batch has room for others beside them."""
Ended = tuple[Settle, Job, float, Attempt | None]
"""How a claim ended, of which job, the seconds its handler took, and the attempt: None if no handler was called, or if its own word
was refused."""


class Outbox:
    """`add` and `send` belong to the worker's loop; `call` calls a function there, from the committing thread."""

    def __init__(
        self,
        office: Office,
        pace: Pace,
        call: Callable[..., None],
        emptied: Callable[[], None],
        failed: Callable[[TowpathError], None],
    ) -> None:
        self._office = office
        self._pace = pace
        self._call = call
        self._emptied = emptied
        self._failed = failed
        self._ends: list[Ended] = []
        self._posted = self._answered = 0
        self._lost: set[tuple[str, int]] = set()
        """Claims whose loss was told before they were settled: it is told once."""

    @property
    def empty(self) -> bool:
        """Has the ledger heard of everything?"""
        return not self._ends and self._posted == self._answered

    def take_stock(self) -> int:
        """How many were not handed over yet; the pace hears of them. Once before every `send`."""
        if self._ends:
            self._pace.ended(len(self._ends), sum([spent for _, _, spent, _ in self._ends]))
        return len(self._ends)

    def add(self, settle: Settle, job: Job, spent: float = 0.0, attempt: Attempt | None = None) -> None:
        self._ends.append((settle, job, spent, attempt))

    def send(self) -> None:
        ends, self._ends = self._ends, []
        self._office.leases.drop_all([(settle.id, settle.fence) for settle, _, _, _ in ends])
        for start in range(0, len(ends), AT_ONCE):
            self._post(ends[start : start + AT_ONCE])

    def lost(self, job: Job) -> None:
        """The lease of a job was lost while it ran."""
        self._lost.add((job.id, job.fence))
        self._tell_lost(job)

    def _tell_lost(self, job: Job) -> None:
        if self._office.bus.wants(LeaseLost):
            self._office.bus.publish(LeaseLost(job.id, job.kind, job.queue, job.attempts, job.owner or ""))

    def _post(self, ends: Sequence[Ended]) -> None:
        self._posted += len(ends)
        heard = partial(self._heard, ends, time.monotonic())
        try:
            self._office.committer.post([settle for settle, _, _, _ in ends], heard)
        except LedgerClosed as error:
            self._answered += len(ends)
            self._failed(error)

    def _heard(self, ends: Sequence[Ended], posted: float, replies: Sequence[Reply]) -> None:
        """In the committing thread: what became of them."""
        self._pace.committed(time.monotonic() - posted)
        loud = self._office.bus.wants(JobSettled)
        for (settle, job, spent, attempt), reply in zip(ends, replies, strict=True):
            if type(reply) is Settled:
                if type(settle.outcome) is not Done:
                    _tell(job, settle.outcome, reply)
                if loud:
                    self._office.bus.publish(_event(settle, job, spent, reply))
            else:
                self._troubled((settle, job, spent, attempt), reply)
        # Replies come one bunch after the other, under the commit lock.
        self._answered += len(ends)
        if self._posted == self._answered:
            self._emptied()

    def _troubled(self, ended: Ended, reply: Reply) -> None:
        settle, job, spent, attempt = ended
        if isinstance(reply, LostClaim):
            log.warning("job %s: its lease was lost before it was settled; somebody else has it or had it", settle.id)
            if (settle.id, settle.fence) not in self._lost:
                self._tell_lost(job)
            self._lost.discard((settle.id, settle.fence))
        elif isinstance(reply, Refused) and attempt is not None:
            # What the handler wanted along with its end was refused: the attempt failed. A second refusal is left to the lease.
            self._call(self._post, [(attempt.refused(reply), job, spent, None)])
        elif isinstance(reply, TowpathError):
            log.error("job %s could not be settled, its lease will run out: %s", settle.id, reply)
            self._failed(reply)


def _event(settle: Settle, job: Job, spent: float, reply: Settled) -> JobSettled:
    outcome: Any = settle.outcome
    error = getattr(outcome, "error", None)
    name = str(type(outcome).__struct_config__.tag)
    return JobSettled(job.kind, job.queue, reply.state, name, max(0.0, spent), job.attempts, job.id, error, job.group)


def _tell(job: Job, outcome: Outcome, reply: Settled) -> None:
    """Nothing dies silently: failures are in the log, with the first line of what was said."""
    said = (getattr(outcome, "error", None) or "").partition("\n")[0]
    if reply.state is State.FAILED:
        log.error("job %s (%s) failed for good at attempt %d: %s", job.id, job.kind, job.attempts, said)
    elif isinstance(outcome, Retry):
        log.info("job %s (%s) failed at attempt %d and will be tried again: %s", job.id, job.kind, job.attempts, said)
    elif reply.state is State.CANCELED:
        log.info("job %s (%s) was canceled: %s", job.id, job.kind, said)
