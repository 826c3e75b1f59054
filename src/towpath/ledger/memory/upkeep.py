"""Upkeep (reap, expire, wake, purge, sweep, and the time of the next), and the bulk commands."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from towpath.core import checks
from towpath.core.commands import (
    KEEP,
    Cancel,
    Canceled,
    GroupState,
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
from towpath.core.facts import KeyName, KeyTaken, namespace, node
from towpath.core.job import FINISHED, SUSPECT, WAITING, Job, KeyPolicy, Reason, State
from towpath.core.lifecycle import counter_of, given_back, held, lose, revived
from towpath.core.revival import DEAD, GroupGate, revive_obstacle, shut_gates
from towpath.ledger.memory.append import downstream
from towpath.ledger.memory.claim import wake
from towpath.ledger.memory.rows import GroupRecord, QueueRecord
from towpath.ledger.memory.settle import EndCascade, expire, hold
from towpath.ledger.memory.store import MemoryStore, forget_group, open_gates, put_proxy


def upkeep(store: MemoryStore, command: Upkeep, now: int) -> Upkept:
    left = command.limit
    left -= (reaped := _reap(store, command.dead, now, left))
    left -= (expired := expire(store, now, left))
    left -= (woken := _wake(store, now, left))
    left -= (purged := _purge(store, now, left))
    left -= (swept := _sweep(store, now, left))
    return Upkept(reaped, expired, woken, purged, swept, left < 1, _next_due(store, now))


def _reap(store: MemoryStore, dead: Sequence[str], now: int, limit: int) -> int:
    """Take back first the jobs of dead owners, then the jobs whose lease is over; return their number."""
    orphans = [job for seq in sorted(store.leases) if (job := store.jobs[seq]).owner in dead] if dead else []
    reaped = _lose(store, orphans[:limit], now)
    late = sorted((until, seq) for seq, until in store.leases.items() if until < now)
    lost = [store.jobs[seq] for until, seq in late if not _spared(store, until, seq, now)]
    return reaped + _lose(store, lost[: limit - reaped], now)


def _lose(store: MemoryStore, lost: Sequence[Job], now: int) -> int:
    ended: dict[State, list[int]] = {State.FAILED: [], State.CANCELED: []}
    for job in lost:
        change = lose(job, now)
        if change.state in FINISHED:
            store.put(job, replace(job, losses=change.losses))
            ended[change.state].append(job.seq)
        else:
            store.put(job, given_back(job, change))
            hold(store, job.seq)
    finishing = EndCascade(store, now)
    finishing.add(ended[State.FAILED], State.FAILED, Reason.LOST)
    finishing.add(ended[State.CANCELED], State.CANCELED, None)
    finishing.run()
    return len(lost)


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
    """How many done and canceled jobs the queue has above what it keeps."""
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
    left -= _sweep_groups(store, now, left)
    store.dirty = store.dirty or left < limit
    return limit - left


def _close_window(store: MemoryStore, name: KeyName) -> None:
    """The window of a key is over: it is held by an unfinished job only."""
    row = store.keys[name]
    holder = store.jobs.get(row.seq)
    if holder is None or holder.state in FINISHED:
        del store.keys[name]
    else:
        store.keys[name] = replace(row, until=0)


def _sweep_groups(store: MemoryStore, now: int, limit: int) -> int:
    """Closed groups go some time after their last member."""
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


def _sweep_parts(store: MemoryStore, now: int, limit: int) -> int:
    count = 0
    for queue, name in sorted(store.idle):
        part = store.parts[queue][name]
        if part.line.ready or part.running or part.configured:
            store.idle.discard((queue, name))
        elif part.next_at <= now and count < limit:
            store.idle.discard((queue, name))
            del store.parts[queue][name]
            count += 1
    return count


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
    for timeline in (store.expiries, store.tombstone_ends, store.reply_ends, store.note_ends, store.key_ends):
        if (at := timeline.first()) is not None:
            yield at
    yield from _part_times(store, now)


def _part_times(store: MemoryStore, now: int) -> Iterator[int]:
    for queue, name in list(store.timed):
        part = store.parts[queue].get(name)
        if part is None or part.next_at <= store.last:
            store.timed.discard((queue, name))
        elif part.next_at > now and part.line.ready:
            yield part.next_at


def _next_reap(store: MemoryStore, now: int) -> int | None:
    """A lease is past once its last microsecond is over, and not before the grace after a jump is."""
    return min((_reap_time(store, until, seq, now) for seq, until in store.leases.items()), default=None)


def _reap_time(store: MemoryStore, until: int, seq: int, now: int) -> int:
    if not _spared(store, until, seq, now):
        return until + 1
    return max(until + 1, store.jumps.until(_lease_len(store, seq), until))


def _spared(store: MemoryStore, until: int, seq: int, now: int) -> bool:
    return store.jumps.spares(_lease_len(store, seq), until, now)


def _lease_len(store: MemoryStore, seq: int) -> int:
    lease_len = store.jobs[seq].lease_len
    assert lease_len is not None
    return lease_len


def hasten(store: MemoryStore, command: Hasten, now: int) -> Hastened:
    found = [
        job
        for name in sorted(store.queues)
        if checks.matches(command.queue, name)
        for line in (store.queues[name].loose, *(part.line for part in store.queues[name].parts.values()))
        for job in {seq: store.jobs[seq] for _, seq in line}.values()
        if job.priority > command.priority and job.ready_at <= now - command.waited
    ]
    found.sort(
        key=lambda job: (
            job.queue,
            job.losses >= SUSPECT,
            job.part is not None,
            job.part or "",
            job.priority,
            job.seq,
        )
    )
    for job in found[: command.limit]:
        store.hasten(replace(job, priority=command.priority))
    return Hastened(min(len(found), command.limit), len(found) > command.limit)


UNFINISHED = frozenset(State) - FINISHED


def cancel(store: MemoryStore, command: Cancel, now: int) -> Canceled:
    jobs, more = _selected(store, command, UNFINISHED)
    waiting = [job.seq for job in jobs if job.state in WAITING]
    asked = [job for job in jobs if job.state is State.RUNNING]
    for job in asked:
        store.put(job, replace(job, cancel_requested=Reason.REQUESTED))
    finishing = EndCascade(store, now)
    finishing.add(waiting, State.CANCELED, Reason.REQUESTED)
    finishing.run()
    return Canceled(len(waiting), len(asked), more)


def purge(store: MemoryStore, command: Purge, now: int) -> Purged:
    jobs, more = _selected(store, command, FINISHED)
    for job in jobs:
        store.delete(job, now)
    return Purged(len(jobs), more)


def revive(store: MemoryStore, command: Revive, now: int) -> Revived:
    jobs, more = _selected(store, command, frozenset(State) if command.where.ids else DEAD)
    jobs.sort(key=lambda job: (job.reason is Reason.DEPENDENCY, job.seq))
    count = 0
    refused: dict[int, tuple[str, str]] = {}
    for job in jobs:
        if store.jobs[job.seq] is not job:
            # It came back with one that it needs.
            continue
        if (why := revive_obstacle(job, MemoryRevival(store))) is not None:
            refused[job.seq] = job.id, why
        else:
            count += _revive_with_dependents(store, job, now)
    return Revived(count, tuple([refused[seq] for seq in sorted(refused)]), more)


def _selected(
    store: MemoryStore, command: Cancel | Revive | Purge, states: Container[State]
) -> tuple[list[Job], bool]:
    where = command.where
    found = (job for job in _candidates(store, where) if job.state in states and where.matches(job))
    if isinstance(command, Cancel):
        found = (job for job in found if job.state is not State.RUNNING or job.cancel_requested is None)
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


class MemoryRevival:
    """The reads of `core.revival` on a store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def other_holder(self, job: Job) -> str | None:
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return None
        row = self._store.keys.get((namespace(job.queue), job.key))
        holder = None if row is None else self._store.jobs.get(row.seq)
        return None if holder is None or holder.seq == job.seq or holder.state in FINISHED else holder.id

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        return self._store.groups[group].state, self._store.groups[group].outcome

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        for src, run_anyway in sorted(self._store.edges_in.get(job.seq, {}).items()):
            if not run_anyway and (needed := self._store.jobs[src]).state in DEAD:
                return needed.id, needed.state
        return None

    def gates(self, job: Job) -> list[tuple[str, GroupGate]]:
        return sorted(self._store.gates_in.get(job.seq, {}).items(), key=lambda each: each[0])

    def dead_member(self, group: str) -> str | None:
        store, row = self._store, self._store.groups[group]
        proxied = [store.jobs[seq] for id in row.proxies if (seq := store.proxies[id].job) in store.jobs]
        members = [*(store.jobs[seq] for seq in row.members), *proxied]
        dead = [job for job in members if job.state in DEAD and job.reason is not Reason.SUPERSEDED]
        return min(dead, key=lambda job: (job.state is not State.FAILED, job.seq)).id if dead else None

    def open_dependencies(self, job: Job) -> set[str]:
        needed = [self._store.jobs[src] for src in self._store.edges_in.get(job.seq, ())]
        return {each.id for each in needed if each.state not in FINISHED}

    def counted_in(self, job: Job) -> set[str]:
        found = {self._store.proxies[id].group for id in self._store.proxies_of.get(job.seq, ())}
        found -= {id for id in found if self._store.groups[id].state is GroupState.ABORTING}
        return found if job.group is None else found | {job.group}

    def downstream(self, name: str) -> frozenset[str]:
        return downstream(self._store, name)


def _revive_with_dependents(store: MemoryStore, job: Job, now: int) -> int:
    """Revive a job and, level by level, what ended only because of it; how many came back."""
    needing = _revive(store, job, now)
    count = 1
    while needing:
        level, needing = sorted(needing), set()
        for seq in level:
            dependent = store.jobs[seq]
            if (
                dependent.state in DEAD
                and dependent.reason is Reason.DEPENDENCY
                and revive_obstacle(dependent, MemoryRevival(store)) is None
            ):
                needing |= _revive(store, dependent, now)
                count += 1
    return count


def _revive(store: MemoryStore, job: Job, now: int) -> set[int]:
    """The jobs that may have ended only because of it."""
    reads = MemoryRevival(store)
    for group, _, _ in shut_gates(job, reads):
        # The members because of which the group ended badly are deleted: nothing is left to wait for.
        store.drop_gate(group, job.seq)
    waits = sum(store.jobs[src].state not in FINISHED for src in store.edges_in.get(job.seq, ()))
    waits += len(open_gates(store, job.seq))
    if job.group is not None and store.groups[job.group].state is GroupState.OPEN:
        waits += 1
    new = revived(job, waits, now)
    store.put(job, new)
    if job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        store.hold(KeyTaken((namespace(job.queue), job.key), job.id, job.seq, 0, None))
    for dst in list(store.edges_out.get(job.seq, ())):
        if store.jobs[dst].state not in FINISHED:
            store.unlink(job.seq, dst)
    needing = {dst for dst, run_anyway in store.edges_out.get(job.seq, {}).items() if not run_anyway}
    for proxy in [store.proxies[id] for id in sorted(store.proxies_of.get(job.seq, ()))]:
        if proxy.counted != "unfinished" and store.groups[proxy.group].state is not GroupState.ABORTING:
            put_proxy(store, replace(proxy, counted="unfinished"))
    for group in sorted(reads.counted_in(new)):
        if store.groups[group].state is GroupState.CLOSED:
            needing |= _reopen(store, store.groups[group])
    return needing


def _reopen(store: MemoryStore, group: GroupRecord) -> set[int]:
    """A group that has ended waits again. What it woke and what has not begun waits again too; the jobs that
    may have ended only because of its outcome."""
    group.state, group.outcome, group.closed_at = GroupState.SEALED, None, None
    for proxy in [store.proxies[id] for id in group.proxies]:
        winner = store.jobs.get(proxy.job)
        counted = proxy.counted if winner is None else counter_of(winner.state, winner.reason)
        if (
            winner is not None
            and counted != proxy.counted
            and winner.id not in downstream(store, node(group.id))
        ):
            put_proxy(store, replace(proxy, counted=counted))
    found: set[int] = set()
    for dst, gate in list(store.gates_out.get(group.id, {}).items()):
        job = store.jobs[dst]
        if job.state in WAITING:
            store.put(job, held(job))
        elif job.state is State.RUNNING:
            store.drop_gate(group.id, dst)
        elif job.reason is Reason.DEPENDENCY and not gate.run_anyway:
            found.add(dst)
    return found
