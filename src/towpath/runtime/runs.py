"""A handler that runs, and why it may be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from towpath.core.commands import Settle
from towpath.core.job import Claim, Reason
from towpath.runtime.executors import Processes
from towpath.runtime.office import Attempt


class Run:
    """A handler that is running, or was told to stop and still is."""

    __slots__ = ("asked", "attempt", "claim", "late", "over", "started", "stuck", "task", "timer")

    def __init__(self, claim: Claim, attempt: Attempt) -> None:
        self.claim = claim
        self.attempt = attempt
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = time.monotonic()
        self.asked: Reason | None = None
        self.late = False
        self.over = False
        self.stuck = False
        """It did not stop within the grace time after its timeout."""


class TimedOut(Exception):
    """The handler ran longer than its task allows."""


def in_process(run: Run, processes: Processes | None) -> Settle:
    """Run the handler in another process; what it says at its end."""
    assert processes is not None
    answer: list[Settle] = []

    def heard(message: bytes) -> bool:
        settle = run.attempt.heard(message)
        if settle is not None:
            answer.append(settle)
        return settle is not None

    processes.run((run.claim.id, run.claim.fence), run.attempt.request(), heard)
    return answer[0]


async def until(event: asyncio.Event, so: Callable[[], bool], seconds: float) -> None:
    """Wait for the event unless it is `so` already, at most this long."""
    event.clear()
    if not so():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
