"""The workers of a ledger: list, pause, resume and drain them from any process.

The note `towpath/workers` is shared by the fleet: the paused names with reasons (`*` matches any characters),
the paused lanes, and the workers that shall end (by incarnation, so that a worker started later under the
same name runs). The note `worker/<owner>` is the report of a worker, and the workers are listed by these
notes. It has a time to live, after which a killed worker is no longer listed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

import msgspec

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import Note
from towpath.core.fleet import REPORTS, Fleet, LimitView, lanes_together
from towpath.core.fleet import LaneView as LaneView
from towpath.core.fleet import WorkerView as WorkerView
from towpath.core.views import Readable
from towpath.errors import InvalidInput, NoteConflict
from towpath.fleet import KEY, decoded, lanes_of, workers_of
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine

TTL: Final = 30 * SECOND
AGAIN: Final = 10
"""Seconds between two reports of a worker; each is a commit."""
DRAIN_KEPT: Final = 60 * SECOND
"""How long the request to end is stored at least. Afterwards it is deleted if the worker has ended."""

T = TypeVar("T")


class Instructions(msgspec.Struct, frozen=True):
    """The instructions to a worker: the entry that pauses it (None: not paused), the reason, whether to end,
    and the paused lanes."""

    paused_by: str | None = None
    why: str | None = None
    drain: bool = False
    lanes: Mapping[str, str | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus(Readable):
    """The limit of a worker for a resource or a lane: at most `limit` jobs at once, and none before `until`,
    if the service asked for a delay."""

    name: str
    queues: tuple[str, ...]
    limit: int
    running: int
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Readable):
    """The last report of a worker, at most 10 s old."""

    name: str
    owner: str
    host: str
    pid: int
    queues: tuple[str, ...]
    concurrency: int
    running: int
    started_at: datetime
    seen_at: datetime
    paused: bool
    draining: bool
    why: str | None
    lanes: tuple[LaneView, ...]
    limits: tuple[LimitStatus, ...]


def _statuses(views: Iterable[WorkerView]) -> list[WorkerStatus]:
    return [WorkerStatus(**_times(view) | {"limits": tuple(map(_limit, view.limits))}) for view in views]


def _limit(view: LimitView) -> LimitStatus:
    return LimitStatus(**_times(view))


def _times(view: WorkerView | LimitView) -> dict[str, Any]:
    """The fields of a view, with the times as datetimes."""
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return fields | {name: checks.optional_utc(fields[name]) for name in _TIMES if name in fields}


_TIMES = ("started_at", "seen_at", "until")


class Workers:
    """The workers of this ledger. `name` is a worker's name or a pattern with `*`, which alone matches every
    worker. A pause stays until `resume`, also for workers that start later; a drain applies to the present
    workers."""

    def __init__(self, engine: Engine, lanes: Iterable[str] = ()) -> None:
        self._engine = engine
        self.lanes = Lanes(engine, lanes)

    def list(self) -> Sequence[WorkerStatus]:
        """The present workers, by name."""
        return _statuses(workers_of(self._engine.ledger))

    async def alist(self) -> Sequence[WorkerStatus]:
        return await asyncio.to_thread(self.list)

    def pause(self, name: str = "*", why: str | None = None) -> Sequence[WorkerStatus]:
        """The workers start no new jobs; running jobs continue, claimed jobs that have not started are
        released. Returns the affected workers."""
        _check(name)
        checks.optional_text("why", why, 1000)

        def change(fleet: Fleet) -> Sequence[WorkerStatus]:
            fleet.paused[name] = why
            return self._named(name)

        return _edit(self._engine, change)

    async def apause(self, name: str = "*", why: str | None = None) -> Sequence[WorkerStatus]:
        return await asyncio.to_thread(self.pause, name, why)

    def resume(self, name: str = "*") -> Sequence[str]:
        """Lift the pauses that this name or pattern covers; return their names. `*` lifts all."""
        _check(name)

        def change(fleet: Fleet) -> Sequence[str]:
            lifted = [each for each in sorted(fleet.paused) if fnmatchcase(each, name)]
            for each in lifted:
                del fleet.paused[each]
            return lifted

        return _edit(self._engine, change)

    async def aresume(self, name: str = "*") -> Sequence[str]:
        return await asyncio.to_thread(self.resume, name)

    def paused(self) -> dict[str, str | None]:
        """The pauses in force: names or patterns, each with the reason given."""
        return _read(self._engine)[1].paused

    async def apaused(self) -> dict[str, str | None]:
        return await asyncio.to_thread(self.paused)

    def drain(self, name: str = "*") -> Sequence[WorkerStatus]:
        """The present workers finish their running jobs and end, as after a first signal. Returns these
        workers."""
        _check(name)

        def change(fleet: Fleet) -> Sequence[WorkerStatus]:
            drained = self._named(name)
            fleet.drain |= dict.fromkeys([each.owner for each in drained], self._engine.clock.now())
            return drained

        return _edit(self._engine, change)

    async def adrain(self, name: str = "*") -> Sequence[WorkerStatus]:
        return await asyncio.to_thread(self.drain, name)

    def _named(self, name: str) -> Sequence[WorkerStatus]:
        found = workers_of(self._engine.ledger)
        return _statuses(each for each in found if fnmatchcase(each.name, name))


class Lanes:
    """The lanes of all workers of this ledger, by name. A pause applies to every worker with a lane of that
    name, also to workers that start later, and stays until `resume`. `declared` are the names in the
    settings."""

    def __init__(self, engine: Engine, declared: Iterable[str] = ()) -> None:
        self._engine = engine
        self._declared = tuple(declared)

    def list(self) -> Sequence[LaneView]:
        """The lanes of the present workers and the paused lanes; the reports are at most ten seconds old."""
        return lanes_of(self._engine.ledger)

    async def alist(self) -> Sequence[LaneView]:
        return await asyncio.to_thread(self.list)

    def pause(self, name: str, why: str | None = None) -> None:
        """No job of the lane starts; running jobs continue, claimed jobs that have not started are released,
        and its slots are lent to other lanes."""
        checks.optional_text("why", why, 1000)

        def change(fleet: Fleet) -> None:
            self._require_lane(fleet, name)
            fleet.lanes[name] = why

        _edit(self._engine, change)

    async def apause(self, name: str, why: str | None = None) -> None:
        await asyncio.to_thread(self.pause, name, why)

    def resume(self, name: str) -> bool:
        """Resume a lane; True if it was paused."""

        def change(fleet: Fleet) -> bool:
            self._require_lane(fleet, name)
            paused = name in fleet.lanes
            fleet.lanes.pop(name, None)
            return paused

        return _edit(self._engine, change)

    async def aresume(self, name: str) -> bool:
        return await asyncio.to_thread(self.resume, name)

    def _require_lane(self, fleet: Fleet, name: str) -> None:
        found = {lane.name for lane in lanes_together(workers_of(self._engine.ledger), fleet.lanes)}
        known = sorted(found.union(self._declared))
        if name not in known:
            expected = f"a lane of a worker that is there or of the settings: {', '.join(known) or 'none'}"
            raise InvalidInput(field="lane", value=name, expected=expected)


class Registration:
    """The registration of a worker: it reports its state and reads its instructions."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self.name = owner.rpartition("#")[0]
        self._started_at = engine.clock.now()
        self._version: int | None = None
        self._instructions = Instructions()

    def register(self) -> None:
        """Delete the request to end of an earlier run of this worker, and old requests to workers that have
        ended."""

        def change(fleet: Fleet) -> None:
            old = self._engine.clock.now() - DRAIN_KEPT
            present = set(REPORTS.names(self._engine.ledger)) - {self._owner}
            fleet.drain = {
                owner: at
                for owner, at in fleet.drain.items()
                if owner in present or (at >= old and owner != self._owner)
            }

        if _read(self._engine)[1].drain:
            _edit(self._engine, change)

    def instructions(self) -> Instructions:
        """The current instructions. Costs one read, and a comparison of versions if nothing has changed."""
        version, fleet = _read(self._engine)
        if version != self._version:
            by = fleet.pause_of(self.name)
            why = None if by is None else fleet.paused[by]
            self._instructions, self._version = (
                Instructions(by, why, self._owner in fleet.drain, fleet.lanes),
                version,
            )
        return self._instructions

    def report(self, **now: Any) -> None:
        """Store a report: `queues`, `concurrency`, `running`, `draining`, `lanes`, `limits`. The commit is
        not awaited."""
        view = WorkerView(
            name=self.name,
            owner=self._owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            seen_at=self._engine.clock.now(),
            paused=self._instructions.paused_by is not None,
            why=self._instructions.why,
            **now,
        )
        self._engine.committer.post([REPORTS.put(self._owner, view, ttl=TTL)], _ignore)

    def unregister(self) -> None:
        self._engine.committer.post([REPORTS.put(self._owner, None)], _ignore)


def _check(name: str) -> None:
    checks.text("name", name, 200, least=1)


def _read(engine: Engine) -> tuple[int, Fleet]:
    view = engine.ledger.note(KEY)
    return (0 if view is None else view.version), decoded(view)


def _edit(engine: Engine, change: Callable[[Fleet], T]) -> T:
    """Edit the note by compare-and-set: a concurrent change is kept."""
    while True:
        version, fleet = _read(engine)
        answer = change(fleet)
        try:
            engine.committer.call(Note(key=KEY, value=msgspec.json.encode(fleet), expect=version))
        except NoteConflict:
            continue
        return answer


def _ignore(replies: Sequence[Reply]) -> None:
    """A lost report is replaced by the next one."""
