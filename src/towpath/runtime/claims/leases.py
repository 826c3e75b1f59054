"""Heartbeats: one `Renew` for all that this process holds, sent from a thread that no handler can block.

A heartbeat also tells which of it is asked to stop. That may be many seconds late, so the lookout has these
claims looked up after every commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from towpath.core.checks import SECOND
from towpath.core.commands import Renew, Renewed
from towpath.core.job import Claim, Reason
from towpath.errors import TowpathError
from towpath.ledger import Ledger
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply

RENEWALS_PER_LEASE = 3
"""Renewals per lease."""


@dataclass(slots=True)
class LeaseHolder:
    """Who holds claims that came together. `until` is the monotonic time after which nobody vouches for the
    holder any more, and the leases may run out."""

    lease: int
    on_lost: Callable[[str], None]
    on_cancel: Callable[[str, Reason], None]
    until: float | None = None


class Leases:
    """The functions given to `hold` are called in the committing thread or in the caretaker's; they must be
    quick and must not raise."""

    def __init__(self, committer: Committer, ledger: Ledger) -> None:
        self._committer = committer
        self._ledger = ledger
        self.stale = False
        """May something that is held have been asked to stop since `look`?"""
        self._held: dict[str, tuple[int, LeaseHolder]] = {}
        """The fence of each claim, and who holds it."""
        self._asked: set[tuple[str, int]] = set()
        """Claims whose holder was told to stop."""
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._beat: int | None = None
        """The lease that the thread beats for."""

    def hold(
        self,
        claims: Iterable[Claim],
        lease: int,
        on_lost: Callable[[str], None],
        on_cancel: Callable[[str, Reason], None],
        until: float | None = None,
    ) -> None:
        with self._changed:
            holder = LeaseHolder(lease, on_lost, on_cancel, until)
            self._held.update([(claim.job.id, (claim.job.fence, holder)) for claim in claims])
            # It may have been asked to stop between its claim and now.
            self.stale = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="towpath-leases", daemon=True)
                self._thread.start()
            elif self._beat is None or lease < self._beat:
                self._changed.notify_all()

    def drop(self, id: str, fence: int | None = None) -> None:
        """With a fence: only this claim, not one that the process has got of the same job since."""
        with self._changed:
            if (held := self._held.get(id)) is not None and fence in (None, held[0]):
                del self._held[id]

    def drop_all(self, held: Iterable[tuple[str, int]]) -> None:
        """(id, fence) pairs; a newer claim of the same job stays."""
        with self._changed:
            for id, fence in held:
                if (found := self._held.get(id)) is not None and found[0] == fence:
                    del self._held[id]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def beat(self, now: float) -> None:
        """Renew everything that somebody still vouches for. `now` is monotonic."""
        by_lease: dict[int, list[tuple[str, int]]] = {}
        with self._changed:
            for id in [
                id
                for id, (_, holder) in self._held.items()
                if holder.until is not None and holder.until <= now
            ]:
                del self._held[id]
            self._asked.intersection_update([(id, fence) for id, (fence, _) in self._held.items()])
            for id, (fence, holder) in self._held.items():
                by_lease.setdefault(holder.lease, []).append((id, fence))
        for lease, pairs in by_lease.items():
            self._committer.post([Renew(tuple(pairs), lease)], partial(self._heard, dict(pairs)))

    def _heard(self, sent: dict[str, int], replies: Sequence[Reply]) -> None:
        (reply,) = replies
        if isinstance(reply, TowpathError) and reply.fatal:
            # No renewal will ever succeed again.
            reply = Renewed(0, lost=tuple(sent))
        if not isinstance(reply, Renewed):
            return
        with self._changed:
            # The same job may have been claimed anew since; only the claim that was renewed can be lost.
            lost = [
                (id, held[1]) for id in reply.lost if (held := self._held.get(id)) and held[0] == sent[id]
            ]
            for id, _ in lost:
                del self._held[id]
        for id, holder in lost:
            holder.on_lost(id)
        self._tell([(id, sent[id], reason) for id, reason in reply.cancel])

    def look(self) -> None:
        """Read which of the claims are asked to stop, and tell their holders."""
        with self._changed:
            held = [id for id, (fence, _) in self._held.items() if (id, fence) not in self._asked]
        if held:
            jobs = self._ledger.get_many(held, bodies=False).values()
            self._tell(
                [
                    (job.id, job.fence, job.cancel_requested)
                    for job in jobs
                    if job.cancel_requested is not None
                ]
            )

    def _tell(self, asked: Iterable[tuple[str, int, Reason]]) -> None:
        """Each once. A request is for the claim with that fence, not for one that came later."""
        with self._changed:
            told = [
                (id, reason, held[1])
                for id, fence, reason in asked
                if (held := self._held.get(id)) and held[0] == fence and (id, fence) not in self._asked
            ]
            self._asked.update([(id, self._held[id][0]) for id, _, _ in told])
        for id, reason, holder in told:
            holder.on_cancel(id, reason)

    def _shortest(self) -> int | None:
        return min((holder.lease for _, holder in self._held.values()), default=None)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if self._closed:
                    return
                self._beat = self._shortest()
                due = None if self._beat is None else last + self._beat / SECOND / RENEWALS_PER_LEASE
                if due is None or due > time.monotonic():
                    self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                    if due is None:
                        # Nothing was held; the first beat comes a beat after the first claim.
                        last = time.monotonic()
                    continue
            last = time.monotonic()
            self.beat(last)


REFRESH_SHARE: Final = 100
"""A look is followed by a pause of so many times what it took: it may cost one hundredth of a core."""
MIN_REFRESH_PAUSE, MAX_REFRESH_PAUSE = 0.01, 0.5
"""Seconds of that pause."""


class Refreshable(Protocol):
    stale: bool
    """Has anything happened since the last look? Also the looker itself may say so."""

    def look(self) -> None: ...


class Refresher:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[Refreshable, float] = {}

    def add(self, looker: Refreshable) -> None:
        with self._lock:
            self._next[looker] = self._clock()

    def remove(self, looker: Refreshable) -> None:
        with self._lock:
            self._next.pop(looker, None)

    def go(self, changed: bool) -> float | None:
        """Let those look whose picture is stale; the seconds until somebody who had to wait may, None if
        nobody has to."""
        with self._lock:
            lookers = list(self._next.items())
        waits: list[float] = []
        for looker, due in lookers:
            if changed:
                looker.stale = True
            began = self._clock()
            if looker.stale and began < due:
                waits.append(due - began)
            elif looker.stale:
                # Before the look: what is committed during it may be missing from it.
                looker.stale = False
                try:
                    looker.look()
                except BaseException:
                    looker.stale = True
                    raise
                finally:
                    ended = self._clock()
                    with self._lock:
                        if looker in self._next:
                            self._next[looker] = ended + min(
                                MAX_REFRESH_PAUSE, max(MIN_REFRESH_PAUSE, REFRESH_SHARE * (ended - began))
                            )
        return min(waits, default=None)
