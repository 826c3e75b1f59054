"""An app at work: tasks on the loop, in threads and in processes; schedules; signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import handlers
from tests.support.running import claimed, worked
from towpath import App, JobHandle, State
from towpath.commands import Query
from towpath.core.job import Reason
from towpath.errors import JobCanceled, JobFailed
from towpath.operations.schedules import list_schedules
from towpath.operations.service import worker_options
from towpath.tasks.attempt import Attempt


def double(n: int) -> int:
    return 2 * n


async def adouble(n: int) -> int:
    return 2 * n


def test_tasks_on_the_loop_and_in_threads(app: App) -> None:
    here, there = app.task(adouble), app.task(double)

    async def main() -> list[int]:
        handles: list[JobHandle[int]] = []
        for n in range(50):
            handles.append(await (here if n % 2 else there).aenqueue(n))
        return [await each.aresult(20) for each in handles]

    assert worked(app, main) == [2 * n for n in range(50)]


def test_a_handler_is_asked_to_stop(app: App) -> None:
    started = asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.sleep(600)

    task = app.task(wait)

    async def main() -> str:
        handle = await task.aenqueue()
        await started.wait()
        await handle.acancel()
        app.engine.leases.renew(0.0)
        with pytest.raises(JobCanceled) as caught:
            await handle.aresult(20)
        return caught.value.reason

    assert worked(app, main) == "requested"


def test_processes() -> None:
    with handlers.app as app:

        async def main() -> None:
            first, second = await handlers.pid.aenqueue(1), await handlers.slowly.aenqueue(5)
            n, pid = await first.aresult(60)
            assert (n, pid != os.getpid()) == (1, True)
            assert (first.status().progress_done, first.status().cursor) == (1, {"n": 1})
            assert await second.aresult(60) == 5
            for how, message in [
                ("error", "ValueError: error"),
                ("exit", "exit code 3"),
                ("commit", "in this process"),
            ]:
                with pytest.raises(JobFailed, match=message):
                    await (await handlers.breaks.aenqueue(how)).aresult(60)
            with pytest.raises(JobFailed, match=r"longer than 0\.5 s"):
                await (await handlers.hangs.aenqueue()).aresult(60)
            child = app.job(await (await handlers.spawns.aenqueue()).aresult(60))
            assert await child.aresult(60) == 7
            with pytest.raises(JobFailed, match=r"longer than 0\.2 s"):
                await (await handlers.endless.aenqueue()).aresult(60)

        worked(app, main)


def test_a_process_that_died_idle_costs_the_next_job_nothing() -> None:
    with handlers.app as app:

        async def main() -> None:
            once = handlers.pid.options(max_attempts=1)
            pids = {(await each.aresult(60))[1] for each in [await once.aenqueue(n) for n in range(2)]}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for n in range(2):
                job = await once.aenqueue(n)
                assert (await job.aresult(60))[1] not in pids
                assert (job.status().attempts, job.status().failures) == (1, 0)

        worked(app, main)


def test_a_task_that_no_process_finds(app: App) -> None:
    task = app.task(process=True, max_attempts=1)(double_nothing)

    async def main() -> None:
        with pytest.raises(JobFailed, match="top level"):
            await (await task.aenqueue()).aresult(60)

    worked(app, main)


def test_declared_schedules_are_written_down(app: App) -> None:
    app.every(3600)(double_nothing)

    async def main() -> None:
        while not list_schedules(app.engine):
            await asyncio.sleep(0.001)

    worked(app, main)
    [schedule] = list_schedules(app.engine)
    assert schedule.name == "tests.operations.test_service.double_nothing"


def double_nothing() -> None: ...


def test_stopped_before_it_began(app: App) -> None:
    service = app._service({})
    service.stop()
    asyncio.run(service.arun())


def test_cancelled(app: App) -> None:
    async def main() -> None:
        for turns in range(8):
            task = asyncio.create_task(app.arun())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert app.engine.dispatcher.waiting == 0


def test_which_queues(app: App) -> None:
    assert worker_options(app._registry, app.settings, {}).queues == ("*",)
    app.task(queue="b")(double)
    app.task(queue="a")(adouble)
    assert worker_options(app._registry, app.settings, {}).queues == ("a", "b")
    assert worker_options(app._registry, app.settings, {"queues": ("c",), "lease": None}).queues == ("c",)
    assert worker_options(app._registry, app.settings, {"concurrency": 5}).concurrency == 5


SCRIPT = """
import sys, time, towpath
app = towpath.App(sys.argv[1])

@app.task(max_attempts=3)
def long() -> str:
    print("started", flush=True)
    time.sleep(float(sys.argv[2]))
    return "finished"

if __name__ == "__main__":
    long.enqueue()
    app.run(grace=60)
    print("left", flush=True)
"""


def insist(process: subprocess.Popen[str]) -> None:
    """Send the same signal until it has an effect: within half a second it counts as a repetition of the
    first."""
    for _ in range(100):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(0.1)
            return
        except subprocess.TimeoutExpired:
            continue


@pytest.mark.parametrize("signals", [1, 2])
def test_the_first_signal_drains_and_the_second_leaves(tmp_path: Path, signals: int) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", url, "0.5" if signals == 1 else "600"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            assert "no new jobs are claimed" in process.stderr.readline()
            insist(process)
        rest = process.stdout.read()
    with App(url) as app:
        [job] = app.ledger.find(Query()).jobs
        if signals == 1:
            assert (process.returncode, rest, job.state, job.result) == (
                0,
                "left\n",
                State.DONE,
                b'"finished"',
            )
        else:
            assert (process.returncode, rest, job.state) == (128 + signal.SIGTERM, "", State.RUNNING)


def test_attempts_know_how_they_end(app: App) -> None:
    task = app.task(double)
    task.enqueue(1)
    attempt = Attempt(app._registry, claimed(app), task)
    assert (attempt.mode, attempt.timeout) == ("thread", None)
    attempt.stop(Reason.REQUESTED)
    assert (attempt.running.asked, attempt.running.lost) == (Reason.REQUESTED, False)
    attempt.stop(Reason.LOST)
    assert attempt.running.lost
