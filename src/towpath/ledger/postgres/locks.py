"""The locks of a batch, in the order in which they are taken: relations, limited queues by name, jobs.

A batch that holds jobs never waits for relations or queues. It tries to lock them; if another batch holds the
lock, the batch restarts and takes that lock first. So no deadlock can occur.

Settles hold their jobs while commit functions run, possibly for long. A batch that holds the relations and
needs such a job releases all its locks (`RowsTaken`), pauses and restarts. Such settles lock the relations
last, after the functions, and wait for the lock, so that the functions are not called again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Claim,
    Command,
    Note,
    Open,
    Progress,
    Purge,
    Renew,
    Revive,
    Seal,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
    Upkeep,
)
from towpath.core.job import KeyPolicy, Spec
from towpath.core.lanes import named_queues
from towpath.ledger.tables.database import has_function


class Locks(msgspec.Struct, frozen=True):
    """`relations`: keys, groups, dependencies and notes, all of them. `queues`: the limits of these and the
    turns of their parts."""

    relations: bool = False
    queues: frozenset[str] = frozenset()

    def __or__(self, other: Locks) -> Locks:
        return Locks(self.relations or other.relations, self.queues | other.queues)


class NeedsLock(Exception):
    """Another batch holds the lock, and this batch holds jobs already: it restarts with the lock."""

    def __init__(self, locks: Locks) -> None:
        super().__init__(str(locks))
        self.locks = locks


class RowsTaken(Exception):
    """Another transaction holds rows that this batch needs: it restarts."""


class LockHeld(Exception):
    """Another session has held the relations for longer than `lock_timeout`."""


ROW_WAIT, ROW_WAIT_AGAIN = "500ms", "100ms"
"""`lock_timeout` for rows of a batch that holds the relations, at the first attempt and at later ones."""
PAUSES = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each restart; the last one repeats. (Waiting for the row would hold the rows locked
before.)"""


_EARLY = (Settle, Renew, Progress)
_RELATING = (Cancel, Revive, Purge, Open, Seal, Unseal, Abort, Note)
_NOTIFYING = (Abort, Cancel, Seal, SetPart, SetQueue, Unseal)
_SETTINGS = "towpath/"
"""The keys of notes with settings of the fleet begin with this: orders to workers, schedules, breakers."""


class Survey(msgspec.Struct):
    """The needs of commands before they are applied.

    `locks`: locks that they certainly need. `queues`: queues that they append to or claim from by name;
    queues with limits must be locked. `calls_user`: commit functions run in the transaction. `notifies`:
    waiters must be notified whatever the commands do to jobs. `has_upkeep`: one of them is an Upkeep."""

    locks: Locks
    queues: set[str]
    calls_user: bool = False
    notifies: bool = False
    has_upkeep: bool = False


def survey(commands: Iterable[Command]) -> Survey:
    relations, limited = False, set[str]()
    found = Survey(Locks(), set())
    for command in commands:
        match command:
            case Settle():
                found.calls_user = found.calls_user or command.within is not None
                relations = relations or bool(command.notes) or _relates(command.spawn)
            case Progress():
                relations = relations or bool(command.notes)
            case Append():
                found.queues.update([spec.queue for spec in command.specs])
                relations = relations or _relates(command.specs)
            case Claim():
                found.queues.update(named_queues(command))
            case Upkeep():
                found.has_upkeep = True
            case _:
                relations = relations or isinstance(command, _RELATING)
                gates = command.gates if isinstance(command, Note) else ()
                found.notifies = found.notifies or isinstance(command, _NOTIFYING) or is_setting(command)
                limited.update([gate.queue for gate in gates])
                if isinstance(command, SetQueue | SetPart):
                    limited.add(command.queue)
    found.locks = Locks(relations, frozenset(limited))
    return found


def is_setting(command: Command) -> bool:
    """Is the command a note that other processes must read at once? The notes of one process, such as its
    reports, have a time to live: no process waits for them, and they are written every few seconds."""
    if not isinstance(command, Note):
        return False
    return bool(command.gates) or (command.ttl is None and command.key.startswith(_SETTINGS))


def _relates(specs: Sequence[Spec]) -> bool:
    for spec in specs:
        if (
            spec.after
            or spec.group is not None
            or (spec.key is not None and spec.key.policy is not KeyPolicy.SERIAL)
        ):
            return True
    return False


class BatchSlice(NamedTuple):
    """Commands that are applied in one transaction, and their places in the batch."""

    places: Sequence[int]
    commands: Sequence[Command]
    survey: Survey


def slices_of(commands: Sequence[Command], functions: int) -> list[BatchSlice]:
    """The transactions of a batch. Settles with a commit function have transactions of their own, `functions`
    of them in each, so that only their jobs are locked while the functions run. So has an
    Upkeep, which folds the counts of any queues and so must hold no lock before."""
    whole = survey(commands)
    if not (whole.calls_user or whole.has_upkeep) or len(commands) == 1:
        return [BatchSlice(range(len(commands)), commands, whole)]
    slices = [(places, [commands[n] for n in places]) for places in _places(commands, functions)]
    return [BatchSlice(places, some, survey(some)) for places, some in slices]


def one_command_slices(slice: BatchSlice) -> list[BatchSlice]:
    """Each command in a transaction of its own."""
    return [
        BatchSlice((place,), (each,), survey((each,)))
        for place, each in zip(slice.places, slice.commands, strict=True)
    ]


def _places(commands: Sequence[Command], functions: int) -> Iterator[list[int]]:
    kept: list[int] = []
    for early, run in groupby(range(len(commands)), lambda n: isinstance(commands[n], _EARLY)):
        places = list(run)
        if called := [n for n in places if early and has_function(commands[n])]:
            # They go before the other settles of their run, but not before the progress of their own jobs.
            kept += [n for n in places if type(commands[n]) is Progress]
            if kept:
                yield kept
            yield from [called[at : at + functions] for at in range(0, len(called), functions)]
            kept, gone = [], {*kept, *called}
            places = [n for n in places if n not in gone]
        for n in places:
            if type(commands[n]) is Upkeep:
                yield from [each for each in (kept, [n]) if each]
                kept = []
            else:
                kept.append(n)
    if kept:
        yield kept
