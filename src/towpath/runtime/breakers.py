"""Circuit breakers of a fleet. Each breaker is a note that all processes read, and gates in the ledger that
are set from it.

A change is a pure function of the note. It is written with compare-and-set, together with the gates, in one
command; after a conflict the note is read again and the change is applied to it. A success of a closed
breaker is written only if it resets failures; with a ratio, once a second while there are failures. No
handler waits for a commit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from towpath.core import breaker as rules
from towpath.core.breaker import BREAKERS, Breaker, BreakerGate, Phase, Record, Status, Tally, cooldown_of
from towpath.core.checks import SECOND, utc
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
"""Maximal age of the cached note. No cool-down is shorter, so no probe is taken for an ordinary call."""
Change = Callable[[Record], Record]
Place = tuple[str, str | None]


class _CachedBreaker:
    """The cached note of a breaker, and the changes of this process that are not written yet."""

    def __init__(self, breaker: Breaker) -> None:
        self.fallback = Record(breaker)
        self.record = self.fallback
        self.version = 0
        self.read_at: int | None = None
        self.changes: list[Change] = []
        """Not posted yet."""
        self.posted: list[Change] = []
        """Posted and not committed yet."""
        self.writing = False
        self.failing = False
        """The last call reported in this process failed; the note may not contain it yet."""
        self.passed: Tally = ()
        """With a ratio: successes that are not written yet."""
        self.written_at = 0
        """Time of the last write of successes."""

    def expected(self) -> Record:
        """The record after the unwritten changes of this process. Under the lock. A job must not start on a
        slot that was freed by a failure which is not in the note yet."""
        record = self.record
        for change in (*self.posted, *self.changes):
            record = change(record)
        return record


class Breakers:
    """Safe from any thread; `now` is the time of the engine's clock."""

    def __init__(self, ledger: Ledger, committer: Committer) -> None:
        self._ledger = ledger
        self._committer = committer
        self.remote = ledger.capabilities.remote
        self._known: dict[str, _CachedBreaker] = {}
        self._lock = threading.Lock()

    # Called by workers

    def is_clear(self, breaker: Breaker, now: int) -> bool:
        """Is the cached note closed and without failures? Then a job may begin; a success is not reported."""
        known = self._known.get(breaker.name)
        if known is None or known.read_at is None or breaker.ratio is not None:
            return False
        if known.failing or known.record.status.until or known.record.status.failed:
            return False
        return known.read_at <= now < known.read_at + CACHE_TIME

    def held(self, breaker: Breaker, place: Place | None, began: int, now: int) -> int | None:
        """None if a job that was claimed at `began` may run. If the breaker has opened since then, the delay
        after which the job may be claimed again: 0 if its gate holds it back. A gate that the note does not
        contain yet is added and closed."""
        known = self._cached(breaker, now)
        with self._lock:
            record, unwritten = known.expected(), known.posted or known.changes
        status = record.status
        if began >= status.until:
            return None
        if place is not None and not record.has(place):
            self._write(known, lambda record: record.with_gate(place))
        elif place is None or (began > status.since and not unwritten):
            # There is no gate, or an operator has opened it: without a delay the job would be claimed at
            # once.
            return max(0, rules.again(breaker, status, now) - now)
        return 0

    def report(self, breaker: Breaker, place: Place | None, ok: bool, began: int, now: int) -> None:
        """Report the end of a call that began at `began`. `place` is the queue and part of its job."""
        known = self._cached(breaker, now)
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
                and not (status.tally and now >= known.written_at + SECOND if breaker.ratio else resets)
            ):
                return
            known.failing = not ok
            passed, known.passed, known.written_at = known.passed, (), now
        turn = rules.succeeded if ok else rules.failed

        def change(record: Record) -> Record:
            status = turn(breaker, rules.returned(record.status, began), now, began, passed)
            return replace(
                record if place is None else record.with_gate(place), breaker=breaker, status=status
            )

        self._write(known, change)

    def give_back(self, breaker: Breaker, began: int, now: int) -> None:
        """A call ended without success or failure: its probe is free for another call."""
        known = self._cached(breaker, now)
        if began in known.record.status.out:
            self._write(known, lambda record: replace(record, status=rules.returned(record.status, began)))

    def phase(self, breaker: Breaker, now: int) -> Phase:
        """The phase by the cached note and the unwritten changes."""
        return self._expected(breaker, now).phase(now)

    def admit(self, breaker: Breaker, now: int) -> int | None:
        """None if a call may begin now, otherwise the time of the next attempt. Blocks for a commit only
        while the breaker is half open."""
        status = self._expected(breaker, now)
        if (phase := status.phase(now)) is not Phase.HALF_OPEN:
            return None if phase is Phase.CLOSED else rules.again(breaker, status, now)
        refused: list[int] = []

        def change(record: Record) -> Record:
            admitted = rules.admit(breaker, record.status, now)
            if admitted is None:
                soon = now + max(SECOND, cooldown_of(breaker) // 10)
                refused[:] = [max(soon, rules.again(breaker, record.status, now))]
                return record
            refused.clear()
            return replace(record, breaker=breaker, status=admitted)

        self.edit(breaker.name, change, now, Record(breaker))
        return refused[0] if refused else None

    # Called for operators and by declarations

    def all(self) -> list[Record]:
        """All breakers, sorted by name."""
        return list(BREAKERS.all(self._ledger).values())

    def edit(
        self, name: str, change: Change, now: int, fallback: Record | None = None, force: bool = False
    ) -> Record | None:
        """Change a breaker and return its new record; None if it does not exist and there is no `fallback`.
        `force` sets its gates even if the record does not change. Blocks."""
        while True:
            old, version = self.read(name)
            if (start := old or fallback) is None:
                return None
            new = self._with_gate_limits(start, change(start), force)
            if new == old and not force:
                return new
            try:
                answer = self._committer.call(_note(start, new, version, force))
            except NoteConflict:
                continue
            assert isinstance(answer, Noted)
            self._cache(name, new, answer.version, now)
            self._publish_change(start, new)
            return new

    def forget(self, name: str, now: int) -> Record | None:
        """Open its gates and delete the note. Code that declares the breaker creates it again."""
        while (
            record := self.edit(
                name,
                lambda found: replace(found, status=rules.closed(found.status, now, "reset by hand")),
                now,
            )
        ) is not None:
            found, version = self.read(name)
            if found is not None and found.status.until:
                continue  # The breaker has opened again; its gates must be opened first.
            with contextlib.suppress(NoteConflict):
                self._committer.call(BREAKERS.put(name, None, version))
                with self._lock:
                    self._known.pop(name, None)
                break
        return record

    def declare(self, breaker: Breaker, places: Sequence[Place], now: int) -> None:
        """Write the settings and gates that the code declares."""

        def change(record: Record) -> Record:
            record = replace(record, breaker=breaker)
            for place in places:
                record = record.with_gate(place)
            return record

        self.edit(breaker.name, change, now, Record(breaker))

    # The note and its gates

    def _expected(self, breaker: Breaker, now: int) -> Status:
        known = self._cached(breaker, now)
        with self._lock:
            return known.expected().status

    def _cached(self, breaker: Breaker, now: int) -> _CachedBreaker:
        known = self._known.get(breaker.name)
        if known is None:
            with self._lock:
                known = self._known.setdefault(breaker.name, _CachedBreaker(breaker))
        if known.read_at is None or not known.read_at <= now < known.read_at + CACHE_TIME:
            record, version = self.read(breaker.name)
            self._cache(breaker.name, record or known.fallback, version, now)
        return known

    def _cache(self, name: str, record: Record, version: int, now: int) -> None:
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
        self._write_next(known)

    def _write_next(self, known: _CachedBreaker) -> None:
        """Write the pending changes, one commit after the other; the reply to a commit starts the next
        one."""
        with self._lock:
            changes, known.changes = known.changes, []
            known.posted = changes
            old, new = known.record, known.record
            for change in changes:
                new = change(new)
            if new == old:
                known.writing, known.posted = False, []
                return
        try:
            new = self._with_gate_limits(old, new)
            self._committer.post(
                [_note(old, new, known.version)], partial(self._written, known, changes, old, new)
            )
        except TowpathError as error:
            self._drop_changes(known, error)

    def _written(
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
                known.record, known.version, known.posted = new, reply.version, []
            self._publish_change(old, new)
        elif isinstance(reply, NoteConflict):
            try:
                record, version = self.read(new.breaker.name)
            except TowpathError as error:
                self._drop_changes(known, error)
                return
            with self._lock:
                known.record, known.version = record or known.fallback, version
                known.changes, known.posted = [*changes, *known.changes], []
        elif isinstance(reply, TowpathError):
            self._drop_changes(known, reply)
            return
        self._write_next(known)

    def _drop_changes(self, known: _CachedBreaker, error: TowpathError) -> None:
        with self._lock:
            known.changes, known.posted, known.writing, known.read_at = [], [], False, None
        log.warning(
            "breaker %s: a change could not be written and is dropped: %s", known.fallback.breaker.name, error
        )

    def _with_gate_limits(self, old: Record, new: Record, force: bool = False) -> Record:
        """Read the limits that operators have set on the gates, before the breaker overwrites them and when
        it opens the gates."""
        if not (force or _gates_differ(old, new)):
            return new
        shut = {gate.place for gate in old.gates} if old.status.until else set()
        return replace(
            new,
            gates=tuple([self._with_operator_limits(gate, old, gate.place in shut) for gate in new.gates]),
        )

    def _with_operator_limits(self, gate: BreakerGate, old: Record, shut: bool) -> BreakerGate:
        view = self.view(gate)
        if view is None:
            return gate
        limit = old.limit if gate.cap is None else min(gate.cap, old.limit)
        cap = gate.cap if shut and view.cap == limit else view.cap
        own = limits_reason(view.why, view.paused)
        why = gate.why if rules.parse_reason(own) is not None else own
        return replace(gate, cap=cap, why=why)

    def view(self, gate: BreakerGate) -> QueueView | PartView | None:
        if gate.part is None:
            return self._ledger.queue(gate.queue)
        return self._ledger.parts(gate.queue).get(gate.part)

    def read(self, name: str) -> tuple[Record | None, int]:
        view = self._ledger.note(BREAKERS.key(name))
        if view is None:
            return None, 0
        try:
            return BREAKERS.decode(view), view.version
        except msgspec.MsgspecError as error:
            log.error("note %s is not a valid breaker and will be overwritten: %s", view.key, error)
            return None, view.version

    def _publish_change(self, old: Record, new: Record) -> None:
        if old.status.until != new.status.until:
            phase = Phase.OPEN if new.status.until else Phase.CLOSED
            self.publish(new.breaker.name, phase, new.status)

    def publish(self, name: str, phase: Phase, status: Status) -> None:
        why = f"it was opened by: {status.why}" if phase is Phase.HALF_OPEN else status.why
        event = BreakerChanged(name, phase, None if phase is Phase.CLOSED else utc(status.until), why)
        log.info("%s", event)
        if self._committer.bus.wants(BreakerChanged):
            self._committer.bus.publish(event)


def _note(old: Record, new: Record, version: int, force: bool = False) -> Note:
    gates = new.settings() if force or _gates_differ(old, new) else ()
    return BREAKERS.put(new.breaker.name, new, version, gates=tuple(gates))


def _gates_differ(old: Record, new: Record) -> bool:
    """True if the gates must be set again."""
    return _gate_inputs(old) != _gate_inputs(new)


def _gate_inputs(record: Record) -> tuple[object, ...]:
    """The values from which the gates are set."""
    if record.status.until == 0:
        return ()
    return record.status.until, record.limit, record.reason, tuple([gate.place for gate in record.gates])


View = QueueView | PartView | None

CHECK_INTERVAL: Final = SECOND
"""Between two checks of all breakers."""
RARE_CHECK_INTERVAL: Final = 10 * SECOND
"""The same on a server if there are no breakers."""


class BreakerUpkeep:
    """The caretaker's work on breakers. Several processes may do it at the same time."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._checked_at: int | None = None
        self._pause = CHECK_INTERVAL
        self._next: int | None = None
        self._published: dict[str, int] = {}
        """Breaker -> the end of the cool-down for which half-open was published."""
        self._admitted_at: dict[str, int] = {}

    def due(self, now: int) -> int | None:
        """Restore gates that were changed, admit more probes where stuck jobs fill a gate, and publish which
        breakers are half open. Return the time of the next check, None if only a commit can make one due."""
        at = self._checked_at
        if at is not None and at <= now < at + self._pause and (self._next is None or now < self._next):
            # A change within the pause is seen after a later commit; the caretaker itself commits regularly.
            return self._next
        records = self._breakers.all()
        times = [self._check(record, now) for record in records]
        self._checked_at, self._pause = (
            now,
            CHECK_INTERVAL if records or not self._breakers.remote else RARE_CHECK_INTERVAL,
        )
        self._next = min((time for time in times if time is not None), default=None)
        return self._next

    def _check(self, record: Record, now: int) -> int | None:
        name, status = record.breaker.name, record.status
        if status.until == 0:
            return None
        views = [self._breakers.view(gate) for gate in record.gates]
        if _gates_changed(record, views, now):
            self._breakers.edit(name, lambda found: found, now, force=True)
        if status.phase(now) is Phase.OPEN:
            return status.until
        if self._published.get(name) != status.until:
            self._published[name] = status.until
            self._breakers.publish(name, Phase.HALF_OPEN, status)
        return self._admit_more(record, views, now)

    def _admit_more(self, record: Record, views: Sequence[View], now: int) -> int | None:
        """If jobs fill a gate for a whole cool-down without a report, they count as stuck and more probes are
        admitted. The number of stuck jobs falls when some of them end."""
        name, limit = record.breaker.name, record.limit
        running = [
            (view, view.running if isinstance(view, PartView) else view.counts.running)
            for view in views
            if view is not None
        ]
        most = max((count for _, count in running), default=0)
        if most < record.status.stuck:
            self._count_stuck(record, most, now)
        full = max((count for view, count in running if count >= limit == view.cap), default=0)
        if not full:
            return None
        stuck_at = max(record.status.until, self._admitted_at.get(name, 0)) + cooldown_of(record.breaker)
        if now < stuck_at:
            return stuck_at
        self._admitted_at[name] = now
        log.warning(
            "breaker %s: %d running jobs have not reported for a whole cool-down; admitting more probes",
            name,
            full,
        )
        self._count_stuck(record, full, now)
        return now + cooldown_of(record.breaker)

    def _count_stuck(self, record: Record, count: int, now: int) -> None:
        def change(found: Record) -> Record:
            same = found.status.until == record.status.until
            return replace(found, status=replace(found.status, stuck=count)) if same else found

        self._breakers.edit(record.breaker.name, change, now)


def _gates_changed(record: Record, views: Sequence[View], now: int) -> bool:
    """Has an operator changed a limit of a gate that the breaker holds? Then more jobs than its probes could
    pass."""
    for setting, view in zip(record.settings(), views, strict=True):
        opened = now < record.status.until and view is not None and view.next_at < record.status.until
        if view is None or view.cap != setting.cap or opened:
            return True
    return False
