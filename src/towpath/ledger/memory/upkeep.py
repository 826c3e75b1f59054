"""Upkeep (reap, expire, wake, purge, sweep, and the time when the next one is due), and the bulk commands."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from towpath.core import checks, finish
from towpath.core.blobs import SWEPT_CHUNKS
from towpath.core.commands import (
    KEEP,
    Cancel,
    Canceled,
    Hasten,
    Hastened,
    Purge,
    Purged,
    Revive,
    Revived,
    Selector,
    Upkeep,
    Upkept,
)
from towpath.core.facts import KeyName
from towpath.core.job import FINISHED, Job, State
from towpath.core.lanes import ageing_order
from towpath.core.lifecycle import interrupts
from towpath.core.revival import DEAD, RecordRevivals, revive_all
from towpath.core.views import QUEUE_KEPT, is_unused
from towpath.ledger.memory.claim import wake
from towpath.ledger.memory.rows import QueueRecord
from towpath.ledger.memory.settle import MemoryRecords, expire
from towpath.ledger.memory.store import MemoryStore, forget_group


def upkeep(store: MemoryStore, command: Upkeep, now: int) -> Upkept:
    left = command.limit
    reaped, failed = _reap(store, command.dead, now, left)
    left -= reaped
    left -= (expired := expire(store, now, left))
    left -= (woken := _wake(store, now, left))
    left -= (purged := _purge(store, now, left))
    left -= (swept := _sweep(store, now, left))
    return Upkept(reaped, expired, woken, purged, swept, left < 1, _next_due(store, now), failed)


def _reap(store: MemoryStore, dead: Sequence[str], now: int, limit: int) -> tuple[int, tuple[str, ...]]:
    """Take back first the jobs of dead owners, then the jobs with an ended lease; return their number, and
    the ids of the jobs that have failed."""
    orphans = [job for seq in sorted(store.leases) if (job := store.jobs[seq]).owner in dead] if dead else []
    records, orphans = MemoryRecords(store), orphans[:limit]
    failed = finish.lose_all(records, orphans, now)
    late = sorted((until, seq) for seq, until in store.leases.items() if until < now)
    lost = [job for _, seq in late if store.jumps.reap_time(job := store.jobs[seq], now) <= now]
    lost = lost[: limit - len(orphans)]
    failed += finish.lose_all(records, lost, now)
    return len(orphans) + len(lost), tuple(sorted(failed))


def _wake(store: MemoryStore, now: int, limit: int) -> int:
    left = limit
    for name in sorted(store.active):
        left -= wake(store, store.active[name], now, left)
    return limit - left


def _purge(store: MemoryStore, now: int, limit: int) -> int:
    left = limit
    queues = [store.queues[name] for name in sorted(store.queues)]
    for queue in queues:
        for seq in queue.purges.take(now, left):
            store.delete(store.jobs[seq], now)
            left -= 1
    for queue in queues:
        for _ in range(min(left, _above(queue))):
            oldest = queue.purges.pop()
            assert oldest is not None
            store.delete(store.jobs[oldest[1]], now)
            left -= 1
    return limit - left


def _above(queue: QueueRecord) -> int:
    """The number of done and canceled jobs beyond the number that the queue keeps."""
    keep = KEEP if queue.keep is None else queue.keep
    return max(0, queue.counts[State.DONE] + queue.counts[State.CANCELED] - keep)


def _sweep(store: MemoryStore, now: int, limit: int) -> int:
    left = limit
    for id in store.tombstone_ends.take(now, left):
        del store.tombstones[id]
        left -= 1
    for token in store.reply_ends.take(now, left):
        del store.replies[token]
        left -= 1
    for key in store.note_ends.take(now, left):
        del store.notes[key]
        left -= 1
    for name in store.key_ends.take(now, left):
        _close_window(store, name)
        left -= 1
    left -= _sweep_parts(store, now, left)
    left -= _sweep_queues(store, now, left)
    left -= _sweep_groups(store, now, left)
    left -= _sweep_blobs(store, now, left)
    store.dirty = store.dirty or left < limit
    return limit - left


def _close_window(store: MemoryStore, name: KeyName) -> None:
    """Close the window of a key. From now on only an unfinished job holds the key."""
    row = store.keys[name]
    holder = store.jobs.get(row.seq)
    if holder is None or holder.state in FINISHED:
        del store.keys[name]
    else:
        store.keys[name] = replace(row, until=0)


def _sweep_groups(store: MemoryStore, now: int, limit: int) -> int:
    """Delete closed groups without members after their retention."""
    count, kept = 0, []
    while count < limit and (entry := store.group_ends.pop(now)) is not None:
        if store.groups[entry[1]].members:
            kept.append(entry)
        else:
            forget_group(store, entry[1])
            count += 1
    for at, id in kept:
        store.group_ends.push(at, id)
    return count


def _sweep_blobs(store: MemoryStore, now: int, limit: int) -> int:
    """Delete the chunks of blobs without a job that are due, and the blobs without chunks."""
    left = most = min(limit, SWEPT_CHUNKS)
    while left and (entry := store.blob_ends.pop(now)) is not None:
        id, chunks = entry[1], store.chunks[entry[1]]
        doomed = sorted(chunks)[:left]
        left -= len(doomed)
        for number in doomed:
            del chunks[number]
        if chunks:
            store.blob_ends.push(*entry)
        else:
            del store.blobs[id], store.chunks[id]
    return most - left


def _sweep_parts(store: MemoryStore, now: int, limit: int) -> int:
    count = 0
    for queue, name in sorted(store.idle):
        part = store.parts[queue][name]
        if part.queued.ready or part.running or part.configured:
            store.idle.discard((queue, name))
        elif part.next_at <= now and count < limit:
            store.idle.discard((queue, name))
            del store.parts[queue][name]
            count += 1
    return count


def _sweep_queues(store: MemoryStore, now: int, limit: int) -> int:
    """Delete queues that have been unused for long, and note the time for queues that are unused now."""
    if not limit:
        return 0
    empty = [queue for queue in store.queues.values() if not any(queue.counts.values())]
    found = [queue.name for queue in empty if is_unused(queue.view(), len(queue.parts), now)]
    since = [(store.unused[name], name) for name in found if name in store.unused]
    over = [name for at, name in sorted(since) if at + QUEUE_KEPT <= now][:limit]
    for name in over:
        del store.queues[name], store.unused[name]
        store.active.pop(name, None)
    new = {name: now for name in found if name not in store.unused and name in store.queues}
    store.unused |= new
    store.dirty = store.dirty or bool(new)
    return len(over)


def _next_due(store: MemoryStore, now: int) -> int | None:
    return min(_times(store, now), default=None)


def _times(store: MemoryStore, now: int) -> Iterator[int]:
    if (at := _next_reap(store, now)) is not None:
        yield at
    for queue in store.queues.values():
        if _above(queue):
            yield now
        if queue.next_at > now and queue.counts[State.READY]:
            yield queue.next_at
        for at in (queue.scheduled.first(), queue.purges.first()):
            if at is not None:
                yield at
    small = store.tombstone_ends, store.reply_ends, store.note_ends, store.blob_ends
    for timeline in (store.expiries, *small, store.key_ends):
        if (at := timeline.first()) is not None:
            yield at
    yield from _part_times(store, now)


def _part_times(store: MemoryStore, now: int) -> Iterator[int]:
    for queue, name in list(store.timed):
        part = store.parts[queue].get(name)
        if part is None or part.next_at <= store.last:
            store.timed.discard((queue, name))
        elif part.next_at > now and part.queued.ready:
            yield part.next_at


def _next_reap(store: MemoryStore, now: int) -> int | None:
    return min([store.jumps.reap_time(store.jobs[seq], now) for seq in store.leases], default=None)


def hasten(store: MemoryStore, command: Hasten, now: int) -> Hastened:
    found = [
        job
        for name in sorted(store.queues)
        if checks.matches(command.queue, name)
        for heap in (store.queues[name].loose, *(part.queued for part in store.queues[name].parts.values()))
        for job in {seq: store.jobs[seq] for _, seq in heap}.values()
        if job.priority > command.priority and job.ready_at <= now - command.waited
    ]
    found.sort(key=ageing_order)
    for job in found[: command.limit]:
        store.hasten(replace(job, priority=command.priority))
    return Hastened(min(len(found), command.limit), len(found) > command.limit)


UNFINISHED = frozenset(State) - FINISHED


def cancel(store: MemoryStore, command: Cancel, now: int) -> Canceled:
    jobs, more = _selected(store, command, UNFINISHED)
    return Canceled(*finish.cancel(MemoryRecords(store), jobs, now), more)


def purge(store: MemoryStore, command: Purge, now: int) -> Purged:
    jobs, more = _selected(store, command, FINISHED)
    for job in jobs:
        store.delete(job, now)
    return Purged(len(jobs), more)


def revive(store: MemoryStore, command: Revive, now: int) -> Revived:
    jobs, more = _selected(store, command, frozenset(State) if command.where.ids else DEAD)
    return Revived(*revive_all(jobs, RecordRevivals(MemoryRecords(store), now)), more)


def _selected(
    store: MemoryStore, command: Cancel | Revive | Purge, states: Container[State]
) -> tuple[list[Job], bool]:
    where = command.where
    found = (job for job in _candidates(store, where) if job.state in states and where.matches(job))
    if isinstance(command, Cancel):
        found = (
            job for job in found if job.state is not State.RUNNING or not interrupts(job.cancel_requested)
        )
    jobs = list(islice(found, command.limit + 1))
    return jobs[: command.limit], len(jobs) > command.limit


def _candidates(store: MemoryStore, where: Selector) -> Iterator[Job]:
    if where.ids:
        return iter(
            [store.jobs[seq] for seq in sorted({store.seqs[id] for id in where.ids if id in store.seqs})]
        )
    if where.group is not None:
        group = store.groups.get(where.group)
        return iter([]) if group is None else (store.jobs[seq] for seq in group.members)
    return iter(store.jobs.values())
