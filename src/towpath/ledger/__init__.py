"""The protocol of ledgers, the durable record of all jobs.

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
from towpath.core.checks import matches
from towpath.core.commands import Command, Placed, Result
from towpath.core.edges import EdgePage, EdgeQuery
from towpath.core.explain import Explanation
from towpath.core.history import AttemptRecord
from towpath.core.job import Job, Spec
from towpath.core.views import (
    GroupPage,
    GroupQuery,
    GroupView,
    NotePage,
    NoteQuery,
    NoteView,
    Page,
    PartView,
    Query,
    QueueView,
    Winner,
)
from towpath.errors import InvalidInput, NotInstalled, Refused
from towpath.escapes import without_password

Answer = Result | Refused


class Capabilities(msgspec.Struct, frozen=True):
    """`durable`: survives the process. `shared`: several processes may open it. `transactional`:
    `Settle.within` works, and it is a `Transactional` ledger. `remote`: a read goes to a server that
    other clients share, so polling should be rare. `attended`: a server does the upkeep and fires the
    schedules, so its clients leave both to it."""

    durable: bool
    shared: bool
    transactional: bool
    remote: bool = False
    attended: bool = False


class Owners(Protocol):
    """Detects dead owners of claims. A process that announces its owner holds a lock that disappears with
    the process, so that its death is detected before its leases expire."""

    @property
    def uncertain(self) -> bool:
        """True if an owner may be dead that `dead` does not return yet. Then `dead` should be called again
        soon."""
        ...

    def announce(self, owner: str) -> None:
        """Jobs are claimed in the name of this owner, and are lost when this process ends without closing the
        ledger. Never raises an error of the store: without the announcement only the leases count."""
        ...

    def dead(self) -> tuple[str, ...]:
        """Announced owners with an ended process, for `Upkeep.dead`."""
        ...

    def forget(self, owners: Sequence[str]) -> None:
        """The jobs of these dead owners are reaped: `dead` does not return them again."""
        ...

    def close(self) -> None:
        """Withdraw the announcements of this process. Jobs that are still held wait for the end of their
        lease."""
        ...

    def left_to_parent(self) -> None:
        """Called in a forked child, which must not affect the locks of its parent."""
        ...


class LeasesOnly:
    """Without locks: the death of an owner is detected when its leases expire."""

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


class LedgerReads(Protocol):
    """The reads of a ledger. Each reads one snapshot and changes nothing."""

    def get(self, id: str) -> Job | None: ...

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        """The existing jobs among these ids, in one read. Without `bodies`: payload, headers, result, error,
        cursor left out."""
        ...

    def lookup(self, text: str, limit: int = 10) -> list[Job]:
        """The jobs that the text denotes, ordered by id, at most `limit`, without bodies: the job with this
        id; else the jobs with this short id, or with an id that begins with the text (at least 6
        characters)."""
        ...

    def find(self, query: Query) -> Page: ...

    def attempts(self, id: str) -> list[AttemptRecord]:
        """The last attempts of a job that did not end done, oldest first: see `core.lifecycle.end_attempt`.
        Empty for an unknown job."""
        ...

    def queues(self) -> dict[str, QueueView]:
        """Every queue with its exact counts and settings, without scanning jobs. One statement."""
        ...

    def queue(self, name: str) -> QueueView | None:
        """One queue; None if it has neither jobs nor settings, and had none for an hour."""
        ...

    def parts(self, queue: str) -> dict[str, PartView]: ...

    def group(self, id: str) -> GroupView | None: ...

    def groups(self, query: GroupQuery) -> GroupPage:
        """Groups by state, outcome and prefix of the id, in the order of their ids, in pages."""
        ...

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        """The dependencies of a job, or the members of a group, that other jobs represent."""
        ...

    def edges(self, query: EdgeQuery) -> EdgePage:
        """The dependencies of a job or of the members of a group, or the jobs that wait for a job or a group,
        in pages. A deleted job has no edges."""
        ...

    def note(self, key: str, now: int | None = None) -> NoteView | None: ...

    def notes(self, query: NoteQuery, now: int | None = None) -> NotePage:
        """Notes by the prefix of their keys, in pages."""
        ...

    def chunk(self, blob: str, number: int) -> bytes | None:
        """A chunk of a blob; None if there is none."""
        ...

    def explain(self, id: str, now: int | None = None) -> Explanation:
        """Why the job does not run. Raises `UnknownJob`."""
        ...


class Ledger(LedgerReads, Protocol):
    """The methods of every ledger. `apply` writes; all others only read, except `close`."""

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

    def version(self) -> int:
        """A number that changes with every commit that may have made a job ready, ended a job or changed a
        setting; other commits may change it too. Read it before other reads, then `wait` for a change."""
        ...

    def wait(self, seen: int, timeout: float) -> int:
        """Sleep until `version()` is not `seen`, at most `timeout` seconds; return the version."""
        ...

    def check(self) -> list[str]:
        """Recount all counters and compare all indexes. Returns the inconsistencies, one sentence each."""
        ...

    def dump(self) -> dict[str, Any]:
        """The whole state in canonical order, for comparison and copying."""
        ...

    def close(self) -> None: ...


class FastPathCounts(Protocol):
    """How often a fast path was taken, refused a batch or failed in this process: by path, `refused` by path
    and reason."""

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
    """The methods of a ledger in a database that may hold the user's own tables."""

    def rehearse(self, function: Callable[[Any], object]) -> None:
        """Call `function(connection)` as a commit function is called, in a transaction that is rolled back.
        Raises `UserFunctionFailed`."""
        ...

    def append_on(self, connection: Any, specs: Sequence[Spec], now: int | None = None) -> tuple[Placed, ...]:
        """Append in the transaction that is open on the user's own connection. Raises `Refused` and
        `WrongConnection`."""
        ...


def open_ledger(url: str, clock: Clock | None = None) -> Ledger:
    """Open a ledger: `memory://`; `sqlite:///relative.db` or `sqlite:////absolute.db`, optionally with
    `?synchronous=normal`; `postgresql://user@host/database` with `?schema=name`, `?pooled=true` (behind a
    transaction pooler) and the parameters of PostgreSQL itself; `http://host:port`, `https://host:port` or
    `unix:///path/of/socket` of a server (`towpath serve`), with the options of `docs/remote.md`; or a scheme
    that an installed package registers as an entry point of the group `towpath.ledgers`. `clock` is the time
    of a ledger that has none of its own; PostgreSQL and HTTP have the server's."""
    scheme = urlsplit(url).scheme
    opener = _SCHEMES.get(scheme) or _registered(scheme, url)
    return opener(url, clock)


def _open_memory(url: str, clock: Clock | None) -> Ledger:
    if urlsplit(url).query:
        raise InvalidInput(field="url", value=without_password(url), expected="memory:// without options")
    from towpath.ledger.memory.ledger import MemoryLedger

    return MemoryLedger(clock)


def _open_sqlite(url: str, clock: Clock | None) -> Ledger:
    from towpath.ledger.sqlite import ledger

    return ledger.SqliteLedger(*ledger.options_of(url), clock)


def _open_postgres(url: str, clock: Clock | None) -> Ledger:
    check_installed("psycopg", "postgres")
    from towpath.ledger.postgres import ledger

    return ledger.PostgresLedger(*ledger.options_of(url))


def _open_remote(url: str, clock: Clock | None) -> Ledger:
    from towpath.ledger.remote import ledger

    return ledger.RemoteLedger(ledger.options_of(url))


Opener = Callable[[str, Clock | None], Ledger]
"""Opens the ledger of a URL. An entry point of the group `towpath.ledgers` names such a function."""
ENTRY_POINTS: Final = "towpath.ledgers"
_SCHEMES: Final[Mapping[str, Opener]] = {
    "memory": _open_memory,
    "sqlite": _open_sqlite,
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
    "http": _open_remote,
    "https": _open_remote,
    "unix": _open_remote,
}


def _registered(scheme: str, url: str) -> Opener:
    """The opener that an installed package registers for the scheme. The name of the entry point is the
    scheme."""
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in found:
        more = "".join(f", {name}://" for name in sorted(found))
        known = (
            "memory://, sqlite:///file.db, sqlite:////absolute/file.db, postgresql://user@host/database, "
            f"http://host:port, https://host:port, unix:///path/of/socket{more}"
        )
        hint = "" if ":" in url else f"; did you mean sqlite:///{url}?"
        raise InvalidInput(field="url", value=without_password(url), expected=f"one of {known}{hint}")
    try:
        opener: Opener = found[scheme].load()
    except (ImportError, AttributeError) as error:
        expected = f"a scheme with a package that loads; {found[scheme].value} does not: {error}"
        raise InvalidInput(field="url", value=without_password(url), expected=expected) from error
    return opener


def queues_matching(ledger: Ledger, patterns: str) -> list[QueueView]:
    """The queues that a list of names or patterns denotes. Without a pattern only these queues are read."""
    if "*" in patterns:
        return [view for view in ledger.queues().values() if matches(patterns, view.name)]
    found = [ledger.queue(name) for name in dict.fromkeys(patterns.split(","))]
    return [view for view in found if view is not None]


def check_installed(package: str, extra: str) -> None:
    """Does it load? (An installed psycopg does not load without libpq, which its extra `binary` contains.)"""
    try:
        import_module(package)
    except ImportError as error:
        why = str(error).partition("\n")[0]
        raise NotInstalled(package=package, why=why, extra=extra) from None
