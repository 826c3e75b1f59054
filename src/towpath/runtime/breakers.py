"""Circuit breakers of a fleet: each is a note that everybody reads, and the gates in the ledger that follow
from it.

A change is a pure function of the note, written with compare-and-set and its gates in one command. Whoever
comes second reads the note again and decides again. A success of a closed breaker is written only if there
are failures that it resets, and with a ratio once a second while there are failures. No handler waits for a
commit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from towpath.core import breaker as rules
from towpath.core.breaker import INDEX, Breaker, Gate, Phase, Record, Status, Tally
from towpath.core.checks import SECOND
from towpath.core.commands import Note, Noted
from towpath.core.limits import limits_reason
from towpath.core.views import PartView, QueueView
from towpath.errors import NoteConflict, TowpathError
from towpath.escapes import get_logger
from towpath.events import BreakerChanged
from towpath.ledger import Ledger
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply

log = get_logger("towpath.breakers")

CACHE_TIME: Final = SECOND // 10
"""How old what we know of a breaker may be. No cool-down is shorter, so that no probe is taken for an
ordinary call."""
Change = Callable[[Record], Record]
Place = tuple[str, str | None]


class _CachedBreaker:
    """What this process knows of a breaker."""

    def __init__(self, breaker: Breaker) -> None:
        self.fallback = Record(breaker)
        self.record = self.fallback
        self.version = 0
        self.read_at: int | None = None
        self.changes: list[Change] = []
        """To be written."""
        self.writing = False
        self.failing = False
        """The last call that was reported here failed; the note may not have it yet."""
        self.passed: Tally = ()
        """With a ratio: successes that were not written yet."""
        self.told = 0
        """When they were last written."""


class Breakers:
    """Safe from any thread; `now` is the time of the app's clock."""

    def __init__(self, ledger: Ledger, committer: Committer) -> None:
        self._ledger = ledger
        self._committer = committer
        self.remote = ledger.capabilities.remote
        self._known: dict[str, _CachedBreaker] = {}
        self._lock = threading.Lock()

    # For whoever runs jobs

    def calm(self, breaker: Breaker, now: int) -> bool:
        """Is it known to be closed and without failures? Then a job may begin, and a success need not be
        told."""
        known = self._known.get(breaker.name)
        if known is None or known.read_at is None or breaker.ratio is not None:
            return False
        if known.failing or known.record.status.until or known.record.status.failed:
            return False
        return known.read_at <= now < known.read_at + CACHE_TIME

    def held(self, breaker: Breaker, place: Place | None, began: int, now: int) -> int | None:
        """How long a job that was claimed at `began` has to stay away if the breaker has opened since then: 0
        where its gate keeps it, which is shut if it was not known. None if it may run."""
        known = self._fresh(breaker, now)
        status = known.record.status
        if began >= status.until:
            return None
        if place is not None and not known.record.has(place):
            self._write(known, lambda record: record.with_gate(place))
        elif place is None or began > status.since:
            # No gate keeps it, or somebody has opened the gate by hand: it would come back at once.
            return max(0, rules.again(breaker, status, now) - now)
        return 0

    def report(self, breaker: Breaker, place: Place | None, ok: bool, began: int, now: int) -> None:
        """A call that began at `began` ended, well or not. `place` is the gate that its job came through."""
        known = self._fresh(breaker, now)
        with self._lock:
            status = known.record.status
            if status.until:
                known.passed = ()
            elif ok and breaker.ratio is not None:
                known.passed = rules.tallied(breaker, known.passed, now, rules.call(breaker, now, ok))
            resets = known.failing or bool(status.failed)
            if (
                ok
                and not status.until
                and not (status.tally and now >= known.told + SECOND if breaker.ratio else resets)
            ):
                return
            known.failing = not ok
            passed, known.passed, known.told = known.passed, (), now
        turn = rules.succeeded if ok else rules.failed

        def change(record: Record) -> Record:
            status = turn(breaker, rules.returned(record.status, began), now, began, passed)
            return replace(
                record if place is None else record.with_gate(place), breaker=breaker, status=status
            )

        self._write(known, change)

    def give_back(self, breaker: Breaker, began: int, now: int) -> None:
        """A call ended without a verdict."""
        known = self._fresh(breaker, now)
        if began in known.record.status.out:
            self._write(known, lambda record: replace(record, status=rules.returned(record.status, began)))

    def phase(self, breaker: Breaker, now: int) -> Phase:
        """What it was a moment ago."""
        return self._fresh(breaker, now).record.status.phase(now)

    def admit(self, breaker: Breaker, now: int) -> int | None:
        """May a call begin now? Else when to ask again. Blocks for a commit only while it is half open."""
        status = self._fresh(breaker, now).record.status
        if status.phase(now) is Phase.CLOSED:
            return None
        if status.phase(now) is Phase.OPEN:
            return rules.again(breaker, status, now)
        refused: list[int] = []

        def change(record: Record) -> Record:
            admitted = rules.admit(breaker, record.status, now)
            if admitted is None:
                soon = now + max(SECOND, breaker.rest // 10)
                refused[:] = [max(soon, rules.again(breaker, record.status, now))]
                return record
            refused.clear()
            return replace(record, breaker=breaker, status=admitted)

        self.edit(breaker.name, change, now, Record(breaker))
        return refused[0] if refused else None

    # For whoever is in charge

    def all(self) -> list[Record]:
        """All of them, by name."""
        return rules.read_all(self._ledger.note)

    def edit(
        self, name: str, change: Change, now: int, fallback: Record | None = None, anew: bool = False
    ) -> Record | None:
        """Change a breaker; what it is then. None if there is none by that name and no `fallback` to begin
        with. `anew` sets its gates also if nothing has changed. Blocks."""
        while True:
            old, version = self.read(name)
            if (start := old or fallback) is None:
                return None
            new = self._captured(start, change(start), anew)
            if new == old and not anew:
                return new
            if version == 0 or _gates_differ(start, new):
                self._list(name)
            try:
                answer = self._committer.call(_note(start, new, version, anew))
            except NoteConflict:
                continue
            assert isinstance(answer, Noted)
            self._learn(name, new, answer.version, now)
            self._compare(start, new)
            return new

    def forget(self, name: str, now: int) -> Record | None:
        """Lift its gates and forget it. Code that declares it brings it back, as new."""
        while (
            record := self.edit(
                name,
                lambda found: replace(found, status=rules.closed(found.status, now, "reset by hand")),
                now,
            )
        ) is not None:
            found, version = self.read(name)
            if found is not None and found.status.until:
                continue  # it has opened again since, and only whoever closes it lifts its gates
            with contextlib.suppress(NoteConflict):
                self._committer.call(Note(key=rules.key(name), value=None, expect=version))
                self._list(name, gone=True)
                with self._lock:
                    self._known.pop(name, None)
                break
        return record

    def declare(self, breaker: Breaker, places: Sequence[Place], now: int) -> None:
        """Make its settings what the code says, and its gates known."""

        def change(record: Record) -> Record:
            record = replace(record, breaker=breaker)
            for place in places:
                record = record.with_gate(place)
            return record

        self.edit(breaker.name, change, now, Record(breaker))
        # The name may be missing there: whoever wrote the note may have been killed before it wrote the name.
        self._list(breaker.name)

    # The note and its gates

    def _fresh(self, breaker: Breaker, now: int) -> _CachedBreaker:
        known = self._known.get(breaker.name)
        if known is None:
            with self._lock:
                known = self._known.setdefault(breaker.name, _CachedBreaker(breaker))
        if known.read_at is None or not known.read_at <= now < known.read_at + CACHE_TIME:
            record, version = self.read(breaker.name)
            self._learn(breaker.name, record or known.fallback, version, now)
        return known

    def _learn(self, name: str, record: Record, version: int, now: int) -> None:
        with self._lock:
            known = self._known.get(name)
            if known is not None and not known.writing and (version == 0 or version >= known.version):
                known.record, known.version, known.read_at = record, version, now

    def _write(self, known: _CachedBreaker, change: Change) -> None:
        with self._lock:
            known.changes.append(change)
            if known.writing:
                return
            known.writing = True
        self._go_on(known)

    def _go_on(self, known: _CachedBreaker) -> None:
        """Write what has to be written, one commit after the other; the next one starts where the last was
        heard."""
        with self._lock:
            changes, known.changes = known.changes, []
            old, new = known.record, known.record
            for change in changes:
                new = change(new)
            if new == old:
                known.writing = False
                return
        try:
            if known.version == 0 or _gates_differ(old, new):
                self._list(new.breaker.name)
            new = self._captured(old, new)
            self._committer.post(
                [_note(old, new, known.version)], partial(self._heard, known, changes, old, new)
            )
        except TowpathError as error:
            self._dropped(known, error)

    def _heard(
        self,
        known: _CachedBreaker,
        changes: Sequence[Change],
        old: Record,
        new: Record,
        replies: Sequence[Reply],
    ) -> None:
        """In the committing thread."""
        (reply,) = replies
        if isinstance(reply, Noted):
            with self._lock:
                known.record, known.version = new, reply.version
            self._compare(old, new)
        elif isinstance(reply, NoteConflict):
            try:
                record, version = self.read(new.breaker.name)
            except TowpathError as error:
                self._dropped(known, error)
                return
            with self._lock:
                known.record, known.version = record or known.fallback, version
                known.changes = [*changes, *known.changes]
        elif isinstance(reply, TowpathError):
            self._dropped(known, reply)
            return
        self._go_on(known)

    def _dropped(self, known: _CachedBreaker, error: TowpathError) -> None:
        with self._lock:
            known.changes, known.writing, known.read_at = [], False, None
        log.warning("breaker %s: what happened could not be written: %s", known.fallback.breaker.name, error)

    def _captured(self, old: Record, new: Record, anew: bool = False) -> Record:
        """The gates as they are set by hand, before they are shut and when they are opened."""
        if not (anew or _gates_differ(old, new)):
            return new
        shut = {gate.place for gate in old.gates} if old.status.until else set()
        return replace(new, gates=tuple([self._by_hand(gate, old, gate.place in shut) for gate in new.gates]))

    def _by_hand(self, gate: Gate, old: Record, shut: bool) -> Gate:
        view = self.view(gate)
        if view is None:
            return gate
        limit = old.limit if gate.cap is None else min(gate.cap, old.limit)
        cap = gate.cap if shut and view.cap == limit else view.cap
        own = limits_reason(view.why, view.paused)
        why = gate.why if rules.heard(own) is not None else own
        return replace(gate, cap=cap, why=why)

    def view(self, gate: Gate) -> QueueView | PartView | None:
        if gate.part is None:
            return self._ledger.queues().get(gate.queue)
        return self._ledger.parts(gate.queue).get(gate.part)

    def read(self, name: str) -> tuple[Record | None, int]:
        view = self._ledger.note(rules.key(name))
        if view is None:
            return None, 0
        try:
            return rules.decode(view.value), view.version
        except msgspec.MsgspecError as error:
            log.error("%s cannot be read and is taken as new: %s", view.key, error)
            return None, view.version

    def names(self) -> list[str]:
        view = self._ledger.note(INDEX)
        return rules.names(None if view is None else view.value)

    def _list(self, name: str, gone: bool = False) -> None:
        """Write its name into the index, or take it out."""
        view = self._ledger.note(INDEX)
        names = set(rules.names(None if view is None else view.value))
        right = names - {name} if gone else names | {name}
        if right == names:
            return
        note = Note(
            key=INDEX, value=msgspec.json.encode(sorted(right)), expect=0 if view is None else view.version
        )

        def again(replies: Sequence[Reply]) -> None:
            if isinstance(replies[0], NoteConflict):
                self._list(name, gone)

        self._committer.post([note], again)

    def _compare(self, old: Record, new: Record) -> None:
        if old.status.until != new.status.until:
            phase = Phase.OPEN if new.status.until else Phase.CLOSED
            self.tell(new.breaker.name, phase, new.status)

    def tell(self, name: str, phase: Phase, status: Status) -> None:
        why = f"it was opened by: {status.why}" if phase is Phase.HALF_OPEN else status.why
        event = BreakerChanged(name, phase, 0 if phase is Phase.CLOSED else status.until, why)
        log.info("%s", event)
        if self._committer.bus.wants(BreakerChanged):
            self._committer.bus.publish(event)


def _note(old: Record, new: Record, version: int, anew: bool = False) -> Note:
    gates = new.settings() if anew or _gates_differ(old, new) else ()
    return Note(key=rules.key(new.breaker.name), value=rules.encode(new), expect=version, gates=tuple(gates))


def _gates_differ(old: Record, new: Record) -> bool:
    """Do the gates have to be set?"""
    return _gate_inputs(old) != _gate_inputs(new)


def _gate_inputs(record: Record) -> tuple[object, ...]:
    """What the gates depend on."""
    if record.status.until == 0:
        return ()
    return record.status.until, record.limit, record.said, tuple([gate.place for gate in record.gates])


def running(view: QueueView | PartView) -> int:
    return view.running if isinstance(view, PartView) else view.counts.running


View = QueueView | PartView | None

CHECK_INTERVAL: Final = SECOND
"""Between two looks at all breakers."""
RARE_CHECK_INTERVAL: Final = 10 * SECOND
"""The same on a server while there are no breakers."""


class BreakerUpkeep:
    """Any number of them may look at the same time."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._looked_at: int | None = None
        self._pause = CHECK_INTERVAL
        self._next: int | None = None
        self._told: dict[str, int] = {}
        """Since when it is half open, where that was told."""
        self._made_way: dict[str, int] = {}

    def due(self, now: int) -> int | None:
        """Set gates again that somebody changed, make way where jobs are stuck in one, and tell which
        breakers are half open. When to come again, None if only a commit can bring something."""
        at = self._looked_at
        if at is not None and at <= now < at + self._pause and (self._next is None or now < self._next):
            # What changes meanwhile is seen with one of the next commits; the caretaker makes some itself.
            return self._next
        names = self._breakers.names()
        times = [self._look(name, now) for name in names]
        self._looked_at, self._pause = (
            now,
            CHECK_INTERVAL if names or not self._breakers.remote else RARE_CHECK_INTERVAL,
        )
        self._next = min((time for time in times if time is not None), default=None)
        return self._next

    def _look(self, name: str, now: int) -> int | None:
        record, _ = self._breakers.read(name)
        if record is None:
            return None
        status = record.status
        if status.until == 0:
            return None
        views = [self._breakers.view(gate) for gate in record.gates]
        if _gates_changed(record, views, now):
            self._breakers.edit(name, lambda found: found, now, anew=True)
        if status.phase(now) is Phase.OPEN:
            return status.until
        if self._told.get(name) != status.until:
            self._told[name] = status.until
            self._breakers.tell(name, Phase.HALF_OPEN, status)
        return self._make_way(record, views, now)

    def _make_way(self, record: Record, views: Sequence[View], now: int) -> int | None:
        """Jobs that fill a gate for a whole cool-down without a word do not count any more; those that have
        ended count again."""
        name, limit = record.breaker.name, record.limit
        most = max((running(view) for view in views if view is not None), default=0)
        if most < record.status.stuck:
            self._count_stuck(record, most, now)
        full = max(
            (running(view) for view in views if view is not None and running(view) >= limit == view.cap),
            default=0,
        )
        if not full:
            return None
        patience = max(record.status.until, self._made_way.get(name, 0)) + record.breaker.rest
        if now < patience:
            return patience
        self._made_way[name] = now
        log.warning("breaker %s: %d jobs fill its gate without a word; more probes may try", name, full)
        self._count_stuck(record, full, now)
        return now + record.breaker.rest

    def _count_stuck(self, record: Record, count: int, now: int) -> None:
        def change(found: Record) -> Record:
            same = found.status.until == record.status.until
            return replace(found, status=replace(found.status, stuck=count)) if same else found

        self._breakers.edit(record.breaker.name, change, now)


def _gates_changed(record: Record, views: Sequence[View], now: int) -> bool:
    """Has somebody set a limit of a gate that the breaker holds? Then more might pass than its probes."""
    for setting, view in zip(record.settings(), views, strict=True):
        opened = now < record.status.until and view is not None and view.next_at < record.status.until
        if view is None or view.cap != setting.cap or opened:
            return True
    return False
