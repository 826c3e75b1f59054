"""Matches claims with those who wait for them: worker slots, long-polls and subscribers are all the same kind
of waiter.

The demand of all waiters goes to the ledger with every batch. Nothing is kept here: a claim is handed on at
once, or given back if whoever asked for it has left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from towpath.core.checks import matches
from towpath.core.commands import MAX_BULK, Claimed, Settle, Want
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.job import SUSPECT, Claim, Job, Release
from towpath.errors import TowpathError
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply


class Waiter:
    """`want` is how many claims it takes; `once` how many of them may be jobs with a single attempt (None: all). `suspects` is how many
    suspects it takes in all, of which it has got `given` (None: it takes all). With `demand` the first two are read from that function
    before every claim, under the commit lock; it may set `suspects`.
    `deliver` is called in the committing thread; it must be quick and must not raise. So are `failed`, with the error of a batch
    that could not bring anything, and `empty`, whenever a claim brought nothing for it."""

    def __init__(
        self,
        queues: Sequence[str],
        deliver: Callable[[list[Claim]], None],
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
        self._desks: dict[int, _SharedDemand] = {}

    def add(self, waiter: Waiter) -> None:
        self._committer.refuse_nested()
        with self._lock:
            desk = self._desks.get(waiter.lease)
            if new := desk is None:
                desk = self._desks[waiter.lease] = _SharedDemand(
                    self._committer, self._owner, waiter.lease, self._lock
                )
            assert desk is not None
            desk.waiters.append(waiter)
        if new:
            self._committer.add_demand(desk)
        elif waiter.want:
            self._committer.kick()

    def more(self, waiter: Waiter, n: int) -> None:
        """The waiter takes n more."""
        with self._lock:
            waiter.want += n
        self._committer.kick()

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            desk = self._desks.get(waiter.lease)
            if desk is None or waiter not in desk.waiters:
                return
            desk.waiters.remove(waiter)
            empty = not desk.waiters
            if empty:
                del self._desks[waiter.lease]
        if empty:
            self._committer.drop_demand(desk)


class _SharedDemand:
    """All waiters with one length of lease: they share a claim."""

    def __init__(self, committer: Committer, owner: str, lease: int, lock: threading.Lock) -> None:
        self._committer = committer
        self._owner = owner
        self._lease = lease
        self._lock = lock
        self.waiters: list[Waiter] = []
        self._asked: list[Waiter] = []
        """For whom the claim that is under way asks, of those who want to hear if it brings nothing."""

    def wanted(self) -> ClaimCommand | None:
        sums: dict[str, tuple[int, int, int]] = {}
        self._asked = []
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
                        self._asked.append(waiter)
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
                told = [waiter.failed for waiter in self.waiters if waiter.failed is not None]
            for failed in told:
                failed(reply)
            return
        served = self._hand_out(reply.claims) if reply.claims else ()
        for waiter in self._asked:
            if waiter.empty is not None and waiter not in served:
                waiter.empty()

    def _hand_out(self, given: Sequence[Claim]) -> Collection[Waiter]:
        deliveries: dict[Waiter, list[Claim]] = {}
        orphans: list[Claim] = []
        with self._lock:
            if len(self.waiters) == 1 and self.waiters[0].want >= len(given):
                # All that was claimed was claimed for the only one here.
                for claim in given:
                    self.waiters[0].get(claim.job)
                deliveries[self.waiters[0]] = list(given)
                given = ()
            for claim in given:
                waiter = self._taker(claim)
                if waiter is None:
                    orphans.append(claim)
                else:
                    waiter.get(claim.job)
                    deliveries.setdefault(waiter, []).append(claim)
        for waiter, claims in deliveries.items():
            waiter.deliver(claims)
        if orphans:
            self._committer.post([Settle(claim.id, claim.fence, Release()) for claim in orphans], _ignore)
        return deliveries

    def _taker(self, claim: Claim) -> Waiter | None:
        """Whoever has waited longest for a job of this queue."""
        for waiter in self.waiters:
            if waiter.takes(claim.job):
                return waiter
        return None


def _ignore(replies: Sequence[Reply]) -> None:
    """A claim that nobody took was given back; if even that fails, its lease runs out."""
