"""What a batch may hold besides job rows, in the order in which it is taken: relations, then limited queues
by name, then jobs.

Whoever holds jobs never waits for one of the first two. It tries, and if somebody else has it, the batch
begins anew with that lock first. So there is no circle of waiters, whatever the batches do.

Jobs may be held for long: by settles whose commit functions run. A batch that has the relations and meets
such a job releases them (`RowsTaken`), holds nothing for a moment, and begins anew. Those settles take the
relations last, after the functions, and wait for them there, so that the functions are not called again for
it."""

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
from towpath.ledger.tables.database import has_function


class Locks(msgspec.Struct, frozen=True):
    """`relations`: keys, groups, dependencies and notes, all of them. `queues`: the limits of these and the
    turns of their parts."""

    relations: bool = False
    queues: frozenset[str] = frozenset()

    def __or__(self, other: Locks) -> Locks:
        return Locks(self.relations or other.relations, self.queues | other.queues)


class NeedsLock(Exception):
    """Somebody else has it, and the batch holds jobs already."""

    def __init__(self, locks: Locks) -> None:
        super().__init__(str(locks))
        self.locks = locks


class RowsTaken(Exception):
    """Somebody holds rows for long that a batch with the relations wants."""


class LockHeld(Exception):
    """Another session has held the relations for longer than `lock_timeout`."""


ROW_WAIT, ROW_WAIT_AGAIN = "500ms", "100ms"
"""How long whoever has the relations waits for a row; and when it comes back for one that was taken."""
PAUSES = (0.02, 0.05, 0.1, 0.2)
"""Seconds until then, the last one again and again. (To wait for the row itself would be to hold those that
one gets before it.)"""


_EARLY = (Settle, Renew, Progress)
_RELATING = (Cancel, Revive, Purge, Open, Seal, Unseal, Abort, Note)
_NOTIFYING = (Abort, Cancel, Seal, SetPart, SetQueue, Unseal)


class Survey(msgspec.Struct):
    """What there is to know of commands before they are played, in one look at each.

    `locks`: what they will need for sure. `queues`: those by name that are appended to or claimed from; if one of them has limits,
    its lock will be needed. `calls_user`: a function of the user's runs inside, for who knows how long. `notifies`: it changes what
    others may wait for, whatever becomes of jobs. `has_upkeep`: there is an Upkeep."""

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
            case Append():
                found.queues.update([spec.queue for spec in command.specs])
                relations = relations or _relates(command.specs)
            case Claim():
                found.queues.update(
                    [name for want in command.wants for name in want.queue.split(",") if "*" not in name]
                )
            case Upkeep():
                found.has_upkeep = True
            case _:
                relations = relations or isinstance(command, _RELATING)
                gates = command.gates if isinstance(command, Note) else ()
                found.notifies = found.notifies or isinstance(command, _NOTIFYING) or bool(gates)
                limited.update([gate.queue for gate in gates])
                if isinstance(command, SetQueue | SetPart):
                    limited.add(command.queue)
    found.locks = Locks(relations, frozenset(limited))
    return found


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
    """Commands that are played in one transaction, with their places in the batch."""

    places: Sequence[int]
    commands: Sequence[Command]
    survey: Survey


def slices_of(commands: Sequence[Command], functions: int) -> list[BatchSlice]:
    """The transactions of a batch. Settles with a commit function have transactions of their own, `functions`
    of them in each, so that no lock but those of their jobs is held while the functions run. So has an
    Upkeep, which folds the counts of any queues and so must hold none before."""
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
