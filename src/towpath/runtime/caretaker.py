"""The caretaker reaps, expires, wakes and purges jobs that are due, fires schedules, and detects the commits
of other processes.

Every engine has one. A note with a time to live elects one caretaker of the fleet for the work; the others
stand by. Each caretaker detects the commits of other processes for its own engine. Safety does not depend on
the election: if two are elected at the same time, each step is done twice, without effect."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

from towpath.clock import Clock
from towpath.core.checks import SECOND
from towpath.core.commands import Claimed, Note, Noted, Upkeep, Upkept
from towpath.core.depths import DEPTHS, Alarm
from towpath.errors import LedgerClosed, NoteConflict, TowpathError
from towpath.escapes import get_logger
from towpath.events import Bus, CaretakerElected, QueueDeep
from towpath.ledger import Ledger, queues_matching
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import ignore

log = get_logger("towpath.upkeep")
queues_log = get_logger("towpath.queues")

CARETAKER_KEY: Final = "towpath/caretaker"
TTL: Final = 5 * SECOND
"""A dead caretaker is replaced after at most this time and `STAND_BY`. A caretaker that is slow for longer
loses the election, which is harmless."""
RENEW: Final = 2 * SECOND
"""Interval at which the elected caretaker renews its note: one commit each, even in an idle ledger."""
STAND_BY: Final = SECOND // 4
"""Interval at which the others check the note. They also claim then, because a rate limit that opens writes
nothing to the ledger."""
MIN_PAUSE, MAX_UPKEEP_PAUSE = SECOND // 20, SECOND // 4
"""Minimal pause between two upkeeps, and between two checks of the schedules. The pause between upkeeps is
`UPKEEP_SHARE` times the duration of one, within these two bounds: jobs that are due are claimed without
upkeep in a busy ledger."""
UPKEEP_SHARE: Final = 10
MAX_UPKEEP_INTERVAL: Final = SECOND
"""A ledger that sees no command for longer than half a lease assumes a clock jump and does not reap for a
while."""
SOON, SHORT_INTERVAL = 5 * SECOND // 2, 2 * SECOND // 5
"""The interval while something is due within `SOON`. Gaps below `lifecycle.LEAST` are no clock jumps, so that
a lease of one or two seconds is reaped at its end. For a ledger on a server gaps do not count as jumps."""
RETRY_PAUSE: Final = SECOND
"""Pause after an error."""
MAX_DEAD: Final = 100
"""Dead owners that one upkeep reaps."""
MIN_DOUBT, MAX_DOUBT = SECOND // 1000, SECOND // 100
"""After a commit of this process, the time until the caretaker kicks the committer in case another process
has committed as well. It doubles while this process commits, because each own batch claims anyway."""
DEAD_CHECK, REMOTE_DEAD_CHECK = SECOND // 10, SECOND * 3 // 2
"""Minimal time between two checks of the locks of other processes; the thread checks once per `SLICE` at
most. On a server a check is a statement, so the second value applies unless an owner may be dead."""
REMOTE_FACTOR: Final = 5
"""Factor of the intervals for a ledger on a server."""
REMOTE_TTL_FACTOR: Final = 3
"""Factor of `TTL` for a ledger on a server. No schedule fires until a dead caretaker is replaced."""
SLICE: Final = 0.2
"""Seconds of one sleep, so that `close` returns soon."""

Due = Callable[[int], int | None]
OnCommit = Callable[[bool], float | None]


class Caretaker:
    """`due(now)` does the engine's timed work (schedules, breakers, depths) and returns the time of the next.
    `on_commit(changed)` is called in every step; `changed`: there was a commit since the last step. It
    returns the seconds after which it must be called again, or None. `run_once` does one step without a
    thread and without sleep; `start` calls it in a thread."""

    def __init__(
        self,
        ledger: Ledger,
        committer: Committer,
        owner: str,
        clock: Clock,
        due: Due,
        on_commit: OnCommit | None = None,
    ) -> None:
        self._ledger = ledger
        self._committer = committer
        self._clock = clock
        self._commits = _CommitWatcher(ledger, committer)
        self._election = _Election(ledger, committer, owner)
        self._dead_owners = _DeadOwners(ledger)
        self._upkeep = _UpkeepTimer(committer, clock, ledger.capabilities.remote)
        self._due_work = _DueTimer(due)
        self._on_commit = on_commit
        self._logged = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="towpath-caretaker", daemon=True)

    @property
    def elected(self) -> bool:
        """True if this caretaker was elected at its last check."""
        return self._election.held_until > self._clock.now()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and give up the election. A thread that waits for a locked ledger is not joined; it ends when
        the wait ends."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(SLICE + 0.05)
        self._commits.close()
        self._election.resign()

    def run_once(self, now: int) -> int:
        """Do the work that is due at `now`; return the time of the next step, if there is no commit before.
        Raises only fatal errors."""
        try:
            changed = self._commits.check(now)
            self._upkeep.changed |= changed
            self._due_work.changed |= changed
            again = None if self._on_commit is None else self._on_commit(changed)
            dead = self._dead_owners.find(now)
            if self._election.hold(now, dead):
                if self._upkeep.run(now, dead):
                    self._dead_owners.forget_reaped()
                self._due_work.run(now)
                self._commits.discount_own()
            elif self._election.checked_at == now:
                self._committer.kick()
            self._logged = ""
        except TowpathError as error:
            if error.fatal:
                raise
            self._log_once(error)
            return now + RETRY_PAUSE
        times = [
            self._election.next(),
            self._commits.next(),
            None if again is None else now + int(again * SECOND),
        ]
        if self._election.held_until > now:
            times += [self._upkeep.next(), self._due_work.next()]
        return max(now, min(time for time in times if time is not None))

    def _log_once(self, error: TowpathError) -> None:
        """Log each type of error once until a step succeeds."""
        if error.retryable:
            self._committer.outage.noticed(error)
        elif self._logged != type(error).__name__:
            log.warning("upkeep failed and is retried every %g s: %s", RETRY_PAUSE / SECOND, error)
        self._logged = type(error).__name__

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wake = self.run_once(self._clock.now())
                seconds = min(SLICE, max(0, wake - self._clock.now()) / SECOND)
                version = self._commits.version
                if version is None or self._commits.in_doubt or self._logged:
                    self._stop.wait(seconds)
                else:
                    self._ledger.wait(version, seconds)
            except TowpathError as error:
                if error.fatal:
                    if not self._stop.is_set():
                        if not isinstance(error, LedgerClosed):
                            log.error("the caretaker of this process ends, the ledger is lost: %s", error)
                        # The batch that follows passes the error to all waiters.
                        self._committer.kick()
                    return
                self._log_once(error)
                self._stop.wait(SLICE)
            except Exception:
                log.exception("internal error in the caretaker; the caretaker continues")
                self._stop.wait(RETRY_PAUSE / SECOND)


class _CommitWatcher:
    """Detects commits of other processes, after which the standing demand must claim.

    It is registered as a demand that never claims, so it counts every batch of this process before the batch
    is applied."""

    def __init__(self, ledger: Ledger, committer: Committer) -> None:
        self._ledger = ledger
        self._committer = committer
        # Read by the first step: the ledger may be unavailable while the caretaker is made.
        self.version: int | None = None
        self._batches = 0
        self._seen_batches = 0
        self._doubt: tuple[int, int] | None = None
        self._pause = MIN_DOUBT
        committer.add_demand(self)

    @property
    def in_doubt(self) -> bool:
        """May another process have committed besides this one? The next step decides."""
        return self._doubt is not None

    def next(self) -> int | None:
        return None if self._doubt is None else self._doubt[1]

    def check(self, now: int) -> bool:
        """Was there a commit since the last step? If another process has, or may have, committed, kick
        the committer."""
        version = self._ledger.version()
        batches = self._batches
        changed = version != self.version
        if changed and batches == self._seen_batches:
            self._kick()
        elif changed:
            self._doubt = batches, now + self._pause
            self._pause = min(2 * self._pause, MAX_DOUBT)
        elif self._doubt is not None and batches != self._doubt[0]:
            # A later batch of this process has claimed already.
            self._doubt = None
        elif self._doubt is not None and not self._doubt[1] - MAX_DOUBT <= now < self._doubt[1]:
            self._kick()
        self.version, self._seen_batches = version, batches
        return changed

    def discount_own(self) -> None:
        """Do not count own batches that wrote nothing: they cannot hide the commit of another process."""
        batches = self._batches
        if self._ledger.version() == self.version:
            self._seen_batches = batches

    def _kick(self) -> None:
        self._doubt, self._pause = None, MIN_DOUBT
        self._committer.kick()

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._committer.drop_demand(self)

    def wanted(self) -> None:
        self._batches += 1

    def taken(self, reply: Claimed | TowpathError) -> None:
        """Nothing was claimed. A fatal error is raised by the next read of the ledger as well."""


class _DeadOwners:
    """Owners with an ended process. Every caretaker checks, because the elected one may be dead."""

    def __init__(self, ledger: Ledger) -> None:
        self._owners = ledger.owners
        self._pause = REMOTE_DEAD_CHECK if ledger.capabilities.remote else DEAD_CHECK
        self._checked_at = 0
        self._dead: tuple[str, ...] = ()

    def find(self, now: int) -> tuple[str, ...]:
        pause = DEAD_CHECK if self._owners.uncertain else self._pause
        if not self._checked_at <= now < self._checked_at + pause:
            self._checked_at = now
            self._dead = self._owners.dead()[:MAX_DEAD]
        return self._dead

    def forget_reaped(self) -> None:
        """Their jobs are reaped: remove them from the ledger's list."""
        if self._dead:
            self._owners.forget(self._dead)
            self._dead = ()


class _Election:
    """The election: the holder of the note is elected. A client of a server does not take part."""

    def __init__(self, ledger: Ledger, committer: Committer, owner: str) -> None:
        self._ledger = ledger
        self._committer = committer
        self._owner = owner.encode()
        self._attended = ledger.capabilities.attended
        self._note: Noted | None = None
        self._holder = ""
        """The elected owner at the last check, if it was another one."""
        self._times, self._ttl = (
            (REMOTE_FACTOR, REMOTE_TTL_FACTOR * TTL) if ledger.capabilities.remote else (1, TTL)
        )
        self.checked_at = 0
        self.held_until = 0

    def next(self) -> int:
        return self.checked_at + self._times * (STAND_BY if self._note is None else RENEW)

    def hold(self, now: int, dead: Sequence[str] = ()) -> bool:
        """Renew or try to take the note when it is time, or when the elected caretaker is dead. Return
        whether this one is elected."""
        if not self.checked_at <= now < self.next() or (self._note is None and self._holder in dead):
            before = self.held_until > now
            if not self._attended:
                self._try_to_hold(now, dead)
            self.checked_at = now
            if self.held_until > now and not before and self._committer.bus.wants(CaretakerElected):
                self._committer.bus.publish(CaretakerElected(self._owner.decode()))
        return self.held_until > now

    def _try_to_hold(self, now: int, dead: Sequence[str]) -> None:
        """Write the note if there is none, if its holder is dead, or if its fence is that of this caretaker
        (the reply to a write may have been lost)."""
        if self._note is not None and self._put(now, self._note.version):
            return
        view = self._ledger.note(CARETAKER_KEY)
        holder = "" if view is None else view.value.decode(errors="replace")
        ours = view is None or holder in dead or (self._note is not None and self._note.fence == view.fence)
        if ours and self._put(now, 0 if view is None else view.version):
            return
        self._note, self._holder, self.held_until = None, holder, 0

    def _put(self, now: int, expect: int) -> bool:
        try:
            answer = self._committer.call(
                Note(key=CARETAKER_KEY, value=self._owner, expect=expect, ttl=self._ttl)
            )
        except NoteConflict:
            return False
        assert isinstance(answer, Noted)
        self._note, self.held_until = answer, now + self._ttl
        return True

    def resign(self) -> None:
        """Delete the note, so that another caretaker can take it at once. If this fails, the note expires."""
        held, self._note, self.held_until = self._note, None, 0
        if held is not None:
            with contextlib.suppress(LedgerClosed):
                self._committer.post([Note(key=CARETAKER_KEY, value=None, expect=held.version)], ignore)


class _UpkeepTimer:
    """Runs upkeep when the ledger reports that something is due, soon after a commit, and at least once per
    `MAX_UPKEEP_INTERVAL`."""

    def __init__(self, committer: Committer, clock: Clock, remote: bool) -> None:
        self._committer = committer
        self._clock = clock
        self._most = MAX_UPKEEP_INTERVAL * (REMOTE_FACTOR if remote else 1)
        self._least = MIN_PAUSE
        self._soon = 0 if remote else SOON
        self._ran_at = 0
        self._last = Upkept(more=True)
        self.changed = True

    def next(self) -> int:
        if self._last.more:
            return self._ran_at
        due = self._most
        if self._last.next_due is not None:
            left = self._last.next_due - self._ran_at
            due = min(due, left, SHORT_INTERVAL if left <= self._soon else due)
        return self._ran_at + (self._least if self.changed else max(MIN_PAUSE, due))

    def run(self, now: int, dead: tuple[str, ...] = ()) -> bool:
        """Run upkeep if it is due. Return whether all jobs of the dead owners are reaped."""
        if self._ran_at <= now < self.next() and not dead:
            return False
        began = self._clock.now()
        answer = self._committer.call(Upkeep(dead=dead))
        assert isinstance(answer, Upkept)
        self._least = min(max(MIN_PAUSE, UPKEEP_SHARE * (self._clock.now() - began)), MAX_UPKEEP_PAUSE)
        self._ran_at, self._last, self.changed = now, answer, False
        return not answer.more


class _DueTimer:
    """Calls `due` at the time that its last call returned, and soon after a commit, which may have changed a
    schedule."""

    def __init__(self, due: Due) -> None:
        self._due = due
        self._ran_at = 0
        self._next: int | None = None
        self._logged = ""
        self.changed = True

    def next(self) -> int | None:
        return self._ran_at + MIN_PAUSE if self.changed else self._next

    def run(self, now: int) -> None:
        time = self.next()
        if now >= self._ran_at and (time is None or now < time):
            return
        self._ran_at, self.changed = now, False
        try:
            self._next = self._due(now)
            self._logged = ""
        except LedgerClosed:
            # The engine is being closed, and this thread with it.
            self._next = now + RETRY_PAUSE
        except Exception as error:
            self._next = now + RETRY_PAUSE
            if isinstance(error, TowpathError) and error.retryable:
                raise
            if self._logged != repr(error):
                self._logged = repr(error)
                log.warning(
                    "schedules, breakers or depth warnings failed and are retried every %g s: %s",
                    RETRY_PAUSE / SECOND,
                    error,
                    exc_info=not isinstance(error, TowpathError),
                )


DEPTH_CHECK = SECOND
RARE_DEPTH_CHECK = 10 * SECOND
"""The same on a server while no queue has a `warn_depth`."""
FEW_DEPTHS = 10
"""Up to this number, the queues with a `warn_depth` are read one by one, instead of all queues."""


class DepthMonitor:
    """Reports queues with more waiting jobs than their `warn_depth`."""

    def __init__(self, ledger: Ledger, bus: Bus) -> None:
        self._ledger, self._bus = ledger, bus
        self._alarm = Alarm()
        self._checked_at, self._pause = 0, 0
        self._next: int | None = None

    def due(self, now: int) -> int | None:
        """Check, at most once a second. Returns the time of the next check; None if no queue has a
        `warn_depth`."""
        if self._checked_at <= now < self._checked_at + self._pause:
            return self._next
        self._checked_at, self._pause, self._next = now, DEPTH_CHECK, now + DEPTH_CHECK
        limits = DEPTHS.all(self._ledger)
        if not limits:
            self._alarm = Alarm()
            self._pause, self._next = (
                RARE_DEPTH_CHECK if self._ledger.capabilities.remote else DEPTH_CHECK,
                None,
            )
            return None
        few = len(limits) <= FEW_DEPTHS
        views = queues_matching(self._ledger, ",".join(limits) if few else "*")
        waiting = {view.name: view.counts.waiting for view in views}
        for queue in self._alarm.passed(limits, waiting):
            queues_log.warning(
                "queue %s is deep: %d waiting, warn_depth %d", queue, waiting[queue], limits[queue]
            )
            if self._bus.wants(QueueDeep):
                self._bus.publish(QueueDeep(queue, waiting[queue], limits[queue]))
        return self._next
