"""What a worker is made with: its options, and the protocol of the attempts that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from towpath.core import checks, lanes
from towpath.core.commands import Settle
from towpath.core.job import Job, Reason
from towpath.core.lanes import Lane
from towpath.core.limits import Bounds
from towpath.errors import Refused

MAX_CONCURRENCY = 10_000
Mode = Literal["loop", "thread", "process"]


class RunnableAttempt(Protocol):
    """One run of a handler, made by the app for a claim. It never raises but for cancellation: it says how it
    ended."""

    mode: Mode
    timeout: float | None
    throttled: int | None
    """Once it has ended: microseconds after which the service it uses wants to be asked again (0: it did not
    say), if that was asked too much."""

    async def arun(self) -> Settle: ...

    def run(self) -> Settle: ...

    def request(self) -> bytes:
        """For another process: what to do."""
        ...

    def receive(self, message: bytes) -> Settle | None:
        """A message of that process; the settle if it was the last."""
        ...

    def stop(self, reason: Reason) -> None:
        """Tell the handler that it should stop."""
        ...

    def stopped(self) -> Settle:
        """How it ended because it was asked to stop, by the reason given to `stop`."""
        ...

    def ended(self, error: BaseException) -> Settle:
        """How it ended where the handler could not say so itself."""
        ...

    def refused(self, refusal: Refused) -> Settle:
        """How it ended if the ledger refused what the handler wanted along with its end."""
        ...


EndedClaim = tuple[Settle, Job, float, RunnableAttempt | None]
"""The settle of a claim, its job, the seconds its handler took, and the attempt: None if no handler was
called, or if the outcome that the handler chose was refused."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`lease` and `grace` are seconds. With `lanes`, these have the queues. `resources` are the services whose load is watched,
    `needs` says which kind of job uses one, and `sources` which queues have only such jobs."""

    queues: tuple[str, ...] = ("*",)
    concurrency: int = 32
    lease: float = 30.0
    grace: float = 30.0
    lanes: Mapping[str, Lane] = {}
    resources: Mapping[str, Bounds] = {}
    needs: Mapping[str, str] = {}
    sources: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for queue in self.queues:
            checks.pattern("queues", queue)
        checks.whole("len(queues)", len(self.queues), 1, checks.MAX_PATTERNS)
        checks.whole("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        checks.whole("lease", checks.micros(self.lease, "lease"), 1)
        checks.micros(self.grace, "grace")
        if self.lanes:
            lanes.check(self.lanes, self.concurrency)
