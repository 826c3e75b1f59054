"""Run plans in this process: a worker for the queues of all nodes runs until the plans have ended, so that no
agents are needed. Agents that run elsewhere take part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from towpath import App
from towpath.apps.shards.service import Submission
from towpath.flows.status import PlanStatus, StepStatus

POLL = 0.1
"""Seconds between two looks at a plan."""


class Seen(msgspec.Struct, frozen=True):
    """One look at a running plan. `total` is the number of its steps, with the cleanup."""

    status: PlanStatus
    steps: tuple[StepStatus, ...]
    total: int


Report = Callable[[Seen], None]


class PlanRunner:
    """Submits plans one after the other and waits for each; stops at the first that is not done. `abort` ends
    the current plan: before its pivot it is rolled back, after it the plan is completed."""

    def __init__(self, app: App, report: Report = lambda seen: None, *, by: str | None = None) -> None:
        self._app, self._report, self._by = app, report, by
        self._current: Any = None
        self._aborted = False

    async def run(self, work: Iterable[Submission], nodes: Iterable[str]) -> list[PlanStatus]:
        """Run the plans with a worker in this process."""
        queues = tuple(f"node/{node}" for node in nodes)
        worker = asyncio.create_task(self._app.arun(queues=queues, announce=lambda startup: None))
        following = asyncio.create_task(self.follow(work))
        try:
            await asyncio.wait({worker, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                await worker  # it raises, or was stopped
            return await following
        finally:
            for task in (following, worker):
                task.cancel()
            await asyncio.gather(following, worker, return_exceptions=True)

    async def follow(self, work: Iterable[Submission]) -> list[PlanStatus]:
        """Submit the plans one after the other, and wait for agents to run them."""
        ended: list[PlanStatus] = []
        for each in work:
            if self._aborted:
                break
            self._current = await self._app.plans.asubmit(each.plan, id=each.id, by=self._by)
            ended.append(await self._watch(len(each.plan.steps)))
            if ended[-1].state != "done":
                break
        return ended

    async def abort(self, why: str) -> bool | None:
        """True: the current plan is rolled back; False: it is completed; None: the pivot decides."""
        self._aborted = True
        if self._current is None:
            return None
        answer: bool | None = await self._current.aabort(by=self._by, why=why)
        return answer

    async def _watch(self, total: int) -> PlanStatus:
        handle = self._current
        while True:
            begin = time.monotonic()
            status: PlanStatus = await handle.astatus()
            self._report(Seen(status, tuple(await handle.asteps()), total))
            if status.is_final:
                return status
            # The more steps, the longer takes a look.
            await asyncio.sleep(max(POLL, 4 * (time.monotonic() - begin)))


def run(app: App, work: Iterable[Submission], nodes: Iterable[str]) -> list[PlanStatus]:
    """Run plans to their end; return their last states, which are fewer than the plans if one failed."""
    return asyncio.run(PlanRunner(app).run(work, nodes))
