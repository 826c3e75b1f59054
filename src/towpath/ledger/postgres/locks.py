"""What a batch may hold besides job rows, in the order in which it is taken: relations, then limited queues by name, then jobs.

Whoever holds jobs never waits for one of the first two. It tries, and if somebody else has it, the batch begins anew with that
lock first. So there is no circle of waiters, whatever the batches do.

A job may be held for long: by the settle whose function of the user's runs. Whoever has the relations and meets such a job gives
them back (`RowsTaken`), holds nothing for a moment, and begins anew. That settle itself takes them last, after the function,
and waits for them there, so that the function is not called again for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Claim,
    Command,
    Note,
    Open,
    Purge,
    Revive,
    Seal,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
)
from towpath.core.job import KeyPolicy, Spec


class Locks(msgspec.Struct, frozen=True):
    """`relations`: keys, groups, dependencies and notes, all of them. `queues`: the limits of these and the turns of their
    parts."""

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


PATIENCE, IMPATIENCE = "500ms", "100ms"
"""How long whoever has the relations waits for a row; and when it comes back for one that was taken."""
PAUSES = (0.02, 0.05, 0.1, 0.2)
"""Seconds until then, the last one again and again. (To wait for the row itself would be to hold those that one gets before it.)"""


_RELATING = (Cancel, Revive, Purge, Open, Seal, Unseal, Abort, Note)


def foreseen(commands: Sequence[Command]) -> Locks:
    """What the commands will need for sure."""
    relations = any(_relates(command) for command in commands)
    return Locks(relations, frozenset(_set_queues(commands)))


def _relates(command: Command) -> bool:
    match command:
        case Append():
            return any(_related(spec) for spec in command.specs)
        case Settle():
            return bool(command.notes) or any(_related(spec) for spec in command.spawn)
    return isinstance(command, _RELATING)


def _related(spec: Spec) -> bool:
    return bool(spec.after) or spec.group is not None or (spec.key is not None and spec.key.policy is not KeyPolicy.SERIAL)


def _set_queues(commands: Iterable[Command]) -> set[str]:
    found = set()
    for command in commands:
        if isinstance(command, SetQueue | SetPart):
            found.add(command.queue)
        elif isinstance(command, Note):
            found.update(gate.queue for gate in command.gates)
    return found


def calls_user(command: Command) -> bool:
    """Does a function of the user's run inside it, for who knows how long?"""
    return isinstance(command, Settle) and command.within is not None


def mentioned(commands: Iterable[Command]) -> set[str]:
    """Queues by name that the commands append to or claim from: if one of them has limits, its lock will be needed."""
    found: set[str] = set()
    for command in commands:
        if isinstance(command, Append):
            found.update(spec.queue for spec in command.specs)
        elif isinstance(command, Claim):
            found.update(name for want in command.wants for name in want.queue.split(",") if "*" not in name)
    return found
