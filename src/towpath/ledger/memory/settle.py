"""Append and Settle: from a command to what it does, all or nothing. Also groups, as they are made of the
same pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from towpath.core.admission import Admission, Origin
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
from towpath.core.ids import derived
from towpath.core.job import DONE, FINISHED, RUNNING, WAITING, Done, Job, Reason, Refuse, Release, State
from towpath.core.lifecycle import RETENTION, Change, awaken, counter_of, purge_time
from towpath.core.lifecycle import settle as settle_change
from towpath.core.limits import spend
from towpath.errors import LostClaim, UnknownGroup, Unsupported
from towpath.ledger.memory.append import decide, insert
from towpath.ledger.memory.rows import Gate, Group
from towpath.ledger.memory.store import Book, plan_notes, put_proxy, write_notes


def append(book: Book, command: Append, now: int) -> Appended:
    admission = decide(book, command.specs, now, Origin() if command.inside else None)
    _write(book, admission, now)
    return Appended(admission.answers)


def _write(book: Book, admission: Admission, now: int) -> None:
    superseded = insert(book, admission, now)
    touched: dict[str, bool] = {}
    for job in admission.jobs:
        if job.group is not None:
            touched[job.group] = touched.get(job.group, False) or job.state is State.FAILED
    for proxy in admission.proxies:
        touched[proxy.group] = touched.get(proxy.group, False) or proxy.counted == "failed"
    if superseded or touched:
        finishing = Finishing(book, now)
        finishing.add(superseded, State.CANCELED, Reason.SUPERSEDED)
        finishing.run(touched)


def settle(book: Book, command: Settle, now: int) -> Settled:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger lives in memory")
    job = book.find(command.id)
    if job is None or job.state is not RUNNING or job.fence != command.fence:
        return _settled_before(book, command, job)
    if command.spawn or command.notes:
        origin = Origin(job.id, job.group, job.correlation_id)
        admission = decide(book, command.spawn, now, origin) if command.spawn else None
        notes = plan_notes(book, command.notes, now)
        if admission is not None:
            _write(book, admission, now)
        write_notes(book, notes)
        # The children may have asked their parent to stop.
        job = book.jobs[job.seq]
    return Settled(job.id, _settle(book, job, command, now))


def _settled_before(book: Book, command: Settle, job: Job | None) -> Settled:
    if job is not None:
        if job.settled_fence == command.fence and job.settled_as is not None:
            return Settled(job.id, job.settled_as)
    elif (
        tombstone := book.tombstones.get(command.id)
    ) is not None and tombstone.settled_fence == command.fence > 0:
        return Settled(tombstone.id, tombstone.state)
    raise LostClaim(id=command.id, fence=command.fence)


def _settle(book: Book, job: Job, command: Settle, now: int) -> State:
    outcome, state = command.outcome, DONE
    if type(outcome) is Done:
        end_done(book, job, now, outcome.result)
    else:
        change = settle_change(job, outcome, now)
        state = change.state
        said = getattr(outcome, "error", None)
        error = job.error if said is None else said
        if type(outcome) is Release or type(outcome) is Refuse:
            _give_back(book, job, now)
        if state not in FINISHED:
            book.put(job, _waiting_again(job, change, error))
            hold(book, job.seq)
            return state
        end_settled(book, job, change, now, error)
    if job.group is not None or job.seq in book.edges_out or job.seq in book.proxies_of:
        finishing = Finishing(book, now)
        finishing.follow([job.seq], state, {})
        finishing.run()
    return state


def _waiting_again(job: Job, change: Change, error: str | None) -> Job:
    return replace(
        job,
        state=change.state,
        reason=change.reason,
        attempts=change.attempts,
        failures=change.failures,
        ready_at=job.ready_at if change.ready_at is None else change.ready_at,
        settled_fence=job.fence,
        settled_as=change.state,
        owner=None,
        lease_until=None,
        error=error,
    )


def _give_back(book: Book, job: Job, now: int) -> None:
    """The attempt did not begin, so the rate gets its permit back."""
    queue = book.queues[job.queue]
    queue.next_at = spend(queue.next_at, queue.rate, now, -1)
    if job.part is not None:
        part = queue.parts[job.part]
        book.set_next(part, spend(part.next_at, part.rate, now, -1))


def open_group(book: Book, command: Open, now: int) -> GroupSet:
    if command.group not in book.groups:
        book.dirty = True
        book.groups[command.group] = Group(command.group, command.on_failure, command.then, now)
    return GroupSet(command.group)


def seal(book: Book, command: Seal, now: int) -> GroupSet:
    group = _group(book, command.group)
    if group.state is GroupState.OPEN:
        book.dirty = True
        group.state, group.paused, group.why = GroupState.SEALED, False, None
        for job in [book.jobs[seq] for seq in group.members]:
            if job.state is State.BLOCKED:
                lower(book, job, now)
        Finishing(book, now).run({group.id: False})
    return GroupSet(group.id)


def unseal(book: Book, command: Unseal, now: int) -> GroupSet:
    group = _group(book, command.group)
    if group.state is GroupState.SEALED:
        book.dirty = True
        group.state, group.paused, group.why = GroupState.OPEN, True, command.why
        for job in [book.jobs[seq] for seq in group.members]:
            if job.state is State.BLOCKED:
                book.put(job, replace(job, waits=job.waits + 1))
            else:
                hold(book, job.seq)
    elif group.paused and group.why != command.why:
        book.dirty = True
        group.why = command.why
    return GroupSet(group.id)


def abort(book: Book, command: Abort, now: int) -> GroupSet:
    group = _group(book, command.group)
    if group.state in (GroupState.OPEN, GroupState.SEALED):
        finishing = Finishing(book, now)
        finishing.abort(group)
        finishing.look_after(group)
        finishing.run()
    return GroupSet(group.id)


def _group(book: Book, id: str) -> Group:
    group = book.groups.get(id)
    if group is None:
        raise UnknownGroup(group=id)
    return group


def end(book: Book, job: Job, state: State, reason: Reason, now: int) -> None:
    """A job ends. What waits for it is the business of a `Finishing`."""
    ended = replace(
        job,
        state=state,
        reason=reason,
        finished_at=now,
        purge_at=purge_time(state, now, job.retention, book.queues[job.queue].retention),
        waits=0,
        owner=None,
        lease_until=None,
    )
    book.put(job, ended)
    if job.key is not None:
        book.release(job, now)


def end_done(book: Book, job: Job, now: int, result: bytes | None) -> None:
    """The end of most jobs, in one step."""
    queue = book.queues[job.queue]
    done = replace(
        job,
        state=DONE,
        settled_fence=job.fence,
        settled_as=DONE,
        finished_at=now,
        purge_at=purge_time(DONE, now, job.retention, queue.retention),
        owner=None,
        lease_until=None,
        result=result,
    )
    if job.part is None and job.group is None:
        book.put_done(queue, done)
    else:
        book.put(job, done)
    if job.key is not None:
        book.release(job, now)


def end_settled(book: Book, job: Job, change: Change, now: int, error: str | None) -> None:
    """The same for a job that its holder settled otherwise."""
    state = change.state
    ended = replace(
        job,
        state=state,
        reason=change.reason,
        attempts=change.attempts,
        failures=change.failures,
        settled_fence=job.fence,
        settled_as=state,
        finished_at=now,
        purge_at=purge_time(state, now, job.retention, book.queues[job.queue].retention),
        owner=None,
        lease_until=None,
        error=error,
    )
    book.put(job, ended)
    if job.key is not None:
        book.release(job, now)


def lower(book: Book, job: Job, now: int) -> None:
    """One thing less to wait for; at zero the job wakes."""
    waits = job.waits - 1
    if waits:
        book.put(job, replace(job, waits=waits))
        return
    state = awaken(job.ready_at, 0, now)
    book.put(
        job,
        replace(job, waits=0, state=state, reason=Reason.DELAY if state is State.SCHEDULED else Reason.NONE),
    )


def hold(book: Book, seq: int) -> None:
    """A member of an open group that could run, or could soon, waits for the seal."""
    job = book.jobs[seq]
    if (
        job.state in (State.SCHEDULED, State.READY)
        and job.group is not None
        and book.groups[job.group].state is GroupState.OPEN
    ):
        book.put(job, replace(job, state=State.BLOCKED, reason=Reason.NONE, waits=1))


def expire(book: Book, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time; how many there were."""
    due = book.expiries.take(now, limit)
    if due:
        finishing = Finishing(book, now)
        finishing.add(due, State.FAILED, Reason.EXPIRED)
        finishing.run()
    return len(due)


class Finishing:
    """A first-in-first-out list of sets that end, each in one state. A set without a reason ends for what
    each of its jobs was asked to stop for."""

    def __init__(self, book: Book, now: int) -> None:
        self._book, self._now = book, now
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

    def follow(self, ended: list[int], state: State, groups: dict[str, bool]) -> None:
        """Those that have ended take their dependents with them or wake them; then their groups, and
        `groups`."""
        jobs, out = self._book.jobs, self._book.edges_out
        if state is not State.DONE:
            self._cascade(ended, state)
        for src in ended:
            for dst in out.get(src, ()):
                job = jobs[dst]
                if job.state is State.BLOCKED:
                    lower(self._book, job, self._now)
        for seq in ended:
            if (group := jobs[seq].group) is not None:
                groups[group] = groups.get(group, False) or state is State.FAILED
            if seq in self._book.proxies_of:
                for group in recount(self._book, jobs[seq]):
                    groups[group] = groups.get(group, False) or state is State.FAILED
        for id, failed in sorted(groups.items()):
            self.look_after(self._book.groups[id], failed)

    def look_after(self, group: Group, failed: bool = False) -> None:
        """Abort the group if a member of it has just failed, and close it if nothing is left to wait for."""
        if (
            failed
            and group.on_failure is OnFailure.ABORT
            and group.state in (GroupState.OPEN, GroupState.SEALED)
        ):
            self.abort(group)
        if group.state in (GroupState.SEALED, GroupState.ABORTING) and not group.unfinished:
            self._close(group)

    def abort(self, group: Group) -> None:
        book = self._book
        book.dirty = True
        group.state, group.paused, group.why = GroupState.ABORTING, False, None
        waiting = []
        for job in [book.jobs[seq] for seq in group.members]:
            if job.state in WAITING:
                waiting.append(job.seq)
            elif job.state is State.RUNNING and job.cancel_requested is None:
                book.put(job, replace(job, cancel_requested=Reason.ABORTED))
        for proxy in [book.proxies[id] for id in group.proxies]:
            if proxy.counted == "unfinished":
                # The job is not the group's to cancel.
                put_proxy(book, replace(proxy, counted="canceled"))
        self.add(waiting, State.CANCELED, Reason.ABORTED)

    def _end(self, seq: int, state: State, reason: Reason | None) -> bool:
        job = self._book.jobs[seq]
        if job.state in FINISHED:
            return False
        why = reason or job.cancel_requested
        assert why is not None
        end(self._book, job, state, why, self._now)
        return True

    def _cascade(self, ended: list[int], state: State) -> None:
        """Every blocked job that needs one of `ended` to succeed, transitively, ends likewise and joins the
        list."""
        jobs, out = self._book.jobs, self._book.edges_out
        # The list grows while it is walked.
        for src in ended:
            for dst, run_anyway in out.get(src, {}).items():
                job = jobs[dst]
                if not run_anyway and job.state is State.BLOCKED:
                    end(self._book, job, state, Reason.DEPENDENCY, self._now)
                    ended.append(dst)

    def _close(self, group: Group) -> None:
        if group.failed:
            outcome = State.FAILED
        elif group.canceled or group.state is GroupState.ABORTING:
            outcome = State.CANCELED
        else:
            outcome = State.DONE
        group.state, group.outcome, group.closed_at = GroupState.CLOSED, outcome, self._now
        self._book.group_ends.push(self._now + RETENTION, group.id)
        self._book.dirty = True
        lost = []
        for dst, gate in self._book.gates_out.get(group.id, {}).items():
            job = self._book.jobs[dst]
            if job.state is not State.BLOCKED:
                continue
            if gate.met(outcome):
                lower(self._book, job, self._now)
            else:
                lost.append(dst)
        self.add(lost, State.FAILED if outcome is State.FAILED else State.CANCELED, Reason.DEPENDENCY)
        self._call_back(group, outcome)

    def _call_back(self, group: Group, outcome: State) -> None:
        """Append what was to follow, once. It has no dependencies and no group, and is never refused for want
        of room. A gate tells which outcome it follows, should the group be reopened."""
        specs = [
            replace(spec, id=derived(group.id, f"then:{outcome}", n))
            for n, spec in enumerate(group.then.pop(outcome, ()))
        ]
        if specs:
            admission = decide(self._book, specs, self._now, Origin())
            superseded = insert(self._book, admission, self._now)
            for job in admission.jobs:
                self._book.gate(group.id, job.seq, Gate(False, outcome))
            self.add(superseded, State.CANCELED, Reason.SUPERSEDED)


def recount(book: Book, job: Job) -> list[str]:
    """A job has ended: count it in the groups that wait for it because it represents members of theirs; which
    they are."""
    counted = counter_of(job.state, job.reason)
    waiting = [
        proxy
        for id in sorted(book.proxies_of[job.seq])
        if (proxy := book.proxies[id]).counted == "unfinished"
    ]
    for proxy in waiting:
        put_proxy(book, replace(proxy, counted=counted))
    return [proxy.group for proxy in waiting]
