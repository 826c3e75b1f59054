"""The relations between whole jobs, and the consequences of an end for dependents and groups.

A ledger that keeps whole jobs (`ledger/model.py`, `ledger/memory`) implements `Relations` and `Records`; the
rules are here. The table ledgers apply the same rules to sets of rows (`ledger/tables/finish.py`) and are
compared with the model. See "Finishing a set" in `docs/ledger-rules.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from towpath.core.commands import Abort, GroupSet, Seal, Settle, Settled, Unseal
from towpath.core.facts import Admission, KeyName, KeyTaken, Proxy, Tombstone, node
from towpath.core.group_commands import STOP_REASONS, callbacks
from towpath.core.history import Histories, end_attempt
from towpath.core.job import (
    BLOCKED,
    CANCELED,
    DONE,
    FAILED,
    FINISHED,
    RUNNING,
    WAITING,
    Job,
    Reason,
    Spec,
    State,
)
from towpath.core.lifecycle import (
    Change,
    counter_of,
    ended,
    given_back,
    group_outcome,
    held,
    interrupts,
    lose,
    lowered,
)
from towpath.core.results import GroupState
from towpath.core.views import GroupView
from towpath.errors import LostClaim, UnknownGroup

OPEN, SEALED, ABORTING, CLOSED = GroupState


class GroupGate(msgspec.Struct, frozen=True):
    """A dependency of a job on a group: on its success, on any end, or (a callback) on the outcome
    `wanted`."""

    run_anyway: bool
    wanted: State | None = None

    def met(self, outcome: State) -> bool:
        return self.run_anyway or outcome is (self.wanted or DONE)


class Relations(Protocol):
    """The reads of jobs and of their relations."""

    jobs: dict[int, Job]
    """By seq."""

    def find(self, id: str) -> Job | None: ...

    def dependents(self, seq: int) -> Sequence[tuple[int, bool]]:
        """The jobs that depend on a job, and whether any end of it is sufficient."""
        ...

    def dependencies(self, seq: int) -> Sequence[tuple[int, bool]]:
        """The jobs that a job depends on, by seq, and whether any end of theirs is sufficient."""
        ...

    def group_view(self, id: str) -> GroupView | None: ...

    def members(self, group: str) -> Sequence[Job]:
        """The members that are not deleted, by seq."""
        ...

    def gates_to(self, group: str) -> Sequence[tuple[int, GroupGate]]:
        """The jobs that depend on a group."""
        ...

    def gates_of(self, seq: int) -> Sequence[tuple[str, GroupGate]]:
        """The groups that a job depends on, by name."""
        ...

    def proxies_in(self, group: str) -> Sequence[Proxy]:
        """The members of a group that other jobs represent, in the order of the members."""
        ...

    def proxies_of(self, seq: int) -> Sequence[Proxy]:
        """The members of groups that a job represents, by id."""
        ...

    def key_holder(self, key: KeyName) -> Job | None:
        """The job in the row of a key, unless the job is deleted."""
        ...

    def retention(self, queue: str) -> int | None: ...


class Records(Relations, Protocol):
    """The writes of the consequences. Each write keeps the counts of queues, parts and groups exact."""

    attempts: Histories

    def put(self, job: Job) -> None:
        """Store the new record of a job."""
        ...

    def end(self, job: Job) -> None:
        """Store the record of a job that has ended, and free its key unless the window of the key is
        open."""
        ...

    def put_proxy(self, proxy: Proxy) -> None: ...

    def set_group(self, id: str, **changes: Any) -> None: ...

    def take_callbacks(self, group: str, outcome: State) -> Sequence[Spec]:
        """Remove and return the callbacks of an outcome: a group that is reopened and ends alike appends
        them once."""
        ...

    def append(self, specs: Sequence[Spec], now: int) -> Admission:
        """Insert callbacks, by the rule of `Origin.closes`, without the consequences of the admission."""
        ...

    def add_gate(self, group: str, seq: int, gate: GroupGate) -> None: ...

    def drop_gate(self, group: str, seq: int) -> None: ...

    def drop_edge(self, src: int, dst: int) -> None: ...

    def take_key(self, key: KeyTaken) -> None: ...


def group_of(relations: Relations, id: str) -> GroupView:
    """The group of this id; raises `UnknownGroup`."""
    group = relations.group_view(id)
    if group is None:
        raise UnknownGroup(group=id)
    return group


def open_waits(relations: Relations, job: Job) -> int:
    """The number of jobs and groups that a job waits for; its own group is one while it is open."""
    needed = [relations.jobs[src].state for src, _ in relations.dependencies(job.seq)]
    waits = sum(state not in FINISHED for state in needed) + len(open_groups(relations, job.seq))
    return waits + in_open_group(relations, job)


def open_groups(relations: Relations, seq: int) -> list[str]:
    """The groups that a job depends on and that are not closed, by name."""
    gates = relations.gates_of(seq)
    return [group for group, _ in gates if group_of(relations, group).state is not CLOSED]


def in_open_group(relations: Relations, job: Job) -> bool:
    return job.group is not None and group_of(relations, job.group).state is OPEN


def groups_waiting(relations: Relations, job: Job, own: bool = True) -> set[str]:
    """The groups that count a job as unfinished: each group in which it represents a member and, with `own`,
    its own group."""
    found = {proxy.group for proxy in relations.proxies_of(job.seq) if proxy.counted == "unfinished"}
    return found | {job.group} if own and job.group is not None else found


def downstream(relations: Relations, start: str) -> frozenset[str]:
    """All unfinished jobs, and groups that are not closed, that wait for a node."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        job = relations.find(name)
        groups: set[str] = set()
        if job is None:
            # Of a closed group: the jobs that would wait again if it were reopened.
            waiting = [relations.jobs[dst] for dst, _ in relations.gates_to(name.removeprefix("\0"))]
            found = {dst.id for dst in waiting if dst.state in WAITING}
        else:
            dependents = [relations.jobs[dst] for dst, _ in relations.dependents(job.seq)]
            found = {dst.id for dst in dependents if dst.state is BLOCKED}
            # A job that is replaced, at the start, leaves its own group.
            groups = groups_waiting(relations, job, own=name != start)
        found |= {node(group) for group in groups if group_of(relations, group).state is not CLOSED}
        todo += found - reached
        reached |= found
    return frozenset(reached)


def culprit(relations: Relations, job: Job) -> Job | None:
    """The job that ended first among the causes of this job's end, along edges and groups that need
    success."""
    if job.reason is not Reason.DEPENDENCY:
        return None
    found, todo, roots = {job.seq}, [job], []
    while todo:
        at = todo.pop()
        if at.reason is not Reason.DEPENDENCY:
            roots.append(at)
            continue
        sources = [relations.jobs[src] for src, any_end in relations.dependencies(at.seq) if not any_end]
        for group, gate in relations.gates_of(at.seq):
            sources += [] if gate.run_anyway else relations.members(group)
        todo += [src for src in sources if src.seq not in found and src.state is at.state]
        found.update([src.seq for src in sources])
    return min(roots, key=lambda root: (root.finished_at, root.seq), default=None)


def finish(records: Records, jobs: Iterable[Job], state: State, reason: Reason, now: int) -> None:
    """End a set of jobs."""
    cascade = EndCascade(records, now)
    cascade.add([job.seq for job in jobs], state, reason)
    cascade.run()


def finish_admitted(records: Records, admission: Admission, now: int) -> None:
    """The consequences of an append: superseded jobs end, and groups with new members are reviewed."""
    touched = joined_groups(admission)
    if admission.superseded or touched:
        cascade = EndCascade(records, now)
        cascade.add(admission.superseded, CANCELED, Reason.SUPERSEDED)
        cascade.run(touched)


def joined_groups(admission: Admission) -> dict[str, bool]:
    """The groups with new members, and whether one of these has failed."""
    touched: dict[str, bool] = {}
    for job in admission.jobs:
        if job.group is not None:
            touched[job.group] = touched.get(job.group, False) or job.state is FAILED
    for proxy in admission.proxies:
        touched[proxy.group] = touched.get(proxy.group, False) or proxy.counted == "failed"
    return touched


class EndCascade:
    """A first-in-first-out list of sets of jobs that end, each in one state. Without a reason each job of the
    set ends for the reason for which it was asked to stop."""

    def __init__(self, records: Records, now: int) -> None:
        self._records, self._now = records, now
        self._sets: deque[tuple[Sequence[int], State, Reason | None, Mapping[str, bool]]] = deque()

    def add(
        self,
        seqs: Sequence[int],
        state: State,
        reason: Reason | None,
        touched: Mapping[str, bool] | None = None,
    ) -> None:
        """`touched`: groups that are reviewed together with this set."""
        if seqs or touched:
            self._sets.append((seqs, state, reason, touched or {}))

    def run(self, touched: Mapping[str, bool] | None = None) -> None:
        """End all sets. The groups in `touched` have new members (True: a failed one). They are reviewed
        together with the first set."""
        groups = dict(touched or {})
        while self._sets or groups:
            seqs, state, reason, joined = self._sets.popleft() if self._sets else ((), DONE, None, {})
            groups |= {id: failed or groups.get(id, False) for id, failed in joined.items()}
            jobs = [self._records.jobs[seq] for seq in seqs]
            over = [self._end(job, state, reason) for job in jobs if job.state not in FINISHED]
            self.follow(over, state, groups)
            groups = {}

    def follow(self, over: list[Job], state: State, groups: dict[str, bool]) -> None:
        """The consequences for the dependents of jobs that have ended, then for their groups and
        `groups`."""
        records = self._records
        if state is not DONE:
            self._cascade(over, state)
        for job in over:
            for dst, _ in records.dependents(job.seq):
                self.lower(records.jobs[dst])
        for job in over:
            for group in self._count_end(job):
                groups[group] = groups.get(group, False) or state is FAILED
        for id, failed in sorted(groups.items()):
            self.review(id, failed)

    def lower(self, job: Job) -> None:
        """A dependency of a blocked job is met."""
        if job.state is BLOCKED:
            self._records.put(lowered(job, self._now))

    def review(self, id: str, failed: bool = False) -> None:
        """Abort or stop the group if a member has just failed, and close it if no member is unfinished."""
        group = group_of(self._records, id)
        reason = STOP_REASONS.get(group.on_failure)
        if failed and reason is not None and group.state in (OPEN, SEALED):
            self.abort(id, reason)
            group = group_of(self._records, id)
        if group.state in (SEALED, ABORTING) and not group.unfinished:
            self._close(group)

    def abort(self, id: str, reason: Reason) -> None:
        records = self._records
        records.set_group(id, state=ABORTING, paused=False, why=None)
        members = list(records.members(id))
        for job in members:
            ask_to_stop(records, job, reason)
        for proxy in list(records.proxies_in(id)):
            if proxy.counted == "unfinished":
                # The job that represents the member does not belong to the group and is not canceled.
                records.put_proxy(replace(proxy, counted="canceled"))
        self.add([job.seq for job in members if job.state in WAITING], CANCELED, reason)

    def _end(self, job: Job, state: State, reason: Reason | None) -> Job:
        why = job.cancel_requested if reason is None else reason
        assert why is not None
        over = ended(job, state, why, self._now, self._records.retention(job.queue))
        self._records.end(over)
        return over

    def _cascade(self, over: list[Job], state: State) -> None:
        """Every blocked job that needs one of `over` to succeed, transitively, ends in the same state and
        joins the list, which grows while it is read."""
        for job in over:
            for dst, any_end in self._records.dependents(job.seq):
                dependent = self._records.jobs[dst]
                if not any_end and dependent.state is BLOCKED:
                    over.append(self._end(dependent, state, Reason.DEPENDENCY))

    def _count_end(self, job: Job) -> list[str]:
        """Count an ended job in the groups in which it represents a member; return these and its own."""
        proxies = self._records.proxies_of(job.seq)
        waiting = [proxy for proxy in proxies if proxy.counted == "unfinished"]
        for proxy in waiting:
            self._records.put_proxy(replace(proxy, counted=counter_of(job.state, job.reason)))
        return [proxy.group for proxy in waiting] + ([] if job.group is None else [job.group])

    def _close(self, group: GroupView) -> None:
        records = self._records
        outcome = group_outcome(group.failed, group.canceled, group.state is ABORTING)
        records.set_group(group.id, state=CLOSED, outcome=outcome, closed_at=self._now)
        gates = [(records.jobs[dst], gate.met(outcome)) for dst, gate in records.gates_to(group.id)]
        for job in [job for job, met in gates if met]:
            self.lower(job)
        lost = [job.seq for job, met in gates if not met and job.state is BLOCKED]
        self.add(lost, FAILED if outcome is FAILED else CANCELED, Reason.DEPENDENCY)
        specs = records.take_callbacks(group.id, outcome)
        if specs:
            admission = records.append(callbacks(group.id, outcome, specs), self._now)
            # The gate records the outcome that a callback follows, in case the group is reopened.
            for job in admission.jobs:
                records.add_gate(group.id, job.seq, GroupGate(False, outcome))
            self.add(admission.superseded, CANCELED, Reason.SUPERSEDED, joined_groups(admission))


def ask_to_stop(records: Records, job: Job, reason: Reason) -> None:
    """Store a stop request. The request of a stopping group, which does not interrupt the handler, is
    replaced by one that does."""
    asked = job.cancel_requested
    if job.state is RUNNING and (asked is None or interrupts(reason) > interrupts(asked)):
        records.put(replace(job, cancel_requested=reason))


def settled_before(job: Job | None, tombstone: Tombstone | None, command: Settle) -> Settled:
    """The first answer again, if this attempt was settled before; raises `LostClaim`. The job does not run
    with the fence of the command."""
    if job is not None:
        if job.settled_fence == command.fence and job.settled_as is not None:
            return Settled(job.id, job.settled_as)
    elif tombstone is not None and tombstone.settled_fence == command.fence > 0:
        return Settled(tombstone.id, tombstone.state)
    raise LostClaim(id=command.id, fence=command.fence)


def give_back(records: Records, job: Job, change: Change) -> None:
    """A job that ran waits again; a member of an open group waits for the seal."""
    back = given_back(job, change)
    records.put(held(back) if in_open_group(records, job) else back)


def lose_all(records: Records, jobs: Sequence[Job], now: int) -> list[str]:
    """Take back jobs with an ended lease or a dead owner; return the ids of the jobs that have failed."""
    over: dict[State, list[int]] = {FAILED: [], CANCELED: []}
    for job in jobs:
        change = lose(job, now)
        end_attempt(records.attempts, job, change, None, now)
        if change.state in FINISHED:
            records.put(replace(job, losses=change.losses))
            over[change.state].append(job.seq)
        else:
            give_back(records, job, change)
    cascade = EndCascade(records, now)
    cascade.add(over[FAILED], FAILED, Reason.LOST)
    cascade.add(over[CANCELED], CANCELED, None)
    cascade.run()
    failed = set(over[FAILED])
    return [job.id for job in jobs if job.seq in failed]


def cancel(records: Records, jobs: Sequence[Job], now: int) -> tuple[int, int]:
    """Cancel the waiting ones of these jobs and ask the running ones to stop; return both numbers."""
    waiting = [job for job in jobs if job.state in WAITING]
    for job in jobs:
        ask_to_stop(records, job, Reason.REQUESTED)
    finish(records, waiting, CANCELED, Reason.REQUESTED, now)
    return len(waiting), len(jobs) - len(waiting)


def seal(records: Records, command: Seal, now: int) -> GroupSet:
    if group_of(records, command.group).state is OPEN:
        records.set_group(command.group, state=SEALED, paused=False, why=None)
        cascade = EndCascade(records, now)
        for job in list(records.members(command.group)):
            cascade.lower(job)
        cascade.run({command.group: False})
    return GroupSet(command.group)


def unseal(records: Records, command: Unseal, now: int) -> GroupSet:
    group = group_of(records, command.group)
    if group.state is SEALED:
        records.set_group(group.id, state=OPEN, paused=True, why=command.why)
        for job in list(records.members(group.id)):
            if job.state in WAITING:
                records.put(held(job))
    elif group.paused and group.why != command.why:
        records.set_group(group.id, why=command.why)
    return GroupSet(group.id)


def abort(records: Records, command: Abort, now: int) -> GroupSet:
    state = group_of(records, command.group).state
    if state in (OPEN, SEALED):
        cascade = EndCascade(records, now)
        cascade.abort(command.group, command.reason)
        cascade.review(command.group)
        cascade.run()
    elif state is ABORTING:
        for job in list(records.members(command.group)):
            ask_to_stop(records, job, command.reason)
    return GroupSet(command.group)


GROUP_COMMANDS: Mapping[type, Callable[[Any, Any, int], GroupSet]] = {
    Seal: seal,
    Unseal: unseal,
    Abort: abort,
}
