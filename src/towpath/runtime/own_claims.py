"""The claims of this process after a lost reply to COMMIT: a claim that the ledger holds and the process never received is released.

A batch whose reply was lost may have claimed jobs. Nothing runs them here, and no heartbeat renews them; without a release they would
wait for the end of their lease, and a job with a single attempt would be lost without having run. A release costs the job nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from towpath.core.commands import Claim, Claimed, Command, Renewed, Settle, Settled
from towpath.core.job import Job, Release, State
from towpath.core.views import Query
from towpath.errors import LostClaim
from towpath.ledger import Answer, Ledger

LOOKS: Final = (0.0, 1.0, 5.0, 30.0)
"""Seconds after a lost reply at which the ledger is read. A server may still commit a batch whose connection is already lost, so one
read is not enough there; an embedded ledger needs only the first."""
PAGE: Final = 1000
MOST_KNOWN: Final = 50_000
"""Claims above which those that have ended are looked for: a message that is never settled stays known until then."""


class OwnClaims:
    """Every claim that was answered to this process and is not settled yet. All methods are called under the commit lock."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._known: dict[str, int] = {}
        """The fence of each claimed job."""
        self._most = MOST_KNOWN
        self._repeats = ledger.repeats
        self._owners: set[str] = set()
        """Owners of the claims whose reply was lost."""
        self._looks: list[float] = []

    def applied(self, commands: Sequence[Command], answers: Sequence[Answer]) -> None:
        """Record what a batch claimed and settled."""
        known = self._known
        command: Any
        for command, answer in zip(commands, answers, strict=True):
            kind = type(answer)
            if kind is Settled or kind is LostClaim:
                if known.get(command.id) == getattr(command, "fence", None):
                    del known[command.id]
            elif kind is Claimed:
                known.update([(claim.job.id, claim.job.fence) for claim in answer.claims])  # type: ignore[union-attr]
            elif kind is Renewed:
                self._lost(command.held, answer)  # type: ignore[arg-type]
        if self._ledger.repeats != self._repeats:
            self._repeats = self._ledger.repeats
            self.failed(commands)
        if len(known) > self._most:
            self._prune()

    def failed(self, commands: Sequence[Command]) -> None:
        """A batch raised an error, or was applied a second time: whether the first transaction was committed is unknown."""
        if owners := {command.owner for command in commands if type(command) is Claim}:
            self._owners |= owners
            now = self._clock()
            looks = LOOKS if self._ledger.capabilities.remote else LOOKS[:1]
            self._looks = [now + seconds for seconds in looks]

    @property
    def doubtful(self) -> bool:
        """Is it time to read the ledger for claims whose reply was lost?"""
        return bool(self._looks) and self._clock() >= self._looks[0]

    def releases(self) -> list[Settle]:
        """Read the ledger; a release for each of its claims that this process never received."""
        known = self._known
        found: list[Settle] = []
        for job in self._running():
            if known.get(job.id) != job.fence:
                found.append(Settle(job.id, job.fence, Release()))
        del self._looks[0]
        if not self._looks:
            self._owners.clear()
        return found

    def _running(self) -> Iterator[Job]:
        """What the ledger holds for these owners."""
        for owner in self._owners:
            page: str | None = None
            while True:
                query = Query(states=(State.RUNNING,), owner=owner, oldest_first=True, bodies=False, limit=PAGE, page=page)
                found = self._ledger.find(query)
                yield from found.jobs
                if (page := found.next) is None:
                    break

    def _lost(self, held: Sequence[tuple[str, int]], answer: Renewed) -> None:
        lost = set(answer.lost)
        for id, fence in held if lost else ():
            if id in lost and self._known.get(id) == fence:
                del self._known[id]

    def _prune(self) -> None:
        jobs = self._ledger.get_many(list(self._known), bodies=False)
        self._known = {
            id: fence
            for id, fence in self._known.items()
            if (job := jobs.get(id)) is not None and job.state is State.RUNNING and job.fence == fence
        }
        self._most = max(MOST_KNOWN, 2 * len(self._known))
