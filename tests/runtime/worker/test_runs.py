"""Handlers that are stopped, at every moment."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.waiting import WAIT
from towpath.core.commands import Settle
from towpath.core.job import Done, Reason, Release
from towpath.runtime.worker.runs import (
    TICK,
    BlockedLoop,
    HandlerRun,
    HandlerRuns,
    LoopMonitor,
    report_is_due,
)


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


@pytest.mark.parametrize("first", [1.5, 1.9, 2.3])
def test_a_blocked_loop_is_reported_at_each_doubling_and_at_the_limit(first: float) -> None:
    reports, seconds = [0.0], first
    while seconds < 200:
        if report_is_due(seconds, reports[-1], 60.0):
            reports.append(seconds)
        seconds += TICK
    assert [each for each in reports if 60 <= each < 60 + TICK]
    assert len(reports) <= 9
    assert not report_is_due(1.4, 0.0, 1.0)


def test_the_monitor_reports_at_its_limit() -> None:
    """The loop is blocked until the report arrives."""
    reports: list[BlockedLoop] = []
    over = threading.Event()

    def blocked(report: BlockedLoop) -> None:
        reports.append(report)
        if report.seconds >= 2.2:
            over.set()

    async def main() -> None:
        monitor = LoopMonitor(asyncio.get_running_loop(), blocked, 2.2)
        assert over.wait(WAIT)
        monitor.close()

    asyncio.run(main())
    assert (reports[0].again, reports[-1].task is None) == (False, False)
