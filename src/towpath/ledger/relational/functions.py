"""Commit functions: functions of the user that run in the transaction of a settle.

The functions of a run of settles are called first, one after the other, each in a savepoint of its own. A function that fails is undone
alone and its settle is refused; the others are then settled like settles without a function, many in one statement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from towpath.core.commands import Command, Settle, Settled
from towpath.core.job import RUNNING
from towpath.errors import Refused
from towpath.ledger.relational.db import Held, array

if TYPE_CHECKING:
    from towpath.ledger.relational.batch import Batch

SHARE = 0.1
"""Seconds that the functions of one transaction should take together: its locks are held meanwhile."""
FIRST = 8
"""Functions of the first transaction, before any was measured."""


class Undone(Exception):
    """The batch must be played again without the function of one settle: the function ended the transaction, or its settle was
    refused after the function had run. `answer` is the answer to the settle."""

    def __init__(self, id: str, answer: Refused) -> None:
        super().__init__(f"{id}: {answer}")
        self.id = id
        self.answer = answer


class FunctionPace:
    """How many functions share a transaction: as many as take `SHARE` seconds, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = min(FIRST, most)

    def took(self, count: int, seconds: float) -> None:
        if count:
            self.size = max(1, min(self._most, 2 * self.size, int(SHARE * count / max(seconds, 1e-6))))

    def contended(self) -> None:
        """Functions of one transaction waited for those of another in a circle."""
        self.size = max(1, self.size // 4)


def has_function(command: Command) -> bool:
    return type(command) is Settle and command.within is not None


def slices(commands: Sequence[Command], size: int) -> Iterator[Sequence[Command]]:
    """The commands in their order, in slices with at most `size` functions each."""
    start = count = 0
    for at, command in enumerate(commands):
        if has_function(command):
            if count == size:
                yield commands[start:at]
                start, count = at, 0
            count += 1
    yield commands[start:]


def settle_with_functions(
    batch: Batch, commands: Sequence[Settle], run: Callable[[Batch, Sequence[Settle]], list[Settled | Refused]]
) -> list[Settled | Refused]:
    """`run` settles those without a function, and those whose function has returned."""
    started = time.monotonic()
    called, refused = _call(batch, commands)
    batch.called = batch.called[0] + len(called), batch.called[1] + time.monotonic() - started
    left = [command for command in commands if (command.id, command.fence) not in refused]
    answers = iter(run(batch, [replace(each, within=None) if each.within is not None else each for each in left]))
    found = [refused.get((command.id, command.fence)) or next(answers) for command in commands]
    for command, answer in zip(commands, found, strict=True):
        if command.id in called and isinstance(answer, Refused) and (command.id, command.fence) not in refused:
            raise Undone(command.id, answer)
    return found


def _call(batch: Batch, commands: Sequence[Settle]) -> tuple[set[str], dict[tuple[str, int], Refused]]:
    """The jobs whose functions were called, and the settles that are refused for it. The function of a claim that is lost, or
    settled already, is not called."""
    batch.flush()
    first: dict[str, Settle] = {}
    for command in commands:
        if command.within is not None:
            first.setdefault(command.id, command)
    functions: list[tuple[str, Callable[[Any], object]]] = []
    refused: dict[tuple[str, int], Refused] = {}
    for job in batch.db.rows("held", (array(first),), Held):
        command = first[job.id]
        if job.state is not RUNNING or job.fence != command.fence:
            continue
        if (spoiled := batch.spoiled.get(job.id)) is not None:
            refused[job.id, job.fence] = spoiled
        elif command.within is not None:
            functions.append((job.id, command.within))
    for id, failure in batch.db.call_all(functions).items():
        refused[id, first[id].fence] = failure
    batch.wrote = batch.wrote or len(functions) > 0
    return {id for id, _ in functions}, refused
