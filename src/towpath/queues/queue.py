"""Queues and their parts: limits, pause and resume, counts. All workers obey them.

orders = app.queue("orders")
orders.configure(cap=8, rate="100/m")
orders.part("customer-17").pause("unpaid")
print(orders.stats().counts.ready)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict, Unpack

from msgspec import UNSET, UnsetType

from towpath.core import checks
from towpath.core.commands import Command, SetPart, SetQueue
from towpath.core.depths import DEPTHS
from towpath.core.depths import check_depth as check_depth
from towpath.core.depths import depth_note as depth_note
from towpath.core.limits import Rate
from towpath.core.views import Counts, PartView, QueueView, Readable
from towpath.errors import InvalidInput
from towpath.ledger import Ledger
from towpath.runtime.engine import Engine, in_thread, same_as


class QueueLimits(TypedDict, total=False):
    """The limits of `configure` of a queue. An omitted limit stays as it is; None lifts a limit.

    At most `cap` jobs run at once, started at most at `rate` (`"100/m"`, or a `Rate`) and none before
    `not_before`; at most `capacity` wait, more are refused with `QueueFull`; when `warn_depth` wait, a
    warning is logged once (`QueueDeep`). `why` is the reason that explanations show. Done and canceled jobs
    are kept for `retention` seconds (None: 7 days), at most `keep` of them (None: a million)."""

    cap: int | None
    rate: Rate | str | None
    not_before: datetime
    why: str | None
    capacity: int | None
    warn_depth: int | None
    retention: float | timedelta | None
    keep: int | None


class PartLimits(TypedDict, total=False):
    """The limits of `configure` of a part: as for a queue, and `weight`, its share of turns beside the other
    parts (1). At most `capacity` of its jobs wait, more are refused with `PartFull`; faster appends than
    `append_rate` are refused with `TooManyAppends`. Both errors name the part and have a `retry_after`."""

    cap: int | None
    rate: Rate | str | None
    not_before: datetime
    why: str | None
    weight: int
    capacity: int | None
    append_rate: Rate | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus(Readable):
    """A queue at one moment: its exact counts and its settings. Durations are seconds."""

    name: str
    counts: Counts
    oldest_ready: datetime | None
    """Since when the longest-waiting ready job could have run."""
    paused: bool
    why: str | None
    capacity: int | None
    cap: int | None
    rate: Rate | None
    next_at: datetime | None
    """No job starts before: the rate, or `not_before`. None if neither was ever in force."""
    retention: float | None
    keep: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus(Readable):
    """A part of a queue at one moment: its ready and running jobs, and its limits."""

    queue: str
    name: str
    ready: int
    running: int
    paused: bool
    why: str | None
    cap: int | None
    rate: Rate | None
    next_at: datetime | None
    weight: int
    capacity: int | None
    append_rate: Rate | None
    append_at: datetime | None
    """When the append rate allows the next append."""


_NO_LIMITS: Final = (None, False, None, None, None, None, 0, None, None)


def queue_status(view: QueueView) -> QueueStatus:
    fields = {name: getattr(view, name) for name in QueueView.__struct_fields__}
    fields["oldest_ready"] = checks.optional_utc(view.oldest_ready)
    fields["next_at"] = checks.optional_utc(view.next_at or None)
    fields["retention"] = checks.optional_seconds(view.retention)
    return QueueStatus(**fields)


def part_status(view: PartView) -> PartStatus:
    fields = {name: getattr(view, name) for name in PartView.__struct_fields__ if name != "served"}
    fields["next_at"] = checks.optional_utc(view.next_at or None)
    fields["append_at"] = checks.optional_utc(view.append_at or None)
    return PartStatus(**fields)


class BaseGate(ABC):
    """The common methods of a queue and a part. Each is one command, committed when the method returns."""

    _engine: Engine

    @abstractmethod
    def _setting(self, **fields: Any) -> Command: ...

    def pause(self, why: str | None = None) -> None:
        """No job starts until `resume`; running jobs continue, and new jobs wait. `why` is the reason that
        explanations show."""
        self._engine.committer.call(self._setting(paused=True, why=why))

    @same_as(pause)
    async def apause(self, why: str | None = None) -> None:
        await self._engine.committer.acall(self._setting(paused=True, why=why))

    def resume(self) -> None:
        """Let jobs start again."""
        self._engine.committer.call(self._setting(paused=False, why=None))

    @same_as(resume)
    async def aresume(self) -> None:
        await self._engine.committer.acall(self._setting(paused=False, why=None))


class QueueGate(BaseGate):
    """A queue. Making the object writes nothing; the first pause or limit creates the queue in the ledger."""

    def __init__(self, engine: Engine, name: str) -> None:
        checks.name("queue", name)
        self._engine = engine
        self.name = name

    def configure(self, **limits: Unpack[QueueLimits]) -> None:
        """Set limits; see `QueueLimits`."""
        fields = _fields(limits, QueueLimits)
        depth = fields.pop("warn_depth", UNSET)
        if depth is not UNSET:
            check_depth(depth, fields.get("capacity"))
        set_limits(self._engine, SetQueue(queue=self.name, **fields), depth)

    aconfigure = in_thread(configure)

    def warn_depth(self) -> int | None:
        """The number of waiting jobs that logs a warning."""
        return warn_depth(self._engine.ledger, self.name)

    awarn_depth = in_thread(warn_depth)

    def stats(self) -> QueueStatus:
        """The current exact counts and settings. An unused queue is empty and has no limits."""
        view = self._engine.ledger.queue(self.name)
        return queue_status(view or QueueView(self.name, Counts(), *_NO_LIMITS))

    astats = in_thread(stats)

    def part(self, name: str) -> PartGate:
        """One of its parts, such as a customer."""
        return PartGate(self._engine, self.name, name)

    def parts(self) -> list[PartStatus]:
        """The parts that have jobs ready or running, or limits of their own, by name."""
        return [part_status(view) for _, view in sorted(self._engine.ledger.parts(self.name).items())]

    aparts = in_thread(parts)

    def _setting(self, **fields: Any) -> Command:
        return SetQueue(queue=self.name, **fields)


class PartGate(BaseGate):
    """A part of a queue."""

    def __init__(self, engine: Engine, queue: str, name: str) -> None:
        checks.text("part", name, least=1)
        self._engine = engine
        self.queue = queue
        self.name = name

    def __repr__(self) -> str:
        return f"<part {self.name} of {self.queue}>"

    def configure(self, **limits: Unpack[PartLimits]) -> None:
        """Set limits; see `PartLimits`."""
        self._engine.committer.call(self._setting(**_fields(limits, PartLimits)))

    @same_as(configure)
    async def aconfigure(self, **limits: Unpack[PartLimits]) -> None:
        await self._engine.committer.acall(self._setting(**_fields(limits, PartLimits)))

    def stats(self) -> PartStatus:
        """The current counts of ready and running jobs, and the settings. An unused part is empty and has no
        limits."""
        view = self._engine.ledger.parts(self.queue).get(self.name)
        return part_status(view or PartView(self.queue, self.name, 0, 0, False, None, None, None, 0, 1, 0))

    astats = in_thread(stats)

    def _setting(self, **fields: Any) -> Command:
        return SetPart(queue=self.queue, part=self.name, **fields)


def set_limits(engine: Engine, setting: SetQueue, depth: int | UnsetType | None = UNSET) -> None:
    """Set the limits of a queue, and the depth to warn at, which is stored in a note, if it changes."""
    engine.committer.call(setting)
    if depth is not UNSET:
        engine.committer.call(depth_note(setting.queue, depth))


def warn_depths(ledger: Ledger) -> dict[str, int]:
    """The depth to warn at, by queue."""
    return DEPTHS.all(ledger)


def warn_depth(ledger: Ledger, queue: str) -> int | None:
    return DEPTHS.get(ledger, queue)


def _fields(limits: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The limits as SetQueue and SetPart take them."""
    fields = dict(limits)
    if unknown := fields.keys() - kind.__annotations__.keys():
        raise TypeError(str(checks.unknown("limit", min(unknown), kind.__annotations__, "configure")))
    for name in ("rate", "append_rate"):
        if not isinstance(fields.get(name), Rate | None):
            try:
                fields[name] = Rate.of(fields[name])
            except InvalidInput as error:
                raise error.renamed(error.field.replace("rate", name, 1)) from None
    if fields.get("retention") is not None:
        fields["retention"] = checks.micros(fields["retention"], "retention")
    if "not_before" in fields:
        fields["not_before"] = checks.moment(fields["not_before"], "not_before")
    return fields
