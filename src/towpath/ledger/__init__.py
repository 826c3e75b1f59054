"""The durable truth: what every ledger can do, whatever it is made of.

`apply` is the only way to write. It runs a batch of commands in one transaction and returns for each a result
or an error value; it returns after the batch is durable. `docs/ledger-rules.md` is the contract in prose, and
the suite in `towpath.testing` is the same contract as a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from towpath.clock import Clock
from towpath.core.commands import Command, Placed, Result
from towpath.core.explain import Explanation
from towpath.core.job import Job, Spec
from towpath.core.views import GroupView, NoteView, Page, PartView, Query, QueueView, Winner
from towpath.errors import InvalidInput, NotInstalled, Refused

Answer = Result | Refused


class Capabilities(msgspec.Struct, frozen=True):
    """`durable`: survives the process. `shared`: several processes may open it. `transactional`:
    `Settle.within` works, and it is a `Transactional` ledger. `remote`: a question goes to a server that
    others use too, so what only looks should look seldom."""

    durable: bool
    shared: bool
    transactional: bool
    remote: bool = False


class Owners(Protocol):
    """Which owners of claims are alive. A process that announces its owner holds a lock that disappears with
    the process, so that its death is noticed before its leases are over."""

    @property
    def uncertain(self) -> bool:
        """May an owner be dead that `dead` does not name yet? Then it should be asked again soon."""
        ...

    def announce(self, owner: str) -> None:
        """Jobs are claimed in the name of this owner, and are lost when this process ends without closing the
        ledger. Never raises an error of the store; the leases are the net."""
        ...

    def dead(self) -> tuple[str, ...]:
        """Announced owners whose process has ended, for `Upkeep.dead`."""
        ...

    def forget(self, owners: Sequence[str]) -> None:
        """The jobs of these dead owners are reaped: do not name them again."""
        ...

    def close(self) -> None:
        """Withdraw what was announced here. What is still held waits for its lease."""
        ...

    def left_to_parent(self) -> None:
        """This is a forked child. It has no part in the locks of its parent."""
        ...


class LeasesOnly:
    """No locks: a death is noticed when the lease is over."""

    uncertain = False

    def announce(self, owner: str) -> None:
        return

    def dead(self) -> tuple[str, ...]:
        return ()

    def forget(self, owners: Sequence[str]) -> None:
        return

    def close(self) -> None:
        return

    def left_to_parent(self) -> None:
        return


class Ledger(Protocol):
    """What every ledger can do. `apply` writes; everything else only reads, except `close`."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def owners(self) -> Owners: ...

    @property
    def repeats(self) -> int:
        """How often `apply` has applied commands again because the reply to the first COMMIT was lost. The
        first transaction may have been committed."""
        ...

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        """Run the commands in order in one transaction. `now` None is the ledger's own clock."""
        ...

    def get(self, id: str) -> Job | None: ...

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        """Those of the jobs that are there, in one read. Without `bodies`: payload, headers, result, error,
        cursor left out."""
        ...

    def find(self, query: Query) -> Page: ...

    def queues(self) -> dict[str, QueueView]:
        """Every queue with its exact counts and settings, without scanning jobs."""
        ...

    def parts(self, queue: str) -> dict[str, PartView]: ...

    def group(self, id: str) -> GroupView | None: ...

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        """The dependencies of a job, or the members of a group, that other jobs represent."""
        ...

    def note(self, key: str, now: int | None = None) -> NoteView | None: ...

    def explain(self, id: str, now: int | None = None) -> Explanation:
        """Why the job does not run. Raises `UnknownJob`."""
        ...

    def version(self) -> int:
        """A number that is different after every commit by which something may have become ready, ended or
        been set; others may change it too. Take it before you look, then `wait` for it to change."""
        ...

    def wait(self, seen: int, timeout: float) -> int:
        """Sleep until `version()` is not `seen`, at most `timeout` seconds; the version then."""
        ...

    def check(self) -> list[str]:
        """Recount everything; what does not add up, as sentences. Empty is well."""
        ...

    def dump(self) -> dict[str, Any]:
        """The whole state in canonical order, for comparison and copying."""
        ...

    def close(self) -> None: ...


class FastPathCounts(Protocol):
    """How often this process took, was refused or failed in a fast path: by path, `refused` by path and
    reason."""

    @property
    def taken(self) -> Mapping[str, int]: ...

    @property
    def refused(self) -> Mapping[tuple[str, str], int]: ...

    @property
    def failed(self) -> Mapping[str, int]: ...


@runtime_checkable
class HasFastPaths(Protocol):
    """A ledger that counts its fast paths, for the metrics."""

    @property
    def fast_paths(self) -> FastPathCounts: ...


class Transactional(Protocol):
    """What a ledger can do whose database may hold the user's own tables."""

    def append_on(self, connection: Any, specs: Sequence[Spec], now: int | None = None) -> tuple[Placed, ...]:
        """Append in the transaction that is open on the user's own connection. Raises `Refused` and
        `WrongConnection`."""
        ...


def open_ledger(url: str, clock: Clock | None = None) -> Ledger:
    """Open a ledger: `memory://`; `sqlite:///relative.db` or `sqlite:////absolute.db`, optionally with
    `?synchronous=normal`; `postgresql://user@host/database` with `?schema=name`, `?pooled=true` (behind a
    transaction pooler) and the parameters of PostgreSQL itself; or a scheme that an installed package
    registers as an entry point of the group `towpath.ledgers`. `clock` is the time of a ledger that has none
    of its own; PostgreSQL has the server's."""
    scheme = urlsplit(url).scheme
    opener = _SCHEMES.get(scheme) or _registered(scheme, url)
    return opener(url, clock)


def _open_memory(url: str, clock: Clock | None) -> Ledger:
    if urlsplit(url).query:
        raise InvalidInput(field="url", value=url, expected="memory:// without options")
    from towpath.ledger.memory.ledger import MemoryLedger

    return MemoryLedger(clock)


def _open_sqlite(url: str, clock: Clock | None) -> Ledger:
    from towpath.ledger.sqlite import ledger

    return ledger.SqliteLedger(*ledger.options_of(url), clock)


def _open_postgres(url: str, clock: Clock | None) -> Ledger:
    check_installed("psycopg", "postgres")
    from towpath.ledger.postgres import ledger

    return ledger.PostgresLedger(*ledger.options_of(url))


Opener = Callable[[str, Clock | None], Ledger]
"""Opens the ledger of a URL. This is what an entry point of the group `towpath.ledgers` names."""
ENTRY_POINTS: Final = "towpath.ledgers"
_SCHEMES: Final[Mapping[str, Opener]] = {
    "memory": _open_memory,
    "sqlite": _open_sqlite,
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
}


def _registered(scheme: str, url: str) -> Opener:
    """The opener that an installed package registers for the scheme. The name of the entry point is the
    scheme."""
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in found:
        more = "".join(f", {name}://" for name in sorted(found))
        known = f"memory://, sqlite:///file.db, sqlite:////absolute/file.db, postgresql://user@host/database{more}"
        raise InvalidInput(field="url", value=url, expected=f"one of {known}")
    try:
        opener: Opener = found[scheme].load()
    except (ImportError, AttributeError) as error:
        expected = f"a scheme whose package loads; {found[scheme].value} does not: {error}"
        raise InvalidInput(field="url", value=url, expected=expected) from error
    return opener


def check_installed(package: str, extra: str) -> None:
    """Does it load? (psycopg is there and yet not there without libpq, which its extra `binary` brings.)"""
    try:
        import_module(package)
    except ImportError as error:
        why = str(error).partition("\n")[0]
        raise NotInstalled(package=package, why=why, extra=extra) from None
