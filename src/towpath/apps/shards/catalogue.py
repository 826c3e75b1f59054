"""The catalogue: one note `shards/<table>` in the ledger for each logical table.

A placement is changed in two phases. The first step of a plan stores the new placement as `pending`; the
pivot of the plan, or its last step, commits it. Until then `shards` is the placement that holds. A record
never contains an address or a password."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from towpath import Ledger
from towpath.apps.shards import names
from towpath.clock import Clock
from towpath.commands import Note, Noted, NoteQuery
from towpath.errors import Described, InvalidInput, Refused, TowpathError

MAX_RECORD = 200_000
"""Bytes of a record. A note has at most 256 KiB, and a pending change needs room."""
TableState = Literal["creating", "ready", "dropping"]


class Column(msgspec.Struct, frozen=True, array_like=True):
    """A column as PostgreSQL describes it: `type` by `format_type`, `default` as an expression."""

    name: str
    type: str
    not_null: bool = False
    default: str | None = None


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The copies of a shard: the primary first, then its replicas. `generation` grows by one with every new
    primary, and is part of the names of routes."""

    nodes: tuple[str, ...]
    generation: int = 1

    @property
    def primary(self) -> str:
        return self.nodes[0]

    @property
    def replicas(self) -> tuple[str, ...]:
        return self.nodes[1:]


class PendingChange(msgspec.Struct, frozen=True):
    """The change that a running plan makes: shards by number that will have another placement, nodes that
    will get or lose the logical table. `nodes` and `before` are the nodes of the table and the shards for
    which the plan was made: it must not begin if another plan has changed them since."""

    plan: str
    operation: str
    shards: Mapping[int, Shard] = {}
    add_nodes: tuple[str, ...] = ()
    remove_nodes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    before: Mapping[int, Shard] = {}

    def made_for(self, record: TableRecord) -> PendingChange:
        """The change of a plan that is made for this record."""
        before = {number: record.shards[number] for number in self.shards}
        return msgspec.structs.replace(self, nodes=record.nodes, before=before)

    def fits(self, record: TableRecord) -> bool:
        """Is the record still as it was when the plan was made?"""
        return self.nodes in ((), record.nodes) and all(
            record.shards[number] == shard for number, shard in self.before.items()
        )


class TableRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A logical table. `shards[i]` is the placement of shard i of a hash partitioning with
    `len(shards)` remainders. `nodes` have the logical table. `constraints` are the definitions of PRIMARY
    KEY, UNIQUE and CHECK on each shard table, such as `PRIMARY KEY (id)`. `plan` is the plan that created
    the table; the comments of its relations name it."""

    table: str
    schema: str = "public"
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    constraints: tuple[str, ...]
    rf: int
    nodes: tuple[str, ...]
    shards: tuple[Shard, ...]
    plan: str
    state: TableState = "ready"
    pending: PendingChange | None = None

    def committed(self) -> TableRecord:
        """The record after its pending change."""
        change = self.pending
        if change is None:
            return msgspec.structs.replace(self, state="ready")
        shards = tuple(change.shards.get(number, shard) for number, shard in enumerate(self.shards))
        kept = [node for node in self.nodes if node not in change.remove_nodes]
        nodes = tuple(sorted({*kept, *change.add_nodes}))
        return msgspec.structs.replace(self, shards=shards, nodes=nodes, pending=None, state="ready")

    def on(self, node: str) -> tuple[int, ...]:
        """The shards with a copy on this node."""
        return tuple(number for number, shard in enumerate(self.shards) if node in shard.nodes)

    def placement(self) -> tuple[tuple[str, ...], ...]:
        """The nodes of each shard, for the planner."""
        return tuple(shard.nodes for shard in self.shards)


class UnknownTable(TowpathError):
    sentence = "there is no sharded table {table}"


class TableBusy(TowpathError):
    """Another plan changes the table, or the table is not in the state that the operation needs."""

    sentence = "table {table} cannot be changed now: {why}"


_decoder = msgspec.json.Decoder(TableRecord)


class Catalogue:
    """The records in a ledger. Every write is a compare-and-set on the version that was read."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock

    def find(self, table: str) -> tuple[TableRecord, int] | None:
        """The record and the version of its note; None if there is no such table."""
        note = self._ledger.note(names.note(table), self._clock.now())
        return None if note is None else (_decoder.decode(note.value), note.version)

    def get(self, table: str) -> TableRecord:
        """The record; raises `UnknownTable`."""
        found = self.find(table)
        if found is None:
            raise UnknownTable(table=table)
        return found[0]

    def all(self) -> Iterator[TableRecord]:
        """All records, by name."""
        page: str | None = None
        while True:
            answer = self._ledger.notes(NoteQuery(prefix=names.note(""), page=page), self._clock.now())
            yield from (_decoder.decode(note.value) for note in answer.notes)
            page = answer.next
            if page is None:
                return

    def write(self, table: str, record: TableRecord | None, expect: int) -> None:
        """Write or delete a record at a version, 0 for a new one; raises `NoteConflict`."""
        value = None if record is None else encode(record)
        note = Note(key=names.note(table), value=value, expect=expect)
        (answer,) = self._ledger.apply([note], self._clock.now())
        if isinstance(answer, Refused):
            raise answer
        assert isinstance(answer, Noted)

    def begin(self, table: str, change: PendingChange) -> TableRecord:
        """Store a pending change. Repeating it is safe; raises `TableBusy` if another plan has one."""
        found = self.find(table)
        if found is None:
            raise UnknownTable(table=table)
        record, version = found
        if record.pending is not None and record.pending.plan == change.plan:
            return record
        if record.pending is not None:
            why = f"plan {record.pending.plan} ({record.pending.operation}) has not ended"
            raise TableBusy(table=table, why=why)
        if record.state != "ready":
            raise TableBusy(table=table, why=f"its state is {record.state}")
        if not change.fits(record):
            raise TableBusy(table=table, why="its placement has changed since the plan was made")
        changed = msgspec.structs.replace(record, pending=change)
        self.write(table, changed, version)
        return changed

    def commit(self, table: str, plan: str) -> TableRecord:
        """Make the pending change of a plan the placement. Repeating it is safe."""
        found = self.find(table)
        if found is None:
            raise UnknownTable(table=table)
        record, version = found
        if record.pending is None or record.pending.plan != plan:
            return record
        done = record.committed()
        self.write(table, done, version)
        return done

    def cancel(self, table: str, plan: str) -> None:
        """Remove the pending change of a plan; a table that the plan was creating is removed. Repeating it
        is safe."""
        found = self.find(table)
        if found is None or found[0].pending is None or found[0].pending.plan != plan:
            return
        record, version = found
        new = record.state == "creating"
        self.write(table, None if new else msgspec.structs.replace(record, pending=None), version)


def encode(record: TableRecord) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes) -> TableRecord:
    return _decoder.decode(data)


def check_record(record: TableRecord) -> TableRecord:
    """Check the numbers and names of a new record; raises `InvalidInput`."""
    names.check_table(record.table)
    for node in record.nodes:
        names.check_node(node)
    check_counts(len(record.shards), record.rf, record.nodes)
    for number, shard in enumerate(record.shards):
        if len(set(shard.nodes)) != len(shard.nodes) or not {*shard.nodes} <= {*record.nodes}:
            raise InvalidInput(
                field=f"shards[{number}]", value=shard.nodes, expected="different nodes of the table"
            )
    if (size := len(encode(record))) > MAX_RECORD:
        expected = f"at most {MAX_RECORD} bytes as JSON: fewer shards, or shorter names of nodes"
        raise InvalidInput(field="record", value=Described(f"{size} bytes"), expected=expected)
    return record


def check_counts(shards: int, rf: int, nodes: Sequence[str]) -> None:
    """Check the number of shards and copies against the nodes; raises `InvalidInput`."""
    if not 1 <= shards <= names.MAX_SHARDS:
        raise InvalidInput(field="shards", value=shards, expected=f"1 to {names.MAX_SHARDS}")
    if not nodes:
        raise InvalidInput(field="nodes", value=list(nodes), expected="at least one node")
    if len(set(nodes)) != len(nodes):
        raise InvalidInput(field="nodes", value=list(nodes), expected="different names")
    if not 1 <= rf <= len(nodes):
        raise InvalidInput(
            field="rf", value=rf, expected=f"1 to {len(nodes)}, the number of nodes: each copy is on another"
        )
