"""Waiting for results without polling, from threads and from coroutines; the other methods of a handle."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import work
from tests.support.waiting import auntil, until
from towpath import App, JobHandle, Snooze, State, commands, current
from towpath.core.checks import SECOND
from towpath.errors import JobCanceled, JobFailed, LedgerClosed, NotRevivable, UnknownJob


def double(n: int) -> int:
    if n < 0:
        raise ValueError("negative")
    return 2 * n


def test_a_result_that_is_there(app: App) -> None:
    handle = app.task(double).enqueue(4)
    work(app)
    assert handle.result() == 8
    assert asyncio.run(handle.aresult()) == 8
    assert handle.finished().state is State.DONE
    assert app.job(handle.id).result() == 8


def test_the_history_of_attempts(app: App) -> None:
    """A failure, a snooze and a success: the history has the first two, and the done job no error."""

    @app.task(backoff=0, max_attempts=3)
    def flaky() -> int:
        attempt = current().attempt
        if attempt == 1:
            raise ValueError("négatif")
        if attempt == 2:
            raise Snooze(0)
        return attempt

    before = datetime.now(UTC)
    handle = flaky.enqueue()
    assert handle.history() == []
    work(app)
    assert handle.result() == 3
    failed, snoozed = handle.history()
    assert [(end.number, end.outcome, end.counted) for end in (failed, snoozed)] == [
        (1, "retried", True),
        (2, "snoozed", True),
    ]
    assert (failed.error or "").startswith("ValueError: négatif\n\nTraceback")
    assert snoozed.error is None
    assert failed.worker == snoozed.worker == app.engine.owner
    assert before - timedelta(seconds=60) < failed.started_at <= failed.ended_at <= snoozed.started_at
    assert failed.ended_at.tzinfo is UTC
    assert asyncio.run(handle.ahistory()) == [failed, snoozed]
    job = app.engine.ledger.get(handle.id)
    assert job is not None
    assert (job.error, job.attempts, job.attempts_used) == (None, 3, 2)


def test_the_history_of_a_dead_letter_that_is_retried(app: App) -> None:
    handle = app.task(max_attempts=2, backoff=0)(double).enqueue(-1)
    work(app)
    handle.retry()
    work(app)
    assert [(end.number, end.outcome) for end in handle.history()] == [
        (1, "retried"),
        (2, "failed"),
        (3, "retried"),
        (4, "failed"),
    ]


def test_the_history_of_an_unknown_job(app: App) -> None:
    with pytest.raises(UnknownJob):
        app.job("nothing").history()
    with pytest.raises(UnknownJob):
        asyncio.run(app.job("nothing").ahistory())


def test_a_waiting_thread_is_woken(app: App) -> None:
    task = app.task(double)
    handle = task.enqueue(4)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append((handle.result(20), time.perf_counter())))
    thread.start()
    until(lambda: app.engine.watch._waiting)
    settled = time.perf_counter()
    work(app)
    thread.join()
    [(value, woken)] = got
    assert value == 8
    assert woken - settled < 5, "it was woken, not found by some slow look"


def watchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "towpath-watch"}


def test_many_waiters_share_a_thread(app: App) -> None:
    before = watchers()  # the thread of an app that was closed a moment ago may still be ending
    task = app.task(double)
    handles = task.enqueue_many([task.of(n) for n in range(300)])

    async def main() -> list[int]:
        waiting = [asyncio.create_task(each.aresult(30)) for each in handles]
        await auntil(lambda: len(app.engine.watch._waiting) == len(handles))
        assert len(watchers() - before) == 1
        await asyncio.to_thread(work, app)
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [2 * n for n in range(300)]
    assert not app.engine.watch._waiting


def test_a_failure_and_a_cancellation_are_raised(app: App) -> None:
    task = app.task(max_attempts=1)(double)
    failing, canceled = task.enqueue(-1), task.options(delay=60).enqueue(1)
    assert canceled.cancel() is True
    assert canceled.cancel() is False
    work(app)
    with pytest.raises(JobFailed, match="negative") as failed:
        failing.result(1)
    assert (failed.value.id, failed.value.reason) == (failing.id, "exhausted")
    with pytest.raises(JobCanceled) as stopped:
        asyncio.run(canceled.aresult(1))
    assert (stopped.value.id, stopped.value.reason) == (canceled.id, "requested")


def test_too_late(app: App) -> None:
    handle = app.task(double).options(delay=60).enqueue(1)
    with pytest.raises(TimeoutError, match="scheduled"):
        handle.result(0.01)
    with pytest.raises(TimeoutError, match="scheduled"):
        asyncio.run(handle.aresult(0))
    assert not app.engine.watch._waiting


def test_retry(app: App) -> None:
    task = app.task(max_attempts=1)(double)
    handle = task.enqueue(-1)
    work(app)
    handle.retry()
    assert handle.status().state is State.READY
    work(app)
    asyncio.run(handle.aretry())
    assert asyncio.run(handle.acancel()) is True
    done = task.enqueue(1)
    work(app)
    with pytest.raises(NotRevivable, match="it is done"):
        done.retry()


def test_a_job_that_is_not_there(app: App) -> None:
    handle = app.job("nowhere")
    calls: list[Any] = [
        handle.result,
        handle.status,
        handle.explain,
        handle.retry,
        lambda: asyncio.run(handle.aresult()),
    ]
    for call in calls:
        with pytest.raises(UnknownJob, match="nowhere"):
            call()
    assert handle.cancel() is False


def test_a_job_that_is_deleted_while_a_caller_waits_for_it(app: App) -> None:
    handle = app.task(double).options(retention=0).enqueue(1)
    got: list[object] = []

    def wait() -> None:
        try:
            got.append(handle.result(20))
        except UnknownJob as error:
            got.append(error)

    answer = app.engine.call(commands.Claim(owner="me", wants=(commands.Want("*"),), lease=SECOND))
    assert isinstance(answer, commands.Claimed)
    [claim] = answer.claims
    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: app.engine.watch._waiting)
    app.engine.call_all([commands.Settle(claim.id, claim.fence, commands.Done(b"2")), commands.Upkeep()])
    thread.join()
    [outcome] = got
    # In one transaction the job finishes and is deleted: the waiter finds no job. On PostgreSQL an upkeep has
    # a transaction of its own, so the waiter may read the result before.
    assert isinstance(outcome, UnknownJob) or (app.ledger.capabilities.remote and outcome == 2)
    assert app.ledger.get(handle.id) is None


def test_explain(app: App) -> None:
    handle = app.task(double).enqueue(1)
    assert "first in queue" in str(handle.explain())
    assert repr(handle) == f"<job {handle.id}>"


def test_closing_wakes_all_waiters(url: str) -> None:
    got: list[BaseException] = []
    with App(url) as app:
        handle: JobHandle[int] = app.task(double).enqueue(1)

        def wait() -> None:
            try:
                handle.result()
            except LedgerClosed as error:
                got.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: app.engine.watch._waiting)
    thread.join()
    assert len(got) == 1


OTHER = """
import sys, towpath
sys.path.insert(0, ".")
from tests.support.running import work
from tests.tasks.test_handles import double
with towpath.App(sys.argv[1]) as app:
    app.task(double)
    work(app)
"""


def test_another_process_wakes_us(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with App(url) as app:
        handle = app.task(double).enqueue(21)
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen([sys.executable, "-c", OTHER, url], cwd=root) as process:
            assert handle.result(30) == 42
        assert process.returncode == 0
