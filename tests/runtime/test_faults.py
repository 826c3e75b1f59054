"""Handlers that misbehave, in a real worker process: the user is told, the worker goes on or ends, and no job
is lost."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import towpath
from tests.runtime.worker.test_worker import working
from tests.support import faulty
from tests.support.hosts import expire
from tests.support.waiting import WAIT
from towpath import App, JobHandle, Spec, State, commands
from towpath.errors import JobFailed

NO_TIME = 600.0

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App(f"sqlite:///{tmp_path / 'work.db'}") as app:
        app.ledger.apply([])
        yield app
        assert app.ledger.check() == []


class Talk:
    """A worker process and what it says, each line as it comes."""

    def __init__(self, app: App, **options: float) -> None:
        arguments = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-u", faulty.__file__, app.url, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in ("stdout", "stderr")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        stream.close()
        self._lines.put(None)

    def until(self, words: str) -> str:
        while True:
            line = self._lines.get(timeout=WAIT)
            assert line is not None, f"it ended without {words!r}: {self.said}"
            self.said.append(line)
            if words in line:
                return line

    def end(self, *numbers: signal.Signals) -> int:
        for number in numbers:
            self.process.send_signal(number)
        return self.process.wait(WAIT)

    def silent(self) -> bool:
        """Has everybody gone who held its pipes, also the processes it started?"""
        for reader in self._readers:
            reader.join(WAIT)
        while not self._lines.empty():
            self.said.append(self._lines.get() or "")
        return not any(reader.is_alive() for reader in self._readers)


@contextmanager
def worker(app: App, **options: float) -> Iterator[Talk]:
    talk = Talk(app, **options)
    try:
        yield talk
    finally:
        talk.process.kill()
        talk.process.wait()
        assert talk.silent(), "a process of the worker outlived it"


def ask(app: App, kind: str, arguments: bytes = b"{}", **fields: Any) -> JobHandle[Any]:
    fields = {"max_attempts": 20, **fields}
    spec = Spec(id=towpath.new_id(), queue="default", kind=kind, payload=arguments, **fields)
    app.call(commands.Append((spec,)))
    return app.job(spec.id)


# Values that do not fit


class Unspeakable(Exception):
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
            raise Unspeakable
        return (
            {"object": object(), "nested": nested(100_000), "text": "\ud800"}[how] if how != "fine" else how
        )

    async def aodd(how: str) -> Any:
        return odd(how)

    here, there = app.task(name="here", max_attempts=1)(aodd), app.task(name="there", max_attempts=1)(odd)
    with working(app, concurrency=1):
        for task in (here, there):
            for how, says in (
                ("object", "cannot be stored"),
                ("nested", "returned"),
                ("text", "returned"),
                ("unspeakable", "Unspeakable"),
            ):
                with pytest.raises(JobFailed, match=says):
                    task.enqueue(how).result(WAIT)
            with pytest.raises(JobFailed, match="do not fit"):
                ask(app, task.kind, b'{"what": 1}').result(WAIT)
            with pytest.raises(JobFailed, match="do not fit"):
                ask(app, task.kind, b"\xff").result(WAIT)
            assert task.enqueue("fine").result(WAIT) == "fine"


# What only ends programs


def test_exceptions_that_end_programs_fail_the_attempt(app: App) -> None:
    with worker(app) as talk:
        before = ask(app, "pid").result(WAIT)
        for where in ("loop", "thread", "process"):
            for how in faulty.ENDS:
                with pytest.raises(JobFailed, match=f"{how}: enough"):
                    ask(app, f"{where}.ends", b'{"how": "%s"}' % how.encode(), max_attempts=1).result(WAIT)
        assert ask(app, "pid").result(WAIT) == before
        assert talk.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_a_handler_that_takes_the_worker_with_it(app: App, where: str) -> None:
    neighbours = [ask(app, "pid") for _ in range(20)]
    dying = ask(app, f"{where}.dies")
    app.attend()  # else the dead one's time as caretaker must pass first
    with worker(app, lease=0.4) as first:
        assert first.process.wait(WAIT) == 9
    with worker(app, lease=0.4) as second:
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
    with worker(app, concurrency=1) as talk:
        here = ask(app, pids).result(WAIT)
        for how, code in (("returns", 0), ("exits", 3), ("raises", 1), ("kills itself", -signal.SIGTERM)):
            handle = ask(app, f"{where}.forks", b'{"how": "%s"}' % how.encode(), max_attempts=1)
            assert handle.result(WAIT) == ["parent", code], how
            assert (handle.status().attempts, handle.status().fence) == (1, 1)
            # The answers of a process are not mixed up afterwards, and nobody was told to stop.
            assert ask(app, pids).result(WAIT) == here
        assert talk.end(signal.SIGTERM) == 0
        assert talk.silent()
    told = [line for line in talk.said if "came back from the handler" in line]
    assert len(told) == 2, talk.said
    assert any("ZeroDivisionError" in line for line in talk.said)
    assert not any("lost" in line for line in talk.said)


@forks
def test_a_forked_child_uses_a_ledger_of_its_own(app: App) -> None:
    with worker(app) as talk:
        handle = ask(app, "thread.forks", b'{"how": "reports"}')
        assert handle.result(WAIT) == ["parent", 0]
        there = ask(app, "process.forks", b'{"how": "reports"}')
        assert there.result(WAIT) == ["parent", 1]
        assert there.status().progress_done is None
        assert talk.end(signal.SIGTERM) == 0
        assert talk.silent()
    assert any("Forked: the pipe to the worker was opened by process" in line for line in talk.said)


@forks
def test_a_process_of_the_standard_library_may_be_terminated(app: App) -> None:
    """The signal is for the child, which has inherited the worker's handlers and pipes."""
    with worker(app) as talk:
        assert ask(app, "terminates").result(WAIT) == [-signal.SIGTERM] * 20
        assert ask(app, "pid").result(WAIT) == talk.process.pid
        assert not any("SIGTERM" in line for line in talk.said)
        assert talk.end(signal.SIGTERM) == 0


# Handlers that never return


@pytest.mark.parametrize("where", ["loop.refuses", "thread.hangs", "process.hangs"])
def test_a_worker_ends_although_a_handler_does_not(app: App, where: str) -> None:
    handle = ask(app, where)
    with worker(app, grace=0.1, last_word=1) as talk:
        talk.until("started")
        assert talk.end(signal.SIGTERM) == 0
        assert talk.silent()
    assert "left" in talk.said
    assert where == "process.hangs" or any(
        "its handler does not stop; it is given back" in line for line in talk.said
    )
    job = handle.status()
    assert (job.state, job.reason, job.attempts) == (State.READY, "released", 0)


@pytest.mark.parametrize("kind", ["loop.blocks", "loop.is_deaf"])
def test_a_worker_whose_loop_is_blocked_leaves_after_its_patience(app: App, kind: str) -> None:
    handle = ask(app, kind)
    with worker(app, grace=0.1, last_word=0.2) as talk:
        talk.until("started")
        assert talk.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert talk.silent()
    assert any("a handler blocks its event loop" in line for line in talk.said)
    assert handle.status().state is State.RUNNING


def test_a_worker_whose_loop_is_blocked_hears_the_second_signal(app: App) -> None:
    ask(app, "loop.blocks")
    with worker(app, grace=NO_TIME) as talk:
        talk.until("started")
        talk.process.send_signal(signal.SIGINT)
        talk.until("no new jobs are taken")
        while talk.process.poll() is None:
            talk.process.send_signal(signal.SIGINT)
            try:
                talk.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert talk.process.returncode == 128 + signal.SIGINT


def test_a_process_ends_with_its_killed_worker(app: App) -> None:
    ask(app, "process.hangs")
    with worker(app) as talk:
        there = int(talk.until("started").split()[1])
        assert there != talk.process.pid
        assert talk.end(signal.SIGKILL) == -signal.SIGKILL
        assert talk.silent()


def test_a_timeout_shorter_than_the_start_of_a_process(app: App) -> None:
    handle = ask(app, "process.hangs", max_attempts=1, timeout=1)
    with worker(app) as talk:
        with pytest.raises(JobFailed, match="longer than"):
            handle.result(WAIT)
        assert talk.end(signal.SIGTERM) == 0


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

    with working(app, concurrency=2, lease=0.4, grace=0.05):
        handle = stuck.enqueue()
        assert handle.result(WAIT) == "second"
        assert "its handler does not stop" in caplog.text
        go_on.set()
        assert first_ended.wait(WAIT)
        pair = meets.enqueue_many([meets.of(), meets.of()])
        assert sorted(each.result(WAIT) for each in pair) == [0, 1]
    assert handle.status().result == b'"second"'
    assert handle.status().losses == 1
    assert "Traceback" not in caplog.text


def test_a_job_that_is_back_while_its_lost_run_lives_keeps_the_slots_right(app: App) -> None:
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
        # Paused, or it would be claimed again while the time still jumps, and lost twice.
        app.call(commands.SetQueue(queue="default", paused=True))
        expire(app.ledger, handle.status())
        app.call(commands.SetQueue(queue="default", paused=False))
        assert running.get(timeout=WAIT) == 2
        waiting = other.enqueue()
        app.call(commands.Upkeep())
        assert waiting.status().attempts == 0
        go_on.set()
        assert waiting.result(WAIT) == "other"
        assert handle.result(WAIT) == "done"
