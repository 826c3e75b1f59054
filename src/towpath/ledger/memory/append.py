"""Admissions: the facts for `admit`, and writing what it says."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from towpath.core.admission import (
    Admission,
    Facts,
    GroupFact,
    Holder,
    KeyName,
    Known,
    Origin,
    Place,
    Quota,
    Room,
    admit,
    key_of,
    node,
    places_of,
    plain,
    walks,
)
from towpath.core.commands import TOMBSTONE, GroupState
from towpath.core.job import WAITING, Job, Reason, Spec, State
from towpath.core.limits import spend
from towpath.ledger.memory.rows import Gate, Tombstone
from towpath.ledger.memory.store import Book, put_proxy

NOTHING = Facts()
"""The facts about most appends."""


def decide(book: Book, specs: Sequence[Spec], now: int, origin: Origin | None = None) -> Admission:
    """What an append would do; raises `Refused`. Writes nothing."""
    return admit(specs, _facts(book, specs, now), now, book.next_seq, origin)


def insert(book: Book, admission: Admission, now: int) -> list[int]:
    """Write an admission up to its keys and groups; the superseded jobs, which are still to be finished."""
    after = book.next_seq + admission.numbers
    book.add(admission.jobs)
    book.next_seq = after
    for queue, name, count in admission.spent:
        part = book.part(queue, name)
        part.append_at = spend(part.append_at, part.append_rate, now, count)
    for old, newer in admission.handed:
        _hand_over(book, old, newer)
    for dst, id, src in admission.names:
        book.names.setdefault(dst, {})[id] = src
    for proxy in admission.proxies:
        put_proxy(book, proxy)
    if admission.edges or admission.gates:
        _write_edges(book, admission)
    if not (admission.keys or admission.aliases or admission.freed):
        # Only keys make an append ask or end older jobs.
        return []
    for seq in admission.asked:
        job = book.jobs[seq]
        if job.cancel_requested is None:
            book.put(job, replace(job, cancel_requested=Reason.SUPERSEDED))
    _write_keys(book, admission, now)
    return admission.superseded


def _write_edges(book: Book, admission: Admission) -> None:
    for src, dst, run_anyway in admission.edges:
        book.link(src, dst, run_anyway)
    for group, dst, run_anyway in admission.gates:
        book.gate(group, dst, Gate(run_anyway))


def _hand_over(book: Book, old: int, newer: int) -> None:
    """What waits for the older job waits for the newer one: dependents, and groups in which it represents a
    member."""
    former = book.jobs[old].id
    for dst, run_anyway in list(book.edges_out.get(old, {}).items()):
        book.unlink(old, dst)
        book.link(newer, dst, run_anyway)
        names = book.names.setdefault(dst, {})
        names.update({id: newer for id, src in names.items() if src == old}, **{former: newer})
    for id in sorted(book.proxies_of.get(old, ())):
        if book.proxies[id].counted == "unfinished":
            put_proxy(book, replace(book.proxies[id], job=newer))


def _write_keys(book: Book, admission: Admission, now: int) -> None:
    if admission.aliases:
        seqs = {placed.id: placed.seq for placed in admission.answers}
        for refused, winner in admission.aliases:
            book.bury(Tombstone(refused, seqs[winner], State.DONE, 0, winner, now + TOMBSTONE))
    for row in admission.keys:
        book.hold(row)
    for name in admission.freed:
        book.keys.pop(name, None)


def _facts(book: Book, specs: Sequence[Spec], now: int) -> Facts:
    known: dict[str, Known] = {}
    rooms: dict[str, Room] = {}
    ids = {spec.id for spec in specs}
    if not all(
        rows.isdisjoint(ids) for rows in (book.seqs.keys(), book.tombstones.keys(), book.proxies.keys())
    ):
        for id in ids:
            _know(book, known, id)
    for name in {spec.queue for spec in specs}:
        queue = book.queues.get(name)
        if queue is not None and (queue.capacity is not None or queue.retention is not None):
            rooms[name] = Room(queue.capacity, queue.depth, queue.retention)
    quotas = _quotas(book, specs)
    if plain(specs):
        return Facts(known=known, rooms=rooms, quotas=quotas) if known or rooms or quotas else NOTHING
    holders = _holders(book, specs, known, now)
    reached = {name: downstream(book, name) for name in walks(specs, holders)}
    groups = _groups(book, specs)
    return Facts(known=known, rooms=rooms, quotas=quotas, holders=holders, groups=groups, downstream=reached)


def _quotas(book: Book, specs: Sequence[Spec]) -> dict[Place, Quota]:
    found: dict[Place, Quota] = {}
    for queue, name in places_of(specs):
        part = book.parts.get(queue, {}).get(name)
        if part is not None and (part.capacity is not None or part.append_rate is not None):
            depth = book.queues[queue].waiting[name] if queue in book.queues else 0
            found[queue, name] = Quota(part.capacity, depth, part.append_rate, part.append_at)
    return found


def _know(book: Book, known: dict[str, Known], id: str) -> None:
    job = book.find(id)
    if job is not None:
        known[id] = Known(id, job.seq, job.state)
        return
    tombstone = book.tombstones.get(id)
    if tombstone is None:
        _know_proxy(book, known, id)
        return
    known[id] = Known(id, tombstone.seq, tombstone.state, True, tombstone.alias)
    if tombstone.alias is not None and tombstone.alias not in known:
        _know(book, known, tombstone.alias)
        # An alias may outlive all that is left of its winner.
        known.setdefault(tombstone.alias, Known(tombstone.alias, tombstone.seq, State.DONE, True))


def _know_proxy(book: Book, known: dict[str, Known], id: str) -> None:
    proxy = book.proxies.get(id)
    if proxy is None:
        return
    winner = book.jobs.get(proxy.job)
    if winner is None:
        known[id] = Known(id, proxy.job, State.DONE, True)
    else:
        known[id] = Known(id, winner.seq, winner.state, True, winner.id)
        known[winner.id] = Known(winner.id, winner.seq, winner.state)


def _holders(book: Book, specs: Sequence[Spec], known: dict[str, Known], now: int) -> dict[KeyName, Holder]:
    """Who holds the keys of the specs. What a spec waits for must be known, and so must the holders it may
    turn into."""
    holders: dict[KeyName, Holder] = {}
    ids = {spec.id for spec in specs}
    for spec in specs:
        for after in spec.after:
            if not after.group:
                _know(book, known, after.id)
        name = key_of(spec)
        row = None if name is None else book.keys.get(name)
        if row is None:
            continue
        job = book.jobs.get(row.seq)
        # A runner that has stopped is nothing to wait for.
        runner = None if row.runner is None else book.jobs.get(row.runner)
        running = runner is not None and runner.state is State.RUNNING
        holders[row.name] = Holder(
            row.id, row.seq, None if job is None else job.state, row.until, row.runner if running else None
        )
        _know(book, known, row.id)
        if row.until > now and row.id not in ids:
            known.setdefault(row.id, Known(row.id, row.seq, State.DONE, True))
    return holders


def _groups(book: Book, specs: Sequence[Spec]) -> dict[str, GroupFact]:
    names = {spec.group for spec in specs if spec.group is not None}
    names.update(after.id for spec in specs for after in spec.after if after.group)
    found = {name: book.groups[name] for name in names if name in book.groups}
    return {name: GroupFact(group.state, group.outcome) for name, group in found.items()}


def downstream(book: Book, start: str) -> frozenset[str]:
    """All unfinished jobs and groups that wait for a node."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        job = book.find(name)
        if job is None:
            # Of a group that has ended: those that would wait again if it were reopened.
            waiting = [book.jobs[dst] for dst in book.gates_out.get(name.removeprefix("\0"), ())]
            found = {dst.id for dst in waiting if dst.state in WAITING}
        else:
            found = {
                dst.id
                for seq in book.edges_out.get(job.seq, ())
                if (dst := book.jobs[seq]).state is State.BLOCKED
            }
        # A job that is replaced leaves its own group.
        groups = groups_of(book, job, own=name != start)
        found |= {node(group) for group in groups if book.groups[group].state is not GroupState.CLOSED}
        todo.extend(found - reached)
        reached |= found
    return frozenset(reached)


def groups_of(book: Book, job: Job | None, own: bool = True) -> set[str]:
    """The groups that wait for a job: those in which it represents a member and, with `own`, the group of the
    job itself."""
    if job is None:
        return set()
    proxies = [book.proxies[id] for id in book.proxies_of.get(job.seq, ())]
    found = {proxy.group for proxy in proxies if proxy.counted == "unfinished"}
    return found | {job.group} if own and job.group is not None else found
