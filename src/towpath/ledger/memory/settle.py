"""Append and settle, each applied completely or not at all, and the writes of `core.finish`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from towpath.core.admission import admit
from towpath.core.blobs import BlobFact, BlobRow
from towpath.core.commands import (
    TOMBSTONE,
    Append,
    Appended,
    GroupSet,
    GroupState,
    OnFailure,
    Open,
    Settle,
    Settled,
)
from towpath.core.facts import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyTaken,
    Origin,
    Place,
    Proxy,
    Quota,
    Room,
    Tombstone,
    gather,
    is_unrelated,
    places_of,
)
from towpath.core.finish import (
    EndCascade,
    GroupGate,
    ask_to_stop,
    downstream,
    finish,
    finish_admitted,
    give_back,
    settled_before,
)
from towpath.core.history import end_attempt
from towpath.core.job import DONE, FINISHED, RUNNING, Done, Job, Reason, Refuse, Release, Spec, State
from towpath.core.lifecycle import (
    RETENTION,
    completed,
    ended,
    settled,
)
from towpath.core.lifecycle import settle as settle_change
from towpath.core.limits import spend
from towpath.core.views import plan_notes
from towpath.errors import Unsupported
from towpath.ledger.memory.rows import GroupRecord
from towpath.ledger.memory.store import (
    MemoryRelations,
    MemoryStore,
    blob_fact,
    put_proxy,
    write_notes,
)

NOTHING = AppendFacts()
"""The facts about an append of jobs without relations, limits and known ids, the most frequent append."""


def append(store: MemoryStore, command: Append, now: int) -> Appended:
    admission = _decide(store, command.specs, now, Origin() if command.inside else None)
    _write(store, admission, now)
    return Appended(admission.answers)


def _write(store: MemoryStore, admission: Admission, now: int) -> None:
    """Write an admission and its consequences."""
    _insert(store, admission, now)
    finish_admitted(MemoryRecords(store), admission, now)


def _decide(store: MemoryStore, specs: Sequence[Spec], now: int, origin: Origin | None = None) -> Admission:
    """The admission of an append. Writes nothing. Raises `Refused`."""
    return admit(specs, _facts(store, specs, now), now, store.next_seq, origin)


def _insert(store: MemoryStore, admission: Admission, now: int) -> None:
    """Write an admission without its consequences."""
    after = store.next_seq + admission.numbers
    for id in admission.opened:
        store.groups[id] = GroupRecord(id, OnFailure.CONTINUE, {}, now)
        store.groups[id].state = GroupState.SEALED
    store.add(admission.jobs)
    store.next_seq = after
    for queue, name, count in admission.spent:
        part = store.part(queue, name)
        part.append_at = spend(part.append_at, part.append_rate, now, count)
    for old, newer in admission.handed:
        _move_dependents(store, old, newer)
    for dst, id, src in admission.names:
        store.names.setdefault(dst, {})[id] = src
    for proxy in admission.proxies:
        put_proxy(store, proxy)
    if admission.edges or admission.gates:
        _write_edges(store, admission)
    for id, seq in admission.blobs:
        store.put_blob(BlobRow(id, seq, 0))
    if not (admission.keys or admission.aliases or admission.freed):
        # Only keys make an append ask older jobs to stop.
        return
    for seq in admission.asked:
        job = store.jobs[seq]
        ask_to_stop(MemoryRecords(store), job, Reason.SUPERSEDED)
    _write_keys(store, admission, now)


def _write_edges(store: MemoryStore, admission: Admission) -> None:
    for src, dst, run_anyway in admission.edges:
        store.link(src, dst, run_anyway)
    for group, dst, run_anyway in admission.gates:
        store.gate(group, dst, GroupGate(run_anyway))


def _move_dependents(store: MemoryStore, old: int, newer: int) -> None:
    """Move the dependents of the older job, and its proxies, to the newer one."""
    former = store.jobs[old].id
    for dst, run_anyway in list(store.edges_out.get(old, {}).items()):
        store.unlink(old, dst)
        store.link(newer, dst, run_anyway)
        names = store.names.setdefault(dst, {})
        names.update({id: newer for id, src in names.items() if src == old}, **{former: newer})
    for id in sorted(store.proxies_of.get(old, ())):
        if store.proxies[id].counted == "unfinished":
            put_proxy(store, replace(store.proxies[id], job=newer))


def _write_keys(store: MemoryStore, admission: Admission, now: int) -> None:
    if admission.aliases:
        seqs = {placed.id: placed.seq for placed in admission.answers}
        for refused, winner in admission.aliases:
            store.add_tombstone(Tombstone(refused, seqs[winner], State.DONE, 0, winner, now + TOMBSTONE))
    for row in admission.keys:
        store.hold(row)
    for name in admission.freed:
        store.keys.pop(name, None)


def _facts(store: MemoryStore, specs: Sequence[Spec], now: int) -> AppendFacts:
    plain = all(map(is_unrelated, specs)) and not any(
        (queue := store.queues.get(name)) is not None
        and (queue.capacity is not None or queue.retention is not None)
        for name in {spec.queue for spec in specs}
    )
    if plain and not places_of(specs):
        ids = {spec.id for spec in specs}
        stored = store.seqs.keys(), store.tombstones.keys(), store.proxies.keys()
        if all(rows.isdisjoint(ids) for rows in stored):
            return NOTHING
    return gather(MemoryAppend(store), specs, now)


class MemoryAppend(MemoryRelations):
    """The reads of `core.facts.gather` on a store."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.keys, self.tombstones, self.proxies = store.keys, store.tombstones, store.proxies

    def group_fact(self, id: str) -> GroupFact | None:
        group = self._store.groups.get(id)
        return None if group is None else GroupFact(group.state, group.outcome)

    def room(self, queue: str) -> Room | None:
        row = self._store.queues.get(queue)
        return None if row is None else Room(row.capacity, row.depth, row.retention)

    def quota(self, place: Place) -> Quota | None:
        queue, name = place
        part = self._store.parts.get(queue, {}).get(name)
        if part is None or (part.capacity is None and part.append_rate is None):
            return None
        depth = self._store.queues[queue].waiting[name] if queue in self._store.queues else 0
        return Quota(part.capacity, depth, part.append_rate, part.append_at)

    def downstream(self, name: str) -> frozenset[str]:
        return downstream(self, name)

    def blob_fact(self, id: str) -> BlobFact | None:
        return blob_fact(self._store, id)


def settle(store: MemoryStore, command: Settle, now: int) -> Settled:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger is in memory")
    job = store.find(command.id)
    if job is None or job.state is not RUNNING or job.fence != command.fence:
        return settled_before(job, store.tombstones.get(command.id), command)
    if command.spawn or command.notes:
        origin = Origin(job.id, job.group, job.correlation_id)
        admission = _decide(store, command.spawn, now, origin) if command.spawn else None
        notes = plan_notes(store.notes, command.notes, store.next_version, now)
        if admission is not None:
            _write(store, admission, now)
        write_notes(store, notes)
        # The children may have asked their parent to stop.
        job = store.jobs[job.seq]
    return Settled(job.id, _settle(store, job, command, now))


def _settle(store: MemoryStore, job: Job, command: Settle, now: int) -> State:
    outcome, retention = command.outcome, store.queues[job.queue].retention
    if type(outcome) is Done:
        return _finish(store, job, completed(job, outcome, now, retention), now)
    change = settle_change(job, outcome, now)
    end_attempt(store.attempts, job, change, getattr(outcome, "error", None), now)
    new = settled(job, change, outcome)
    if type(outcome) is Release or type(outcome) is Refuse:
        _give_back(store, job, now)
    if change.state not in FINISHED:
        give_back(MemoryRecords(store), new, change)
        return change.state
    return _finish(store, job, ended(new, change.state, change.reason, now, retention), now)


def _finish(store: MemoryStore, job: Job, over: Job, now: int) -> State:
    """Store the end of a job, with its consequences for dependents and groups."""
    _end(store, job, over)
    if job.group is not None or job.seq in store.edges_out or job.seq in store.proxies_of:
        cascade = EndCascade(MemoryRecords(store), now)
        cascade.follow([over], over.state, {})
        cascade.run()
    return over.state


def _give_back(store: MemoryStore, job: Job, now: int) -> None:
    """Return the permit of the rate: the attempt did not begin."""
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


def _end(store: MemoryStore, job: Job, new: Job) -> None:
    """Store a job that has ended. `EndCascade` handles the jobs and groups that wait for it."""
    if job.state is RUNNING and new.state is DONE and job.part is None and job.group is None:
        store.put_done(store.queues[job.queue], new)
    else:
        store.put(job, new)
    if job.key is not None:
        store.release(job, new.finished_at or 0)


def expire(store: MemoryStore, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that have expired; return their number."""
    due = store.expiries.take(now, limit)
    if due:
        finish(MemoryRecords(store), [store.jobs[seq] for seq in due], State.FAILED, Reason.EXPIRED, now)
    return len(due)


class MemoryRecords(MemoryRelations):
    """The writes of `core.finish` on a store."""

    def put(self, job: Job) -> None:
        self._store.put(self.jobs[job.seq], job)

    def end(self, job: Job) -> None:
        _end(self._store, self.jobs[job.seq], job)

    def put_proxy(self, proxy: Proxy) -> None:
        put_proxy(self._store, proxy)

    def set_group(self, id: str, **changes: Any) -> None:
        self._store.dirty = True
        group = self._store.groups[id]
        for field, value in changes.items():
            setattr(group, field, value)
        if group.closed_at is not None:
            self._store.group_ends.push(group.closed_at + RETENTION, id)

    def take_callbacks(self, group: str, outcome: State) -> Sequence[Spec]:
        return self._store.groups[group].then.pop(outcome, ())

    def append(self, specs: Sequence[Spec], now: int) -> Admission:
        admission = _decide(self._store, specs, now, Origin(closes=True))
        _insert(self._store, admission, now)
        return admission

    def add_gate(self, group: str, seq: int, gate: GroupGate) -> None:
        self._store.gate(group, seq, gate)

    def drop_gate(self, group: str, seq: int) -> None:
        self._store.drop_gate(group, seq)

    def drop_edge(self, src: int, dst: int) -> None:
        self._store.unlink(src, dst)

    def take_key(self, key: KeyTaken) -> None:
        self._store.hold(key)
