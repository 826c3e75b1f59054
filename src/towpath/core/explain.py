"""Why a job does not run: the one reason, decided from facts that a ledger reads."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from towpath.core.breaker import heard
from towpath.core.checks import FOREVER, SECOND
from towpath.core.commands import GroupState
from towpath.core.job import FINISHED, SUSPECT, Job, Reason, State
from towpath.core.views import GroupView, PartView, QueueView
from towpath.escapes import escape


class GateName(StrEnum):
    FINISHED = "finished"
    RUNNING = "running"
    WAITS = "waits"
    UNSEALED = "unsealed"
    GROUP_PAUSED = "group-paused"
    SCHEDULED = "scheduled"
    EXPIRED = "expired"
    QUEUE_PAUSED = "queue-paused"
    QUEUE_HELD = "queue-held"
    QUEUE_RATE = "queue-rate"
    QUEUE_CAP = "queue-cap"
    PART_PAUSED = "part-paused"
    PART_HELD = "part-held"
    PART_RATE = "part-rate"
    PART_CAP = "part-cap"
    BREAKER = "breaker"
    SUSPECT = "suspect"
    NEXT = "next"
    NO_WORKER = "no-worker"
    WORKERS_PAUSED = "workers-paused"
    LANE_PAUSED = "lane-paused"
    LIMIT = "limit"
    BUSY = "busy"


OF_WORKERS = frozenset(
    [GateName.NO_WORKER, GateName.WORKERS_PAUSED, GateName.LANE_PAUSED, GateName.LIMIT, GateName.BUSY]
)
"""Gates that depend on workers and not on the ledger: see `core.fleet`."""


class Explanation(msgspec.Struct, frozen=True):
    """`str()` returns one sentence. `by` names the first few of the `count` jobs or groups that hold the job
    back."""

    id: str
    gate: GateName
    sentence: str
    by: tuple[str, ...] = ()
    count: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "sentence", escape(self.sentence))

    def __str__(self) -> str:
        return self.sentence


class JobFacts(msgspec.Struct, kw_only=True):
    """The facts that `explain` needs. A ledger reads only the facts that matter in the job's state."""

    job: Job
    queue: QueueView
    part: PartView | None = None
    open_jobs: tuple[str, ...] = ()
    open_groups: tuple[str, ...] = ()
    group: GroupView | None = None
    holders: tuple[str, ...] = ()
    """The running jobs that fill the cap (of the queue if it is full, else of the part), the first few."""
    ahead: int = 0
    """The ready jobs before this one, counted up to `AHEAD`."""
    culprit: Job | None = None
    """For a job that ended with the reason `dependency`: the first job to end that caused it and had another
    reason itself."""


SHOWN = 5
"""The number of ids that a sentence names."""
AHEAD = 1000
"""Jobs ahead are counted up to this number."""


def explain(facts: JobFacts, now: int) -> Explanation:
    job = facts.job
    if job.state in FINISHED:
        why = f" ({job.reason})" if job.reason else ""
        text = f"finished: {job.state}{why} at {when(job.finished_at)}"
        if facts.culprit is None:
            return _say(job, GateName.FINISHED, text, until=job.finished_at)
        by = (facts.culprit.id,)
        return _say(job, GateName.FINISHED, f"{text}, because {blame(facts.culprit)}", by, 1, job.finished_at)
    if job.state is State.RUNNING:
        asked = f", asked to stop ({job.cancel_requested})" if job.cancel_requested else ""
        return _say(
            job,
            GateName.RUNNING,
            f"leased by {job.owner} until {when(job.lease_until)}{asked}",
            until=job.lease_until,
        )
    if job.expires_at is not None and job.expires_at <= now:
        return _say(
            job, GateName.EXPIRED, f"expired at {when(job.expires_at)} and will not run", until=job.expires_at
        )
    if job.state is State.BLOCKED:
        return _blocked(facts)
    if job.state is State.SCHEDULED and job.ready_at > now:
        said = (job.error or "").partition("\n")[0] if job.reason is Reason.REFUSED else ""
        if job.reason is Reason.LOST:
            said = f"{_suspect(job)}, so it is claimed again after a random delay"
        why = f": {said}" if said else ""
        return _say(
            job,
            GateName.SCHEDULED,
            f"scheduled ({job.reason}) until {when(job.ready_at)}{why}",
            until=job.ready_at,
        )
    return _queue_gate(facts, now) or _part_gate(facts, now) or _next(facts)


def _blocked(facts: JobFacts) -> Explanation:
    job, group, open_ = facts.job, facts.group, facts.open_jobs + facts.open_groups
    if group is None or group.state is not GroupState.OPEN:
        return _waits(job, facts, open_, job.waits)
    what = (
        f"group {group.id} is paused{_why(group.why)}" if group.paused else f"group {group.id} is not sealed"
    )
    if len(open_) == job.waits - 1 == 0:
        if not group.paused:
            return _say(job, GateName.UNSEALED, what, by=(group.id,), count=1)
        text = f"{what}; resume it with `towpath groups resume {group.id}`"
        return _say(job, GateName.GROUP_PAUSED, text, by=(group.id,), count=1)
    return _waits(job, facts, open_, job.waits - 1, f", and {what}")


def _waits(job: Job, facts: JobFacts, open_: tuple[str, ...], count: int, extra: str = "") -> Explanation:
    what = "job" if not facts.open_groups else "group" if not facts.open_jobs else "job or group"
    return _say(
        job,
        GateName.WAITS,
        f"waits for {count} {what}{'s' * (count > 1)}: {_names(open_, count)}{extra}",
        open_,
        count,
    )


def _queue_gate(facts: JobFacts, now: int) -> Explanation | None:
    job, queue = facts.job, facts.queue
    if queue.paused:
        return _say(job, GateName.QUEUE_PAUSED, f"queue {queue.name} is paused by hand{_why(queue.why)}")
    if queue.next_at > now:
        return _held(job, f"queue {queue.name}", queue, now, (GateName.QUEUE_RATE, GateName.QUEUE_HELD))
    if queue.cap is not None and queue.counts.running >= queue.cap:
        return _full(facts, f"queue {queue.name}", queue, queue.counts.running, GateName.QUEUE_CAP)
    return None


def _part_gate(facts: JobFacts, now: int) -> Explanation | None:
    job, part = facts.job, facts.part
    if part is None:
        return None
    where = f"part {part.name} of queue {part.queue}"
    if part.paused:
        return _say(job, GateName.PART_PAUSED, f"{where} is paused by hand{_why(part.why)}")
    if part.next_at > now:
        return _held(job, where, part, now, (GateName.PART_RATE, GateName.PART_HELD))
    if part.cap is not None and part.running >= part.cap:
        return _full(facts, where, part, part.running, GateName.PART_CAP)
    return None


def _held(
    job: Job, where: str, gate: QueueView | PartView, now: int, gates: tuple[GateName, GateName]
) -> Explanation:
    if (said := heard(gate.why)) is not None:
        until = "it is closed by hand" if gate.next_at >= FOREVER else when(gate.next_at)
        return _say(
            job,
            GateName.BREAKER,
            f"breaker {said.name} is open until {until} ({said.why})",
            until=gate.next_at,
        )
    # A time further ahead than one interval was set by hand: no start can move it so far.
    if gate.rate is not None and gate.next_at <= now + gate.rate.interval:
        left = (gate.next_at - now) / SECOND
        span = f"{left:.3g}" if left < 100 else f"{left:.0f}"
        why = f", {gate.why}" if gate.why else ""
        return _say(
            job,
            gates[0],
            f"rate limit of {where} ({gate.rate}{why}): next permit in {span} s",
            until=gate.next_at,
        )
    return _say(
        job, gates[1], f"{where} is held until {when(gate.next_at)}{_why(gate.why)}", until=gate.next_at
    )


def _full(
    facts: JobFacts, where: str, full: QueueView | PartView, running: int, gate: GateName
) -> Explanation:
    names = _names(facts.holders, running)
    if (said := heard(full.why)) is not None:
        allowed = f"{full.cap} probes allowed, {running} running: {names}"
        text = f"breaker {said.name} is half open ({said.why}): {allowed}"
        return _say(facts.job, GateName.BREAKER, text, facts.holders, running)
    reached = f"reached by {names}" if running else "allows no job to run"
    why = f" ({full.why})" if full.why else ""
    return _say(facts.job, gate, f"cap {full.cap} of {where}{why} {reached}", facts.holders, running)


def _next(facts: JobFacts) -> Explanation:
    if facts.job.losses >= SUSPECT:
        where = place(facts.ahead, facts.queue.name)
        text = f"{where}: {_suspect(facts.job)}, and a worker runs one suspect at a time"
        return _say(facts.job, GateName.SUSPECT, text, count=facts.ahead)
    now = ": the next claim takes it" if facts.ahead == 0 else ""
    return _say(facts.job, GateName.NEXT, place(facts.ahead, facts.queue.name) + now, count=facts.ahead)


def _suspect(job: Job) -> str:
    return f"its lease was lost {job.losses} times, which makes it a suspect"


def place(ahead: int, queue: str) -> str:
    """The position of a ready job in its queue."""
    return f"ready, {f'{at_least(ahead)} ahead of it' if ahead else 'first'} in queue {queue}"


def at_least(ahead: int) -> str:
    return f"{ahead:,}{' or more' if ahead >= AHEAD else ''}"


def blame(culprit: Job) -> str:
    """How the culprit ended, with the first line of its error."""
    kind = f" ({culprit.kind})" if culprit.kind else ""
    said = (culprit.error or "").partition("\n")[0]
    ended = "failed" if culprit.state is State.FAILED else f"was {culprit.state}"
    return f"job {culprit.id}{kind} {ended} ({culprit.reason}){_why(said)}"


def _say(
    job: Job, gate: GateName, text: str, by: tuple[str, ...] = (), count: int = 0, until: int | None = None
) -> Explanation:
    return Explanation(job.id, gate, f"job {job.id}: {text}", by[:SHOWN], count, until)


def _names(ids: tuple[str, ...], count: int) -> str:
    more = count - min(len(ids), SHOWN)
    return ", ".join(ids[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _why(why: str | None) -> str:
    return f": {why}" if why else ""


def when(at: int | None) -> str:
    """A ledger time as ISO 8601 text in UTC."""
    if at is None:
        return "an unknown time"
    return (
        datetime.fromtimestamp(at / 1_000_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
