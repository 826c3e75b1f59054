"""The interface between the rules of a table ledger and its database: named statements, rows, jobs, bodies.

The rules are written once, in this package. The statements are written per dialect, under the same names
(`ledger/sql/<dialect>/queries.sql`). A list is one argument, as JSON text (`array`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr, replace

from towpath.core.commands import Command, Selector, Settle, Settled
from towpath.core.job import BODIES, DONE, RUNNING, Job, Reason, State
from towpath.core.views import Query
from towpath.errors import Refused
from towpath.escapes import get_logger

log = get_logger("towpath.ledger")

T = TypeVar("T")
Args = Sequence[Any]
PAYLOAD, HEADERS, RESULT, ERROR, CURSOR = range(5)
Body = tuple[int, int, bytes]
"""(seq, what, data)"""

TABLES: Mapping[str, tuple[str, ...]] = {
    "attempt": ("seq", "number", "counted", "started_at", "ended_at", "owner", "outcome", "error"),
    "edge": ("src", "dst", "run_anyway"),
    "gate": ("src", "dst", "run_anyway", "outcome"),
    "proxy": ("id", "seq", "grp", "job", "counted"),
    "name": ("dst", "id", "src"),
    "key": ("namespace", "key", "id", "seq", "until", "runner"),
    "tombstone": ("id", "seq", "state", "settled_fence", "alias", "until"),
    "unused": ("name", "since"),
    "note": ("key", "value", "version", "fence", "expires_at"),
    "then": ("id", "specs"),
    "reply": ("token", "answer", "until"),
    "blob": ("id", "job", "until"),
    "chunk": ("blob", "number", "data"),
}
"""The columns of each table that `put` writes, in the order of its rows."""


class HeldRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The columns of a job that a settle needs: reading all columns costs four times as much. `edges`:
    whether another job depends on it."""

    id: str
    seq: int
    queue: str
    part: str | None
    state: State
    attempts: int
    failures: int
    losses: int
    max_attempts: int
    fence: int
    settled_fence: int
    settled_as: State | None
    cancel_requested: Reason | None
    retention: int | None
    group: str | None
    key: str | None
    edges: int


class Db(Protocol):
    takes_best: bool
    """Whether the database has the statement of `take_best`."""

    def rows(self, name: str, args: Args, type: type[T]) -> list[T]:
        """All rows of a named statement as values of `type`; for a single column, its values."""
        ...

    def one(self, name: str, args: Args = ()) -> Any:
        """The first row, or None."""
        ...

    def run(self, name: str, args: Args = ()) -> None: ...

    def count(self, name: str, args: Args) -> int:
        """Run the statement. Returns the number of rows that it changed."""
        ...

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Insert or replace rows of `TABLES`, or of the counter tables in the order of their structs."""
        ...

    def take_best(self, args: Args) -> list[Job]:
        """Claim the best n jobs without a part of a queue, with their bodies, as one statement. The
        arguments: queue, n, now, owner, lease until, lease, whether jobs with a single attempt may be taken.
        Empty if the database has no such statement."""
        ...

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        """Insert new jobs with their bodies."""
        ...

    def put_bodies(self, bodies: Iterable[Body]) -> None: ...

    def fill(self, jobs: Sequence[Job]) -> None:
        """Read the bodies of these jobs into them. The jobs must be freshly read: frozen structs are
        changed."""
        ...

    def matching(self, where: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        """Jobs for a bulk command, by seq. `unasked`: without running jobs that have a stop request."""
        ...

    def find(self, query: Query, limit: int) -> list[Job]: ...

    def save(self) -> None:
        """Begin a savepoint, which `keep` ends. Savepoints can be nested."""
        ...

    def undo(self) -> None:
        """Roll back to the last savepoint, which stays open."""
        ...

    def keep(self) -> None: ...

    def call_all(self, functions: Sequence[tuple[str, Callable[[Any], object]]]) -> Mapping[str, Refused]:
        """Call commit functions, given with the ids of their jobs, each in a savepoint of this transaction.
        Returns the failures by job id; writes of a failed function are rolled back. Raises `FunctionUndone`
        if a function ended the transaction."""
        ...

    def is_command_error(self, error: Exception) -> bool:
        """Whether a command or a defect caused the error, and not the database or the machine."""
        ...


def set_body(job: Job, what: int, data: bytes) -> None:
    """Set a body of a freshly read job: the frozen struct is changed. A done job has no error. The row of an
    earlier attempt's error is kept, because its deletion would cost each end of a job a statement."""
    if what == ERROR:
        force_setattr(job, "error", None if job.state is DONE else data.decode())
    else:
        force_setattr(job, BODIES[what], msgspec.json.decode(data) if what == HEADERS else data)


def array(values: Iterable[Any]) -> str:
    """A list as one argument."""
    return msgspec.json.encode(list(values)).decode()


@cache
def script(dialect: str, name: str) -> str:
    return (files("towpath.ledger") / "sql" / dialect / name).read_text("utf-8")


@cache
def steps(dialect: str) -> tuple[str, ...]:
    """The migrations in order; step n makes schema n."""
    folder = files("towpath.ledger") / "sql" / dialect
    found = sorted(entry.name for entry in folder.iterdir() if entry.name[:4].isdigit())
    assert [int(name[:4]) for name in found] == list(range(1, len(found) + 1))
    return tuple((folder / name).read_text("utf-8") for name in found)


if TYPE_CHECKING:
    from towpath.ledger.tables.transaction import Transaction

SHARE = 0.1
"""Seconds that all functions of one transaction should take together, because its locks are held
meanwhile."""
FIRST = 8
"""Functions of the first transaction, before any is measured."""


class FunctionUndone(Exception):
    """The batch must be applied again without the commit function of one settle: the function ended the
    transaction, or its settle was refused after the function had run. `answer` is the settle's answer."""

    def __init__(self, id: str, answer: Refused) -> None:
        super().__init__(f"{id}: {answer}")
        self.id = id
        self.answer = answer


class FunctionBatchSize:
    """How many commit functions share a transaction: as many as take `SHARE` seconds, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = min(FIRST, most)

    def took(self, count: int, seconds: float) -> None:
        if count:
            self.size = max(1, min(self._most, 2 * self.size, int(SHARE * count / max(seconds, 1e-6))))

    def contended(self) -> None:
        """The functions of two transactions caused a deadlock: use smaller transactions."""
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
    tx: Transaction,
    commands: Sequence[Settle],
    run: Callable[[Transaction, Sequence[Settle]], list[Settled | Refused]],
) -> list[Settled | Refused]:
    """Call the commit functions, then apply by `run` the settles without a function and the settles with a
    function that returned."""
    started = time.monotonic()
    called, refused = _call(tx, commands)
    tx.called = tx.called[0] + len(called), tx.called[1] + time.monotonic() - started
    left = [command for command in commands if (command.id, command.fence) not in refused]
    answers = iter(
        run(tx, [replace(each, within=None) if each.within is not None else each for each in left])
    )
    found = [refused.get((command.id, command.fence)) or next(answers) for command in commands]
    for command, answer in zip(commands, found, strict=True):
        if (
            command.id in called
            and isinstance(answer, Refused)
            and (command.id, command.fence) not in refused
        ):
            raise FunctionUndone(command.id, answer)
    return found


def _call(tx: Transaction, commands: Sequence[Settle]) -> tuple[set[str], dict[tuple[str, int], Refused]]:
    """The jobs with called functions, and the refusals by id and fence. The function of a claim that is
    lost or already settled is not called."""
    tx.flush()
    first: dict[str, Settle] = {}
    for command in commands:
        if command.within is not None:
            first.setdefault(command.id, command)
    functions: list[tuple[str, Callable[[Any], object]]] = []
    refused: dict[tuple[str, int], Refused] = {}
    for job in tx.db.rows("held", (array(first),), HeldRow):
        command = first[job.id]
        if job.state is not RUNNING or job.fence != command.fence:
            continue
        if (spoiled := tx.failed_functions.get(job.id)) is not None:
            refused[job.id, job.fence] = spoiled
        elif command.within is not None:
            functions.append((job.id, command.within))
    for id, failure in tx.db.call_all(functions).items():
        refused[id, first[id].fence] = failure
    tx.wrote = tx.wrote or len(functions) > 0
    return {id for id, _ in functions}, refused


class FastPathRefused(Exception):
    """A rule keeps the batch from the fast path. Nothing has been written. `reason` is a metric label: one of
    a few constants, never data."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FastPaths:
    """Counters of the fast paths of one ledger object: how often each was taken, refused by a rule, or
    failed. `taken` and `failed` are by path, `refused` by path and reason.

    An error inside a fast path is a defect: the batch is rolled back and takes the general path, so without
    these counters the only sign of the defect would be lower speed. They are written under the ledger's write
    lock and may be read from any thread."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[str] = Counter()

    def take(self, path: str) -> None:
        self.taken[path] += 1

    def refuse(self, path: str, reason: str) -> None:
        self.refused[path, reason] += 1

    def fail(self, path: str, error: Exception) -> None:
        """Count the error; log the first one of each path with its traceback."""
        self.failed[path] += 1
        if self.failed[path] == 1:
            log.error(
                "fast path %s failed and the general path is used: please report this defect: %s: %s",
                path,
                type(error).__name__,
                error,
                exc_info=error,
            )
