"""Append and Settle: from a command to what it does, all or nothing. Also groups, as they are made of the same pieces."""

from __future__ import annotations

from msgspec.structs import replace

from towpath.core.admission import Admission, Origin
from towpath.core.commands import Abort, Append, Appended, GroupSet, GroupState, Open, Seal, Settle, Settled, Unseal
from towpath.core.job import DONE, FINISHED, RUNNING, Done, Job, Reason, Refuse, Release, State
from towpath.core.lifecycle import Change
from towpath.core.lifecycle import settle as settle_change
from towpath.core.limits import spend
from towpath.errors import LostClaim, UnknownGroup, Unsupported
from towpath.ledger.memory.appends import decide, insert
from towpath.ledger.memory.book import Book
from towpath.ledger.memory.endings import Finishing, end_done, end_settled, hold, lower
from towpath.ledger.memory.notes import plan_notes, write_notes
from towpath.ledger.memory.rows import Group


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
    elif (tombstone := book.tombstones.get(command.id)) is not None and tombstone.settled_fence == command.fence > 0:
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
