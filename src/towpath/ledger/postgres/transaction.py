"""The transaction of a batch, concurrent with other processes: its locks (see `locks`), its counts (written
as tallies), the numbers of its jobs (from a sequence), and the server's clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import psycopg
from msgspec.structs import asdict

from towpath.core.checks import SECOND
from towpath.core.commands import Command, Upkeep
from towpath.core.job import READY, RUNNING, Spec, State
from towpath.core.lifecycle import Jumps
from towpath.errors import Refused
from towpath.escapes import get_logger
from towpath.ledger.postgres.locks import (
    ROW_WAIT,
    ROW_WAIT_AGAIN,
    LockHeld,
    Locks,
    NeedsLock,
    RowsTaken,
    Survey,
)
from towpath.ledger.postgres.rows import PostgresDb, take_seqs
from towpath.ledger.tables import append
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import QueueRow, StartFacts, Transaction, is_limited

log = get_logger("towpath.postgres")

LONG_WAIT = 1.0
"""Seconds of waiting for the lock on the relations that count as an outage."""
INBOX_BATCH = 200
"""Appends of user transactions that one batch applies at most."""
_STATES = tuple(State)
_ACTIVE = frozenset({READY, RUNNING})
_COUNTS = frozenset({*_STATES, "loose"})


class AttemptState(NamedTuple):
    """The facts about a batch before an attempt, including the facts from earlier attempts."""

    survey: Survey
    spoiled: dict[str, Refused]
    locks: Locks
    conflicts: int


_queue_rows = msgspec.json.Decoder(list[QueueRow]).decode


class BeginRow(NamedTuple):
    """The row of `begin_batch`."""

    schema: int
    min_schema: int
    next_seq: int
    next_version: int
    last: int
    present: int
    """The server's clock."""
    known: bool
    """One of the first specs has a job or a tombstone already."""
    inbox: bool
    """Appends of user transactions wait in the inbox."""
    expired: bool
    oldest: int
    following: int
    queues: str | None
    suspects: bool
    quotas: bool

    @property
    def start_facts(self) -> StartFacts:
        return StartFacts(
            self.schema,
            self.min_schema,
            self.next_seq,
            self.next_version,
            self.last,
            _queue_rows(self.queues or "[]"),
            self.known,
            self.expired,
            self.suspects,
            self.quotas,
        )


class PostgresTransaction(Transaction):
    db: PostgresDb

    def __init__(
        self, db: PostgresDb, now: int, jumps: Jumps, start_facts: StartFacts, first: Sequence[Spec]
    ) -> None:
        super().__init__(db, now, jumps, start_facts, first)
        self.related = self.relates = False
        """`related`: it holds the lock on the relations. `relates`: it needed them."""
        self.gated: set[str] = set()
        self._tallies: Counter[tuple[str, str | None, State]] = Counter()
        self._version = self.next_version
        self._folded_queues: set[str] = set()
        self.notifies = False
        """Other processes must be notified: a job became ready or ended, or a setting changed."""
        self.tallies = 0
        """Tally rows that this batch wrote and did not fold."""
        self.conflicts = 0
        """Earlier attempts that ended because another transaction held rows for long."""
        self.outage = self._outage
        self.lock_timeout = "0"
        self.stalled: Callable[[int, float], None] = _ignore
        """Called after a long wait for the relations, with the ledger time and the seconds."""
        self.calls_user = False
        """The batch has settles with commit functions. It must not restart for a lock, because the functions
        would be called again."""

    @property
    def _row_wait(self) -> str:
        return ROW_WAIT if self.conflicts == 0 else ROW_WAIT_AGAIN

    def lock(self, locks: Locks, names: Iterable[str]) -> None:
        """Take the locks, before any other statement: while it waits, the batch holds no lock that others
        could wait for. `names`: queues to lock if they have limits."""
        if locks.relations:
            self._lock_relations()
            self._is_related()
        limited = {
            name for name in names if is_limited(self.queues[name]) or self.queues[name].capacity is not None
        }
        if wanted := sorted(limited | locks.queues):
            self.db.run("make_queues", (array(wanted),))
            while len(self.db.rows("lock_queues", (array(wanted),), str)) < len(wanted):
                # Another process has deleted an unused queue since it was made or found.
                self.db.run("make_queues", (array(wanted),))
            self._is_gated(wanted)

    def hold_relations(self) -> None:
        self.relates = True
        if self.related:
            return
        if self.calls_user:
            # The holder may wait for a job of this batch, but releases the relations if it does not get it.
            self._lock_relations()
        elif not self.db.one("try_relations", (self._row_wait,))[0]:
            raise NeedsLock(Locks(relations=True))
        self._is_related()

    def _lock_relations(self) -> None:
        began = time.monotonic()
        try:
            self.db.run("lock_relations", (self._row_wait, self.lock_timeout))
        except RowsTaken as taken:
            why = (
                f"another session has held the lock on keys, groups and notes for {self.lock_timeout}; "
                "`towpath doctor` names it"
            )
            raise LockHeld(why) from taken
        if (waited := time.monotonic() - began) > LONG_WAIT:
            self.stalled(self.now + int(waited * SECOND), waited)

    def _outage(self) -> bool:
        """A session has waited for the relations for long. Renewals may wait too, so the time counts as an
        outage."""
        waited = self.db.one("stalled")[0]
        if waited is None or waited <= LONG_WAIT:
            return False
        self.stalled(self.now, waited)
        return True

    def _is_related(self) -> None:
        self.related = True
        self._version = self.next_version = self.db.one("next_version")[0]

    def hold_queues(self, queues: Iterable[str]) -> None:
        if wanted := sorted(set(queues) - self.gated):
            if not (
                self._got(wanted) or (self.db.count("make_queues", (array(wanted),)) and self._got(wanted))
            ):
                raise NeedsLock(Locks(queues=frozenset(wanted)))
            self._is_gated(wanted)

    def _got(self, queues: Sequence[str]) -> bool:
        return len(self.db.rows("try_queues", (array(queues),), str)) == len(queues)

    def _is_gated(self, queues: Sequence[str]) -> None:
        """Fold and load the queues that this batch has locked: no other batch can claim from them."""
        self.flush()
        self.gated.update(queues)
        self._fold(queues)
        for name in queues:
            self.queues.pop(name, None)
            for key in [key for key in self.parts if key[0] == name]:
                del self.parts[key]
        self.load_queues(queues)

    def _fold(self, queues: Iterable[str]) -> None:
        """Add all visible tallies to the rows of these queues, which must be locked."""
        self.db.run("fold", (array(queues), self.db.one("horizon")[0]))

    def fold_queues(self, least: int) -> None:
        """Fold the queues with at least `least` tallies that no other batch has locked, including the tallies
        of this batch."""
        if found := self.db.rows("tallied", (least,), str):
            if not self.gated:  # a second time would break the order of locks
                self.db.run("make_queues", (array(found),))
            self._folded_queues = set(self.db.rows("try_queues", (array(found),), str))
            self._fold(self._folded_queues)

    def keep_up(self) -> None:
        """Fold all tallies and delete the lease rows without a running job."""
        self.fold_queues(1)
        self.db.run("stale")

    def load_queues(self, names: Iterable[str]) -> None:
        wanted = set(names)
        self._flush_before(wanted.difference(self.queues))
        super().load_queues(wanted)

    def _forget_queues(self, names: Iterable[str]) -> None:
        gone = set(names)
        super()._forget_queues(gone)
        self.gated -= gone
        self._folded_queues -= gone

    def _load_parts(self, keys: Iterable[tuple[str, str]]) -> None:
        wanted = set(keys)
        self._flush_before({queue for queue, _ in wanted.difference(self.parts)})
        super()._load_parts(wanted)

    def _flush_before(self, queues: set[str]) -> None:
        """Write the tallies of these queues before their counts are read."""
        if queues and any(queue in queues for queue, _, _ in self._tallies):
            self._flush_tallies()

    def apply_inbox(self) -> None:
        """Apply the appends that user transactions left in the inbox. The user has committed, so a spec that
        is refused now becomes a dead letter."""
        for seq, text in sorted(self.db.rows("drain_inbox", (INBOX_BATCH,), tuple[int, str])):
            before = self.snapshot()
            self.db.save()
            try:
                append.place_or_fail(self, msgspec.json.decode(text, type=list[Spec]))
                self.flush()
            except Exception as error:
                if not self.db.is_command_error(error) or isinstance(error, psycopg.IntegrityError):
                    raise
                self.db.undo()
                self.restore(before)
                log.error("append %d of the inbox cannot be applied and stays there: %s", seq, error)
                self.db.run("spoil_inbox", (seq, text, f"{type(error).__name__}: {error}"))
            self.db.keep()
            self.wrote = True

    def take_seqs(self, n: int) -> int:
        taken = take_seqs(self.db, n)
        self.next_seq = taken.stop
        return taken.start

    def move(self, moves: Counter[tuple[str, str | None, State | None, State | None]]) -> None:
        self.wrote = True
        for (queue, part, old, new), count in moves.items():
            if old is not None:
                self._count(queue, part, old, -count)
            if new is not None:
                self._count(queue, part, new, count)
                self.notifies |= new is not RUNNING
                self.suspicious |= new is READY and old is not None

    def _count(self, queue: str, part: str | None, state: State, count: int) -> None:
        self._tallies[queue, part, state] += count
        row = self.queues.get(queue)
        if row is not None:
            setattr(row, state, getattr(row, state) + count)
            if state is READY and part is None:
                row.loose += count
        if (
            part is not None
            and (state is READY or state is RUNNING)
            and (slot := self.parts.get((queue, part))) is not None
        ):
            setattr(slot, state, getattr(slot, state) + count)

    def flush(self) -> None:
        self._flush_tallies()
        if self._changed_queues:
            changed = [_settings(self.queues[name]) for name in self._changed_queues]
            assert self._changed_queues <= self.gated, "a queue's limits were changed without its lock"
            self.db.run("set_queues", (array(changed),))
            self._changed_queues.clear()
        if self._changed_parts:
            self.db.run("set_parts", (array([asdict(self.parts[key]) for key in self._changed_parts]),))
            self._changed_parts.clear()
        super().flush()

    def _flush_tallies(self) -> None:
        if rows := self._take_tallies():
            self.db.run("tally", (array(rows),))
            if self._folded_queues:
                self._fold(self._folded_queues & {str(row[0]) for row in rows})

    def _take_tallies(self) -> list[tuple[object, ...]]:
        by_place: dict[tuple[str, str | None], dict[State, int]] = {}
        for (queue, part, state), count in self._tallies.items():
            if count or (part is not None and state in _ACTIVE):
                by_place.setdefault((queue, part), {})[state] = count
        # A queue exists also if its jobs were appended and deleted by the same batch.
        listed = {queue for queue, _ in by_place}
        for queue in {queue for queue, _, _ in self._tallies} - listed:
            by_place[queue, None] = {}
        self._tallies.clear()
        self.tallies += len(by_place)
        return [
            (*place, *(counts.get(state, 0) for state in _STATES), not _ACTIVE.isdisjoint(counts))
            for place, counts in by_place.items()
        ]

    def finish(self) -> None:
        last = [] if self._folded_queues else self._take_tallies()
        self.flush()
        if self.wrote:
            self.db.run("close_batch", (array(last), self.now))
        if self.next_version != self._version:
            self.db.run("write_version", (self.next_version - 1,))

    def restore(self, mark: tuple[int, int, bool]) -> None:
        super().restore(mark)
        self._tallies.clear()


def _settings(row: QueueRow) -> dict[str, object]:
    return {name: value for name, value in asdict(row).items() if name not in _COUNTS}


def _ignore(now: int, seconds: float) -> None:
    """The default of `stalled`."""


class ServerClock:
    """Jumps of the server's clock: its advance minus the advance of the local monotonic clock.

    An outage counts as a jump, because no lease can be renewed during it: holders get time to renew before
    their jobs are reaped. The time in which sessions wait for a lock of a frozen process counts as well. An
    outage may affect some statements only (a locked table), so it ends when an upkeep succeeds.

    `fail` and `succeed` may be called from any thread, the other methods under the write lock."""

    def __init__(self) -> None:
        self.jumps = Jumps()
        # Seconds of the local monotonic clock.
        self._seen_at = time.monotonic()
        """When the server's time was last read."""
        self._good_at = self._seen_at
        """The last success before an outage."""
        self._failing = False
        self._back_at: float | None = None
        """The first success since the outage began."""

    def begin(self, present: int, real: bool) -> None:
        """Note the time at which a batch begins. `real`: it is the server's time, not a given one."""
        before, self._seen_at = self._seen_at, time.monotonic()
        self.jumps.note(present, _micros(self._seen_at - before) if real else 0)

    def begin_upkeep(self, present: int, real: bool) -> None:
        """Add the outage as a jump before an upkeep reaps leases."""
        if self._failing and real:
            now = time.monotonic()
            back_at = self._back_at or now
            self.jumps.add(present - _micros(now - back_at), _micros(back_at - self._good_at))

    def stall(self, present: int, seconds: float) -> None:
        """Add the wait of a batch for a lock as a jump: renewals may wait for the same lock."""
        self.jumps.add(present, _micros(seconds))

    def succeed(self, commands: Sequence[Command] = ()) -> None:
        now = time.monotonic()
        if self._failing and any(type(command) is Upkeep for command in commands):
            self._failing, self._back_at = False, None
        if not self._failing:
            self._good_at = now
        elif self._back_at is None:
            self._back_at = now

    def fail(self) -> None:
        self._failing, self._back_at = True, None

    @contextmanager
    def tracking(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.fail()
            raise
        self.succeed()


def _micros(seconds: float) -> int:
    return int(seconds * SECOND)
