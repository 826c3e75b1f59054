"""The history of a job: the ends of its last attempts that did not end done, and the decision of a person."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from towpath.core.commands import Resolve
from towpath.core.job import DONE, FAILED, Job, Reason, Word
from towpath.core.lifecycle import Attempted, Change


class AttemptOutcome(Word):
    """How an attempt ended that did not end done. A timeout is `retried` or `failed`; the error names the
    timeout."""

    RETRIED = "retried"
    SNOOZED = "snoozed"
    RELEASED = "released"
    REFUSED = "refused"
    LOST = "lost"
    FAILED = "failed"
    CANCELED = "canceled"
    SUPERSEDED = "superseded"
    MARKED = "marked"
    SKIPPED = "skipped"


class AttemptRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt that did not end done. `counted` is False for a claim that was given back without an attempt
    (released, refused): the next claim has the same number. `marked` and `skipped` are no attempts, but the
    decision of a person: `owner` is the person, `error` the reason."""

    number: int
    counted: bool
    started_at: int
    ended_at: int
    owner: str
    outcome: AttemptOutcome
    error: str | None


HISTORY = 20
"""The number of attempts of a job in its history: the last ones."""
_OUTCOMES: Mapping[Reason, AttemptOutcome] = {
    Reason.RETRY: AttemptOutcome.RETRIED,
    Reason.SNOOZED: AttemptOutcome.SNOOZED,
    Reason.RELEASED: AttemptOutcome.RELEASED,
    Reason.REFUSED: AttemptOutcome.REFUSED,
    Reason.SUPERSEDED: AttemptOutcome.SUPERSEDED,
}


def attempt_outcome(job: Attempted, change: Change) -> AttemptOutcome:
    """How the attempt of a running job ended that did not end done."""
    if change.losses > job.losses:
        return AttemptOutcome.LOST
    if change.state is FAILED:
        return AttemptOutcome.FAILED
    return _OUTCOMES.get(change.reason, AttemptOutcome.CANCELED)


def attempt_record(job: Job, change: Change, error: str | None, now: int) -> AttemptRecord:
    """The end of the attempt of a running job, for its history. Not for an attempt that ended done."""
    return AttemptRecord(
        number=job.attempts,
        counted=change.attempts == job.attempts,
        started_at=job.started_at or 0,
        ended_at=now,
        owner=job.owner or "",
        outcome=attempt_outcome(job, change),
        error=error,
    )


Histories = dict[int, tuple[AttemptRecord, ...]]
"""By seq of a job: its last attempts that did not end done, oldest first."""


def end_attempt(histories: Histories, job: Job, change: Change, error: str | None, now: int) -> None:
    """Keep the end of the attempt of a running job, unless it ended done. A claim that was given back without
    an attempt is replaced by the next one with the same number: a job that no worker can run keeps the ends
    of its attempts."""
    if change.state is not DONE:
        keep_attempt(histories, job.seq, attempt_record(job, change, error, now))


def keep_attempt(histories: Histories, seq: int, new: AttemptRecord) -> None:
    place, first = (new.number, new.counted), new.number - HISTORY + 1
    kept = [old for old in histories.get(seq, ()) if (old.number, old.counted) != place]
    histories[seq] = (*[old for old in kept if old.number >= first], new)


def resolution(job: Job, command: Resolve, now: int) -> AttemptRecord:
    """The decision of a person about a job that does not run, for its history."""
    outcome = AttemptOutcome(command.outcome)
    return AttemptRecord(job.attempts + 1, False, now, now, command.by, outcome, command.why)


def may_have_history(job: Job) -> bool:
    """Whether a claim of the job may have ended other than done, or a person made it done. The fence counts
    the claims."""
    return job.fence > (job.state is DONE) or (job.state is DONE and job.reason is not Reason.NONE)
