"""The rules of revival: may a failed or canceled job start again, if not, why, and which jobs are revived
with it? The same for a job that a person makes done (`Resolve`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec.structs import replace

from towpath.core.commands import Resolve
from towpath.core.facts import KeyTaken, Proxy, namespace, node
from towpath.core.finish import GroupGate, Records, downstream, finish, group_of, open_waits
from towpath.core.history import keep_attempt, resolution
from towpath.core.job import (
    CANCELED,
    DONE,
    FAILED,
    FINISHED,
    RUNNING,
    WAITING,
    Job,
    KeyPolicy,
    Reason,
    State,
)
from towpath.core.lifecycle import counter_of, held, revived
from towpath.core.results import GroupState, Resolved
from towpath.errors import NotResolvable, UnknownJob

DEAD = frozenset({FAILED, CANCELED})


class RevivalReads(Protocol):
    """The reads of a ledger that the rule needs."""

    def other_holder(self, job: Job) -> str | None:
        """The id of the unfinished job that holds the job's key, if it is another job."""
        ...

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        """The state of a group, and its outcome once it is closed."""
        ...

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        """The first dependency, by seq, that must succeed and is failed or canceled: its id and state."""
        ...

    def gates(self, job: Job) -> Iterable[tuple[str, GroupGate]]:
        """The groups that the job depends on, by name."""
        ...

    def dead_member(self, group: str) -> str | None:
        """The id of the member to revive before the group can succeed: the first failed one, else the first
        canceled one. Superseded members do not count."""
        ...

    def open_dependencies(self, job: Job) -> set[str]:
        """The ids of the unfinished jobs that the job depends on."""
        ...

    def counted_in(self, job: Job) -> set[str]:
        """The groups that count the job once it is revived: its own, and each (unless aborting) in which it
        represents a member."""
        ...

    def downstream(self, name: str) -> Iterable[str]:
        """All nodes that wait for the node `name`."""
        ...


def revive_obstacle(job: Job, reads: RevivalReads) -> str | None:
    """Why the job cannot be revived; None if it can."""
    if job.state not in DEAD:
        return f"it is {job.state}"
    if job.reason is Reason.SUPERSEDED:
        return "superseded"
    if (holder := reads.other_holder(job)) is not None:
        return f"its key is held by {holder}"
    if job.group is not None and reads.group_state(job.group)[0] is GroupState.ABORTING:
        return f"group {job.group} is aborting"
    if (dead := reads.dead_dependency(job)) is not None:
        id, state = dead
        return f"its dependency {id} is {state}; revive {id} first"
    for group, gate, outcome in shut_gates(job, reads):
        if gate.wanted is not None:
            return f"it follows the outcome {gate.wanted} of group {group}, which is {outcome}"
        if (member := reads.dead_member(group)) is not None:
            return f"group {group}, which it needs, is {outcome}; revive {member} first"
    return _cycle(job, reads)


def shut_gates(job: Job, reads: RevivalReads) -> list[tuple[str, GroupGate, State]]:
    """The groups that ended otherwise than the job needs, with their outcomes."""
    found = [(group, gate, reads.group_state(group)[1]) for group, gate in reads.gates(job)]
    return [
        (group, gate, outcome)
        for group, gate, outcome in found
        if outcome is not None and not gate.met(outcome)
    ]


def _cycle(job: Job, reads: RevivalReads) -> str | None:
    """The obstacle of a job that would wait for a node that waits for one of the job's groups."""
    gates = [group for group, _ in reads.gates(job)]
    waited = reads.open_dependencies(job)
    if not (gates or waited):
        return None
    groups = reads.counted_in(job)
    waited |= {node(group) for group in gates if group in groups or reads.group_state(group)[1] is None}
    for group in sorted(groups if waited else ()):
        if both := waited & {*reads.downstream(node(group)), node(group)}:
            first = min(both)
            named = "group " + first[1:] if first.startswith("\0") else first
            return f"it waits for {named}, which waits for its group {group}"
    return None


class Revivals(RevivalReads, Protocol):
    """The rule's reads, and the revival of one job."""

    def by_seq(self, seqs: Sequence[int]) -> Iterable[Job]: ...

    def revive(self, job: Job, *, runs: bool = True) -> set[int]:
        """Revive a job and reopen its groups; return the jobs that may have ended only because of it. Without
        `runs` the job ends in the same command: it takes no key and keeps its gates."""
        ...


def revive_all(found: Iterable[Job], ledger: Revivals) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Revive jobs, each with the jobs that ended only because of it: the number of revived jobs, and id and
    obstacle of each job that was refused."""
    revived: set[int] = set()
    refused: dict[int, tuple[str, str]] = {}
    for job in sorted(found, key=lambda job: (job.reason is Reason.DEPENDENCY, job.seq)):
        if job.seq in revived:
            # The job was revived together with one that it needs.
            continue
        if (obstacle := revive_obstacle(job, ledger)) is not None:
            refused[job.seq] = job.id, obstacle
        else:
            revived |= _revive_with_dependents(job, ledger)
    return len(revived), tuple([refused[seq] for seq in sorted(refused)])


def prepare_resolve(job: Job | None, command: Resolve, ledger: Revivals) -> Job | None:
    """The job that the command makes done next; None if it is done by the same decision already. A failed or
    canceled job is revived, with the jobs that ended only because of it. Raises `Refused`."""
    if job is None:
        raise UnknownJob(id=command.id)
    if job.state is DONE and job.reason is Reason(command.outcome):
        return None
    if (obstacle := _resolve_obstacle(job, ledger)) is not None:
        raise NotResolvable(id=job.id, why=obstacle)
    if job.state in DEAD:
        _revive_with_dependents(job, ledger, runs=False)
    return job


def _resolve_obstacle(job: Job, reads: RevivalReads) -> str | None:
    if job.state is RUNNING or job.state is DONE:
        return f"it is {job.state}" + (f" ({job.reason})" if job.reason else "")
    if job.reason is Reason.SUPERSEDED:
        return "superseded"
    if job.group is not None and reads.group_state(job.group)[0] is GroupState.ABORTING:
        return f"group {job.group} is aborting"
    return None


def resolve(records: Records, command: Resolve, now: int) -> Resolved:
    job = prepare_resolve(records.find(command.id), command, RecordRevivals(records, now))
    if job is not None:
        keep_attempt(records.attempts, job.seq, resolution(job, command, now))
        records.put(replace(records.jobs[job.seq], result=command.result, error=None))
        finish(records, [job], DONE, Reason(command.outcome), now)
    return Resolved(command.id, DONE)


def _revive_with_dependents(job: Job, ledger: Revivals, runs: bool = True) -> set[int]:
    """Revive a job and, level by level, the jobs that ended only because of it."""
    revived, needing = {job.seq}, ledger.revive(job, runs=runs)
    while needing:
        level, needing = sorted(needing), set()
        for dependent in ledger.by_seq(level):
            dead = dependent.state in DEAD and dependent.reason is Reason.DEPENDENCY
            if dead and revive_obstacle(dependent, ledger) is None:
                needing |= ledger.revive(dependent)
                revived.add(dependent.seq)
    return revived


class RecordRevivals:
    """`Revivals` of a ledger that keeps whole jobs."""

    def __init__(self, records: Records, now: int) -> None:
        self._records, self._now = records, now

    def other_holder(self, job: Job) -> str | None:
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return None
        holder = self._records.key_holder((namespace(job.queue), job.key))
        return None if holder is None or holder.seq == job.seq or holder.state in FINISHED else holder.id

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        row = group_of(self._records, group)
        return row.state, row.outcome

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        needed = [
            self._records.jobs[src] for src, any_end in self._records.dependencies(job.seq) if not any_end
        ]
        return next(((each.id, each.state) for each in needed if each.state in DEAD), None)

    def gates(self, job: Job) -> Iterable[tuple[str, GroupGate]]:
        return self._records.gates_of(job.seq)

    def dead_member(self, group: str) -> str | None:
        winners = [self._records.jobs.get(proxy.job) for proxy in self._records.proxies_in(group)]
        members = [*self._records.members(group), *[job for job in winners if job is not None]]
        dead = [job for job in members if job.state in DEAD and job.reason is not Reason.SUPERSEDED]
        return min(dead, key=lambda job: (job.state is not FAILED, job.seq)).id if dead else None

    def open_dependencies(self, job: Job) -> set[str]:
        needed = [self._records.jobs[src] for src, _ in self._records.dependencies(job.seq)]
        return {each.id for each in needed if each.state not in FINISHED}

    def counted_in(self, job: Job) -> set[str]:
        found = {proxy.group for proxy in self._represented(job)}
        return found if job.group is None else found | {job.group}

    def downstream(self, name: str) -> frozenset[str]:
        return downstream(self._records, name)

    def by_seq(self, seqs: Sequence[int]) -> list[Job]:
        return [self._records.jobs[seq] for seq in seqs]

    def revive(self, job: Job, *, runs: bool = True) -> set[int]:
        records = self._records
        for group, _, _ in shut_gates(job, self) if runs else ():
            # The failed members of the group are deleted: no member is left to wait for.
            records.drop_gate(group, job.seq)
        records.put(revived(job, open_waits(records, job), self._now))
        if runs and job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
            records.take_key(KeyTaken((namespace(job.queue), job.key), job.id, job.seq, 0, None))
        needing = set()
        for dst, any_end in list(records.dependents(job.seq)):
            if records.jobs[dst].state not in FINISHED:
                # An edge to an unfinished job was met before.
                records.drop_edge(job.seq, dst)
            elif not any_end:
                needing.add(dst)
        for proxy in self._represented(job):
            records.put_proxy(replace(proxy, counted="unfinished"))
        for group in sorted(self.counted_in(job)):
            if self.group_state(group)[0] is GroupState.CLOSED:
                needing |= self._reopen(group)
        return needing

    def _represented(self, job: Job) -> list[Proxy]:
        """The members that the job represents, in groups that are not aborting."""
        proxies = self._records.proxies_of(job.seq)
        return [proxy for proxy in proxies if self.group_state(proxy.group)[0] is not GroupState.ABORTING]

    def _reopen(self, id: str) -> set[int]:
        """A closed group waits again, and so do the jobs that it woke and that have not begun; return the
        jobs that may have ended only because of its outcome."""
        records = self._records
        records.set_group(id, state=GroupState.SEALED, outcome=None, closed_at=None)
        for proxy in list(records.proxies_in(id)):
            winner = records.jobs.get(proxy.job)
            # An abort may have counted the member as canceled.
            if winner is not None and winner.id not in downstream(records, node(id)):
                records.put_proxy(replace(proxy, counted=counter_of(winner.state, winner.reason)))
        found: set[int] = set()
        for dst, gate in list(records.gates_to(id)):
            job = records.jobs[dst]
            if job.state in WAITING:
                records.put(held(job))
            elif job.state is RUNNING:
                # A job that has begun for the old outcome runs once.
                records.drop_gate(id, dst)
            elif job.reason is Reason.DEPENDENCY and not gate.run_anyway:
                found.add(dst)
        return found
