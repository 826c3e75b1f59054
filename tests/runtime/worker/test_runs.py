"""Handlers that are stopped, at every moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from towpath.core.commands import Settle
from towpath.core.job import Done, Reason, Release
from towpath.runtime.worker.runs import HandlerRun, HandlerRuns


class Attempt:
    mode = "loop"
    timeout: float | None = None
    throttled = None

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.reasons: list[Reason] = []

    async def arun(self) -> Settle:
        self.began.set()
        await asyncio.sleep(60)
        return Settle("a", 1, Done())

    def stop(self, reason: Reason) -> None:
        self.reasons.append(reason)

    def stopped(self) -> Settle:
        return Settle("a", 1, Release())


def run_of(attempt: Attempt, fence: int = 1) -> HandlerRun:
    job = SimpleNamespace(id="a", fence=fence, kind="work", losses=0)
    return HandlerRun(cast("Any", SimpleNamespace(id="a", fence=fence, job=job)), cast("Any", attempt))


@pytest.mark.parametrize("begun", [False, True], ids=["before its first step", "while it runs"])
def test_a_run_that_lost_its_job_to_a_newer_claim_frees_its_slot(begun: bool) -> None:
    async def main() -> None:
        finished: list[HandlerRun] = []
        ended = asyncio.Event()

        def finish(run: HandlerRun, settle: Settle) -> None:
            assert type(settle.outcome) is Release
            finished.append(run)
            ended.set()

        runs = HandlerRuns(finish, lambda run: None, None)
        runs.open(2)
        attempt = Attempt()
        older, newer = run_of(attempt), run_of(Attempt(), fence=2)
        runs.start(older)
        if begun:
            await attempt.began.wait()
        runs.displace(older)
        older.stop_reason = Reason.LOST
        runs.interrupt(older, Reason.LOST)
        runs.start(newer)
        await asyncio.wait_for(ended.wait(), 20)
        assert finished == [older]
        assert attempt.reasons == [Reason.LOST]
        assert (runs.get("a"), len(runs), runs.running) == (newer, 1, [newer])
        runs.stopping = True
        runs.abandon()
        assert (finished, len(runs)) == ([older, newer], 0)
        runs.close()

    asyncio.run(main())
