"""Claim, renew and progress: the commands about leases."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import repeat

from msgspec.structs import replace

from towpath.core import checks
from towpath.core.commands import (
    MAX_LEFT,
    PROMOTE,
    Claim,
    Claimed,
    Progress,
    Progressed,
    Renew,
    Renewed,
    Want,
)
from towpath.core.job import READY, RUNNING, SCHEDULED, SUSPECT, ClaimedJob, Job, Reason
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import take, woken
from towpath.core.limits import PartTurn, Pick, passed_over, permits, share, spend
from towpath.core.views import plan_notes
from towpath.errors import LostClaim
from towpath.ledger.memory.rows import PartRecord, QueueRecord, ReadyJobs
from towpath.ledger.memory.settle import expire
from towpath.ledger.memory.store import MemoryStore, write_notes

NONE = Reason.NONE


def claim(store: MemoryStore, command: Claim, now: int) -> Claimed:
    taken: list[Job] = []
    expire(store, now, PROMOTE)
    for each in command.wants:
        want = narrowed(command, each, taken)
        if want is None:
            continue
        queues = _queues(store, want.queue)
        for queue in queues:
            wake(store, queue, now, PROMOTE)
        if len(queues) == 1 and not queues[0].parts:
            taken += _take_loose(store, queues[0], command.terms(want), want, now)
            continue
        offers = [offer for queue in queues if (offer := _offer(store, queue, want, now)) is not None]
        for offer in _merged(offers, want):
            taken.append(offer.take(command.terms(want)))
        for offer in offers:
            offer.close()
    return Claimed(tuple([ClaimedJob(job) for job in taken]))


def wake(store: MemoryStore, queue: QueueRecord, now: int, limit: int) -> int:
    """Make at most `limit` due scheduled jobs ready; return their number."""
    due = queue.scheduled.take(now, limit)
    for seq in due:
        job = store.jobs[seq]
        store.put(job, woken(job))
    return len(due)


def _take_loose(
    store: MemoryStore, queue: QueueRecord, terms: tuple[str, int], want: Want, now: int
) -> list[Job]:
    """Claim from one queue without parts, the most frequent claim: there are no turns of parts to share and
    no heads to compare."""
    room, once = _room(queue, want.n, now), want.n if want.once is None else want.once
    owner, lease = terms
    without = want.without if queue.loose.ready <= MAX_LEFT else ()
    taken: list[Job] = []
    back: list[Job] = []
    if room <= 0:
        return taken
    for job in queue.loose.take(now, back, want.suspects):
        if job.kind in without and job.losses < SUSPECT:
            back.append(job)
            continue
        if job.max_attempts == 1:
            if not once:
                back.append(job)
                break
            once -= 1
        taken.append(take(job, owner, lease, now))
        if len(taken) == room:
            break
    for job in back:
        queue.loose.put_back(job)
    store.lease(queue, taken, now + lease)
    queue.next_at = spend(queue.next_at, queue.rate, now, len(taken))
    return taken


def _queues(store: MemoryStore, pattern: str) -> list[QueueRecord]:
    if "*" not in pattern:
        return [
            queue for name in sorted(set(pattern.split(","))) if (queue := store.queues.get(name)) is not None
        ]
    for name in [name for name, queue in store.active.items() if not _busy(queue)]:
        del store.active[name]
    return [store.active[name] for name in sorted(store.active) if checks.matches(pattern, name)]


def _busy(queue: QueueRecord) -> bool:
    return queue.counts[READY] + queue.counts[SCHEDULED] > 0


class _QueuePicks:
    """The picks of one queue in order. `head` is the job of the next pick; it is removed from its heap until
    it is taken or put back."""

    def __init__(self, store: MemoryStore, queue: QueueRecord, now: int) -> None:
        self._store, self._queue, self._now = store, queue, now
        self._rotating: list[PartRecord] = []
        self._picks: Iterator[Pick | None] = iter(())
        self._pick: Pick | None = None
        self._last: dict[str | None, tuple[Pick, int]] = {}
        self._total = 0
        self._clock = queue.clock
        self._expired: list[Job] = []
        self._suspects = 0
        """The number of further suspects that may be claimed."""
        self._without: tuple[str, ...] = ()
        self.head: Job | None = None

    def start(self, room: int, want: Want) -> None:
        queue, now, suspects = self._queue, self._now, want.suspects
        self._suspects = room if suspects is None else suspects
        hidden = passed_over(queue.suspects, suspects)
        # Parts may have no ready job but suspects that are passed over. They must not take the turns of
        # others.
        self._rotating = queue.rotation.take(room + len(hidden), now)
        if not self._rotating:
            self._without = want.without if queue.loose.ready <= MAX_LEFT else ()
            self._picks = repeat(None, room)
        else:
            turns = [
                PartTurn(part.name, part.served, part.weight, _part_room(part, now, hidden.get(part.name, 0)))
                for part in self._rotating
            ]
            if loose := queue.loose.ready - hidden.get(None, 0):
                turns.append(PartTurn(None, queue.served, 1, loose))
            self._picks = iter(share(turns, queue.clock, room))
        self._advance()

    def take(self, terms: tuple[str, int]) -> Job:
        """Claim the head for this owner and lease."""
        job, pick, now = self.head, self._pick, self._now
        assert job is not None
        taken = take(job, *terms, now)
        self._store.put(job, taken)
        self._total += 1
        if pick is not None:
            self._clock = pick.clock
            count = self._last[job.part][1] if job.part in self._last else 0
            self._last[job.part] = (pick, count + 1)
        self._advance()
        return taken

    def skip(self) -> None:
        """Pass the head over."""
        assert self.head is not None
        self._expired.append(self.head)
        self._advance()

    def close(self) -> None:
        """Put back the jobs that were not claimed, and store the spent permits and turns."""
        queue, now = self._queue, self._now
        if self.head is not None:
            self._expired.append(self.head)
        for job in self._expired:
            self._queued(job.part).put_back(job)
        queue.clock = self._clock
        for name, (pick, count) in self._last.items():
            if name is None:
                queue.served = pick.served
            else:
                part = queue.parts[name]
                part.served = pick.served
                self._store.set_next(part, spend(part.next_at, part.rate, now, count))
        queue.next_at = spend(queue.next_at, queue.rate, now, self._total)
        for part in self._rotating:
            queue.rotation.offer(part)

    def _advance(self) -> None:
        for pick in self._picks:
            queued = self._queue.loose if pick is None else self._queued(pick.part)
            self.head = queued.pop(self._now, self._expired, self._suspects > 0)
            while self.head is not None and self.head.kind in self._without and self.head.losses < SUSPECT:
                self._expired.append(self.head)
                self.head = queued.pop(self._now, self._expired, self._suspects > 0)
            if self.head is not None and self.head.losses >= SUSPECT:
                self._suspects -= 1
            if self.head is not None or pick is None:
                self._pick = pick
                return
        self.head = None

    def _queued(self, part: str | None) -> ReadyJobs:
        return self._queue.loose if part is None else self._queue.parts[part].queued


def _part_room(part: PartRecord, now: int, hidden: int) -> int:
    room = permits(part.next_at, part.rate, now, part.queued.ready - hidden)
    return room if part.cap is None else min(room, part.cap - part.running)


def _offer(store: MemoryStore, queue: QueueRecord, want: Want, now: int) -> _QueuePicks | None:
    room = _room(queue, want.n, now)
    if room <= 0:
        return None
    offer = _QueuePicks(store, queue, now)
    offer.start(room, want)
    return offer


def _room(queue: QueueRecord, n: int, now: int) -> int:
    """The number of jobs, at most `n`, that can be claimed from a queue now."""
    if queue.paused or not queue.counts[READY]:
        return 0
    room = permits(queue.next_at, queue.rate, now, n)
    return room if queue.cap is None else min(room, queue.cap - queue.counts[RUNNING])


def _merged(offers: list[_QueuePicks], want: Want) -> Iterator[_QueuePicks]:
    """The queues of the next jobs, at most `want.n`. The caller takes the head before it continues."""
    heads = [(offer.head.priority, offer.head.seq, offer) for offer in offers if offer.head is not None]
    heapify(heads)
    left, once = want.n, want.n if want.once is None else want.once
    suspects = want.n if want.suspects is None else want.suspects
    while heads and left:
        offer = heads[0][2]
        assert offer.head is not None
        if offer.head.max_attempts == 1:
            if not once:
                heappop(heads)
                continue
            once -= 1
        if offer.head.losses >= SUSPECT and not suspects:
            offer.skip()
        else:
            suspects -= offer.head.losses >= SUSPECT
            left -= 1
            yield offer
        if offer.head is None:
            heappop(heads)
        elif len(heads) > 1:
            heapreplace(heads, (offer.head.priority, offer.head.seq, offer))


def renew(store: MemoryStore, command: Renew, now: int) -> Renewed:
    until = now + command.lease
    lost, cancel = [], []
    for id, fence in command.held:
        job = store.find(id)
        if job is None or job.state is not RUNNING or job.fence != fence:
            lost.append(id)
            continue
        store.put(job, replace(job, lease_until=until, lease_len=command.lease))
        store.leases[job.seq] = until
        if job.cancel_requested is not None:
            cancel.append((id, job.cancel_requested))
    return Renewed(until, tuple(lost), tuple(cancel))


def progress(store: MemoryStore, command: Progress, now: int) -> Progressed:
    job = store.find(command.id)
    if job is None or job.state is not RUNNING or job.fence != command.fence:
        raise LostClaim(id=command.id, fence=command.fence)
    if command.notes:
        write_notes(store, plan_notes(store.notes, command.notes, store.next_version, now))
    new = replace(
        job,
        progress_done=job.progress_done if command.done is None else command.done,
        progress_total=job.progress_total if command.total is None else command.total,
        cursor=job.cursor if command.cursor is None else command.cursor,
    )
    store.put(job, new)
    return Progressed(job.cancel_requested)
