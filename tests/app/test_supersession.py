"""A newer job for the same key, and `app.cancel(key)`: the running handler receives the request at once, not
with its next heartbeat.

No test here sends a heartbeat: with a lease of ten minutes the first is due after more than three.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.running import worked
from towpath import App, State, current
from towpath.commands import Claim, Claimed, Query, Want
from towpath.core.job import Reason
from towpath.errors import JobCanceled

LEASE = 600


def test_the_newer_job_stops_the_running_one_and_starts_after_it(app: App) -> None:
    log: list[str] = []
    started = asyncio.Event()

    @app.task(name="sync")
    async def sync(text: str) -> str:
        log.append(f"{text} begins")
        started.set()
        try:
            if text == "old":
                await asyncio.sleep(600)
        finally:
            log.append(f"{text} ends")
        return text

    async def main() -> None:
        path = sync.options(key="path:/a", on_conflict="replace")
        old = await path.aenqueue("old")
        await started.wait()
        asked = time.monotonic()
        new = await path.aenqueue("new")
        assert await new.aresult(20) == "new"
        assert time.monotonic() - asked < 5
        ended = await old.afinished(20)
        assert (ended.state, ended.reason, ended.attempts) == (State.CANCELED, Reason.SUPERSEDED, 1)

    worked(app, main, lease=LEASE)
    assert log == ["old begins", "old ends", "new begins", "new ends"]


def test_dependents_of_a_job_superseded_while_it_runs_follow_the_newer(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="load")
    async def load(n: int) -> int:
        started.set()
        if n == 1:
            await asyncio.sleep(600)
        return n

    @app.task(name="last")
    def last() -> str:
        return "ran"

    async def main() -> None:
        path = load.options(key="path:/a", on_conflict="replace")
        old = await path.aenqueue(1)
        dependent = await last.options(after=old).aenqueue()
        await started.wait()
        newer = await path.aenqueue(2)
        assert await dependent.aresult(20) == "ran"
        ended = [(await job.afinished(20)).finished_at for job in (old, newer, dependent)]
        assert ended == sorted(filter(None, ended))
        assert old.status().reason is Reason.SUPERSEDED

    worked(app, main, lease=LEASE)


def test_only_the_newest_follows_a_handler_in_a_thread(app: App) -> None:
    ran: list[int] = []
    started, all_there = threading.Event(), threading.Event()

    @app.task(name="sync")
    def sync(n: int) -> int:
        ran.append(n)
        started.set()
        while n == 0 and not (all_there.wait(0.01) and current().cancelled):
            pass
        if current().cancelled:
            raise InterruptedError("asked to stop")
        return n

    async def main() -> list[str]:
        path = sync.options(key="path:/a", on_conflict="replace")
        jobs = [await path.aenqueue(0)]
        await asyncio.to_thread(started.wait)
        jobs += [await path.aenqueue(n) for n in (1, 2, 3)]
        all_there.set()
        assert await jobs[3].aresult(20) == 3
        return [f"{job.state}/{job.reason}" for job in [await each.afinished(20) for each in jobs]]

    assert worked(app, main, lease=LEASE) == 3 * ["canceled/superseded"] + ["done/"]
    assert ran == [0, 3]


def test_cancel_by_key(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="wait")
    async def wait() -> None:
        started.set()
        await asyncio.sleep(600)

    async def main() -> None:
        running = await wait.options(key="k", on_conflict="serial").aenqueue()
        await started.wait()
        waiting = await wait.options(key="k", on_conflict="serial").aenqueue()
        other = await wait.options(key="other", delay=60).aenqueue()
        assert await app.acancel("k") == 2
        for handle in (running, waiting):
            with pytest.raises(JobCanceled) as caught:
                await handle.aresult(20)
            assert caught.value.reason == "requested"
        assert other.status().state is State.SCHEDULED
        assert await app.acancel("k") == 0
        assert await asyncio.to_thread(app.cancel, "other") == 1

    worked(app, main, lease=LEASE)


def test_a_claim_that_was_asked_before_it_was_held(app: App) -> None:
    """A request may be written between the commit of a claim and the time when the worker holds it: `hold`
    marks the leases as stale."""
    task = app.task(name="t")(lambda: None)
    id = task.enqueue().id
    answer = app.engine.call(Claim(owner=app.engine.owner, wants=(Want("*"),), lease=LEASE * 1_000_000))
    assert isinstance(answer, Claimed)
    app.job(id).cancel()
    requests: list[tuple[str, Reason]] = []
    app.engine.leases.refresh()
    app.engine.leases.hold(
        answer.claims, 600_000_000, lambda lost: None, lambda job, why: requests.append((job, why))
    )
    assert app.engine.leases.stale
    app.engine.leases.refresh()
    app.engine.leases.refresh()
    app.engine.leases.renew(0.0)
    app.engine.call(Claim(owner=app.engine.owner, wants=(Want("none"),), lease=1))
    assert requests == [(id, Reason.REQUESTED)]


WORKER = """
import asyncio, sys
import towpath

app = towpath.App(sys.argv[1])

@app.task(name="sync")
async def sync(text: str) -> str:
    print("begins", text, flush=True)
    if text == "old":
        await asyncio.sleep(600)
    return text

app.run(lease=600)
"""


def test_from_another_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with App(url) as app:

        @app.task(name="sync")
        async def sync(text: str) -> str:
            return text

        path = sync.options(key="path:/a", on_conflict="replace")
        old = path.enqueue("old")
        worker = subprocess.Popen([sys.executable, "-c", WORKER, url], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline() == "begins old\n"
            asked = time.monotonic()
            new = path.enqueue("new")
            assert new.result(20) == "new"
            took = time.monotonic() - asked
            assert took < 1.0, took
            assert old.status().reason is Reason.SUPERSEDED
            assert worker.stdout.readline() == "begins new\n"
            again = path.enqueue("old")
            assert worker.stdout.readline() == "begins old\n"
            assert app.cancel("path:/a") == 1
            assert again.finished(20).reason is Reason.REQUESTED
        finally:
            worker.terminate()
            worker.wait(20)
            worker.stdout.close()
        assert app.ledger.find(Query(states=(State.RUNNING,))).jobs == ()
        assert app.ledger.check() == []
