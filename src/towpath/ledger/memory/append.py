"""Append: read the facts for `admit`, and write the admission."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from towpath.core.admission import admit, walks
from towpath.core.commands import TOMBSTONE, GroupState
from towpath.core.facts import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyHolder,
    KeyName,
    Known,
    Origin,
    Place,
    Quota,
    Room,
    is_unrelated,
    key_of,
    node,
    places_of,
)
from towpath.core.job import WAITING, Job, Reason, Spec, State
from towpath.core.limits import spend
from towpath.core.revival import GroupGate
from towpath.ledger.memory.rows import Tombstone
from towpath.ledger.memory.store import MemoryStore, put_proxy

NOTHING = AppendFacts()
"""The facts about most appends."""


def decide(store: MemoryStore, specs: Sequence[Spec], now: int, origin: Origin | None = None) -> Admission:
    """What an append would do; raises `Refused`. Writes nothing."""
    return admit(specs, _facts(store, specs, now), now, store.next_seq, origin)


def insert(store: MemoryStore, admission: Admission, now: int) -> list[int]:
    """Write an admission up to its keys and groups; the superseded jobs, which are still to be finished."""
    after = store.next_seq + admission.numbers
    store.add(admission.jobs)
    store.next_seq = after
    for queue, name, count in admission.spent:
        part = store.part(queue, name)
        part.append_at = spend(part.append_at, part.append_rate, now, count)
    for old, newer in admission.handed:
        _hand_over(store, old, newer)
    for dst, id, src in admission.names:
        store.names.setdefault(dst, {})[id] = src
    for proxy in admission.proxies:
        put_proxy(store, proxy)
    if admission.edges or admission.gates:
        _write_edges(store, admission)
    if not (admission.keys or admission.aliases or admission.freed):
        # Only keys make an append ask or end older jobs.
        return []
    for seq in admission.asked:
        job = store.jobs[seq]
        if job.cancel_requested is None:
            store.put(job, replace(job, cancel_requested=Reason.SUPERSEDED))
    _write_keys(store, admission, now)
    return admission.superseded


def _write_edges(store: MemoryStore, admission: Admission) -> None:
    for src, dst, run_anyway in admission.edges:
        store.link(src, dst, run_anyway)
    for group, dst, run_anyway in admission.gates:
        store.gate(group, dst, GroupGate(run_anyway))


def _hand_over(store: MemoryStore, old: int, newer: int) -> None:
    """What waits for the older job waits for the newer one: dependents, and groups in which it represents a
    member."""
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
            store.bury(Tombstone(refused, seqs[winner], State.DONE, 0, winner, now + TOMBSTONE))
    for row in admission.keys:
        store.hold(row)
    for name in admission.freed:
        store.keys.pop(name, None)


def _facts(store: MemoryStore, specs: Sequence[Spec], now: int) -> AppendFacts:
    known: dict[str, Known] = {}
    rooms: dict[str, Room] = {}
    ids = {spec.id for spec in specs}
    if not all(
        rows.isdisjoint(ids) for rows in (store.seqs.keys(), store.tombstones.keys(), store.proxies.keys())
    ):
        for id in ids:
            _know(store, known, id)
    for name in {spec.queue for spec in specs}:
        queue = store.queues.get(name)
        if queue is not None and (queue.capacity is not None or queue.retention is not None):
            rooms[name] = Room(queue.capacity, queue.depth, queue.retention)
    quotas = _quotas(store, specs)
    if all(map(is_unrelated, specs)):
        return AppendFacts(known=known, rooms=rooms, quotas=quotas) if known or rooms or quotas else NOTHING
    holders = _holders(store, specs, known, now)
    reached = {name: downstream(store, name) for name in walks(specs, holders)}
    groups = _groups(store, specs)
    return AppendFacts(
        known=known, rooms=rooms, quotas=quotas, holders=holders, groups=groups, downstream=reached
    )


def _quotas(store: MemoryStore, specs: Sequence[Spec]) -> dict[Place, Quota]:
    found: dict[Place, Quota] = {}
    for queue, name in places_of(specs):
        part = store.parts.get(queue, {}).get(name)
        if part is not None and (part.capacity is not None or part.append_rate is not None):
            depth = store.queues[queue].waiting[name] if queue in store.queues else 0
            found[queue, name] = Quota(part.capacity, depth, part.append_rate, part.append_at)
    return found


def _know(store: MemoryStore, known: dict[str, Known], id: str) -> None:
    job = store.find(id)
    if job is not None:
        known[id] = Known(id, job.seq, job.state)
        return
    tombstone = store.tombstones.get(id)
    if tombstone is None:
        _know_proxy(store, known, id)
        return
    known[id] = Known(id, tombstone.seq, tombstone.state, True, tombstone.alias)
    if tombstone.alias is not None and tombstone.alias not in known:
        _know(store, known, tombstone.alias)
        # An alias may outlive all that is left of its winner.
        known.setdefault(tombstone.alias, Known(tombstone.alias, tombstone.seq, State.DONE, True))


def _know_proxy(store: MemoryStore, known: dict[str, Known], id: str) -> None:
    proxy = store.proxies.get(id)
    if proxy is None:
        return
    winner = store.jobs.get(proxy.job)
    if winner is None:
        known[id] = Known(id, proxy.job, State.DONE, True)
    else:
        known[id] = Known(id, winner.seq, winner.state, True, winner.id)
        known[winner.id] = Known(winner.id, winner.seq, winner.state)


def _holders(
    store: MemoryStore, specs: Sequence[Spec], known: dict[str, Known], now: int
) -> dict[KeyName, KeyHolder]:
    """Who holds the keys of the specs. What a spec waits for must be known, and so must the holders it may
    turn into."""
    holders: dict[KeyName, KeyHolder] = {}
    ids = {spec.id for spec in specs}
    for spec in specs:
        for after in spec.after:
            if not after.group:
                _know(store, known, after.id)
        name = key_of(spec)
        row = None if name is None else store.keys.get(name)
        if row is None:
            continue
        job = store.jobs.get(row.seq)
        # A runner that has stopped is nothing to wait for.
        runner = None if row.runner is None else store.jobs.get(row.runner)
        running = runner is not None and runner.state is State.RUNNING
        holders[row.name] = KeyHolder(
            row.id, row.seq, None if job is None else job.state, row.until, row.runner if running else None
        )
        _know(store, known, row.id)
        if row.until > now and row.id not in ids:
            known.setdefault(row.id, Known(row.id, row.seq, State.DONE, True))
    return holders


def _groups(store: MemoryStore, specs: Sequence[Spec]) -> dict[str, GroupFact]:
    names = {spec.group for spec in specs if spec.group is not None}
    names.update(after.id for spec in specs for after in spec.after if after.group)
    found = {name: store.groups[name] for name in names if name in store.groups}
    return {name: GroupFact(group.state, group.outcome) for name, group in found.items()}


def downstream(store: MemoryStore, start: str) -> frozenset[str]:
    """All unfinished jobs and groups that wait for a node."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        job = store.find(name)
        if job is None:
            # Of a closed group: the jobs that would wait again if it were reopened.
            waiting = [store.jobs[dst] for dst in store.gates_out.get(name.removeprefix("\0"), ())]
            found = {dst.id for dst in waiting if dst.state in WAITING}
        else:
            found = {
                dst.id
                for seq in store.edges_out.get(job.seq, ())
                if (dst := store.jobs[seq]).state is State.BLOCKED
            }
        # A job that is replaced leaves its own group.
        groups = groups_of(store, job, own=name != start)
        found |= {node(group) for group in groups if store.groups[group].state is not GroupState.CLOSED}
        todo.extend(found - reached)
        reached |= found
    return frozenset(reached)


def groups_of(store: MemoryStore, job: Job | None, own: bool = True) -> set[str]:
    """The groups that wait for a job: those in which it represents a member and, with `own`, the group of the
    job itself."""
    if job is None:
        return set()
    proxies = [store.proxies[id] for id in store.proxies_of.get(job.seq, ())]
    found = {proxy.group for proxy in proxies if proxy.counted == "unfinished"}
    return found | {job.group} if own and job.group is not None else found
