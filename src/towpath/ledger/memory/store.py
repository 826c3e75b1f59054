"""The whole state of a memory ledger, and the operations that change it.

Every change of a job goes through `add`, `put` or `delete`, which also update the counters and the heaps.
This module contains no rule, and no operation in it can fail."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from towpath.core.blobs import BLOB_TTL, BlobFact, BlobRow, PutChunk, check_put
from towpath.core.commands import TOMBSTONE, Note, Noted, QueueSet, Result, SetPart, SetQueue
from towpath.core.facts import KeyName, KeyTaken, Proxy, Tombstone, namespace
from towpath.core.finish import GroupGate
from towpath.core.history import Histories
from towpath.core.job import DONE, READY, RUNNING, SCHEDULED, SUSPECT, WAITING, Job, KeyPolicy
from towpath.core.lifecycle import (
    RETENTION,
    Jumps,
)
from towpath.core.results import ChunkPut
from towpath.core.views import GroupView, NotePlan, NoteView, given_settings, plan_notes
from towpath.ledger.memory.rows import GroupRecord, PartRecord, QueueRecord, Timeline

A = TypeVar("A", int, str)
B = TypeVar("B", int, str)
V = TypeVar("V", bool, GroupGate)

Claims = tuple[tuple[str, int], ...]
"""The stored result of a claim: id and fence of each job."""


class MemoryStore:
    """Every change sets `dirty`. `jobs` is in the order of seq: jobs are only added at the end."""

    def __init__(self) -> None:
        self.dirty = False
        self.last = 0
        self.next_seq = 1
        self.next_version = 1
        self.jumps = Jumps()
        self.jobs: dict[int, Job] = {}
        self.seqs: dict[str, int] = {}
        self.attempts: Histories = {}
        self.queues: dict[str, QueueRecord] = {}
        self.active: dict[str, QueueRecord] = {}
        """Every queue with ready or scheduled jobs, and some queues that no longer have any."""
        self.unused: dict[str, int] = {}
        """By queue: when upkeep has found it without jobs, settings and parts for the first time."""
        self.parts: dict[str, dict[str, PartRecord]] = {}
        self.idle: set[tuple[str, str]] = set()
        """Every part that can be swept, and some parts that are in use again."""
        self.groups: dict[str, GroupRecord] = {}
        self.timed: set[tuple[str, str]] = set()
        """Every part with a `next_at` in the future, and some parts with a past `next_at`."""
        self.edges_out: dict[int, dict[int, bool]] = {}
        """src -> dst -> run_anyway. `edges_in` has the same edges by dst. The gates of groups are stored
        alike."""
        self.edges_in: dict[int, dict[int, bool]] = {}
        self.gates_out: dict[str, dict[int, GroupGate]] = {}
        self.gates_in: dict[int, dict[str, GroupGate]] = {}
        """The gates of a group are kept after its end, because it may be reopened."""
        self.proxies: dict[str, Proxy] = {}
        """By the refused id."""
        self.proxies_of: dict[int, set[str]] = {}
        """The refused ids by the job that represents them."""
        self.names: dict[int, dict[str, int]] = {}
        """dst -> the id of a dependency -> the job that represents it."""
        self.keys: dict[KeyName, KeyTaken] = {}
        self.notes: dict[str, NoteView] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.replies: dict[str, tuple[Result | Claims, int]] = {}
        self.blobs: dict[str, BlobRow] = {}
        self.blob_of: dict[int, str] = {}
        """The blob of a job, by the seq of the job."""
        self.chunks: dict[str, dict[int, bytes]] = {}
        """By blob and number."""
        self.blob_ends: Timeline[str] = Timeline(self._blob_ends)
        self.leases: dict[int, int] = {}
        """The end of the lease by the seq of the running job. Not a timeline: most jobs end long before their
        lease."""
        self.expiries: Timeline[int] = Timeline(self._expires)
        self.tombstone_ends: Timeline[str] = Timeline(
            lambda at, name: (row := self.tombstones.get(name)) is not None and row.until == at
        )
        self.reply_ends: Timeline[str] = Timeline(
            lambda at, token: (row := self.replies.get(token)) is not None and row[1] == at
        )
        self.note_ends: Timeline[str] = Timeline(
            lambda at, key: (row := self.notes.get(key)) is not None and row.expires_at == at
        )
        self.key_ends: Timeline[KeyName] = Timeline(self._key_ends)
        self.group_ends: Timeline[str] = Timeline(self._group_ends)
        """The times from which closed groups without members may be deleted."""

    def find(self, id: str) -> Job | None:
        seq = self.seqs.get(id)
        return None if seq is None else self.jobs[seq]

    def queue(self, name: str) -> QueueRecord:
        """The row of the queue; a missing one is created."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = QueueRecord(name, self.parts.setdefault(name, {}), self.jobs)
            self.dirty = True
        return queue

    def part(self, queue: str, name: str) -> PartRecord:
        """The row of the part; a missing one is created."""
        parts = self.parts.setdefault(queue, {})
        part = parts.get(name)
        if part is None:
            part = parts[name] = PartRecord(queue, name, self.jobs)
        return part

    def add(self, jobs: list[Job]) -> None:
        """Insert jobs, in the order of seq."""
        rows, seqs, queue = self.jobs, self.seqs, None
        for job in jobs:
            seq = job.seq
            rows[seq] = job
            seqs[job.id] = seq
            if queue is None or queue.name != job.queue:
                queue = self.queue(job.queue)
            self._enter(queue, job)
            if job.group is not None:
                group = self.groups[job.group]
                group.members[seq] = None
                group.total += 1
                group.tally(job, 1)
        if jobs:
            self.next_seq = jobs[-1].seq + 1
            self.dirty = True

    def put(self, old: Job, new: Job) -> None:
        self.dirty = True
        self.jobs[new.seq] = new
        if old.state is new.state:
            return
        queue = self.queues[new.queue]
        self._leave(queue, old)
        self._enter(queue, new)
        if new.group is not None:
            group = self.groups[new.group]
            group.tally(old, -1)
            group.tally(new, 1)

    def lease(self, queue: QueueRecord, taken: list[Job], until: int) -> None:
        """`put` for a claim of ready jobs of one queue, without parts, with the same end of the lease."""
        if not taken:
            return
        self.dirty = True
        self.jobs.update([(job.seq, job) for job in taken])
        self.leases.update([(job.seq, until) for job in taken])
        queue.counts[READY] -= len(taken)
        queue.counts[RUNNING] += len(taken)
        queue.loose.ready -= len(taken)
        if queue.suspects:
            queue.suspects -= Counter([job.part for job in taken if job.losses >= SUSPECT])

    def hasten(self, new: Job) -> None:
        """`put` for a ready job with a changed priority. Its old entry in the heap becomes invalid."""
        self.dirty = True
        self.jobs[new.seq] = new
        queue = self.queues[new.queue]
        (queue.loose if new.part is None else queue.parts[new.part].queued).put_back(new)

    def put_done(self, queue: QueueRecord, done: Job) -> None:
        """`put` for a running job without part and group that ends as done, the most frequent end."""
        self.dirty = True
        seq = done.seq
        self.jobs[seq] = done
        del self.leases[seq]
        counts = queue.counts
        counts[RUNNING] -= 1
        counts[DONE] += 1
        if done.purge_at is not None:
            queue.purges.push(done.purge_at, seq)

    def delete(self, job: Job, now: int) -> None:
        """Delete a finished job. The counters of its group still include it."""
        self.dirty = True
        del self.jobs[job.seq], self.seqs[job.id]
        self.attempts.pop(job.seq, None)
        self._leave(self.queues[job.queue], job)
        self.unused.pop(job.queue, None)
        if job.group is not None:
            del self.groups[job.group].members[job.seq]
        for src in self.edges_in.pop(job.seq, ()):
            _remove(self.edges_out, src, job.seq)
        for dst in self.edges_out.pop(job.seq, ()):
            _remove(self.edges_in, dst, job.seq)
        for group in self.gates_in.pop(job.seq, ()):
            _remove(self.gates_out, group, job.seq)
        self.names.pop(job.seq, None)
        if (blob := self.blob_of.pop(job.seq, None)) is not None:
            self.put_blob(BlobRow(blob, None, now))
        self.add_tombstone(Tombstone(job.id, job.seq, job.state, job.settled_fence, None, now + TOMBSTONE))

    def add_tombstone(self, tombstone: Tombstone) -> None:
        self.dirty = True
        self.tombstones[tombstone.id] = tombstone
        self.tombstone_ends.push(tombstone.until, tombstone.id)

    def put_blob(self, row: BlobRow) -> None:
        self.dirty = True
        self.blobs[row.id] = row
        if row.job is None:
            self.blob_ends.push(row.until, row.id)
        else:
            self.blob_of[row.job] = row.id

    def link(self, src: int, dst: int, run_anyway: bool) -> None:
        self.edges_out.setdefault(src, {})[dst] = run_anyway
        self.edges_in.setdefault(dst, {})[src] = run_anyway

    def unlink(self, src: int, dst: int) -> None:
        _remove(self.edges_out, src, dst)
        _remove(self.edges_in, dst, src)

    def gate(self, group: str, dst: int, gate: GroupGate) -> None:
        self.gates_out.setdefault(group, {})[dst] = gate
        self.gates_in.setdefault(dst, {})[group] = gate

    def drop_gate(self, group: str, dst: int) -> None:
        _remove(self.gates_out, group, dst)
        _remove(self.gates_in, dst, group)

    def hold(self, row: KeyTaken) -> None:
        """Write a key row."""
        self.keys[row.name] = row
        if row.until:
            self.key_ends.push(row.until, row.name)

    def release(self, job: Job, now: int) -> None:
        """Release the key of a job that has ended, unless its window is still open."""
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return
        row = self.keys.get((namespace(job.queue), job.key))
        if row is None or row.seq != job.seq:
            return
        if row.until <= now:
            del self.keys[row.name]

    def set_next(self, part: PartRecord, next_at: int) -> None:
        """Write a part's `next_at`."""
        earlier = next_at < part.next_at
        part.next_at = next_at
        if next_at:
            self.timed.add((part.queue, part.name))
        if earlier and (queue := self.queues.get(part.queue)) is not None:
            queue.rotation.reinsert(part)

    def _enter(self, queue: QueueRecord, job: Job) -> None:
        state = job.state
        queue.counts[state] += 1
        if job.part is not None and state in WAITING:
            queue.waiting[job.part] += 1
        if state is READY:
            self.active[queue.name] = queue
            if job.losses >= SUSPECT:
                queue.suspects[job.part] += 1
            if job.part is None:
                queue.loose.add(job)
            else:
                part = self.part(job.queue, job.part)
                part.queued.add(job)
                queue.rotation.offer(part)
        elif state is RUNNING:
            assert job.lease_until is not None
            self.leases[job.seq] = job.lease_until
            if job.part is not None:
                queue.parts[job.part].running += 1
        elif state is SCHEDULED:
            self.active[queue.name] = queue
            queue.scheduled.push(job.ready_at, job.seq)
        elif job.purge_at is not None:
            queue.purges.push(job.purge_at, job.seq)
        if job.expires_at is not None and state in WAITING:
            self.expiries.push(job.expires_at, job.seq)

    def _leave(self, queue: QueueRecord, job: Job) -> None:
        state = job.state
        queue.counts[state] -= 1
        if job.part is not None and state in WAITING:
            queue.waiting -= Counter([job.part])
        if state is RUNNING:
            del self.leases[job.seq]
        elif state is READY and job.losses >= SUSPECT:
            queue.suspects -= Counter([job.part])
        if job.part is None:
            if state is READY:
                queue.loose.ready -= 1
        elif state is READY or state is RUNNING:
            part = queue.parts[job.part]
            if state is READY:
                part.queued.ready -= 1
            else:
                part.running -= 1
                queue.rotation.offer(part)
            if not (part.running or part.queued.ready or part.configured):
                self.idle.add((part.queue, part.name))

    def _expires(self, at: int, seq: int) -> bool:
        job = self.jobs.get(seq)
        return job is not None and job.expires_at == at and job.state in WAITING

    def _group_ends(self, at: int, name: str) -> bool:
        group = self.groups.get(name)
        return group is not None and group.closed_at is not None and group.closed_at + RETENTION == at

    def _blob_ends(self, at: int, id: str) -> bool:
        row = self.blobs.get(id)
        return row is not None and row.job is None and row.until == at

    def _key_ends(self, at: int, name: KeyName) -> bool:
        row = self.keys.get(name)
        return row is not None and row.until == at


def put_proxy(store: MemoryStore, proxy: Proxy) -> None:
    """Insert a proxy, or update its counter or the job that represents it."""
    store.dirty = True
    group, old = store.groups[proxy.group], store.proxies.get(proxy.id)
    if old is None:
        group.proxies[proxy.id] = None
        group.total += 1
    else:
        group.count(old.counted, -1)
        if old.job != proxy.job:
            store.proxies_of[old.job].discard(old.id)
    group.count(proxy.counted, 1)
    store.proxies[proxy.id] = proxy
    store.proxies_of.setdefault(proxy.job, set()).add(proxy.id)


class MemoryRelations:
    """The reads of `core.finish` on a store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.jobs, self.attempts = store.jobs, store.attempts

    def find(self, id: str) -> Job | None:
        return self._store.find(id)

    def dependents(self, seq: int) -> list[tuple[int, bool]]:
        return list(self._store.edges_out.get(seq, {}).items())

    def dependencies(self, seq: int) -> list[tuple[int, bool]]:
        return sorted(self._store.edges_in.get(seq, {}).items())

    def group_view(self, id: str) -> GroupView | None:
        group = self._store.groups.get(id)
        return None if group is None else group.view()

    def members(self, group: str) -> list[Job]:
        return [self.jobs[seq] for seq in self._store.groups[group].members]

    def gates_to(self, group: str) -> list[tuple[int, GroupGate]]:
        return list(self._store.gates_out.get(group, {}).items())

    def gates_of(self, seq: int) -> list[tuple[str, GroupGate]]:
        return sorted(self._store.gates_in.get(seq, {}).items(), key=lambda each: each[0])

    def proxies_in(self, group: str) -> list[Proxy]:
        return [self._store.proxies[id] for id in self._store.groups[group].proxies]

    def proxies_of(self, seq: int) -> list[Proxy]:
        return [self._store.proxies[id] for id in sorted(self._store.proxies_of.get(seq, ()))]

    def key_holder(self, key: KeyName) -> Job | None:
        row = self._store.keys.get(key)
        return None if row is None else self.jobs.get(row.seq)

    def retention(self, queue: str) -> int | None:
        return self._store.queues[queue].retention


def put_chunk(store: MemoryStore, command: PutChunk, now: int) -> ChunkPut:
    row, chunks = store.blobs.get(command.blob), store.chunks.get(command.blob, {})
    job = None if row is None else row.job
    check_put(command, job, chunks.get(command.number))
    if job is None:
        store.chunks.setdefault(command.blob, chunks)[command.number] = command.data
        store.put_blob(BlobRow(command.blob, None, now + BLOB_TTL))
    return ChunkPut(command.blob, command.number)


def blob_fact(store: MemoryStore, id: str) -> BlobFact | None:
    chunks = [(number, len(data)) for number, data in sorted(store.chunks.get(id, {}).items())]
    return BlobFact(store.blobs[id].job, chunks) if id in store.blobs else None


def forget_group(store: MemoryStore, id: str) -> None:
    for refused in store.groups[id].proxies:
        proxy = store.proxies.pop(refused)
        store.proxies_of[proxy.job].discard(refused)
        if not store.proxies_of[proxy.job]:
            del store.proxies_of[proxy.job]
    for dst in list(store.gates_out.get(id, ())):
        store.drop_gate(id, dst)
    del store.groups[id]


def _remove(rows: dict[A, dict[B, V]], at: A, other: B) -> None:
    row = rows[at]
    del row[other]
    if not row:
        del rows[at]


def note(store: MemoryStore, command: Note, now: int) -> Noted:
    plan = plan_notes(store.notes, (command,), store.next_version, now)
    write_notes(store, plan)
    for gate in command.gates:
        if isinstance(gate, SetQueue):
            set_queue(store, gate, now)
        else:
            set_part(store, gate, now)
    return plan[0][1]


def write_notes(store: MemoryStore, plan: NotePlan) -> None:
    for new, answer in plan:
        store.dirty = True
        if new is None:
            store.notes.pop(answer.key, None)
            continue
        store.next_version = new.version + 1
        store.notes[new.key] = new
        if new.expires_at is not None:
            store.note_ends.push(new.expires_at, new.key)


def set_queue(store: MemoryStore, command: SetQueue, now: int) -> QueueSet:
    queue = store.queue(command.queue)
    store.dirty = True
    store.unused.pop(command.queue, None)
    for field, value in given_settings(queue.why, queue.paused, command).items():
        setattr(queue, field, value)
    return QueueSet(command.queue)


def set_part(store: MemoryStore, command: SetPart, now: int) -> QueueSet:
    part = store.part(command.queue, command.part)
    store.dirty = True
    part.configured = True
    given = given_settings(part.why, part.paused, command)
    store.set_next(part, given.pop("next_at", part.next_at))
    for field, value in given.items():
        setattr(part, field, value)
    if (queue := store.queues.get(command.queue)) is not None:
        queue.rotation.offer(part)
    return QueueSet(command.queue, command.part)
