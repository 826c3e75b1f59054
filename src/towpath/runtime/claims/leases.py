"""Heartbeats: one `Renew` for all claims of this process, sent from a thread that no handler can block.

The reply to a heartbeat contains the stop requests for these claims. A heartbeat may be many seconds away, so
the `Refresher` also reads the requests after commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from towpath.core.checks import SECOND
from towpath.core.commands import Renew, Renewed
from towpath.core.job import ClaimedJob, Reason
from towpath.core.lifecycle import interrupts
from towpath.errors import TowpathError
from towpath.ledger import Ledger
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply

RENEWALS_PER_LEASE = 3
"""Renewals per lease."""


@dataclass(slots=True)
class LeaseHolder:
    """The holder of claims that arrived together. After the monotonic time `until` they are not renewed."""

    lease: int
    on_lost: Callable[[str], None]
    on_cancel: Callable[[str, Reason], None]
    until: float | None = None


class Leases:
    """The claims that this process renews. The functions given to `hold` are called in the committing thread
    or in the caretaker's thread; they must be quick and must not raise."""

    def __init__(self, committer: Committer, ledger: Ledger) -> None:
        self._committer = committer
        self._ledger = ledger
        self.stale = False
        """May there be new stop requests since `refresh`?"""
        self._held: dict[str, tuple[int, LeaseHolder]] = {}
        """Job id -> fence and holder."""
        self._requested: dict[tuple[str, int], Reason] = {}
        """The stop request that was passed to the holder, by claim (id, fence)."""
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lease: int | None = None
        """The shortest lease held; it sets the interval of the heartbeats."""

    def hold(
        self,
        claims: Iterable[ClaimedJob],
        lease: int,
        on_lost: Callable[[str], None],
        on_cancel: Callable[[str, Reason], None],
        until: float | None = None,
    ) -> None:
        with self._changed:
            holder = LeaseHolder(lease, on_lost, on_cancel, until)
            self._held.update([(claim.job.id, (claim.job.fence, holder)) for claim in claims])
            # A stop request may have been written between the claim and now.
            self.stale = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="towpath-leases", daemon=True)
                self._thread.start()
            elif self._lease is None or lease < self._lease:
                self._changed.notify_all()

    def drop(self, id: str, fence: int | None = None) -> None:
        """Stop renewing a job. With a fence: only this claim, not a newer one of the same job."""
        with self._changed:
            if (held := self._held.get(id)) is not None and fence in (None, held[0]):
                del self._held[id]

    def drop_all(self, held: Iterable[tuple[str, int]]) -> None:
        """`drop` for (id, fence) pairs; a newer claim of the same job stays."""
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

    def renew(self, now: float) -> None:
        """Send one heartbeat for all claims before their `until`. `now` is monotonic."""
        by_lease: dict[int, list[tuple[str, int]]] = {}
        with self._changed:
            for id in [
                id
                for id, (_, holder) in self._held.items()
                if holder.until is not None and holder.until <= now
            ]:
                del self._held[id]
            held = {(id, fence) for id, (fence, _) in self._held.items()}
            self._requested = {claim: why for claim, why in self._requested.items() if claim in held}
            for id, (fence, holder) in self._held.items():
                by_lease.setdefault(holder.lease, []).append((id, fence))
        for lease, pairs in by_lease.items():
            self._committer.post([Renew(tuple(pairs), lease)], partial(self._renewed, dict(pairs)))

    def _renewed(self, sent: dict[str, int], replies: Sequence[Reply]) -> None:
        (reply,) = replies
        if isinstance(reply, TowpathError) and reply.fatal:
            # No later renewal can succeed.
            reply = Renewed(0, lost=tuple(sent))
        if not isinstance(reply, Renewed):
            return
        with self._changed:
            # The process may hold a newer claim of the same job; only the renewed claim is lost.
            lost = [
                (id, held[1]) for id in reply.lost if (held := self._held.get(id)) and held[0] == sent[id]
            ]
            for id, _ in lost:
                del self._held[id]
        for id, holder in lost:
            holder.on_lost(id)
        self._pass_requests([(id, sent[id], reason) for id, reason in reply.cancel])

    def refresh(self) -> None:
        """Read the stop requests for the claims from the ledger, and pass them to the holders."""
        with self._changed:
            # A request that does not interrupt may be followed by one that does.
            held = [
                id
                for id, (fence, _) in self._held.items()
                if not interrupts(self._requested.get((id, fence)))
            ]
        if held:
            jobs = self._ledger.get_many(held, bodies=False).values()
            self._pass_requests(
                [
                    (job.id, job.fence, job.cancel_requested)
                    for job in jobs
                    if job.cancel_requested is not None
                ]
            )

    def _pass_requests(self, requests: Iterable[tuple[str, int, Reason]]) -> None:
        """Pass each request to its holder once. A request is for the claim with that fence, not for a newer
        one."""
        with self._changed:
            new = [
                (id, reason, held[1])
                for id, fence, reason in requests
                if (held := self._held.get(id))
                and held[0] == fence
                and self._requested.get((id, fence)) is not reason
            ]
            self._requested.update({(id, self._held[id][0]): reason for id, reason, _ in new})
        for id, reason, holder in new:
            holder.on_cancel(id, reason)

    def _shortest(self) -> int | None:
        return min((holder.lease for _, holder in self._held.values()), default=None)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if self._closed:
                    return
                self._lease = self._shortest()
                due = None if self._lease is None else last + self._lease / SECOND / RENEWALS_PER_LEASE
                if due is None or due > time.monotonic():
                    self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                    if due is None:
                        # Nothing was held; the first heartbeat follows one interval after the first claim.
                        last = time.monotonic()
                    continue
            last = time.monotonic()
            self.renew(last)


REFRESH_SHARE: Final = 100
"""A refresh is followed by a pause of so many times its duration, so that it uses at most one hundredth of a
core."""
MIN_REFRESH_PAUSE, MAX_REFRESH_PAUSE = 0.01, 0.5
"""Seconds of that pause."""


class Refreshable(Protocol):
    stale: bool
    """May there be a change since the last `refresh`? Set by the `Refresher` and by the object itself."""

    def refresh(self) -> None: ...


class Refresher:
    """Calls `refresh` of its objects after commits, with a pause in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[Refreshable, float] = {}

    def add(self, item: Refreshable) -> None:
        with self._lock:
            self._next[item] = self._clock()

    def remove(self, item: Refreshable) -> None:
        with self._lock:
            self._next.pop(item, None)

    def run(self, changed: bool) -> float | None:
        """Refresh the stale objects after their pause; return the seconds until the next one, None if no
        object waits. `changed`: something was committed, so all objects are stale."""
        with self._lock:
            items = list(self._next.items())
        waits: list[float] = []
        for item, due in items:
            if changed:
                item.stale = True
            began = self._clock()
            if item.stale and began < due:
                waits.append(due - began)
            elif item.stale:
                # Cleared before the read: the read may miss a commit that happens during it.
                item.stale = False
                try:
                    item.refresh()
                except BaseException:
                    item.stale = True
                    raise
                finally:
                    ended = self._clock()
                    with self._lock:
                        if item in self._next:
                            self._next[item] = ended + min(
                                MAX_REFRESH_PAUSE, max(MIN_REFRESH_PAUSE, REFRESH_SHARE * (ended - began))
                            )
        return min(waits, default=None)
