"""Claim: promote what is due, see whose turn it is, take the best, all in a handful of statements."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from towpath.core.checks import matches
from towpath.core.commands import PROMOTE, Claim, Claimed, Want
from towpath.core.job import READY, RUNNING, Job, State
from towpath.core.job import Claim as ClaimedJob
from towpath.core.lanes import narrowed
from towpath.core.limits import Pick, Turn, permits, share, spend
from towpath.ledger.relational import endings
from towpath.ledger.relational.batch import Batch, PartRow, QueueRow, is_limited
from towpath.ledger.relational.db import array


class _Offer(msgspec.Struct):
    """What one queue would give, in order. `picks` is empty where no part takes turns."""

    row: QueueRow
    jobs: list[Job]
    picks: list[Pick]
    taken: int = 0


def claim(batch: Batch, command: Claim) -> Claimed:
    taken: list[Job] = []
    bare: list[Job] = []
    endings.expire(batch, PROMOTE)
    for each in command.wants:
        want = narrowed(command, each, taken)
        if want is None:
            continue
        queues = _wanted_queues(batch, want)
        chosen = _at_once(batch, command, queues, want)
        if not chosen:
            offers = [_offer(batch, command, row, want.n) for row in queues]
            chosen = _all_of(offers, want) or list(_merged(offers, want))
            _take(batch, command, chosen)
            for offer in offers:
                _charge(batch, offer)
            bare += chosen
        taken += chosen
    batch.db.fill(bare)
    return Claimed(tuple([ClaimedJob(job) for job in taken]))


def _at_once(batch: Batch, command: Claim, queues: Sequence[QueueRow], want: Want) -> list[Job]:
    """Most claims: of one queue without limits, in one step if the store has one. With their bodies."""
    if len(queues) != 1:
        return []
    (row,) = queues
    if row.paused or not row.ready or row.next_at > batch.now or is_limited(row):
        return []
    single = want.once is None or want.once >= want.n
    args = (row.name, want.n, batch.now, command.owner, batch.now + command.lease, command.lease, single)
    chosen = batch.db.take_best(args)
    _count(batch, chosen)
    return chosen


def _wanted_queues(batch: Batch, want: Want) -> list[QueueRow]:
    if "*" not in want.queue:
        names = list(set(want.queue.split(",")))
    else:
        batch.flush()
        names = [name for name in batch.db.rows("live_queues", (), str) if matches(want.queue, name)]
    batch.load_queues(names)
    for name in names:
        if batch.queues[name].scheduled:
            promote(batch, name, PROMOTE)
    batch.gate([name for name in names if is_limited(batch.queues[name])])
    return [batch.queues[name] for name in sorted(names)]


def promote(batch: Batch, queue: str, limit: int) -> int:
    """Make due jobs of the queue ready, the longest due first."""
    due = batch.db.rows("due_jobs", (queue, batch.now, limit), tuple[int, str | None])
    if due:
        batch.db.run("wake", (array([seq for seq, _ in due]),))
        batch.move(Counter((queue, part, State.SCHEDULED, State.READY) for _, part in due))
    return len(due)


def _offer(batch: Batch, command: Claim, row: QueueRow, n: int) -> _Offer:
    if row.paused or not row.ready:
        return _Offer(row, [], [])
    room = permits(row.next_at, row.rate, batch.now, n)
    if row.cap is not None:
        room = min(room, row.cap - row.running)
    if room <= 0:
        return _Offer(row, [], [])
    parts = _open_parts(batch, row, room) if row.ready > row.loose else []
    if not parts:
        return _Offer(row, _fetch(batch, command, row, room) if row.loose else [], [])
    turns = [Turn(part.name, part.served, part.weight, _room(part, batch.now, room)) for part in parts]
    if row.loose:
        turns.append(Turn(None, row.served, 1, row.loose))
    return _rotate(batch, command, row, share(turns, row.clock, room))


def _open_parts(batch: Batch, row: QueueRow, room: int) -> list[PartRow]:
    batch.flush()
    found = batch.db.rows("open_parts", (row.name, batch.now, room), PartRow)
    return [batch.parts.setdefault((part.queue, part.name), part) for part in found]


def _room(part: PartRow, now: int, most: int) -> int:
    room = min(part.ready, permits(part.next_at, part.rate, now, most))
    return room if part.cap is None else min(room, part.cap - part.running)


def _fetch(batch: Batch, command: Claim, row: QueueRow, n: int, parts: str | None = None) -> list[Job]:
    """The best n ready jobs without a part, or of each of these parts, as they will be once they are taken."""
    now, lease = batch.now, command.lease
    args = (row.name, n, now, command.owner, now + lease, lease)
    return batch.db.rows("offer_loose", args, Job) if parts is None else batch.db.rows("offer_parted", (*args, parts), Job)


def _rotate(batch: Batch, command: Claim, row: QueueRow, picks: Sequence[Pick]) -> _Offer:
    """Give each pick the next job of its part."""
    counts = Counter(pick.part for pick in picks)
    waiting: dict[str | None, list[Job]] = {part: [] for part in counts}
    if loose := counts.pop(None, 0):
        waiting[None] = _fetch(batch, command, row, loose)
    if counts:
        for job in _fetch(batch, command, row, max(counts.values()), array(counts)):
            waiting[job.part].append(job)
    for found in waiting.values():
        found.sort(key=_order, reverse=True)
    offer = _Offer(row, [], [])
    for pick in picks:
        if waiting[pick.part]:
            offer.jobs.append(waiting[pick.part].pop())
            offer.picks.append(pick)
    return offer


def _order(job: Job) -> tuple[int, int]:
    return job.priority, job.seq


def _all_of(offers: list[_Offer], want: Want) -> list[Job]:
    """The jobs of the only offer, which holds no more than is wanted: most claims. Else nothing."""
    if len(offers) != 1 or (want.once is not None and 1 in [job.max_attempts for job in offers[0].jobs]):
        return []
    offers[0].taken = len(offers[0].jobs)
    return offers[0].jobs


def _merged(offers: Sequence[_Offer], want: Want) -> Iterator[Job]:
    """The best n over all offers, each offer in its own order."""
    once = want.n if want.once is None else want.once
    heads = [(_order(offer.jobs[0]), at) for at, offer in enumerate(offers) if offer.jobs]
    heapq.heapify(heads)
    left = want.n
    while heads and left:
        _, at = heapq.heappop(heads)
        offer = offers[at]
        job = offer.jobs[offer.taken]
        if job.max_attempts == 1:
            if not once:
                continue
            once -= 1
        offer.taken += 1
        left -= 1
        yield job
        if offer.taken < len(offer.jobs):
            heapq.heappush(heads, (_order(offer.jobs[offer.taken]), at))


def _take(batch: Batch, command: Claim, chosen: Sequence[Job]) -> None:
    if chosen:
        until = batch.now + command.lease
        seqs = array([job.seq for job in chosen])
        batch.db.run("take", (command.owner, until, command.lease, batch.now, seqs))
        _count(batch, chosen)


def _count(batch: Batch, chosen: Sequence[Job]) -> None:
    if chosen:
        places = Counter([(job.queue, job.part) for job in chosen])
        batch.move(Counter({(queue, part, READY, RUNNING): n for (queue, part), n in places.items()}))


def _charge(batch: Batch, offer: _Offer) -> None:
    """Rates are spent and turns are used up by what was really taken."""
    if not offer.taken or not (offer.picks or offer.row.rate_count is not None):
        return
    row = batch.change_queue(offer.row.name)
    row.next_at = spend(row.next_at, row.rate, batch.now, offer.taken)
    if not offer.picks:
        return
    picks = offer.picks[: offer.taken]
    row.clock = picks[-1].clock
    counts = Counter([pick.part for pick in picks])
    for last in {pick.part: pick for pick in picks}.values():
        if last.part is None:
            row.served = last.served
        else:
            slot = batch.change_part(row.name, last.part)
            slot.served = last.served
            slot.next_at = spend(slot.next_at, slot.rate, batch.now, counts[last.part])
