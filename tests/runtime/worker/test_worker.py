"""The worker on a real ledger file, with real handlers. Handlers and tests synchronize by events, without
sleeps."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

import towpath
from tests.support.running import working
from tests.support.waiting import WAIT, until
from towpath import App, Exponential, State, commands
from towpath.commands import GroupState, Query, Spec
from towpath.core.job import Reason
from towpath.errors import JobCanceled, JobFailed

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


def test_tasks_run_and_their_results_come_back(app: App) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    def shout(text: str) -> str:
        return text.upper()

    with working(app):
        assert double.enqueue(21).result(WAIT) == 42
        assert shout.enqueue("hey").result(WAIT) == "HEY"
        handles = double.enqueue_many([double.of(n) for n in range(500)])
        assert [handle.result(WAIT) for handle in handles] == [2 * n for n in range(500)]


def test_a_failure_is_retried_and_then_a_dead_letter(app: App) -> None:
    attempts: list[int] = []

    @app.task(max_attempts=3, backoff=0)
    async def flaky(good: int) -> str:
        attempts.append(towpath.current().attempt)
        if len(attempts) < good:
            raise ValueError("not yet")
        return "fine"

    with working(app):
        assert flaky.enqueue(3).result(WAIT) == "fine"
        attempts.clear()
        with pytest.raises(JobFailed, match="not yet"):
            flaky.enqueue(9).result(WAIT)
    assert attempts == [1, 2, 3]


def test_control_exceptions(app: App) -> None:
    seen: list[int] = []

    @app.task
    def snoozes() -> str:
        seen.append(towpath.current().attempt)
        if len(seen) == 1:
            raise towpath.Snooze(for_=0)
        return "awake"

    @app.task
    def stops() -> None:
        raise towpath.Cancel("no need")

    @app.task
    def dies() -> None:
        raise towpath.Fail("never again")

    with working(app):
        handle = snoozes.enqueue()
        assert handle.result(WAIT) == "awake"
        assert handle.status().failures == 0
        with pytest.raises(JobCanceled):
            stops.enqueue().result(WAIT)
        with pytest.raises(JobFailed, match="never again"):
            dies.enqueue().result(WAIT)


def test_unknown_kinds_are_put_off_and_not_failed(app: App) -> None:
    other = App(app.engine.url)

    @other.task(name="elsewhere")
    def elsewhere() -> None: ...

    @app.task
    def known() -> None: ...

    with other, working(app, queues=("*",)):
        handle = elsewhere.enqueue()
        known.enqueue().result(WAIT)
        until(lambda: handle.status().reason == "refused")
        job = handle.status()
    assert (job.state, job.reason, job.attempts, job.failures) == (State.SCHEDULED, "refused", 0, 0)


def test_a_timeout_stops_a_coroutine_and_a_process(app: App) -> None:
    never = asyncio.Event()

    @app.task(timeout=0.05, max_attempts=1)
    async def hangs() -> None:
        await never.wait()

    with working(app):
        with pytest.raises(JobFailed, match="longer than"):
            hangs.enqueue().result(WAIT)


def test_cancel_reaches_a_running_handler(app: App) -> None:
    started, ended = threading.Event(), threading.Event()

    @app.task
    async def patient() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with working(app, lease=0.3):
        handle = patient.enqueue()
        assert started.wait(WAIT)
        handle.cancel()
        with pytest.raises(JobCanceled):
            handle.result(WAIT)
        assert ended.wait(WAIT)


def test_cancel_is_seen_by_a_handler_in_a_thread(app: App) -> None:
    started = threading.Event()

    @app.task
    def patient() -> None:
        started.set()
        # A thread cannot be interrupted: the handler checks `cancelled`.
        until(lambda: towpath.current().cancelled)
        raise towpath.Cancel("asked to")

    with working(app, lease=0.3):
        handle = patient.enqueue()
        assert started.wait(WAIT)
        handle.cancel()
        with pytest.raises(JobCanceled):
            handle.result(WAIT)


def test_a_stopping_group_does_not_interrupt_its_running_handlers(app: App) -> None:
    """The loop and thread handlers that have begun end done; a claim that has not begun is not begun; a
    retry ends the job."""
    begun = threading.Semaphore(0)
    stopped, begun_late = threading.Event(), list[int]()

    def wait_for_the_stop() -> bool:
        begun.release()
        assert stopped.wait(WAIT)
        towpath.current().progress(1)
        return towpath.current().cancelled

    @app.task
    async def on_the_loop() -> bool:
        return await asyncio.to_thread(wait_for_the_stop)

    @app.task
    def in_a_thread() -> bool:
        return wait_for_the_stop()

    @app.task
    def again() -> None:
        wait_for_the_stop()
        raise ValueError("not yet")

    @app.task
    def late(n: int) -> None:
        begun_late.append(n)

    @app.task(max_attempts=1)
    def fails() -> None:
        for _ in range(3):
            assert begun.acquire(timeout=WAIT)
        raise ValueError("broken")

    calls = [on_the_loop.of(), in_a_thread.of(), again.of(), fails.of()]
    with working(app, lease=0.3, concurrency=4):
        group = app.group([*calls, *[late.of(n) for n in range(8)]], on_failure="stop")
        until(lambda: group.status().state is GroupState.ABORTING)
        jobs = {job.kind.rpartition(".")[2]: job for job in app.ledger.find(Query(group=group.id)).jobs}
        assert jobs["in_a_thread"].cancel_requested is Reason.STOPPED
        until(lambda: app.ledger.queues()["default"].counts.running == 3)
        # The heartbeat has passed the request.
        until_renewed(app, jobs["in_a_thread"].id)
        stopped.set()
        until(lambda: group.status().state is GroupState.CLOSED)
        found = {name: app.ledger.get(job.id) for name, job in jobs.items()}
    assert begun_late == []
    ends = {name: (job.state, job.reason, job.result) for name, job in found.items() if job is not None}
    assert ends["on_the_loop"] == ends["in_a_thread"] == (State.DONE, "", b"false")
    assert ends["again"] == (State.CANCELED, "stopped", None)
    assert ends["late"] == (State.CANCELED, "stopped", None)
    assert group.status().outcome is State.FAILED


def test_an_abort_interrupts_handlers_of_a_stopping_group(app: App) -> None:
    started = threading.Event()

    @app.task
    async def patient() -> None:
        started.set()
        await asyncio.Event().wait()

    with working(app, lease=0.3):
        group = app.group([patient.of()])
        assert started.wait(WAIT)
        app.engine.call(commands.Abort(group.id, stop=True))
        (job,) = app.ledger.find(Query(group=group.id)).jobs
        until_renewed(app, job.id)
        app.engine.call(commands.Abort(group.id))
        until(lambda: group.status().state is GroupState.CLOSED)
        assert app.ledger.get(job.id).reason is Reason.ABORTED  # type: ignore[union-attr]


def until_renewed(app: App, id: str) -> None:
    """Wait for two heartbeats: the reply to the first has been handled."""
    seen: set[int | None] = set()

    def renewed() -> bool:
        job = app.ledger.get(id)
        assert job is not None
        seen.add(job.lease_until)
        return len(seen) > 2

    until(renewed)


def test_drain_lets_running_jobs_finish_and_gives_the_rest_back(app: App) -> None:
    started, go_on = threading.Event(), threading.Event()

    @app.task
    def slow(n: int) -> int:
        started.set()
        assert go_on.wait(WAIT)
        return n

    with working(app, concurrency=1) as service:
        slow.enqueue_many([slow.of(n) for n in range(5)])
        assert started.wait(WAIT)
        service.stop()
        go_on.set()
    # A batch that was being applied at the stop may have claimed jobs; the next one releases them.
    until(lambda: app.ledger.queues()["default"].counts.running == 0)
    assert app.ledger.queues()["default"].counts.done >= 1
    for job in app.ledger.find(Query(states=(State.READY,))).jobs:
        assert job.attempts == 0


def test_a_handler_that_does_not_end_is_cancelled_after_the_grace(app: App) -> None:
    started = threading.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    with working(app, grace=0.05) as service:
        handle = endless.enqueue()
        assert started.wait(WAIT)
        service.stop()
    job = handle.status()
    assert (job.state, job.reason, job.attempts) == (State.READY, "released", 0)


def test_a_handler_may_enqueue_from_the_loop_and_from_a_thread(app: App) -> None:
    @app.task
    def leaf(n: int) -> int:
        return n

    @app.task
    async def from_the_loop() -> str:
        return (await leaf.aenqueue(1)).id

    @app.task
    def from_a_thread() -> str:
        return leaf.enqueue(2).id

    with working(app):
        first, second = from_the_loop.enqueue().result(WAIT), from_a_thread.enqueue().result(WAIT)
        assert app.job(first).result(WAIT) == 1
        assert app.job(second).result(WAIT) == 2


def test_a_function_inside_the_completion_that_raises_is_a_failure_like_any_other(app: App) -> None:
    """A fixed second between the attempts would take longer than the test waits."""

    def refuse(db: apsw.Connection) -> None:
        raise LookupError("no such account")

    def give_up(db: apsw.Connection) -> None:
        raise towpath.Fail("the account is closed")

    patience = towpath.Policy(default=Exponential(base=3600), by_error={LookupError: Exponential(base=0)})

    @app.task(max_attempts=100, backoff=patience)
    async def pay() -> None:
        towpath.current().commit(refuse)

    @app.task(backoff=3600)
    def close() -> None:
        towpath.current().commit(give_up)

    with working(app):
        closed, paid = close.enqueue(), pay.enqueue()
        with pytest.raises(JobFailed, match=r"fatal.*the account is closed"):
            closed.result(WAIT)
        with pytest.raises(JobFailed, match=r"exhausted.*LookupError: no such account"):
            paid.result(WAIT)
    job = paid.status()
    assert (job.attempts, job.failures) == (100, 100)
    assert "Traceback" in (job.error or "")
    assert "in refuse" in (job.error or "")


@pytest.mark.ledgers("sqlite")
def test_a_function_inside_the_completion_commits_with_it(app: App) -> None:
    app.ledger.apply([])
    path = app.engine.url.removeprefix("sqlite:///")
    mine = apsw.Connection(path)
    mine.execute("CREATE TABLE account (who TEXT PRIMARY KEY, amount INTEGER)")
    mine.execute("INSERT INTO account VALUES ('ada', 0)")

    @app.task(max_attempts=2, backoff=0)
    def pay(amount: int, fail: bool) -> None:
        def write(db: apsw.Connection) -> None:
            db.execute("UPDATE account SET amount = amount + ?", (amount,))
            if fail:
                raise ValueError("on second thoughts")

        towpath.current().commit(write)

    with working(app):
        pay.enqueue(5, False).result(WAIT)
        with pytest.raises(JobFailed, match="on second thoughts"):
            pay.enqueue(7, True).result(WAIT)
    assert next(mine.execute("SELECT amount FROM account")) == (5,)
    mine.close()


def test_a_handler_that_blocks_the_loop_is_named(app: App, caplog: pytest.LogCaptureFixture) -> None:
    seen = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "blocked" in record.getMessage() and "hogs" in record.getMessage():
                seen.set()

    @app.task
    async def hogs() -> bool:
        return seen.wait(WAIT)

    listener = Listener()
    logging.getLogger("towpath.worker").addHandler(listener)
    try:
        with working(app, lease=2.0):
            assert hogs.enqueue().result(WAIT) is True
    finally:
        logging.getLogger("towpath.worker").removeHandler(listener)


PROGRAM = """
import os, sys, time, signal
import towpath
app = towpath.App(sys.argv[1])

@app.task(process=True, timeout=0.5, max_attempts=1)
def hangs() -> None:
    signal.pause()

@app.task(process=True)
def pid(n: int) -> int:
    towpath.current().progress(n, 2 * n)
    return os.getpid()

@app.task(process=True, max_attempts=1)
def exits() -> None:
    os._exit(7)

@app.task
def here() -> int:
    return os.getpid()

if __name__ == "__main__":
    app.run(grace=5)
"""


def ask(app: App, kind: str, arguments: bytes = b"{}") -> str:
    """Append a job of a task that only the other process has."""
    timeout = 500_000 if kind == "hangs" else None
    spec = Spec(
        id=towpath.new_id(),
        queue="default",
        kind=f"program.{kind}",
        payload=arguments,
        max_attempts=1,
        timeout=timeout,
    )
    app.engine.call(commands.Append((spec,)))
    return spec.id


def test_a_worker_process_from_start_to_sigterm(app: App, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    worker = subprocess.Popen(
        [sys.executable, str(program), app.engine.url], stderr=subprocess.PIPE, text=True
    )
    try:
        ids = {"pid": ask(app, "pid", b'{"n": 3}'), "here": ask(app, "here")}
        there, here = app.job(ids["pid"]).result(WAIT), app.job(ids["here"]).result(WAIT)
        assert here == worker.pid
        assert there not in (here, os.getpid())
        assert app.job(ids["pid"]).status().progress_done == 3
        for kind, why in (("exits", "exit code 7"), ("hangs", "longer than")):
            with pytest.raises(JobFailed, match=why):
                app.job(ask(app, kind)).result(WAIT)
        worker.send_signal(signal.SIGTERM)
        _, output = worker.communicate(timeout=WAIT)
        assert worker.returncode == 0, output
    finally:
        worker.kill()
        worker.communicate()


def test_a_killed_worker_loses_nothing(app: App, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ids = [ask(app, "here") for _ in range(300)]
    worker = subprocess.Popen([sys.executable, str(program), app.engine.url], stderr=subprocess.DEVNULL)
    app.job(ids[50]).result(WAIT)
    worker.kill()
    worker.wait()

    @app.task(name="program.here")
    def here() -> int:
        return os.getpid()

    # Its leases would last for 30 s; an operator can name it as dead before.
    held = app.ledger.find(Query(states=(State.RUNNING,), limit=1000)).jobs
    app.ledger.apply([commands.Settle(job.id, job.fence, commands.Release()) for job in held])
    with working(app):
        for id in ids:
            app.job(id).result(WAIT)
    assert app.ledger.queues()["default"].counts.done == 300
