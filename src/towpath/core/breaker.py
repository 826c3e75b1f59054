"""A circuit breaker as a state machine with time as an argument, and the gates in the ledger that follow from
its state.

A closed breaker counts consecutive failures within a window, or the ratio of failures to calls in it. An open
breaker lets no call through until its cool-down is over. Then it is half open: a number of probes may run.
Their successes close it, and the first failure opens it again. No command is needed to make it half open: the
gate of an open breaker has a time and a cap, and after that time only the cap applies."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr, replace

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import SetPart, SetQueue
from towpath.core.job import Word
from towpath.core.records import NoteRecords
from towpath.core.views import Readable
from towpath.errors import InvalidInput

PART: Final = "breaker:"
"""Prefix of the part of a queue in which the jobs of a breaker wait; the name of the breaker follows."""
LONGEST: Final = 7 * checks.DAY
ASK_AGAIN: Final = 60 * SECOND
"""A refused caller asks again after this time, or after a longer cool-down: an operator may close the breaker
long before its time."""
UNBOUNDED: Final = 100 * 365 * checks.DAY
"""A later end means: open until it is closed by hand."""
_REASON: Final = "breaker "


class Phase(Word):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker(msgspec.Struct, frozen=True):
    """`failures` consecutive failures within `window` seconds open the breaker for `cooldown` seconds; a
    success resets the count. With `ratio` it opens instead when at least `volume` calls ended within `window`
    and this share of them failed. After the cool-down at most `probes` calls run at a time: as many successes
    close the breaker, one failure opens it again. Spans are seconds or timedeltas."""

    name: str
    failures: int = 5
    window: float | timedelta = 60.0
    cooldown: float | timedelta = 30.0
    probes: int = 2
    ratio: float | None = None
    volume: int = 20

    def __post_init__(self) -> None:
        checks.name("breaker", self.name)
        checks.text("breaker", self.name, checks.MAX_NAME - len(PART))
        checks.whole("failures", self.failures, 1, 1000)
        checks.whole("probes", self.probes, 1, 1000)
        checks.whole("volume", self.volume, 1, 1_000_000)
        if self.ratio is not None and not (type(self.ratio) in (int, float) and 0 < self.ratio <= 1):
            raise InvalidInput(field="ratio", value=self.ratio, expected="more than 0 and at most 1, or None")
        for field, least in (("window", SECOND // 1000), ("cooldown", SECOND // 10)):
            span = checks.micros(getattr(self, field), field)
            if not least <= span <= LONGEST:
                expected = f"from {least / SECOND:g} s to {LONGEST // checks.DAY} days"
                raise InvalidInput(field=field, value=getattr(self, field), expected=expected)
            force_setattr(self, field, span / SECOND)

    @property
    def part(self) -> str:
        """The part of a queue in which its jobs wait."""
        return PART + self.name


def window_of(breaker: Breaker) -> int:
    """The window in the ledger's microseconds."""
    return checks.micros(breaker.window)


def cooldown_of(breaker: Breaker) -> int:
    """The cool-down in the ledger's microseconds."""
    return checks.micros(breaker.cooldown)


Tally = tuple[tuple[int, int, int], ...]
"""Calls of a closed breaker with a ratio, by slice of its window: the number of the slice, successes,
failures."""
SLICES: Final = 10
"""Slices of a window."""


def tallied(breaker: Breaker, tally: Tally, now: int, more: Tally) -> Tally:
    """The sum of both tallies, without slices that are older than the window."""
    width = max(1, window_of(breaker) // SLICES)
    sums: dict[int, tuple[int, int]] = {}
    for at, good, bad in (*tally, *more):
        if at > now // width - SLICES:
            before = sums.get(at, (0, 0))
            sums[at] = before[0] + good, before[1] + bad
    return tuple([(at, *sums[at]) for at in sorted(sums)])


def call(breaker: Breaker, now: int, ok: bool) -> Tally:
    """The tally of one call that ended at `now`."""
    return ((now // max(1, window_of(breaker) // SLICES), int(ok), int(not ok)),)


class Status(msgspec.Struct, frozen=True):
    """`until`: 0 if the breaker is closed; otherwise it is open before this time and half open from then on.
    `since`: the time at which it last opened or closed."""

    until: int = 0
    since: int = 0
    why: str = ""
    failed: tuple[int, ...] = ()
    """Times of the latest failures in the window since the last success, at most as many as open the
    breaker."""
    tally: Tally = ()
    """With a ratio: the calls in the window since the first failure."""
    good: int = 0
    """Probes that have succeeded since the breaker became half open."""
    out: tuple[int, ...] = ()
    """Start times of the probes that `admit` let through and that have not reported."""
    stuck: int = 0
    """Jobs that have been in the gate for too long and have not ended. They do not count as probes."""
    trips: int = 0

    def phase(self, now: int) -> Phase:
        if self.until == 0:
            return Phase.CLOSED
        return Phase.OPEN if now < self.until else Phase.HALF_OPEN


def failed(breaker: Breaker, status: Status, now: int, began: int, passed: Tally = ()) -> Status:
    """The status after the failure of a call that began at `began`. A call that began before the last change
    of the breaker is ignored. `passed`: successes that are not stored yet."""
    now = _not_before(began, now)
    phase = status.phase(now)
    if phase is Phase.HALF_OPEN and began >= status.until:
        return opened(breaker, status, now, "a probe failed")
    if phase is not Phase.CLOSED or began < status.since:
        return status
    if breaker.ratio is not None:
        return _opened_by_ratio(
            breaker,
            replace(status, tally=tallied(breaker, status.tally, now, (*passed, *call(breaker, now, False)))),
            now,
        )
    recent = (*(at for at in status.failed if at > now - window_of(breaker)), now)[-breaker.failures :]
    if len(recent) < breaker.failures:
        return replace(status, failed=recent)
    return opened(breaker, status, now, f"{_count(breaker.failures, 'failure')} in {breaker.window:g} s")


def _opened_by_ratio(breaker: Breaker, status: Status, now: int) -> Status:
    bad = sum(each[2] for each in status.tally)
    calls = bad + sum(each[1] for each in status.tally)
    if breaker.ratio is None or calls < breaker.volume or bad < breaker.ratio * calls:
        return status
    return opened(breaker, status, now, f"{bad} of {_count(calls, 'call')} failed in {breaker.window:g} s")


def succeeded(breaker: Breaker, status: Status, now: int, began: int, passed: Tally = ()) -> Status:
    """The status after the success of a call that began at `began`: a probe of a half-open breaker, or a call
    that resets the failures of a closed one."""
    now = _not_before(began, now)
    phase = status.phase(now)
    if phase is Phase.CLOSED and began >= status.since:
        if breaker.ratio is None:
            return replace(status, failed=()) if status.failed else status
        return replace(status, tally=tallied(breaker, status.tally, now, passed)) if status.tally else status
    if phase is not Phase.HALF_OPEN or began < status.until:
        return status
    good = status.good + 1
    if good < breaker.probes:
        return replace(returned(status, began), good=good)
    return closed(status, now, f"{_count(good, 'probe')} succeeded")


def _not_before(began: int, now: int) -> int:
    """The later of both: a local clock may have been set back since the start, and ledger time never goes
    back."""
    return max(began, now)


def returned(status: Status, began: int) -> Status:
    """The status after a probe that ended as neither success nor failure."""
    if began not in status.out:
        return status
    at = status.out.index(began)
    return replace(status, out=status.out[:at] + status.out[at + 1 :])


def admit(breaker: Breaker, status: Status, now: int) -> Status | None:
    """The status after the start of a call, or None if the call may not start. A probe that has not reported
    within a cool-down no longer counts, and another one may start."""
    phase = status.phase(now)
    if phase is not Phase.HALF_OPEN:
        return status if phase is Phase.CLOSED else None
    out = tuple(began for began in status.out if now - cooldown_of(breaker) < began <= now)
    return replace(status, out=(*out, now)) if len(out) < breaker.probes else None


def opened(breaker: Breaker, status: Status, now: int, why: str, until: int | None = None) -> Status:
    until = now + cooldown_of(breaker) if until is None else until
    return Status(until=until, since=now, why=why, trips=status.trips + 1)


def closed(status: Status, now: int, why: str = "") -> Status:
    return Status(since=now, trips=status.trips, why=why)


def again(breaker: Breaker, status: Status, now: int) -> int:
    """The time at which a caller that finds the breaker open asks again."""
    return min(status.until, now + max(cooldown_of(breaker), ASK_AGAIN))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# In the ledger


class BreakerGate(msgspec.Struct, frozen=True, gc=False):
    """A queue, or a part of it, that is held while the breaker is open. `cap` and `why` are its own values,
    which it gets back."""

    queue: str
    part: str | None = None
    cap: int | None = None
    why: str | None = None

    @property
    def place(self) -> tuple[str, str | None]:
        return self.queue, self.part


class Record(msgspec.Struct, frozen=True):
    """The note of a breaker, which the whole fleet shares. The gates follow from it."""

    breaker: Breaker
    status: Status = Status()
    gates: tuple[BreakerGate, ...] = ()

    @property
    def limit(self) -> int:
        """The cap of a gate while the breaker is open or half open."""
        return self.breaker.probes + self.status.stuck

    @property
    def reason(self) -> str:
        """The reason of a held gate."""
        return f"{_REASON}{self.breaker.name}: {self.status.why}"

    def counted(self, now: int) -> tuple[int, int]:
        """The failures that count at `now`, and with a ratio the calls."""
        if self.breaker.ratio is None:
            return len([at for at in self.status.failed if at > now - window_of(self.breaker)]), 0
        tally = tallied(self.breaker, self.status.tally, now, ())
        return sum(bad for _, _, bad in tally), sum(good + bad for _, good, bad in tally)

    def has(self, place: tuple[str, str | None]) -> bool:
        return any(gate.place == place for gate in self.gates)

    def with_gate(self, place: tuple[str, str | None]) -> Record:
        return self if self.has(place) else replace(self, gates=(*self.gates, BreakerGate(*place)))

    def settings(self) -> list[SetQueue | SetPart]:
        """The commands that set the gates."""
        return [self._setting(gate) for gate in self.gates]

    def _setting(self, gate: BreakerGate) -> SetQueue | SetPart:
        shut = self.status.until > 0
        cap = gate.cap if not shut else self.limit if gate.cap is None else min(gate.cap, self.limit)
        why = self.reason if shut else gate.why
        if gate.part is None:
            return SetQueue(queue=gate.queue, cap=cap, not_before=self.status.until, why=why)
        return SetPart(queue=gate.queue, part=gate.part, cap=cap, not_before=self.status.until, why=why)


class BreakerPlace(msgspec.Struct, frozen=True):
    """A queue, or a part of it, that a breaker holds."""

    queue: str
    part: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatus(Readable):
    """A breaker at one moment. `failed` failures count, with a `ratio` of `calls`. `until` is None unless it
    is open for a limited time. `window` and `cooldown` are seconds."""

    name: str
    state: Phase
    until: datetime | None
    why: str | None
    since: datetime | None
    failed: int
    calls: int | None
    ratio: float | None
    volume: int | None
    failures: int
    window: float
    cooldown: float
    probes: int
    trips: int
    gates: tuple[BreakerPlace, ...]


def breaker_status(record: Record, now: int) -> BreakerStatus:
    status, settings = record.status, record.breaker
    phase, (count, calls) = status.phase(now), record.counted(now)
    limited = phase is Phase.OPEN and status.until - now < UNBOUNDED
    rated = settings.ratio is not None
    return BreakerStatus(
        name=settings.name,
        state=phase,
        until=checks.utc(status.until) if limited else None,
        why=status.why or None,
        since=checks.optional_utc(status.since or None),
        failed=count,
        calls=calls if rated else None,
        ratio=settings.ratio,
        volume=settings.volume if rated else None,
        failures=settings.failures,
        window=window_of(settings) / SECOND,
        cooldown=cooldown_of(settings) / SECOND,
        probes=settings.probes,
        trips=status.trips,
        gates=tuple(BreakerPlace(gate.queue, gate.part) for gate in record.gates),
    )


class GateReason(NamedTuple):
    name: str
    why: str


def parse_reason(why: str | None) -> GateReason | None:
    """The breaker that holds a gate, parsed from the gate's reason; None if no breaker holds it."""
    if why is None or not why.startswith(_REASON) or ": " not in why:
        return None
    name, _, cause = why.removeprefix(_REASON).partition(": ")
    return GateReason(name, cause)


BREAKERS: Final = NoteRecords("breaker/", Record)
