"""How attempts end on their way to the ledger, and what the log says of it."""

from __future__ import annotations

import logging

from towpath.core.checks import SECOND
from towpath.core.commands import Settle, Settled
from towpath.core.job import Job, Outcome, Retry, State
from towpath.errors import Refused
from towpath.events import JobSettled

log = logging.getLogger("towpath.worker")


class Ended:
    """How an attempt ended. `started` is None where no handler was called."""

    __slots__ = ("at", "job", "settle", "started")

    def __init__(self, settle: Settle, job: Job, at: float = 0.0, started: float | None = None) -> None:
        self.settle = settle
        self.job = job
        self.at = at
        self.started = started

    def event(self, reply: Settled) -> JobSettled:
        job, outcome = self.job, self.settle.outcome
        spent = 0.0 if self.started is None else self.at - self.started
        error = getattr(outcome, "error", None)
        name = str(type(outcome).__struct_config__.tag)
        return JobSettled(job.kind, job.queue, reply.state, name, max(0.0, spent), job.attempts, job.id, error)


def tell(job: Job, outcome: Outcome, reply: Settled) -> None:
    """Nothing dies silently: failures are in the log, with the first line of what was said."""
    said = (getattr(outcome, "error", None) or "").partition("\n")[0]
    if reply.state is State.FAILED:
        log.error("job %s (%s) failed for good at attempt %d: %s", job.id, job.kind, job.attempts, said)
    elif isinstance(outcome, Retry):
        log.info("job %s (%s) failed at attempt %d and will be tried again: %s", job.id, job.kind, job.attempts, said)
    elif reply.state is State.CANCELED:
        log.info("job %s (%s) was canceled: %s", job.id, job.kind, said)


def failed(outcome: Outcome, refusal: Refused) -> Outcome:
    """The outcome of an attempt whose own was refused."""
    return Retry(delay=SECOND, error=str(refusal)) if not isinstance(outcome, Retry) else Retry(outcome.delay, str(refusal))
