"""A circuit breaker as a state machine with time as an argument, and the gates in the ledger that follow from
its state.

Closed it counts failures in a row within a window, or the ratio of failures to calls there. Open it lets
nothing through until its cool-down is over. After that it is half open: a number of probes may try, their
successes close it and the first failure opens it again. Nobody has to do anything for it to become half open:
an open gate is a time and a cap, and when the time has come the cap is what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr, replace

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.commands import SetPart, SetQueue
from towpath.core.job import Word
from towpath.core.views import NoteView
from towpath.errors import InvalidInput

INDEX: Final = "towpath/breakers"
"""The note with the names of all breakers."""
PART: Final = "breaker:"
"""The part of a queue in which the jobs of a breaker wait is this and its name."""
LONGEST: Final = 7 * checks.DAY
ASK_AGAIN: Final = 60 * SECOND
"""Whoever was turned away asks again after this, or after a longer cool-down: somebody may close it by hand
long before its time."""
_SAID: Final = "breaker "


class Phase(Word):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker(msgspec.Struct, frozen=True):
    """`failures` in a row within `window` seconds open it for `cooldown` seconds; a success resets the count.
    With `ratio` it opens instead when at least `volume` calls ended within `window` and this share of them
    failed. Then at most `probes` at a time may try: as many successes close it, one failure opens it again.
    Spans are seconds or timedeltas."""

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
                expected = f"{least / SECOND:g} s to {LONGEST // checks.DAY} days"
                raise InvalidInput(field=field, value=getattr(self, field), expected=expected)
            force_setattr(self, field, span / SECOND)

    @property
    def span(self) -> int:
        """The window in microseconds."""
        return checks.micros(self.window)

    @property
    def rest(self) -> int:
        """The cool-down in microseconds."""
        return checks.micros(self.cooldown)

    @property
    def part(self) -> str:
        return PART + self.name


Tally = tuple[tuple[int, int, int], ...]
"""Calls of a closed breaker with a ratio, by slice of its window: the number of the slice, successes,
failures."""
SLICES: Final = 10
"""A window has so many slices."""


def tallied(breaker: Breaker, tally: Tally, now: int, more: Tally) -> Tally:
    """Both together, without what is older than the window."""
    width = max(1, breaker.span // SLICES)
    sums: dict[int, tuple[int, int]] = {}
    for at, good, bad in (*tally, *more):
        if at > now // width - SLICES:
            before = sums.get(at, (0, 0))
            sums[at] = before[0] + good, before[1] + bad
    return tuple([(at, *sums[at]) for at in sorted(sums)])


def call(breaker: Breaker, now: int, ok: bool) -> Tally:
    """One call that ended at `now`."""
    return ((now // max(1, breaker.span // SLICES), int(ok), int(not ok)),)


class Status(msgspec.Struct, frozen=True):
    """`until`: 0 is closed, open before it, half open from then on. `since`: when it last opened or
    closed."""

    until: int = 0
    since: int = 0
    why: str = ""
    failed: tuple[int, ...] = ()
    """When, the latest of the window since the last success; never more than are needed to open it."""
    tally: Tally = ()
    """With a ratio: the calls of the window, from the first failure on."""
    good: int = 0
    """Probes that succeeded since it is half open."""
    out: tuple[int, ...] = ()
    """When the probes began that were let through by hand (`admit`) and have not reported."""
    stuck: int = 0
    """Jobs that fill the gate for too long and have not ended: they do not count as probes."""
    trips: int = 0

    def phase(self, now: int) -> Phase:
        if self.until == 0:
            return Phase.CLOSED
        return Phase.OPEN if now < self.until else Phase.HALF_OPEN


def failed(breaker: Breaker, status: Status, now: int, began: int, passed: Tally = ()) -> Status:
    """A call that began at `began` failed. What began before the last change says nothing about the present.
    `passed`: successes that were not written yet."""
    now = _not_before(began, now)
    phase = status.phase(now)
    if phase is Phase.HALF_OPEN and began >= status.until:
        return opened(breaker, status, now, "a probe failed")
    if phase is not Phase.CLOSED or began < status.since:
        return status
    if breaker.ratio is not None:
        return _weighed(
            breaker,
            replace(status, tally=tallied(breaker, status.tally, now, (*passed, *call(breaker, now, False)))),
            now,
        )
    recent = (*(at for at in status.failed if at > now - breaker.span), now)[-breaker.failures :]
    if len(recent) < breaker.failures:
        return replace(status, failed=recent)
    return opened(
        breaker, status, now, f"{_count(breaker.failures, 'failure')} in {breaker.span / SECOND:g} s"
    )


def _weighed(breaker: Breaker, status: Status, now: int) -> Status:
    bad = sum(each[2] for each in status.tally)
    calls = bad + sum(each[1] for each in status.tally)
    if breaker.ratio is None or calls < breaker.volume or bad < breaker.ratio * calls:
        return status
    return opened(
        breaker, status, now, f"{bad} of {_count(calls, 'call')} failed in {breaker.span / SECOND:g} s"
    )


def succeeded(breaker: Breaker, status: Status, now: int, began: int, passed: Tally = ()) -> Status:
    """A call that began at `began` succeeded: a probe of a half-open breaker, or a call that resets the
    failures of a closed one."""
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
    """Nothing ends before it began: a clock that was set back meanwhile is wrong, the ledger's time never
    goes back."""
    return max(began, now)


def returned(status: Status, began: int) -> Status:
    """A probe ended without a verdict."""
    if began not in status.out:
        return status
    at = status.out.index(began)
    return replace(status, out=status.out[:at] + status.out[at + 1 :])


def admit(breaker: Breaker, status: Status, now: int) -> Status | None:
    """May a call begin? None if not. A probe that has not reported within a cool-down is given up, and
    another may try."""
    phase = status.phase(now)
    if phase is not Phase.HALF_OPEN:
        return status if phase is Phase.CLOSED else None
    out = tuple(began for began in status.out if now - breaker.rest < began <= now)
    return replace(status, out=(*out, now)) if len(out) < breaker.probes else None


def opened(breaker: Breaker, status: Status, now: int, why: str, until: int | None = None) -> Status:
    until = now + breaker.rest if until is None else until
    return Status(until=until, since=now, why=why, trips=status.trips + 1)


def closed(status: Status, now: int, why: str = "") -> Status:
    return Status(since=now, trips=status.trips, why=why)


def again(breaker: Breaker, status: Status, now: int) -> int:
    """The time at which a caller that finds the breaker open asks again."""
    return min(status.until, now + max(breaker.rest, ASK_AGAIN))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# In the ledger


class BreakerGate(msgspec.Struct, frozen=True, gc=False):
    """A queue, or a part of it, that is held while the breaker is open. `cap` and `why` are what it had
    before."""

    queue: str
    part: str | None = None
    cap: int | None = None
    why: str | None = None

    @property
    def place(self) -> tuple[str, str | None]:
        return self.queue, self.part


class Record(msgspec.Struct, frozen=True):
    """The note of a breaker: the truth for the whole fleet. The gates follow from it."""

    breaker: Breaker
    status: Status = Status()
    gates: tuple[BreakerGate, ...] = ()

    @property
    def limit(self) -> int:
        """How many may run at once in a gate that is not closed."""
        return self.breaker.probes + self.status.stuck

    @property
    def said(self) -> str:
        """What a held gate says of itself."""
        return f"{_SAID}{self.breaker.name}: {self.status.why}"

    def counted(self, now: int) -> tuple[int, int]:
        """The failures that count at `now`, and with a ratio the calls."""
        if self.breaker.ratio is None:
            return len([at for at in self.status.failed if at > now - self.breaker.span]), 0
        tally = tallied(self.breaker, self.status.tally, now, ())
        return sum(bad for _, _, bad in tally), sum(good + bad for _, good, bad in tally)

    def has(self, place: tuple[str, str | None]) -> bool:
        return any(gate.place == place for gate in self.gates)

    def with_gate(self, place: tuple[str, str | None]) -> Record:
        return self if self.has(place) else replace(self, gates=(*self.gates, BreakerGate(*place)))

    def settings(self) -> list[SetQueue | SetPart]:
        """What the gates have to be."""
        return [self._setting(gate) for gate in self.gates]

    def _setting(self, gate: BreakerGate) -> SetQueue | SetPart:
        shut = self.status.until > 0
        cap = gate.cap if not shut else self.limit if gate.cap is None else min(gate.cap, self.limit)
        why = self.said if shut else gate.why
        if gate.part is None:
            return SetQueue(queue=gate.queue, cap=cap, not_before=self.status.until, why=why)
        return SetPart(queue=gate.queue, part=gate.part, cap=cap, not_before=self.status.until, why=why)


class Said(NamedTuple):
    name: str
    why: str


def heard(why: str | None) -> Said | None:
    """The breaker that holds a gate, parsed from the gate's reason; None if no breaker holds it."""
    if why is None or not why.startswith(_SAID) or ": " not in why:
        return None
    name, _, rest = why.removeprefix(_SAID).partition(": ")
    return Said(name, rest)


def key(name: str) -> str:
    return f"breaker/{name}"


def decode(value: bytes) -> Record:
    return msgspec.json.decode(value, type=Record)


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def names(value: bytes | None) -> list[str]:
    """The names in the index."""
    return [] if value is None else msgspec.json.decode(value, type=list[str])


def read_all(note: Callable[[str], NoteView | None]) -> list[Record]:
    """All breakers of a ledger whose notes `note` reads, by name. One that cannot be read is left out."""
    index = note(INDEX)
    views = [note(key(name)) for name in names(None if index is None else index.value)]
    found: list[Record] = []
    for view in views:
        with contextlib.suppress(msgspec.MsgspecError):
            found += [] if view is None else [decode(view.value)]
    return found
