"""What a worker has claimed and not started, and how it asks for more: one line for all its queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from towpath.core.commands import MAX_BULK
from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import SUSPECT, Claim, Outcome
from towpath.errors import TowpathError
from towpath.runtime.claims.dispatcher import Waiter
from towpath.runtime.engine import Engine
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, PrefetchLimits


class ClaimBuffer(Protocol):
    """Everything but `deliver` belongs to the worker's loop. `counts`: `ended` is called for every claim that
    was given out, otherwise for suspects only.

    At most one suspect is held: it is asked for when it can start at once, or next, and it is the next to
    start."""

    counts: bool
    paces: PrefetchLimits

    @property
    def lanes(self) -> tuple[LaneView, ...]: ...

    @property
    def limits(self) -> tuple[LimitView, ...]: ...

    def lane_of(self, queue: str) -> str | None:
        """The lane that a queue belongs to; from any thread."""
        ...

    def adopt(self, running: Sequence[Claim], before: ClaimBuffer) -> None:
        """Before it is opened: these run already, given out by the one before. They count from now on as if
        it had been this."""
        ...

    def pause(self, lanes: Collection[str]) -> None:
        """These lanes, and no others, start nothing."""
        ...

    def open(self) -> None: ...

    def close(self) -> None:
        """Ask for nothing more. May be called again."""
        ...

    def __len__(self) -> int:
        """Claims at hand."""
        ...

    def add(self, claims: Sequence[Claim], took: float = 0.0) -> None:
        """Claims have arrived, by a commit that took so many seconds."""
        ...

    def next(self) -> Claim | None:
        """What starts next, where there is a free slot."""
        ...

    def ended(self, claim: Claim, ok: bool, attempt: RunnableAttempt | None) -> None:
        """What `next` gave out is over; it went well, or not."""
        ...

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        """What was claimed and may not start now, taken out of what is at hand."""
        ...

    def ask(self, free: int, kick: bool) -> None:
        """Ask for what so many free slots can start, and what may be claimed ahead. Without `kick` a batch is
        about to follow anyway."""
        ...

    def late(self) -> list[Claim]:
        """Take out what cannot start in time, by `paces.keep`."""
        ...

    def find(self, id: str) -> Claim | None:
        """Take the claim of this job out, if it is at hand."""
        ...

    def clear(self) -> list[Claim]:
        """Take all out."""
        ...


class PlainBuffer:
    """First come, first served."""

    counts = False
    lanes = ()
    limits = ()

    def __init__(
        self,
        engine: Engine,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[Claim]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
        account: ClaimCounts | None = None,
    ) -> None:
        self._engine = engine
        self._account = account or ClaimCounts()
        self._on_claims = deliver
        self._waiter = Waiter(options.queues, self._deliver, lease, failed, empty, self._demand)
        self._waiter.want = options.concurrency
        self._waiter.suspects = 1
        self._suspects_gone = 0
        """Suspects that were given to the waiter and are not held any more."""
        self._slots = self._free = options.concurrency
        self.paces = PrefetchLimits(options.concurrency)
        (self._pace,) = self.paces.limits
        self._claims: deque[Claim] = deque()
        self._delivered = self._gone = 0
        """Claims that were delivered (written under the commit lock), and those of them that are no longer at
        hand (by the loop)."""
        self._room = self._asked = 0
        self._unmet = 0
        """Demand that the ledger had no jobs for when it was last asked: asking again is in vain until jobs
        arrive."""

    def open(self) -> None:
        self._engine.dispatcher.add(self._waiter)

    def close(self) -> None:
        self._engine.dispatcher.remove(self._waiter)

    # In the committing thread

    def _demand(self) -> tuple[int, int]:
        """How many claims to take now, and how many of them may be jobs with a single attempt."""
        ahead = self._pace.ahead()
        self._room = self._unmet = max(0, self._slots + ahead - self._account.held)
        # Half of what may lie here comes with each batch: while it is run, the next half is claimed.
        self._asked = min(self._room, self._free + (ahead + 1) // 2, MAX_BULK)
        unused = max(0, self._free - (self._delivered - self._gone))
        self._waiter.suspects = self._suspects_gone + (unused > 0 or ahead > 0)
        return self._asked, unused

    def _deliver(self, claims: list[Claim]) -> None:
        self._delivered += len(claims)
        self._unmet = 0 if len(claims) >= self._asked else self._room - len(claims)
        self._on_claims(claims)

    # On the worker's loop

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claims: Sequence[Claim], took: float = 0.0) -> None:
        self._pace.supplied(took)
        for claim in claims:
            if claim.job.losses < SUSPECT:
                self._claims.append(claim)
            else:
                self._claims.appendleft(claim)

    def next(self) -> Claim | None:
        if not self._claims:
            return None
        self._gone += 1
        self.paces.starts[0] += 1
        return self._claims.popleft()

    def lane_of(self, queue: str) -> str | None:
        return None

    def adopt(self, running: Sequence[Claim], before: ClaimBuffer) -> None:
        self._waiter.given = sum([claim.job.losses >= SUSPECT for claim in running])

    def pause(self, lanes: Collection[str]) -> None:
        return

    def ended(self, claim: Claim, ok: bool, attempt: RunnableAttempt | None) -> None:
        self._suspects_gone += claim.job.losses >= SUSPECT

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        return []

    def ask(self, free: int, kick: bool) -> None:
        self._free = max(0, free)
        if free > 0 and not self._claims:
            self._pace.starved()
        if kick and (room := self._slots + self._pace.ahead() - self._account.held) > self._unmet:
            self._unmet = room
            self._engine.committer.kick()

    def late(self) -> list[Claim]:
        return self._take_out(max(0, len(self._claims) - self.paces.keep(0)))

    def find(self, id: str) -> Claim | None:
        found = next((claim for claim in self._claims if claim.id == id), None)
        if found is not None:
            self._claims.remove(found)
            self._gone += 1
            self.ended(found, False, None)
        return found

    def clear(self) -> list[Claim]:
        return self._take_out(len(self._claims))

    def _take_out(self, count: int) -> list[Claim]:
        """The last so many."""
        self._gone += count
        taken = [self._claims.pop() for _ in range(count)]
        for claim in taken:
            self.ended(claim, False, None)
        return taken
