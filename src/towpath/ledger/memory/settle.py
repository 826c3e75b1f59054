"""Append, settle and groups: each command is applied completely or not at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from towpath.core.commands import (
    Abort,
    Append,
    Appended,
    GroupSet,
    GroupState,
    OnFailure,
    Open,
    Seal,
    Settle,
    Settled,
    Unseal,
)
from towpath.core.facts import Admission, Origin
from towpath.core.ids import derived
from towpath.core.job import DONE, FINISHED, RUNNING, WAITING, Job, Reason, Refuse, Release, State
from towpath.core.lifecycle import (
    RETENTION,
    counter_of,
    ended,
    given_back,
    group_outcome,
    held,
    lowered,
    settled,
)
from towpath.core.lifecycle import settle as settle_change
from towpath.core.limits import spend
from towpath.core.revival import GroupGate
from towpath.errors import LostClaim, UnknownGroup, Unsupported
from towpath.ledger.memory.append import decide, insert
from towpath.ledger.memory.rows import GroupRecord
from towpath.ledger.memory.store import MemoryStore, plan_notes, put_proxy, write_notes


def append(store: MemoryStore, command: Append, now: int) -> Appended:
    admission = decide(store, command.specs, now, Origin() if command.inside else None)
    _write(store, admission, now)
    return Appended(admission.answers)


def _write(store: MemoryStore, admission: Admission, now: int) -> None:
    superseded = insert(store, admission, now)
    touched: dict[str, bool] = {}
    for job in admission.jobs:
        if job.group is not None:
            touched[job.group] = touched.get(job.group, False) or job.state is State.FAILED
    for proxy in admission.proxies:
        touched[proxy.group] = touched.get(proxy.group, False) or proxy.counted == "failed"
    if superseded or touched:
        finishing = EndCascade(store, now)
        finishing.add(superseded, State.CANCELED, Reason.SUPERSEDED)
        finishing.run(touched)


def settle(store: MemoryStore, command: Settle, now: int) -> Settled:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger lives in memory")
    job = store.find(command.id)
    if job is None or job.state is not RUNNING or job.fence != command.fence:
        return _settled_before(store, command, job)
    if command.spawn or command.notes:
        origin = Origin(job.id, job.group, job.correlation_id)
        admission = decide(store, command.spawn, now, origin) if command.spawn else None
        notes = plan_notes(store, command.notes, now)
        if admission is not None:
            _write(store, admission, now)
        write_notes(store, notes)
        # The children may have asked their parent to stop.
        job = store.jobs[job.seq]
    return Settled(job.id, _settle(store, job, command, now))


def _settled_before(store: MemoryStore, command: Settle, job: Job | None) -> Settled:
    if job is not None:
        if job.settled_fence == command.fence and job.settled_as is not None:
            return Settled(job.id, job.settled_as)
    elif (
        tombstone := store.tombstones.get(command.id)
    ) is not None and tombstone.settled_fence == command.fence > 0:
        return Settled(tombstone.id, tombstone.state)
    raise LostClaim(id=command.id, fence=command.fence)


def _settle(store: MemoryStore, job: Job, command: Settle, now: int) -> State:
    change = settle_change(job, command.outcome, now)
    new = settled(job, change, command.outcome)
    if type(command.outcome) is Release or type(command.outcome) is Refuse:
        _give_back(store, job, now)
    if change.state not in FINISHED:
        store.put(job, given_back(new, change))
        hold(store, job.seq)
        return change.state
    end(store, job, ended(new, change.state, change.reason, now, store.queues[job.queue].retention))
    if job.group is not None or job.seq in store.edges_out or job.seq in store.proxies_of:
        finishing = EndCascade(store, now)
        finishing.follow([job.seq], change.state, {})
        finishing.run()
    return change.state


def _give_back(store: MemoryStore, job: Job, now: int) -> None:
    """The attempt did not begin, so the rate gets its permit back."""
    queue = store.queues[job.queue]
    queue.next_at = spend(queue.next_at, queue.rate, now, -1)
    if job.part is not None:
        part = queue.parts[job.part]
        store.set_next(part, spend(part.next_at, part.rate, now, -1))


def open_group(store: MemoryStore, command: Open, now: int) -> GroupSet:
    if command.group not in store.groups:
        store.dirty = True
        store.groups[command.group] = GroupRecord(command.group, command.on_failure, command.then, now)
    return GroupSet(command.group)


def seal(store: MemoryStore, command: Seal, now: int) -> GroupSet:
    group = _group(store, command.group)
    if group.state is GroupState.OPEN:
        store.dirty = True
        group.state, group.paused, group.why = GroupState.SEALED, False, None
        for job in [store.jobs[seq] for seq in group.members]:
            if job.state is State.BLOCKED:
                lower(store, job, now)
        EndCascade(store, now).run({group.id: False})
    return GroupSet(group.id)


def unseal(store: MemoryStore, command: Unseal, now: int) -> GroupSet:
    group = _group(store, command.group)
    if group.state is GroupState.SEALED:
        store.dirty = True
        group.state, group.paused, group.why = GroupState.OPEN, True, command.why
        for job in [store.jobs[seq] for seq in group.members]:
            if job.state is State.BLOCKED:
                store.put(job, held(job))
            else:
                hold(store, job.seq)
    elif group.paused and group.why != command.why:
        store.dirty = True
        group.why = command.why
    return GroupSet(group.id)


def abort(store: MemoryStore, command: Abort, now: int) -> GroupSet:
    group = _group(store, command.group)
    if group.state in (GroupState.OPEN, GroupState.SEALED):
        finishing = EndCascade(store, now)
        finishing.abort(group)
        finishing.look_after(group)
        finishing.run()
    return GroupSet(group.id)


def _group(store: MemoryStore, id: str) -> GroupRecord:
    group = store.groups.get(id)
    if group is None:
        raise UnknownGroup(group=id)
    return group


def end(store: MemoryStore, job: Job, new: Job) -> None:
    """Store a job that has ended. `EndCascade` handles the jobs and groups that wait for it."""
    if new.state is DONE and job.part is None and job.group is None:
        store.put_done(store.queues[job.queue], new)
    else:
        store.put(job, new)
    if job.key is not None:
        store.release(job, new.finished_at or 0)


def lower(store: MemoryStore, job: Job, now: int) -> None:
    store.put(job, lowered(job, now))


def hold(store: MemoryStore, seq: int) -> None:
    """Block a scheduled or ready member of an open group: it waits for the seal."""
    job = store.jobs[seq]
    if (
        job.state in (State.SCHEDULED, State.READY)
        and job.group is not None
        and store.groups[job.group].state is GroupState.OPEN
    ):
        store.put(job, held(job))


def expire(store: MemoryStore, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time; how many there were."""
    due = store.expiries.take(now, limit)
    if due:
        finishing = EndCascade(store, now)
        finishing.add(due, State.FAILED, Reason.EXPIRED)
        finishing.run()
    return len(due)


class EndCascade:
    """A first-in-first-out list of sets that end, each in one state. A set without a reason ends for what
    each of its jobs was asked to stop for."""

    def __init__(self, store: MemoryStore, now: int) -> None:
        self._store, self._now = store, now
        self._sets: deque[tuple[Sequence[int], State, Reason | None]] = deque()

    def add(self, seqs: Sequence[int], state: State, reason: Reason | None) -> None:
        if seqs:
            self._sets.append((seqs, state, reason))

    def run(self, touched: Mapping[str, bool] | None = None) -> None:
        """Work the list off. The groups in `touched` have new members (True: one that failed) and are looked
        after together with the first set."""
        groups = dict(touched or {})
        while self._sets or groups:
            seqs, state, reason = self._sets.popleft() if self._sets else ((), State.DONE, None)
            self.follow([seq for seq in seqs if self._end(seq, state, reason)], state, groups)
            groups = {}

    def follow(self, over: list[int], state: State, groups: dict[str, bool]) -> None:
        """Those that have ended take their dependents with them or wake them; then their groups, and
        `groups`."""
        jobs, out = self._store.jobs, self._store.edges_out
        if state is not State.DONE:
            self._cascade(over, state)
        for src in over:
            for dst in out.get(src, ()):
                job = jobs[dst]
                if job.state is State.BLOCKED:
                    lower(self._store, job, self._now)
        for seq in over:
            if (group := jobs[seq].group) is not None:
                groups[group] = groups.get(group, False) or state is State.FAILED
            if seq in self._store.proxies_of:
                for group in recount(self._store, jobs[seq]):
                    groups[group] = groups.get(group, False) or state is State.FAILED
        for id, failed in sorted(groups.items()):
            self.look_after(self._store.groups[id], failed)

    def look_after(self, group: GroupRecord, failed: bool = False) -> None:
        """Abort the group if a member of it has just failed, and close it if nothing is left to wait for."""
        if (
            failed
            and group.on_failure is OnFailure.ABORT
            and group.state in (GroupState.OPEN, GroupState.SEALED)
        ):
            self.abort(group)
        if group.state in (GroupState.SEALED, GroupState.ABORTING) and not group.unfinished:
            self._close(group)

    def abort(self, group: GroupRecord) -> None:
        store = self._store
        store.dirty = True
        group.state, group.paused, group.why = GroupState.ABORTING, False, None
        waiting = []
        for job in [store.jobs[seq] for seq in group.members]:
            if job.state in WAITING:
                waiting.append(job.seq)
            elif job.state is State.RUNNING and job.cancel_requested is None:
                store.put(job, replace(job, cancel_requested=Reason.ABORTED))
        for proxy in [store.proxies[id] for id in group.proxies]:
            if proxy.counted == "unfinished":
                # The job is not the group's to cancel.
                put_proxy(store, replace(proxy, counted="canceled"))
        self.add(waiting, State.CANCELED, Reason.ABORTED)

    def _end(self, seq: int, state: State, reason: Reason | None) -> bool:
        job = self._store.jobs[seq]
        if job.state in FINISHED:
            return False
        why = reason or job.cancel_requested
        assert why is not None
        self._end_as(job, state, why)
        return True

    def _end_as(self, job: Job, state: State, reason: Reason) -> None:
        retention = self._store.queues[job.queue].retention
        end(self._store, job, ended(job, state, reason, self._now, retention))

    def _cascade(self, dead: list[int], state: State) -> None:
        """Every blocked job that needs one of `dead` to succeed, transitively, ends likewise and joins the
        list."""
        jobs, out = self._store.jobs, self._store.edges_out
        # The list grows while it is walked.
        for src in dead:
            for dst, run_anyway in out.get(src, {}).items():
                job = jobs[dst]
                if not run_anyway and job.state is State.BLOCKED:
                    self._end_as(job, state, Reason.DEPENDENCY)
                    dead.append(dst)

    def _close(self, group: GroupRecord) -> None:
        outcome = group_outcome(group.failed, group.canceled, group.state is GroupState.ABORTING)
        group.state, group.outcome, group.closed_at = GroupState.CLOSED, outcome, self._now
        self._store.group_ends.push(self._now + RETENTION, group.id)
        self._store.dirty = True
        lost = []
        for dst, gate in self._store.gates_out.get(group.id, {}).items():
            job = self._store.jobs[dst]
            if job.state is not State.BLOCKED:
                continue
            if gate.met(outcome):
                lower(self._store, job, self._now)
            else:
                lost.append(dst)
        self.add(lost, State.FAILED if outcome is State.FAILED else State.CANCELED, Reason.DEPENDENCY)
        self._call_back(group, outcome)

    def _call_back(self, group: GroupRecord, outcome: State) -> None:
        """Append what was to follow, once. It has no dependencies and no group, and is never refused for want
        of room. Its gate records the outcome that it follows, in case the group is reopened."""
        specs = [
            replace(spec, id=derived(group.id, f"then:{outcome}", n))
            for n, spec in enumerate(group.then.pop(outcome, ()))
        ]
        if specs:
            admission = decide(self._store, specs, self._now, Origin())
            superseded = insert(self._store, admission, self._now)
            for job in admission.jobs:
                self._store.gate(group.id, job.seq, GroupGate(False, outcome))
            self.add(superseded, State.CANCELED, Reason.SUPERSEDED)


def recount(store: MemoryStore, job: Job) -> list[str]:
    """A job has ended: count it in the groups that wait for it because it represents members of theirs; which
    they are."""
    counted = counter_of(job.state, job.reason)
    waiting = [
        proxy
        for id in sorted(store.proxies_of[job.seq])
        if (proxy := store.proxies[id]).counted == "unfinished"
    ]
    for proxy in waiting:
        put_proxy(store, replace(proxy, counted=counted))
    return [proxy.group for proxy in waiting]
