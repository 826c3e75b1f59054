"""Workers as others see them: who is there, and the words with which they are paused and ended from afar.

`towpath/workers` is one note for a whole fleet: who has come (`known`), who is paused and why (by name, `*` stands for any letters), and who
shall end (by incarnation, so that whoever is started after it under the same name works). `worker/<owner>` is what a worker says of
itself; it has a time to live, and who is killed is gone from the list when that is over.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, TypeVar

import msgspec

from towpath.clock import Clock
from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import Note
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.ledger import Ledger
from towpath.runtime.committer import Committer
from towpath.runtime.tickets import Reply

KEY: Final = "towpath/workers"
REPORT: Final = "worker/"
TTL: Final = 30 * SECOND
AGAIN: Final = 10.0
"""Seconds between two reports of a worker: a commit each."""
DEPARTED: Final = 60 * SECOND
"""How long a worker whose report ran out is kept in the list of those who may report again."""

T = TypeVar("T")


class Host(Protocol):
    """What is needed of an App."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def committer(self) -> Committer: ...

    @property
    def clock(self) -> Clock: ...


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker last said of itself, at most ten seconds ago. Times are microseconds."""

    name: str
    owner: str
    host: str
    pid: int
    queues: tuple[str, ...]
    concurrency: int
    running: int
    started_at: int
    seen_at: int
    paused: bool = False
    draining: bool = False
    why: str | None = None


class _Fleet(msgspec.Struct):
    """The note. `known`: when each worker came. `drain`: when it was told to end."""

    known: dict[str, int] = {}
    paused: dict[str, str | None] = {}
    drain: dict[str, int] = {}

    def pause_of(self, name: str) -> str | None:
        """The entry that pauses a worker of this name."""
        return next((each for each in sorted(self.paused) if fnmatchcase(name, each)), None)


class Orders(msgspec.Struct, frozen=True):
    """What a worker is told: the entry that pauses it (None: it works), why, and whether to end."""

    paused_by: str | None = None
    why: str | None = None
    drain: bool = False


class Workers:
    """Who works on this ledger. `name` is a worker's name or a pattern with `*`, which also means every worker. A pause stays until
    `resume`, also for workers that start later; a drain is for those who are there now."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def list(self) -> Sequence[WorkerView]:
        """Those that are there, by name."""
        return _present(self._host, _read(self._host)[1])

    async def alist(self) -> Sequence[WorkerView]:
        return await asyncio.to_thread(self.list)

    def pause(self, name: str = "*", why: str | None = None) -> Sequence[WorkerView]:
        """They start nothing new; what runs goes on, what was claimed and not started goes back. Who is concerned now."""
        _check(name)
        checks.optional_text("why", why, 1000)

        def change(fleet: _Fleet) -> Sequence[WorkerView]:
            fleet.paused[name] = why
            return self._named(fleet, name)

        return _edit(self._host, change)

    async def apause(self, name: str = "*", why: str | None = None) -> Sequence[WorkerView]:
        return await asyncio.to_thread(self.pause, name, why)

    def resume(self, name: str = "*") -> Sequence[str]:
        """Lift the pauses that this name or pattern covers; those names that were lifted. `*` lifts all."""
        _check(name)

        def change(fleet: _Fleet) -> Sequence[str]:
            lifted = [each for each in sorted(fleet.paused) if fnmatchcase(each, name)]
            for each in lifted:
                del fleet.paused[each]
            return lifted

        return _edit(self._host, change)

    async def aresume(self, name: str = "*") -> Sequence[str]:
        return await asyncio.to_thread(self.resume, name)

    def paused(self) -> dict[str, str | None]:
        """The pauses in force: names or patterns, each with the reason given."""
        return _read(self._host)[1].paused

    async def apaused(self) -> dict[str, str | None]:
        return await asyncio.to_thread(self.paused)

    def drain(self, name: str = "*") -> Sequence[WorkerView]:
        """Those that are there now finish what runs and end, as after a first signal. Who they are."""
        _check(name)

        def change(fleet: _Fleet) -> Sequence[WorkerView]:
            told = self._named(fleet, name)
            fleet.drain |= dict.fromkeys([each.owner for each in told], self._host.clock.now())
            return told

        return _edit(self._host, change)

    async def adrain(self, name: str = "*") -> Sequence[WorkerView]:
        return await asyncio.to_thread(self.drain, name)

    def _named(self, fleet: _Fleet, name: str) -> Sequence[WorkerView]:
        return [each for each in _present(self._host, fleet) if fnmatchcase(each.name, name)]


class Badge:
    """A worker's side: it says what it does, and reads what it is told."""

    def __init__(self, host: Host, owner: str) -> None:
        self._host = host
        self._owner = owner
        self.name = owner.rpartition("#")[0]
        self._started_at = host.clock.now()
        self._version: int | None = None
        self._orders = Orders()

    def enter(self) -> None:
        """Be known. Those who have not been heard of for long are forgotten by this."""

        def change(fleet: _Fleet) -> None:
            now = self._host.clock.now()
            gone = [owner for owner, at in fleet.known.items() if at < now - DEPARTED and _report(self._host, owner) is None]
            for owner in gone:
                del fleet.known[owner]
            for owner in (*gone, self._owner):
                fleet.drain.pop(owner, None)
            fleet.known[self._owner] = now

        _edit(self._host, change)

    def orders(self) -> Orders:
        """What it is told now. Costs one read, and nothing more if nothing has changed."""
        version, fleet = _read(self._host)
        if version != self._version and self._owner not in fleet.known:
            # Taken for gone: its reports ran out in an outage, or somebody's clock is ahead.
            self.enter()
            version, fleet = _read(self._host)
        if version != self._version:
            by = fleet.pause_of(self.name)
            why = None if by is None else fleet.paused[by]
            self._orders, self._version = Orders(by, why, self._owner in fleet.drain), version
        return self._orders

    def report(self, **now: Any) -> None:
        """`queues`, `concurrency`, `running`, `draining`. Not waited for."""
        view = WorkerView(
            name=self.name,
            owner=self._owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            seen_at=self._host.clock.now(),
            paused=self._orders.paused_by is not None,
            why=self._orders.why,
            **now,
        )
        self._host.committer.post([Note(key=_key(self._owner), value=msgspec.json.encode(view), ttl=TTL)], _ignore)

    def leave(self) -> None:
        self._host.committer.post([Note(key=_key(self._owner), value=None)], _ignore)


def _check(name: str) -> None:
    checks.text("name", name, 200, least=1)


def _key(owner: str) -> str:
    return REPORT + owner


def _read(host: Host) -> tuple[int, _Fleet]:
    view = host.ledger.note(KEY)
    return (0 if view is None else view.version), _decoded(view)


def _decoded(view: NoteView | None) -> _Fleet:
    return _Fleet() if view is None else msgspec.json.decode(view.value, type=_Fleet)


def _report(host: Host, owner: str) -> WorkerView | None:
    view = host.ledger.note(_key(owner))
    return None if view is None else msgspec.json.decode(view.value, type=WorkerView)


def _present(host: Host, fleet: _Fleet) -> Sequence[WorkerView]:
    found = [view for owner in fleet.known if (view := _report(host, owner)) is not None]
    return sorted(found, key=lambda each: (each.name, each.started_at))


def _edit(host: Host, change: Callable[[_Fleet], T]) -> T:
    """By compare-and-set: who changes it at the same time is not undone."""
    while True:
        version, fleet = _read(host)
        answer = change(fleet)
        try:
            host.committer.call(Note(key=KEY, value=msgspec.json.encode(fleet), expect=version))
        except NoteConflict:
            continue
        return answer


def _ignore(replies: Sequence[Reply]) -> None:
    """The next report says it again."""
