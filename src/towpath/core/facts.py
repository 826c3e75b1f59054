"""The facts from which `core.admission` decides an append, how a ledger that keeps whole jobs collects them,
and the decision (`Admission`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from towpath.core.blobs import BlobFact
from towpath.core.commands import GroupState, Placed
from towpath.core.job import SERIAL, Job, KeyPolicy, Spec, State
from towpath.core.limits import Rate


class Known(msgspec.Struct, frozen=True, gc=False):
    """A job, or the remains of a deleted one (`gone`). `alias` is set if the id was refused in favour of
    another job."""

    id: str
    seq: int
    state: State
    gone: bool = False
    alias: str | None = None


class Tombstone(msgspec.Struct, frozen=True):
    """The remains of a deleted job, or an id that was refused in favour of the job `alias`."""

    id: str
    seq: int
    state: State
    settled_fence: int
    alias: str | None
    until: int


class KeyHolder(msgspec.Struct, frozen=True, gc=False):
    """The job that holds a key. `state` is None if the job is deleted. `runner` is the running job the holder
    waits for to stop."""

    id: str
    seq: int
    state: State | None
    until: int
    runner: int | None = None


class Room(msgspec.Struct, frozen=True, gc=False):
    """A queue: its capacity, its number of waiting jobs, and its retention."""

    capacity: int | None = None
    depth: int = 0
    retention: int | None = None


class Quota(msgspec.Struct, frozen=True, gc=False):
    """The limits of a part for appends: its capacity, its number of waiting jobs, the rate, and the time of
    the next append."""

    capacity: int | None
    depth: int
    rate: Rate | None
    next_at: int


Place = tuple[str, str]
"""(queue, part)"""


class GroupFact(msgspec.Struct, frozen=True, gc=False):
    state: GroupState
    outcome: State | None = None


KeyName = tuple[str, str]
"""(namespace, key)"""


class AppendFacts(msgspec.Struct, kw_only=True):
    """`known` covers the ids of the specs and of their dependencies, and the targets of aliases among them.
    `downstream` names, for each node of `walks(...)`, all unfinished jobs (by id) and groups (by `node`) that
    wait for it."""

    known: Mapping[str, Known] = {}
    holders: Mapping[KeyName, KeyHolder] = {}
    groups: Mapping[str, GroupFact] = {}
    rooms: Mapping[str, Room] = {}
    quotas: Mapping[Place, Quota] = {}
    downstream: Mapping[str, frozenset[str]] = {}
    blobs: Mapping[str, BlobFact] = {}


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The origin of specs that the engine appends: a settling job (which may add to its own group), a closing
    group or a schedule. No capacity refuses them. `closes`: they are callbacks of a closing group, which open
    their groups. No caller could receive a refusal of callbacks: they are then appended as failed jobs."""

    parent: str | None = None
    group: str | None = None
    correlation_id: str | None = None
    closes: bool = False


class KeyTaken(msgspec.Struct, frozen=True, gc=False):
    name: KeyName
    id: str
    seq: int
    until: int
    runner: int | None


class Proxy(msgspec.Struct, frozen=True, gc=False):
    """A member of a group that was refused for its key: the job that holds the key (`job`, its seq)
    represents it. `seq` is its place among the members, `counted` the counter of the group in which it is."""

    id: str
    seq: int
    group: str
    job: int
    counted: str


class Admission(msgspec.Struct):
    answers: tuple[Placed, ...] = ()
    spent: list[tuple[str, str, int]] = []
    """(queue, part, appends) of parts with an append rate."""
    jobs: list[Job] = []
    edges: list[tuple[int, int, bool]] = []
    """(src seq, dst seq, run_anyway)"""
    gates: list[tuple[str, int, bool]] = []
    """(group, dst seq, run_anyway)"""
    proxies: list[Proxy] = []
    names: list[tuple[int, str, int]] = []
    """(dst seq, the id by which the spec names a dependency, seq of the job that represents it), where the
    two differ"""
    aliases: list[tuple[str, str]] = []
    """(refused id, id of the winner)"""
    keys: list[KeyTaken] = []
    freed: list[KeyName] = []
    """Keys of jobs that ended in this append; no job holds these keys."""
    superseded: list[int] = []
    """Older waiting jobs that end as superseded."""
    handed: list[tuple[int, int]] = []
    """(superseded job, waiting or running; the newer job that its dependents now wait for). If the newer job
    ended in this append, the dependents stay with the older job and end like it."""
    asked: list[int] = []
    """Running jobs to be asked to stop because they are superseded."""
    blobs: list[tuple[str, int]] = []
    """(blob, seq of its new job)"""
    opened: list[str] = []
    """New groups of callbacks. They are sealed from the start."""

    @property
    def numbers(self) -> int:
        """The number of seqs that it uses: one for each job and each proxy."""
        return len(self.jobs) + len(self.proxies)


def namespace(queue: str) -> str:
    return queue.partition("/")[0] if "/" in queue else ""


def key_of(spec: Spec) -> KeyName | None:
    """The key row that a spec needs. A serial key is a part, not a row."""
    if spec.key is None or spec.key.policy is KeyPolicy.SERIAL:
        return None
    return namespace(spec.queue), spec.key.name


def is_unrelated(spec: Spec) -> bool:
    """Does the spec have no dependency, no group, no key row and no blob?"""
    keyed = spec.key is not None and spec.key.policy is not KeyPolicy.SERIAL
    return not (spec.after or keyed) and spec.group is None and spec.blob is None


def is_plain(spec: Spec) -> bool:
    """Is the spec without relations, key, part and blob? Only plain specs take the fast paths of a ledger."""
    related = spec.after or spec.group is not None or spec.key is not None
    return not related and spec.part is None and spec.blob is None


def part_of(spec: Spec) -> str | None:
    """The part of the job; a serial key is one."""
    return (
        SERIAL + spec.key.name if spec.key is not None and spec.key.policy is KeyPolicy.SERIAL else spec.part
    )


def places_of(specs: Iterable[Spec]) -> set[Place]:
    """The parts that the specs name."""
    return {(spec.queue, part) for spec in specs if (part := part_of(spec)) is not None}


def node(group: str) -> str:
    """A group as a node among job ids in a dependency walk (no id contains NUL)."""
    return f"\0{group}"


def walks(specs: Iterable[Spec], holders: Mapping[KeyName, KeyHolder]) -> set[str]:
    """The existing nodes through which a new spec could come to wait for itself: groups that are joined, and
    jobs that are replaced, while something in the append has dependencies; and groups that a holder of a key
    may represent a member in."""
    specs = list(specs)
    waiting = any(spec.after for spec in specs)
    found: set[str] = set()
    for spec in specs:
        holder = None if (key := key_of(spec)) is None else holders.get(key)
        replaces = spec.key is not None and spec.key.policy is KeyPolicy.REPLACE
        if spec.group is not None and (waiting or (holder is not None and not replaces)):
            found.add(node(spec.group))
        if waiting and holder is not None and replaces:
            found.add(holder.id)
    return found


class AppendReads(Protocol):
    """The reads of a ledger that keeps whole jobs, for `gather`."""

    jobs: dict[int, Job]
    """By seq."""
    keys: dict[KeyName, KeyTaken]
    tombstones: dict[str, Tombstone]
    proxies: dict[str, Proxy]
    """By the id that was refused."""

    def find(self, id: str) -> Job | None: ...

    def group_fact(self, id: str) -> GroupFact | None: ...

    def room(self, queue: str) -> Room | None: ...

    def quota(self, place: Place) -> Quota | None:
        """The append limits of a part; None if it has none."""
        ...

    def downstream(self, name: str) -> frozenset[str]: ...

    def blob_fact(self, id: str) -> BlobFact | None: ...


def blobs_of(specs: Iterable[Spec]) -> set[str]:
    """The blobs that the specs name."""
    return {spec.blob for spec in specs if spec.blob is not None}


def gather(reads: AppendReads, specs: Sequence[Spec], now: int) -> AppendFacts:
    """The facts about an append. A dependency on an id with a taken key becomes one on the holder of the
    key, so the holders are known too."""
    ids = {spec.id for spec in specs}
    after = [after for spec in specs for after in spec.after]
    known: dict[str, Known] = {}
    for id in [*ids, *[each.id for each in after if not each.group]]:
        known |= known_as(reads, id)
    keys = {key for spec in specs if (key := key_of(spec)) is not None}
    rows = [reads.keys[key] for key in keys if key in reads.keys]
    for row in rows:
        known |= known_as(reads, row.id)
        if row.until > now and row.id not in ids:
            # The window of the key outlives the job.
            known.setdefault(row.id, Known(row.id, row.seq, State.DONE, True))
    holders = {row.name: key_holder(reads, row) for row in rows}
    groups = {spec.group for spec in specs if spec.group is not None}
    found = {id: reads.group_fact(id) for id in groups | {each.id for each in after if each.group}}
    rooms = {queue: reads.room(queue) for queue in {spec.queue for spec in specs}}
    quotas = {place: reads.quota(place) for place in places_of(specs)}
    return AppendFacts(
        known=known,
        holders=holders,
        groups={id: fact for id, fact in found.items() if fact is not None},
        rooms={queue: room for queue, room in rooms.items() if room is not None},
        quotas={place: quota for place, quota in quotas.items() if quota is not None},
        downstream={start: reads.downstream(start) for start in walks(specs, holders)},
        blobs={id: fact for id in blobs_of(specs) if (fact := reads.blob_fact(id)) is not None},
    )


def known_as(reads: AppendReads, id: str) -> dict[str, Known]:
    """The job of an id, or its remains; with the job that an alias points to."""
    job, row, proxy = reads.find(id), reads.tombstones.get(id), reads.proxies.get(id)
    if job is not None:
        return {id: Known(id, job.seq, job.state)}
    if row is not None:
        found = {id: Known(id, row.seq, row.state, True, row.alias)}
        if row.alias is not None:
            # An alias may exist longer than the remains of its winner.
            found |= known_as(reads, row.alias) or {row.alias: Known(row.alias, row.seq, State.DONE, True)}
        return found
    if proxy is not None:
        winner = reads.jobs.get(proxy.job)
        if winner is None:
            return {id: Known(id, proxy.job, State.DONE, True)}
        return {id: Known(id, winner.seq, winner.state, True, winner.id)} | known_as(reads, winner.id)
    return {}


def key_holder(reads: AppendReads, row: KeyTaken) -> KeyHolder:
    job = reads.jobs.get(row.seq)
    # The new job does not wait for a runner that has stopped.
    runner = None if row.runner is None else reads.jobs.get(row.runner)
    running = runner is not None and runner.state is State.RUNNING
    return KeyHolder(
        row.id, row.seq, None if job is None else job.state, row.until, row.runner if running else None
    )
