"""The claims of a worker that have not started, and its demand for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from towpath.core.commands import MAX_BULK
from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import SUSPECT, ClaimedJob, Outcome
from towpath.errors import TowpathError
from towpath.runtime.claims.dispatcher import Waiter
from towpath.runtime.engine import Engine
from towpath.runtime.worker.beside import BesideClaims
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, PrefetchLimits


class ClaimBuffer(Protocol):
    """The methods are called on the worker's loop. `tracks_ends`: `ended` is called for every claim that
    `next` returned, otherwise only for suspects.

    At most one suspect is held. It is claimed when it can start at once or next, and it starts next."""

    tracks_ends: bool
    prefetch: PrefetchLimits

    @property
    def lanes(self) -> tuple[LaneView, ...]: ...

    @property
    def limits(self) -> tuple[LimitView, ...]: ...

    def lane_of(self, queue: str) -> str | None:
        """The lane of a queue; from any thread."""
        ...

    def adopt(self, running: Sequence[ClaimedJob], before: ClaimBuffer) -> None:
        """Before `open`: count these running claims, which the buffer `before` returned, as claims of this
        buffer."""
        ...

    def pause(self, lanes: Collection[str]) -> None:
        """Exactly these lanes start nothing."""
        ...

    def open(self) -> None: ...

    def close(self) -> None:
        """Claim no more. May be called again."""
        ...

    def __len__(self) -> int:
        """The number of buffered claims."""
        ...

    def add(self, claims: Sequence[ClaimedJob], took: float = 0.0) -> None:
        """Add claims that arrived by a commit of `took` seconds."""
        ...

    def next(self) -> ClaimedJob | None:
        """The claim that starts next in a free slot."""
        ...

    def ended(self, claim: ClaimedJob, ok: bool, attempt: RunnableAttempt | None) -> None:
        """The run of a claim that `next` returned has ended; `ok`: with success."""
        ...

    def surplus(self) -> list[tuple[ClaimedJob, Outcome]]:
        """Take out the claims that may not start now, each with the outcome to settle it with."""
        ...

    def ask(self, free: int, kick: bool) -> None:
        """Update the demand: `free` slots and the prefetch. Without `kick` the caller posts a batch
        anyway."""
        ...

    def late(self) -> list[ClaimedJob]:
        """Take out the claims that cannot start in time, by `prefetch.keep`."""
        ...

    def find(self, id: str) -> ClaimedJob | None:
        """Take out the claim of this job, if it is buffered."""
        ...

    def clear(self) -> list[ClaimedJob]:
        """Take out all claims."""
        ...


class PlainBuffer:
    """For a worker without lanes and resources: claims start in the order of their arrival."""

    tracks_ends = False
    lanes = ()
    limits = ()

    def __init__(
        self,
        engine: Engine,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[ClaimedJob]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
        counts: ClaimCounts | None = None,
    ) -> None:
        self._engine = engine
        self._counts = counts or ClaimCounts()
        self._on_claims = deliver
        self._waiter = Waiter(options.queues, self._deliver, lease, failed, empty, self._demand)
        self._waiter.want = options.concurrency
        self._waiter.suspects = 1
        self._suspects_gone = 0
        """Suspects that the waiter received and that have ended."""
        self._slots = self._free = options.concurrency
        self.prefetch = PrefetchLimits(options.concurrency)
        (self._limit,) = self.prefetch.limits
        self._claims: deque[ClaimedJob] = deque()
        self._delivered = self._left = 0
        """The number of delivered claims (written under the commit lock), and the number of them that have
        left the buffer (written on the loop)."""
        self._room = self._asked = 0
        self._beside = BesideClaims(
            engine, options.beside, lease, self._deliver_beside, failed, self._room_beside
        )
        self._unmet = 0
        """Demand that the last claim could not satisfy: claiming again is useless until jobs are appended."""

    def open(self) -> None:
        self._engine.dispatcher.add(self._waiter)
        self._beside.open()

    def close(self) -> None:
        self._beside.close()
        self._engine.dispatcher.remove(self._waiter)

    # In the committing thread

    def _demand(self) -> tuple[int, int]:
        """The number of claims to take now, and how many of them may be jobs with a single attempt."""
        ahead = self._limit.ahead()
        room = self._slots + ahead - self._counts.held
        self._room = self._unmet = max(0, room - 1 if self._beside.waits else room)
        # Each batch claims half of the prefetch; while these jobs run, the next half is claimed.
        self._asked = min(self._room, self._free + (ahead + 1) // 2, MAX_BULK)
        unused = max(0, self._free - (self._delivered - self._left))
        self._waiter.suspects = self._suspects_gone + (unused > 0 or ahead > 0)
        self._waiter.without = self._counts.without()
        return self._asked, unused

    def _room_beside(self) -> int:
        """One slot is kept for the other queue; more are used if the own queues do not ask for them."""
        return self._slots + self._limit.ahead() - self._counts.held - self._asked

    def _deliver_beside(self, claims: list[ClaimedJob]) -> None:
        self._delivered += len(claims)
        self._on_claims(claims)

    def _deliver(self, claims: list[ClaimedJob]) -> None:
        self._delivered += len(claims)
        self._unmet = 0 if len(claims) >= self._asked else self._room - len(claims)
        self._on_claims(claims)

    # On the worker's loop

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claims: Sequence[ClaimedJob], took: float = 0.0) -> None:
        self._limit.supplied(took)
        for claim in claims:
            if claim.job.losses < SUSPECT:
                self._claims.append(claim)
            else:
                self._claims.appendleft(claim)

    def next(self) -> ClaimedJob | None:
        if not self._claims:
            return None
        self._left += 1
        self.prefetch.starts[0] += 1
        return self._claims.popleft()

    def lane_of(self, queue: str) -> str | None:
        return None

    def adopt(self, running: Sequence[ClaimedJob], before: ClaimBuffer) -> None:
        self._waiter.given = sum([claim.job.losses >= SUSPECT for claim in running])

    def pause(self, lanes: Collection[str]) -> None:
        return

    def ended(self, claim: ClaimedJob, ok: bool, attempt: RunnableAttempt | None) -> None:
        self._suspects_gone += claim.job.losses >= SUSPECT

    def surplus(self) -> list[tuple[ClaimedJob, Outcome]]:
        return []

    def ask(self, free: int, kick: bool) -> None:
        self._free = max(0, free)
        if free > 0 and not self._claims:
            self._limit.starved()
        if kick and (room := self._slots + self._limit.ahead() - self._counts.held) > self._unmet:
            self._unmet = room
            self._engine.committer.kick()

    def late(self) -> list[ClaimedJob]:
        return self._take_out(max(0, len(self._claims) - self.prefetch.keep(0)))

    def find(self, id: str) -> ClaimedJob | None:
        found = next((claim for claim in self._claims if claim.id == id), None)
        if found is not None:
            self._claims.remove(found)
            self._left += 1
            self.ended(found, False, None)
        return found

    def clear(self) -> list[ClaimedJob]:
        return self._take_out(len(self._claims))

    def _take_out(self, count: int) -> list[ClaimedJob]:
        """Take out the newest claims."""
        self._left += count
        taken = [self._claims.pop() for _ in range(count)]
        for claim in taken:
            self.ended(claim, False, None)
        return taken
