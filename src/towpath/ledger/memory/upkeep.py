"""Upkeep: reap, expire, wake, purge, sweep, and tell when there is more to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from towpath.core.commands import KEEP, Upkeep, Upkept
from towpath.core.facts import KeyName
from towpath.core.job import FINISHED, Job, Reason, State
from towpath.core.lifecycle import lose
from towpath.ledger.memory.book import Book, forget_group
from towpath.ledger.memory.claims import wake
from towpath.ledger.memory.endings import Finishing, expire, hold
from towpath.ledger.memory.rows import Queue


def upkeep(book: Book, command: Upkeep, now: int) -> Upkept:
    left = command.limit
    left -= (reaped := _reap(book, command.dead, now, left))
    left -= (expired := expire(book, now, left))
    left -= (woken := _wake(book, now, left))
    left -= (purged := _purge(book, now, left))
    left -= (swept := _sweep(book, now, left))
    return Upkept(reaped, expired, woken, purged, swept, left < 1, _next_due(book, now))


def _reap(book: Book, dead: Sequence[str], now: int, limit: int) -> int:
    """First the jobs of dead owners, then those whose lease is over."""
    orphans = [job for seq in sorted(book.leases) if (job := book.jobs[seq]).owner in dead] if dead else []
    reaped = _lose(book, orphans[:limit], now)
    late = sorted((until, seq) for seq, until in book.leases.items() if until < now)
    lost = [book.jobs[seq] for until, seq in late if not _spared(book, until, seq, now)]
    return reaped + _lose(book, lost[: limit - reaped], now)


def _lose(book: Book, lost: Sequence[Job], now: int) -> int:
    ended: dict[State, list[int]] = {State.FAILED: [], State.CANCELED: []}
    for job in lost:
        change = lose(job, now)
        if change.state in FINISHED:
            book.put(job, replace(job, losses=change.losses))
            ended[change.state].append(job.seq)
        else:
            ready_at = job.ready_at if change.ready_at is None else change.ready_at
            back = replace(job, state=change.state, reason=change.reason, losses=change.losses, owner=None, lease_until=None)
            book.put(job, replace(back, ready_at=ready_at))
            hold(book, job.seq)
    finishing = Finishing(book, now)
    finishing.add(ended[State.FAILED], State.FAILED, Reason.LOST)
    finishing.add(ended[State.CANCELED], State.CANCELED, None)
    finishing.run()
    return len(lost)


def _wake(book: Book, now: int, limit: int) -> int:
    left = limit
    for name in sorted(book.active):
        left -= wake(book, book.active[name], now, left)
    return limit - left


def _purge(book: Book, now: int, limit: int) -> int:
    left = limit
    queues = [book.queues[name] for name in sorted(book.queues)]
    for queue in queues:
        for seq in queue.purges.take(now, left):
            book.delete(book.jobs[seq], now)
            left -= 1
    for queue in queues:
        for _ in range(min(left, _above(queue))):
            oldest = queue.purges.pop()
            assert oldest is not None
            book.delete(book.jobs[oldest[1]], now)
            left -= 1
    return limit - left


def _above(queue: Queue) -> int:
    """How many done and canceled jobs the queue has above what it keeps."""
    keep = KEEP if queue.keep is None else queue.keep
    return max(0, queue.counts[State.DONE] + queue.counts[State.CANCELED] - keep)


def _sweep(book: Book, now: int, limit: int) -> int:
    left = limit
    for id in book.tombstone_ends.take(now, left):
        del book.tombstones[id]
        left -= 1
    for token in book.reply_ends.take(now, left):
        del book.replies[token]
        left -= 1
    for key in book.note_ends.take(now, left):
        del book.notes[key]
        left -= 1
    for name in book.key_ends.take(now, left):
        _close_window(book, name)
        left -= 1
    left -= _sweep_parts(book, now, left)
    left -= _sweep_groups(book, now, left)
    book.dirty = book.dirty or left < limit
    return limit - left


def _close_window(book: Book, name: KeyName) -> None:
    """The window of a key is over: it is held by an unfinished job only."""
    row = book.keys[name]
    holder = book.jobs.get(row.seq)
    if holder is None or holder.state in FINISHED:
        del book.keys[name]
    else:
        book.keys[name] = replace(row, until=0)


def _sweep_groups(book: Book, now: int, limit: int) -> int:
    """Closed groups go some time after their last member."""
    count, kept = 0, []
    while count < limit and (entry := book.group_ends.pop(now)) is not None:
        if book.groups[entry[1]].members:
            kept.append(entry)
        else:
            forget_group(book, entry[1])
            count += 1
    for at, id in kept:
        book.group_ends.push(at, id)
    return count


def _sweep_parts(book: Book, now: int, limit: int) -> int:
    count = 0
    for queue, name in sorted(book.idle):
        part = book.parts[queue][name]
        if part.line.ready or part.running or part.configured:
            book.idle.discard((queue, name))
        elif part.next_at <= now and count < limit:
            book.idle.discard((queue, name))
            del book.parts[queue][name]
            count += 1
    return count


def _next_due(book: Book, now: int) -> int | None:
    return min(_times(book, now), default=None)


def _times(book: Book, now: int) -> Iterator[int]:
    if (at := _next_reap(book, now)) is not None:
        yield at
    for queue in book.queues.values():
        if _above(queue):
            yield now
        if queue.next_at > now and queue.counts[State.READY]:
            yield queue.next_at
        for at in (queue.scheduled.first(), queue.purges.first()):
            if at is not None:
                yield at
    for timeline in (book.expiries, book.tombstone_ends, book.reply_ends, book.note_ends, book.key_ends):
        if (at := timeline.first()) is not None:
            yield at
    yield from _part_times(book, now)


def _part_times(book: Book, now: int) -> Iterator[int]:
    for queue, name in list(book.timed):
        part = book.parts[queue].get(name)
        if part is None or part.next_at <= book.last:
            book.timed.discard((queue, name))
        elif part.next_at > now and part.line.ready:
            yield part.next_at


def _next_reap(book: Book, now: int) -> int | None:
    """A lease is past once its last microsecond is over, and not before the grace after a jump is."""
    return min((_reap_time(book, until, seq, now) for seq, until in book.leases.items()), default=None)


def _reap_time(book: Book, until: int, seq: int, now: int) -> int:
    if not _spared(book, until, seq, now):
        return until + 1
    return max(until + 1, book.jumps.until(_lease_len(book, seq), until))


def _spared(book: Book, until: int, seq: int, now: int) -> bool:
    return book.jumps.spares(_lease_len(book, seq), until, now)


def _lease_len(book: Book, seq: int) -> int:
    lease_len = book.jobs[seq].lease_len
    assert lease_len is not None
    return lease_len
