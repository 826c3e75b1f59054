"""The model: the oracle that every other ledger is compared with.

One dict per table, linear scans, `sorted()`, counts computed when they are read. A command works on a copy of
the state, so a command that is refused, or that raises, leaves the state as it was. There is no index, no
heap and no fast path here: this file is `docs/ledger-rules.md` in Python, written to be believed at first
reading and not to be fast."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.admission import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyHolder,
    KeyName,
    KeyTaken,
    Known,
    Origin,
    Proxy,
    Quota,
    Room,
    admit,
    key_of,
    namespace,
    node,
    places_of,
    walks,
)
from towpath.core.commands import (
    KEEP,
    PROMOTE,
    TOMBSTONE,
    Abort,
    Append,
    Appended,
    Cancel,
    Canceled,
    Claim,
    Claimed,
    Command,
    GroupSet,
    GroupState,
    Hasten,
    Hastened,
    Note,
    Noted,
    OnFailure,
    Open,
    Progress,
    Progressed,
    Purge,
    Purged,
    QueueSet,
    Renew,
    Renewed,
    Result,
    Revive,
    Revived,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Settled,
    Unseal,
    Upkeep,
    Upkept,
    Want,
    token_of,
)
from towpath.core.explain import AHEAD, SHOWN, Explanation, explain
from towpath.core.explain import JobFacts as ExplainFacts
from towpath.core.ids import derived
from towpath.core.job import (
    FINISHED,
    SERIAL,
    SUSPECT,
    WAITING,
    ClaimedJob,
    Done,
    Job,
    KeyPolicy,
    Reason,
    Refuse,
    Release,
    Spec,
    State,
)
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import (
    REASONS,
    RETENTION,
    Jumps,
    awaken,
    counter_of,
    group_outcome,
    lose,
    purge_time,
    revived,
    take,
)
from towpath.core.lifecycle import settle as settle_change
from towpath.core.limits import PartTurn, Pick, Rate, passed_over, permits, reason_after, share, spend
from towpath.core.revival import DEAD, GroupGate, revive_obstacle, shut_gates
from towpath.core.views import (
    Counts,
    GroupView,
    NoteView,
    Page,
    PartView,
    Query,
    QueueView,
    Winner,
    page_seq,
    page_token,
)
from towpath.errors import (
    InvalidInput,
    LedgerClosed,
    LostClaim,
    NoteConflict,
    Refused,
    UnknownGroup,
    UnknownJob,
    Unsupported,
)
from towpath.ledger import Answer, Capabilities, LeasesOnly

BLOCKED, SCHEDULED, READY, RUNNING, DONE, FAILED, CANCELED = State


class ModelQueue(Struct, frozen=True):
    name: str
    paused: bool = False
    why: str | None = None
    capacity: int | None = None
    cap: int | None = None
    rate: Rate | None = None
    next_at: int = 0
    retention: int | None = None
    keep: int | None = None
    served: int = 0
    clock: int = 0


class ModelPart(Struct, frozen=True):
    queue: str
    name: str
    cap: int | None
    paused: bool = False
    why: str | None = None
    rate: Rate | None = None
    next_at: int = 0
    weight: int = 1
    served: int = 0
    configured: bool = False
    capacity: int | None = None
    append_rate: Rate | None = None
    append_at: int = 0


class ModelGroup(Struct, frozen=True):
    """`deleted` has the counters of the members that are deleted: done, failed, canceled, superseded."""

    id: str
    on_failure: OnFailure
    then: Mapping[str, tuple[Spec, ...]]
    created_at: int
    state: GroupState = GroupState.OPEN
    outcome: State | None = None
    closed_at: int | None = None
    paused: bool = False
    why: str | None = None
    deleted: tuple[int, int, int, int] = (0, 0, 0, 0)


class ModelTombstone(Struct, frozen=True):
    """A deleted job, or an id that was refused in favour of the job `alias`."""

    id: str
    seq: int
    state: State
    settled_fence: int
    alias: str | None
    until: int


class Tables:
    """The whole state: rows are frozen, so a copy of the dicts is a copy of the state."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.queues: dict[str, ModelQueue] = {}
        self.parts: dict[tuple[str, str], ModelPart] = {}
        self.groups: dict[str, ModelGroup] = {}
        self.edges: dict[tuple[int, int], bool] = {}
        """(src seq, dst seq) -> run anyway"""
        self.gates: dict[tuple[str, int], GroupGate] = {}
        """By (group, dst seq). The gates of a closed group stay, as it may be reopened."""
        self.proxies: dict[str, Proxy] = {}
        """Members of groups that were refused for their keys, by id: another job represents them."""
        self.names: dict[tuple[int, str], int] = {}
        """(dst seq, the id of a dependency) -> seq of the job that represents it"""
        self.keys: dict[KeyName, KeyTaken] = {}
        self.notes: dict[str, NoteView] = {}
        self.tombstones: dict[str, ModelTombstone] = {}
        self.replies: dict[str, tuple[Any, int]] = {}
        self.last = 0
        self.next_seq = 1
        self.next_version = 1
        self.wrote = False

    def copy(self) -> Tables:
        made = Tables()
        for name, value in vars(self).items():
            setattr(made, name, dict(value) if isinstance(value, dict) else value)
        return made

    # Reads

    def find(self, id: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.id == id), None)

    def of(self, *states: State, queue: str | None = None) -> list[Job]:
        """The jobs in these states, in the order of seq."""
        found = [job for job in self.jobs.values() if job.state in states and queue in (None, job.queue)]
        return sorted(found, key=lambda job: job.seq)

    def members(self, group: str) -> list[Job]:
        return sorted([job for job in self.jobs.values() if job.group == group], key=lambda job: job.seq)

    def ready(self, queue: str, part: str | None) -> list[Job]:
        """The ready jobs of a part (None: those without a part) in the order in which they are claimed."""
        found = [job for job in self.of(READY, queue=queue) if job.part == part]
        return sorted(found, key=lambda job: (job.priority, job.seq))

    def count(self, queue: str, *states: State, part: str | None = None) -> int:
        return sum(part in (None, job.part) for job in self.of(*states, queue=queue))

    def needed_by(self, dst: int) -> list[tuple[int, bool]]:
        """The jobs that a job has an edge from, and whether any end of theirs will do."""
        return sorted((src, anyway) for (src, other), anyway in self.edges.items() if other == dst)

    def needing(self, src: int) -> list[tuple[int, bool]]:
        return sorted((dst, anyway) for (other, dst), anyway in self.edges.items() if other == src)

    def open_gates(self, dst: int) -> list[str]:
        """The groups that a job waits for and that are not closed."""
        return sorted(
            group
            for group, seq in self.gates
            if seq == dst and self.groups[group].state is not GroupState.CLOSED
        )

    def gates_of(self, dst: int) -> list[tuple[str, GroupGate]]:
        return sorted(
            [(group, gate) for (group, seq), gate in self.gates.items() if seq == dst],
            key=lambda each: each[0],
        )

    def proxies_in(self, group: str) -> list[Proxy]:
        return sorted(
            [proxy for proxy in self.proxies.values() if proxy.group == group], key=lambda proxy: proxy.seq
        )

    def represented_by(self, seq: int) -> list[Proxy]:
        return sorted(
            [proxy for proxy in self.proxies.values() if proxy.job == seq], key=lambda proxy: proxy.id
        )

    # Writes

    def count_proxy(self, proxy: Proxy, counter: str) -> None:
        self.wrote = True
        self.proxies[proxy.id] = replace(proxy, counted=counter)

    def put(self, job: Job) -> None:
        """Insert or replace a job. Its queue has a row from now on, and so has its part once it is ready."""
        self.wrote = True
        self.jobs[job.seq] = job
        self.queue(job.queue)
        if job.part is not None and job.state is READY:
            self.part(job.queue, job.part)

    def queue(self, name: str) -> ModelQueue:
        if name not in self.queues:
            self.queues[name] = ModelQueue(name)
            self.wrote = True
        return self.queues[name]

    def part(self, queue: str, name: str) -> ModelPart:
        if (queue, name) not in self.parts:
            self.parts[queue, name] = ModelPart(queue, name, 1 if name.startswith(SERIAL) else None)
        return self.parts[queue, name]

    def delete(self, job: Job, now: int) -> None:
        self.wrote = True
        if job.group is not None:
            group = self.groups[job.group]
            counter = counter_of(job.state, job.reason)
            added = tuple(
                [before + (counter == each) for before, each in zip(group.deleted, ENDINGS, strict=True)]
            )
            self.groups[job.group] = replace(group, deleted=added)
        del self.jobs[job.seq]
        self.edges = {ends: anyway for ends, anyway in self.edges.items() if job.seq not in ends}
        self.gates = {place: gate for place, gate in self.gates.items() if place[1] != job.seq}
        self.names = {place: src for place, src in self.names.items() if place[0] != job.seq}
        self.tombstones[job.id] = ModelTombstone(
            job.id, job.seq, job.state, job.settled_fence, None, now + TOMBSTONE
        )

    def release_key(self, job: Job, now: int) -> None:
        """The job has ended: its key is free, unless its window is open."""
        name = (namespace(job.queue), job.key or "")
        row = self.keys.get(name)
        if (
            row is not None
            and row.seq == job.seq
            and job.key_policy is not KeyPolicy.SERIAL
            and row.until <= now
        ):
            del self.keys[name]


ENDINGS = ("done", "failed", "canceled", "superseded")


# Append


def quota_of(tables: Tables, part: ModelPart) -> Quota:
    waiting = tables.count(part.queue, *WAITING, part=part.name)
    return Quota(part.capacity, waiting, part.append_rate, part.append_at)


def gather(tables: Tables, specs: Sequence[Spec], now: int) -> AppendFacts:
    jobs = {job.id: job for job in tables.jobs.values()}
    ids = {spec.id for spec in specs}
    known: dict[str, Known] = {}

    def know(id: str) -> None:
        if id in jobs:
            known[id] = Known(id, jobs[id].seq, jobs[id].state)
        elif id in tables.tombstones:
            row = tables.tombstones[id]
            known[id] = Known(id, row.seq, row.state, True, row.alias)
            if row.alias is not None and row.alias not in known:
                know(row.alias)
                known.setdefault(row.alias, Known(row.alias, row.seq, DONE, True))
        elif id in tables.proxies:
            seq = tables.proxies[id].job
            winner = tables.jobs.get(seq)
            if winner is None:
                known[id] = Known(id, seq, DONE, True)
            else:
                known[id] = Known(id, seq, winner.state, True, winner.id)
                know(winner.id)

    for spec in specs:
        for id in [spec.id, *[after.id for after in spec.after if not after.group]]:
            know(id)
    holders: dict[KeyName, KeyHolder] = {}
    for spec in specs:
        name = key_of(spec)
        row = tables.keys.get(name) if name is not None else None
        if row is None:
            continue
        job = tables.jobs.get(row.seq)
        runner = tables.jobs.get(row.runner) if row.runner is not None else None
        stops = row.runner if runner is not None and runner.state is RUNNING else None
        holders[row.name] = KeyHolder(
            row.id, row.seq, job.state if job is not None else None, row.until, stops
        )
        know(row.id)
        if row.until > now and row.id not in ids:
            known.setdefault(row.id, Known(row.id, row.seq, DONE, True))
    names = {spec.group for spec in specs}
    names |= {after.id for spec in specs for after in spec.after if after.group}
    groups = {id: GroupFact(row.state, row.outcome) for id, row in tables.groups.items() if id in names}
    depth = {queue: tables.count(queue, *WAITING) for queue in {spec.queue for spec in specs}}
    rooms = {
        queue: Room(row.capacity, depth[queue], row.retention)
        for queue, row in tables.queues.items()
        if queue in depth
    }
    quotas = {
        place: quota_of(tables, part)
        for place, part in tables.parts.items()
        if place in places_of(specs) and (part.capacity is not None or part.append_rate is not None)
    }
    downstream = {start: reach(tables, start) for start in walks(specs, holders)}
    return AppendFacts(
        known=known, holders=holders, groups=groups, rooms=rooms, quotas=quotas, downstream=downstream
    )


def reach(tables: Tables, start: str) -> frozenset[str]:
    """All unfinished jobs, and groups that are not closed, that wait for a node."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        job = tables.find(name)
        groups: set[str] = set()
        if job is None:
            # Of a closed group: the jobs that would wait again if it were reopened.
            waiting = [tables.jobs[dst] for group, dst in tables.gates if node(group) == name]
            found = {dst.id for dst in waiting if dst.state in WAITING}
        else:
            waiting = [tables.jobs[dst] for dst, _ in tables.needing(job.seq)]
            found = {dst.id for dst in waiting if dst.state is BLOCKED}
            groups = {
                proxy.group for proxy in tables.represented_by(job.seq) if proxy.counted == "unfinished"
            }
            if job.group is not None and name != start:
                # A job that is replaced, at the start, leaves its own group.
                groups.add(job.group)
        found |= {node(group) for group in groups if tables.groups[group].state is not GroupState.CLOSED}
        todo += found - reached
        reached |= found
    return frozenset(reached)


def insert(tables: Tables, admission: Admission, now: int) -> list[int]:
    """Write an admission; the superseded jobs, which are still to be finished."""
    for job in admission.jobs:
        tables.put(job)
    tables.next_seq += admission.numbers
    for queue, name, count in admission.spent:
        part = tables.part(queue, name)
        tables.parts[queue, name] = replace(
            part, append_at=spend(part.append_at, part.append_rate, now, count)
        )
    for old, newer in admission.handed:
        hand_over(tables, old, newer)
    tables.names |= {(dst, id): src for dst, id, src in admission.names}
    for proxy in admission.proxies:
        tables.count_proxy(proxy, proxy.counted)
    tables.edges |= {(src, dst): anyway for src, dst, anyway in admission.edges}
    tables.gates |= {(group, dst): GroupGate(anyway) for group, dst, anyway in admission.gates}
    for seq in admission.asked:
        if tables.jobs[seq].cancel_requested is None:
            tables.put(replace(tables.jobs[seq], cancel_requested=Reason.SUPERSEDED))
    seqs = {placed.id: placed.seq for placed in admission.answers}
    for refused, winner in admission.aliases:
        tables.wrote = True
        tables.tombstones[refused] = ModelTombstone(refused, seqs[winner], DONE, 0, winner, now + TOMBSTONE)
    tables.keys |= {row.name: row for row in admission.keys}
    tables.keys = {name: row for name, row in tables.keys.items() if name not in admission.freed}
    return admission.superseded


def hand_over(tables: Tables, old: int, newer: int) -> None:
    """The dependents of a superseded job, and the groups in which it represents a member, wait for the newer
    job."""
    for dst, anyway in tables.needing(old):
        del tables.edges[old, dst]
        tables.edges[newer, dst] = anyway
        tables.names |= {
            place: newer for place, src in tables.names.items() if place[0] == dst and src == old
        }
        tables.names[dst, tables.jobs[old].id] = newer
    for proxy in tables.represented_by(old):
        if proxy.counted == "unfinished":
            tables.proxies[proxy.id] = replace(proxy, job=newer)


def append_specs(tables: Tables, specs: Sequence[Spec], now: int, origin: Origin | None = None) -> Admission:
    admission = admit(specs, gather(tables, specs, now), now, tables.next_seq, origin)
    finishing = Finish(tables, now)
    finishing.add(insert(tables, admission, now), CANCELED, Reason.SUPERSEDED)
    touched = [(job.group, job.state is FAILED) for job in admission.jobs if job.group is not None]
    touched += [(proxy.group, proxy.counted == "failed") for proxy in admission.proxies]
    finishing.run(touched)
    return admission


def append(tables: Tables, command: Append, now: int) -> Appended:
    return Appended(append_specs(tables, command.specs, now, Origin() if command.inside else None).answers)


# Claim, renew, progress


def claim(tables: Tables, command: Claim, now: int) -> Claimed:
    expire(tables, now, PROMOTE)
    taken: list[Job] = []
    for each in command.wants:
        want = narrowed(command, each, taken)
        if want is None:
            continue
        names = claimable_queues(tables, want.queue)
        for name in names:
            wake(tables, name, now, PROMOTE)
        offers = {name: offered(tables, tables.queues[name], want, now) for name in names}
        once = want.n if want.once is None else want.once
        suspects = want.n if want.suspects is None else want.suspects
        picks: list[tuple[Job, Pick | None]] = []
        while len(picks) < want.n and (heads := [offer for offer in offers.values() if offer]):
            offer = min(heads, key=lambda offer: (offer[0][0].priority, offer[0][0].seq))
            if offer[0][0].max_attempts == 1:
                if once == 0:
                    offer.clear()
                    continue
                once -= 1
            if offer[0][0].losses >= SUSPECT:
                if suspects == 0:
                    offer.pop(0)
                    continue
                suspects -= 1
            picks.append(offer.pop(0))
        taken += [start(tables, job, pick, command, now) for job, pick in picks]
    return Claimed(tuple([ClaimedJob(job) for job in taken]))


def claimable_queues(tables: Tables, pattern: str) -> list[str]:
    """The queues that a want names, or those with ready or scheduled jobs that its pattern matches, by
    name."""
    if "*" not in pattern:
        return sorted({name for name in pattern.split(",") if name in tables.queues})
    return sorted({job.queue for job in tables.of(READY, SCHEDULED) if checks.matches(pattern, job.queue)})


def offered(tables: Tables, queue: ModelQueue, want: Want, now: int) -> list[tuple[Job, Pick | None]]:
    """The jobs that a queue gives now, in order, each with the turn of its part (None: no part takes a
    turn)."""
    room = 0 if queue.paused else permits(queue.next_at, queue.rate, now, want.n)
    if queue.cap is not None:
        room = min(room, queue.cap - tables.count(queue.name, RUNNING))
    if room <= 0:
        return []
    hidden = passed_over(
        Counter([job.part for job in tables.of(READY, queue=queue.name) if job.losses >= SUSPECT]),
        want.suspects,
    )
    turns = []
    for part in sorted(tables.parts.values(), key=lambda part: (part.served, part.name)):
        if part.queue == queue.name and not part.paused and part.next_at <= now:
            ready = tables.count(queue.name, READY, part=part.name)
            running = tables.count(queue.name, RUNNING, part=part.name)
            if ready and (part.cap is None or running < part.cap):
                most = permits(part.next_at, part.rate, now, ready - hidden.get(part.name, 0))
                most = most if part.cap is None else min(most, part.cap - running)
                turns.append(PartTurn(part.name, part.served, part.weight, most))
    turns = turns[: room + len(hidden)]
    picks: list[Pick | None] = [None] * room
    if turns:
        if loose := len(tables.ready(queue.name, None)) - hidden.get(None, 0):
            turns.append(PartTurn(None, queue.served, 1, loose))
        picks = list(share(turns, queue.clock, room))
    suspects = room if want.suspects is None else want.suspects
    found: list[tuple[Job, Pick | None]] = []
    for pick in picks:
        line = tables.ready(queue.name, None if pick is None else pick.part)
        line = [job for job in line if job not in [each for each, _ in found]]
        line = [job for job in line if job.expires_at is None or job.expires_at > now]
        line = [job for job in line if job.losses < SUSPECT or suspects > 0]
        if line:
            suspects -= line[0].losses >= SUSPECT
            found.append((line[0], pick))
    return found


def start(tables: Tables, job: Job, pick: Pick | None, command: Claim, now: int) -> Job:
    taken = take(job, command.owner, command.lease, now)
    tables.put(taken)
    queue = tables.queues[job.queue]
    queue = replace(queue, next_at=spend(queue.next_at, queue.rate, now, 1))
    if pick is not None:
        queue = replace(queue, clock=pick.clock, served=pick.served if pick.part is None else queue.served)
    tables.queues[job.queue] = queue
    if job.part is not None and pick is not None:
        part = tables.parts[job.queue, job.part]
        changed = replace(part, served=pick.served, next_at=spend(part.next_at, part.rate, now, 1))
        tables.parts[job.queue, job.part] = changed
    return taken


def wake(tables: Tables, queue: str, now: int, limit: int) -> int:
    """Make at most `limit` scheduled jobs of a queue that are due ready; how many there were."""
    due = sorted(
        [job for job in tables.of(SCHEDULED, queue=queue) if job.ready_at <= now],
        key=lambda job: (job.ready_at, job.seq),
    )
    for job in due[:limit]:
        tables.put(
            replace(job, state=READY, reason=job.reason if job.reason in REASONS[READY] else Reason.NONE)
        )
    return len(due[:limit])


def expire(tables: Tables, now: int, limit: int) -> int:
    """End at most `limit` waiting jobs that are past their time; how many there were."""
    due = [job for job in tables.of(*WAITING) if job.expires_at is not None and job.expires_at <= now]
    due.sort(key=lambda job: (job.expires_at, job.seq))
    finish(tables, now, [job.seq for job in due[:limit]], FAILED, Reason.EXPIRED)
    return len(due[:limit])


def held(tables: Tables, id: str, fence: int) -> Job | None:
    job = tables.find(id)
    return job if job is not None and job.state is RUNNING and job.fence == fence else None


def renew(tables: Tables, command: Renew, now: int) -> Renewed:
    until = now + command.lease
    lost, cancel = [], []
    for id, fence in command.held:
        job = held(tables, id, fence)
        if job is None:
            lost.append(id)
            continue
        tables.put(replace(job, lease_until=until, lease_len=command.lease))
        if job.cancel_requested is not None:
            cancel.append((id, job.cancel_requested))
    return Renewed(until, tuple(lost), tuple(cancel))


def progress(tables: Tables, command: Progress, now: int) -> Progressed:
    job = held(tables, command.id, command.fence)
    if job is None:
        raise LostClaim(id=command.id, fence=command.fence)
    given = {"progress_done": command.done, "progress_total": command.total, "cursor": command.cursor}
    tables.put(replace(job, **{field: value for field, value in given.items() if value is not None}))
    return Progressed(job.cancel_requested)


# Settle


def settle(tables: Tables, command: Settle, now: int) -> Settled:
    if command.within is not None:
        raise Unsupported(what="a function inside a settle needs a database, and this ledger lives in memory")
    job = held(tables, command.id, command.fence)
    if job is None:
        return settled_before(tables, command)
    if command.spawn:
        append_specs(tables, command.spawn, now, Origin(job.id, job.group, job.correlation_id))
    for note in command.notes:
        write_note(tables, note, now)
    return Settled(job.id, end_attempt(tables, tables.jobs[job.seq], command, now))


def settled_before(tables: Tables, command: Settle) -> Settled:
    job, row = tables.find(command.id), tables.tombstones.get(command.id)
    if job is not None:
        if job.settled_fence == command.fence and job.settled_as is not None:
            return Settled(job.id, job.settled_as)
    elif row is not None and row.settled_fence == command.fence > 0:
        return Settled(row.id, row.state)
    raise LostClaim(id=command.id, fence=command.fence)


def end_attempt(tables: Tables, job: Job, command: Settle, now: int) -> State:
    outcome = command.outcome
    change = settle_change(job, outcome, now)
    error = getattr(outcome, "error", None)
    settled = replace(
        job,
        attempts=change.attempts,
        failures=change.failures,
        settled_fence=job.fence,
        settled_as=change.state,
        result=outcome.result if isinstance(outcome, Done) else job.result,
        error=job.error if error is None else error,
    )
    if isinstance(outcome, Release | Refuse):
        give_back_permit(tables, job, now)
    if change.state in FINISHED:
        tables.put(settled)
        finish(tables, now, [job.seq], change.state, change.reason)
    else:
        ready_at = job.ready_at if change.ready_at is None else change.ready_at
        tables.put(
            wait_again(tables, replace(settled, state=change.state, reason=change.reason, ready_at=ready_at))
        )
    return change.state


def wait_again(tables: Tables, job: Job) -> Job:
    """A job that ran and waits now. A member of an open group waits for the seal."""
    job = replace(job, owner=None, lease_until=None)
    if job.group is not None and tables.groups[job.group].state is GroupState.OPEN:
        return replace(job, state=BLOCKED, reason=Reason.NONE, waits=1)
    return job


def give_back_permit(tables: Tables, job: Job, now: int) -> None:
    """The attempt did not begin."""
    queue = tables.queues[job.queue]
    tables.queues[job.queue] = replace(queue, next_at=spend(queue.next_at, queue.rate, now, -1))
    if job.part is not None:
        part = tables.parts[job.queue, job.part]
        tables.parts[job.queue, job.part] = replace(part, next_at=spend(part.next_at, part.rate, now, -1))


# Finishing a set


def finish(tables: Tables, now: int, seqs: Sequence[int], state: State, reason: Reason | None) -> None:
    finishing = Finish(tables, now)
    finishing.add(seqs, state, reason)
    finishing.run()


class Finish:
    """A first-in-first-out list of sets of jobs that end, each in one state. Without a reason each job of the
    set ends for the reason that it was asked to stop for."""

    def __init__(self, tables: Tables, now: int) -> None:
        self.tables, self.now = tables, now
        self.sets: deque[tuple[Sequence[int], State, Reason | None]] = deque()

    def add(self, seqs: Sequence[int], state: State, reason: Reason | None) -> None:
        if seqs:
            self.sets.append((seqs, state, reason))

    def run(self, touched: Iterable[tuple[str, bool]] = ()) -> None:
        """`touched` are groups with new members (True: one that failed): they are looked at together with the
        first set."""
        groups = list(touched)
        while self.sets or groups:
            seqs, state, reason = self.sets.popleft() if self.sets else ((), DONE, None)
            jobs = [self.tables.jobs[seq] for seq in seqs]
            ended = [job.seq for job in jobs if job.state not in FINISHED]
            for job in jobs:
                if job.seq in ended:
                    self.end(job, state, (job.cancel_requested or Reason.NONE) if reason is None else reason)
            if state in DEAD:
                self.cascade(ended, state)
            for seq in ended:
                for dst, _ in self.tables.needing(seq):
                    self.lower(dst)
            for seq in ended:
                groups += [(group, state is FAILED) for group in self.count_end(self.tables.jobs[seq])]
            for id in sorted({group for group, _ in groups}):
                self.look_at(id, (id, True) in groups)
            groups = []

    def count_end(self, job: Job) -> list[str]:
        """The groups that an ended job is counted in: its own, and those in which it represents a member."""
        waiting = [proxy for proxy in self.tables.represented_by(job.seq) if proxy.counted == "unfinished"]
        for proxy in waiting:
            self.tables.count_proxy(proxy, counter_of(job.state, job.reason))
        return [proxy.group for proxy in waiting] + ([] if job.group is None else [job.group])

    def end(self, job: Job, state: State, reason: Reason) -> None:
        retention = self.tables.queues[job.queue].retention
        ended = replace(
            job,
            state=state,
            reason=reason,
            finished_at=self.now,
            purge_at=purge_time(state, self.now, job.retention, retention),
            waits=0,
            owner=None,
            lease_until=None,
        )
        self.tables.put(ended)
        self.tables.release_key(job, self.now)

    def cascade(self, ended: list[int], state: State) -> None:
        """Every blocked job that needs one of `ended` to succeed, transitively, ends in the same state and
        joins the list."""
        for src in ended:
            for dst, anyway in self.tables.needing(src):
                job = self.tables.jobs[dst]
                if not anyway and job.state is BLOCKED:
                    self.end(job, state, Reason.DEPENDENCY)
                    ended.append(dst)

    def lower(self, seq: int) -> None:
        """A blocked job has one thing less to wait for."""
        job = self.tables.jobs[seq]
        if job.state is BLOCKED:
            state = awaken(job.ready_at, job.waits - 1, self.now)
            reason = job.reason if state is BLOCKED else Reason.DELAY if state is SCHEDULED else Reason.NONE
            self.tables.put(replace(job, waits=job.waits - 1, state=state, reason=reason))

    def look_at(self, id: str, failed: bool) -> None:
        """Abort the group if a member of it has just failed, and close it if nothing in it is unfinished."""
        group = self.tables.groups[id]
        if (
            failed
            and group.on_failure is OnFailure.ABORT
            and group.state in (GroupState.OPEN, GroupState.SEALED)
        ):
            self.abort(id)
        group = self.tables.groups[id]
        counts = group_counts(self.tables, group)
        if group.state in (GroupState.SEALED, GroupState.ABORTING) and not counts["unfinished"]:
            self.close(group, counts)

    def abort(self, id: str) -> None:
        tables = self.tables
        tables.wrote = True
        tables.groups[id] = replace(tables.groups[id], state=GroupState.ABORTING, paused=False, why=None)
        members = tables.members(id)
        for job in members:
            if job.state is RUNNING and job.cancel_requested is None:
                tables.put(replace(job, cancel_requested=Reason.ABORTED))
        for proxy in tables.proxies_in(id):
            if proxy.counted == "unfinished":
                tables.count_proxy(proxy, "canceled")
        self.add([job.seq for job in members if job.state in WAITING], CANCELED, Reason.ABORTED)

    def close(self, group: ModelGroup, counts: Mapping[str, int]) -> None:
        tables = self.tables
        outcome = group_outcome(counts["failed"], counts["canceled"], group.state is GroupState.ABORTING)
        then = {ending: specs for ending, specs in group.then.items() if ending != outcome}
        tables.wrote = True
        tables.groups[group.id] = replace(
            group, state=GroupState.CLOSED, outcome=outcome, closed_at=self.now, then=then
        )
        gates = {dst: gate for (id, dst), gate in tables.gates.items() if id == group.id}
        blocked = [dst for dst in gates if tables.jobs[dst].state is BLOCKED]
        met = [dst for dst in blocked if gates[dst].met(outcome)]
        for dst in met:
            self.lower(dst)
        lost = [dst for dst in blocked if dst not in met]
        self.add(lost, FAILED if outcome is FAILED else CANCELED, Reason.DEPENDENCY)
        specs = [
            replace(spec, id=derived(group.id, f"then:{outcome}", n))
            for n, spec in enumerate(group.then.get(outcome, ()))
        ]
        if specs:
            admission = admit(specs, gather(tables, specs, self.now), self.now, tables.next_seq, Origin())
            self.add(insert(tables, admission, self.now), CANCELED, Reason.SUPERSEDED)
            tables.gates |= {(group.id, job.seq): GroupGate(False, outcome) for job in admission.jobs}


# Groups


def group_counts(tables: Tables, group: ModelGroup) -> dict[str, int]:
    counts = {"unfinished": 0, **dict(zip(ENDINGS, group.deleted, strict=True))}
    for job in tables.members(group.id):
        counts[counter_of(job.state, job.reason)] += 1
    for proxy in tables.proxies_in(group.id):
        counts[proxy.counted] += 1
    return counts


def group_row(tables: Tables, id: str) -> ModelGroup:
    if id not in tables.groups:
        raise UnknownGroup(group=id)
    return tables.groups[id]


def open_group(tables: Tables, command: Open, now: int) -> GroupSet:
    if command.group not in tables.groups:
        tables.wrote = True
        then = {ending: tuple(specs) for ending, specs in command.then.items() if specs}
        tables.groups[command.group] = ModelGroup(command.group, OnFailure(command.on_failure), then, now)
    return GroupSet(command.group)


def seal(tables: Tables, command: Seal, now: int) -> GroupSet:
    group = group_row(tables, command.group)
    if group.state is GroupState.OPEN:
        tables.wrote = True
        tables.groups[group.id] = replace(group, state=GroupState.SEALED, paused=False, why=None)
        finishing = Finish(tables, now)
        for job in tables.members(group.id):
            finishing.lower(job.seq)
        finishing.run([(group.id, False)])
    return GroupSet(group.id)


def unseal(tables: Tables, command: Unseal, now: int) -> GroupSet:
    group = group_row(tables, command.group)
    if group.state is GroupState.SEALED:
        tables.wrote = True
        tables.groups[group.id] = replace(group, state=GroupState.OPEN, paused=True, why=command.why)
        for job in tables.members(group.id):
            if job.state is BLOCKED:
                tables.put(replace(job, waits=job.waits + 1))
            elif job.state in WAITING:
                tables.put(replace(job, state=BLOCKED, reason=Reason.NONE, waits=1))
    elif group.paused and group.why != command.why:
        tables.wrote = True
        tables.groups[group.id] = replace(group, why=command.why)
    return GroupSet(group.id)


def abort(tables: Tables, command: Abort, now: int) -> GroupSet:
    group = group_row(tables, command.group)
    if group.state in (GroupState.OPEN, GroupState.SEALED):
        finishing = Finish(tables, now)
        finishing.abort(group.id)
        finishing.look_at(group.id, False)
        finishing.run()
    return GroupSet(group.id)


# Cancel, revive, purge, hasten


def selected(tables: Tables, where: Selector, states: Iterable[State]) -> list[Job]:
    def matches(job: Job) -> bool:
        exact = {"part": where.part, "group": where.group, "key": where.key, "kind": where.kind}
        return (
            (not where.ids or job.id in where.ids)
            and (not where.states or job.state in where.states)
            and (where.queue is None or checks.matches(where.queue, job.queue))
            and all(getattr(job, field) == value for field, value in exact.items() if value is not None)
            and (where.created_before is None or job.created_at < where.created_before)
            and (
                where.finished_before is None
                or (job.finished_at or where.finished_before) < where.finished_before
            )
        )

    return [job for job in tables.of(*states) if matches(job)]


def cancel(tables: Tables, command: Cancel, now: int) -> Canceled:
    found = selected(tables, command.where, set(State) - FINISHED)
    found = [job for job in found if job.state is not RUNNING or job.cancel_requested is None]
    jobs = found[: command.limit]
    waiting = [job.seq for job in jobs if job.state in WAITING]
    for job in jobs:
        if job.state is RUNNING:
            tables.put(replace(job, cancel_requested=Reason.REQUESTED))
    finish(tables, now, waiting, CANCELED, Reason.REQUESTED)
    return Canceled(len(waiting), len(jobs) - len(waiting), len(found) > command.limit)


def purge(tables: Tables, command: Purge, now: int) -> Purged:
    found = selected(tables, command.where, FINISHED)
    for job in found[: command.limit]:
        tables.delete(job, now)
    return Purged(len(found[: command.limit]), len(found) > command.limit)


def revive(tables: Tables, command: Revive, now: int) -> Revived:
    found = selected(tables, command.where, State if command.where.ids else DEAD)
    jobs = sorted(found[: command.limit], key=lambda job: (job.reason is Reason.DEPENDENCY, job.seq))
    count, refused = 0, {}
    for job in jobs:
        if tables.jobs[job.seq] != job:
            # The job came back together with one that it needs.
            continue
        obstacle = revive_obstacle(job, ModelRevival(tables))
        if obstacle is not None:
            refused[job.seq] = (job.id, obstacle)
        else:
            count += revive_with_dependents(tables, job, now)
    return Revived(count, tuple([refused[seq] for seq in sorted(refused)]), len(found) > command.limit)


class ModelRevival:
    """The reads of `core.revival`, as scans."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def other_holder(self, job: Job) -> str | None:
        if job.key is None or job.key_policy is KeyPolicy.SERIAL:
            return None
        row = self.tables.keys.get((namespace(job.queue), job.key))
        holder = self.tables.jobs.get(row.seq) if row is not None else None
        return None if holder is None or holder.seq == job.seq or holder.state in FINISHED else holder.id

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        return self.tables.groups[group].state, self.tables.groups[group].outcome

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        needed = [self.tables.jobs[src] for src, anyway in self.tables.needed_by(job.seq) if not anyway]
        return next(((each.id, each.state) for each in needed if each.state in DEAD), None)

    def gates(self, job: Job) -> list[tuple[str, GroupGate]]:
        return self.tables.gates_of(job.seq)

    def dead_member(self, group: str) -> str | None:
        proxied = [self.tables.jobs.get(proxy.job) for proxy in self.tables.proxies_in(group)]
        members = [*self.tables.members(group), *[job for job in proxied if job is not None]]
        dead = [job for job in members if job.state in DEAD and job.reason is not Reason.SUPERSEDED]
        return min(dead, key=lambda job: (job.state is not FAILED, job.seq)).id if dead else None

    def open_dependencies(self, job: Job) -> set[str]:
        needed = [self.tables.jobs[src] for src, _ in self.tables.needed_by(job.seq)]
        return {each.id for each in needed if each.state not in FINISHED}

    def counted_in(self, job: Job) -> set[str]:
        found = {proxy.group for proxy in self.tables.represented_by(job.seq)}
        found = {group for group in found if self.tables.groups[group].state is not GroupState.ABORTING}
        return found if job.group is None else found | {job.group}

    def downstream(self, name: str) -> frozenset[str]:
        return reach(self.tables, name)


def revive_with_dependents(tables: Tables, job: Job, now: int) -> int:
    """Revive a job and, level by level, the jobs that ended only because of it; how many came back."""
    count, needing = 1, revive_one(tables, job, now)
    while needing:
        level, needing = sorted(needing), set()
        for seq in level:
            dependent = tables.jobs[seq]
            if (
                dependent.state in DEAD
                and dependent.reason is Reason.DEPENDENCY
                and revive_obstacle(dependent, ModelRevival(tables)) is None
            ):
                needing |= revive_one(tables, dependent, now)
                count += 1
    return count


def revive_one(tables: Tables, job: Job, now: int) -> set[int]:
    """Revive a job and reopen its groups; the jobs that may have ended only because of it."""
    for group, _, _ in shut_gates(job, ModelRevival(tables)):
        # The members because of which the group ended badly are deleted: nothing is left to wait for.
        del tables.gates[group, job.seq]
    waits = sum(tables.jobs[src].state not in FINISHED for src, _ in tables.needed_by(job.seq))
    waits += len(tables.open_gates(job.seq))
    waits += job.group is not None and tables.groups[job.group].state is GroupState.OPEN
    tables.put(revived(job, waits, now))
    if job.key is not None and job.key_policy is not KeyPolicy.SERIAL:
        name = (namespace(job.queue), job.key)
        tables.keys[name] = KeyTaken(name, job.id, job.seq, 0, None)
    for dst, _ in tables.needing(job.seq):
        # An edge to an unfinished job was met before.
        if tables.jobs[dst].state not in FINISHED:
            del tables.edges[job.seq, dst]
    needing = {dst for dst, anyway in tables.needing(job.seq) if not anyway}
    for proxy in tables.represented_by(job.seq):
        if tables.groups[proxy.group].state is not GroupState.ABORTING:
            tables.count_proxy(proxy, "unfinished")
    for group in sorted(ModelRevival(tables).counted_in(job)):
        if tables.groups[group].state is GroupState.CLOSED:
            needing |= reopen(tables, group)
    return needing


def reopen(tables: Tables, id: str) -> set[int]:
    """A closed group waits again, and so do the jobs that it woke and that have not begun; the jobs that may
    have ended only because of its outcome."""
    tables.groups[id] = replace(tables.groups[id], state=GroupState.SEALED, outcome=None, closed_at=None)
    for proxy in tables.proxies_in(id):
        winner = tables.jobs.get(proxy.job)
        if winner is not None and winner.id not in reach(tables, node(id)):
            tables.count_proxy(proxy, counter_of(winner.state, winner.reason))
    found: set[int] = set()
    for (group, dst), gate in list(tables.gates.items()):
        job = tables.jobs[dst]
        if group != id:
            continue
        if job.state in WAITING:
            reason = job.reason if job.state is BLOCKED else Reason.NONE
            tables.put(replace(job, state=BLOCKED, reason=reason, waits=job.waits + 1))
        elif job.state is RUNNING:
            # A job that has begun for the old outcome runs once.
            del tables.gates[group, dst]
        elif job.reason is Reason.DEPENDENCY and not gate.run_anyway:
            found.add(dst)
    return found


def hasten(tables: Tables, command: Hasten, now: int) -> Hastened:
    found = [
        job
        for job in tables.of(READY)
        if checks.matches(command.queue, job.queue)
        and job.priority > command.priority
        and job.ready_at <= now - command.waited
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
        tables.put(replace(job, priority=command.priority))
    return Hastened(len(found[: command.limit]), len(found) > command.limit)


# Notes and settings


def note(tables: Tables, command: Note, now: int) -> Noted:
    answer = write_note(tables, command, now)
    for gate in command.gates:
        if isinstance(gate, SetQueue):
            set_queue(tables, gate, now)
        else:
            set_part(tables, gate, now)
    return answer


def live_note(tables: Tables, key: str, now: int) -> NoteView | None:
    row = tables.notes.get(key)
    return row if row is not None and (row.expires_at is None or row.expires_at > now) else None


def write_note(tables: Tables, command: Note, now: int) -> Noted:
    key, old = command.key, live_note(tables, command.key, now)
    found = old.version if old is not None else 0
    if command.expect is not None and command.expect != found:
        raise NoteConflict(key=key, version=found, expect=command.expect)
    tables.wrote = True
    if command.value is None:
        tables.notes.pop(key, None)
        return Noted(key, found, old.fence if old is not None else 0)
    version, tables.next_version = tables.next_version, tables.next_version + 1
    fence = old.fence if old is not None else version
    tables.notes[key] = NoteView(
        key, command.value, version, fence, None if command.ttl is None else now + command.ttl
    )
    return Noted(key, version, fence)


def settings(
    row: ModelQueue | ModelPart, command: SetQueue | SetPart, fields: Sequence[str]
) -> dict[str, Any]:
    given = {field: getattr(command, field) for field in fields} | {"next_at": command.not_before}
    given["why"] = reason_after(row.why, row.paused, command.paused, command.why)
    return {field: value for field, value in given.items() if value is not UNSET}


def set_queue(tables: Tables, command: SetQueue, now: int) -> QueueSet:
    tables.wrote = True
    row = tables.queue(command.queue)
    given = settings(row, command, ("paused", "capacity", "cap", "rate", "retention", "keep"))
    tables.queues[command.queue] = replace(row, **given)
    return QueueSet(command.queue)


def set_part(tables: Tables, command: SetPart, now: int) -> QueueSet:
    tables.wrote = True
    row = tables.part(command.queue, command.part)
    given = settings(row, command, ("paused", "cap", "rate", "weight", "capacity", "append_rate"))
    tables.parts[command.queue, command.part] = replace(row, configured=True, **given)
    return QueueSet(command.queue, command.part)


# Upkeep


def upkeep(tables: Tables, command: Upkeep, now: int, jumps: Jumps) -> Upkept:
    left = command.limit
    left -= (reaped := reap(tables, command.dead, now, left, jumps))
    left -= (expired := expire(tables, now, left))
    woken = 0
    for name in sorted(tables.queues):
        woken += wake(tables, name, now, left - woken)
    left -= woken
    left -= (purged := purge_due(tables, now, left))
    left -= (swept := sweep(tables, now, left))
    times = list(due_times(tables, now, jumps))
    return Upkept(reaped, expired, woken, purged, swept, left < 1, min(times, default=None))


def spared_until(job: Job, now: int, jumps: Jumps) -> int:
    """The time before which a running job is not reaped because the clock jumped; 0 if it did not."""
    assert job.lease_len is not None
    assert job.lease_until is not None
    return (
        jumps.until(job.lease_len, job.lease_until)
        if jumps.spares(job.lease_len, job.lease_until, now)
        else 0
    )


def reap(tables: Tables, dead: Sequence[str], now: int, limit: int, jumps: Jumps) -> int:
    """First the jobs of dead owners, then the jobs whose lease is over; how many there were."""
    orphans = [job for job in tables.of(RUNNING) if job.owner in dead][:limit]
    lose_all(tables, orphans, now)
    late = [
        job
        for job in tables.of(RUNNING)
        if (job.lease_until or 0) < now and not spared_until(job, now, jumps)
    ]
    late = sorted(late, key=lambda job: (job.lease_until, job.seq))[: limit - len(orphans)]
    lose_all(tables, late, now)
    return len(orphans) + len(late)


def lose_all(tables: Tables, jobs: Sequence[Job], now: int) -> None:
    ended: dict[State, list[int]] = {FAILED: [], CANCELED: []}
    for job in jobs:
        change = lose(job, now)
        if change.state in FINISHED:
            tables.put(replace(job, losses=change.losses))
            ended[change.state].append(job.seq)
        else:
            ready_at = job.ready_at if change.ready_at is None else change.ready_at
            lost = replace(
                job, state=change.state, reason=change.reason, losses=change.losses, ready_at=ready_at
            )
            tables.put(wait_again(tables, lost))
    finishing = Finish(tables, now)
    finishing.add(ended[FAILED], FAILED, Reason.LOST)
    finishing.add(ended[CANCELED], CANCELED, None)
    finishing.run()


def kept(tables: Tables, queue: ModelQueue) -> list[Job]:
    """The done and canceled jobs of a queue, the first to go first."""
    return sorted(tables.of(DONE, CANCELED, queue=queue.name), key=lambda job: (job.purge_at, job.seq))


def above(tables: Tables, queue: ModelQueue) -> int:
    return max(0, len(kept(tables, queue)) - (KEEP if queue.keep is None else queue.keep))


def purge_due(tables: Tables, now: int, limit: int) -> int:
    queues = [tables.queues[name] for name in sorted(tables.queues)]
    left = limit
    for queue in queues:
        due = [job for job in kept(tables, queue) if (job.purge_at or 0) <= now][:left]
        left -= len(due)
        for job in due:
            tables.delete(job, now)
    for queue in queues:
        oldest = kept(tables, queue)[: min(left, above(tables, queue))]
        left -= len(oldest)
        for job in oldest:
            tables.delete(job, now)
    return limit - left


def sweep(tables: Tables, now: int, limit: int) -> int:
    """Delete at most `limit` small rows that are over; how many there were."""
    left = limit
    for table, times in (
        (tables.tombstones, {id: row.until for id, row in tables.tombstones.items()}),
        (tables.replies, {token: until for token, (_, until) in tables.replies.items()}),
        (
            tables.notes,
            {key: row.expires_at for key, row in tables.notes.items() if row.expires_at is not None},
        ),
    ):
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
    idle = [place for place, part in tables.parts.items() if not part.configured and part.next_at <= now]
    for queue, name in sorted(
        [place for place in idle if not tables.count(place[0], READY, RUNNING, part=place[1])]
    )[:left]:
        left -= 1
        del tables.parts[queue, name]
    closed = {id: row.closed_at + RETENTION for id, row in tables.groups.items() if row.closed_at is not None}
    for id in first_due({id: at for id, at in closed.items() if not tables.members(id)}, now, left):
        left -= 1
        del tables.groups[id]
        tables.proxies = {refused: proxy for refused, proxy in tables.proxies.items() if proxy.group != id}
        tables.gates = {place: gate for place, gate in tables.gates.items() if place[0] != id}
    tables.wrote = tables.wrote or left < limit
    return limit - left


def first_due(times: Mapping[Any, int], now: int, limit: int) -> list[Any]:
    """At most `limit` of the names whose time has come, by (time, name)."""
    return [name for at, name in sorted([(at, name) for name, at in times.items()]) if at <= now][:limit]


def due_times(tables: Tables, now: int, jumps: Jumps) -> Iterator[int]:
    for job in tables.of(RUNNING):
        yield max((job.lease_until or 0) + 1, spared_until(job, now, jumps))
    for job in tables.jobs.values():
        if job.state is SCHEDULED:
            yield job.ready_at
        if job.state in WAITING and job.expires_at is not None:
            yield job.expires_at
        if job.purge_at is not None:
            yield job.purge_at
    for queue in tables.queues.values():
        if above(tables, queue):
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


def tokened(handler: Callable[[Tables, Any, int], Result]) -> Callable[[Tables, Any, int], Result]:
    """The handler of a command that may carry a token: the same token gets the first answer again."""

    def run(tables: Tables, command: Any, now: int) -> Result:
        token = token_of(command)
        if token and token in tables.replies:
            return kept_reply(tables, tables.replies[token][0])
        answer = handler(tables, command, now)
        if token and worth_keeping(answer):
            pairs = (
                tuple([(each.id, each.fence) for each in answer.claims])
                if isinstance(answer, Claimed)
                else None
            )
            tables.replies[token] = (answer if pairs is None else pairs, now + TOMBSTONE)
        return answer

    return run


def kept_reply(tables: Tables, kept: Any) -> Result:
    if not isinstance(kept, tuple):
        result: Result = kept
        return result
    jobs = [held(tables, id, fence) for id, fence in kept]
    return Claimed(tuple([ClaimedJob(job) for job in jobs if job is not None]))


def worth_keeping(answer: Result) -> bool:
    """Did the command change anything?"""
    match answer:
        case Claimed():
            return bool(answer.claims)
        case Canceled():
            return answer.canceled + answer.requested > 0
        case Revived():
            return answer.revived > 0
        case Purged():
            return answer.purged > 0
    return True


HANDLERS: Mapping[type, Callable[[Tables, Any, int], Result]] = {
    Append: append,
    Claim: tokened(claim),
    Renew: renew,
    Settle: settle,
    Progress: progress,
    Cancel: tokened(cancel),
    Revive: tokened(revive),
    Purge: tokened(purge),
    Hasten: hasten,
    Open: open_group,
    Seal: seal,
    Unseal: unseal,
    Abort: abort,
    SetQueue: set_queue,
    SetPart: set_part,
    Note: tokened(note),
}


class ModelLedger:
    """Safe for any number of threads: one lock, held for each call."""

    capabilities = Capabilities(durable=False, shared=False, transactional=False)
    repeats = 0
    owners = LeasesOnly()

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._tables = Tables()
        self._jumps = Jumps()
        self._version = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        for command in commands:
            if type(command) not in HANDLERS and type(command) is not Upkeep:
                raise InvalidInput(
                    field="command", value=type(command), expected="one of towpath.core.commands"
                )
        with self._changed:
            at = self._time(now)
            self._jumps.note(at)
            self._tables.wrote = False
            answers = [self._answer(command, at) for command in commands]
            if self._tables.wrote:
                self._tables.last = at
                self._version += 1
                self._changed.notify_all()
            return answers

    def _answer(self, command: Command, now: int) -> Answer:
        """The answer to one command, which works on a copy of the state."""
        tables = self._tables.copy()
        try:
            if isinstance(command, Upkeep):
                answer: Result = upkeep(tables, command, now, self._jumps)
            else:
                answer = HANDLERS[type(command)](tables, command, now)
        except Refused as refusal:
            return refusal.with_traceback(None)
        self._tables = tables
        return answer

    def get(self, id: str) -> Job | None:
        return self._open().find(id)

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        found = {job.id: job for job in self._open().jobs.values() if job.id in ids}
        return {id: found[id] if bodies else without_bodies(found[id]) for id in ids if id in found}

    def find(self, query: Query) -> Page:
        jobs = sorted(self._open().jobs.values(), key=lambda job: job.seq, reverse=not query.oldest_first)
        found = [job for job in jobs if query_matches(query, job)]
        page = [job if query.bodies else without_bodies(job) for job in found[: query.limit]]
        return Page(tuple(page), page_token(page[-1].seq) if len(found) > query.limit else None)

    def queues(self) -> dict[str, QueueView]:
        tables = self._open()
        return {name: queue_view(tables, tables.queues[name]) for name in sorted(tables.queues)}

    def parts(self, queue: str) -> dict[str, PartView]:
        tables = self._open()
        return {
            name: part_view(tables, row)
            for (where, name), row in sorted(tables.parts.items())
            if where == queue
        }

    def group(self, id: str) -> GroupView | None:
        tables = self._open()
        return group_view(tables, tables.groups[id]) if id in tables.groups else None

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        tables = self._open()
        ids = {row.seq: row.id for row in tables.jobs.values()}
        if group:
            return [Winner(proxy.id, proxy.seq, ids.get(proxy.job)) for proxy in tables.proxies_in(group)]
        named = [(id, src) for (dst, id), src in tables.names.items() if ids.get(dst) == job]
        return [Winner(id, 0, ids.get(src)) for id, src in sorted(named)]

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        return live_note(self._open(), key, self._time(now))

    def explain(self, id: str, now: int | None = None) -> Explanation:
        return explain(explain_facts(self._open(), id), self._time(now))

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
        return dump(self._open())

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
        return max(self._clock.now() if now is None else now, self._open().last)


# Reads


def without_bodies(job: Job) -> Job:
    return replace(job, payload=b"", headers={}, result=None, error=None, cursor=None)


def query_matches(query: Query, job: Job) -> bool:
    exact = ("part", "kind", "group", "key", "owner", "correlation_id")
    mark = None if query.page is None else page_seq(query.page)
    return (
        (mark is None or (job.seq > mark if query.oldest_first else job.seq < mark))
        and (not query.states or job.state in query.states)
        and (query.queue is None or checks.matches(query.queue, job.queue))
        and all(
            getattr(job, field) == getattr(query, field)
            for field in exact
            if getattr(query, field) is not None
        )
        and (query.created_from is None or job.created_at >= query.created_from)
        and (query.created_before is None or job.created_at < query.created_before)
        and (query.header is None or job.headers.get(query.header[0]) == query.header[1])
    )


def queue_view(tables: Tables, row: ModelQueue) -> QueueView:
    return QueueView(
        name=row.name,
        counts=Counts(*[tables.count(row.name, State(field)) for field in Counts.__struct_fields__]),
        oldest_ready=min([job.ready_at for job in tables.of(READY, queue=row.name)], default=None),
        paused=row.paused,
        why=row.why,
        capacity=row.capacity,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        retention=row.retention,
        keep=row.keep,
    )


def part_view(tables: Tables, row: ModelPart) -> PartView:
    return PartView(
        queue=row.queue,
        name=row.name,
        ready=tables.count(row.queue, READY, part=row.name),
        running=tables.count(row.queue, RUNNING, part=row.name),
        paused=row.paused,
        why=row.why,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        weight=row.weight,
        served=row.served,
        capacity=row.capacity,
        append_rate=row.append_rate,
        append_at=row.append_at,
    )


def group_view(tables: Tables, row: ModelGroup) -> GroupView:
    counts = group_counts(tables, row)
    return GroupView(
        id=row.id,
        state=row.state,
        outcome=row.outcome,
        on_failure=row.on_failure,
        total=sum(counts.values()),
        **counts,
        created_at=row.created_at,
        closed_at=row.closed_at,
        paused=row.paused,
        why=row.why,
    )


def explain_facts(tables: Tables, id: str) -> ExplainFacts:
    job = tables.find(id)
    if job is None:
        raise UnknownJob(id=id)
    queue = queue_view(tables, tables.queues[job.queue])
    row = None if job.part is None else tables.parts.get((job.queue, job.part))
    part = None if row is None else part_view(tables, row)
    needed = [tables.jobs[src] for src, _ in tables.needed_by(job.seq)]
    running = tables.of(RUNNING, queue=job.queue)
    holders: list[Job] = []
    if queue.cap is not None and queue.counts.running >= queue.cap:
        holders = running
    elif part is not None and part.cap is not None and part.running >= part.cap:
        holders = [each for each in running if each.part == job.part]
    ahead = [
        each
        for each in tables.ready(job.queue, job.part)
        if (each.priority, each.seq) < (job.priority, job.seq)
    ]
    return ExplainFacts(
        job=job,
        queue=queue,
        part=part,
        open_jobs=tuple([each.id for each in needed if each.state not in FINISHED][:SHOWN]),
        open_groups=tuple(tables.open_gates(job.seq)[:SHOWN]),
        group=None if job.group is None else group_view(tables, tables.groups[job.group]),
        holders=tuple([each.id for each in holders][:SHOWN]),
        ahead=min(AHEAD, len(ahead)),
        culprit=culprit(tables, job) if job.reason is Reason.DEPENDENCY else None,
    )


def culprit(tables: Tables, job: Job) -> Job | None:
    """The job that ended first of those because of which this one ended, along edges and groups that need
    success."""
    found, todo, roots = {job.seq}, [job], []
    while todo:
        at = todo.pop()
        if at.reason is not Reason.DEPENDENCY:
            roots.append(at)
            continue
        sources = [src for src, anyway in tables.needed_by(at.seq) if not anyway]
        for group, gate in tables.gates_of(at.seq):
            sources += [] if gate.run_anyway else [member.seq for member in tables.members(group)]
        todo += [
            tables.jobs[src] for src in sources if src not in found and tables.jobs[src].state is at.state
        ]
        found.update(sources)
    return min(roots, key=lambda root: (root.finished_at, root.seq), default=None)


def dump(tables: Tables) -> dict[str, Any]:
    """The whole state in canonical order."""
    queues = [tables.queues[name] for name in sorted(tables.queues)]
    groups = [tables.groups[id] for id in sorted(tables.groups)]
    tombstones = tables.tombstones.values()
    return {
        "jobs": [tables.jobs[seq] for seq in sorted(tables.jobs)],
        "edges": sorted((src, dst, anyway) for (src, dst), anyway in tables.edges.items()),
        "gates": sorted(
            (group, dst, gate.run_anyway, gate.wanted.value if gate.wanted else "")
            for (group, dst), gate in tables.gates.items()
        ),
        "proxies": sorted(
            (row.id, row.seq, row.group, row.job, row.counted) for row in tables.proxies.values()
        ),
        "names": sorted((dst, id, src) for (dst, id), src in tables.names.items()),
        "groups": [
            (group_view(tables, row), {ending: list(specs) for ending, specs in row.then.items()})
            for row in groups
        ],
        "keys": [
            (*name, row.id, row.seq, row.until, row.runner) for name, row in sorted(tables.keys.items())
        ],
        "notes": [tables.notes[key] for key in sorted(tables.notes)],
        "queues": [
            (replace(queue_view(tables, row), oldest_ready=None), row.served, row.clock) for row in queues
        ],
        "parts": [
            (part_view(tables, tables.parts[place]), tables.parts[place].configured)
            for place in sorted(tables.parts)
        ],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in tombstones
        ),
        "replies": sorted((token, until) for token, (_, until) in tables.replies.items()),
        "next_seq": tables.next_seq,
        "next_version": tables.next_version,
        "last": tables.last,
    }


def problems(tables: Tables) -> Iterator[str]:
    """The invariants that the rules imply, recounted."""
    for job in tables.jobs.values():
        waits = sum(tables.jobs[src].state not in FINISHED for src, _ in tables.needed_by(job.seq))
        waits += len(tables.open_gates(job.seq))
        waits += job.group is not None and tables.groups[job.group].state is GroupState.OPEN
        if job.waits != (waits if job.state is BLOCKED else 0) or (job.state is BLOCKED and not waits):
            yield f"job {job.id} is {job.state} and waits for {job.waits}, counted {waits}"
        if job.reason not in REASONS[job.state]:
            yield f"job {job.id} is {job.state} for the reason {job.reason!s}"
        if ((job.owner, job.lease_until) != (None, None)) != (job.state is RUNNING):
            yield f"job {job.id} is {job.state} with owner {job.owner} and lease {job.lease_until}"
        if (job.finished_at is not None) != (job.state in FINISHED):
            yield f"job {job.id} is {job.state} with finished_at {job.finished_at}"
    for group in tables.groups.values():
        if (
            group.state in (GroupState.SEALED, GroupState.ABORTING)
            and not group_counts(tables, group)["unfinished"]
        ):
            yield f"group {group.id} is {group.state}, has nothing unfinished and is not closed"
    for name, row in tables.keys.items():
        holder = tables.jobs.get(row.seq)
        if (holder is None or holder.state in FINISHED) and not row.until:
            yield f"key {name} is held by {row.id}, which has ended, and has no window"
