"""Matches claims with waiters: worker slots, long-polls and subscribers.

The demand of all waiters is part of every batch. No claim is kept here: it is delivered at once, or released
if its waiter has left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence

from towpath.core.checks import matches
from towpath.core.commands import MAX_BULK, Claimed, Settle, Want
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.job import SUSPECT, ClaimedJob, Job, Release
from towpath.errors import LedgerClosed, TowpathError
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import ignore


class Waiter:
    """`want` is the number of claims it takes; `once` how many of them may be jobs with a single attempt
    (None: all). `suspects` is the number of suspects it takes in total, of which it has received `given`
    (None: no limit). With `demand`, `want` and `once` are read from that function before every claim, under
    the commit lock; the function may set `suspects`.

    `deliver`, `failed` (with the error of a failed batch) and `empty` (a claim returned no job for it) are
    called in the committing thread; they must be quick and must not raise."""

    def __init__(
        self,
        queues: Sequence[str],
        deliver: Callable[[list[ClaimedJob]], None],
        lease: int,
        failed: Callable[[TowpathError], None] | None = None,
        empty: Callable[[], None] | None = None,
        demand: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.queues = ",".join(queues)
        self.deliver = deliver
        self.failed = failed
        self.empty = empty
        self.lease = lease
        self.demand = demand
        self.want = 0
        self.once: int | None = None
        self.suspects: int | None = None
        self.given = 0

    def takes(self, job: Job) -> bool:
        suspicious = job.losses >= SUSPECT and self.suspects is not None and self.given >= self.suspects
        return self.want > 0 and not suspicious and matches(self.queues, job.queue)

    def get(self, job: Job) -> None:
        self.want -= 1
        self.given += job.losses >= SUSPECT


class Dispatcher:
    def __init__(self, committer: Committer, owner: str) -> None:
        self._committer = committer
        self._owner = owner
        self._lock = threading.Lock()
        self._demands: dict[int, _SharedDemand] = {}

    def add(self, waiter: Waiter) -> None:
        self._committer.refuse_nested()
        with self._lock:
            demand = self._demands.get(waiter.lease)
            if new := demand is None:
                demand = self._demands[waiter.lease] = _SharedDemand(
                    self._committer, self._owner, waiter.lease, self._lock
                )
            assert demand is not None
            demand.waiters.append(waiter)
        if new:
            self._committer.add_demand(demand)
        elif waiter.want:
            self._committer.kick()

    def more(self, waiter: Waiter, n: int) -> None:
        """Raise the waiter's `want` by n."""
        with self._lock:
            waiter.want += n
        self._committer.kick()

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            demand = self._demands.get(waiter.lease)
            if demand is None or waiter not in demand.waiters:
                return
            demand.waiters.remove(waiter)
            empty = not demand.waiters
            if empty:
                del self._demands[waiter.lease]
        if empty:
            self._committer.drop_demand(demand)


class _SharedDemand:
    """All waiters with the same lease: they share one claim command."""

    def __init__(self, committer: Committer, owner: str, lease: int, lock: threading.Lock) -> None:
        self._committer = committer
        self._owner = owner
        self._lease = lease
        self._lock = lock
        self.waiters: list[Waiter] = []
        self._claiming: list[Waiter] = []
        """The waiters of the current claim that have an `empty` callback."""

    def wanted(self) -> ClaimCommand | None:
        sums: dict[str, tuple[int, int, int]] = {}
        self._claiming = []
        with self._lock:
            for waiter in self.waiters:
                if waiter.demand is not None:
                    waiter.want, waiter.once = waiter.demand()
                if waiter.want > 0:
                    n, once, suspects = sums.get(waiter.queues, (0, 0, 0))
                    once += waiter.want if waiter.once is None else waiter.once
                    suspects += (
                        waiter.want if waiter.suspects is None else max(0, waiter.suspects - waiter.given)
                    )
                    sums[waiter.queues] = n + waiter.want, once, suspects
                    if waiter.empty is not None:
                        self._claiming.append(waiter)
        if not sums:
            return None
        wants = tuple(
            [
                Want(queue, min(n, MAX_BULK), min(once, MAX_BULK), suspects=min(suspects, MAX_BULK))
                for queue, (n, once, suspects) in sums.items()
            ]
        )
        return ClaimCommand(owner=self._owner, wants=wants[:1000], lease=self._lease)

    def taken(self, reply: Claimed | TowpathError) -> None:
        if not isinstance(reply, Claimed):
            with self._lock:
                callbacks = [waiter.failed for waiter in self.waiters if waiter.failed is not None]
            for failed in callbacks:
                failed(reply)
            return
        served = self._deliver(reply.claims) if reply.claims else ()
        for waiter in self._claiming:
            if waiter.empty is not None and waiter not in served:
                waiter.empty()

    def _deliver(self, given: Sequence[ClaimedJob]) -> Collection[Waiter]:
        deliveries: dict[Waiter, list[ClaimedJob]] = {}
        orphans: list[ClaimedJob] = []
        with self._lock:
            if len(self.waiters) == 1 and self.waiters[0].want >= len(given):
                # All claims are for the only waiter.
                for claim in given:
                    self.waiters[0].get(claim.job)
                deliveries[self.waiters[0]] = list(given)
                given = ()
            for claim in given:
                waiter = self._find_waiter(claim)
                if waiter is None:
                    orphans.append(claim)
                else:
                    waiter.get(claim.job)
                    deliveries.setdefault(waiter, []).append(claim)
        for waiter, claims in deliveries.items():
            waiter.deliver(claims)
        release(self._committer, orphans)
        return deliveries

    def _find_waiter(self, claim: ClaimedJob) -> Waiter | None:
        """The waiter that has waited longest for a job of this queue."""
        for waiter in self.waiters:
            if waiter.takes(claim.job):
                return waiter
        return None


def release(committer: Committer, claims: Sequence[ClaimedJob]) -> None:
    """Release claims as if they had never been claimed. If that fails, their leases expire."""
    if claims:
        with contextlib.suppress(LedgerClosed):
            committer.post([Settle(claim.id, claim.fence, Release()) for claim in claims], ignore)
