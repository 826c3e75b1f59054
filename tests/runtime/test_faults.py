"""Handlers with defects, in a real worker process: the log names them, the worker continues or ends, and no
job is lost."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from typing import Any

import pytest

import towpath
from tests.support import faulty
from tests.support.engine import expire
from tests.support.processes import enqueue, faulty_worker
from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, State, commands
from towpath.errors import JobFailed

pytestmark = pytest.mark.ledgers("sqlite", "postgres")

NO_TIME = 600.0

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


# Values that do not fit


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_that_do_not_fit_fail_their_job_alone(app: App) -> None:
    def odd(how: str) -> Any:
        if how == "unspeakable":
            raise TextlessError
        return (
            {"object": object(), "nested": nested(100_000), "text": "\ud800"}[how] if how != "fine" else how
        )

    async def aodd(how: str) -> Any:
        return odd(how)

    here, there = app.task(name="here", max_attempts=1)(aodd), app.task(name="there", max_attempts=1)(odd)
    with working(app, concurrency=1, deploy_window=0):
        for task in (here, there):
            for how, message in (
                ("object", "has no JSON form"),
                ("nested", "returned"),
                ("text", "returned"),
                ("unspeakable", "TextlessError"),
            ):
                with pytest.raises(JobFailed, match=message):
                    task.enqueue(how).result(WAIT)
            with pytest.raises(JobFailed, match="do not fit"):
                enqueue(app, task.kind, b'{"what": 1}').result(WAIT)
            with pytest.raises(JobFailed, match="do not fit"):
                enqueue(app, task.kind, b"\xff").result(WAIT)
            assert task.enqueue("fine").result(WAIT) == "fine"


# Exceptions that end a program


def test_exceptions_that_end_programs_fail_the_attempt(app: App) -> None:
    with faulty_worker(app) as worker:
        before = enqueue(app, "pid").result(WAIT)
        for where in ("loop", "thread", "process"):
            for how in faulty.ENDS:
                with pytest.raises(JobFailed, match=f"{how}: enough"):
                    enqueue(app, f"{where}.ends", b'{"how": "%s"}' % how.encode(), max_attempts=1).result(
                        WAIT
                    )
        assert enqueue(app, "pid").result(WAIT) == before
        assert worker.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_a_handler_that_takes_the_worker_with_it(app: App, where: str) -> None:
    neighbours = [enqueue(app, "pid") for _ in range(20)]
    dying = enqueue(app, f"{where}.dies")
    app.engine.start_caretaker()  # otherwise the note of the dead caretaker must expire first
    with faulty_worker(app, lease=2) as first:
        assert first.process.wait(WAIT) == 9
    with faulty_worker(app, lease=30) as second:
        assert dying.result(WAIT) == "survived"
        for each in neighbours:
            each.result(WAIT)
        assert second.end(signal.SIGTERM) == 0
    job = dying.status()
    assert (job.attempts, job.losses, job.failures) == (2, 1, 0)


def test_a_function_of_the_commit_that_ends_programs(app: App) -> None:
    @app.task(max_attempts=1)
    def pays(how: str) -> None:
        towpath.current().commit(lambda _: faulty.ENDS[how]())

    @app.task
    def plain() -> int:
        return 1

    with working(app):
        for how in faulty.ENDS:
            with pytest.raises(JobFailed, match=f"it raised {how}: enough"):
                pays.enqueue(how).result(WAIT)
        assert plain.enqueue().result(WAIT) == 1


# Forks


@forks
@pytest.mark.parametrize("where", ["loop", "thread", "process"])
def test_a_forked_child_that_comes_back_does_not_settle(app: App, where: str) -> None:
    pids = "process.pid" if where == "process" else "pid"
    with faulty_worker(app, concurrency=1) as worker:
        here = enqueue(app, pids).result(WAIT)
        for how, code in (("returns", 0), ("exits", 3), ("raises", 1), ("kills itself", -signal.SIGTERM)):
            handle = enqueue(app, f"{where}.forks", b'{"how": "%s"}' % how.encode(), max_attempts=1)
            assert handle.result(WAIT) == ["parent", code], how
            assert (handle.record().attempts, handle.record().fence) == (1, 1)
            # The replies of the processes are not mixed up afterwards, and no handler was asked to stop.
            assert enqueue(app, pids).result(WAIT) == here
        assert worker.end(signal.SIGTERM) == 0
        assert worker.silent()
    lines = [line for line in worker.lines if "returned from the handler and was ended" in line]
    assert len(lines) == 2, worker.lines
    assert any("ZeroDivisionError" in line for line in worker.lines)
    assert not any("lost" in line for line in worker.lines)


@forks
def test_a_forked_child_uses_a_ledger_of_its_own(app: App) -> None:
    with faulty_worker(app) as worker:
        handle = enqueue(app, "thread.forks", b'{"how": "reports"}')
        assert handle.result(WAIT) == ["parent", 0]
        there = enqueue(app, "process.forks", b'{"how": "reports"}')
        assert there.result(WAIT) == ["parent", 1]
        assert there.status().progress_done is None
        assert worker.end(signal.SIGTERM) == 0
        assert worker.silent()
    assert any("Forked: the pipe to the worker was opened by process" in line for line in worker.lines)


@forks
def test_a_process_of_the_standard_library_may_be_terminated(app: App) -> None:
    """The signal is for the child, which has inherited the worker's handlers and pipes."""
    with faulty_worker(app) as worker:
        assert enqueue(app, "terminates").result(WAIT) == [-signal.SIGTERM] * 20
        assert enqueue(app, "pid").result(WAIT) == worker.process.pid
        assert not any("SIGTERM" in line for line in worker.lines)
        assert worker.end(signal.SIGTERM) == 0


# Handlers that never return


@pytest.mark.parametrize("where", ["loop.refuses", "thread.hangs", "process.hangs"])
def test_a_worker_ends_although_a_handler_does_not(app: App, where: str) -> None:
    handle = enqueue(app, where)
    with faulty_worker(app, grace=0.1, last_word=1) as worker:
        worker.until("begun")
        assert worker.end(signal.SIGTERM) == 0
        assert worker.silent()
    assert "left" in worker.lines
    assert where == "process.hangs" or any(
        "its handler does not stop; the job is released" in line for line in worker.lines
    )
    job = handle.status()
    assert (job.state, job.reason, job.attempts) == (State.READY, "released", 0)


@pytest.mark.parametrize("kind", ["loop.blocks", "loop.is_deaf"])
def test_a_worker_with_a_blocked_loop_ends_after_its_stop_time(app: App, kind: str) -> None:
    handle = enqueue(app, kind)
    with faulty_worker(app, grace=0.1, last_word=0.2) as worker:
        worker.until("begun")
        assert worker.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert worker.silent()
    assert any("a handler blocks its event loop" in line for line in worker.lines)
    assert handle.status().state is State.RUNNING


def test_a_worker_with_a_blocked_loop_receives_the_second_signal(app: App) -> None:
    enqueue(app, "loop.blocks")
    with faulty_worker(app, grace=NO_TIME) as worker:
        worker.until("begun")
        worker.process.send_signal(signal.SIGINT)
        worker.until("no new jobs are claimed")
        while worker.process.poll() is None:
            worker.process.send_signal(signal.SIGINT)
            try:
                worker.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert worker.process.returncode == 128 + signal.SIGINT


def test_a_process_ends_with_its_killed_worker(app: App) -> None:
    enqueue(app, "process.hangs")
    with faulty_worker(app) as worker:
        there = int(worker.until("begun").split()[1])
        assert there != worker.process.pid
        assert worker.end(signal.SIGKILL) == -signal.SIGKILL
        assert worker.silent()


def test_a_timeout_shorter_than_the_start_of_a_process(app: App) -> None:
    handle = enqueue(app, "process.hangs", max_attempts=1, timeout=1)
    with faulty_worker(app) as worker:
        with pytest.raises(JobFailed, match="longer than"):
            handle.result(WAIT)
        assert worker.end(signal.SIGTERM) == 0


def test_a_thread_that_overstays_its_timeout_loses_its_job_and_keeps_its_slot(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, first_ended = threading.Event(), threading.Event()
    two = threading.Barrier(2)

    @app.task(timeout=0.05)
    def stuck() -> str:
        if towpath.current().attempt > 1:
            return "second"
        assert go_on.wait(WAIT)
        first_ended.set()
        return "first"

    @app.task
    def meets() -> int:
        return two.wait(WAIT)

    with working(app, concurrency=2, lease=1.5, grace=0.05):
        handle = stuck.enqueue()
        assert handle.result(WAIT) == "second"
        assert "its handler has not stopped" in caplog.text
        go_on.set()
        assert first_ended.wait(WAIT)
        pair = meets.enqueue_many([meets.of(), meets.of()])
        assert sorted(each.result(WAIT) for each in pair) == [0, 1]
    assert handle.status().result == "second"
    assert handle.status().losses == 1
    assert "Traceback" not in caplog.text


def test_a_job_that_is_claimed_again_beside_its_lost_run_keeps_the_slots_right(app: App) -> None:
    """Both slots are taken by runs of one job; another one waits for a slot and is not counted as started."""
    go_on = threading.Event()
    running: queue.Queue[int] = queue.Queue()

    @app.task
    def stuck() -> str:
        running.put(towpath.current().attempt)
        assert go_on.wait(WAIT)
        return "done"

    @app.task
    def other() -> str:
        return "other"

    with working(app, concurrency=2, grace=0.05):
        handle = stuck.enqueue()
        assert running.get(timeout=WAIT) == 1
        # Paused; otherwise it would be claimed again while the time still jumps, and lost twice.
        app.engine.call(commands.SetQueue(queue="default", paused=True))
        expire(app.ledger, handle.record())
        app.engine.call(commands.SetQueue(queue="default", paused=False))
        assert running.get(timeout=WAIT) == 2
        waiting = other.enqueue()
        app.engine.call(commands.Upkeep())
        assert waiting.status().attempts == 0
        go_on.set()
        assert waiting.result(WAIT) == "other"
        assert handle.result(WAIT) == "done"
