"""Calls of the ledger from the committing thread: refused at once in a commit function, allowed in a listener
of the bus."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, State, commands, current
from towpath.errors import JobFailed, NestedCall
from towpath.events import JobSettled

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


def calls(app: App) -> dict[str, Callable[[Any], object]]:
    """Every call of the ledger that a user can make."""
    note = app.task(name="note")(_note)

    def batch(db: Any) -> None:
        with app.batch():
            note.enqueue(1)

    return {
        "enqueue": lambda db: note.enqueue(1),
        "aenqueue": lambda db: asyncio.run(_wait(note.aenqueue(1))),
        "enqueue_many": lambda db: note.enqueue_many([note.of(1), note.of(2)]),
        "on the connection": lambda db: note.options(on=db).enqueue(1),
        "batch": batch,
        "put": lambda db: app.queue("mail").put("x"),
        "get": lambda db: app.queue("mail").get(wait=WAIT),
        "aget": lambda db: asyncio.run(_wait(app.queue("mail").aget(wait=WAIT))),
        "call_all": lambda db: app.engine.call_all([commands.Upkeep(), commands.Upkeep()]),
        "acall_all": lambda db: asyncio.run(_wait(app.engine.acall_all([commands.Upkeep()]))),
        "read": lambda db: app.ledger.queues(),
        "result": lambda db: app.job("x").result(WAIT),
        "pause": lambda db: app.queue("mail").pause(),
        "cancel": lambda db: app.cancel("key"),
        "workers": lambda db: app.workers.list(),
        "close": lambda db: app.close(),
    }


def _note(n: int) -> None: ...


async def _wait(answer: Any) -> Any:
    return await answer


def test_a_commit_function_that_calls_the_ledger_fails_its_job_only(app: App) -> None:
    nested = calls(app)
    note = app.tasks["note"]

    @app.task(max_attempts=1)
    def bad(how: str) -> None:
        current().commit(nested[how])

    with working(app, concurrency=8):
        neighbours = note.enqueue_many([note.of(n) for n in range(20)])
        for how in nested:
            with pytest.raises(JobFailed, match="NestedCall"):
                bad.enqueue(how).result(WAIT)
        for each in neighbours:
            each.result(WAIT)
        note.enqueue(1).result(WAIT)


def test_a_listener_may_enqueue_and_wait(app: App) -> None:
    """A frequent hook: enqueue a job when another one has failed. A burst lasts until its jobs are done."""
    waited: list[State] = []

    @app.task
    def alert(id: str) -> str:
        return id

    @app.task(max_attempts=1)
    def bad(n: int) -> None:
        raise ValueError("x")

    def hook(event: JobSettled) -> None:
        if event.state == "failed":
            handle = alert.enqueue(event.id)
            if not waited:
                waited.append(handle.finished(WAIT).state)

    app.bus.subscribe(JobSettled, hook)
    failed = bad.enqueue_many([bad.of(n) for n in range(50)])
    app.run(burst=True)
    counts = app.ledger.queues()["default"].counts
    assert (counts.failed, counts.done) == (50, 50)
    assert waited == [State.DONE]
    assert {job.status().state for job in failed} == {State.FAILED}


def test_a_slow_listener_delays_no_commit(app: App) -> None:
    slow, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def hook(event: JobSettled) -> None:
        slow.set()
        assert go.wait(WAIT)
        seen.append(event.id)

    note = app.task(name="note")(_note)
    app.bus.subscribe(JobSettled, hook)
    with working(app):
        first = note.enqueue(0)
        assert slow.wait(WAIT)
        handles = note.enqueue_many([note.of(n) for n in range(100)])
        for each in handles:
            each.result(WAIT)
        assert seen == []
        go.set()
    app.close()
    assert sorted(seen) == sorted([first.id, *(each.id for each in handles)]), (
        "close delivers what is pending"
    )
    app.__enter__()


def test_an_inline_listener_cannot_wait_for_itself(app: App) -> None:
    refused: list[Exception] = []
    note = app.task(name="note")(_note)

    def hook(event: JobSettled) -> None:
        try:
            note.enqueue(1)
        except NestedCall as error:
            refused.append(error)

    app.bus.subscribe(JobSettled, hook, inline=True)
    with working(app):
        note.enqueue(1).result(WAIT)
    assert len(refused) == 1


HANGS = """
import sys, threading
from towpath import App, current
from towpath.runtime.commit import committer
from towpath.runtime.worker import worker

committer.CLOSE_TIMEOUT = worker.CLEANUP = 0.5
app = App(sys.argv[1])

@app.task(name="note")
def note(n: int) -> None: ...

@app.task(name="hangs")
def hangs(n: int) -> None:
    def function(db):
        # A nested call that cannot be detected.
        thread = threading.Thread(target=lambda: note.enqueue(n), daemon=True)
        thread.start()
        print("inside", flush=True)
        thread.join()
    current().commit(function)

with app:
    app.run(grace=0.1)
"""


def test_a_worker_with_a_hanging_commit_function_ends_at_the_first_signal(app: App) -> None:
    app.task(name="note")(_note)
    hangs = app.task(name="hangs")(lambda n: None)
    handle = hangs.enqueue(1)
    command = [sys.executable, "-c", HANGS, app.engine.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "inside\n"
        worker.send_signal(signal.SIGTERM)
        _, output = worker.communicate(timeout=WAIT)
    assert "a commit function has not returned" in output
    assert handle.status().state is State.RUNNING, "nothing of it was committed"
