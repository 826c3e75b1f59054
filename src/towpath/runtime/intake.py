"""What a worker has claimed and not started, and how it asks for more: one line for all its queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import SUSPECT, Claim, Outcome
from towpath.errors import TowpathError
from towpath.runtime.dispatcher import Waiter
from towpath.runtime.office import Attempt, Office, WorkerOptions


class Intake(Protocol):
    """Everything but `deliver` belongs to the worker's loop. `counts`: `ended` is called for every claim that was given out, otherwise
    for suspects only.

    At most one suspect is held: it is asked for when it can start at once, or next, and it is the next to start."""

    counts: bool

    @property
    def lanes(self) -> tuple[LaneView, ...]: ...

    @property
    def limits(self) -> tuple[LimitView, ...]: ...

    def lane_of(self, queue: str) -> str | None:
        """The lane that a queue belongs to; from any thread."""
        ...

    def adopt(self, running: Sequence[Claim], before: Intake) -> None:
        """Before it is opened: these run already, given out by the one before. They count from now on as if it had been this."""
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

    def add(self, claims: Sequence[Claim]) -> None: ...

    def next(self) -> Claim | None:
        """What starts next, where there is a free slot."""
        ...

    def ended(self, claim: Claim, ok: bool, attempt: Attempt | None) -> None:
        """What `next` gave out is over; it went well, or not."""
        ...

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        """What was claimed and may not start now, taken out of what is at hand."""
        ...

    def ask(self, free: int, ahead: int, kick: bool) -> None:
        """Ask for what so many free slots can start, and so many more. Without `kick` a batch is about to follow anyway."""
        ...

    def find(self, id: str) -> Claim | None:
        """Take the claim of this job out, if it is at hand."""
        ...

    def clear(self) -> list[Claim]:
        """Take all out."""
        ...


class Plain:
    """First come, first served."""

    counts = False
    lanes = ()
    limits = ()

    def __init__(
        self,
        office: Office,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[Claim]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
    ) -> None:
        self._office = office
        self._waiter = Waiter(options.queues, deliver, lease, failed, empty)
        self._waiter.want = self._waiter.once = options.concurrency
        self._waiter.suspects = 1
        self._gone = 0
        """Suspects that were given to the waiter and are not held any more."""
        self._claims: deque[Claim] = deque()

    def open(self) -> None:
        self._office.dispatcher.add(self._waiter)

    def close(self) -> None:
        self._office.dispatcher.remove(self._waiter)

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.job.losses < SUSPECT:
                self._claims.append(claim)
            else:
                self._claims.appendleft(claim)

    def next(self) -> Claim | None:
        return self._claims.popleft() if self._claims else None

    def lane_of(self, queue: str) -> str | None:
        return None

    def adopt(self, running: Sequence[Claim], before: Intake) -> None:
        self._waiter.given = sum([claim.job.losses >= SUSPECT for claim in running])

    def pause(self, lanes: Collection[str]) -> None:
        return

    def ended(self, claim: Claim, ok: bool, attempt: Attempt | None) -> None:
        self._gone += claim.job.losses >= SUSPECT

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        return []

    def ask(self, free: int, ahead: int, kick: bool) -> None:
        waiter, at_hand = self._waiter, len(self._claims)
        waiter.once = max(0, free - at_hand)
        waiter.suspects = self._gone + (free > at_hand or ahead > 0)
        # Half of what may lie here comes with each batch: while it is run, the next half is claimed.
        waiter.at_once = free + (ahead + 1) // 2
        missing = free + ahead - at_hand - waiter.want
        if missing > 0:
            self._office.dispatcher.more(waiter, missing, kick)

    def find(self, id: str) -> Claim | None:
        found = next((claim for claim in self._claims if claim.id == id), None)
        if found is not None:
            self._claims.remove(found)
            self.ended(found, False, None)
        return found

    def clear(self) -> list[Claim]:
        left = list(self._claims)
        self._claims.clear()
        for claim in left:
            self.ended(claim, False, None)
        return left
