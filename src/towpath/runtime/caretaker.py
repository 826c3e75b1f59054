"""The caretaker: reaps, expires, wakes and purges what is due, fires schedules, and notices what other
processes commit.

Every App has one; one in the whole fleet is elected by a note with a time to live and does the work, the
others stand by. Noticing other processes is everybody's own affair. Nothing here is needed for safety: two
that believe they are elected at the same time only do the same harmless thing twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from towpath.clock import Clock
from towpath.core.checks import SECOND
from towpath.core.commands import Claimed, Note, Noted, Upkeep, Upkept
from towpath.core.depths import KEY, Alarm, depths_of
from towpath.errors import LedgerClosed, NoteConflict, TowpathError
from towpath.escapes import get_logger
from towpath.events import Bus, CaretakerElected, QueueDeep
from towpath.ledger import Ledger
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply

log = get_logger("towpath.upkeep")
queues_log = get_logger("towpath.queues")

CARETAKER_KEY: Final = "towpath/caretaker"
TTL: Final = 5 * SECOND
"""A dead one is replaced after at most this and `STAND_BY`. Whoever is only slow for longer loses its place,
which costs nothing."""
RENEW: Final = 2 * SECOND
"""How often the elected one says that it is still there: a commit each, also in a ledger at rest."""
STAND_BY: Final = SECOND // 4
"""How often the others ask whether it is. They also look for work then: a rate limit that opens writes
nothing that a watch could notice."""
MIN_PAUSE, MAX_UPKEEP_PAUSE = SECOND // 20, SECOND // 4
"""Between two upkeeps, and between two looks at the schedules. Between two upkeeps also `SHARE` times as long
as one took, up to the longer: what is due is claimed without it where there is much to do."""
UPKEEP_SHARE: Final = 10
MAX_UPKEEP_INTERVAL: Final = SECOND
"""A ledger that is not touched for longer than half a lease takes that for a jump of its clock and spares the
job a while."""
RETRY_PAUSE: Final = SECOND
"""After an error."""
MAX_DEAD: Final = 100
"""Owners that one upkeep reaps."""
MIN_DOUBT, MAX_DOUBT = SECOND // 1000, SECOND // 100
"""How long a commit may be our own before we look for somebody else's behind it. Longer and longer while we
commit ourselves, because then every batch of our own looks as well."""
DEAD_CHECK, REMOTE_DEAD_CHECK = SECOND // 10, SECOND * 3 // 2
"""Between two looks at the locks of other processes, at least. The thread comes by once in a `SLICE`. On a
server a look is a statement, so it is less often there, unless an owner may be dead."""
REMOTE_FACTOR: Final = 5
"""How many times more seldom all of this is asked of a ledger on a server."""
REMOTE_TTL_FACTOR: Final = 3
"""How many times longer `TTL` is there: schedules stand still until a dead one is replaced."""
SLICE: Final = 0.2
"""Seconds of sleep at a time, so that `close` is prompt."""

Due = Callable[[int], int | None]
OnCommit = Callable[[bool], float | None]


class Caretaker:
    """`due(now)` fires the schedules that are due and says when the next one is. `heard(changed)` is called
    every time, with whether anything was committed since; it may ask to be called again within so many
    seconds. `run_once` is everything that it does, without a thread and without sleep; `start` calls it in a
    thread whenever there is a reason to."""

    def __init__(
        self,
        ledger: Ledger,
        committer: Committer,
        owner: str,
        clock: Clock,
        due: Due,
        heard: OnCommit | None = None,
    ) -> None:
        self._ledger = ledger
        self._committer = committer
        self._clock = clock
        self._ears = _CommitWatcher(ledger, committer)
        self._chair = _Election(ledger, committer, owner)
        self._deaths = _DeadOwners(ledger)
        self._chores = _UpkeepTimer(committer, clock, ledger.capabilities.remote)
        self._rounds = _DueTimer(due)
        self._heard = heard
        self._complained = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="towpath-caretaker", daemon=True)

    @property
    def elected(self) -> bool:
        """Is this the one that does the work, as far as it knows?"""
        return self._chair.held_until > self._clock.now()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop and make way for another. A thread that is stuck in a locked ledger is left behind; it ends by
        itself."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(SLICE + 0.05)
        self._ears.close()
        self._chair.resign()

    def run_once(self, now: int) -> int:
        """Do what is due at `now`; the time to come back, if nothing is committed before. Raises only what is
        fatal."""
        try:
            changed = self._ears.listen(now)
            self._chores.changed |= changed
            self._rounds.changed |= changed
            again = None if self._heard is None else self._heard(changed)
            dead = self._deaths.look(now)
            if self._chair.take(now, dead):
                if self._chores.do(now, dead):
                    self._deaths.bury()
                self._rounds.go(now)
                self._ears.forgive()
            elif self._chair.asked_at == now:
                self._committer.kick()
            self._complained = ""
        except TowpathError as error:
            if error.fatal:
                raise
            self._complain(error)
            return now + RETRY_PAUSE
        times = [
            self._chair.next(),
            self._ears.next(),
            None if again is None else now + int(again * SECOND),
        ]
        if self._chair.held_until > now:
            times += [self._chores.next(), self._rounds.next()]
        return max(now, min(time for time in times if time is not None))

    def _complain(self, error: TowpathError) -> None:
        """Once for each kind of trouble, until it is over."""
        if error.retryable:
            self._committer.outage.noticed(error)
        elif self._complained != type(error).__name__:
            log.warning("upkeep has to wait: %s", error)
        self._complained = type(error).__name__

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wake = self.run_once(self._clock.now())
                seconds = min(SLICE, max(0, wake - self._clock.now()) / SECOND)
                if self._ears.suspicious or self._complained:
                    self._stop.wait(seconds)
                else:
                    self._ledger.wait(self._ears.version, seconds)
            except TowpathError as error:
                if error.fatal:
                    if not (self._stop.is_set() or isinstance(error, LedgerClosed)):
                        log.error("the caretaker gives up: %s", error)
                        # Whoever waits for work hears of it by the batch that this makes.
                        self._committer.kick()
                    return
                self._complain(error)
                self._stop.wait(SLICE)
            except Exception:
                log.exception("the caretaker stumbled and goes on")
                self._stop.wait(RETRY_PAUSE / SECOND)


class _CommitWatcher:
    """Notices commits, and tells ours from those of others, which the standing demand has not seen yet.

    It is a demand that never wants anything: so it hears of every batch of our own before it is applied.
    """

    def __init__(self, ledger: Ledger, committer: Committer) -> None:
        self._ledger = ledger
        self._committer = committer
        self.version = ledger.version()
        self._batches = 0
        self._heard = 0
        self._suspect: tuple[int, int] | None = None
        self._pause = MIN_DOUBT
        committer.add_demand(self)

    @property
    def suspicious(self) -> bool:
        """Somebody else's commit may hide behind one of our own; we shall know soon."""
        return self._suspect is not None

    def next(self) -> int | None:
        return None if self._suspect is None else self._suspect[1]

    def listen(self, now: int) -> bool:
        """Has anything been committed since the last time? If it was not us, or may not have been, look for
        work."""
        version = self._ledger.version()
        batches = self._batches
        changed = version != self.version
        if changed and batches == self._heard:
            self._kick()
        elif changed:
            self._suspect = batches, now + self._pause
            self._pause = min(2 * self._pause, MAX_DOUBT)
        elif self._suspect is not None and batches != self._suspect[0]:
            # A batch of ours that began later has looked already.
            self._suspect = None
        elif self._suspect is not None and not self._suspect[1] - MAX_DOUBT <= now < self._suspect[1]:
            self._kick()
        self.version, self._heard = version, batches
        return changed

    def forgive(self) -> None:
        """Batches of our own that have written nothing so far hide nobody."""
        batches = self._batches
        if self._ledger.version() == self.version:
            self._heard = batches

    def _kick(self) -> None:
        self._suspect, self._pause = None, MIN_DOUBT
        self._committer.kick()

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._committer.drop_demand(self)

    def wanted(self) -> None:
        self._batches += 1

    def taken(self, reply: Claimed | TowpathError) -> None:
        """Nothing was wanted; what is fatal the next look at the ledger says as well."""


class _DeadOwners:
    """Owners whose process has ended. Every caretaker looks, because the elected one may be among them."""

    def __init__(self, ledger: Ledger) -> None:
        self._owners = ledger.owners
        self._pause = REMOTE_DEAD_CHECK if ledger.capabilities.remote else DEAD_CHECK
        self._looked_at = 0
        self._dead: tuple[str, ...] = ()

    def look(self, now: int) -> tuple[str, ...]:
        pause = DEAD_CHECK if self._owners.uncertain else self._pause
        if not self._looked_at <= now < self._looked_at + pause:
            self._looked_at = now
            self._dead = self._owners.dead()[:MAX_DEAD]
        return self._dead

    def bury(self) -> None:
        """Their jobs are reaped."""
        if self._dead:
            self._owners.forget(self._dead)
            self._dead = ()


class _Election:
    """The election: who holds the note is elected."""

    def __init__(self, ledger: Ledger, committer: Committer, owner: str) -> None:
        self._ledger = ledger
        self._committer = committer
        self._owner = owner.encode()
        self._note: Noted | None = None
        self._holder = ""
        """Who was elected when it was last asked, if it was not this one."""
        self._times, self._ttl = (
            (REMOTE_FACTOR, REMOTE_TTL_FACTOR * TTL) if ledger.capabilities.remote else (1, TTL)
        )
        self.asked_at = 0
        self.held_until = 0

    def next(self) -> int:
        return self.asked_at + self._times * (STAND_BY if self._note is None else RENEW)

    def take(self, now: int, dead: Sequence[str] = ()) -> bool:
        """Renew or try to get it when it is time to, or when the elected one is dead; are we elected?"""
        if not self.asked_at <= now < self.next() or (self._note is None and self._holder in dead):
            before = self.held_until > now
            self._ask(now, dead)
            self.asked_at = now
            if self.held_until > now and not before and self._committer.bus.wants(CaretakerElected):
                self._committer.bus.publish(CaretakerElected(self._owner.decode()))
        return self.held_until > now

    def _ask(self, now: int, dead: Sequence[str]) -> None:
        """Write the note if there is none, if its holder is dead, or if it is ours: the fence tells, also
        when an answer to us was lost."""
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
        """Let another one have it at once. If this fails, it runs out by itself."""
        held, self._note, self.held_until = self._note, None, 0
        if held is not None:
            with contextlib.suppress(LedgerClosed):
                self._committer.post([Note(key=CARETAKER_KEY, value=None, expect=held.version)], _ignore)


class _UpkeepTimer:
    """Upkeep in the ledger: when it says that something is due, soon after anything changed, and now and
    then."""

    def __init__(self, committer: Committer, clock: Clock, remote: bool) -> None:
        self._committer = committer
        self._clock = clock
        self._most = MAX_UPKEEP_INTERVAL * (REMOTE_FACTOR if remote else 1)
        self._least = MIN_PAUSE
        self._done_at = 0
        self._last = Upkept(more=True)
        self.changed = True

    def next(self) -> int:
        if self._last.more:
            return self._done_at
        due = (
            self._most
            if self._last.next_due is None
            else min(self._most, self._last.next_due - self._done_at)
        )
        return self._done_at + (self._least if self.changed else max(MIN_PAUSE, due))

    def do(self, now: int, dead: tuple[str, ...] = ()) -> bool:
        """Are all jobs of the dead owners reaped?"""
        if self._done_at <= now < self.next() and not dead:
            return False
        began = self._clock.now()
        answer = self._committer.call(Upkeep(dead=dead))
        assert isinstance(answer, Upkept)
        self._least = min(max(MIN_PAUSE, UPKEEP_SHARE * (self._clock.now() - began)), MAX_UPKEEP_PAUSE)
        self._done_at, self._last, self.changed = now, answer, False
        return not answer.more


class _DueTimer:
    """The schedules: at the time that the last round named, and soon after anything changed, which may be a
    schedule."""

    def __init__(self, due: Due) -> None:
        self._due = due
        self._gone_at = 0
        self._next: int | None = None
        self._complained = ""
        self.changed = True

    def next(self) -> int | None:
        return self._gone_at + MIN_PAUSE if self.changed else self._next

    def go(self, now: int) -> None:
        time = self.next()
        if now >= self._gone_at and (time is None or now < time):
            return
        self._gone_at, self.changed = now, False
        try:
            self._next = self._due(now)
            self._complained = ""
        except LedgerClosed:
            # The app is being closed, and this thread with it.
            self._next = now + RETRY_PAUSE
        except Exception as error:
            self._next = now + RETRY_PAUSE
            if isinstance(error, TowpathError) and error.retryable:
                raise
            if self._complained != repr(error):
                self._complained = repr(error)
                log.warning("schedules have to wait: %s", error, exc_info=not isinstance(error, TowpathError))


def _ignore(replies: Sequence[Reply]) -> None:
    """Nobody waits for it."""


DEPTH_CHECK = SECOND
RARE_DEPTH_CHECK = 10 * SECOND
"""The same on a server while no queue has a depth to warn at."""


class Host(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def bus(self) -> Bus: ...


class DepthMonitor:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._alarm = Alarm()
        self._looked_at, self._pause = 0, 0
        self._next: int | None = None

    def due(self, now: int) -> int | None:
        """Look, at most once a second; when to look again, None if no queue has a depth to warn at."""
        if self._looked_at <= now < self._looked_at + self._pause:
            return self._next
        ledger = self._host.ledger
        self._looked_at, self._pause, self._next = now, DEPTH_CHECK, now + DEPTH_CHECK
        limits = depths_of(ledger.note(KEY))
        if not limits:
            self._alarm = Alarm()
            self._pause, self._next = RARE_DEPTH_CHECK if ledger.capabilities.remote else DEPTH_CHECK, None
            return None
        waiting = {name: view.counts.waiting for name, view in self._host.ledger.queues().items()}
        for queue in self._alarm.passed(limits, waiting):
            queues_log.warning(
                "queue %s is deep: %d waiting, warn_depth %d", queue, waiting[queue], limits[queue]
            )
            if self._host.bus.wants(QueueDeep):
                self._host.bus.publish(QueueDeep(queue, waiting[queue], limits[queue]))
        return self._next
