"""The one state machine of work: which changes exist, and what an outcome does to a job.

```mermaid
stateDiagram-v2
    [*] --> blocked
    [*] --> scheduled
    [*] --> ready
    [*] --> failed
    [*] --> canceled
    blocked --> scheduled
    blocked --> ready
    blocked --> done
    blocked --> failed
    blocked --> canceled
    scheduled --> blocked
    scheduled --> ready
    scheduled --> done
    scheduled --> failed
    scheduled --> canceled
    ready --> blocked
    ready --> running
    ready --> done
    ready --> failed
    ready --> canceled
    running --> scheduled
    running --> ready
    running --> done
    running --> failed
    running --> canceled
    failed --> blocked
    failed --> scheduled
    failed --> ready
    failed --> done
    canceled --> blocked
    canceled --> scheduled
    canceled --> ready
    canceled --> done
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Protocol

import msgspec
from msgspec.structs import replace

from towpath.core import checks
from towpath.core.job import (
    BLOCKED,
    CANCELED,
    DONE,
    FAILED,
    FINISHED,
    READY,
    RUNNING,
    SCHEDULED,
    SUSPECT,
    Done,
    FailOutcome,
    Job,
    Outcome,
    Reason,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    State,
    Stop,
)

REASONS: Mapping[State, frozenset[Reason]] = {
    State.BLOCKED: frozenset({Reason.NONE, Reason.REVIVED}),
    State.SCHEDULED: frozenset(
        {
            Reason.DELAY,
            Reason.RETRY,
            Reason.SNOOZED,
            Reason.REFUSED,
            Reason.RELEASED,
            Reason.LOST,
            Reason.REVIVED,
        }
    ),
    State.READY: frozenset(
        {Reason.NONE, Reason.RETRY, Reason.SNOOZED, Reason.RELEASED, Reason.LOST, Reason.REVIVED}
    ),
    State.RUNNING: frozenset({Reason.NONE}),
    State.DONE: frozenset({Reason.NONE, Reason.MARKED, Reason.SKIPPED}),
    State.FAILED: frozenset({Reason.EXHAUSTED, Reason.FATAL, Reason.LOST, Reason.EXPIRED, Reason.DEPENDENCY}),
    State.CANCELED: frozenset(
        {
            Reason.REQUESTED,
            Reason.HANDLER,
            Reason.SUPERSEDED,
            Reason.ABORTED,
            Reason.STOPPED,
            Reason.DEPENDENCY,
        },
    ),
}
"""The reasons each state may have. The CHECK constraints of every schema are tested against this."""

TRANSITIONS: frozenset[tuple[State | None, State]] = frozenset(
    {
        *((None, to) for to in (State.BLOCKED, State.SCHEDULED, State.READY, State.FAILED, State.CANCELED)),
        *((State.BLOCKED, to) for to in (State.SCHEDULED, State.READY, *FINISHED)),
        *((State.SCHEDULED, to) for to in (State.BLOCKED, State.READY, *FINISHED)),
        *((State.READY, to) for to in (State.BLOCKED, State.RUNNING, *FINISHED)),
        *((State.RUNNING, to) for to in (State.SCHEDULED, State.READY, *FINISHED)),
        *(
            (dead, to)
            for dead in (State.FAILED, State.CANCELED)
            for to in (State.BLOCKED, State.SCHEDULED, State.READY, State.DONE)
        ),
    },
)

REFUSAL_DELAY = checks.SECOND
_NONE = Reason.NONE


class Change(msgspec.Struct, frozen=True, gc=False):
    """The change of a running job. `ready_at` is None if it stays as it is."""

    state: State
    reason: Reason
    attempts: int
    failures: int
    losses: int
    ready_at: int | None = None


class Attempted(Protocol):
    """The fields of a running job that decide its change. A ledger may read only these."""

    @property
    def attempts(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def losses(self) -> int: ...

    @property
    def max_attempts(self) -> int: ...

    @property
    def cancel_requested(self) -> Reason | None: ...


def interrupts(asked: Reason | None) -> bool:
    """Whether a stop request interrupts the handler. A job of a stopping group only does not run again."""
    return asked is not None and asked is not Reason.STOPPED


def settle(job: Attempted, outcome: Outcome, now: int) -> Change:
    """The end of an attempt. A job that was asked to stop never goes back to wait."""
    attempts, failures, losses = job.attempts, job.failures, job.losses
    if type(outcome) is Done:
        return Change(DONE, _NONE, attempts, failures, losses)
    if type(outcome) is FailOutcome:
        return Change(FAILED, Reason.FATAL, attempts, failures + 1, losses)
    if type(outcome) is Stop:
        return Change(CANCELED, job.cancel_requested or Reason.HANDLER, attempts, failures, losses)
    if type(outcome) is RetryOutcome:
        failures += 1
        if failures >= job.max_attempts and not interrupts(job.cancel_requested):
            return Change(FAILED, Reason.EXHAUSTED, attempts, failures, losses)
        return _wait(job, Reason.RETRY, outcome.delay, now, attempts, failures)
    if type(outcome) is SnoozeOutcome:
        return _wait(job, Reason.SNOOZED, outcome.delay, now, attempts, failures)
    if type(outcome) is Release:
        return _wait(job, Reason.RELEASED, outcome.delay, now, attempts - 1, failures)
    assert type(outcome) is Refuse
    return _wait(job, Reason.REFUSED, max(outcome.delay, REFUSAL_DELAY), now, attempts - 1, failures)


def _wait(job: Attempted, reason: Reason, delay: int, now: int, attempts: int, failures: int) -> Change:
    if job.cancel_requested is not None:
        return Change(CANCELED, job.cancel_requested, attempts, failures, job.losses)
    if delay:
        return Change(SCHEDULED, reason, attempts, failures, job.losses, now + delay)
    return Change(READY, reason, attempts, failures, job.losses)


def lose(job: Job, now: int) -> Change:
    """The lease ran out. Not a failure of the work, so it has a budget of its own. A suspect waits before it
    is claimed again."""
    losses = job.losses + 1
    if job.cancel_requested is not None:
        return Change(CANCELED, job.cancel_requested, job.attempts, job.failures, losses)
    if losses >= job.max_losses or job.max_attempts == 1:
        return Change(FAILED, Reason.LOST, job.attempts, job.failures, losses)
    if losses >= SUSPECT:
        return Change(
            SCHEDULED, Reason.LOST, job.attempts, job.failures, losses, now + suspect_delay(job.id, losses)
        )
    return Change(READY, Reason.LOST, job.attempts, job.failures, losses)


SUSPECT_DELAY, MAX_SUSPECT_DELAY = checks.SECOND, 300 * checks.SECOND


def suspect_delay(id: str, losses: int) -> int:
    """How long a suspect waits after a loss: up to 1 s after the second loss, twice as long after each
    further one, at most 5 min.

    Jobs that were lost together must not return at the same time. The delay is a hash of the id and the
    losses, evenly spread over the whole span, and not a random number: each ledger computes the same
    delay."""
    span = min(SUSPECT_DELAY << min(losses - SUSPECT, 32), MAX_SUSPECT_DELAY)
    return 1 + int.from_bytes(blake2b(f"{id}:{losses}".encode(), digest_size=8).digest(), "big") % span


# The records that follow from a change. Every ledger that keeps whole jobs uses these functions; the SQL of
# the others is compared with them column by column (`tests/ledger/test_rules.py`).


def take(job: Job, owner: str, lease: int, now: int) -> Job:
    """A ready job after a claim: running, with one more attempt and a higher fence, leased to `owner`."""
    return replace(
        job,
        state=RUNNING,
        reason=_NONE,
        attempts=job.attempts + 1,
        fence=job.fence + 1,
        owner=owner,
        lease_until=now + lease,
        lease_len=lease,
        started_at=now,
    )


def settled(job: Job, change: Change, outcome: Outcome) -> Job:
    """A running job after its attempt was settled; `given_back` or `ended` completes the record. An outcome
    without an error keeps the error of an earlier attempt, but a done job has none."""
    error = getattr(outcome, "error", None)
    return replace(
        job,
        attempts=change.attempts,
        failures=change.failures,
        settled_fence=job.fence,
        settled_as=change.state,
        result=outcome.result if type(outcome) is Done else job.result,
        error=None if change.state is DONE else job.error if error is None else error,
    )


def given_back(job: Job, change: Change) -> Job:
    """A running job that waits again after a settle or a lost lease."""
    return replace(
        job,
        state=change.state,
        reason=change.reason,
        attempts=change.attempts,
        failures=change.failures,
        losses=change.losses,
        ready_at=job.ready_at if change.ready_at is None else change.ready_at,
        owner=None,
        lease_until=None,
    )


def ended(job: Job, state: State, reason: Reason, now: int, queue_retention: int | None) -> Job:
    """An unfinished job that ends now."""
    return replace(
        job,
        state=state,
        reason=reason,
        finished_at=now,
        purge_at=purge_time(state, now, job.retention, queue_retention),
        waits=0,
        owner=None,
        lease_until=None,
    )


def completed(job: Job, outcome: Done, now: int, queue_retention: int | None) -> Job:
    """`settled` and `ended` of a running job that is done, as one copy of the record: the end of most jobs.
    The shared suite compares the two."""
    return replace(
        job,
        state=DONE,
        reason=_NONE,
        settled_fence=job.fence,
        settled_as=DONE,
        result=outcome.result,
        error=None,
        finished_at=now,
        purge_at=purge_time(DONE, now, job.retention, queue_retention),
        waits=0,
        owner=None,
        lease_until=None,
    )


def woken(job: Job) -> Job:
    """A scheduled job after its time has come."""
    return replace(job, state=READY, reason=job.reason if job.reason in REASONS[READY] else _NONE)


def lowered(job: Job, now: int) -> Job:
    """A blocked job with one dependency less. It wakes when none is left."""
    if job.waits > 1:
        return replace(job, waits=job.waits - 1)
    state = awaken(job.ready_at, 0, now)
    return replace(job, waits=0, state=state, reason=Reason.DELAY if state is SCHEDULED else _NONE)


def held(job: Job) -> Job:
    """A waiting job with one more thing to wait for: an open group, or a group that was reopened."""
    return replace(
        job, state=BLOCKED, reason=job.reason if job.state is BLOCKED else _NONE, waits=job.waits + 1
    )


def revived(job: Job, waits: int, now: int) -> Job:
    """A failed or canceled job that starts again with `waits` open dependencies and fresh budgets. A time to
    live that is over no longer counts."""
    return replace(
        job,
        state=awaken(job.ready_at, waits, now),
        reason=Reason.REVIVED,
        failures=0,
        losses=0,
        cancel_requested=None,
        finished_at=None,
        purge_at=None,
        expires_at=None if job.expires_at is not None and job.expires_at <= now else job.expires_at,
        waits=waits,
    )


def awaken(ready_at: int, waits: int, now: int) -> State:
    """The waiting state of a job that has `waits` open dependencies and may not run before `ready_at`."""
    if waits:
        return BLOCKED
    return SCHEDULED if ready_at > now else READY


def counter_of(state: State, reason: Reason) -> str:
    """The counter of a group in which a member with this state is."""
    if state is CANCELED and reason is Reason.SUPERSEDED:
        return "superseded"
    return state.value if state is DONE or state is FAILED or state is CANCELED else "unfinished"


def group_outcome(failed: int, canceled: int, aborting: bool) -> State:
    """The outcome of a group that closes with so many failed and canceled members."""
    if failed:
        return FAILED
    return CANCELED if canceled or aborting else DONE


RETENTION = 7 * checks.DAY
"""The time that done and canceled jobs are kept unless the queue or the job has its own retention."""


def purge_time(
    state: State, finished_at: int, job_retention: int | None, queue_retention: int | None
) -> int | None:
    """The time at which a finished job may be deleted; None for a dead letter, which is deleted only by
    hand."""
    if state is FAILED:
        return None
    if job_retention is not None:
        return finished_at + job_retention
    return finished_at + (RETENTION if queue_retention is None else queue_retention)


def inconsistencies(job: Job) -> Iterator[str]:
    """The fields of a job that contradict its state, as ends of a sentence that begins with the job."""
    if job.reason not in REASONS[job.state]:
        yield f"is {job.state} for the reason {job.reason!s}"
    if job.settled_fence > job.fence:
        yield "is settled with a fence that it never had"
    if job.attempts < 0:
        yield "has a negative number of attempts"
    leased = (job.owner is not None, job.lease_until is not None)
    if job.state is not RUNNING and leased != (False, False):
        yield f"is {job.state} and has an owner or a lease"
    if job.state is RUNNING and (
        leased != (True, True) or job.fence < 1 or job.lease_len is None or job.started_at is None
    ):
        yield "runs without owner, lease or fence"
    if (job.finished_at is not None) != (job.state in FINISHED):
        yield f"is {job.state} with finished_at {job.finished_at}"
    if (job.purge_at is not None) != (job.state is DONE or job.state is CANCELED):
        yield f"is {job.state} with purge_at {job.purge_at}"


LEAST = checks.SECOND // 2
"""Shorter jumps are not recorded: a lease of less than a second is not protected."""
KEPT = 16
"""The number of recorded jumps: the largest ones."""


class Jumps:
    """Records clock jumps, from the time of every `apply`. Jobs must not be reaped because a process slept or
    a clock was set."""

    __slots__ = ("_jumps", "_last")

    def __init__(self) -> None:
        self._last: int | None = None
        self._jumps: list[tuple[int, int]] = []

    def note(self, now: int, passed: int = 0) -> None:
        """Record the ledger time `now`. `passed` is the time since the last call on a monotonic clock, if the
        caller has one. The advance of the ledger time beyond it is a jump; the first call records none."""
        last, self._last = self._last, now
        if last is not None and now - last - passed > LEAST:
            self.add(now, now - last - passed)

    def add(self, at: int, size: int) -> None:
        """Record a jump of `size` to the time `at`."""
        jumps = [jump for jump in self._jumps if jump[1] + checks.DAY > at]
        jumps.append((size, at))
        self._jumps = sorted(jumps)[-KEPT:]

    def until(self, lease_len: int, lease_until: int) -> int:
        """The time before which a job with this lease is not reaped; 0 if no jump protects it. A jump
        protects only the leases that it ran over: a lease that had ended before was lost anyway."""
        return max(
            (at + lease_len for size, at in self._jumps if 2 * size > lease_len and lease_until > at - size),
            default=0,
        )

    def protects(self, lease_len: int, lease_until: int, now: int) -> bool:
        return now < self.until(lease_len, lease_until)

    def reap_time(self, job: Job, now: int) -> int:
        """The time at which a running job is lost: after its lease, or later if a jump protects it."""
        lease_len, lease_until = job.lease_len or 0, job.lease_until or 0
        protected_until = self.until(lease_len, lease_until)
        return max(lease_until + 1, protected_until if now < protected_until else 0)

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """(time, size) of the recorded jumps."""
        return [(at, size) for size, at in self._jumps]
