"""One transaction: its time, its counters, and its cached rows of queues, parts and groups.

Counter rows are read once, changed in memory and written together by `flush`. Code that reads these tables by
SQL inside the transaction must flush first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from towpath.core.commands import GroupState, OnFailure
from towpath.core.job import READY, RUNNING, SERIAL, WAITING, Job, Reason, Spec, State
from towpath.core.lifecycle import Jumps, counter_of
from towpath.core.limits import Rate, stored_rate
from towpath.errors import Refused
from towpath.ledger.tables.database import Db, HeldRow, array


class QueueRow(msgspec.Struct, array_like=True):
    name: str
    blocked: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    canceled: int = 0
    loose: int = 0
    paused: int = 0
    why: str | None = None
    capacity: int | None = None
    cap: int | None = None
    rate_count: int | None = None
    rate_period: int | None = None
    rate_burst: int | None = None
    next_at: int = 0
    retention: int | None = None
    keep: int | None = None
    served: int = 0
    clock: int = 0

    @property
    def rate(self) -> Rate | None:
        return rate_of(self)


def is_limited(row: QueueRow) -> bool:
    """Whether a claim may have to leave out ready jobs of the queue or to take them in another order."""
    return row.ready > row.loose or row.cap is not None or row.rate_count is not None


class PartRow(msgspec.Struct, array_like=True):
    queue: str
    name: str
    ready: int = 0
    running: int = 0
    paused: int = 0
    why: str | None = None
    cap: int | None = None
    rate_count: int | None = None
    rate_period: int | None = None
    rate_burst: int | None = None
    next_at: int = 0
    weight: int = 1
    served: int = 0
    configured: int = 0
    capacity: int | None = None
    append_count: int | None = None
    append_period: int | None = None
    append_burst: int | None = None
    append_at: int = 0

    @property
    def rate(self) -> Rate | None:
        return rate_of(self)

    @property
    def append_rate(self) -> Rate | None:
        return stored_rate(self.append_count, self.append_period, self.append_burst)


def rate_of(row: QueueRow | PartRow) -> Rate | None:
    return stored_rate(row.rate_count, row.rate_period, row.rate_burst)


class GroupRow(msgspec.Struct, array_like=True):
    id: str
    state: GroupState = GroupState.OPEN
    outcome: State | None = None
    on_failure: OnFailure = OnFailure.CONTINUE
    total: int = 0
    unfinished: int = 0
    done: int = 0
    failed: int = 0
    canceled: int = 0
    superseded: int = 0
    created_at: int = 0
    closed_at: int | None = None
    paused: int = 0
    why: str | None = None


class ReadAhead(NamedTuple):
    """The arguments of the first read of a transaction: the specs of the appends at the start of the batch,
    the ids of the settles at its start, and the queues that its claims name."""

    specs: Sequence[Spec] = ()
    settled: Sequence[str] = ()
    queues: Sequence[str] = ()


class StartFacts(msgspec.Struct):
    """The facts that are read when a transaction begins. `queues` are rows of queues that it needs; `known`:
    whether any id of its first specs is known. `expired`: whether a waiting job may be past its time to live.
    `suspects`: whether a suspect may be ready. `quotas`: whether a part may limit its appends. `held` are the
    known jobs among the ids `settled`."""

    schema: int
    min_schema: int
    next_seq: int
    next_version: int
    last: int
    queues: list[QueueRow]
    known: bool
    expired: bool = True
    suspects: bool = True
    quotas: bool = True
    settled: Sequence[str] = ()
    held: Sequence[HeldRow] = ()


class Transaction:
    """`now` is the ledger's time. `wrote`: whether anything changed."""

    def __init__(
        self, db: Db, now: int, jumps: Jumps, start_facts: StartFacts, first: Sequence[Spec] = ()
    ) -> None:
        """`first`: specs that the batch begins with; `start_facts` contains their facts."""
        self.db = db
        self.jumps = jumps
        self.schema, self.min_schema = start_facts.schema, start_facts.min_schema
        self.next_seq, self.next_version = start_facts.next_seq, start_facts.next_version
        self.now = max(now, start_facts.last)
        self.queues: dict[str, QueueRow] = {name: QueueRow(name) for name in {spec.queue for spec in first}}
        self.queues.update({row.name: row for row in start_facts.queues})
        self.absent: set[str] = set() if start_facts.known else {spec.id for spec in first}
        """Ids without a job or tombstone, as long as nothing is written."""
        self.settled, self.held = start_facts.settled, start_facts.held
        """Ids at the start of the batch and their jobs, as long as nothing is written."""
        self.expired = start_facts.expired
        self.suspicious = start_facts.suspects
        """Whether a suspect may be ready."""
        self.quotas = start_facts.quotas
        """Whether a part may limit its appends."""
        self.wrote = False
        self.outage: Callable[[], bool] = bool
        """Called before leases are reaped. Returns whether their holders may have been unable to renew them;
        that time is then recorded as a clock jump."""
        self.failed_functions: dict[str, Refused] = {}
        """The answers, by job id, to settles with a commit function that must not be called again: see
        `FunctionUndone`."""
        self.called = 0, 0.0
        """The number of commit functions that were called, and their duration in seconds."""
        self.parts: dict[tuple[str, str], PartRow] = {}
        self.groups: dict[str, GroupRow | None] = {}
        self._changed_queues: set[str] = set()
        self._changed_parts: set[tuple[str, str]] = set()
        self._changed_groups: set[str] = set()

    def hold_relations(self) -> None:
        """Lock keys, groups, dependencies and notes until the end of the transaction. A database with one
        writer at a time needs no lock."""

    def hold_queues(self, queues: Iterable[str]) -> None:
        """Lock the limits of these queues and the turns of their parts until the end of the transaction."""

    def take_seqs(self, n: int) -> int:
        """Take n job numbers. Returns the first, which is `next_seq` unless another process took numbers."""
        first = self.next_seq
        self.next_seq += n
        return first

    def load_queues(self, names: Iterable[str]) -> None:
        if missing := [name for name in set(names) if name not in self.queues]:
            found = self.db.rows("queues_by_name", (array(missing),), QueueRow)
            self.queues.update({row.name: row for row in found})
            for name in missing:
                self.queues.setdefault(name, QueueRow(name))

    def queue(self, name: str) -> QueueRow:
        if name not in self.queues:
            self.load_queues([name])
        return self.queues[name]

    def change_queue(self, name: str) -> QueueRow:
        self._changed_queues.add(name)
        return self.queue(name)

    def _forget_queues(self, names: Iterable[str]) -> None:
        """The rows of these queues are deleted."""
        for name in names:
            self.queues.pop(name, None)

    def _load_parts(self, keys: Iterable[tuple[str, str]]) -> None:
        if missing := [key for key in set(keys) if key not in self.parts]:
            found = self.db.rows("parts_by_name", (array(missing),), PartRow)
            self.parts.update({(row.queue, row.name): row for row in found})
            for queue, name in missing:
                self.parts.setdefault(
                    (queue, name), PartRow(queue, name, cap=1 if name.startswith(SERIAL) else None)
                )

    def part(self, queue: str, name: str) -> PartRow:
        if (queue, name) not in self.parts:
            self._load_parts([(queue, name)])
        return self.parts[queue, name]

    def change_part(self, queue: str, name: str) -> PartRow:
        self._changed_parts.add((queue, name))
        return self.part(queue, name)

    def load_groups(self, ids: Iterable[str]) -> None:
        if missing := [id for id in set(ids) if id not in self.groups]:
            self.hold_relations()
            self.groups.update(dict.fromkeys(missing))
            found = self.db.rows("groups_by_id", (array(missing),), GroupRow)
            self.groups.update({row.id: row for row in found})

    def group(self, id: str) -> GroupRow | None:
        self.load_groups([id])
        return self.groups[id]

    def change_group(self, id: str) -> GroupRow:
        self._changed_groups.add(id)
        group = self.group(id)
        assert group is not None, f"job of an unknown group {id}"
        return group

    def new_group(self, row: GroupRow) -> None:
        self.groups[row.id] = row
        self._changed_groups.add(row.id)

    def move(self, moves: Counter[tuple[str, str | None, State | None, State | None]]) -> None:
        """Count jobs that changed their state: {(queue, part, from, to): number}."""
        self.wrote = True
        if len(moves) > 1:
            self.load_queues({queue for queue, _, _, _ in moves})
            active = (READY, RUNNING)
            self._load_parts(
                {
                    (q, part)
                    for q, part, old, new in moves
                    if part is not None and (old in active or new in active)
                }
            )
        for (queue, part, old, new), count in moves.items():
            if old is not None:
                self._count(queue, part, old, -count)
            if new is not None:
                self._count(queue, part, new, count)
                if old is not None and new in WAITING:
                    self.expired = self.suspicious = True

    def _count(self, queue: str, part: str | None, state: State, count: int) -> None:
        row: Any = self.change_queue(queue)
        setattr(row, state, getattr(row, state) + count)
        if state is not READY and state is not RUNNING:
            return
        if part is not None:
            slot: Any = self.change_part(queue, part)
            setattr(slot, state, getattr(slot, state) + count)
        elif state is READY:
            row.loose += count

    def count_member(self, id: str, state: State, reason: Reason, was_finished: bool | None) -> None:
        """Count a member of a group that changed to `state`. `was_finished` is None for a new member."""
        old = None if was_finished is None else "" if was_finished else "unfinished"
        recount(self, id, old, counter_of(state, reason))

    def flush(self) -> None:
        """Write the changed counter rows."""
        if self._changed_queues:
            self.db.put("queue", [_fields(self.queues[name]) for name in self._changed_queues])
            self._changed_queues.clear()
        if self._changed_parts:
            self.db.put("part", [_fields(self.parts[key]) for key in self._changed_parts])
            self._changed_parts.clear()
        if self._changed_groups:
            self.db.put("group", [_fields(row) for id in self._changed_groups if (row := self.groups[id])])
            self._changed_groups.clear()

    def finish(self) -> None:
        """Write everything that is left before COMMIT."""
        self.flush()
        if self.wrote:
            self.db.run("write_meta", (self.next_seq, self.next_version, self.now))

    def snapshot(self) -> tuple[int, int, bool]:
        """Write the changed rows. Returns the counters for `restore`."""
        self.flush()
        return self.next_seq, self.next_version, self.wrote

    def restore(self, mark: tuple[int, int, bool]) -> None:
        """After the database was rolled back to the savepoint of `mark`: discard the cached rows."""
        self.next_seq, self.next_version, self.wrote = mark
        for cached in (self.queues, self.parts, self.groups):
            cached.clear()
        for changed in (self._changed_queues, self._changed_parts, self._changed_groups):
            changed.clear()


_fields = msgspec.structs.astuple


def recount(tx: Transaction, id: str, old: str | None, new: str) -> None:
    """Move a member of a group from one counter to another. `old` is None for a new member."""
    group: Any = tx.change_group(id)
    setattr(group, new, getattr(group, new) + 1)
    if old is None:
        group.total += 1
    elif old:
        setattr(group, old, getattr(group, old) - 1)


def flush_queues(tx: Transaction) -> None:
    """Write the changed rows if a queue is among them. For statements that read queues and no parts or
    groups."""
    if tx._changed_queues:
        tx.flush()


def forget_queues(tx: Transaction, names: Iterable[str]) -> None:
    tx._forget_queues(names)


def load_parts(tx: Transaction, places: Iterable[tuple[str, str]]) -> None:
    tx._load_parts(places)


def moved(jobs: Iterable[Job], to: State) -> Counter[tuple[str, str | None, State | None, State | None]]:
    return Counter((job.queue, job.part, job.state, to) for job in jobs)


def by_seq(tx: Transaction, seqs: Iterable[int]) -> list[Job]:
    """The jobs without bodies, by seq, locked until the end of the transaction."""
    return tx.db.rows("by_seq", (array(sorted(seqs)),), Job)


def by_id(tx: Transaction, ids: Iterable[str]) -> dict[str, Job]:
    return {job.id: job for job in tx.db.rows("by_id", (array(ids),), Job)}
