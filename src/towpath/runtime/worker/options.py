"""The options of a worker, and the protocol of the attempts that it runs."""

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
    """One run of a handler, made for a claim. `arun` and `run` raise nothing but cancellation; every other
    end is returned as a settle."""

    mode: Mode
    timeout: float | None
    throttled: int | None
    """After the end, if the service was overloaded: the microseconds after which it may be called again (0:
    the service gave no time). Otherwise None."""
    error: BaseException | None
    """After the end, the exception of the handler if it raised one in this process."""

    async def arun(self) -> Settle: ...

    def run(self) -> Settle: ...

    def request(self) -> bytes:
        """The message that starts the handler in another process."""
        ...

    def receive(self, message: bytes) -> Settle | None:
        """Handle a message of that process; return the settle if it was the last."""
        ...

    def stop(self, reason: Reason) -> None:
        """Ask the handler to stop."""
        ...

    def stopped(self) -> Settle:
        """The settle of a handler that was stopped, by the reason given to `stop`."""
        ...

    def ended(self, error: BaseException) -> Settle:
        """The settle of a handler that ended with an error outside of its own code."""
        ...

    def refused(self, refusal: Refused) -> Settle:
        """The settle after the ledger refused a part of the first one."""
        ...


EndedClaim = tuple[Settle, Job, float, RunnableAttempt | None]
"""The settle of a claim, its job, the seconds that its handler took, and the attempt: None if no handler was
called."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`lease` and `grace` are seconds. With `lanes`, the queues of the lanes are claimed. `resources` are
    services with an adaptive limit, `needs` maps a kind of job to its resource, and `sources` a queue to the
    resource that all its jobs use. `beside` is a queue that is claimed beside the others while it has ready
    jobs."""

    queues: tuple[str, ...] = ("*",)
    concurrency: int = 32
    lease: float = 30.0
    grace: float = 30.0
    lanes: Mapping[str, Lane] = {}
    resources: Mapping[str, Bounds] = {}
    needs: Mapping[str, str] = {}
    sources: Mapping[str, str] = {}
    beside: str = ""

    def __post_init__(self) -> None:
        for queue in self.queues:
            checks.pattern("queues", queue)
        checks.whole("len(queues)", len(self.queues), 1, checks.MAX_PATTERNS)
        checks.whole("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        checks.whole("lease", checks.micros(self.lease, "lease"), 1)
        checks.micros(self.grace, "grace")
        if self.lanes:
            lanes.check(self.lanes, self.concurrency)
