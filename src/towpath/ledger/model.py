"""The model: the oracle that every other ledger is compared with.

One dict per table, linear scans, `sorted()`, counts computed when they are read. A command works on a copy of
the state, so a command that is refused, or that raises, leaves the state as it was. There is no index, no
heap and no fast path. This file is `docs/ledger-rules.md` in Python: read it from top to bottom. The ledger
around it is `ledger/model_ledger.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from towpath.core import blobs, checks, commands, facts, finish, history, lifecycle, views
from towpath.core.admission import admit
from towpath.core.commands import KEEP, PROMOTE, TOMBSTONE, GroupState, OnFailure, Result
from towpath.core.finish import GroupGate
from towpath.core.job import (
    FINISHED,
    SERIAL,
    SUSPECT,
    WAITING,
    ClaimedJob,
    Job,
    Reason,
    Refuse,
    Release,
    Spec,
    State,
)
from towpath.core.lanes import ageing_order, narrowed
from towpath.core.lifecycle import RETENTION, Jumps, counter_of
from towpath.core.limits import PartTurn, Pick, passed_over, permits, share, spend
from towpath.core.results import ChunkPut, changed_anything
from towpath.core.revival import DEAD, RecordRevivals, resolve, revive_all
from towpath.errors import LostClaim, Unsupported

BLOCKED, SCHEDULED, READY, RUNNING, DONE, FAILED, CANCELED = State
OPEN, SEALED, ABORTING, CLOSED = GroupState
UNFINISHED = frozenset(State) - FINISHED
ENDINGS = ("done", "failed", "canceled", "superseded")


class Rows:
    """The whole state, and the scans that read it. Rows are frozen, so a copy of the dicts is a copy of the
    state. The counts in the rows of queues, parts and groups are not kept: `queue_view`, `part_view` and
    `group_view` compute them."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        """By seq."""
        self.attempts: history.Histories = {}
        self.queues: dict[str, views.QueueView] = {}
        self.turns: dict[str, tuple[int, int]] = {}
        """By queue: `served` of the jobs without a part, and the virtual clock of the queue."""
        self.unused: dict[str, int] = {}
        """By queue: when upkeep has found it without jobs, settings and parts for the first time."""
        self.parts: dict[facts.Place, views.PartView] = {}
        self.configured: dict[facts.Place, bool] = {}
        """The parts that were set by hand and stay when they are empty."""
        self.groups: dict[str, views.GroupView] = {}
        self.thens: dict[str, Mapping[str, tuple[Spec, ...]]] = {}
        """By group: the callbacks of each outcome that has not occurred."""
        self.deleted: dict[tuple[str, str], int] = {}
        """By group and counter: the members that are deleted."""
        self.edges: dict[tuple[int, int], bool] = {}
        """By (src seq, dst seq): is any end of src sufficient for dst?"""
        self.gates: dict[tuple[str, int], GroupGate] = {}
        """By (group, dst seq). The gates of a closed group stay, because the group may be reopened."""
        self.proxies: dict[str, facts.Proxy] = {}
        """By id: members of groups that were refused for their keys. Another job represents each of them."""
        self.names: dict[tuple[int, str], int] = {}
        """By (dst seq, id of a dependency): the seq of the job that represents the dependency."""
        self.keys: dict[facts.KeyName, facts.KeyTaken] = {}
        self.notes: dict[str, views.NoteView] = {}
        self.tombstones: dict[str, facts.Tombstone] = {}
        self.replies: dict[str, tuple[Result, int]] = {}
        """By token: the answer, and the time until which it is kept."""
        self.blobs: dict[str, blobs.BlobRow] = {}
        self.chunks: dict[tuple[str, int], bytes] = {}
        """By blob and number."""
        self.next_seq = 1
        self.next_version = 1
        self.touched = 0
        """Writes of jobs, notes and settings, also of a row that stays as it was: a write moves the ledger's
        time."""

    def find(self, id: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.id == id), None)

    def held(self, id: str, fence: int) -> Job | None:
        job = self.find(id)
        return job if job is not None and job.state is RUNNING and job.fence == fence else None

    def of(self, *states: State, queue: str | None = None) -> list[Job]:
        """The jobs in these states, by seq."""
        found = [job for job in self.jobs.values() if job.state in states and queue in (None, job.queue)]
        return sorted(found, key=lambda job: job.seq)

    def count(self, queue: str, *states: State, part: str | None = None) -> int:
        """The jobs of a queue, or of one of its parts, in these states."""
        return sum(part in (None, job.part) for job in self.of(*states, queue=queue))

    def ready(self, queue: str, part: str | None) -> list[Job]:
        """The ready jobs of a part (None: the jobs without a part) in the order in which they are claimed."""
        found = [job for job in self.of(READY, queue=queue) if job.part == part]
        return sorted(found, key=lambda job: (job.priority, job.seq))

    def members(self, group: str) -> list[Job]:
        return sorted([job for job in self.jobs.values() if job.group == group], key=lambda job: job.seq)

    def proxies_in(self, group: str) -> list[facts.Proxy]:
        found = [proxy for proxy in self.proxies.values() if proxy.group == group]
        return sorted(found, key=lambda proxy: proxy.seq)

    def queue_view(self, name: str) -> views.QueueView:
        counts = views.Counts(*[self.count(name, State(field)) for field in views.Counts.__struct_fields__])
        oldest = min([job.ready_at for job in self.of(READY, queue=name)], default=None)
        return replace(self.queues[name], counts=counts, oldest_ready=oldest)

    def part_view(self, place: facts.Place) -> views.PartView:
        queue, name = place
        ready, running = (self.count(queue, state, part=name) for state in (READY, RUNNING))
        return replace(self.parts[place], ready=ready, running=running)

    def group_view(self, id: str) -> views.GroupView | None:
        if id not in self.groups:
            return None
        counts = Counter({counter: n for (group, counter), n in self.deleted.items() if group == id})
        counts.update([counter_of(job.state, job.reason) for job in self.members(id)])
        counts.update([proxy.counted for proxy in self.proxies_in(id)])
        fields = {counter: counts[counter] for counter in ("unfinished", *ENDINGS)}
        return replace(self.groups[id], total=counts.total(), **fields)


class RuleReads(Rows):
    """The reads that the rules in `core` need, as scans: see `finish.Relations` and `facts.AppendReads`."""

    def dependents(self, seq: int) -> list[tuple[int, bool]]:
        return sorted([(dst, any_end) for (src, dst), any_end in self.edges.items() if src == seq])

    def dependencies(self, seq: int) -> list[tuple[int, bool]]:
        return sorted([(src, any_end) for (src, dst), any_end in self.edges.items() if dst == seq])

    def gates_to(self, group: str) -> list[tuple[int, GroupGate]]:
        return [(dst, gate) for (id, dst), gate in self.gates.items() if id == group]

    def gates_of(self, seq: int) -> list[tuple[str, GroupGate]]:
        found = [(group, gate) for (group, dst), gate in self.gates.items() if dst == seq]
        return sorted(found, key=lambda each: each[0])

    def proxies_of(self, seq: int) -> list[facts.Proxy]:
        found = [proxy for proxy in self.proxies.values() if proxy.job == seq]
        return sorted(found, key=lambda proxy: proxy.id)

    def key_holder(self, key: facts.KeyName) -> Job | None:
        return self.jobs.get(self.keys[key].seq) if key in self.keys else None

    def retention(self, queue: str) -> int | None:
        return self.queues[queue].retention

    def group_fact(self, id: str) -> facts.GroupFact | None:
        return facts.GroupFact(self.groups[id].state, self.groups[id].outcome) if id in self.groups else None

    def room(self, queue: str) -> facts.Room | None:
        if queue not in self.queues:
            return None
        row = self.queues[queue]
        return facts.Room(row.capacity, self.count(queue, *WAITING), row.retention)

    def quota(self, place: facts.Place) -> facts.Quota | None:
        row = self.parts.get(place)
        if row is None or (row.capacity, row.append_rate) == (None, None):
            return None
        waiting = self.count(place[0], *WAITING, part=place[1])
        return facts.Quota(row.capacity, waiting, row.append_rate, row.append_at)

    def downstream(self, name: str) -> frozenset[str]:
        return finish.downstream(self, name)

    def blob_fact(self, id: str) -> blobs.BlobFact | None:
        found = sorted([(number, len(data)) for (blob, number), data in self.chunks.items() if blob == id])
        return blobs.BlobFact(self.blobs[id].job, found) if id in self.blobs else None


class Tables(RuleReads):
    """The state with the writes that keep related rows consistent."""

    def copy(self) -> Tables:
        made = Tables()
        for name, value in vars(self).items():
            setattr(made, name, dict(value) if isinstance(value, dict) else value)
        return made

    def put(self, job: Job) -> None:
        """Insert or replace a job. Its queue gets a row, and so does its part once the job is ready."""
        self.touched += 1
        self.jobs[job.seq] = job
        self.queue(job.queue)
        if job.part is not None and job.state is READY:
            self.part(job.queue, job.part)

    def queue(self, name: str) -> views.QueueView:
        new = views.QueueView(name, views.Counts(), None, False, None, None, None, None, 0, None, None)
        self.turns.setdefault(name, (0, 0))
        return self.queues.setdefault(name, new)

    def part(self, queue: str, name: str) -> views.PartView:
        cap = 1 if name.startswith(SERIAL) else None
        new = views.PartView(queue, name, 0, 0, False, None, cap, None, 0, 1, 0)
        return self.parts.setdefault((queue, name), new)

    def spend(self, job: Job, count: int, now: int) -> None:
        """Take `count` permits (negative: give them back) from the rates of the job's queue and part."""
        queue = self.queues[job.queue]
        self.queues[job.queue] = replace(queue, next_at=spend(queue.next_at, queue.rate, now, count))
        if job.part is not None:
            part = self.part(job.queue, job.part)
            next_at = spend(part.next_at, part.rate, now, count)
            self.parts[job.queue, job.part] = replace(part, next_at=next_at)

    def delete(self, job: Job, now: int) -> None:
        """Delete a finished job. A tombstone stays, and its group still counts it."""
        if job.group is not None:
            counter = (job.group, counter_of(job.state, job.reason))
            self.deleted[counter] = self.deleted.get(counter, 0) + 1
        del self.jobs[job.seq]
        self.unused.pop(job.queue, None)
        self.attempts.pop(job.seq, None)
        self.edges = {ends: any_end for ends, any_end in self.edges.items() if job.seq not in ends}
        self.gates = {at: gate for at, gate in self.gates.items() if at[1] != job.seq}
        self.names = {at: src for at, src in self.names.items() if at[0] != job.seq}
        for blob in [blob for blob in self.blobs.values() if blob.job == job.seq]:
            self.blobs[blob.id] = replace(blob, job=None, until=now)
        row = facts.Tombstone(job.id, job.seq, job.state, job.settled_fence, None, now + TOMBSTONE)
        self.tombstones[job.id] = row

    def end(self, job: Job) -> None:
        """Store a job that has ended. Its key is free, unless the window of the key is open."""
        self.put(job)
        row = self.keys.get((facts.namespace(job.queue), job.key or ""))
        if row is not None and row.seq == job.seq and row.until <= (job.finished_at or 0):
            del self.keys[row.name]

    def put_proxy(self, proxy: facts.Proxy) -> None:
        self.proxies[proxy.id] = proxy

    def set_group(self, id: str, **changes: Any) -> None:
        self.groups[id] = replace(self.groups[id], **changes)

    def take_callbacks(self, group: str, outcome: State) -> Sequence[Spec]:
        then = self.thens[group]
        self.thens[group] = {ending: specs for ending, specs in then.items() if ending != outcome}
        return then.get(outcome, ())

    def append(self, specs: Sequence[Spec], now: int) -> facts.Admission:
        return insert(self, specs, now, facts.Origin(closes=True))

    def add_gate(self, group: str, seq: int, gate: GroupGate) -> None:
        self.gates[group, seq] = gate

    def drop_gate(self, group: str, seq: int) -> None:
        del self.gates[group, seq]

    def drop_edge(self, src: int, dst: int) -> None:
        del self.edges[src, dst]

    def take_key(self, key: facts.KeyTaken) -> None:
        self.keys[key.name] = key


# Append


def insert(tables: Tables, specs: Sequence[Spec], now: int, origin: facts.Origin | None) -> facts.Admission:
    """Decide an append and write the admission, without its consequences."""
    admission = admit(specs, facts.gather(tables, specs, now), now, tables.next_seq, origin)
    for id in admission.opened:
        open_group(tables, commands.Open(id), now)
        tables.set_group(id, state=SEALED)
    for job in admission.jobs:
        tables.put(job)
    tables.next_seq += admission.numbers
    for queue, name, count in admission.spent:
        part = tables.part(queue, name)
        append_at = spend(part.append_at, part.append_rate, now, count)
        tables.parts[queue, name] = replace(part, append_at=append_at)
    for old, newer in admission.handed:
        move_dependents(tables, tables.jobs[old], newer)
    tables.names |= {(dst, id): src for dst, id, src in admission.names}
    tables.proxies |= {proxy.id: proxy for proxy in admission.proxies}
    tables.edges |= {(src, dst): any_end for src, dst, any_end in admission.edges}
    tables.gates |= {(group, dst): GroupGate(any_end) for group, dst, any_end in admission.gates}
    for seq in admission.asked:
        finish.ask_to_stop(tables, tables.jobs[seq], Reason.SUPERSEDED)
    seqs = {placed.id: placed.seq for placed in admission.answers}
    for id, winner in admission.aliases:
        tables.tombstones[id] = facts.Tombstone(id, seqs[winner], DONE, 0, winner, now + TOMBSTONE)
    tables.keys |= {row.name: row for row in admission.keys}
    tables.keys = {name: row for name, row in tables.keys.items() if name not in admission.freed}
    tables.blobs |= {id: blobs.BlobRow(id, seq, 0) for id, seq in admission.blobs}
    return admission


def move_dependents(tables: Tables, old: Job, newer: int) -> None:
    """The dependents of a superseded job, and the groups in which it represents a member, wait for the newer
    job."""
    for dst, any_end in tables.dependents(old.seq):
        del tables.edges[old.seq, dst]
        tables.edges[newer, dst] = any_end
        tables.names |= {at: newer for at, src in tables.names.items() if (at[0], src) == (dst, old.seq)}
        tables.names[dst, old.id] = newer
    for proxy in tables.proxies_of(old.seq):
        if proxy.counted == "unfinished":
            tables.put_proxy(replace(proxy, job=newer))


def append(tables: Tables, command: commands.Append, now: int) -> Result:
    admission = insert(tables, command.specs, now, facts.Origin() if command.inside else None)
    finish.finish_admitted(tables, admission, now)
    return commands.Appended(admission.answers)


def put_chunk(tables: Tables, command: blobs.PutChunk, now: int) -> Result:
    row = tables.blobs.get(command.blob, blobs.BlobRow(command.blob, None, 0))
    blobs.check_put(command, row.job, tables.chunks.get((command.blob, command.number)))
    if row.job is None:
        tables.touched += 1
        tables.chunks[command.blob, command.number] = command.data
        tables.blobs[command.blob] = replace(row, until=now + blobs.BLOB_TTL)
    return ChunkPut(command.blob, command.number)


# Claim, renew, progress

Offer = list[tuple[Job, Pick | None]]
"""The jobs that a queue gives, in order, each with the turn of its part (None: no part takes a turn)."""


def claim(tables: Tables, command: commands.Claim, now: int) -> Result:
    expire(tables, now, PROMOTE)
    taken: list[Job] = []
    for each in command.wants:
        want = narrowed(command, each, taken)
        if want is None:
            continue
        names = claimable_queues(tables, want.queue)
        for name in names:
            wake(tables, name, now, PROMOTE)
        offers = [offered(tables, tables.queues[name], want, now) for name in names]
        for job, pick in merged(offers, want):
            taken.append(lifecycle.take(job, *command.terms(want), now))
            tables.put(taken[-1])
            tables.spend(job, 1, now)
            if pick is not None:
                served = pick.served if pick.part is None else tables.turns[job.queue][0]
                tables.turns[job.queue] = (served, pick.clock)
                if pick.part is not None:
                    place = (job.queue, pick.part)
                    tables.parts[place] = replace(tables.parts[place], served=pick.served)
    return commands.Claimed(tuple([ClaimedJob(job) for job in taken]))


def claimable_queues(tables: Tables, pattern: str) -> list[str]:
    """The queues that a want names, or the queues with ready or scheduled jobs that match its pattern."""
    if "*" not in pattern:
        return sorted({name for name in pattern.split(",") if name in tables.queues})
    return sorted({job.queue for job in tables.of(READY, SCHEDULED) if checks.matches(pattern, job.queue)})


def offered(tables: Tables, queue: views.QueueView, want: commands.Want, now: int) -> Offer:
    free = want.n if queue.cap is None else queue.cap - tables.count(queue.name, RUNNING)
    room = min(free, permits(queue.next_at, queue.rate, now, want.n))
    if queue.paused or room <= 0:
        return []
    ready = tables.of(READY, queue=queue.name)
    hidden = passed_over(Counter([job.part for job in ready if job.losses >= SUSPECT]), want.suspects)
    turns = part_turns(tables, queue.name, hidden, now)[: room + len(hidden)]
    loose = len(tables.ready(queue.name, None))
    without = () if turns or loose > commands.MAX_LEFT else want.without
    picks: list[Pick | None] = [None] * room
    if turns:
        served, clock = tables.turns[queue.name]
        if loose > hidden.get(None, 0):
            turns.append(PartTurn(None, served, 1, loose - hidden.get(None, 0)))
        picks = list(share(turns, clock, room))
    suspects = room if want.suspects is None else want.suspects
    found: Offer = []
    for pick in picks:
        jobs = tables.ready(queue.name, None if pick is None else pick.part)
        jobs = [job for job in jobs if job not in [each for each, _ in found]]
        jobs = [job for job in jobs if job.expires_at is None or job.expires_at > now]
        jobs = [job for job in jobs if (suspects > 0 if job.losses >= SUSPECT else job.kind not in without)]
        if jobs:
            suspects -= jobs[0].losses >= SUSPECT
            found.append((jobs[0], pick))
    return found


def part_turns(tables: Tables, queue: str, hidden: Mapping[str | None, int], now: int) -> list[PartTurn]:
    """The parts of a queue that may start jobs, the least recently served first."""
    turns = []
    parts = [tables.part_view(place) for place in tables.parts if place[0] == queue]
    for part in sorted(parts, key=lambda part: (part.served, part.name)):
        free = part.ready if part.cap is None else part.cap - part.running
        if part.ready and not part.paused and part.next_at <= now and free > 0:
            room = permits(part.next_at, part.rate, now, part.ready - hidden.get(part.name, 0))
            turns.append(PartTurn(part.name, part.served, part.weight, min(room, free)))
    return turns


def merged(offers: list[Offer], want: commands.Want) -> Iterator[tuple[Job, Pick | None]]:
    """The best `want.n` jobs of all offers, each offer in its own order."""
    left = want.n
    once = left if want.once is None else want.once
    suspects = left if want.suspects is None else want.suspects
    while left and (heads := [offer for offer in offers if offer]):
        offer = min(heads, key=lambda offer: (offer[0][0].priority, offer[0][0].seq))
        job = offer[0][0]
        if job.max_attempts == 1 and once == 0:
            offer.clear()
            continue
        once -= job.max_attempts == 1
        if job.losses >= SUSPECT and suspects == 0:
            offer.pop(0)
            continue
        suspects -= job.losses >= SUSPECT
        left -= 1
        yield offer.pop(0)


def wake(tables: Tables, queue: str, now: int, limit: int) -> int:
    """Make at most `limit` scheduled jobs of a queue that are due ready; return their number."""
    due = first_due({job.seq: job.ready_at for job in tables.of(SCHEDULED, queue=queue)}, now, limit)
    for seq in due:
        tables.put(lifecycle.woken(tables.jobs[seq]))
    return len(due)


def expire(tables: Tables, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time to live; return their number."""
    ends = {job.seq: job.expires_at for job in tables.of(*WAITING) if job.expires_at is not None}
    due = [tables.jobs[seq] for seq in first_due(ends, now, limit)]
    finish.finish(tables, due, FAILED, Reason.EXPIRED, now)
    return len(due)


def renew(tables: Tables, command: commands.Renew, now: int) -> Result:
    until = now + command.lease
    jobs = {(id, fence): tables.held(id, fence) for id, fence in command.held}
    for job in jobs.values():
        if job is not None:
            tables.put(replace(job, lease_until=until, lease_len=command.lease))
    held = [(id, jobs[id, fence]) for id, fence in command.held]
    lost = [id for id, job in held if job is None]
    asked = [(id, job.cancel_requested) for id, job in held if job is not None]
    return commands.Renewed(until, tuple(lost), tuple([(id, why) for id, why in asked if why is not None]))


def progress(tables: Tables, command: commands.Progress, now: int) -> Result:
    job = tables.held(command.id, command.fence)
    if job is None:
        raise LostClaim(id=command.id, fence=command.fence)
    for each in command.notes:
        put_note(tables, each, now)
    given = {"progress_done": command.done, "progress_total": command.total, "cursor": command.cursor}
    tables.put(replace(job, **{field: value for field, value in given.items() if value is not None}))
    return commands.Progressed(job.cancel_requested)


# Settle


def settle(tables: Tables, command: commands.Settle, now: int) -> Result:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger is in memory")
    job = tables.held(command.id, command.fence)
    if job is None:
        return finish.settled_before(tables.find(command.id), tables.tombstones.get(command.id), command)
    if command.spawn:
        origin = facts.Origin(job.id, job.group, job.correlation_id)
        finish.finish_admitted(tables, insert(tables, command.spawn, now, origin), now)
    for each in command.notes:
        put_note(tables, each, now)
    # A child may have asked the job to stop, so the job is read again.
    job = tables.jobs[job.seq]
    change = lifecycle.settle(job, command.outcome, now)
    settled = lifecycle.settled(job, change, command.outcome)
    history.end_attempt(tables.attempts, job, change, getattr(command.outcome, "error", None), now)
    if isinstance(command.outcome, Release | Refuse):
        tables.spend(job, -1, now)
    if change.state in FINISHED:
        tables.put(settled)
        finish.finish(tables, [settled], change.state, change.reason, now)
    else:
        finish.give_back(tables, settled, change)
    return commands.Settled(job.id, change.state)


# Groups


def open_group(tables: Tables, command: commands.Open, now: int) -> Result:
    if command.group not in tables.groups:
        on_failure = OnFailure(command.on_failure)
        new = views.GroupView(command.group, OPEN, None, on_failure, 0, 0, 0, 0, 0, 0, now, None)
        tables.groups[command.group] = new
        tables.thens[command.group] = {end: tuple(specs) for end, specs in command.then.items() if specs}
    return commands.GroupSet(command.group)


# Cancel, revive, purge, hasten


def selected(tables: Tables, where: commands.Selector, states: Iterable[State]) -> list[Job]:
    jobs = [job for job in tables.of(*states) if not where.ids or job.id in where.ids]
    return [job for job in jobs if where.matches(job)]


def cancel(tables: Tables, command: commands.Cancel, now: int) -> Result:
    found = selected(tables, command.where, UNFINISHED)
    found = [
        job for job in found if job.state is not RUNNING or not lifecycle.interrupts(job.cancel_requested)
    ]
    jobs = found[: command.limit]
    return commands.Canceled(*finish.cancel(tables, jobs, now), len(found) > command.limit)


def purge(tables: Tables, command: commands.Purge, now: int) -> Result:
    found = selected(tables, command.where, FINISHED)
    for job in found[: command.limit]:
        tables.delete(job, now)
    return commands.Purged(len(found[: command.limit]), len(found) > command.limit)


def hasten(tables: Tables, command: commands.Hasten, now: int) -> Result:
    queued = [job for job in tables.of(READY) if checks.matches(command.queue, job.queue)]
    less = [job for job in queued if job.priority > command.priority]
    found = sorted([job for job in less if job.ready_at <= now - command.waited], key=ageing_order)
    for job in found[: command.limit]:
        tables.put(replace(job, priority=command.priority))
    return commands.Hastened(len(found[: command.limit]), len(found) > command.limit)


def revive(tables: Tables, command: commands.Revive, now: int) -> Result:
    found = selected(tables, command.where, State if command.where.ids else DEAD)
    revivals = RecordRevivals(tables, now)
    return commands.Revived(*revive_all(found[: command.limit], revivals), len(found) > command.limit)


# Notes and settings


def note(tables: Tables, command: commands.Note, now: int) -> Result:
    answer = put_note(tables, command, now)
    for gate in command.gates:
        SETTERS[type(gate)](tables, gate, now)
    return answer


def put_note(tables: Tables, command: commands.Note, now: int) -> Result:
    new, answer = views.write_note(tables.notes.get(command.key), command, tables.next_version, now)
    tables.touched += 1
    tables.notes.pop(command.key, None)
    if new is not None:
        tables.next_version += 1
        tables.notes[command.key] = new
    return answer


def set_queue(tables: Tables, command: commands.SetQueue, now: int) -> Result:
    row = tables.queue(command.queue)
    tables.queues[command.queue] = replace(row, **views.given_settings(row.why, row.paused, command))
    tables.unused.pop(command.queue, None)
    tables.touched += 1
    return commands.QueueSet(command.queue)


def set_part(tables: Tables, command: commands.SetPart, now: int) -> Result:
    place = (command.queue, command.part)
    row = tables.part(*place)
    tables.parts[place] = replace(row, **views.given_settings(row.why, row.paused, command))
    tables.configured[place] = True
    tables.touched += 1
    return commands.QueueSet(*place)


SETTERS: Mapping[type, Callable[[Tables, Any, int], Result]] = {
    commands.SetQueue: set_queue,
    commands.SetPart: set_part,
}


# Upkeep


def upkeep(tables: Tables, command: commands.Upkeep, now: int, jumps: Jumps) -> Result:
    left = command.limit
    reaped, failed = reap(tables, command.dead, now, left, jumps)
    left -= reaped
    left -= (expired := expire(tables, now, left))
    woken = 0
    for name in sorted(tables.queues):
        woken += wake(tables, name, now, left - woken)
    left -= woken
    left -= (purged := purge_due(tables, now, left))
    left -= (swept := sweep(tables, now, left))
    due = min(due_times(tables, now, jumps), default=None)
    return commands.Upkept(reaped, expired, woken, purged, swept, left < 1, due, tuple(failed))


def reap(tables: Tables, dead: Sequence[str], now: int, limit: int, jumps: Jumps) -> tuple[int, list[str]]:
    """Take back the jobs of dead owners, then jobs with an ended lease; return how many and which failed."""
    orphans = [job for job in tables.of(RUNNING) if job.owner in dead][:limit]
    failed = finish.lose_all(tables, orphans, now)
    late = [job for job in tables.of(RUNNING) if jumps.reap_time(job, now) <= now]
    late = sorted(late, key=lambda job: (job.lease_until, job.seq))[: limit - len(orphans)]
    failed += finish.lose_all(tables, late, now)
    return len(orphans) + len(late), sorted(failed)


def kept(tables: Tables, queue: str) -> list[Job]:
    """The done and canceled jobs of a queue, the first to be deleted first."""
    return sorted(tables.of(DONE, CANCELED, queue=queue), key=lambda job: (job.purge_at, job.seq))


def above(tables: Tables, queue: str) -> list[Job]:
    """The jobs of `kept` above the number that the queue keeps."""
    jobs, keep = kept(tables, queue), tables.queues[queue].keep
    return jobs[: max(0, len(jobs) - (KEEP if keep is None else keep))]


def purge_due(tables: Tables, now: int, limit: int) -> int:
    left = limit
    for queue in sorted(tables.queues):
        for job in [job for job in kept(tables, queue) if (job.purge_at or 0) <= now][:left]:
            tables.delete(job, now)
            left -= 1
    for queue in sorted(tables.queues):
        for job in above(tables, queue)[:left]:
            tables.delete(job, now)
            left -= 1
    return limit - left


def small_rows(tables: Tables) -> list[tuple[dict[Any, Any], dict[Any, int]]]:
    """The tables of small rows, each with the times at which its rows are over."""
    notes = {key: row.expires_at for key, row in tables.notes.items() if row.expires_at is not None}
    return [
        (tables.tombstones, {id: row.until for id, row in tables.tombstones.items()}),
        (tables.replies, {token: until for token, (_, until) in tables.replies.items()}),
        (tables.notes, notes),
        (tables.keys, {name: row.until for name, row in tables.keys.items() if row.until}),
    ]


def sweep(tables: Tables, now: int, limit: int) -> int:
    """Delete at most `limit` small rows that are over; return their number."""
    left = limit
    for table, times in small_rows(tables):
        for name in first_due(times, now, left):
            left -= 1
            row = table.pop(name)
            holder = tables.jobs.get(row.seq) if isinstance(row, facts.KeyTaken) else None
            if holder is not None and holder.state not in FINISHED:
                # The window of the key is over, and an unfinished job holds it.
                table[name] = replace(row, until=0)
    idle = [at for at, part in tables.parts.items() if at not in tables.configured and part.next_at <= now]
    for place in sorted([at for at in idle if not tables.count(at[0], READY, RUNNING, part=at[1])])[:left]:
        left -= 1
        del tables.parts[place]
    left -= sweep_queues(tables, now, left)
    closed = {id: row.closed_at + RETENTION for id, row in tables.groups.items() if row.closed_at is not None}
    for id in first_due({id: at for id, at in closed.items() if not tables.members(id)}, now, left):
        left -= 1
        forget_group(tables, id)
    return limit - left + sweep_blobs(tables, now, left)


def sweep_queues(tables: Tables, now: int, limit: int) -> int:
    """Delete at most `limit` queues that have been unused for long; return their number. Note the time for
    queues that are unused now."""
    parts = Counter([queue for queue, _ in tables.parts])
    found = [name for name in tables.queues if views.is_unused(tables.queue_view(name), parts[name], now)]
    ends = {name: tables.unused[name] + views.QUEUE_KEPT for name in found if name in tables.unused}
    over = first_due(ends, now, limit)
    for name in over:
        del tables.queues[name], tables.turns[name], tables.unused[name]
    if limit:
        tables.unused |= {name: now for name in found if name not in ends}
    return len(over)


def sweep_blobs(tables: Tables, now: int, limit: int) -> int:
    """Delete at most `limit` chunks of blobs without a job that are due, and the blobs without chunks; return
    the number of chunks."""
    due = first_due(blob_ends(tables), now, len(tables.blobs))
    chunks = [(id, number) for id in due for number, _ in (tables.blob_fact(id) or ((), ()))[1]]
    chunks = chunks[: min(limit, blobs.SWEPT_CHUNKS)]
    for chunk in chunks:
        del tables.chunks[chunk]
    for id in {id for id, _ in chunks}:
        if not [blob for blob, _ in tables.chunks if blob == id]:
            del tables.blobs[id]
    return len(chunks)


def blob_ends(tables: Tables) -> dict[str, int]:
    return {id: row.until for id, row in tables.blobs.items() if row.job is None}


def first_due(times: Mapping[Any, int], now: int, limit: int) -> list[Any]:
    """At most `limit` of the names that are due, by (time, name)."""
    return [name for at, name in sorted([(at, name) for name, at in times.items()]) if at <= now][:limit]


def forget_group(tables: Tables, id: str) -> None:
    del tables.groups[id], tables.thens[id]
    tables.deleted = {at: count for at, count in tables.deleted.items() if at[0] != id}
    tables.proxies = {name: proxy for name, proxy in tables.proxies.items() if proxy.group != id}
    tables.gates = {at: gate for at, gate in tables.gates.items() if at[0] != id}


def due_times(tables: Tables, now: int, jumps: Jumps) -> Iterator[int]:
    """The times at which an upkeep or a claim has something to do."""
    yield from [jumps.reap_time(job, now) for job in tables.of(RUNNING)]
    yield from [job.ready_at for job in tables.of(SCHEDULED)]
    yield from [job.expires_at for job in tables.of(*WAITING) if job.expires_at is not None]
    yield from [job.purge_at for job in tables.jobs.values() if job.purge_at is not None]
    for queue in tables.queues.values():
        if above(tables, queue.name):
            yield now
        if queue.next_at > now and tables.of(READY, queue=queue.name):
            yield queue.next_at
    for part in tables.parts.values():
        if part.next_at > now and tables.ready(part.queue, part.name):
            yield part.next_at
    yield from blob_ends(tables).values()
    for _, times in small_rows(tables):
        yield from times.values()


# All commands

HANDLERS: Mapping[type, Callable[[Tables, Any, int], Result]] = {
    commands.Append: append,
    commands.Claim: claim,
    commands.Renew: renew,
    commands.Settle: settle,
    commands.Progress: progress,
    commands.Cancel: cancel,
    commands.Revive: revive,
    commands.Resolve: resolve,
    commands.Purge: purge,
    commands.Hasten: hasten,
    commands.Open: open_group,
    **finish.GROUP_COMMANDS,
    commands.Note: note,
    blobs.PutChunk: put_chunk,
    **SETTERS,
}


def answer_to(tables: Tables, command: commands.Command, now: int, jumps: Jumps) -> Result:
    """Apply a command. The same token gets the first answer again; of a claim, the jobs still held."""
    if isinstance(command, commands.Upkeep):
        return upkeep(tables, command, now, jumps)
    token = commands.token_of(command)
    if token in tables.replies:
        answer = tables.replies[token][0]
        if not isinstance(answer, commands.Claimed):
            return answer
        held = [tables.held(each.id, each.fence) for each in answer.claims]
        return commands.Claimed(tuple([ClaimedJob(job) for job in held if job is not None]))
    answer = HANDLERS[type(command)](tables, command, now)
    if token and changed_anything(answer):
        tables.replies[token] = (answer, now + TOMBSTONE)
    return answer
