"""Recount everything that is counted, and look everything up that is looked up by an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Any

from towpath.core.admission import Proxy, namespace, node
from towpath.core.commands import GroupState
from towpath.core.job import FINISHED, SUSPECT, WAITING, Job, KeyPolicy, State
from towpath.core.lifecycle import REASONS
from towpath.ledger.memory.append import groups_of
from towpath.ledger.memory.rows import Group, Queue
from towpath.ledger.memory.store import Book, open_gates


def check(book: Book) -> list[str]:
    """What does not add up, as sentences."""
    checks = (_jobs, _waits, _queues, _parts, _groups, _proxies, _edges, _circles, _keys, _remains, _heaps)
    return [sentence for each in checks for sentence in each(book)]


def _jobs(book: Book) -> Iterator[str]:
    if list(book.jobs) != sorted(book.jobs) or max(book.jobs, default=0) >= book.next_seq:
        yield "the jobs are not in the order of seq"
    if book.seqs != {job.id: job.seq for job in book.jobs.values()}:
        yield "the index of ids differs from the jobs"
    for seq, job in book.jobs.items():
        wrong = [
            seq != job.seq and "has another seq than its place",
            job.reason not in REASONS[job.state] and f"is {job.state} for the reason {job.reason!s}",
            job.settled_fence > job.fence and "is settled with a fence it never had",
            job.attempts < 0 and "has less than no attempts",
            *_lease(job),
            *_finish(job),
        ]
        yield from (f"job {job.id} {what}" for what in wrong if what)


def _lease(job: Job) -> Iterator[str]:
    held = (job.owner is not None, job.lease_until is not None)
    if job.state is State.RUNNING:
        if held != (True, True) or job.fence < 1 or job.lease_len is None or job.started_at is None:
            yield "runs without owner, lease or fence"
    elif held != (False, False):
        yield f"is {job.state} and has an owner or a lease"


def _finish(job: Job) -> Iterator[str]:
    if (job.finished_at is not None) != (job.state in FINISHED):
        yield f"is {job.state} with finished_at {job.finished_at}"
    if (job.purge_at is not None) != (job.state in (State.DONE, State.CANCELED)):
        yield f"is {job.state} with purge_at {job.purge_at}"


def _waits(book: Book) -> Iterator[str]:
    for job in book.jobs.values():
        waits = 0
        if job.state is State.BLOCKED:
            waits = sum(
                book.jobs[src].state not in FINISHED
                for src in book.edges_in.get(job.seq, ())
                if src in book.jobs
            )
            waits += len(open_gates(book, job.seq))
            waits += job.group is not None and book.groups[job.group].state is GroupState.OPEN
            if not waits:
                yield f"job {job.id} is blocked by nothing"
        if job.waits != waits:
            yield f"job {job.id} is {job.state} and waits for {job.waits}, counted {waits}"


def _queues(book: Book) -> Iterator[str]:
    counted = Counter((job.queue, job.state) for job in book.jobs.values())
    loose = Counter(job.queue for job in book.jobs.values() if job.state is State.READY and job.part is None)
    suspects = [
        (job.queue, job.part)
        for job in book.jobs.values()
        if job.state is State.READY and job.losses >= SUSPECT
    ]
    for name in {job.queue for job in book.jobs.values()} - set(book.queues):
        yield f"queue {name} has jobs and no row"
    for name, queue in book.queues.items():
        for state in State:
            if queue.counts[state] != counted[name, state]:
                yield f"queue {name} says {queue.counts[state]} {state}, counted {counted[name, state]}"
        if queue.loose.ready != loose[name]:
            yield f"queue {name} says {queue.loose.ready} ready without a part, counted {loose[name]}"
        if queue.suspects != (found := Counter(part for at, part in suspects if at == name)):
            yield f"queue {name} says {dict(queue.suspects)} ready suspects by part, counted {dict(found)}"


def _parts(book: Book) -> Iterator[str]:
    ready = Counter(
        (job.queue, job.part) for job in book.jobs.values() if job.state is State.READY and job.part
    )
    running = Counter(
        (job.queue, job.part) for job in book.jobs.values() if job.state is State.RUNNING and job.part
    )
    rows = {(queue, name): part for queue, parts in book.parts.items() for name, part in parts.items()}
    for place in {*ready, *running} - set(rows):
        yield f"part {place[1]} of {place[0]} has jobs and no row"
    for place, part in rows.items():
        if part.line.ready != ready[place] or part.running != running[place]:
            yield (
                f"part {part.name} of {part.queue} says {part.line.ready} ready and {part.running} running, "
                f"counted {ready[place]} and {running[place]}"
            )
        if part.willing() and part.spot is None:
            yield f"part {part.name} of {part.queue} is missing in the rotation"
        if not (part.line.ready or part.running or part.configured) and place not in book.idle:
            yield f"part {part.name} of {part.queue} would never be swept"


def _groups(book: Book) -> Iterator[str]:
    members: dict[str, list[Job]] = {}
    for job in book.jobs.values():
        if job.group is not None:
            members.setdefault(job.group, []).append(job)
    for id in set(members) - set(book.groups):
        yield f"group {id} has jobs and no row"
    for id, group in book.groups.items():
        proxies = [book.proxies[refused] for refused in group.proxies]
        yield from (f"group {id} {what}" for what in _group(group, members.get(id, []), proxies))


def _group(group: Group, members: list[Job], proxies: list[Proxy]) -> Iterator[str]:
    again = Group(group.id, group.on_failure, {}, 0)
    for job in members:
        again.tally(job, 1)
    for proxy in proxies:
        again.count(proxy.counted, 1)
    if list(group.members) != [job.seq for job in members]:
        yield "lists other members than it has"
    if group.unfinished != again.unfinished:
        yield f"says {group.unfinished} unfinished, counted {again.unfinished}"
    for ending in ("done", "failed", "canceled", "superseded"):
        # Deleted members are still counted, so there may be fewer.
        if getattr(group, ending) < getattr(again, ending):
            yield f"says {getattr(group, ending)} {ending}, counted {getattr(again, ending)}"
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


def _proxies(book: Book) -> Iterator[str]:
    by_job = {(job, id) for job, ids in book.proxies_of.items() for id in ids}
    if by_job != {(proxy.job, id) for id, proxy in book.proxies.items()}:
        yield "the index of proxies differs from the proxies"
    for id, proxy in book.proxies.items():
        if proxy.group not in book.groups or id not in book.groups[proxy.group].proxies:
            yield f"the proxy for {id} belongs to no group"
        job = book.jobs.get(proxy.job)
        waits = job is not None and job.state not in FINISHED
        if proxy.counted == "unfinished" and not waits:
            yield f"the proxy for {id} waits for a job that has ended"
        if (
            waits
            and proxy.counted != "unfinished"
            and book.groups[proxy.group].state in (GroupState.OPEN, GroupState.SEALED)
        ):
            yield f"the proxy for {id} is counted as {proxy.counted} and its job has not ended"
    for dst in book.names:
        if dst not in book.jobs:
            yield f"names of dependencies without job {dst}"


def _circles(book: Book) -> Iterator[str]:
    """Blocked jobs that wait for themselves would wait for ever."""
    waits: dict[str, list[str]] = {}
    for job in book.jobs.values():
        if job.state is State.BLOCKED:
            edges = [book.jobs[src] for src in book.edges_in.get(job.seq, ())]
            waits[job.id] = [src.id for src in edges if src.state not in FINISHED]
            waits[job.id] += [node(group) for group in open_gates(book, job.seq)]
        for group in groups_of(book, job) if job.state not in FINISHED else ():
            waits.setdefault(node(group), []).append(job.id)
    left = {name for name, needed in waits.items() if needed}
    while free := {name for name in left if not left.intersection(waits[name])}:
        left -= free
    if left:
        yield f"these wait for each other: {sorted(left)}"


def _edges(book: Book) -> Iterator[str]:
    out = {(src, dst, anyway) for src, dsts in book.edges_out.items() for dst, anyway in dsts.items()}
    if out != {(src, dst, anyway) for dst, srcs in book.edges_in.items() for src, anyway in srcs.items()}:
        yield "the edges differ by direction"
    for src, dst, _ in sorted(out):
        if src not in book.jobs or dst not in book.jobs:
            yield f"the edge from {src} to {dst} has an end without a job"
    gates = {(group, dst): gate for group, dsts in book.gates_out.items() for dst, gate in dsts.items()}
    if gates != {
        (group, dst): gate for dst, groups in book.gates_in.items() for group, gate in groups.items()
    }:
        yield "the gates differ by direction"
    for (group, dst), gate in sorted(gates.items(), key=lambda item: item[0]):
        if group not in book.groups or dst not in book.jobs:
            yield f"the gate of group {group} for {dst} has an end without a row"
        elif (
            (outcome := book.groups[group].outcome)
            and book.jobs[dst].state in WAITING
            and not gate.met(outcome)
        ):
            yield f"job {dst} is {book.jobs[dst].state} though group {group} is {outcome}"


def _keys(book: Book) -> Iterator[str]:
    for name, row in book.keys.items():
        job = book.jobs.get(row.seq)
        if name != row.name:
            yield f"key {name} has the row of {row.name}"
        if job is not None and (job.id != row.id or (namespace(job.queue), job.key) != name):
            yield f"key {name} is held by job {job.id}, which does not want it"
        if (job is None or job.state in FINISHED) and not row.until:
            yield f"key {name} is held by {row.id}, which is over, and has no window"
    for job in book.jobs.values():
        if job.state not in WAITING or job.key is None or job.key_policy is KeyPolicy.SERIAL:
            continue
        holder = book.keys.get((namespace(job.queue), job.key))
        if holder is None or holder.seq != job.seq:
            yield f"job {job.id} waits and does not hold its key {job.key}"


def _remains(book: Book) -> Iterator[str]:
    for id, tombstone in book.tombstones.items():
        if id in book.seqs or id != tombstone.id:
            yield f"there is a tombstone of job {id}, which is alive"
        if tombstone.seq >= book.next_seq:
            yield f"the tombstone of {id} has a seq that was never given"
    versions = [note.version for note in book.notes.values()]
    if len(set(versions)) != len(versions) or max(versions, default=0) >= book.next_version:
        yield "the versions of the notes are not unique"
    for key, note in book.notes.items():
        if note.key != key or not 1 <= note.fence <= note.version:
            yield f"note {key} has version {note.version} and fence {note.fence}"


def _heaps(book: Book) -> Iterator[str]:
    """Whatever comes due must be found when it does."""
    jobs = book.jobs.values()
    if book.leases != {job.seq: job.lease_until for job in jobs if job.state is State.RUNNING}:
        yield "the leases differ from the jobs"
    aging = {(job.expires_at, job.seq) for job in jobs if job.state in WAITING and job.expires_at is not None}
    yield from _missing("expiries", aging, book.expiries)
    ends = {(row.until, id) for id, row in book.tombstones.items()}
    yield from _missing("tombstone ends", ends, book.tombstone_ends)
    yield from _missing(
        "reply ends", {(row[1], token) for token, row in book.replies.items()}, book.reply_ends
    )
    notes = {(note.expires_at, key) for key, note in book.notes.items() if note.expires_at is not None}
    yield from _missing("note ends", notes, book.note_ends)
    windows = {(row.until, name) for name, row in book.keys.items() if row.until}
    yield from _missing("key ends", windows, book.key_ends)
    for queue in book.queues.values():
        yield from _queue_heaps(book, queue)


def _queue_heaps(book: Book, queue: Queue) -> Iterator[str]:
    jobs = [job for job in book.jobs.values() if job.queue == queue.name]
    due = {(job.ready_at, job.seq) for job in jobs if job.state is State.SCHEDULED}
    yield from _missing(f"schedule of {queue.name}", due, queue.scheduled)
    purges = {(job.purge_at, job.seq) for job in jobs if job.purge_at is not None}
    yield from _missing(f"purges of {queue.name}", purges, queue.purges)
    lines = [queue.loose, *(part.line for part in queue.parts.values())]
    ready = {(job.priority, job.seq) for job in jobs if job.state is State.READY}
    yield from _missing(f"lines of {queue.name}", ready, (entry for line in lines for entry in line))
    if (due or ready) and queue.name not in book.active:
        yield f"queue {queue.name} is not among the active ones"


def _missing(what: str, expected: Set[tuple[Any, Any]], found: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    if expected != set(found):
        yield f"the {what} differ from the jobs"


def dump(book: Book) -> dict[str, Any]:
    return {
        "jobs": [book.jobs[seq] for seq in sorted(book.jobs)],
        "edges": sorted(
            (src, dst, anyway) for src, dsts in book.edges_out.items() for dst, anyway in dsts.items()
        ),
        "gates": sorted(
            (group, dst, gate.run_anyway, gate.outcome.value if gate.outcome else "")
            for group, dsts in book.gates_out.items()
            for dst, gate in dsts.items()
        ),
        "proxies": sorted(
            (row.id, row.seq, row.group, row.job, row.counted) for row in book.proxies.values()
        ),
        "names": sorted((dst, id, src) for dst, names in book.names.items() for id, src in names.items()),
        "groups": [
            (group.view(), {ending: list(specs) for ending, specs in group.then.items()})
            for _, group in sorted(book.groups.items())
        ],
        "keys": [(*name, row.id, row.seq, row.until, row.runner) for name, row in sorted(book.keys.items())],
        "notes": [note for _, note in sorted(book.notes.items())],
        "queues": [(queue.view(), queue.served, queue.clock) for _, queue in sorted(book.queues.items())],
        "parts": [
            (part.view(), part.configured)
            for _, parts in sorted(book.parts.items())
            for _, part in sorted(parts.items())
        ],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in book.tombstones.values()
        ),
        "replies": sorted((token, until) for token, (_, until) in book.replies.items()),
        "next_seq": book.next_seq,
        "next_version": book.next_version,
        "last": book.last,
    }
