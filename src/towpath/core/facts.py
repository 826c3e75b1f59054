"""The facts from which `core.admission` decides an append, and the decision (`Admission`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from towpath.core.commands import GroupState, Placed
from towpath.core.job import SERIAL, Job, KeyPolicy, Spec, State
from towpath.core.limits import Rate


class Known(msgspec.Struct, frozen=True, gc=False):
    """A job, or what is left of one (`gone`). `alias` is set where the id was refused in favour of another
    job."""

    id: str
    seq: int
    state: State
    gone: bool = False
    alias: str | None = None


class KeyHolder(msgspec.Struct, frozen=True, gc=False):
    """The job that holds a key. `state` is None if the job is deleted. `runner` is the running job the holder
    waits for to stop."""

    id: str
    seq: int
    state: State | None
    until: int
    runner: int | None = None


class Room(msgspec.Struct, frozen=True, gc=False):
    """A queue: how much fits, how much waits, how long it keeps what is finished."""

    capacity: int | None = None
    depth: int = 0
    retention: int | None = None


class Quota(msgspec.Struct, frozen=True, gc=False):
    """The limits of a part for appends: how much fits, how much waits, at which rate, and when the next
    append is allowed."""

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


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Where specs come from when not from outside: a settling job (which may add to its own group), a closing
    group or a schedule. Neither is ever refused for want of room."""

    parent: str | None = None
    group: str | None = None
    correlation_id: str | None = None


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
    """Keys taken by jobs that ended in this very append, so that no job holds them."""
    superseded: list[int] = []
    """Older waiting jobs that end as superseded."""
    handed: list[tuple[int, int]] = []
    """(superseded job, waiting or running; the newer one its dependents now wait for). Where the newer one
    ended in this very append, the dependents stay with the older one and share its fate."""
    asked: list[int] = []
    """Running jobs to be asked to stop because they are superseded."""

    @property
    def numbers(self) -> int:
        """How many numbers it takes: one for each job and each proxy."""
        return len(self.jobs) + len(self.proxies)


def namespace(queue: str) -> str:
    return queue.partition("/")[0] if "/" in queue else ""


def key_of(spec: Spec) -> KeyName | None:
    """The key row a spec needs. A serial key is a part, not a row."""
    if spec.key is None or spec.key.policy is KeyPolicy.SERIAL:
        return None
    return namespace(spec.queue), spec.key.name


def is_unrelated(spec: Spec) -> bool:
    """Does the spec have no dependency, no group and no key row?"""
    return not spec.after and spec.group is None and (spec.key is None or spec.key.policy is KeyPolicy.SERIAL)


def is_plain(spec: Spec) -> bool:
    """Is the spec without relations, key and part? Only plain specs take the fast paths of a ledger."""
    return not spec.after and spec.group is None and spec.key is None and spec.part is None


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
