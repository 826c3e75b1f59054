"""Claim: promote due jobs, apply limits and turns of parts, take the best jobs, in a few statements."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from towpath.core.checks import matches
from towpath.core.commands import MAX_LEFT, PROMOTE, Claim, Claimed, Want
from towpath.core.job import READY, RUNNING, SUSPECT, ClaimedJob, Job, State
from towpath.core.lanes import named_queues, narrowed
from towpath.core.limits import PartTurn, Pick, passed_over, permits, share, spend
from towpath.ledger.tables import finish
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import PartRow, QueueRow, Transaction, is_limited

Terms = tuple[str, int]
"""Owner and lease."""


class _QueueCandidates(msgspec.Struct):
    """The jobs that one queue offers, in order. `picks` is empty if no part takes turns. `at`: how many jobs
    were considered; `passed`: the positions among them that were not taken."""

    row: QueueRow
    jobs: list[Job]
    picks: list[Pick]
    at: int = 0
    passed: set[int] = set()


def claim(tx: Transaction, command: Claim) -> Claimed:
    taken: list[Job] = []
    bare: list[Job] = []
    finish.expire(tx, PROMOTE)
    if len(command.wants) > 1:
        # One read for the queues of all wants.
        tx.load_queues(named_queues(command))
    for each in command.wants:
        want = narrowed(command, each, taken)
        if want is None:
            continue
        queues = [row for row in _wanted_queues(tx, want) if row.ready]
        if not queues:
            continue
        terms = command.terms(want)
        chosen = _take_at_once(tx, terms, queues, want)
        if not chosen:
            by_queue = [_candidates_of(tx, terms, row, want) for row in queues]
            chosen = _all_of(by_queue, want) or list(_merged(by_queue, want))
            _take(tx, terms, chosen)
            for candidates in by_queue:
                _charge(tx, candidates)
            bare += chosen
        taken += chosen
    tx.db.fill(bare)
    return Claimed(tuple([ClaimedJob(job) for job in taken]))


def _take_at_once(tx: Transaction, terms: Terms, queues: Sequence[QueueRow], want: Want) -> list[Job]:
    """Claim from one queue without limits by `Db.take_best`, with the bodies. Empty if the claim is not of
    this form, or if the database has no such statement."""
    if not tx.db.takes_best or len(queues) != 1 or want.without:
        return []
    (row,) = queues
    if row.paused or row.next_at > tx.now or is_limited(row):
        return []
    if want.suspects != 0 and _suspects(tx, row.name):
        return []
    single = want.once is None or want.once >= want.n
    owner, lease = terms
    chosen = tx.db.take_best((row.name, want.n, tx.now, owner, tx.now + lease, lease, single))
    _count(tx, chosen)
    return chosen


def _wanted_queues(tx: Transaction, want: Want) -> list[QueueRow]:
    if "*" not in want.queue:
        names = list(set(want.queue.split(",")))
    else:
        tx.flush()
        names = [name for name in tx.db.rows("live_queues", (), str) if matches(want.queue, name)]
    tx.load_queues(names)
    for name in names:
        if tx.queues[name].scheduled:
            promote(tx, name, PROMOTE)
    tx.hold_queues([name for name in names if is_limited(tx.queues[name])])
    return [tx.queues[name] for name in sorted(names)]


def promote(tx: Transaction, queue: str, limit: int) -> int:
    """Make due jobs of the queue ready, the longest due first. Returns how many."""
    due = tx.db.rows("due_jobs", (queue, tx.now, limit), tuple[int, str | None])
    if due:
        tx.db.run("wake", (array([seq for seq, _ in due]),))
        tx.move(Counter((queue, part, State.SCHEDULED, State.READY) for _, part in due))
    return len(due)


def _candidates_of(tx: Transaction, terms: Terms, row: QueueRow, want: Want) -> _QueueCandidates:
    if row.paused:
        return _QueueCandidates(row, [], [])
    room = permits(row.next_at, row.rate, tx.now, want.n)
    if row.cap is not None:
        room = min(room, row.cap - row.running)
    if room <= 0:
        return _QueueCandidates(row, [], [])
    suspects = _suspects(tx, row.name)
    hidden = passed_over(suspects, want.suspects)
    most = 0 if not suspects else room if want.suspects is None else min(room, want.suspects)
    # A part with only skipped ready jobs must not take the place of another part.
    parts = _open_parts(tx, row, room + len(hidden)) if row.ready > row.loose else []
    if not parts:
        without = want.without if row.loose <= MAX_LEFT else ()
        found = _fetch(tx, terms, row, {None: room}, most, without)[None] if row.loose else []
        return _QueueCandidates(row, found[:room], [])
    turns = [
        PartTurn(part.name, part.served, part.weight, _room(part, tx.now, room, hidden.get(part.name, 0)))
        for part in parts
    ]
    if loose := row.loose - hidden.get(None, 0):
        turns.append(PartTurn(None, row.served, 1, loose))
    return _rotate(tx, terms, row, share(turns, row.clock, room), most)


def _suspects(tx: Transaction, queue: str) -> dict[str | None, int]:
    """The number of ready suspects of a queue, by part."""
    return dict(tx.db.rows("suspects_of", (queue,), tuple[str | None, int])) if tx.suspicious else {}


def _open_parts(tx: Transaction, row: QueueRow, room: int) -> list[PartRow]:
    tx.flush()
    found = tx.db.rows("open_parts", (row.name, tx.now, room), PartRow)
    return [tx.parts.setdefault((part.queue, part.name), part) for part in found]


def _room(part: PartRow, now: int, most: int, hidden: int) -> int:
    room = min(part.ready - hidden, permits(part.next_at, part.rate, now, most))
    return room if part.cap is None else min(room, part.cap - part.running)


def _fetch(
    tx: Transaction,
    terms: Terms,
    row: QueueRow,
    counts: Mapping[str | None, int],
    suspects: int,
    without: Sequence[str] = (),
) -> dict[str | None, list[Job]]:
    """The best ready jobs of each part (None: without a part, and not of a kind in `without`) and, in
    addition, at most `suspects` suspects, in claim order and with the values that they have after the
    claim."""
    now, (owner, lease) = tx.now, terms
    found: dict[str | None, list[Job]] = {part: [] for part in counts}
    named = {part: n for part, n in counts.items() if part is not None}
    rest = (now, owner, now + lease, lease)
    if None in counts and without:
        found[None] += tx.db.rows("offer_other", (row.name, counts[None], *rest, array(without)), Job)
    elif None in counts:
        found[None] += tx.db.rows("offer_loose", (row.name, counts[None], *rest), Job)
    if named:
        for job in tx.db.rows("offer_parted", (row.name, max(named.values()), *rest, array(named)), Job):
            found[job.part].append(job)
    if suspects:
        for job in tx.db.rows("offer_suspects", (row.name, suspects, *rest, array(counts)), Job):
            found[job.part].append(job)
    if suspects or named:
        for jobs in found.values():
            jobs.sort(key=_order)
    return found


def _rotate(
    tx: Transaction, terms: Terms, row: QueueRow, picks: Sequence[Pick], suspects: int
) -> _QueueCandidates:
    """Give each pick the next job of its part."""
    waiting = _fetch(tx, terms, row, Counter(pick.part for pick in picks), suspects)
    for found in waiting.values():
        found.reverse()
    candidates = _QueueCandidates(row, [], [])
    for pick in picks:
        jobs = waiting[pick.part]
        while jobs and jobs[-1].losses >= SUSPECT and not suspects:
            jobs.pop()
        if jobs:
            suspects -= jobs[-1].losses >= SUSPECT
            candidates.jobs.append(jobs.pop())
            candidates.picks.append(pick)
    return candidates


def _order(job: Job) -> tuple[int, int]:
    return job.priority, job.seq


def _all_of(by_queue: list[_QueueCandidates], want: Want) -> list[Job]:
    """All jobs of the only queue, which offers no more than wanted. Empty if the claim is not of this
    form."""
    if len(by_queue) != 1 or (want.once is not None and 1 in [job.max_attempts for job in by_queue[0].jobs]):
        return []
    by_queue[0].at = len(by_queue[0].jobs)
    return by_queue[0].jobs


def _merged(by_queue: Sequence[_QueueCandidates], want: Want) -> Iterator[Job]:
    """The best n jobs over all queues; the order within each queue is kept."""
    once = want.n if want.once is None else want.once
    suspects = want.n if want.suspects is None else want.suspects
    heads = [(_order(candidates.jobs[0]), at) for at, candidates in enumerate(by_queue) if candidates.jobs]
    heapq.heapify(heads)
    left = want.n
    while heads and left:
        _, at = heapq.heappop(heads)
        candidates = by_queue[at]
        job = candidates.jobs[candidates.at]
        if job.max_attempts == 1:
            if not once:
                continue
            once -= 1
        if job.losses >= SUSPECT and not suspects:
            candidates.passed.add(candidates.at)
        else:
            suspects -= job.losses >= SUSPECT
            left -= 1
            yield job
        candidates.at += 1
        if candidates.at < len(candidates.jobs):
            heapq.heappush(heads, (_order(candidates.jobs[candidates.at]), at))


def _take(tx: Transaction, terms: Terms, chosen: Sequence[Job]) -> None:
    if chosen:
        owner, lease = terms
        seqs = array([job.seq for job in chosen])
        tx.db.run("take", (owner, tx.now + lease, lease, tx.now, seqs))
        _count(tx, chosen)


def _count(tx: Transaction, chosen: Sequence[Job]) -> None:
    if chosen:
        places = Counter([(job.queue, job.part) for job in chosen])
        tx.move(Counter({(queue, part, READY, RUNNING): n for (queue, part), n in places.items()}))


def _charge(tx: Transaction, candidates: _QueueCandidates) -> None:
    """Charge rates and turns for the jobs that were taken."""
    if not (candidates.picks or candidates.row.rate_count is not None):
        return
    taken = [n for n in range(candidates.at) if n not in candidates.passed]
    if not taken:
        return
    row = tx.change_queue(candidates.row.name)
    row.next_at = spend(row.next_at, row.rate, tx.now, len(taken))
    if not candidates.picks:
        return
    picks = [candidates.picks[n] for n in taken]
    row.clock = picks[-1].clock
    counts = Counter([pick.part for pick in picks])
    for last in {pick.part: pick for pick in picks}.values():
        if last.part is None:
            row.served = last.served
        else:
            slot = tx.change_part(row.name, last.part)
            slot.served = last.served
            slot.next_at = spend(slot.next_at, slot.rate, tx.now, counts[last.part])
