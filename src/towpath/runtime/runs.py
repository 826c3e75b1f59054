"""A handler that runs, and how it ended on its way to the ledger."""

from __future__ import annotations

import asyncio
import logging
import time

from towpath.core.checks import SECOND
from towpath.core.commands import Settle, Settled
from towpath.core.job import Claim, Job, Outcome, Reason, Retry, State
from towpath.errors import Refused
from towpath.events import JobSettled
from towpath.runtime.office import Attempt

log = logging.getLogger("towpath.worker")


class Run:
    """A handler that is running, or was told to stop and still is."""

    __slots__ = ("asked", "attempt", "claim", "late", "over", "started", "task", "timer")

    def __init__(self, claim: Claim, attempt: Attempt) -> None:
        self.claim = claim
        self.attempt = attempt
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = time.monotonic()
        self.asked: Reason | None = None
        self.late = False
        self.over = False


class Ended:
    """How an attempt ended, on its way to the ledger. `started` is None where no handler was called."""

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


class TimedOut(Exception):
    """The handler ran longer than its task allows."""


class Stopped(Exception):
    """The handler was told to stop: canceled, superseded, or its group aborted."""


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
    return Retry(delay=SECOND, error=str(refusal)) if not isinstance(outcome, Retry) else Retry(outcome.delay, str(refusal))
