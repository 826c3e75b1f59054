"""`check` recounts every counter and compares every index with the jobs; `dump` returns the whole state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Any

from msgspec.structs import astuple

from towpath.core import blobs
from towpath.core.commands import GroupState
from towpath.core.facts import Proxy, namespace, node
from towpath.core.finish import groups_waiting, open_groups
from towpath.core.history import HISTORY
from towpath.core.job import FINISHED, SUSPECT, WAITING, Job, KeyPolicy, State
from towpath.core.lifecycle import (
    inconsistencies,
)
from towpath.ledger.memory.rows import GroupRecord, QueueRecord
from towpath.ledger.memory.store import MemoryRelations, MemoryStore


def check(store: MemoryStore) -> list[str]:
    """The inconsistencies of the state, one sentence each."""
    checks = (
        *(_jobs, _waits, _queues, _parts, _groups, _proxies),
        *(_edges, _cycles, _keys, _remains, _blobs, _heaps),
    )
    return [sentence for each in checks for sentence in each(store)]


def _jobs(store: MemoryStore) -> Iterator[str]:
    if list(store.jobs) != sorted(store.jobs) or max(store.jobs, default=0) >= store.next_seq:
        yield "the jobs are not in the order of seq"
    if store.seqs != {job.id: job.seq for job in store.jobs.values()}:
        yield "the index of ids differs from the jobs"
    for seq, job in store.jobs.items():
        if seq != job.seq:
            yield f"job {job.id} has another seq than its place"
        yield from (f"job {job.id} {what}" for what in inconsistencies(job))


def _waits(store: MemoryStore) -> Iterator[str]:
    for job in store.jobs.values():
        waits = 0
        if job.state is State.BLOCKED:
            waits = sum(
                store.jobs[src].state not in FINISHED
                for src in store.edges_in.get(job.seq, ())
                if src in store.jobs
            )
            waits += len(open_groups(MemoryRelations(store), job.seq))
            waits += job.group is not None and store.groups[job.group].state is GroupState.OPEN
            if not waits:
                yield f"job {job.id} is blocked by nothing"
        if job.waits != waits:
            yield f"job {job.id} is {job.state} and waits for {job.waits}, counted {waits}"


def _queues(store: MemoryStore) -> Iterator[str]:
    counted = Counter((job.queue, job.state) for job in store.jobs.values())
    loose = Counter(job.queue for job in store.jobs.values() if job.state is State.READY and job.part is None)
    suspects = [
        (job.queue, job.part)
        for job in store.jobs.values()
        if job.state is State.READY and job.losses >= SUSPECT
    ]
    for name in {job.queue for job in store.jobs.values()} - set(store.queues):
        yield f"queue {name} has jobs and no row"
    for name, queue in store.queues.items():
        for state in State:
            if queue.counts[state] != counted[name, state]:
                yield f"queue {name} has {queue.counts[state]} {state}, counted {counted[name, state]}"
        if queue.loose.ready != loose[name]:
            yield f"queue {name} has {queue.loose.ready} ready without a part, counted {loose[name]}"
        if queue.suspects != (found := Counter(part for at, part in suspects if at == name)):
            yield f"queue {name} has {dict(queue.suspects)} ready suspects by part, counted {dict(found)}"


def _parts(store: MemoryStore) -> Iterator[str]:
    ready = Counter(
        (job.queue, job.part) for job in store.jobs.values() if job.state is State.READY and job.part
    )
    running = Counter(
        (job.queue, job.part) for job in store.jobs.values() if job.state is State.RUNNING and job.part
    )
    rows = {(queue, name): part for queue, parts in store.parts.items() for name, part in parts.items()}
    for place in {*ready, *running} - set(rows):
        yield f"part {place[1]} of {place[0]} has jobs and no row"
    for place, part in rows.items():
        if part.queued.ready != ready[place] or part.running != running[place]:
            yield (
                f"part {part.name} of {part.queue} has {part.queued.ready} ready and {part.running} running, "
                f"counted {ready[place]} and {running[place]}"
            )
        if part.eligible() and part.entry is None:
            yield f"part {part.name} of {part.queue} is missing in the rotation"
        if not (part.queued.ready or part.running or part.configured) and place not in store.idle:
            yield f"part {part.name} of {part.queue} would never be swept"


def _groups(store: MemoryStore) -> Iterator[str]:
    members: dict[str, list[Job]] = {}
    for job in store.jobs.values():
        if job.group is not None:
            members.setdefault(job.group, []).append(job)
    for id in set(members) - set(store.groups):
        yield f"group {id} has jobs and no row"
    for id, group in store.groups.items():
        proxies = [store.proxies[refused] for refused in group.proxies]
        yield from (f"group {id} {what}" for what in _group(group, members.get(id, []), proxies))


def _group(group: GroupRecord, members: list[Job], proxies: list[Proxy]) -> Iterator[str]:
    again = GroupRecord(group.id, group.on_failure, {}, 0)
    for job in members:
        again.tally(job, 1)
    for proxy in proxies:
        again.count(proxy.counted, 1)
    if list(group.members) != [job.seq for job in members]:
        yield "lists other members than it has"
    if group.unfinished != again.unfinished:
        yield f"has {group.unfinished} unfinished, counted {again.unfinished}"
    for ending in ("done", "failed", "canceled", "superseded"):
        # Deleted members are still counted, so there may be fewer.
        if getattr(group, ending) < getattr(again, ending):
            yield f"has {getattr(group, ending)} {ending}, counted {getattr(again, ending)}"
    if group.total != group.unfinished + group.done + group.failed + group.canceled + group.superseded:
        yield f"has {group.total} members, which is not the sum of its counters"
    closed = group.state is GroupState.CLOSED
    if closed != (group.outcome is not None) or closed != (group.closed_at is not None):
        yield f"is {group.state} with the outcome {group.outcome} at {group.closed_at}"
    if group.state in (GroupState.SEALED, GroupState.ABORTING) and not group.unfinished:
        yield f"is {group.state}, has nothing unfinished and is not closed"
    if group.state is GroupState.CLOSED and group.unfinished:
        yield f"is closed and has {group.unfinished} unfinished"
    if group.state is GroupState.ABORTING and any(job.state in WAITING for job in members):
        yield "is aborting and has members that wait"


def _proxies(store: MemoryStore) -> Iterator[str]:
    by_job = {(job, id) for job, ids in store.proxies_of.items() for id in ids}
    if by_job != {(proxy.job, id) for id, proxy in store.proxies.items()}:
        yield "the index of proxies differs from the proxies"
    for id, proxy in store.proxies.items():
        if proxy.group not in store.groups or id not in store.groups[proxy.group].proxies:
            yield f"the proxy for {id} belongs to no group"
        job = store.jobs.get(proxy.job)
        waits = job is not None and job.state not in FINISHED
        if proxy.counted == "unfinished" and not waits:
            yield f"the proxy for {id} waits for a job that has ended"
        if (
            waits
            and proxy.counted != "unfinished"
            and store.groups[proxy.group].state in (GroupState.OPEN, GroupState.SEALED)
        ):
            yield f"the proxy for {id} is counted as {proxy.counted} and its job has not ended"
    for dst in store.names:
        if dst not in store.jobs:
            yield f"names of dependencies without job {dst}"


def _cycles(store: MemoryStore) -> Iterator[str]:
    """Blocked jobs and groups that wait for each other would wait for ever."""
    waits: dict[str, list[str]] = {}
    for job in store.jobs.values():
        if job.state is State.BLOCKED:
            edges = [store.jobs[src] for src in store.edges_in.get(job.seq, ())]
            waits[job.id] = [src.id for src in edges if src.state not in FINISHED]
            waits[job.id] += [node(group) for group in open_groups(MemoryRelations(store), job.seq)]
        for group in groups_waiting(MemoryRelations(store), job) if job.state not in FINISHED else ():
            waits.setdefault(node(group), []).append(job.id)
    left = {name for name, needed in waits.items() if needed}
    while free := {name for name in left if not left.intersection(waits[name])}:
        left -= free
    if left:
        yield f"these wait for each other: {sorted(left)}"


def _edges(store: MemoryStore) -> Iterator[str]:
    out = {(src, dst, anyway) for src, dsts in store.edges_out.items() for dst, anyway in dsts.items()}
    if out != {(src, dst, anyway) for dst, srcs in store.edges_in.items() for src, anyway in srcs.items()}:
        yield "the edges differ by direction"
    for src, dst, _ in sorted(out):
        if src not in store.jobs or dst not in store.jobs:
            yield f"the edge from {src} to {dst} has an end without a job"
    gates = {(group, dst): gate for group, dsts in store.gates_out.items() for dst, gate in dsts.items()}
    if gates != {
        (group, dst): gate for dst, groups in store.gates_in.items() for group, gate in groups.items()
    }:
        yield "the gates differ by direction"
    for (group, dst), gate in sorted(gates.items(), key=lambda item: item[0]):
        if group not in store.groups or dst not in store.jobs:
            yield f"the gate of group {group} for {dst} has an end without a row"
        elif (
            (outcome := store.groups[group].outcome)
            and store.jobs[dst].state in WAITING
            and not gate.met(outcome)
        ):
            yield f"job {dst} is {store.jobs[dst].state} though group {group} is {outcome}"


def _keys(store: MemoryStore) -> Iterator[str]:
    for name, row in store.keys.items():
        job = store.jobs.get(row.seq)
        if name != row.name:
            yield f"key {name} has the row of {row.name}"
        if job is not None and (job.id != row.id or (namespace(job.queue), job.key) != name):
            yield f"key {name} is held by job {job.id}, which has another key"
        if (job is None or job.state in FINISHED) and not row.until:
            yield f"key {name} is held by {row.id}, which has ended, and has no window"
    for job in store.jobs.values():
        if job.state not in WAITING or job.key is None or job.key_policy is KeyPolicy.SERIAL:
            continue
        holder = store.keys.get((namespace(job.queue), job.key))
        if holder is None or holder.seq != job.seq:
            yield f"job {job.id} waits and does not hold its key {job.key}"


def _remains(store: MemoryStore) -> Iterator[str]:
    for seq, ends in store.attempts.items():
        job = store.jobs.get(seq)
        for end in ends:
            if job is None:
                yield f"attempt {end.number} is left of job number {seq}"
            elif not job.attempts - HISTORY <= end.number <= job.attempts + 1 - end.counted:
                yield f"attempt {end.number} of job {job.id} is none of the last of {job.attempts}"
    for id, tombstone in store.tombstones.items():
        if id in store.seqs or id != tombstone.id:
            yield f"there is a tombstone of job {id}, which exists"
        if tombstone.seq >= store.next_seq:
            yield f"the tombstone of {id} has a seq that was never assigned"
    versions = [note.version for note in store.notes.values()]
    if len(set(versions)) != len(versions) or max(versions, default=0) >= store.next_version:
        yield "the versions of the notes are not unique"
    for key, note in store.notes.items():
        if note.key != key or not 1 <= note.fence <= note.version:
            yield f"note {key} has version {note.version} and fence {note.fence}"


def _blobs(store: MemoryStore) -> Iterator[str]:
    headers = {seq: job.headers for seq, job in store.jobs.items()}
    sizes = {id: sum(map(len, chunks.values())) for id, chunks in store.chunks.items()}
    yield from blobs.inconsistencies(headers, store.blobs.values(), sizes)
    if store.blob_of != {row.job: id for id, row in store.blobs.items() if row.job is not None}:
        yield "the index of blobs differs from the blobs"
    ends = {(row.until, id) for id, row in store.blobs.items() if row.job is None}
    yield from _missing("blob ends", ends, store.blob_ends)


def _heaps(store: MemoryStore) -> Iterator[str]:
    """Every row that is due at some time must be in the heap of these times."""
    jobs = store.jobs.values()
    if store.leases != {job.seq: job.lease_until for job in jobs if job.state is State.RUNNING}:
        yield "the leases differ from the jobs"
    expiring = {
        (job.expires_at, job.seq) for job in jobs if job.state in WAITING and job.expires_at is not None
    }
    yield from _missing("expiries", expiring, store.expiries)
    ends = {(row.until, id) for id, row in store.tombstones.items()}
    yield from _missing("tombstone ends", ends, store.tombstone_ends)
    yield from _missing(
        "reply ends", {(row[1], token) for token, row in store.replies.items()}, store.reply_ends
    )
    notes = {(note.expires_at, key) for key, note in store.notes.items() if note.expires_at is not None}
    yield from _missing("note ends", notes, store.note_ends)
    windows = {(row.until, name) for name, row in store.keys.items() if row.until}
    yield from _missing("key ends", windows, store.key_ends)
    for queue in store.queues.values():
        yield from _queue_heaps(store, queue)


def _queue_heaps(store: MemoryStore, queue: QueueRecord) -> Iterator[str]:
    jobs = [job for job in store.jobs.values() if job.queue == queue.name]
    due = {(job.ready_at, job.seq) for job in jobs if job.state is State.SCHEDULED}
    yield from _missing(f"schedule of {queue.name}", due, queue.scheduled)
    purges = {(job.purge_at, job.seq) for job in jobs if job.purge_at is not None}
    yield from _missing(f"purges of {queue.name}", purges, queue.purges)
    heaps = [queue.loose, *(part.queued for part in queue.parts.values())]
    ready = {(job.priority, job.seq) for job in jobs if job.state is State.READY}
    yield from _missing(f"ready jobs of {queue.name}", ready, (entry for heap in heaps for entry in heap))
    if (due or ready) and queue.name not in store.active:
        yield f"queue {queue.name} is missing in the active queues"


def _missing(what: str, expected: Set[tuple[Any, Any]], found: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    if expected != set(found):
        yield f"the {what} differ from the jobs"


def dump(store: MemoryStore) -> dict[str, Any]:
    return {
        "jobs": [store.jobs[seq] for seq in sorted(store.jobs)],
        "attempts": [(seq, *astuple(end)) for seq, ends in sorted(store.attempts.items()) for end in ends],
        "edges": sorted(
            (src, dst, anyway) for src, dsts in store.edges_out.items() for dst, anyway in dsts.items()
        ),
        "gates": sorted(
            (group, dst, gate.run_anyway, gate.wanted.value if gate.wanted else "")
            for group, dsts in store.gates_out.items()
            for dst, gate in dsts.items()
        ),
        "proxies": sorted(
            (row.id, row.seq, row.group, row.job, row.counted) for row in store.proxies.values()
        ),
        "names": sorted((dst, id, src) for dst, names in store.names.items() for id, src in names.items()),
        "groups": [
            (group.view(), {ending: list(specs) for ending, specs in group.then.items()})
            for _, group in sorted(store.groups.items())
        ],
        "keys": [(*name, row.id, row.seq, row.until, row.runner) for name, row in sorted(store.keys.items())],
        "notes": [note for _, note in sorted(store.notes.items())],
        "queues": [(queue.view(), queue.served, queue.clock) for _, queue in sorted(store.queues.items())],
        "parts": [
            (part.view(), part.configured)
            for _, parts in sorted(store.parts.items())
            for _, part in sorted(parts.items())
        ],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in store.tombstones.values()
        ),
        "replies": sorted((token, until) for token, (_, until) in store.replies.items()),
        "blobs": sorted(astuple(row) for row in store.blobs.values()),
        "chunks": sorted((id, *chunk) for id, chunks in store.chunks.items() for chunk in chunks.items()),
        "next_seq": store.next_seq,
        "next_version": store.next_version,
        "last": store.last,
    }
