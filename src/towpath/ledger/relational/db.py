"""What the rules need of a database: named statements, rows in and out, jobs and their bodies.

The rules of a ledger of tables are written once, in this package; the statements are written per dialect, under the same
names (`ledger/sql/<dialect>/queries.sql`). A list is one argument, as JSON text (`array`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from towpath.core.commands import Selector, Settle
from towpath.core.job import Done, Job, Reason, State
from towpath.core.views import Query
from towpath.errors import Refused

T = TypeVar("T")
Args = Sequence[Any]
PAYLOAD, HEADERS, RESULT, ERROR, CURSOR = range(5)
Body = tuple[int, int, bytes]
"""(seq, what, data)"""

TABLES: Mapping[str, tuple[str, ...]] = {
    "edge": ("src", "dst", "run_anyway"),
    "gate": ("src", "dst", "run_anyway", "outcome"),
    "proxy": ("id", "seq", "grp", "job", "counted"),
    "name": ("dst", "id", "src"),
    "key": ("namespace", "key", "id", "seq", "until", "runner"),
    "tombstone": ("id", "seq", "state", "settled_fence", "alias", "until"),
    "note": ("key", "value", "version", "fence", "expires_at"),
    "then": ("id", "specs"),
    "reply": ("token", "answer", "until"),
}
"""The columns of the rows that `put` takes, in order."""


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a settle needs of a job: reading all of it costs four times as much. `edges`: does anything depend on it?"""

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


class Finished(NamedTuple):
    """Jobs by id that are done now, and how many of them were of which queue and part."""

    counts: Sequence[tuple[str, str | None, int]] = ()
    ids: Set[str] = frozenset()


def plain_end(command: Settle) -> Done | None:
    """How it ends, if that is done and nothing else happens with it."""
    outcome = command.outcome
    return outcome if type(outcome) is Done and not (command.spawn or command.notes or command.within is not None) else None


class Db(Protocol):
    def rows(self, name: str, args: Args, type: type[T]) -> list[T]:
        """All rows of a named statement: as values of `type`, or the bare values of its only column."""
        ...

    def one(self, name: str, args: Args = ()) -> Any:
        """The first row or None."""
        ...

    def run(self, name: str, args: Args = ()) -> None: ...

    def count(self, name: str, args: Args) -> int:
        """Run it; how many rows it changed."""
        ...

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows of `TABLES`, or of the counter tables in the order of their structs; the newer one of two stays."""
        ...

    def finish_plain(self, commands: Sequence[Settle], now: int) -> Finished:
        """Those of the settles that are done with a held job whose end touches nothing else, in one step. None where the store
        has no such step."""
        ...

    def take_best(self, args: Args) -> list[Job]:
        """Claim the best n jobs without a part of a queue, bodies and all: (queue, n, now, owner, lease until, lease, whether jobs
        with a single attempt may be among them). Nothing where that cannot be done in one step."""
        ...

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        """New jobs with their bodies."""
        ...

    def put_bodies(self, bodies: Iterable[Body]) -> None: ...

    def fill(self, jobs: Sequence[Job]) -> None:
        """Give freshly read jobs their bodies. (They are nobody else's yet, so this may write them.)"""
        ...

    def matching(self, where: Selector, states: Iterable[State], unasked: bool, limit: int) -> list[Job]:
        """For bulk commands, in the order of seq. `unasked`: not those that run and were asked to stop already."""
        ...

    def find(self, query: Query, limit: int) -> list[Job]: ...

    def save(self) -> None:
        """A savepoint, ended by `keep`. One at a time, or one inside another."""
        ...

    def undo(self) -> None:
        """Back to the last savepoint, which is still there."""
        ...

    def keep(self) -> None: ...

    def call_all(self, functions: Sequence[tuple[str, Callable[[Any], object]]]) -> Mapping[str, Refused]:
        """Call commit functions in this transaction, by the jobs of their settles, each in a savepoint. The failures; what a
        failed function wrote is undone. Raises `functions.Undone` if a function ended the transaction."""
        ...

    def is_ours(self, error: Exception) -> bool:
        """Does it tell of a command, or of a defect of ours? The others tell of the store or the machine."""
        ...


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
