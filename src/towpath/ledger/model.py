"""The model: the oracle that every other ledger is compared with.

One dict per table, linear scans, `sorted()`, counts computed when they are read. A command works on a copy of
the state, so a command that is refused, or that raises, leaves the state as it was. There is no index, no
heap and no fast path. This file is `docs/ledger-rules.md` in Python: read it from top to bottom."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import astuple, replace

from towpath.clock import Clock, SystemClock
from towpath.core import checks, commands, facts, lifecycle, views
from towpath.core.admission import admit, walks
from towpath.core.commands import KEEP, PROMOTE, TOMBSTONE, GroupState, OnFailure, Result
from towpath.core.explain import AHEAD, SHOWN, Explanation, JobFacts, explain
from towpath.core.ids import derived
from towpath.core.job import (
    FINISHED,
    SERIAL,
    SUSPECT,
    WAITING,
    ClaimedJob,
    Job,
    KeyPolicy,
    Reason,
    Refuse,
    Release,
    Spec,
    State,
    without_bodies,
)
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import RETENTION, Jumps, counter_of
from towpath.core.limits import PartTurn, Pick, passed_over, permits, reason_after, share, spend
from towpath.core.results import changed_anything
from towpath.core.revival import DEAD, GroupGate, revive_obstacle, shut_gates
from towpath.errors import (
    InvalidInput,
    LedgerClosed,
    LostClaim,
    Refused,
    UnknownGroup,
    UnknownJob,
    Unsupported,
)
from towpath.ledger import Answer, Capabilities, LeasesOnly

BLOCKED, SCHEDULED, READY, RUNNING, DONE, FAILED, CANCELED = State
OPEN, SEALED, ABORTING, CLOSED = GroupState
UNFINISHED = frozenset(State) - FINISHED
ENDINGS = ("done", "failed", "canceled", "superseded")


class ModelTombstone(Struct, frozen=True):
    """A deleted job, or an id that was refused in favour of the job `alias`."""

    id: str
    seq: int
    state: State
    settled_fence: int
    alias: str | None
    until: int


class Rows:
    """The whole state, and the scans that read it. Rows are frozen, so a copy of the dicts is a copy of the
    state. The counts in the rows
    of queues, parts and groups are not kept: `queue_view`, `part_view` and `group_view` compute them."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        """By seq."""
        self.queues: dict[str, views.QueueView] = {}
        self.turns: dict[str, tuple[int, int]] = {}
        """By queue: `served` of the jobs without a part, and the virtual clock of the queue."""
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
        self.tombstones: dict[str, ModelTombstone] = {}
        self.replies: dict[str, tuple[Result, int]] = {}
        """By token: the answer, and the time until which it is kept."""
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

    def needed_by(self, job: Job) -> list[tuple[Job, bool]]:
        """The jobs that a job has an edge from, by seq, and whether any end of theirs is sufficient."""
        return [
            (self.jobs[src], any_end) for (src, dst), any_end in sorted(self.edges.items()) if dst == job.seq
        ]

    def needing(self, job: Job) -> list[tuple[Job, bool]]:
        return [
            (self.jobs[dst], any_end) for (src, dst), any_end in sorted(self.edges.items()) if src == job.seq
        ]

    def gates_of(self, job: Job) -> dict[str, GroupGate]:
        """The groups that a job depends on."""
        return {
            id: gate
            for (id, dst), gate in sorted(self.gates.items(), key=lambda each: each[0])
            if dst == job.seq
        }

    def open_gates(self, job: Job) -> list[str]:
        return [group for group in self.gates_of(job) if self.groups[group].state is not CLOSED]

    def waits_of(self, job: Job) -> int:
        """The number of dependencies of a job that are not over; an open group is one."""
        open_jobs = sum(needed.state not in FINISHED for needed, _ in self.needed_by(job))
        return open_jobs + len(self.open_gates(job)) + self.in_open_group(job)

    def in_open_group(self, job: Job) -> bool:
        return job.group is not None and self.groups[job.group].state is OPEN

    def proxies_in(self, group: str) -> list[facts.Proxy]:
        found = [proxy for proxy in self.proxies.values() if proxy.group == group]
        return sorted(found, key=lambda proxy: proxy.seq)

    def represented_by(self, job: Job) -> list[facts.Proxy]:
        found = [proxy for proxy in self.proxies.values() if proxy.job == job.seq]
        return sorted(found, key=lambda proxy: proxy.id)

    def queue_view(self, name: str) -> views.QueueView:
        counts = views.Counts(*[self.count(name, State(field)) for field in views.Counts.__struct_fields__])
        oldest = min([job.ready_at for job in self.of(READY, queue=name)], default=None)
        return replace(self.queues[name], counts=counts, oldest_ready=oldest)

    def part_view(self, place: facts.Place) -> views.PartView:
        queue, name = place
        ready, running = (self.count(queue, state, part=name) for state in (READY, RUNNING))
        return replace(self.parts[place], ready=ready, running=running)

    def group_view(self, id: str) -> views.GroupView:
        counts = Counter({counter: n for (group, counter), n in self.deleted.items() if group == id})
        counts.update([counter_of(job.state, job.reason) for job in self.members(id)])
        counts.update([proxy.counted for proxy in self.proxies_in(id)])
        fields = {counter: counts[counter] for counter in ("unfinished", *ENDINGS)}
        return replace(self.groups[id], total=counts.total(), **fields)

    def live_note(self, key: str, now: int) -> views.NoteView | None:
        row = self.notes.get(key)
        return row if row is not None and (row.expires_at is None or row.expires_at > now) else None


class Tables(Rows):
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

    def ask_to_stop(self, job: Job, reason: Reason) -> None:
        if job.cancel_requested is None:
            self.put(replace(job, cancel_requested=reason))

    def count_proxy(self, proxy: facts.Proxy, counter: str) -> None:
        self.proxies[proxy.id] = replace(proxy, counted=counter)

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
        self.edges = {ends: any_end for ends, any_end in self.edges.items() if job.seq not in ends}
        self.gates = {at: gate for at, gate in self.gates.items() if at[1] != job.seq}
        self.names = {at: src for at, src in self.names.items() if at[0] != job.seq}
        row = ModelTombstone(job.id, job.seq, job.state, job.settled_fence, None, now + TOMBSTONE)
        self.tombstones[job.id] = row

    def release_key(self, job: Job, now: int) -> None:
        """The job has ended: its key is free, unless the window of the key is open."""
        name = (facts.namespace(job.queue), job.key or "")
        row = self.keys.get(name)
        if (
            row is not None
            and row.seq == job.seq
            and row.until <= now
            and job.key_policy is not KeyPolicy.SERIAL
        ):
            del self.keys[name]


# Append


def known(tables: Tables, id: str) -> dict[str, facts.Known]:
    """The job that an id names, or what is left of it; with the job that an alias points to."""
    job, row, proxy = tables.find(id), tables.tombstones.get(id), tables.proxies.get(id)
    if job is not None:
        return {id: facts.Known(id, job.seq, job.state)}
    if row is not None:
        found = {id: facts.Known(id, row.seq, row.state, True, row.alias)}
        if row.alias is not None:
            found |= known(tables, row.alias) or {row.alias: facts.Known(row.alias, row.seq, DONE, True)}
        return found
    if proxy is not None:
        winner = tables.jobs.get(proxy.job)
        if winner is None:
            return {id: facts.Known(id, proxy.job, DONE, True)}
        return {id: facts.Known(id, winner.seq, winner.state, True, winner.id)} | known(tables, winner.id)
    return {}


def gather(tables: Tables, specs: Sequence[Spec], now: int) -> facts.AppendFacts:
    """The facts that `admit` needs."""
    ids = {spec.id for spec in specs}
    needed = [after for spec in specs for after in spec.after]
    found: dict[str, facts.Known] = {}
    for id in [*ids, *[after.id for after in needed if not after.group]]:
        found |= known(tables, id)
    holders: dict[facts.KeyName, facts.KeyHolder] = {}
    for row in [tables.keys[name] for spec in specs if (name := facts.key_of(spec)) in tables.keys]:
        job, runner = tables.jobs.get(row.seq), tables.jobs.get(row.runner or 0)
        stops = row.runner if runner is not None and runner.state is RUNNING else None
        holders[row.name] = facts.KeyHolder(
            row.id, row.seq, None if job is None else job.state, row.until, stops
        )
        found |= known(tables, row.id)
        if row.until > now and row.id not in ids:
            found.setdefault(row.id, facts.Known(row.id, row.seq, DONE, True))
    groups = {spec.group for spec in specs} | {after.id for after in needed if after.group}
    queues = {spec.queue for spec in specs}
    return facts.AppendFacts(
        known=found,
        holders=holders,
        groups={
            id: facts.GroupFact(row.state, row.outcome) for id, row in tables.groups.items() if id in groups
        },
        rooms={
            name: facts.Room(row.capacity, tables.count(name, *WAITING), row.retention)
            for name, row in tables.queues.items()
            if name in queues
        },
        quotas={
            (queue, part): facts.Quota(
                row.capacity, tables.count(queue, *WAITING, part=part), row.append_rate, row.append_at
            )
            for (queue, part), row in tables.parts.items()
            if (queue, part) in facts.places_of(specs) and (row.capacity, row.append_rate) != (None, None)
        },
        downstream={start: downstream(tables, start) for start in walks(specs, holders)},
    )


def downstream(tables: Tables, start: str) -> frozenset[str]:
    """All unfinished jobs, and groups that are not closed, that wait for a node."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        job = tables.find(name)
        groups: set[str] = set()
        if job is None:
            # The jobs that wait for a group, or would wait again if the group were reopened.
            waiting = [tables.jobs[dst] for group, dst in tables.gates if facts.node(group) == name]
            found = {dst.id for dst in waiting if dst.state in WAITING}
        else:
            found = {dst.id for dst, _ in tables.needing(job) if dst.state is BLOCKED}
            groups = {proxy.group for proxy in tables.represented_by(job) if proxy.counted == "unfinished"}
            if job.group is not None and name != start:
                # A job that is replaced, at the start, leaves its own group.
                groups.add(job.group)
        found |= {facts.node(group) for group in groups if tables.groups[group].state is not CLOSED}
        todo += found - reached
        reached |= found
    return frozenset(reached)


def insert(tables: Tables, admission: facts.Admission, now: int) -> list[int]:
    """Write an admission; return the superseded jobs, which the caller ends."""
    for job in admission.jobs:
        tables.put(job)
    tables.next_seq += admission.numbers
    for queue, name, count in admission.spent:
        part = tables.part(queue, name)
        append_at = spend(part.append_at, part.append_rate, now, count)
        tables.parts[queue, name] = replace(part, append_at=append_at)
    for old, newer in admission.handed:
        hand_over(tables, tables.jobs[old], newer)
    tables.names |= {(dst, id): src for dst, id, src in admission.names}
    tables.proxies |= {proxy.id: proxy for proxy in admission.proxies}
    tables.edges |= {(src, dst): any_end for src, dst, any_end in admission.edges}
    tables.gates |= {(group, dst): GroupGate(any_end) for group, dst, any_end in admission.gates}
    for seq in admission.asked:
        tables.ask_to_stop(tables.jobs[seq], Reason.SUPERSEDED)
    seqs = {placed.id: placed.seq for placed in admission.answers}
    for id, winner in admission.aliases:
        tables.tombstones[id] = ModelTombstone(id, seqs[winner], DONE, 0, winner, now + TOMBSTONE)
    tables.keys |= {row.name: row for row in admission.keys}
    tables.keys = {name: row for name, row in tables.keys.items() if name not in admission.freed}
    return admission.superseded


def hand_over(tables: Tables, old: Job, newer: int) -> None:
    """The dependents of a superseded job, and the groups in which it represents a member, wait for the newer
    job."""
    for dst, any_end in tables.needing(old):
        del tables.edges[old.seq, dst.seq]
        tables.edges[newer, dst.seq] = any_end
        tables.names |= {at: newer for at, src in tables.names.items() if (at[0], src) == (dst.seq, old.seq)}
        tables.names[dst.seq, old.id] = newer
    for proxy in tables.represented_by(old):
        if proxy.counted == "unfinished":
            tables.proxies[proxy.id] = replace(proxy, job=newer)


def append_specs(
    tables: Tables, specs: Sequence[Spec], now: int, origin: facts.Origin | None
) -> facts.Admission:
    admission = admit(specs, gather(tables, specs, now), now, tables.next_seq, origin)
    ending = Ending(tables, now)
    ending.add(insert(tables, admission, now), CANCELED, Reason.SUPERSEDED)
    groups = [(job.group, job.state is FAILED) for job in admission.jobs if job.group is not None]
    ending.run([*groups, *[(proxy.group, proxy.counted == "failed") for proxy in admission.proxies]])
    return admission


def append(tables: Tables, command: commands.Append, now: int) -> Result:
    origin = facts.Origin() if command.inside else None
    return commands.Appended(append_specs(tables, command.specs, now, origin).answers)


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
            taken.append(lifecycle.take(job, command.owner, command.lease, now))
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
    room = 0 if queue.paused else permits(queue.next_at, queue.rate, now, want.n)
    if queue.cap is not None:
        room = min(room, queue.cap - tables.count(queue.name, RUNNING))
    if room <= 0:
        return []
    ready = tables.of(READY, queue=queue.name)
    hidden = passed_over(Counter([job.part for job in ready if job.losses >= SUSPECT]), want.suspects)
    turns = part_turns(tables, queue.name, hidden, now)[: room + len(hidden)]
    picks: list[Pick | None] = [None] * room
    if turns:
        served, clock = tables.turns[queue.name]
        if loose := len(tables.ready(queue.name, None)) - hidden.get(None, 0):
            turns.append(PartTurn(None, served, 1, loose))
        picks = list(share(turns, clock, room))
    suspects = room if want.suspects is None else want.suspects
    found: Offer = []
    for pick in picks:
        jobs = tables.ready(queue.name, None if pick is None else pick.part)
        jobs = [job for job in jobs if job not in [each for each, _ in found]]
        jobs = [job for job in jobs if job.expires_at is None or job.expires_at > now]
        jobs = [job for job in jobs if job.losses < SUSPECT or suspects > 0]
        if jobs:
            suspects -= jobs[0].losses >= SUSPECT
            found.append((jobs[0], pick))
    return found


def part_turns(tables: Tables, queue: str, hidden: Mapping[str | None, int], now: int) -> list[PartTurn]:
    """The parts of a queue that may start jobs, the least recently served first."""
    turns = []
    parts = [tables.part_view(place) for place in tables.parts if place[0] == queue]
    for part in sorted(parts, key=lambda part: (part.served, part.name)):
        full = part.cap is not None and part.running >= part.cap
        if part.ready and not part.paused and part.next_at <= now and not full:
            room = permits(part.next_at, part.rate, now, part.ready - hidden.get(part.name, 0))
            room = room if part.cap is None else min(room, part.cap - part.running)
            turns.append(PartTurn(part.name, part.served, part.weight, room))
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
    due = [job for job in tables.of(SCHEDULED, queue=queue) if job.ready_at <= now]
    due = sorted(due, key=lambda job: (job.ready_at, job.seq))[:limit]
    for job in due:
        tables.put(lifecycle.woken(job))
    return len(due)


def expire(tables: Tables, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time to live; return their number."""
    due = [job for job in tables.of(*WAITING) if job.expires_at is not None and job.expires_at <= now]
    due = sorted(due, key=lambda job: (job.expires_at, job.seq))[:limit]
    finish(tables, now, due, FAILED, Reason.EXPIRED)
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
    given = {"progress_done": command.done, "progress_total": command.total, "cursor": command.cursor}
    tables.put(replace(job, **{field: value for field, value in given.items() if value is not None}))
    return commands.Progressed(job.cancel_requested)


# Settle


def settle(tables: Tables, command: commands.Settle, now: int) -> Result:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger lives in memory")
    job = tables.held(command.id, command.fence)
    if job is None:
        return settled_before(tables, command)
    if command.spawn:
        append_specs(tables, command.spawn, now, facts.Origin(job.id, job.group, job.correlation_id))
    for each in command.notes:
        put_note(tables, each, now)
    # A child may have asked the job to stop, so the job is read again.
    job = tables.jobs[job.seq]
    change = lifecycle.settle(job, command.outcome, now)
    settled = lifecycle.settled(job, change, command.outcome)
    if isinstance(command.outcome, Release | Refuse):
        tables.spend(job, -1, now)
    if change.state in FINISHED:
        tables.put(settled)
        finish(tables, now, [settled], change.state, change.reason)
    else:
        give_back(tables, settled, change)
    return commands.Settled(job.id, change.state)


def settled_before(tables: Tables, command: commands.Settle) -> Result:
    """The first answer again, if this attempt was settled before."""
    job, row = tables.find(command.id), tables.tombstones.get(command.id)
    if job is not None:
        if job.settled_fence == command.fence and job.settled_as is not None:
            return commands.Settled(job.id, job.settled_as)
    elif row is not None and row.settled_fence == command.fence > 0:
        return commands.Settled(row.id, row.state)
    raise LostClaim(id=command.id, fence=command.fence)


def give_back(tables: Tables, job: Job, change: lifecycle.Change) -> None:
    """A job that ran waits again; a member of an open group waits for the seal."""
    back = lifecycle.given_back(job, change)
    tables.put(lifecycle.held(back) if tables.in_open_group(job) else back)


# The end of jobs, and what follows from it


def finish(tables: Tables, now: int, jobs: Iterable[Job], state: State, reason: Reason) -> None:
    ending = Ending(tables, now)
    ending.add([job.seq for job in jobs], state, reason)
    ending.run()


class Ending:
    """A first-in-first-out list of sets of jobs that end, each in one state. Without a reason each job of the
    set ends for the reason for which it was asked to stop."""

    def __init__(self, tables: Tables, now: int) -> None:
        self.tables, self.now = tables, now
        self.sets: deque[tuple[Sequence[int], State, Reason | None]] = deque()

    def add(self, seqs: Sequence[int], state: State, reason: Reason | None) -> None:
        if seqs:
            self.sets.append((seqs, state, reason))

    def run(self, touched: Iterable[tuple[str, bool]] = ()) -> None:
        """`touched` are groups with new members (True: a failed one). They are reviewed together with the
        first set."""
        groups = list(touched)
        while self.sets or groups:
            seqs, state, reason = self.sets.popleft() if self.sets else ((), DONE, None)
            jobs = [self.tables.jobs[seq] for seq in seqs]
            ended = [
                self.end(job, state, (job.cancel_requested or Reason.NONE) if reason is None else reason)
                for job in jobs
                if job.state not in FINISHED
            ]
            if state in DEAD:
                self.cascade(ended, state)
            for job in ended:
                for dst, _ in self.tables.needing(job):
                    self.lower(dst)
            for job in ended:
                groups += [(group, state is FAILED) for group in self.count_end(job)]
            for id in sorted({group for group, _ in groups}):
                self.review(id, (id, True) in groups)
            groups = []

    def end(self, job: Job, state: State, reason: Reason) -> Job:
        ended = lifecycle.ended(job, state, reason, self.now, self.tables.queues[job.queue].retention)
        self.tables.put(ended)
        self.tables.release_key(ended, self.now)
        return ended

    def cascade(self, ended: list[Job], state: State) -> None:
        """Every blocked job that needs one of `ended` to succeed, transitively, ends in the same state and
        joins the list, which grows while it is read."""
        for src in ended:
            for dst, any_end in self.tables.needing(src):
                if not any_end and dst.state is BLOCKED:
                    ended.append(self.end(dst, state, Reason.DEPENDENCY))

    def lower(self, job: Job) -> None:
        """A blocked job has one thing less to wait for."""
        if job.state is BLOCKED:
            self.tables.put(lifecycle.lowered(job, self.now))

    def count_end(self, job: Job) -> list[str]:
        """Count an ended job in the groups in which it represents a member; return these and its own."""
        waiting = [proxy for proxy in self.tables.represented_by(job) if proxy.counted == "unfinished"]
        for proxy in waiting:
            self.tables.count_proxy(proxy, counter_of(job.state, job.reason))
        return [proxy.group for proxy in waiting] + ([] if job.group is None else [job.group])

    def review(self, id: str, failed: bool) -> None:
        """Abort the group if a member has just failed, and close it if no member is unfinished."""
        group = self.tables.groups[id]
        if failed and group.on_failure is OnFailure.ABORT and group.state in (OPEN, SEALED):
            self.abort(id)
        group = self.tables.group_view(id)
        if group.state in (SEALED, ABORTING) and not group.unfinished:
            self.close(group)

    def abort(self, id: str) -> None:
        tables = self.tables
        tables.groups[id] = replace(tables.groups[id], state=ABORTING, paused=False, why=None)
        members = tables.members(id)
        for job in members:
            if job.state is RUNNING:
                tables.ask_to_stop(job, Reason.ABORTED)
        for proxy in tables.proxies_in(id):
            if proxy.counted == "unfinished":
                tables.count_proxy(proxy, "canceled")
        self.add([job.seq for job in members if job.state in WAITING], CANCELED, Reason.ABORTED)

    def close(self, group: views.GroupView) -> None:
        tables, id = self.tables, group.id
        outcome = lifecycle.group_outcome(group.failed, group.canceled, group.state is ABORTING)
        tables.groups[id] = replace(tables.groups[id], state=CLOSED, outcome=outcome, closed_at=self.now)
        gates = [(tables.jobs[dst], gate) for (each, dst), gate in tables.gates.items() if each == id]
        blocked = [(job, gate.met(outcome)) for job, gate in gates if job.state is BLOCKED]
        for job in [job for job, met in blocked if met]:
            self.lower(job)
        lost = [job.seq for job, met in blocked if not met]
        self.add(lost, FAILED if outcome is FAILED else CANCELED, Reason.DEPENDENCY)
        then = tables.thens[id]
        tables.thens[id] = {ending: specs for ending, specs in then.items() if ending != outcome}
        if specs := [
            replace(spec, id=derived(id, f"then:{outcome}", n))
            for n, spec in enumerate(then.get(outcome, ()))
        ]:
            admission = admit(
                specs, gather(tables, specs, self.now), self.now, tables.next_seq, facts.Origin()
            )
            self.add(insert(tables, admission, self.now), CANCELED, Reason.SUPERSEDED)
            tables.gates |= {(id, job.seq): GroupGate(False, outcome) for job in admission.jobs}


# Groups


def group_of(tables: Tables, id: str) -> views.GroupView:
    if id not in tables.groups:
        raise UnknownGroup(group=id)
    return tables.groups[id]


def open_group(tables: Tables, command: commands.Open, now: int) -> Result:
    if command.group not in tables.groups:
        on_failure = OnFailure(command.on_failure)
        new = views.GroupView(command.group, OPEN, None, on_failure, 0, 0, 0, 0, 0, 0, now, None)
        tables.groups[command.group] = new
        tables.thens[command.group] = {end: tuple(specs) for end, specs in command.then.items() if specs}
    return commands.GroupSet(command.group)


def seal(tables: Tables, command: commands.Seal, now: int) -> Result:
    group = group_of(tables, command.group)
    if group.state is OPEN:
        tables.groups[group.id] = replace(group, state=SEALED, paused=False, why=None)
        ending = Ending(tables, now)
        for job in tables.members(group.id):
            ending.lower(job)
        ending.run([(group.id, False)])
    return commands.GroupSet(group.id)


def unseal(tables: Tables, command: commands.Unseal, now: int) -> Result:
    group = group_of(tables, command.group)
    if group.state is SEALED:
        tables.groups[group.id] = replace(group, state=OPEN, paused=True, why=command.why)
        for job in tables.members(group.id):
            if job.state in WAITING:
                tables.put(lifecycle.held(job))
    elif group.paused:
        tables.groups[group.id] = replace(group, why=command.why)
    return commands.GroupSet(group.id)


def abort(tables: Tables, command: commands.Abort, now: int) -> Result:
    group = group_of(tables, command.group)
    if group.state in (OPEN, SEALED):
        ending = Ending(tables, now)
        ending.abort(group.id)
        ending.review(group.id, False)
        ending.run()
    return commands.GroupSet(group.id)


# Cancel, purge, hasten


def selected(tables: Tables, where: commands.Selector, states: Iterable[State]) -> list[Job]:
    jobs = [job for job in tables.of(*states) if not where.ids or job.id in where.ids]
    return [job for job in jobs if where.matches(job)]


def cancel(tables: Tables, command: commands.Cancel, now: int) -> Result:
    found = selected(tables, command.where, UNFINISHED)
    found = [job for job in found if job.state is not RUNNING or job.cancel_requested is None]
    jobs = found[: command.limit]
    waiting = [job for job in jobs if job.state in WAITING]
    for job in jobs:
        if job.state is RUNNING:
            tables.ask_to_stop(job, Reason.REQUESTED)
    finish(tables, now, waiting, CANCELED, Reason.REQUESTED)
    return commands.Canceled(len(waiting), len(jobs) - len(waiting), len(found) > command.limit)


def purge(tables: Tables, command: commands.Purge, now: int) -> Result:
    found = selected(tables, command.where, FINISHED)
    for job in found[: command.limit]:
        tables.delete(job, now)
    return commands.Purged(len(found[: command.limit]), len(found) > command.limit)


def hasten(tables: Tables, command: commands.Hasten, now: int) -> Result:
    def order(job: Job) -> tuple[object, ...]:
        return job.queue, job.losses >= SUSPECT, job.part is not None, job.part or "", job.priority, job.seq

    queued = [job for job in tables.of(READY) if checks.matches(command.queue, job.queue)]
    less = [job for job in queued if job.priority > command.priority]
    found = sorted([job for job in less if job.ready_at <= now - command.waited], key=order)
    for job in found[: command.limit]:
        tables.put(replace(job, priority=command.priority))
    return commands.Hastened(len(found[: command.limit]), len(found) > command.limit)


# Revive


class ModelRevival:
    """The reads of `core.revival`, as scans."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def other_holder(self, job: Job) -> str | None:
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return None
        row = self.tables.keys.get((facts.namespace(job.queue), job.key))
        holder = self.tables.jobs.get(row.seq) if row is not None else None
        return None if holder is None or holder.seq == job.seq or holder.state in FINISHED else holder.id

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        return self.tables.groups[group].state, self.tables.groups[group].outcome

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        needed = [each for each, any_end in self.tables.needed_by(job) if not any_end]
        return next(((each.id, each.state) for each in needed if each.state in DEAD), None)

    def gates(self, job: Job) -> Iterable[tuple[str, GroupGate]]:
        return self.tables.gates_of(job).items()

    def dead_member(self, group: str) -> str | None:
        proxied = [self.tables.jobs.get(proxy.job) for proxy in self.tables.proxies_in(group)]
        members = [*self.tables.members(group), *[job for job in proxied if job is not None]]
        dead = [job for job in members if job.state in DEAD and job.reason is not Reason.SUPERSEDED]
        return min(dead, key=lambda job: (job.state is not FAILED, job.seq)).id if dead else None

    def open_dependencies(self, job: Job) -> set[str]:
        return {each.id for each, _ in self.tables.needed_by(job) if each.state not in FINISHED}

    def counted_in(self, job: Job) -> set[str]:
        found = {proxy.group for proxy in self.tables.represented_by(job)}
        found = {group for group in found if self.tables.groups[group].state is not ABORTING}
        return found if job.group is None else found | {job.group}

    def downstream(self, name: str) -> frozenset[str]:
        return downstream(self.tables, name)


def revive(tables: Tables, command: commands.Revive, now: int) -> Result:
    found = selected(tables, command.where, State if command.where.ids else DEAD)
    count, refused = 0, {}
    for job in sorted(found[: command.limit], key=lambda job: (job.reason is Reason.DEPENDENCY, job.seq)):
        if tables.jobs[job.seq] != job:
            # The job came back together with one that it needs.
            continue
        if (obstacle := revive_obstacle(job, ModelRevival(tables))) is not None:
            refused[job.seq] = (job.id, obstacle)
        else:
            count += revive_with_dependents(tables, job, now)
    return commands.Revived(
        count, tuple([refused[seq] for seq in sorted(refused)]), len(found) > command.limit
    )


def revive_with_dependents(tables: Tables, job: Job, now: int) -> int:
    """Revive a job and, level by level, the jobs that ended only because of it; return their number."""
    count, needing = 1, revive_one(tables, job, now)
    while needing:
        level, needing = sorted(needing), set()
        for dependent in [tables.jobs[seq] for seq in level]:
            job = tables.jobs[dependent.seq]
            dead = job.state in DEAD and job.reason is Reason.DEPENDENCY
            if dead and revive_obstacle(job, ModelRevival(tables)) is None:
                needing |= revive_one(tables, job, now)
                count += 1
    return count


def revive_one(tables: Tables, job: Job, now: int) -> set[int]:
    """Revive a job and reopen its groups; return the jobs that may have ended only because of it."""
    reads = ModelRevival(tables)
    for group, _, _ in shut_gates(job, reads):
        # The members because of which the group ended badly are deleted: nothing is left to wait for.
        del tables.gates[group, job.seq]
    tables.put(lifecycle.revived(job, tables.waits_of(job), now))
    if job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        name = (facts.namespace(job.queue), job.key)
        tables.keys[name] = facts.KeyTaken(name, job.id, job.seq, 0, None)
    for dst, _ in tables.needing(job):
        if dst.state not in FINISHED:
            # An edge to an unfinished job was met before.
            del tables.edges[job.seq, dst.seq]
    needing = {dst.seq for dst, any_end in tables.needing(job) if not any_end}
    for proxy in tables.represented_by(job):
        if tables.groups[proxy.group].state is not ABORTING:
            tables.count_proxy(proxy, "unfinished")
    for group in sorted(reads.counted_in(job)):
        if tables.groups[group].state is CLOSED:
            needing |= reopen(tables, group)
    return needing


def reopen(tables: Tables, id: str) -> set[int]:
    """A closed group waits again, and so do the jobs that it woke and that have not begun; return the jobs
    that may have ended only because of its outcome."""
    tables.groups[id] = replace(tables.groups[id], state=SEALED, outcome=None, closed_at=None)
    for proxy in tables.proxies_in(id):
        winner = tables.jobs.get(proxy.job)
        if winner is not None and winner.id not in downstream(tables, facts.node(id)):
            tables.count_proxy(proxy, counter_of(winner.state, winner.reason))
    found: set[int] = set()
    for (group, dst), gate in list(tables.gates.items()):
        job = tables.jobs[dst]
        if group != id:
            continue
        if job.state in WAITING:
            tables.put(lifecycle.held(job))
        elif job.state is RUNNING:
            # A job that has begun for the old outcome runs once.
            del tables.gates[group, dst]
        elif job.reason is Reason.DEPENDENCY and not gate.run_anyway:
            found.add(dst)
    return found


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


def given(
    row: views.QueueView | views.PartView, command: commands.SetQueue | commands.SetPart
) -> dict[str, Any]:
    """The settings that a command changes."""
    fields = [
        field for field in command.__struct_fields__ if hasattr(row, field) and field not in ("queue", "why")
    ]
    found = {field: getattr(command, field) for field in fields} | {"next_at": command.not_before}
    found["why"] = reason_after(row.why, row.paused, command.paused, command.why)
    return {field: value for field, value in found.items() if value is not UNSET}


def set_queue(tables: Tables, command: commands.SetQueue, now: int) -> Result:
    row = tables.queue(command.queue)
    tables.queues[command.queue] = replace(row, **given(row, command))
    tables.touched += 1
    return commands.QueueSet(command.queue)


def set_part(tables: Tables, command: commands.SetPart, now: int) -> Result:
    place = (command.queue, command.part)
    row = tables.part(*place)
    tables.parts[place] = replace(row, **given(row, command))
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
    left -= (reaped := reap(tables, command.dead, now, left, jumps))
    left -= (expired := expire(tables, now, left))
    woken = 0
    for name in sorted(tables.queues):
        woken += wake(tables, name, now, left - woken)
    left -= woken
    left -= (purged := purge_due(tables, now, left))
    left -= (swept := sweep(tables, now, left))
    due = min(due_times(tables, now, jumps), default=None)
    return commands.Upkept(reaped, expired, woken, purged, swept, left < 1, due)


def reap_time(job: Job, now: int, jumps: Jumps) -> int:
    """The time at which a running job is lost: after its lease, or later if the clock jumped over it."""
    lease_len, lease_until = job.lease_len or 0, job.lease_until or 0
    spared = jumps.until(lease_len, lease_until) if jumps.spares(lease_len, lease_until, now) else 0
    return max(lease_until + 1, spared)


def reap(tables: Tables, dead: Sequence[str], now: int, limit: int, jumps: Jumps) -> int:
    """Take back first the jobs of dead owners, then the jobs whose lease is over; return their number."""
    orphans = [job for job in tables.of(RUNNING) if job.owner in dead][:limit]
    lose_all(tables, orphans, now)
    late = [job for job in tables.of(RUNNING) if reap_time(job, now, jumps) <= now]
    late = sorted(late, key=lambda job: (job.lease_until, job.seq))[: limit - len(orphans)]
    lose_all(tables, late, now)
    return len(orphans) + len(late)


def lose_all(tables: Tables, jobs: Sequence[Job], now: int) -> None:
    changes = [(job, lifecycle.lose(job, now)) for job in jobs]
    for job, change in changes:
        if change.state in FINISHED:
            tables.put(replace(job, losses=change.losses))
        else:
            give_back(tables, job, change)
    ending = Ending(tables, now)
    ending.add([job.seq for job, change in changes if change.state is FAILED], FAILED, Reason.LOST)
    ending.add([job.seq for job, change in changes if change.state is CANCELED], CANCELED, None)
    ending.run()


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


def sweep(tables: Tables, now: int, limit: int) -> int:
    """Delete at most `limit` small rows that are over; return their number."""
    left = limit
    small: Sequence[tuple[dict[Any, Any], dict[str, int]]] = (
        (tables.tombstones, {id: row.until for id, row in tables.tombstones.items()}),
        (tables.replies, {token: until for token, (_, until) in tables.replies.items()}),
        (
            tables.notes,
            {key: row.expires_at for key, row in tables.notes.items() if row.expires_at is not None},
        ),
    )
    for table, times in small:
        for name in first_due(times, now, left):
            del table[name]
            left -= 1
    for name in first_due({name: row.until for name, row in tables.keys.items() if row.until}, now, left):
        left -= 1
        holder = tables.jobs.get(tables.keys[name].seq)
        if holder is None or holder.state in FINISHED:
            del tables.keys[name]
        else:
            tables.keys[name] = replace(tables.keys[name], until=0)
    idle = [at for at, part in tables.parts.items() if at not in tables.configured and part.next_at <= now]
    for place in sorted([at for at in idle if not tables.count(at[0], READY, RUNNING, part=at[1])])[:left]:
        left -= 1
        del tables.parts[place]
    closed = {id: row.closed_at + RETENTION for id, row in tables.groups.items() if row.closed_at is not None}
    for id in first_due({id: at for id, at in closed.items() if not tables.members(id)}, now, left):
        left -= 1
        forget_group(tables, id)
    return limit - left


def first_due(times: Mapping[Any, int], now: int, limit: int) -> list[Any]:
    """At most `limit` of the names whose time has come, by (time, name)."""
    return [name for at, name in sorted([(at, name) for name, at in times.items()]) if at <= now][:limit]


def forget_group(tables: Tables, id: str) -> None:
    del tables.groups[id], tables.thens[id]
    tables.deleted = {at: count for at, count in tables.deleted.items() if at[0] != id}
    tables.proxies = {name: proxy for name, proxy in tables.proxies.items() if proxy.group != id}
    tables.gates = {at: gate for at, gate in tables.gates.items() if at[0] != id}


def due_times(tables: Tables, now: int, jumps: Jumps) -> Iterator[int]:
    """The times at which an upkeep or a claim has something to do."""
    yield from [reap_time(job, now, jumps) for job in tables.of(RUNNING)]
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
    yield from [row.until for row in tables.tombstones.values()]
    yield from [until for _, until in tables.replies.values()]
    yield from [row.expires_at for row in tables.notes.values() if row.expires_at is not None]
    yield from [row.until for row in tables.keys.values() if row.until]


# The ledger

HANDLERS: Mapping[type, Callable[[Tables, Any, int], Result]] = {
    commands.Append: append,
    commands.Claim: claim,
    commands.Renew: renew,
    commands.Settle: settle,
    commands.Progress: progress,
    commands.Cancel: cancel,
    commands.Revive: revive,
    commands.Purge: purge,
    commands.Hasten: hasten,
    commands.Open: open_group,
    commands.Seal: seal,
    commands.Unseal: unseal,
    commands.Abort: abort,
    commands.Note: note,
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


class ModelLedger:
    """Safe for any number of threads: one lock, held for each call."""

    capabilities = Capabilities(durable=False, shared=False, transactional=False)
    repeats = 0
    owners = LeasesOnly()

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._tables = Tables()
        self._jumps = Jumps()
        self._last = 0
        self._version = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def apply(self, batch: Sequence[commands.Command], now: int | None = None) -> list[Answer]:
        for command in batch:
            if type(command) not in HANDLERS and type(command) is not commands.Upkeep:
                expected = "one of towpath.core.commands"
                raise InvalidInput(field="command", value=type(command), expected=expected)
        with self._changed:
            at = self._time(now)
            self._jumps.note(at)
            before = self._tables
            answers = [self._apply_one(command, at) for command in batch]
            if vars(self._tables) != vars(before):
                self._last = at
                self._version += 1
                self._changed.notify_all()
            return answers

    def _apply_one(self, command: commands.Command, now: int) -> Answer:
        tables = self._tables.copy()
        try:
            answer = answer_to(tables, command, now, self._jumps)
        except Refused as refusal:
            return refusal.with_traceback(None)
        self._tables = tables
        return answer

    def get(self, id: str) -> Job | None:
        return self._open().find(id)

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        found = {job.id: job for job in self._open().jobs.values() if job.id in ids}
        return {id: found[id] if bodies else without_bodies(found[id]) for id in ids if id in found}

    def find(self, query: views.Query) -> views.Page:
        jobs = sorted(self._open().jobs.values(), key=lambda job: job.seq, reverse=not query.oldest_first)
        if query.page is not None:
            mark = views.page_seq(query.page)
            jobs = [job for job in jobs if (job.seq > mark if query.oldest_first else job.seq < mark)]
        found = [job for job in jobs if query.matches(job)]
        page = [job if query.bodies else without_bodies(job) for job in found[: query.limit]]
        return views.Page(tuple(page), views.page_token(page[-1].seq) if len(found) > query.limit else None)

    def queues(self) -> dict[str, views.QueueView]:
        tables = self._open()
        return {name: tables.queue_view(name) for name in sorted(tables.queues)}

    def parts(self, queue: str) -> dict[str, views.PartView]:
        tables = self._open()
        return {place[1]: tables.part_view(place) for place in sorted(tables.parts) if place[0] == queue}

    def group(self, id: str) -> views.GroupView | None:
        tables = self._open()
        return tables.group_view(id) if id in tables.groups else None

    def winners(self, *, job: str = "", group: str = "") -> list[views.Winner]:
        tables = self._open()
        ids = {row.seq: row.id for row in tables.jobs.values()}
        if group:
            return [
                views.Winner(proxy.id, proxy.seq, ids.get(proxy.job)) for proxy in tables.proxies_in(group)
            ]
        named = [(id, src) for (dst, id), src in tables.names.items() if ids.get(dst) == job]
        return [views.Winner(id, 0, ids.get(src)) for id, src in sorted(named)]

    def note(self, key: str, now: int | None = None) -> views.NoteView | None:
        return self._open().live_note(key, self._time(now))

    def explain(self, id: str, now: int | None = None) -> Explanation:
        return explain(job_facts(self._open(), id), self._time(now))

    def version(self) -> int:
        self._open()
        return self._version

    def wait(self, seen: int, timeout: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version != seen, timeout)
            self._open()
            return self._version

    def check(self) -> list[str]:
        return list(problems(self._open()))

    def dump(self) -> dict[str, Any]:
        return {**dump(self._open()), "last": self._last}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _open(self) -> Tables:
        """The state. A command replaces it as a whole, so a read sees one moment."""
        if self._closed:
            raise LedgerClosed(path="model")
        return self._tables

    def _time(self, now: int | None) -> int:
        checks.optional_whole("now", now)
        self._open()
        return max(self._clock.now() if now is None else now, self._last)


# Reads


def job_facts(tables: Tables, id: str) -> JobFacts:
    """The facts that `explain` needs."""
    job = tables.find(id)
    if job is None:
        raise UnknownJob(id=id)
    queue = tables.queue_view(job.queue)
    place = (job.queue, job.part or "")
    part = tables.part_view(place) if place in tables.parts else None
    holders = tables.of(RUNNING, queue=job.queue)
    if queue.cap is None or queue.counts.running < queue.cap:
        full = part is not None and part.cap is not None and part.running >= part.cap
        holders = [each for each in holders if full and each.part == job.part]
    ready = tables.ready(job.queue, job.part)
    ahead = [each for each in ready if (each.priority, each.seq) < (job.priority, job.seq)]
    open_jobs = [each.id for each, _ in tables.needed_by(job) if each.state not in FINISHED]
    return JobFacts(
        job=job,
        queue=queue,
        part=part,
        open_jobs=tuple(open_jobs[:SHOWN]),
        open_groups=tuple(tables.open_gates(job)[:SHOWN]),
        group=None if job.group is None else tables.group_view(job.group),
        holders=tuple([each.id for each in holders][:SHOWN]),
        ahead=min(AHEAD, len(ahead)),
        culprit=culprit(tables, job) if job.reason is Reason.DEPENDENCY else None,
    )


def culprit(tables: Tables, job: Job) -> Job | None:
    """The first job to end of those because of which this job ended, along edges and groups that need
    success."""
    found, todo, roots = [job], [job], []
    while todo:
        at = todo.pop()
        if at.reason is not Reason.DEPENDENCY:
            roots.append(at)
            continue
        sources = [src for src, any_end in tables.needed_by(at) if not any_end]
        for group, gate in tables.gates_of(at).items():
            sources += [] if gate.run_anyway else tables.members(group)
        todo += [src for src in sources if src not in found and src.state is at.state]
        found += sources
    return min(roots, key=lambda root: (root.finished_at, root.seq), default=None)


def dump(tables: Tables) -> dict[str, Any]:
    """The whole state in canonical order."""
    bare_queues = [replace(tables.queue_view(name), oldest_ready=None) for name in sorted(tables.queues)]
    return {
        "jobs": [tables.jobs[seq] for seq in sorted(tables.jobs)],
        "edges": sorted((*ends, any_end) for ends, any_end in tables.edges.items()),
        "gates": sorted((*at, gate.run_anyway, gate.wanted or "") for at, gate in tables.gates.items()),
        "proxies": sorted(astuple(row) for row in tables.proxies.values()),
        "names": sorted((*at, src) for at, src in tables.names.items()),
        "groups": [
            (tables.group_view(id), {ending: list(specs) for ending, specs in tables.thens[id].items()})
            for id in sorted(tables.groups)
        ],
        "keys": [(*name, *astuple(row)[1:]) for name, row in sorted(tables.keys.items())],
        "notes": [tables.notes[key] for key in sorted(tables.notes)],
        "queues": [(view, *tables.turns[view.name]) for view in bare_queues],
        "parts": [(tables.part_view(place), place in tables.configured) for place in sorted(tables.parts)],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in tables.tombstones.values()
        ),
        "replies": sorted((token, until) for token, (_, until) in tables.replies.items()),
        "next_seq": tables.next_seq,
        "next_version": tables.next_version,
    }


def problems(tables: Tables) -> Iterator[str]:
    """The violated invariants. Counts cannot be wrong here, because they are computed when they are read."""
    for job in tables.jobs.values():
        waits = tables.waits_of(job) if job.state is BLOCKED else 0
        if job.waits != waits or (job.state is BLOCKED) != (waits > 0):
            yield f"job {job.id} is {job.state} with waits {job.waits}, counted {waits}"
        if job.reason not in lifecycle.REASONS[job.state]:
            yield f"job {job.id} is {job.state} with reason {job.reason}"
        if ((job.owner, job.lease_until) != (None, None)) != (job.state is RUNNING):
            yield f"job {job.id} is {job.state} with owner {job.owner} and lease {job.lease_until}"
        if (job.finished_at is not None) != (job.state in FINISHED):
            yield f"job {job.id} is {job.state} with finished_at {job.finished_at}"
    for group in [tables.group_view(id) for id in tables.groups]:
        if group.state in (SEALED, ABORTING) and not group.unfinished:
            yield f"group {group.id} is {group.state} with no unfinished member"
    for name, row in tables.keys.items():
        holder = tables.jobs.get(row.seq)
        if (holder is None or holder.state in FINISHED) and not row.until:
            yield f"key {name} is held by the finished job {row.id} and has no window"
