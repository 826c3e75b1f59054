"""Why a job does not run: the one reason, decided from facts that a ledger reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from towpath.core.breaker import parse_reason
from towpath.core.checks import FOREVER, SECOND, optional_utc, utc
from towpath.core.commands import GroupState
from towpath.core.finish import Relations, culprit, open_groups
from towpath.core.job import FINISHED, SUSPECT, Job, Reason, State
from towpath.core.limits import interval_of
from towpath.core.views import GroupView, PartView, QueueView, Readable
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


@dataclass(frozen=True, slots=True)
class Explanation(Readable):
    """`str()` returns one sentence. `by` names the first few of the `count` jobs or groups that hold the job
    back."""

    id: str
    gate: GateName
    sentence: str
    by: tuple[str, ...] = ()
    count: int = 0
    until: datetime | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", escape(self.sentence))

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
UNKNOWN_KIND = "no task here is called "
"""The first words of the error of a job that was refused because a worker has no such task."""


def job_facts(
    relations: Relations,
    job: Job,
    gates: tuple[QueueView, PartView | None],
    running: Iterable[Job],
    ahead: int,
) -> JobFacts:
    """The facts about a job of a ledger that keeps whole jobs. `gates` are its queue and its part, `running`
    the running jobs of its queue by seq, `ahead` the number of ready jobs before it."""
    queue, part = gates
    queue_full = queue.cap is not None and queue.counts.running >= queue.cap
    part_full = part is not None and part.cap is not None and part.running >= part.cap
    holders = [each.id for each in running if queue_full or (part_full and each.part == job.part)]
    needed = [relations.jobs[src] for src, _ in relations.dependencies(job.seq)]
    return JobFacts(
        job=job,
        queue=queue,
        part=part,
        open_jobs=tuple([each.id for each in needed if each.state not in FINISHED][:SHOWN]),
        open_groups=tuple(open_groups(relations, job.seq)[:SHOWN]),
        group=None if job.group is None else relations.group_view(job.group),
        holders=tuple(holders[:SHOWN]),
        ahead=min(AHEAD, ahead),
        culprit=culprit(relations, job),
    )


def explain(facts: JobFacts, now: int) -> Explanation:
    job = facts.job
    if job.state in FINISHED:
        why = f" ({job.reason})" if job.reason else ""
        text = f"finished: {job.state}{why} at {when(job.finished_at)}"
        if facts.culprit is None:
            return _explanation(job, GateName.FINISHED, text, until=job.finished_at)
        by = (facts.culprit.id,)
        return _explanation(
            job, GateName.FINISHED, f"{text}, because {cause_of(facts.culprit)}", by, 1, job.finished_at
        )
    if job.state is State.RUNNING:
        asked = f", asked to stop ({job.cancel_requested})" if job.cancel_requested else ""
        return _explanation(
            job,
            GateName.RUNNING,
            f"leased by {job.owner} until {when(job.lease_until)}{asked}",
            until=job.lease_until,
        )
    if job.expires_at is not None and job.expires_at <= now:
        return _explanation(
            job, GateName.EXPIRED, f"expired at {when(job.expires_at)} and will not run", until=job.expires_at
        )
    if job.state is State.BLOCKED:
        return _blocked(facts)
    if job.state is State.SCHEDULED and job.ready_at > now:
        cause = (job.error or "").partition("\n")[0] if job.reason is Reason.REFUSED else ""
        if job.reason is Reason.LOST:
            cause = f"{_suspect(job)}, so it is claimed again after a random delay"
        why = f": {cause}" if cause else ""
        return _explanation(
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
            return _explanation(job, GateName.UNSEALED, what, by=(group.id,), count=1)
        text = f"{what}; resume it with `towpath groups resume {group.id}`"
        return _explanation(job, GateName.GROUP_PAUSED, text, by=(group.id,), count=1)
    return _waits(job, facts, open_, job.waits - 1, f", and {what}")


def _waits(job: Job, facts: JobFacts, open_: tuple[str, ...], count: int, extra: str = "") -> Explanation:
    what = "job" if not facts.open_groups else "group" if not facts.open_jobs else "job or group"
    return _explanation(
        job,
        GateName.WAITS,
        f"waits for {count} {what}{'s' * (count > 1)}: {_names(open_, count)}{extra}",
        open_,
        count,
    )


def _queue_gate(facts: JobFacts, now: int) -> Explanation | None:
    job, queue = facts.job, facts.queue
    if queue.paused:
        return _explanation(
            job, GateName.QUEUE_PAUSED, f"queue {queue.name} is paused by hand{_why(queue.why)}"
        )
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
        return _explanation(job, GateName.PART_PAUSED, f"{where} is paused by hand{_why(part.why)}")
    if part.next_at > now:
        return _held(job, where, part, now, (GateName.PART_RATE, GateName.PART_HELD))
    if part.cap is not None and part.running >= part.cap:
        return _full(facts, where, part, part.running, GateName.PART_CAP)
    return None


def _held(
    job: Job, where: str, gate: QueueView | PartView, now: int, gates: tuple[GateName, GateName]
) -> Explanation:
    if (breaker := parse_reason(gate.why)) is not None:
        until = "it is closed by hand" if gate.next_at >= FOREVER else when(gate.next_at)
        return _explanation(
            job,
            GateName.BREAKER,
            f"breaker {breaker.name} is open until {until} ({breaker.why})",
            until=gate.next_at,
        )
    # A time further ahead than one interval was set by hand: no start can move it so far.
    if gate.rate is not None and gate.next_at <= now + interval_of(gate.rate):
        left = (gate.next_at - now) / SECOND
        span = f"{left:.3g}" if left < 100 else f"{left:.0f}"
        why = f", {gate.why}" if gate.why else ""
        return _explanation(
            job,
            gates[0],
            f"rate limit of {where} ({gate.rate}{why}): next permit in {span} s",
            until=gate.next_at,
        )
    return _explanation(
        job, gates[1], f"{where} is held until {when(gate.next_at)}{_why(gate.why)}", until=gate.next_at
    )


def _full(
    facts: JobFacts, where: str, full: QueueView | PartView, running: int, gate: GateName
) -> Explanation:
    names = _names(facts.holders, running)
    if (breaker := parse_reason(full.why)) is not None:
        allowed = f"{full.cap} probes allowed, {running} running: {names}"
        text = f"breaker {breaker.name} is half open ({breaker.why}): {allowed}"
        return _explanation(facts.job, GateName.BREAKER, text, facts.holders, running)
    reached = f"reached by {names}" if running else "allows no job to run"
    why = f" ({full.why})" if full.why else ""
    return _explanation(facts.job, gate, f"cap {full.cap} of {where}{why} {reached}", facts.holders, running)


def _next(facts: JobFacts) -> Explanation:
    if facts.job.losses >= SUSPECT:
        where = place(facts.ahead, facts.queue.name)
        text = f"{where}: {_suspect(facts.job)}, and a worker runs one suspect at a time"
        return _explanation(facts.job, GateName.SUSPECT, text, count=facts.ahead)
    error = facts.job.error or ""
    if error.startswith(UNKNOWN_KIND):
        text = f"{place(facts.ahead, facts.queue.name)}; the last worker that claimed it refused it: {error}"
        return _explanation(facts.job, GateName.NEXT, text, count=facts.ahead)
    now = ": the next claim takes it" if facts.ahead == 0 else ""
    return _explanation(
        facts.job, GateName.NEXT, place(facts.ahead, facts.queue.name) + now, count=facts.ahead
    )


def _suspect(job: Job) -> str:
    return f"its lease was lost {job.losses} times, which makes it a suspect"


def place(ahead: int, queue: str) -> str:
    """The position of a ready job in its queue."""
    return f"ready, {f'{at_least(ahead)} ahead of it' if ahead else 'first'} in queue {queue}"


def at_least(ahead: int) -> str:
    return f"{ahead:,}{' or more' if ahead >= AHEAD else ''}"


def cause_of(culprit: Job) -> str:
    """How the culprit ended, with the first line of its error."""
    kind = f" ({culprit.kind})" if culprit.kind else ""
    cause = (culprit.error or "").partition("\n")[0]
    ended = "failed" if culprit.state is State.FAILED else f"was {culprit.state}"
    return f"job {culprit.id}{kind} {ended} ({culprit.reason}){_why(cause)}"


def _explanation(
    job: Job, gate: GateName, text: str, by: tuple[str, ...] = (), count: int = 0, until: int | None = None
) -> Explanation:
    return Explanation(job.id, gate, f"job {job.id}: {text}", by[:SHOWN], count, optional_utc(until))


def _names(ids: tuple[str, ...], count: int) -> str:
    more = count - min(len(ids), SHOWN)
    return ", ".join(ids[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _why(why: str | None) -> str:
    return f": {why}" if why else ""


def when(at: int | None) -> str:
    """A ledger time as ISO 8601 text in UTC."""
    if at is None:
        return "an unknown time"
    return utc(at).isoformat(timespec="milliseconds").replace("+00:00", "Z")
